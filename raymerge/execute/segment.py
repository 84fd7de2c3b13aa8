"""Makes segments: lanes that read ahead, compute and write behind, all under one byte budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from raymerge.errors import NonFiniteError
from raymerge.execute.blame import find_cause
from raymerge.execute.compute import Scratch
from raymerge.execute.heap import HeapWatch
from raymerge.execute.jobs import Jobs, RowJob
from raymerge.execute.lane import Lane, Shop
from raymerge.execute.loading import NOTHING, Loader
from raymerge.execute.output import UNFINISHED, NotFinite, Output
from raymerge.execute.reading import LoadReader
from raymerge.execute.receipts import Receipt
from raymerge.execute.tiles import stretches
from raymerge.execute.transfers import HostTransfers, Transfers, transfers_for
from raymerge.execute.warmup import warm_up
from raymerge.planner.memory import Projection
from raymerge.planner.tables import Plan
from raymerge.storage.store import ReadStore, WriteStore

_PROCESSOR = torch.device("cpu")
# Older versions of torch have no error of its own for a GPU that failed.
_DEVICE_ERRORS = getattr(torch, "AcceleratorError", RuntimeError)


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """A lane's memory; it goes from segment to segment, as memory that was used before is much faster."""

    blocks: tuple[torch.Tensor, torch.Tensor]
    loads: list[torch.Tensor]
    scratch: Scratch


class SegmentRunner:
    """Makes segments of one plan in one process, each in a thread of its caller's; as many at a time as the
    projection has lanes."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ReadStore],
        staging: WriteStore,
        *,
        device: torch.device,
        projection: Projection,
        threads: int,
        name: str,
    ) -> None:
        """
        Args:
            plan: an executable plan.
            sources: one store for each source, in the plan's order.
            staging: where shards grow, under their names with ``UNFINISHED``.
            device: where the arithmetic runs.
            projection: the memory that this process may use.
            threads: segments that may be computed at the same time.
            name: the worker's name in receipts.
        """
        self._jobs = Jobs(plan)
        self._names = [each["name"] for each in plan.manifest["sources"]]
        self._sources = sources
        self._staging = staging
        self._projection = projection
        self._name = name
        self._device = device
        self._failure = ""
        self._idle: list[_Memory] = []
        warm_up(plan.expressions, device)
        self._heap = HeapWatch(projection.peak)
        self._shop = Shop(
            seed=int(plan.manifest["seed"]),
            turns=threading.Semaphore(threads),
            aborted=threading.Event(),
            watch=self._heap.check,
        )

    def run(self, segment: int) -> Receipt:
        """Make one segment and return when its bytes are durable.

        No thread of it reads or writes any more when this returns or raises. Where a GPU fails, or has too
        little memory, the segment is made on the processor, and the receipt has a note of it.

        Raises:
            NonFiniteError: a source or a result holds NaN or infinity.
            CheckpointError: a source cannot be read as it was when the plan was made.
            OptionError: the staging directory's file system is full.
            IncompleteError: ``abort`` was called.
        """
        if self._device.type == "cpu" or self._failure:
            return self._made(segment, _PROCESSOR, self._failure)
        try:
            return self._made(segment, self._device, "")
        except torch.OutOfMemoryError as error:
            note = f"the GPU has too little memory: {_first_line(error)}"
        except _DEVICE_ERRORS as error:
            # A GPU that failed once fails whatever comes after.
            note = self._failure = f"the GPU failed: {_first_line(error)}"
        return self._made(segment, _PROCESSOR, note)

    def abort(self) -> None:
        """Have every segment in hand fail at its next load."""
        self._shop.aborted.set()

    def _made(self, segment: int, device: torch.device, note: str) -> Receipt:
        started = time.monotonic()
        reader, rows, transfers = LoadReader(self._sources), self._jobs.rows(segment), transfers_for(device)
        share = self._projection.lane
        memory = self._memory(transfers)
        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
            output = Output(self._staging, writing, list(memory.blocks))
            loader = Loader(
                reader,
                reading,
                transfers,
                memory.loads,
                usual_bytes=share.load_bytes,
                limit=self._projection.peak // self._projection.lanes - 2 * share.write_bytes,
            )
            try:
                Lane(self._shop, reader, loader, output, transfers, memory.scratch).run(
                    tuple(stretches(rows, share, device))
                )
            except NotFinite as found:
                raise self._blame(found.row, reader) from None
        # Only now, when nothing can be on its way into it or out of it.
        self._idle.append(memory)
        for shard in sorted(output.shards):
            self._staging.sync(shard + UNFINISHED)
        return Receipt(
            segment=segment,
            read_bytes=reader.read_bytes,
            written_bytes=output.written_bytes,
            seconds=round(time.monotonic() - started, 6),
            worker=self._name,
            digests=output.digests,
            peak_rss=self._heap.peak_bytes,
            peak_device=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            note=note,
        )

    def _memory(self, transfers: Transfers) -> _Memory:
        """What a lane has done with, or new."""
        for memory in tuple(self._idle):
            if memory.scratch.device == transfers.device:
                with suppress(ValueError):
                    self._idle.remove(memory)
                    return memory
        nbytes = self._projection.lane.write_bytes
        return _Memory(
            blocks=(transfers.buffer(nbytes), transfers.buffer(nbytes)),
            loads=[NOTHING, NOTHING],
            scratch=Scratch(transfers.device),
        )

    def _blame(self, row: RowJob, reader: LoadReader) -> NonFiniteError:
        """What made a row NaN or infinite."""
        cut = stretches([row], self._projection.lane, _PROCESSOR)
        loads = [load for stretch in cut for load in stretch.loads]
        buffer = HostTransfers().buffer(max(load.nbytes for load in loads))
        read = ((load, reader.read(load, buffer)) for load in loads)
        return NonFiniteError(find_cause(row, read, self._names))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
