"""The cluster that a plan is simulated on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from raymerge.errors import OptionError, Problem
from raymerge.merge_plan.lanes import lanes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers and the storage that they share; speeds are in bytes per second."""

    workers: int = 1
    """How many there are."""
    storage: float | None = None
    """What all workers together read and write."""
    read: float | None = None
    """What they read, where that has a limit of its own."""
    write: float | None = None
    """What they write durably, where that has a limit of its own."""
    per_worker: float | None = None
    """What one worker reads and writes; None for as much as the storage gives."""
    compute: float | None = None
    """Bytes of sources that one thread computes with, the base counted; None for what was measured."""
    threads: int = 4
    """Threads of a worker that compute at once; as many as a worker on a machine of many cores has."""
    cores: int | None = None
    """Cores of a worker, on which it computes, reads and writes; None for as many as it likes."""
    per_core: float | None = None
    """What one core reads or writes, where bytes take its time (files in the system's cache, object storage);
    None where they do not (direct I/O)."""
    lanes: int | None = None
    """Segments that a worker has in flight, if its memory holds so many; None for two more than threads."""
    memory: int | None = None
    """Bytes that a worker may use; None for what the plan is shown for."""
    overhead: float = 0.005
    """Seconds from a lane's last segment to its next."""
    driver: float = 0.001
    """Seconds in which the driver takes one receipt and hands out the next segment, one after the other."""
    startup: float = 8.0
    """Seconds until the workers are there."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise OptionError(problems)

    @property
    def wanted_lanes(self) -> int:
        """Segments that a worker is to have in flight."""
        return self.lanes or lanes_of(self.threads)

    def _problems(self) -> Iterator[Problem]:
        for name in ("workers", "threads", "cores", "lanes"):
            if (given := getattr(self, name)) is not None and given < 1:
                what = f"{given} {name} cannot do anything."
                yield Problem(f"--simulate {name}", what, "Give 1 or more.")
        for name in ("storage", "read", "write", "per_worker", "compute", "per_core", "memory"):
            if (given := getattr(self, name)) is not None and not 0 < given < math.inf:
                yield Problem(f"--simulate {name}", f"{given} moves nothing.", "Give more than 0.")
        for name in ("overhead", "driver", "startup"):
            if not 0 <= getattr(self, name) < math.inf:
                yield Problem(f"--simulate {name}", f"{getattr(self, name)} is no time.", "Give 0 or more.")
        if self.storage is None and (self.read is None or self.write is None):
            what = "the speed of the storage is not given."
            remedy = "Give storage=2GB/s for reading and writing together, or both read= and write=."
            yield Problem("--simulate", what, remedy)
