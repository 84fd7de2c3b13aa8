"""The ops of a segment, decoded from the plan's tables, and what their windows take of gathered inputs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.merge_plan.expressions import Expression, GatherInput, Read, copy_expression, repeated_reads
from raymerge.merge_plan.memory import GatherNeed, InputNeed, Need, OpSize, PartSize, gather_need, op_need
from raymerge.merge_plan.plan import Flags, Ints, RunReader, ints, starts
from raymerge.merge_plan.tables import Plan, read_gather_input, read_scales


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a window of rows takes of one input."""

    ranges: Ints
    """First and stop of runs of stored rows ``[ranges, 2]``, ascending and apart from each other."""
    moves: Ints
    """``[moves, 3]``: a row of the window, the row's place among all those taken, and how many follow it."""

    @property
    def num_rows(self) -> int:
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def stored_row(self, place: int) -> int:
        sizes = self.ranges[:, 1] - self.ranges[:, 0]
        index = int(np.searchsorted(np.cumsum(sizes), place, side="right"))
        return int(self.ranges[index, 0] + place - starts(sizes)[index])


@dataclass(frozen=True, slots=True, eq=False)
class GatheredInput:
    num_rows: int
    num_columns: int
    real_rows: int
    """Rows from here on are the mean of those before."""
    inputs: tuple[GatherInput, ...]
    runs: Ints
    """``[4, runs]``: to_row, from_row, count and input, by to_row and then input."""
    need: GatherNeed

    @property
    def is_padded(self) -> bool:
        return self.real_rows < self.num_rows

    def taken(self, first: int, stop: int) -> tuple[Taken, ...]:
        """What the rows from ``first`` up to ``stop`` take of each input."""
        near = self.runs[:, : np.searchsorted(self.runs[0], stop)]
        to, start, count, gather_input = near[:, near[0] + near[2] > first]
        skipped = np.maximum(first - to, 0)
        begin = to + skipped
        moves = np.stack([begin - first, start + skipped, np.minimum(to + count, stop) - begin], axis=1)
        return tuple(
            self._taken(each, moves[gather_input == number]) for number, each in enumerate(self.inputs)
        )

    def _taken(self, gather_input: GatherInput, moves: Ints) -> Taken:
        if gather_input.read.view is not None:
            return Taken(np.array([[0, gather_input.num_rows]], dtype=np.int64), moves)
        return _compacted(moves)

    def covers(self, taken: Sequence[Taken], num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Stretches of a window's rows that equally many inputs give: first, stop and how many."""
        change = np.zeros(num_rows + 1, dtype=np.int64)
        for each in taken:
            change[each.moves[:, 0]] += 1
            change[each.moves[:, 0] + each.moves[:, 2]] -= 1
        counts = np.cumsum(change)[:num_rows]
        bounds = [*np.flatnonzero(np.diff(counts, prepend=-1)).tolist(), num_rows]
        for first, stop in pairwise(bounds):
            yield first, stop, int(counts[first])


def _compacted(moves: Ints) -> Taken:
    if not len(moves):
        return Taken(np.empty((0, 2), dtype=np.int64), moves)
    order = np.argsort(moves[:, 1], kind="stable")
    first = moves[order, 1]
    reach = np.maximum.accumulate(first + moves[order, 2])
    begins: Flags = np.append(True, first[1:] > reach[:-1])
    heads = np.flatnonzero(begins)
    ranges = np.stack([first[heads], reach[np.append(heads[1:], len(first)) - 1]], axis=1)
    shift = starts(ranges[:, 1] - ranges[:, 0]) - ranges[:, 0]
    placed = moves.copy()
    placed[order, 1] += shift[np.cumsum(begins) - 1]
    return Taken(ranges, placed)


Input: TypeAlias = Read | GatheredInput
"""What feeds a part: bytes as they are stored, or rows of several matrices."""

Making: TypeAlias = tuple[int, tuple[int, ...]]
"""An op to make, and those ops of the ones that it writes which are to be written."""


@dataclass(frozen=True, slots=True)
class JobPart:
    logical: str
    """Name by which chance is drawn."""
    shape: tuple[int, ...]
    view: View | None
    """Where its elements lie in the op, in elements; None: the op is this part."""
    inputs: tuple[Input, ...]
    """The base first if there is one."""

    @property
    def columns(self) -> int:
        """Of a matrix, elements of a row of the tensor that it lies in."""
        return self.shape[-1] if self.view is None else self.view.columns


@dataclass(frozen=True)
class OpJob:
    index: int
    tensor: str
    check_finite: bool
    expression: Expression
    first_element: int
    """Index of its first element within the logical tensor."""
    num_elements: int
    is_flat: bool
    """Whether it may be cut into tiles."""
    parts: tuple[JobPart, ...]
    places: tuple[tuple[str, int], ...]
    """Shard names and offsets that its bytes go to: its own, and those of ops with equal content."""
    scales: OpJob | None = None
    """The op of the scales that are made with it, where its bytes are codes."""
    tensor_scale: OpJob | None = None
    """The op of the one scale that all of its codes share, where there is one."""
    zero_points: OpJob | None = None
    joined_with: tuple[OpJob, ...] = ()
    """Ops of codes that are to have the same one scale; they are made by themselves."""
    copy_of: int = -1
    """The first op of the same content, which is made in its place; -1 for none."""
    output: int = 0
    """Which of the plans that are carried out together it is of."""
    variants: tuple[Variant, ...] = ()
    """Ops of several plans that are made of these inputs, each in its own place; none: it is made itself."""
    leaves_inputs: bool = False
    """Whether others are made of its inputs after it, so that its results may not take their place."""

    @property
    def made_by(self) -> int:
        """The op whose receipt has its digest."""
        return self.index if self.copy_of < 0 else self.copy_of

    @property
    def nbytes(self) -> int:
        return self.expression.cast.nbytes(self.num_elements)

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        return tuple([each for part in self.parts for each in part.inputs])

    @property
    def encoding(self) -> Encoding:
        """How its results are encoded, where they are codes."""
        if self.expression.encode is None:
            raise TypeError(f"{self.tensor} is made of numbers that are not encoded")
        return self.expression.encode

    @cached_property
    def has_codes(self) -> bool:
        is_read = any(isinstance(each, Read) and each.scales is not None for each in self.inputs)
        return is_read or self.expression.encode is not None

    @property
    def observed(self) -> tuple[Hashable, ...]:
        """What its statistics depend on beside its inputs: ops with equal values of it share theirs."""
        method = self.expression.definition
        if method is None:
            return (self.expression.method,)
        settings = self.expression.bind(keys=(), shape=self.parts[0].shape)
        return method.name, self.expression.has_base, method.kernel_with(settings).observed(settings)

    @property
    def each(self) -> tuple[OpJob, ...]:
        """Its variants, or itself without any."""
        return tuple(variant.op for variant in self.variants) or (self,)

    @cached_property
    def writes_inputs(self) -> bool:
        """Whether what it is read into is written from, or written to."""
        return any(each.expression.is_copy or each.need.in_place for each in self.each)

    @cached_property
    def repeated(self) -> list[bool]:
        """Of each input whether its bytes are those of the part before, which are read once."""
        return repeated_reads(self.inputs, len(self.parts))

    @cached_property
    def need(self) -> Need:
        if self.variants:
            return _joint_need(self._need_of(copy_expression(self.expression.cast)), self.variants)
        need = self._need_of(self.expression)
        if self.leaves_inputs and need.in_place:
            return replace(need, in_place=False, fixed_bytes=need.fixed_bytes + self.nbytes)
        return need

    def _need_of(self, expression: Expression) -> Need:
        shapes = [part.shape for part in self.parts]
        size = OpSize(
            self.num_elements,
            len(shapes),
            sum(max(1, shape[-1]) if shape else 1 for shape in shapes),
            len(shapes[0]),
            self.is_flat,
            () if self.is_flat else tuple(PartSize(part.shape, part.view) for part in self.parts),
        )
        inputs = map(_input_need, self.inputs, self.repeated)
        return op_need(expression, list(inputs), size)


class Variant(NamedTuple):
    """An op that is made of some inputs of a read."""

    op: OpJob
    inputs: tuple[int, ...]
    """The numbers of its own inputs among those that are read."""


def _joint_need(read: Need, variants: Sequence[Variant]) -> Need:
    """The need of ops that are made one after the other of one read: different statistics live together where
    they are taken tile by tile."""
    needs = [each.op.need for each in variants]
    fixed: dict[Hashable, int] = {}
    for each in variants:
        key = (each.inputs, *each.op.observed)
        fixed[key] = max(fixed.get(key, 0), each.op.need.fixed_bytes)
    pieces = [each.piece for each in needs]
    return replace(
        read,
        work_per_element=max(each.work_per_element for each in needs),
        scratch_per_element=max(each.scratch_per_element for each in needs),
        fixed_bytes=(sum if variants[0].op.is_flat else max)(fixed.values()),
        least_elements=max(each.least_elements for each in needs),
        unit=math.lcm(*(each.unit for each in needs)),
        piece=max(pieces) if all(pieces) else 0,
        in_place=any(each.in_place for each in needs),
    )


def _input_need(source: Input, is_repeated: bool) -> InputNeed:
    if isinstance(source, Read):
        return InputNeed(
            source.dtype, source.nbytes, scales=source.scales, view=source.view, is_repeated=is_repeated
        )
    read = source.inputs[0].read
    return InputNeed(read.dtype, read.nbytes, source.need)


class Jobs:
    """Reads jobs out of a plan; expressions and columns are made ready once."""

    def __init__(self, plan: Plan, *, output: int = 0, sources: Sequence[int] | None = None) -> None:
        """``output``: the plan's number among those that are carried out together; ``sources``: the numbers
        that its sources have there, None: their own."""
        self._plan = plan
        self._output = output
        self._sources = sources
        self._expressions: Sequence[Expression] = plan.expressions
        self._shards: Sequence[str] = plan["shards"].column("name").to_pylist()
        self._dtypes: Mapping[str, DType] = {dtype.value: dtype for dtype in DType}
        self._segments = RunReader(plan["segments"], "first_op", "num_ops")
        self._tensors = RunReader(plan["tensors"], "name", "check_finite")
        self._ops = RunReader(plan["ops"])
        self._places = RunReader(plan["ops"], "shard", "offset")
        self._parts = RunReader(plan["parts"], "logical", "shape", "view_offset", "view_strides")
        self._inputs = RunReader(plan["inputs"])
        self._scales = RunReader(plan["scales"])
        self._encodings = plan.encodings

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._plan["segments"])

    def ops(self, segment: int) -> tuple[OpJob, ...]:
        """The ops that a segment makes, in order; those that another op writes are left out."""
        return self._run(*self._segments.row(segment))

    def all_ops(self, segment: int) -> tuple[OpJob, ...]:
        """The ops of a segment in order, with those that another op writes."""
        return tuple(map(self._joined, self._read(*self._segments.row(segment))))

    def tensor(self, row: int) -> str:
        return str(self._tensors.row(self._ops.row(row).tensor).name)

    def these(self, makings: Sequence[Making]) -> tuple[OpJob, ...]:
        """Ops to make in this order, each with some of its places alone."""
        numbers = sorted({number for number, _ in makings})
        breaks = [at for at, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1]
        runs = [(first, stop) for first, stop in pairwise([0, *breaks, len(numbers)]) if stop > first]
        jobs = {job.index: job for first, stop in runs for job in self._run(numbers[first], stop - first)}
        return tuple(self._aimed(jobs[number], written) for number, written in makings)

    def _aimed(self, op: OpJob, written: Sequence[int]) -> OpJob:
        """An op with the places of these ops instead of all of its own."""
        places: dict[int, list[tuple[str, int]]] = {}
        for number in written:
            row = self._ops.row(number)
            first = row.copy_of if row.copy_of >= 0 else number
            places.setdefault(first, []).append((self._shards[row.shard], row.offset))

        def aimed(job: OpJob) -> OpJob:
            return replace(job, places=tuple(places.get(job.index, (("", job.places[0][1]),))))

        scales, of_tensor, zeros = (
            each and aimed(each) for each in (op.scales, op.tensor_scale, op.zero_points)
        )
        return replace(aimed(op), scales=scales, tensor_scale=of_tensor, zero_points=zeros)

    def _run(self, first: int, count: int) -> tuple[OpJob, ...]:
        """Some ops that follow on each other, but for those that another op writes."""
        return tuple(map(self._joined, self._read(first, count, is_made=True)))

    def _read(self, first: int, count: int, *, is_made: bool = False) -> Iterator[OpJob]:
        rows = list(self._ops.read(first, count))
        # Parts and inputs of consecutive ops stand together, so that each table is read once.
        parts = self._parts.read(rows[0].first_part, sum(row.num_parts for row in rows))
        inputs = self._inputs.read(rows[0].first_input, sum(row.num_inputs for row in rows))
        for index, row in enumerate(rows, first):
            own, reads = list(islice(parts, row.num_parts)), list(islice(inputs, row.num_inputs))
            if not is_made or (row.copy_of < 0 and row.made_with < 0):
                yield self._op(index, row, self._job_parts(own, reads))

    def _joined(self, job: OpJob) -> OpJob:
        """An op with those that it shares the one scale of a matrix with."""
        numbers = self._ops.row(job.index).joined_with if job.tensor_scale is not None else ()
        others = tuple(job for number in numbers for job in self._read(number, 1))
        return replace(job, joined_with=others) if others else job

    def _op(self, index: int, row: Any, parts: tuple[JobPart, ...]) -> OpJob:
        name, check_finite = self._tensors.row(row.tensor)
        places = [(row.shard, row.offset), *map(self._places.row, row.also)]
        return OpJob(
            index=index,
            tensor=name,
            check_finite=check_finite,
            expression=self._expressions[row.expression],
            first_element=row.first_element,
            num_elements=row.num_elements,
            is_flat=row.is_flat,
            parts=parts,
            places=tuple((self._shards[shard], offset) for shard, offset in places),
            scales=self._made_with(row.scales),
            tensor_scale=self._made_with(row.tensor_scale),
            zero_points=self._made_with(row.zero_points),
            copy_of=row.copy_of,
            output=self._output,
        )

    def _made_with(self, index: int) -> OpJob | None:
        return self._op(index, self._ops.row(index), ()) if index >= 0 else None

    def _job_parts(self, parts: Sequence[Any], rows: Sequence[Any]) -> tuple[JobPart, ...]:
        inputs: list[list[Input]] = [[] for _ in parts]
        for row in rows:
            inputs[row.part].append(self._input(row))
        return tuple(
            JobPart(logical, tuple(shape), _view(offset, shape, strides), tuple(own))
            for (logical, shape, offset, strides), own in zip(parts, inputs, strict=True)
        )

    def _input(self, row: Any) -> Input:
        if row.gather >= 0:
            return self._gathered(row.gather)
        view = _view(row.view_offset, row.view_shape, row.view_strides)
        dtype = self._dtypes[row.dtype]
        scales = None
        if row.scales >= 0:
            scales = read_scales(self._scales.row(row.scales), self._encodings)
        return Read(
            row.part, self._source(row.source), row.key, row.offset, row.nbytes, dtype, view, scales=scales
        )

    def _source(self, number: int) -> int:
        return number if self._sources is None else self._sources[number]

    def _gathered(self, number: int) -> GatheredInput:
        (row,) = self._plan["gathers"].slice(number, 1).to_pylist()
        gather_inputs = (
            self._plan["gather_inputs"].slice(row["first_gather_input"], row["num_gather_inputs"]).to_pylist()
        )
        first = gather_inputs[0]["first_factor"]
        count = sum(gather_input["num_factors"] for gather_input in gather_inputs)
        factors = self._plan["factors"].slice(first, count).to_pylist()
        for each in (*gather_inputs, *factors):
            each["source"] = self._source(each["source"])
        runs = self._plan["runs"].slice(row["first_run"], row["num_runs"])
        return GatheredInput(
            num_rows=row["num_rows"],
            num_columns=row["num_columns"],
            real_rows=row["real_rows"],
            inputs=tuple(
                read_gather_input(
                    gather_input,
                    factors[gather_input["first_factor"] - first :][: gather_input["num_factors"]],
                )
                for gather_input in gather_inputs
            ),
            runs=np.stack([ints(runs, name) for name in ("to_row", "from_row", "count", "input")]),
            need=gather_need(row, gather_inputs, factors),
        )


def _view(offset: int, shape: Sequence[int], strides: Sequence[int]) -> View | None:
    return View(offset, tuple(shape), tuple(strides)) if strides else None
