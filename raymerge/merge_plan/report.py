"""What a finished run knows of its output: equal tensors, and errors of the encoding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from raymerge.architectures.roles import NameReader, stacks
from raymerge.architectures.rules import Role, rules_of
from raymerge.checkpoints.quantisation.block_codec import Exactness
from raymerge.merge_plan.plan import Plan, ints

_EXAMPLES = 5
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class DuplicateGroup:
    pattern: str
    """Their names, with ``*`` for each number."""
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Output that equals other output: computed once, written to each place."""

    policy: str
    tensors: int
    nbytes: int
    groups: tuple[DuplicateGroup, ...]
    """The same by names, those with most bytes first."""
    examples: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class FoundDuplicates:
    planned: Duplicates
    shared_bytes: int | None
    """Bytes of it that share storage; None where that was not asked for, or an earlier run saw to it."""
    unforeseen: tuple[DuplicateGroup, ...]
    """What was made more than once, since only its bytes tell that it is equal; most bytes first."""

    def __bool__(self) -> bool:
        return bool(self.planned.tensors or self.unforeseen)


def found_duplicates(plan: Plan, digests: Mapping[int, str], *, shared_bytes: int | None) -> FoundDuplicates:
    """What there is to say of equal output once all of it is made."""
    return FoundDuplicates(planned_duplicates(plan), shared_bytes, _groups(_found_equal(plan, digests)))


def planned_duplicates(plan: Plan) -> Duplicates:
    tensors, copy_of, nbytes = (ints(plan["ops"], name) for name in ("tensor", "copy_of", "nbytes"))
    copies = np.flatnonzero(copy_of >= 0)
    names = plan["tensors"].column("name")
    equal, first = (names.take(tensors[ops]).to_pylist() for ops in (copies, copy_of[copies]))
    pairs: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, other, size in zip(equal, first, nbytes[copies].tolist(), strict=True):
        pairs.setdefault(name, other)
        sizes[name] = sizes.get(name, 0) + size
    examples = tuple(pairs.items())[:_EXAMPLES]
    policy = str(plan.manifest["duplicates"])
    return Duplicates(policy, len(pairs), sum(sizes.values()), _groups(sizes.items()), examples)


def _found_equal(plan: Plan, digests: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    """Tensors whose bytes turned out to be those of an earlier one, though the plan did not know it."""
    ops = plan["ops"].select(["tensor", "copy_of", "expression"]).to_pylist()
    is_constant = [each.is_constant for each in plan.expressions]
    contents: dict[int, list[str]] = {}
    is_known: dict[int, bool] = {}
    for index, op in enumerate(ops):
        made = op["copy_of"] if op["copy_of"] >= 0 else index
        contents.setdefault(op["tensor"], []).append(digests.get(made, f"op {index}"))
        knows = op["copy_of"] >= 0 or is_constant[op["expression"]]
        is_known[op["tensor"]] = is_known.get(op["tensor"], True) and knows
    seen: set[tuple[str, ...]] = set()
    for number, tensor in enumerate(plan["tensors"].select(["name", "nbytes"]).to_pylist()):
        content = tuple(contents.get(number, ()))
        if content in seen and tensor["nbytes"] and not is_known[number]:
            yield tensor["name"], tensor["nbytes"]
        seen.add(content)


def _groups(sizes: Iterable[tuple[str, int]]) -> tuple[DuplicateGroup, ...]:
    nbytes_of: dict[str, list[int]] = {}
    for name, nbytes in sizes:
        nbytes_of.setdefault(_NUMBER.sub("*", name), []).append(nbytes)
    groups = [DuplicateGroup(pattern, len(each), sum(each)) for pattern, each in nbytes_of.items()]
    return tuple(sorted(groups, key=lambda group: (-group.nbytes, group.pattern)))


_DIGITS = 3
"""Digits that errors are told with. How sums over tiles are rounded hangs on the cut, and is far below."""

_Sums = tuple[float, float]
"""Sum of squared errors, and of the squares of the true values."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TensorError:
    name: str
    role: str
    relative_error: float
    """Norm of what was changed, as a part of the norm of the true values."""
    inexact_blocks: int = 0
    """Of what was converted: blocks that do not hold exactly the numbers that they were made of."""
    largest_error: float = 0.0
    """Of a number in these."""


@dataclass(frozen=True, slots=True)
class RoleError:
    role: str
    tensors: int
    relative_error: float
    """That of all of them as if they were one tensor."""
    worst: TensorError


@dataclass(frozen=True, slots=True)
class ErrorsAbove:
    """Tensors in which encoding changed more than the recipe takes without a word."""

    limit: float
    tensors: int
    worst: TensorError


@dataclass(frozen=True, slots=True)
class ConversionProof:
    """Whether what was converted, from one source alone, is exactly what it was, block by block."""

    tensors: int
    blocks: int
    inexact_tensors: int
    inexact_blocks: int
    worst: TensorError | None
    """The tensor with the largest error of a number; None where all is exact."""


@dataclass(frozen=True, slots=True)
class EncodingErrors:
    """What encoding changed in an output. What is only copied is not in it."""

    tensors: tuple[TensorError, ...]
    roles: tuple[RoleError, ...]
    proof: ConversionProof | None = None
    """None where nothing was converted."""

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def above(self, limit: float | None) -> ErrorsAbove | None:
        """The tensors with larger errors than a limit; None where there are none, and without a limit."""
        over = [] if limit is None else [each for each in self.tensors if each.relative_error > limit]
        return ErrorsAbove(limit, len(over), _worst(over)) if limit is not None and over else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def encoding_errors(
    plan: Plan, sums: Mapping[int, _Sums], exactness: Mapping[int, Exactness] | None = None
) -> EncodingErrors:
    """What encoding changed in each tensor of an output, from the sums of each op that was encoded, and from
    the blocks of each that was converted. A tensor whose codes were made for another one has the errors of
    that one."""
    totals = {each: _added(own) for each, own in _by_tensor(plan, sums).items()}
    if not totals:
        return EncodingErrors((), ())
    blocks = {each: reduce(Exactness.plus, own) for each, own in _by_tensor(plan, exactness or {}).items()}
    roles = _roles(plan, totals)
    names = plan["tensors"].column("name").to_pylist()
    tensors = {
        each: TensorError(names[each], roles[each], _relative(total), *blocks.get(each, (0, 0, 0.0))[1:])
        for each, total in totals.items()
    }
    order = [role.value for role in Role]
    lines = []
    for role in sorted(set(roles.values()), key=order.index):
        own = [number for number, each in tensors.items() if each.role == role]
        error = _relative(_added(totals[number] for number in own))
        lines.append(RoleError(role, len(own), error, _worst([tensors[number] for number in own])))
    proof = _proof(blocks, [tensors[each] for each in blocks]) if blocks else None
    return EncodingErrors(tuple(tensors.values()), tuple(lines), proof)


def _proof(blocks: Mapping[int, Exactness], tensors: Sequence[TensorError]) -> ConversionProof:
    inexact = [each for each in tensors if each.inexact_blocks]
    return ConversionProof(
        tensors=len(tensors),
        blocks=sum(each.blocks for each in blocks.values()),
        inexact_tensors=len(inexact),
        inexact_blocks=sum(each.inexact_blocks for each in inexact),
        worst=max(inexact, key=lambda each: each.largest_error, default=None),
    )


def _by_tensor(plan: Plan, of_ops: Mapping[int, _T]) -> dict[int, list[_T]]:
    by_tensor: dict[int, list[_T]] = {}
    for row, (tensor, copy_of) in enumerate(plan.columns("ops", "tensor", "copy_of") if of_ops else ()):
        own = of_ops.get(row if copy_of < 0 else copy_of)
        if own is not None:
            by_tensor.setdefault(tensor, []).append(own)
    return {tensor: by_tensor[tensor] for tensor in sorted(by_tensor)}


def _roles(plan: Plan, tensors: Iterable[int]) -> dict[int, str]:
    names, config = plan["tensors"].column("name").to_pylist(), plan.manifest["config"]
    rules, all_stacks = rules_of(config), stacks(names, config)
    reader = NameReader(rules, stacks=all_stacks)
    return {each: reader.describe(names[each]).role.value for each in tensors}


def _worst(tensors: Sequence[TensorError]) -> TensorError:
    return max(tensors, key=lambda each: each.relative_error)


def _added(sums: Iterable[_Sums]) -> _Sums:
    errors, values = zip(*sums, strict=True)
    return math.fsum(errors), math.fsum(values)


def _relative(sums: _Sums) -> float:
    errors, values = sums
    # Zeros are encoded as zeros.
    exact = math.sqrt(errors / values) if values else 0.0
    return float(f"{exact:.{_DIGITS}g}")
