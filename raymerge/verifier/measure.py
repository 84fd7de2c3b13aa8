"""Measures what the parents of a plan do to its tensors: from a sample of every tensor, or from all of it.

Reads sources and output by themselves, so that a merge need not run, or may have run long ago."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.architectures.roles import NameReader, TensorInfo, stacks
from raymerge.architectures.rules import Role, rules_of
from raymerge.errors import CheckpointError, IncompleteError
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import Input, JobPart, Jobs, OpJob
from raymerge.merge_plan.plan import Plan
from raymerge.methods.internal import LARGEST
from raymerge.storage.store import ReadStore
from raymerge.units import format_size
from raymerge.verifier.measurements import (
    ARRAYS,
    SKETCH,
    Floats,
    Label,
    Measurements,
    RouterRows,
    shapes_of,
    shared_sums,
)
from raymerge.verifier.stored import Reader, as_input, elements_of, sources_of

_SAMPLE = 1 << 14
"""Elements that are read of a tensor; of the experts of a layer together."""
_LEAST = 1 << 11
"""Elements that are read of one expert at least."""
_RUNS = 8
"""Runs that a sample is read in: enough to tell how much it may be off, few enough for an object store."""
_CHUNK = _SAMPLE
"""Elements at once where all are read: as many whatever the memory, as sums hang on them."""
_LARGEST_SHARE = 5
"""Of the elements with the largest changes every fifth counts for the overlap."""
_BF16_BITS = 8
_ELEMENT_BYTES = 8 * 10
"""Bytes of memory for an element of an input: in float64, and what is computed of it."""
"""What makes scales of activations: no tensors of parents."""
BASE = -1
"""Stands for the base among the models of a router's rows."""
_SIGNS = np.random.default_rng(0).choice((-1.0, 1.0), _CHUNK)


class InputKey(NamedTuple):
    source: int
    """Index of a source in the plan."""
    again: int
    """How often the same source came before in the same op."""


@dataclass(frozen=True, slots=True)
class MeasureSpec:
    plan: Plan
    absent: Mapping[int, str]
    """Unreadable sources by index in the plan, with the reason."""
    budget: int
    """Bytes of memory for one part in hand."""
    is_exact: bool

    def examiner(self, sources: Sequence[ReadStore], output: ReadStore | None) -> Measurer:
        return Measurer(self, sources, output)


class Measurer:
    def __init__(self, spec: MeasureSpec, sources: Sequence[ReadStore], output: ReadStore | None) -> None:
        self._spec, self._sources, self._output = spec, sources, output
        self._jobs = Jobs(spec.plan)
        self._describe = describer(spec.plan)
        self._num_experts = _num_experts(spec.plan, self._describe)
        self._owners = owners(spec.plan)
        self._aborted = threading.Event()

    def abort(self) -> None:
        self._aborted.set()

    def examine(self, segment: int) -> tuple[dict[str, Any], int]:
        """The sums of a segment's logical tensors as JSON values, and the bytes read. Raises IncompleteError
        after ``abort``."""
        rows: list[dict[str, Any]] = []
        routers: list[dict[str, Any]] = []
        skipped: Counter[str] = Counter()
        reader = Reader(self._sources)
        output = None if self._output is None else Reader([self._output])
        for op in self._jobs.ops(segment):
            if self._aborted.is_set():
                raise IncompleteError("stopped in the middle of a segment. The same command begins anew.")
            if op.expression.is_copy or op.expression.is_unread or not op.num_elements:
                continue
            if op.expression.method == LARGEST.name:
                continue
            reason = self._lack(op)
            if reason:
                skipped[reason] += 1
                continue
            try:
                for number, part in enumerate(op.parts):
                    own = _Part(op, part, reader, output, self._owners)
                    place, num_fused = {"op": op.index, "part": number}, self._num_fused(part)
                    rows += [
                        {**place, **each} for each in own.sums(num_fused, self._sampled(part, num_fused))
                    ]
                    if op.first_element == 0 and self._is_router(part):
                        routers += [{"op": op.index, **each} for each in own.router_rows()]
            except CheckpointError as error:
                skipped[f"it cannot be read: {error.problems[0].what}"] += 1
        read_bytes = reader.nbytes + (0 if output is None else output.nbytes)
        return {"rows": rows, "routers": routers, "skipped": skipped}, read_bytes

    def _lack(self, op: OpJob) -> str:
        """Why an op is not measured; "" where it is."""
        absent = next((self._spec.absent[s] for s in sorted(sources_of(op)) if s in self._spec.absent), "")
        if absent:
            return absent
        if not op.expression.has_base and all(len(part.inputs) < 2 for part in op.parts):
            return "it is made of one model alone, with nothing to compare"
        held = max(map(_held_by, op.parts))
        if held > self._spec.budget:
            return (
                f"it takes {format_size(held)} at once, and a worker may use {format_size(self._spec.budget)}"
            )
        return ""

    def _num_fused(self, part: JobPart) -> int:
        """Experts that lie one after the other in a logical tensor; 0 where it is not of several."""
        info = self._describe(part.logical)
        is_fused = info.part is Role.EXPERT and info.expert is None and len(part.shape) > 2
        return part.shape[0] if is_fused else 0

    def _sampled(self, part: JobPart, num_fused: int) -> int:
        """Elements to read of a tensor of this kind, or of each of the fused experts in it; 0 for all."""
        if self._spec.is_exact:
            return 0
        if num_fused or self._describe(part.logical).expert is not None:
            return max(_LEAST, _SAMPLE // max(1, num_fused or self._num_experts))
        return _SAMPLE

    def _is_router(self, part: JobPart) -> bool:
        info = self._describe(part.logical)
        is_matrix = len(part.shape) == 2 and 1 < part.shape[0] < part.shape[1]
        return info.part is Role.ROUTER and not info.is_bias and is_matrix


Describe: TypeAlias = Callable[[str], TensorInfo]


def describer(plan: Plan) -> Describe:
    """What tensors of the output are, by their names."""
    names, config = plan["tensors"].column("name").to_pylist(), plan.manifest["config"]
    reader = NameReader(rules_of(config), stacks=stacks(names, config))
    return reader.describe


def _num_experts(plan: Plan, describe: Describe) -> int:
    numbers = (describe(name).expert for name in plan["parts"].column("logical").unique().to_pylist())
    return max((number for number in numbers if number is not None), default=-1) + 1


def _held_by(part: JobPart) -> int:
    own = _CHUNK * _ELEMENT_BYTES * (len(part.inputs) + 1)
    return own + sum(_held(each) for each in part.inputs)


def _held(source: Input) -> int:
    """Bytes of memory beside those of a run."""
    if not isinstance(source, Read) or source.view is None or source.view.is_flat:
        return 0
    return 8 * (source.nbytes * 8 // source.dtype.bits + source.view.num_elements)


def owners(plan: Plan) -> list[int]:
    """For each source the model that it stands for: itself, or the one that a stage's result is of."""
    names = [str(each["name"]) for each in plan.manifest["sources"]]
    models = [number for number, each in enumerate(plan.manifest["sources"]) if "made_by" not in each]
    models_of = []
    for number, name in enumerate(names):
        of = [model for model in models if name.endswith(f" {names[model]}")]
        longest = max(of, key=lambda model: len(names[model]), default=number)
        models_of.append(number if number in models else longest)
    return models_of


def _source_of(source: Input) -> int:
    return source.source if isinstance(source, Read) else source.inputs[0].read.source


class _Part:
    """One logical tensor of an op, as its inputs and the output have it."""

    def __init__(
        self, op: OpJob, part: JobPart, reader: Reader, output: Reader | None, owner: Sequence[int]
    ) -> None:
        self._shape, self._has_base = part.shape, op.expression.has_base
        is_cut = len(op.parts) == 1 and part.view is None
        self._first = op.first_element if is_cut else 0
        self._stop = self._first + (op.num_elements if is_cut else prod(part.shape))
        self._inputs = [elements_of(each, reader, first=self._first) for each in part.inputs]
        self._merged = None
        if output is not None:
            self._merged = elements_of(as_input(op, part.view), output, first=self._first)
        sources = [owner[_source_of(each)] for each in part.inputs]
        own = sources[self._has_base :]
        self._keys = [InputKey(each, own[:number].count(each)) for number, each in enumerate(own)]
        self._base = sources[0] if self._has_base else BASE

    def sums(self, num_fused: int, sampled: int) -> Iterator[dict[str, Any]]:
        """The sums of this tensor, or of each of the fused experts in it, as JSON values.

        ``sampled``: elements to read of each, 0 for all."""
        if not num_fused:
            # A tensor that is cut into several ops has one sample, in parts.
            share = sampled * (self._stop - self._first) // prod(self._shape)
            yield self._sums((self._first, self._stop), max(_LEAST, share) if sampled else 0)
            return
        size = prod(self._shape) // num_fused
        for expert in range(self._first // size, -(-self._stop // size)):
            own = max(self._first, expert * size), min(self._stop, (expert + 1) * size)
            yield {"expert": expert, **self._sums(own, sampled)}

    def _sums(self, span: tuple[int, int], sampled: int) -> dict[str, Any]:
        total: dict[str, Floats] = {}
        elements, read = span[1] - span[0], 0
        for runs in self._blocks(span, sampled):
            lengths = [stop - start for start, stop in runs]
            read += sum(lengths)
            own = self._block(runs, np.cumsum([0, *lengths[:-1]]))
            for name, values in own.items():
                before = total.get(name)
                joined = np.maximum if name == "largest" else np.add
                total[name] = values if before is None else joined(before, values)
        scale = elements / read
        scaled = {name: values if name in _UNSCALED else values * scale for name, values in total.items()}
        scaled["variance"] *= 0 if read == elements else elements**2 * (1 - read / elements)
        facts = {"inputs": [list(key) for key in self._keys], "base": self._base}
        counts = {"elements": float(elements), "sampled": float(read)}
        return {**facts, **counts, "sums": {name: np.ravel(each).tolist() for name, each in scaled.items()}}

    def _blocks(self, span: tuple[int, int], sampled: int) -> Iterator[list[tuple[int, int]]]:
        """Runs of elements that are measured together."""
        if 0 < sampled < span[1] - span[0]:
            yield _runs(*span, sampled)
            return
        for start in range(*span, _CHUNK):
            yield [(start, min(start + _CHUNK, span[1]))]

    def _block(self, runs: Sequence[tuple[int, int]], begins: NDArray[np.int64]) -> dict[str, Floats]:
        values = np.concatenate([np.stack([e.read(*run)[0] for e in self._inputs]) for run in runs], axis=1)
        merged = None
        if self._merged is not None:
            merged = np.concatenate([self._merged.read(*run)[0] for run in runs])
        base, parents = (values[0], values[1:]) if self._has_base else (None, values)
        return {**sums_of(base, parents, merged), "variance": _variance(base, parents, begins)}

    def router_rows(self) -> Iterator[dict[str, Any]]:
        """The rows of this router in each model against those of the base, or of the first model."""
        rows = [_unit_rows(each.read(0, prod(self._shape))[0].reshape(self._shape)) for each in self._inputs]
        keys: list[Any] = [list(key) for key in self._keys]
        other, *models = [BASE, *keys] if self._has_base else keys
        for model, own in zip(models, rows[1:], strict=True):
            cosines = own @ rows[0].T
            nearest = cosines.argmax(1)
            yield {
                "models": [model, other],
                "own": np.diag(cosines).tolist(),
                "nearest": nearest.tolist(),
                "nearest_cosines": cosines[np.arange(len(nearest)), nearest].tolist(),
            }


_UNSCALED = frozenset({"largest", "sketches", "variance"})


def _runs(first: int, stop: int, sampled: int) -> list[tuple[int, int]]:
    """Runs of one sample, spread over the tensor; the same for all tensors of one size."""
    length = max(SKETCH, sampled // _RUNS // SKETCH * SKETCH)
    bounds = np.linspace(first, stop, _RUNS + 1).astype(np.int64).tolist()
    chance = np.random.default_rng((first, stop))
    starts = [begin + int(chance.random() * max(0, end - begin - length)) for begin, end in pairwise(bounds)]
    return [(start, min(start + length, stop)) for start in starts]


def sums_of(base: Floats | None, parents: Floats, merged: Floats | None) -> dict[str, Floats]:
    """The sums of ``Measurements`` over some elements: ``parents`` ``[K, n]`` and the others ``[n]``."""
    origin = np.zeros(parents.shape[1]) if base is None else base
    deltas = parents - origin
    magnitudes = np.abs(deltas)
    pairs = np.array([[np.abs(one + other).sum() for other in deltas] for one in deltas])
    change = None if merged is None else merged - origin
    none = np.zeros(len(parents))
    return {
        "base": np.full(len(parents), _dots(origin[None], origin[None])[0, 0]),
        "gram": _dots(deltas, deltas),
        "magnitudes": magnitudes.sum(1),
        "magnitude_of_sum": np.abs(deltas.sum(0)).sum(),
        "pair_magnitudes": pairs,
        "zeros": (deltas == 0).sum(1).astype(np.float64),
        "invisible": none if base is None else _invisible(base, magnitudes),
        "largest": magnitudes.max(1, initial=0.0),
        "overlap": _overlap(magnitudes),
        "merged": np.asarray(0.0) if change is None else _dots(change[None], change[None])[0, 0],
        "merged_dots": none if change is None else _dots(deltas, change[None])[:, 0],
        "sketches": _sketch(np.vstack([parents, origin])),
    }


def _dots(one: Floats, other: Floats) -> Floats:
    # Not by BLAS: its sums hang on its threads, and starting these takes longer than the sums.
    return np.asarray(np.einsum("jn,kn->jk", one, other))


def _invisible(base: Floats, magnitudes: Floats) -> Floats:
    _, exponents = np.frexp(base)
    steps = np.where(base == 0, 0.0, np.ldexp(1.0, exponents - _BF16_BITS))
    return np.asarray(((magnitudes > 0) & (magnitudes < steps)).sum(1), dtype=np.float64)


def _overlap(magnitudes: Floats) -> Floats:
    count = magnitudes.shape[1]
    place = count - max(1, count // _LARGEST_SHARE)
    thresholds = np.partition(magnitudes, place, axis=1)[:, place]
    is_large = ((magnitudes >= thresholds[:, None]) & (magnitudes > 0)).astype(np.float64)
    both, own = _dots(is_large, is_large), is_large.sum(1)
    either = own[:, None] + own[None, :] - both
    return np.asarray(np.where(either > 0, both / np.maximum(either, 1), 0.0) * count)


def _sketch(values: Floats) -> Floats:
    count = values.shape[1]
    padded = np.zeros((len(values), -(-count // SKETCH) * SKETCH))
    padded[:, :count] = values * _SIGNS[:count]
    return np.asarray(padded.reshape(len(values), -1, SKETCH).sum(1))


def _variance(base: Floats | None, parents: Floats, begins: NDArray[np.int64]) -> Floats:
    """Of the mean of squared changes, from how the runs differ; 0 for a single run."""
    deltas = parents if base is None else parents - base
    squares = (deltas**2).sum(0)
    lengths = np.diff([*begins, len(squares)])
    means = np.add.reduceat(squares, begins) / np.maximum(lengths, 1)
    return np.asarray(means.var(ddof=1) / len(means) if len(means) > 1 else 0.0)


def _unit_rows(rows: Floats) -> Floats:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))


_LABELS = tuple(each.name for each in fields(Label))


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a plan, by all workers together."""

    parents: tuple[InputKey, ...]
    base: int
    """Index of the source that most tensors have as their base; -1 for none."""
    measurements: Measurements
    routers: tuple[RouterRows, ...]
    skipped: Mapping[str, int]


def measured(
    plan: Plan, reports: Iterable[Mapping[str, Any]], errors: Mapping[int, tuple[float, float]]
) -> Measured:
    """Join what ``Measurer.examine`` gave of segments, in their order; ``errors`` of encoding by op."""
    rows: list[Mapping[str, Any]] = []
    routers: list[Mapping[str, Any]] = []
    skipped: Counter[str] = Counter()
    for report in reports:
        rows += report["rows"]
        routers += report["routers"]
        skipped.update(report["skipped"])
    keys = sorted({InputKey(*key) for row in rows for key in row["inputs"]})
    bases = Counter(row["base"] for row in rows)
    describe, places = describer(plan), {key: number for number, key in enumerate(keys)}
    labels = _labels(plan, rows, describe)
    return Measured(
        tuple(keys),
        bases.most_common(1)[0][0] if bases else BASE,
        # A tensor that several segments make is one row.
        Measurements(labels, **_arrays(rows, places, errors)).grouped(*_LABELS),
        tuple(_router_rows(plan, routers, places, describe)),
        skipped,
    )


def _labels(plan: Plan, rows: Sequence[Mapping[str, Any]], describe: Describe) -> tuple[Label, ...]:
    names, logical = plan["tensors"].column("name").to_pylist(), plan["parts"].column("logical").to_pylist()
    ops = plan["ops"].select(["tensor", "first_part", "expression"]).to_pylist()
    expressions = plan.expressions
    labels = []
    for row in rows:
        op = ops[row["op"]]
        expression = expressions[op["expression"]]
        part = logical[op["first_part"] + row["part"]]
        info: TensorInfo = describe(part)
        labels.append(
            Label(
                tensor=names[op["tensor"]],
                part=part,
                stack=info.stack,
                layer=-1 if info.layer is None else info.layer,
                role=info.role.value,
                expert=row.get("expert", -1 if info.expert is None else info.expert),
                method=expression.method,
                stored_as="" if expression.encode is None else expression.encode.format.name,
            )
        )
    return tuple(labels)


def _arrays(
    rows: Sequence[Mapping[str, Any]],
    places: Mapping[InputKey, int],
    errors: Mapping[int, tuple[float, float]],
) -> dict[str, Floats]:
    """The arrays of ``Measurements``, with the inputs of each row at the places of their parents."""
    shapes = shapes_of(len(places))
    arrays = {name: np.zeros((len(rows), *shapes[name])) for name in ARRAYS}
    parts = Counter(row["op"] for row in rows)
    arrays["elements"][:] = [row["elements"] for row in rows]
    arrays["sampled"][:] = [row["sampled"] for row in rows]
    sums = [np.array(errors.get(row["op"], (0.0, 0.0))) / parts[row["op"]] for row in rows]
    arrays["encoding_errors"][:] = np.reshape(sums, (-1, 2))
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault(tuple([places[InputKey(*key)] for key in row["inputs"]]), []).append(number)
    for own, numbers in alike.items():
        arrays["present"][np.ix_(numbers, own)] = arrays["elements"][numbers][:, None]
        for name in rows[numbers[0]]["sums"]:
            axes = [own] * len(shapes[name]) if name != "sketches" else [(*own, len(places)), range(SKETCH)]
            where = np.ix_(numbers, *axes)
            values = np.array([rows[number]["sums"][name] for number in numbers])
            arrays[name][where] = values.reshape(len(numbers), *map(len, axes))
    return arrays | shared_sums(arrays)


def _router_rows(
    plan: Plan, routers: Iterable[Mapping[str, Any]], places: Mapping[InputKey, int], describe: Describe
) -> Iterator[RouterRows]:
    names, tensors = plan["tensors"].column("name"), plan["ops"].column("tensor")
    for each in routers:
        name = names[tensors[each["op"]].as_py()].as_py()
        first, second = (BASE if key == BASE else places[InputKey(*key)] for key in each["models"])
        lists = (tuple(each[key]) for key in ("own", "nearest", "nearest_cosines"))
        yield RouterRows(name, describe(name).layer or 0, first, second, *lists)
