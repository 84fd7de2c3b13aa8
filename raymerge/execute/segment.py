"""Makes one segment: reads ahead, computes, writes behind, all under one byte budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod

import torch
import xxhash

from raymerge.errors import IncompleteError, NonFiniteError, Problem
from raymerge.execute.compute import PartComputation, encode, scatter
from raymerge.execute.finite import first_non_finite
from raymerge.execute.heap import HeapWatch
from raymerge.execute.jobs import Jobs, RowJob
from raymerge.execute.receipts import Receipt
from raymerge.planner.expressions import Read
from raymerge.planner.memory import SLOTS, Projection, expression_passes, tiling
from raymerge.planner.tables import Plan
from raymerge.storage.store import ReadStore, WriteStore

UNFINISHED = ".part"
"""Ending of a shard's name until all of its segments are in."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tile of one row in one pass."""

    row: RowJob
    """The row."""
    start: int
    """First element of the tile within the row."""
    count: int
    """Elements of the tile."""
    pass_index: int
    """Statistics pass, or -1 for the pass that writes."""
    ends_pass: bool
    """Whether this is the last tile of its pass."""
    resident: bool
    """Whether the bytes read are kept for the later passes."""
    peak: int
    """Bytes that a slot uses while the row is made."""

    def span(self, source: Read) -> tuple[int, int]:
        """First byte and number of bytes that the tile takes of an input."""
        if self.count == self.row.num_elements:
            return source.offset, source.nbytes
        return source.offset + source.dtype.nbytes(self.start), source.dtype.nbytes(self.count)


@dataclass(slots=True)
class _Counters:
    read_bytes: int = 0
    written_bytes: int = 0
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Line:
    """The two threads of a segment's pipeline and what they share."""

    reading: ThreadPoolExecutor
    writing: ThreadPoolExecutor
    counters: _Counters
    kept: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)


class SegmentRunner:
    """Makes segments of one plan in one process; several threads may run segments at once."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ReadStore],
        staging: WriteStore,
        *,
        device: torch.device,
        projection: Projection,
        name: str,
    ) -> None:
        """
        Args:
            plan: an executable plan.
            sources: one store for each source, in the plan's order.
            staging: where shards grow, under their names with ``UNFINISHED``.
            device: where the arithmetic runs.
            projection: the memory that this process may use for tiles.
            name: the worker's name in receipts.
        """
        self._jobs = Jobs(plan)
        self._names = [each["name"] for each in plan.manifest["sources"]]
        self._seed = int(plan.manifest["seed"])
        self._sources = sources
        self._staging = staging
        self._device = device
        self._projection = projection
        self._name = name
        self._heap = HeapWatch(projection.peak)
        self._compute = threading.Lock()
        self._aborted = threading.Event()

    def run(self, segment: int) -> Receipt:
        """Make one segment and return when its bytes are durable.

        No thread of it reads or writes any more when this returns or raises.

        Raises:
            NonFiniteError: a source or a result holds NaN or infinity.
            CheckpointError: a source cannot be read as it was when the plan was made.
            OptionError: the staging directory's file system is full.
            IncompleteError: ``abort`` was called, or the GPU has too little memory.
        """
        try:
            return self._run(segment)
        except torch.OutOfMemoryError as error:
            raise IncompleteError(
                f"the GPU of {self._name} has too little memory: {str(error).splitlines()[0]} A worker may "
                f"use {self._projection.budget} bytes there now. What is done is kept: give a smaller "
                "--memory to the same command and it goes on."
            ) from error

    def _run(self, segment: int) -> Receipt:
        started = time.monotonic()
        counters = _Counters()
        rows = self._jobs.rows(segment)
        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
            self._pipeline(rows, _Line(reading, writing, counters))
        for shard in sorted({shard for row in rows for shard, _ in row.places}):
            self._staging.sync(shard + UNFINISHED)
        seconds = round(time.monotonic() - started, 6)
        return Receipt(
            segment, counters.read_bytes, counters.written_bytes, seconds, self._name, counters.digests
        )

    def abort(self) -> None:
        """Have every segment in hand fail at its next tile."""
        self._aborted.set()

    def _pipeline(self, rows: Sequence[RowJob], line: _Line) -> None:
        work = _RowWork(self._seed, self._device)
        ahead: Future[list[torch.Tensor]] | None = None
        pending: Future[None] | None = None
        steps = self._steps(rows)
        step = next(steps, None)
        while step is not None:
            if self._aborted.is_set():
                raise IncompleteError("the segment was given up, since the run ends.")
            raw = (ahead or line.reading.submit(self._read, step, line)).result()
            following = next(steps, None)
            overlaps = following is not None and self._fits(step, following)
            ahead = line.reading.submit(self._read, following, line) if overlaps and following else None
            data = self._made(work, step, raw, line.counters)
            if pending is not None:
                pending.result()
            pending = (
                line.writing.submit(self._write, step, data, line.counters) if data is not None else None
            )
            if pending is not None and not overlaps:
                pending.result()
            step = following

    def _fits(self, step: Step, following: Step) -> bool:
        """Whether the next tile may be read while this one is computed, and this one written then.

        Within a row that is counted; two rows together must fit into a slot. What a tile takes or gives
        is at most half of what its row needs, so the row before, still being written, fits too.
        """
        if following.row is step.row:
            return True
        return step.peak + following.peak <= self._projection.peak // SLOTS

    def _made(
        self, work: _RowWork, step: Step, raw: Sequence[torch.Tensor], counters: _Counters
    ) -> torch.Tensor | None:
        """The checked and digested bytes of a tile; None in a statistics pass."""
        with self._compute:
            data = work.step(step, raw)
            self._heap.check()
        if data is None:
            return None
        self._check(step, raw, data)
        work.hash(step, data, counters)
        return data

    def _steps(self, rows: Sequence[RowJob]) -> Iterator[Step]:
        for row in rows:
            passes = expression_passes(row.expression)
            tile = tiling(row.need, row.num_elements, self._projection.budget, passes=passes)
            size = tile.elements if row.is_flat else max(1, row.num_elements)
            for index in (*range(passes), -1):
                for start in range(0, max(1, row.num_elements), size):
                    count = min(size, row.num_elements - start)
                    last = start + count >= row.num_elements
                    yield Step(row, start, count, index, last, tile.resident, tile.peak)

    def _read(self, step: Step, line: _Line) -> list[torch.Tensor]:
        """The bytes of every input of a tile; of resident rows from memory after the first pass."""
        key = (step.row.index, step.start)
        if key in line.kept:
            return line.kept.pop(key) if step.pass_index < 0 else line.kept[key]
        found: list[torch.Tensor] = []
        for each in step.row.inputs:
            offset, nbytes = step.span(each)
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._sources[each.source].read_into(each.key, offset, _bytes_of(buffer))
            line.counters.read_bytes += nbytes
            found.append(buffer)
        if step.resident:
            line.kept[key] = found
        return found

    def _check(self, step: Step, raw: Sequence[torch.Tensor], data: torch.Tensor) -> None:
        row = step.row
        if not row.check_finite or first_non_finite(data.numpy(), row.expression.cast) is None:
            return
        for each, buffer in zip(row.inputs, raw, strict=True):
            found = first_non_finite(buffer.numpy(), each.dtype)
            if found is not None:
                place = step.span(each)[0] + each.dtype.nbytes(found)
                raise NonFiniteError(
                    Problem(
                        f"{self._names[each.source]}: {row.tensor}",
                        f"the source holds NaN or infinity, here first at byte {place} of {each.key}.",
                        "Repair or replace that model; nothing was published.",
                    )
                )
        raise NonFiniteError(
            Problem(
                row.tensor,
                f"the sources are finite, but the merged values do not fit {row.expression.cast.value}.",
                "Use a wider out_dtype (bfloat16, float32) or smaller weights; nothing was published.",
            )
        )

    def _write(self, step: Step, data: torch.Tensor, counters: _Counters) -> None:
        buffer = _bytes_of(data)
        skipped = step.row.expression.cast.nbytes(step.start) if step.start else 0
        for shard, offset in step.row.places:
            self._staging.write_at(shard + UNFINISHED, offset + skipped, buffer)
            counters.written_bytes += len(buffer)


class _RowWork:
    """State of the row in hand: its computations and the digest of its bytes so far."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._row = -1
        self._parts: list[PartComputation] = []
        self._hasher = xxhash.xxh3_128()

    def step(self, step: Step, raw: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Take one tile through the kernel; the encoded bytes, or None in a statistics pass."""
        row = step.row
        if row.expression.is_copy:
            self._begin(row, computes=False)
            return raw[0]
        self._begin(row, computes=True)
        shares = _by_part(row, raw)
        start = row.first_element + step.start
        if step.pass_index >= 0:
            for part, share in zip(self._parts, shares, strict=True):
                part.observe(share, start, step.pass_index)
                if step.ends_pass:
                    part.conclude(step.pass_index)
            return None
        results = [part.apply(share, start) for part, share in zip(self._parts, shares, strict=True)]
        whole = results[0] if row.is_flat else scatter(results, row)
        return encode(whole, row.expression.cast)

    def hash(self, step: Step, data: torch.Tensor, counters: _Counters) -> None:
        """Add a written tile to its row's digest."""
        self._hasher.update(_bytes_of(data))
        if step.ends_pass:
            counters.digests[str(step.row.index)] = self._hasher.hexdigest()

    def _begin(self, row: RowJob, *, computes: bool) -> None:
        if row.index == self._row:
            return
        self._row = row.index
        self._hasher = xxhash.xxh3_128()
        self._parts = (
            [
                PartComputation(
                    row.expression,
                    part,
                    num_elements=_part_elements(row, part.shape),
                    seed=self._seed,
                    device=self._device,
                )
                for part in row.parts
            ]
            if computes
            else []
        )


def _part_elements(row: RowJob, shape: Sequence[int]) -> int:
    return row.num_elements if row.is_flat else prod(shape)


def _by_part(row: RowJob, raw: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    shares: list[Sequence[torch.Tensor]] = []
    first = 0
    for part in row.parts:
        shares.append(raw[first : first + len(part.inputs)])
        first += len(part.inputs)
    return shares


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 ``[n]`` tensor on the host, not a copy."""
    return tensor.numpy().data
