"""Makes one segment: reads ahead, computes, writes behind, all under one byte budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod

import torch
import xxhash

from raymerge.dtypes import DType
from raymerge.errors import IncompleteError, NonFiniteError, Problem
from raymerge.execute.assembled import Raw
from raymerge.execute.blame import non_finite_byte
from raymerge.execute.compute import PartComputation
from raymerge.execute.decoding import encode, scatter
from raymerge.execute.finite import first_non_finite
from raymerge.execute.heap import HeapWatch
from raymerge.execute.jobs import Jobs, RowJob
from raymerge.execute.reading import TileReader
from raymerge.execute.receipts import Receipt
from raymerge.execute.steps import PADDING, WRITING, Step, steps
from raymerge.planner.memory import SLOTS, Projection
from raymerge.planner.tables import Plan
from raymerge.storage.store import ReadStore, WriteStore

UNFINISHED = ".part"
"""Ending of a shard's name until all of its segments are in."""


@dataclass(slots=True)
class _Counters:
    written_bytes: int = 0
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Line:
    """The two threads of a segment's pipeline and what they share."""

    reading: ThreadPoolExecutor
    writing: ThreadPoolExecutor
    reader: TileReader
    counters: _Counters


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
        counters, reader = _Counters(), TileReader(self._sources)
        rows = self._jobs.rows(segment)
        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
            self._pipeline(rows, _Line(reading, writing, reader, counters))
        for shard in sorted({shard for row in rows for shard, _ in row.places}):
            self._staging.sync(shard + UNFINISHED)
        seconds = round(time.monotonic() - started, 6)
        return Receipt(
            segment, reader.read_bytes, counters.written_bytes, seconds, self._name, counters.digests
        )

    def abort(self) -> None:
        """Have every segment in hand fail at its next tile."""
        self._aborted.set()

    def _pipeline(self, rows: Sequence[RowJob], line: _Line) -> None:
        work = _RowWork(self._seed, self._device)
        ahead: Future[Raw] | None = None
        pending: Future[None] | None = None
        tiles = steps(rows, self._projection.budget)
        step = next(tiles, None)
        while step is not None:
            if self._aborted.is_set():
                raise IncompleteError("the segment was given up, since the run ends.")
            raw = (ahead or line.reading.submit(line.reader.read, step)).result()
            following = next(tiles, None)
            overlaps = following is not None and self._fits(step, following)
            ahead = line.reading.submit(line.reader.read, following) if overlaps and following else None
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

    def _made(self, work: _RowWork, step: Step, raw: Raw, counters: _Counters) -> torch.Tensor | None:
        """The checked and digested bytes of a tile; None in a statistics pass."""
        with self._compute:
            data = work.step(step, raw)
            self._heap.check()
        if data is None:
            return None
        self._check(step, raw, data)
        work.hash(step, data, counters)
        return data

    def _check(self, step: Step, raw: Raw, data: torch.Tensor) -> None:
        row = step.row
        if not row.check_finite or first_non_finite(data.numpy(), row.expression.cast) is None:
            return
        for each, held in zip(row.inputs, raw, strict=True):
            found = non_finite_byte(step, each, held)
            if found is not None:
                source, place = found
                raise NonFiniteError(
                    Problem(
                        f"{self._names[source.source]}: {row.tensor}",
                        f"the source holds NaN or infinity, here first at byte {place} of {source.key}.",
                        "Repair or replace that model; nothing was published.",
                    )
                )
        cast = row.expression.cast
        wider = "a wider out_dtype (bfloat16, float32) or " if cast is DType.F16 else ""
        raise NonFiniteError(
            Problem(
                row.tensor,
                f"the sources are finite, but the merged values do not fit {cast.value}.",
                f"Use {wider}smaller weights; nothing was published.",
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

    def step(self, step: Step, raw: Raw) -> torch.Tensor | None:
        """Take one tile through the kernel; the encoded bytes, or None in a statistics pass."""
        row = step.row
        if row.expression.is_copy:
            self._begin(row, computes=False)
            return _verbatim(raw)
        self._begin(row, computes=True)
        shares = list(zip(self._parts, _by_part(row, raw), strict=True))
        start = row.first_element + step.start
        if step.begins_row:
            for part, share in shares:
                part.load(share)
        if step.pass_index != WRITING:
            for part, share in shares:
                _gather(part, share, step, start)
            return None
        results = [part.apply(share, start) for part, share in shares]
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


def _gather(part: PartComputation, share: Raw, step: Step, start: int) -> None:
    """One tile of a pass that writes nothing."""
    if step.pass_index == PADDING:
        part.pad(share, ends_pass=step.ends_pass)
        return
    part.observe(share, start, step.pass_index)
    if step.ends_pass:
        part.conclude(step.pass_index)


def _verbatim(raw: Raw) -> torch.Tensor:
    (data,) = raw
    if not isinstance(data, torch.Tensor):
        raise TypeError("a copy of bytes is made of rows")
    return data


def _by_part(row: RowJob, raw: Raw) -> list[Raw]:
    shares: list[Raw] = []
    first = 0
    for part in row.parts:
        shares.append(raw[first : first + len(part.inputs)])
        first += len(part.inputs)
    return shares


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a uint8 ``[n]`` tensor on the host, not a copy."""
    return tensor.numpy().data
