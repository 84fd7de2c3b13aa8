"""The work of a merge: segments of one plan."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.planner.projection import Projection
from raymerge.planner.tables import Plan
from raymerge.runtime.pool import Runner
from raymerge.storage.open import open_store
from raymerge.storage.store import ReadStore


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """Everything that workers need to make segments, but their numbers."""

    plan: Plan
    """The plan."""
    roots: tuple[str, ...]
    """Directory of each source."""
    staging: Path
    """The staging directory, reachable from every worker."""
    projection: Projection
    """Memory that a worker may use."""
    threads: int
    """Segments that a worker computes at the same time."""

    @property
    def slots(self) -> int:
        """As many as the projection counts with, and one that takes a lane as soon as it is free."""
        return self.projection.lanes + 1

    @property
    def part(self) -> str:
        """A segment."""
        return "segment"

    def open(self, device: torch.device, name: str) -> Runner:
        """A runner over the sources and the staging directory."""
        sources = [open_store(root) for root in self.roots]
        staging = open_store(str(self.staging))
        runner = SegmentRunner(
            self.plan,
            sources,
            staging,
            device=device,
            projection=self.projection,
            threads=self.threads,
            name=name,
        )
        return SegmentsRunner(runner, (*sources, staging))


class SegmentsRunner:
    """Makes segments, and holds the stores that they are read from and written to."""

    def __init__(self, segments: SegmentRunner, stores: Sequence[ReadStore]) -> None:
        self.segments = segments
        self._stores = stores
        # Each lane computes on its own thread; torch's own threads would wait for each other at every step.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # Modules and the plan stay: the collector need not look through them again and again.
        gc.freeze()

    def run(self, number: int) -> Receipt:
        """Make one segment."""
        # Libraries of linear algebra go by the number of the thread that calls them, and round by it.
        torch.set_num_threads(1)
        return self.segments.run(number)

    def abort(self) -> None:
        """Have every segment in hand fail at its next tile."""
        self.segments.abort()

    def close(self) -> None:
        """Close the files."""
        gc.unfreeze()
        torch.set_num_threads(self._torch_threads)
        for store in self._stores:
            store.close()
