"""What the events of a run add up to: bytes done, speed, time left. Renderers read it; it prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from raymerge.events import (
    Event,
    Planned,
    SegmentDone,
    StageKept,
    StageStarted,
    Started,
    StepKept,
    StepStarted,
    UnitDone,
    UnitProgress,
    Verified,
    WorkerLost,
)


@dataclass(slots=True)
class WorkerTally:
    """One worker's share."""

    segments: int = 0
    """Segments, or units of a stage, that it made in this run."""
    nbytes: int = 0
    is_lost: bool = False


class Tally:
    """Adds up events. Bytes of an earlier run count as done, but not for the speed.

    Of several merges and stages it is always about the one that runs. Units of a stage are counted as the
    segments of a merge are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step: StepStarted | StepKept | None = None
        self.stage: StageStarted | StageKept | None = None
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self.plan: Planned | None = None
        self.started: Started | StageStarted | None = None
        self.verified: Verified | None = None
        self.workers: dict[str, WorkerTally] = {}
        self.made_segments = 0
        self.made_bytes = 0
        self.peak_bytes = 0
        self._planned_bytes = 0
        self._begun_bytes = 0

    def take(self, event: Event) -> None:
        if isinstance(event, StepStarted | StepKept):
            self._begin()
            self.step, self.stage = event, None
        elif isinstance(event, StageStarted | StageKept):
            self._begin()
            self.stage = event
            if isinstance(event, StageStarted):
                self._start(event)
        elif isinstance(event, Planned):
            if self.stage is not None:
                self._begin()
            self.plan, self.stage = event, None
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, SegmentDone | UnitDone):
            self._add(event)
        elif isinstance(event, UnitProgress):
            self._begun_bytes = max(0, event.done_bytes - self._finished_bytes)
        elif isinstance(event, WorkerLost):
            self.workers.setdefault(event.worker, WorkerTally()).is_lost = True
        elif isinstance(event, Verified):
            self.verified = event

    def _start(self, event: Started | StageStarted) -> None:
        self.started, self._began = event, self._clock()
        self.workers = {name: WorkerTally() for name in event.workers}

    def _add(self, event: SegmentDone | UnitDone) -> None:
        nbytes = event.read_bytes + event.written_bytes
        worker = self.workers.setdefault(event.worker, WorkerTally())
        worker.segments += 1
        worker.nbytes += nbytes
        self.made_segments += 1
        self.made_bytes += nbytes
        if isinstance(event, SegmentDone):
            self.peak_bytes = max(self.peak_bytes, event.peak_bytes)
        self._planned_bytes += event.planned_bytes
        # What was begun of this unit is no more than all of it, so that the sum does not fall.
        self._begun_bytes = max(0, self._begun_bytes - event.planned_bytes)

    @property
    def is_last(self) -> bool:
        """Whether the merge that runs makes the output."""
        return self.step is None or self.step.number == self.step.total

    @property
    def part(self) -> str:
        return "segment" if self.stage is None else "unit"

    @property
    def total_bytes(self) -> int:
        """Bytes to read and write in the whole merge; of a stage those to read."""
        if isinstance(self.stage, StageStarted):
            return self.stage.total_bytes
        return self.plan.total_bytes if self.plan is not None else 0

    @property
    def total_segments(self) -> int:
        """Segments of the whole merge, or units of the stage."""
        if isinstance(self.stage, StageStarted):
            return self.stage.units
        return self.plan.segments if self.plan is not None else 0

    @property
    def done_segments(self) -> int:
        """Segments or units done, by this run and earlier ones."""
        return self.made_segments + self._done_before

    @property
    def done_bytes(self) -> int:
        """Bytes that are done, by this run and earlier ones; of a stage those of begun units too."""
        return self._finished_bytes + self._begun_bytes

    @property
    def _finished_bytes(self) -> int:
        return self._planned_bytes + (self.started.done_bytes if self.started is not None else 0)

    @property
    def _done_before(self) -> int:
        if isinstance(self.started, StageStarted):
            return self.started.done_units
        return self.started.done_segments if self.started is not None else 0

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written in this run, those of begun units included."""
        return self.made_bytes + self._begun_bytes

    @property
    def fraction(self) -> float:
        """Part of the bytes that is done, from 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since work began in this run."""
        return self._clock() - self._began if self._began is not None else 0.0

    def speed(self, nbytes: int) -> float:
        """Bytes a second in this run, for ``nbytes`` that were made in it."""
        return nbytes / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to go at this speed; None while it is not known."""
        speed = self.speed(self._planned_bytes + self._begun_bytes)
        return (self.total_bytes - self.done_bytes) / speed if speed > 0 else None
