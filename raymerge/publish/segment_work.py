"""The work of a merge: segments of one plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from raymerge.device_numerics import return_free_memory
from raymerge.execute.ops import Jobs
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.merge_plan.memory import SMALLEST_LANE, Projection
from raymerge.merge_plan.tables import Plan
from raymerge.publish.attempt import RECORD, check_begun
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo, ReadStore


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """Everything that workers need to make segments, but their numbers."""

    plan: Plan
    """The plan."""
    roots: tuple[str, ...]
    """Place of each source, with its options."""
    staging: Path
    """The staging directory, reachable from every worker."""
    projection: Projection
    """Memory that a worker may use."""
    threads: int
    """Segments that a worker computes at the same time."""
    files: tuple[SourceFile, ...] = ()
    """The sources' files."""
    mark: str = ""
    """Of the staging directory; nothing is written to one with another mark. "" for any."""

    @property
    def slots(self) -> int:
        """As many as the projection counts with, and one that takes a lane as soon as it is free."""
        return self.projection.lanes + 1

    @property
    def part(self) -> str:
        """A segment."""
        return "segment"

    @property
    def place(self) -> Path:
        """The staging directory."""
        return self.staging

    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every segment, the files that it reads."""
        numbers = {(file.source, file.key): number for number, file in enumerate(self.files)}
        return tuple(frozenset(numbers[file] for file in files) for files in files_read(self.plan))

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of what a lane had, for the segment alone."""
        shared = self.projection.shared
        had = self.projection.lane.budget + shared if budget is None else budget
        needs = (row.need.least_bytes for row in Jobs(self.plan).rows(number))
        least = max((SMALLEST_LANE, *needs)) + shared
        return max(least, had // 2) if had > least else None

    def open(self, device: torch.device, name: str) -> SegmentsRunner:
        """A runner over the sources and the staging directory."""
        patience = RetryPolicy()
        sources = [
            open_store(root, patience=patience, expected=self._expected(number))
            for number, root in enumerate(self.roots)
        ]
        guard = partial(check_begun, self.staging / RECORD, self.mark) if self.mark else None
        staging = LocalStore(self.staging, patience=patience, guard=guard)

        def runner(projection: Projection) -> SegmentRunner:
            return SegmentRunner(
                self.plan,
                sources,
                staging,
                device=device,
                projection=projection,
                threads=self.threads,
                name=name,
            )

        return SegmentsRunner(runner, self.projection, sources, staging, patience)

    def _expected(self, source: int) -> dict[str, FileInfo]:
        """A source's files, as they must be while they are read."""
        mine = (each for each in self.files if each.source == source and each.version)
        return {each.key: FileInfo(each.key, each.nbytes, each.version) for each in mine}


class SegmentsRunner:
    """Makes segments, and holds the stores that they are read from and written to."""

    def __init__(
        self,
        runner: Callable[[Projection], SegmentRunner],
        projection: Projection,
        sources: Sequence[ReadStore],
        staging: LocalStore,
        patience: RetryPolicy,
    ) -> None:
        """
        Args:
            runner: gives what makes segments with so much memory.
            projection: the memory that they may use.
            sources: what it reads from.
            staging: what it writes to.
            patience: of all stores, with storage that fails for a moment.
        """
        self._runner = runner
        self._projection = projection
        self._sources = sources
        self._staging = staging
        self._patience = patience
        self._made_by = [runner(projection)]
        # Each lane computes on its own thread; torch's own threads would wait for each other at every step.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # Modules and the plan stay: the collector need not look through them again and again.
        gc.freeze()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Make one segment."""
        return self.settled(self.fitting(budget).run(number))

    def settled(self, receipt: Receipt) -> Receipt:
        """What is made, with what storage failed with; raises CheckpointError where it is of no use."""
        # Of bytes that were read while a file was written to, there must be no receipt.
        for source in self._sources:
            source.check_expected()
        faults = self._patience.take_faults()
        return replace(receipt, retries=faults) if faults else receipt

    def fitting(self, budget: int | None) -> SegmentRunner:
        """What makes segments with so much memory, in this thread; None for what the projection says."""
        # Libraries of linear algebra go by the number of the thread that calls them, and round by it.
        torch.set_num_threads(1)
        usual = self._made_by[0]
        if budget is None:
            return usual
        usual.rest()
        return_free_memory()
        self._made_by[1:] = [self._runner(replace(self._projection, budget=budget, lanes=1, peak=budget))]
        return self._made_by[1]

    def abort(self) -> None:
        """Have every segment in hand fail at its next tile."""
        self._patience.end()
        for each in self._made_by:
            each.abort()

    def close(self) -> None:
        """Close the files."""
        gc.unfreeze()
        torch.set_num_threads(self._torch_threads)
        for store in (*self._sources, self._staging):
            store.close()
