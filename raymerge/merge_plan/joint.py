"""Plans whose outputs lie alike, carried out together: what they read alike is read once."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymerge.merge_plan.jobs import GatheredInput, Input, JobPart, OpJob, Variant
from raymerge.merge_plan.plan import Ints, Plan, codes, digest, input_bytes, ints, lists, makers

_READING = ("parts", "inputs", "scales", "gathers", "gather_inputs", "factors", "runs")
_LAYOUT: Mapping[str, tuple[str, ...]] = {
    "shards": ("name", "nbytes"),
    "segments": ("first_op", "num_ops", "shard"),
    "ops": ("shard", "offset", "nbytes"),
}


def joint_groups(plans: Sequence[Plan], *, in_order: bool = False) -> tuple[tuple[int, ...], ...]:
    """The plans that can be carried out together, by position: their shards, segments and ops lie alike.
    ``in_order``: shards are made from begin to end, so that also the same ops are made with others."""
    groups: dict[str, list[int]] = {}
    for number, plan in enumerate(plans):
        tables = {name: plan[name].select(columns) for name, columns in _LAYOUT.items()}
        if in_order:
            tables["makers"] = pa.table({"maker": makers(plan)})
        groups.setdefault(digest({}, tables), []).append(number)
    return tuple(map(tuple, groups.values()))


def with_tables_of(plan: Plan, other: Plan) -> Plan:
    """The plan with the other's tables where they are equal, so that both take hardly more memory than one
    does, and travel as one."""
    tables = {
        name: other[name] if table.equals(other[name]) else table for name, table in plan.tables.items()
    }
    return replace(plan, tables=tables)


def joint_costs(plans: Sequence[Plan]) -> list[int]:
    """Bytes that each segment reads and writes for all of these plans."""
    if len(plans) == 1:
        costs: list[int] = plans[0]["segments"].column("cost").to_pylist()
        return costs
    read = joint_read_bytes(plans)
    return [int(each) for each in sum((_written_bytes(plan) for plan in plans), start=read)]


def joint_read_bytes(plans: Sequence[Plan]) -> Ints:
    """Bytes that each segment is read from for all of these plans ``[segments]``: what several read alike
    counts once, unless their ops are made apart."""
    files: dict[Hashable, int] = {}
    known: list[tuple[object, ...]] = []
    apart, columns = np.zeros(len(plans[0]["segments"]), dtype=np.int64), list[Ints]()
    for plan in plans:
        own = _reads(plan, files)
        apart += own.apart
        tables = plan["inputs"], plan["ops"], plan["scales"], plan.manifest["sources"]
        if not any(all(one is two or one == two for one, two in zip(tables, t, strict=True)) for t in known):
            columns.append(own.columns)
            known.append(tables)
    # Nothing of one plan is read twice in the same op.
    distinct = columns[0] if len(columns) == 1 else np.unique(np.concatenate(columns, axis=1), axis=1)
    shared = np.bincount(distinct[0], weights=distinct[-1], minlength=len(apart))
    return np.asarray(apart + shared.astype(np.int64))


class _Reads(NamedTuple):
    columns: Ints
    """Segment, op, file, offset, gather and bytes of each input that others may read too ``[6, inputs]``."""
    apart: Ints
    """Bytes read by ops that are made by themselves ``[segments]``."""


def _reads(plan: Plan, files: dict[Hashable, int]) -> _Reads:
    """``files`` numbers what is read by what it is, for all plans."""
    ops, inputs, segments = plan["ops"], plan["inputs"], plan["segments"]
    joined, _ = lists(ops, "joined_with")
    is_made = (ints(ops, "copy_of") < 0) & (ints(ops, "made_with") < 0)
    of_input = np.repeat(np.arange(len(ops)), ints(ops, "num_inputs"))
    gathers, gather = plan["gathers"], ints(inputs, "gather")
    # The last is that of inputs that are not gathered.
    is_padded = np.append(ints(gathers, "real_rows") < ints(gathers, "num_rows"), False)[gather]
    padded = np.bincount(of_input[is_padded], minlength=len(ops))
    taken = (is_made & (joined == 0) & (padded == 0))[of_input]
    segment = np.searchsorted(ints(segments, "first_op"), of_input, side="right") - 1
    keys, words = codes(inputs, "key")
    sources = [json.dumps(each, sort_keys=True) for each in plan.manifest["sources"]]
    pairs, which = np.unique(np.stack([ints(inputs, "source"), keys]), axis=1, return_inverse=True)
    numbers = [files.setdefault((sources[s], words[k]), len(files)) for s, k in pairs.T.tolist()]
    nbytes = input_bytes(plan)
    file = np.array(numbers, dtype=np.int64)[which.reshape(-1)]
    columns = np.stack([segment, of_input, file, ints(inputs, "offset"), gather, nbytes])[:, taken]
    own = np.bincount(segment[taken], weights=nbytes[taken], minlength=len(segments)).astype(np.int64)
    return _Reads(columns, ints(segments, "cost") - _written_bytes(plan) - own)


def _written_bytes(plan: Plan) -> Ints:
    """Bytes of the ops that each segment makes ``[segments]``."""
    ops, segments = plan["ops"], plan["segments"]
    is_made = (ints(ops, "copy_of") < 0) & (ints(ops, "made_with") < 0)
    sums = np.append(0, np.cumsum(np.where(is_made, ints(ops, "nbytes"), 0)))
    first = ints(segments, "first_op")
    return np.asarray(sums[first + ints(segments, "num_ops")] - sums[first], dtype=np.int64)


def equal_tensors(plans: Sequence[Plan]) -> tuple[int, int]:
    """How many tensors are made of the same bytes in the same way in all plans that read alike, and their
    bytes; none of plans that read otherwise."""
    first = plans[0]
    alike = all(
        all(plan.manifest[key] == first.manifest[key] for key in ("sources", "seed"))
        and all(plan[name].equals(first[name]) for name in _READING)
        for plan in plans[1:]
    )
    if not alike:
        return 0, 0
    ids: dict[str, int] = {}
    made = [
        np.asarray([ids.setdefault(json.dumps(each), len(ids)) for each in plan.manifest["expressions"]])[
            ints(plan["ops"], "expression")
        ]
        for plan in plans
    ]
    differs = np.any([own != made[0] for own in made], axis=0)
    is_equal = np.ones(len(first["tensors"]), dtype=bool)
    is_equal[ints(first["ops"], "tensor")[differs]] = False
    return int(is_equal.sum()), int(ints(first["tensors"], "nbytes")[is_equal].sum())


def joint_ops(by_output: Iterable[Sequence[OpJob]], order: Iterable[int] | None = None) -> list[OpJob]:
    """The ops of one segment of several plans, in ``order`` of their numbers, None for ascending ones: those
    that are made at one place, of inputs of which one op's are all that is read, as one; all others as they
    are."""
    by_place: dict[int, list[OpJob]] = {}
    for ops in by_output:
        for op in ops:
            by_place.setdefault(op.index, []).append(op)
    numbers = sorted(by_place) if order is None else order
    return [joint for index in numbers for joint in _joined(by_place[index])]


def _joined(ops: Sequence[OpJob]) -> list[OpJob]:
    groups: dict[Hashable, list[OpJob]] = {}
    for op in ops:
        groups.setdefault(_form(op), []).append(op)
    return [each for group in groups.values() for each in (_union(group) if len(group) > 1 else group)]


def _form(op: OpJob) -> Hashable:
    """What ops have in common that are made of one read; nothing with any other for one that is made apart.

    Codes that share one scale with other matrices are made after a look at those, and padded rows after a
    look at all of them."""
    padded = any(isinstance(each, GatheredInput) and each.is_padded for each in op.inputs)
    if padded or op.joined_with or op.expression.is_unread:
        return op.output
    parts = tuple((part.shape, part.view, len(part.inputs) if len(op.parts) > 1 else 0) for part in op.parts)
    return op.first_element, op.num_elements, op.is_flat, parts


def _union(ops: Sequence[OpJob]) -> Sequence[OpJob]:
    """One op of the inputs of all; the ops themselves where its parts would have unequally many inputs."""
    parts: list[JobPart] = []
    selections: list[list[int]] = [[] for _ in ops]
    for number, part in enumerate(ops[0].parts):
        numbers: dict[Hashable, int] = {}
        inputs: list[Input] = []
        before = sum(len(each.inputs) for each in parts)
        for own, op in zip(selections, ops, strict=True):
            for each in op.parts[number].inputs:
                if (key := _identity(each)) not in numbers:
                    numbers[key] = len(inputs)
                    inputs.append(each)
                own.append(before + numbers[key])
        parts.append(replace(part, inputs=tuple(inputs)))
    if len({len(part.inputs) for part in parts}) > 1:
        return ops
    # What may take the place of its inputs is made last.
    last = len(ops) - 1
    order = sorted(range(len(ops)), key=lambda number: ops[number].need.in_place)
    variants = [
        Variant(replace(ops[number], leaves_inputs=position < last), tuple(selections[number]))
        for position, number in enumerate(order)
    ]
    return (replace(ops[0], parts=tuple(parts), variants=tuple(variants)),)


def _identity(source: Input) -> Hashable:
    """What equal inputs have in common."""
    if not isinstance(source, GatheredInput):
        return source
    sizes = source.num_rows, source.num_columns, source.real_rows
    return *sizes, source.inputs, source.runs.tobytes()
