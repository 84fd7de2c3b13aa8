"""Adds up what a run tells: how far it is, how fast, how long it takes, and what each worker does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from raymerge import events
from raymerge.events import Event, PartInHand

_FIRST_SECONDS = 3.0
"""Before that, a time left would be a guess: files are opened, and caches give more than disks will."""
_FIRST_PART = 0.01
_SAMPLES = 50
_LEAST_PAUSE = 0.2


class Speed:
    """Bytes a second over the later half of what was seen: a run is as fast as it is by now."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._began: float | None = None

    def take(self, now: float, nbytes: int) -> None:
        """``nbytes`` in all by now."""
        if self._began is None:
            self._began = now
        samples, elapsed = self._samples, now - self._began
        while len(samples) > 1 and samples[1][0] - self._began <= elapsed / 2:
            samples.popleft()
        if not samples or now - samples[-1][0] >= max(_LEAST_PAUSE, elapsed / _SAMPLES):
            samples.append((now, nbytes))

    def rate(self, now: float, nbytes: int) -> float:
        at, before = self._samples[0] if self._samples else (now, nbytes)
        return max(0, nbytes - before) / (now - at) if now > at else 0.0


@dataclass(slots=True)
class WorkerTally:
    segments: int = 0
    nbytes: int = 0
    """Of finished parts."""
    parts: tuple[PartInHand, ...] = ()
    """As it last told; small ones may be done by now."""
    begun_bytes: int = 0
    """Of the parts in hand."""
    is_lost: bool = False
    speed: Speed = field(default_factory=Speed)

    @property
    def moved_bytes(self) -> int:
        return self.nbytes + self.begun_bytes


@dataclass(slots=True)
class SearchTally:
    started: events.SearchStarted
    trials: dict[int, events.TrialEvaluated] = field(default_factory=dict)
    """By number, as last told."""

    def take(self, event: events.TrialEvaluated) -> None:
        self.trials[event.number] = event

    def best_first(self) -> list[events.TrialEvaluated]:
        whole = [each for each in tuple(self.trials.values()) if each.score is not None and each.share == 1.0]
        return sorted(whole, key=lambda each: (-(each.score or 0.0), each.number))

    def is_best(self, event: events.TrialEvaluated) -> bool:
        return self.best_first()[:1] == [event]


class Tally:
    """Bytes of an earlier run count as done, but not for the speed.

    Of several merges and stages it counts the running one. Units of a stage count as segments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step: events.StepStarted | events.StepKept | None = None
        self.stage: events.StageStarted | events.StageKept | None = None
        self.outputs: events.OutputsStarted | None = None
        """Those of a sweep that are made now; None where there is no sweep."""
        self.search: SearchTally | None = None
        """While candidates are evaluated."""
        self.num_warnings = 0
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self.merging_seconds = 0.0
        self.plan: events.Planned | None = None
        self.started: events.Started | events.StageStarted | None = None
        self.verified: events.Verified | None = None
        self.workers: dict[str, WorkerTally] = {}
        self.total_bytes = self.total_segments = 0
        self.done_segments = self.read_bytes = self.written_bytes = self.peak_bytes = 0
        self._planned_bytes = self._unit_bytes = self._most_done = 0
        self._speed, self._planned_speed = Speed(), Speed()

    def take(self, event: Event) -> None:
        match event:
            case events.SearchStarted():
                self.search = SearchTally(event)
            case events.TrialEvaluated() if self.search is not None:
                self.search.take(event)
            case events.SearchEnded():
                self.search = None
            case events.OutputsStarted():
                self._begin()
                self.outputs, self.step, self.stage = event, None, None
            case events.StepStarted() | events.StepKept():
                self._begin()
                self.step, self.stage = event, None
            case events.StageStarted() | events.StageKept():
                self._begin()
                self.stage = event
                if isinstance(event, events.StageStarted):
                    self.total_bytes, self.total_segments = event.total_bytes, event.units
                    self._start(event, event.done_units)
            case events.Planned():
                if self.stage is not None:
                    self._begin()
                self.plan, self.stage = event, None
                self.total_bytes, self.total_segments = event.total_bytes, event.segments
            case events.Started():
                self._start(event, event.done_segments)
            case events.SegmentDone() | events.UnitDone():
                self._add(event)
            case events.UnitProgress():
                self._unit_bytes = max(0, event.done_bytes - self._finished_bytes)
            case events.WorkerProgress():
                self._see(event)
            case events.WorkerLost():
                lost = self.workers.setdefault(event.worker, WorkerTally())
                lost.is_lost, lost.parts, lost.begun_bytes = True, (), 0
            case events.Verified():
                self.verified = event
        if self._began is not None:
            self._measure(event)

    def _start(self, event: events.Started | events.StageStarted, done: int) -> None:
        self.started, self._began, self.done_segments = event, self._clock(), done
        self.workers = {name: WorkerTally() for name in event.workers}
        for worker in self.workers.values():
            worker.speed.take(self._began, 0)

    def _add(self, event: events.SegmentDone | events.UnitDone) -> None:
        worker = self.workers.setdefault(event.worker, WorkerTally())
        worker.segments += 1
        worker.nbytes += event.read_bytes + event.written_bytes
        self.done_segments += 1
        self.read_bytes += event.read_bytes
        self.written_bytes += event.written_bytes
        if isinstance(event, events.SegmentDone):
            self.peak_bytes = max(self.peak_bytes, event.peak_bytes)
        self._planned_bytes += event.planned_bytes
        # What was begun of this part is no more than all of it, so that the sum does not fall.
        self._unit_bytes = max(0, self._unit_bytes - event.planned_bytes)
        worker.begun_bytes = max(0, worker.begun_bytes - event.planned_bytes)
        self.merging_seconds = self.elapsed

    def _see(self, event: events.WorkerProgress) -> None:
        worker = self.workers.setdefault(event.worker, WorkerTally())
        worker.parts = event.parts
        # Of a stage ``UnitProgress`` says it, for all workers together.
        worker.begun_bytes = 0 if self.stage is not None else sum(part.done_bytes for part in event.parts)

    def _measure(self, event: Event) -> None:
        now = self._clock()
        self._speed.take(now, self.moved_bytes)
        self._planned_speed.take(now, self.done_bytes)
        worker = self.workers.get(getattr(event, "worker", ""))
        if worker is not None:
            worker.speed.take(now, worker.moved_bytes)

    @property
    def is_last(self) -> bool:
        """Whether nothing follows what is made now. Of a sweep the last event says that."""
        return self.outputs is None and (self.step is None or self.step.number == self.step.total)

    def is_end(self, event: Event) -> TypeGuard[events.Published | events.OutputsPublished]:
        """Whether all that was to be made is in its place."""
        return isinstance(event, events.OutputsPublished) or (
            isinstance(event, events.Published) and self.is_last
        )

    @property
    def part(self) -> str:
        return "segment" if self.stage is None else "unit"

    @property
    def _finished_bytes(self) -> int:
        return self._planned_bytes + (self.started.done_bytes if self.started is not None else 0)

    @property
    def _begun_bytes(self) -> int:
        return self._unit_bytes + sum(worker.begun_bytes for worker in tuple(self.workers.values()))

    @property
    def done_bytes(self) -> int:
        """Never falls: what a lost worker had in hand is made up for first."""
        done = min(self._finished_bytes + self._begun_bytes, max(self.total_bytes, self._finished_bytes))
        self._most_done = max(self._most_done, done)
        return self._most_done

    @property
    def made_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def moved_bytes(self) -> int:
        return self.made_bytes + self._begun_bytes

    @property
    def fraction(self) -> float:
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began if self._began is not None else 0.0

    @property
    def speed(self) -> float:
        """Bytes a second in this run, on the average."""
        return self.made_bytes / self.merging_seconds if self.merging_seconds else 0.0

    @property
    def rate(self) -> float:
        """Bytes a second by now."""
        return self._speed.rate(self._clock(), self.moved_bytes)

    def rate_of(self, worker: WorkerTally) -> float:
        return worker.speed.rate(self._clock(), worker.moved_bytes)

    @property
    def seconds_left(self) -> float | None:
        """None as long as nobody can know."""
        before = self.started.done_bytes if self.started is not None else 0
        made = self.done_bytes - before
        if self.elapsed < _FIRST_SECONDS or made < _FIRST_PART * (self.total_bytes - before) or made <= 0:
            return None
        # Large parts may end so seldom that none did of late.
        speed = self._planned_speed.rate(self._clock(), self.done_bytes) or made / self.elapsed
        return (self.total_bytes - self.done_bytes) / speed
