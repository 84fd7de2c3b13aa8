"""Shows a run: a live view on a terminal, occasional lines elsewhere, or events as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raymerge import events
from raymerge.cli.render.reports import duplicate_lines, encoding_lines, encoding_warning
from raymerge.cli.render.screen import counted, make_console, make_table, printable, put_json
from raymerge.events import Event, OnEvent
from raymerge.units import format_duration, format_size

_QUIET_SECONDS = 5.0
_QUIET_PART = 0.1
_SILENT_SECONDS = 60.0
_REFRESH_PER_SECOND = 4


@contextmanager
def make_progress(
    stream: IO[str], *, as_json: bool, output: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnEvent]:
    """Shows events in the way that suits the stream; ``clock`` returns seconds."""
    console = make_console(stream)
    if as_json:

        def put(event: Event) -> None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            put_json(stream, {**event.to_json(), "time": now})

        yield put
    elif console.is_terminal and not console.is_dumb_terminal:
        with LiveProgress(console, output, clock=clock) as live:
            yield live
    else:
        yield PlainProgress(console, output, clock=clock)


class _Progress:
    """Tells in lines what happened; its subclasses also how far it is."""

    def __init__(self, console: Console, output: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._output, self._clock = console, output, clock
        self._tally = Tally(clock)
        self._warned: set[str] = set()
        self._shown_at, self._shown_part = clock(), 0.0

    def _tell(self, event: Event) -> None:
        for line in _lines(event, self._tally, self._output):
            self._print(line)
        for about, line in _warnings(event, self._tally.part):
            # Of a GPU that fails and of storage that is away for a moment once: others meet the same.
            if about not in self._warned:
                self._print(line, style="yellow")
            self._warned |= {about} - {""}

    def _print(self, text: str, style: str = "") -> None:
        # A log keeps a sentence on one line; a terminal wraps it between words.
        self._console.print(Text(printable(text), style=style), soft_wrap=not self._console.is_terminal)


class PlainProgress(_Progress):
    def __call__(self, event: Event) -> None:
        tally = self._tally
        tally.take(event)
        self._tell(event)
        waited = self._clock() - self._shown_at
        is_further = waited >= _QUIET_SECONDS and tally.fraction >= self._shown_part + _QUIET_PART
        is_time = isinstance(event, events.SegmentDone | events.UnitDone | events.UnitProgress) and (
            is_further or waited >= _SILENT_SECONDS
        )
        if is_time:
            self._console.print(f"{tally.fraction:.0%}: {summary(tally)}", soft_wrap=True)
        if is_time or isinstance(event, events.Started | events.StageStarted):
            self._shown_at, self._shown_part = self._clock(), tally.fraction


class LiveProgress(_Progress):
    def __init__(self, console: Console, output: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, output, clock=clock)
        self._waiting = Spinner("dots", "Planning and starting the workers")
        self._live = Live(
            console=console, get_renderable=self._view, refresh_per_second=_REFRESH_PER_SECOND, transient=True
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        if isinstance(event, events.Published) and self._tally.is_last:
            self._live.stop()
        self._tell(event)

    def refresh(self) -> None:
        self._live.refresh()

    def _view(self) -> RenderableType:
        tally = self._tally
        waiting = _waiting(tally)
        if waiting:
            self._waiting.text = Text(printable(waiting))
            return self._waiting
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        done = ProgressBar(total=max(1, tally.total_bytes), completed=tally.done_bytes)
        bar.add_row(done, f"{tally.fraction:.0%}")
        titles = [Text(printable(_title(each))) for each in (tally.step, tally.stage) if each is not None]
        return Group(*titles, bar, Text(summary(tally)), _worker_table(tally))


def summary(tally: Tally) -> str:
    left = tally.seconds_left
    # Of a stage nothing may be known yet; often it has one unit alone.
    waited = "" if tally.stage is None else f"{format_duration(tally.elapsed)} so far"
    parts = (
        f"{format_size(tally.done_bytes)} of {format_size(tally.total_bytes)}",
        _rate(tally, tally.moved_bytes),
        f"{format_duration(left)} left" if left is not None else waited,
        f"{tally.done_segments} of {counted(tally.total_segments, tally.part)}",
    )
    return ", ".join(part for part in parts if part)


def _waiting(tally: Tally) -> str:
    """What runs while no segment or unit does; "" while one is in hand."""
    if isinstance(tally.stage, events.StageKept):
        return "Starting"
    if tally.started is None:
        return "Planning and starting the workers" if tally.step is None else "Starting"
    if not tally.total_segments or tally.done_segments < tally.total_segments:
        return ""
    return (
        "Finishing, verifying and publishing" if tally.stage is None else f"Concluding: {tally.stage.title}"
    )


def _worker_table(tally: Tally) -> Table:
    rows = [
        (name, counted(worker.segments, tally.part), _rate(tally, worker.nbytes))
        for name, worker in tally.workers.items()
        if not worker.is_lost
    ]
    return make_table(("", "", ""), rows, numbers=(1, 2))


def _lines(event: Event, tally: Tally, output: str) -> Iterator[str]:
    match event:
        case events.StepStarted() | events.StepKept() | events.StageStarted() | events.StageKept():
            yield _title(event)
            if isinstance(event, events.StageStarted) and event.done_units:
                yield f"going on: {event.done_units} of {counted(event.units, 'unit')} are done already"
        case events.StageReport() if isinstance(tally.stage, events.StageStarted):
            yield f"made in {format_duration(tally.elapsed)} with {_how(tally.stage)}"
        case events.Planned():
            peak = f"at most {format_size(event.projected_peak)} of memory a worker"
            yield f"planned: {event.tensors} tensors, {format_size(event.output_bytes)}; {peak}"
            yield from (f"  note: {note}" for note in event.notes)
        case events.Started():
            begun = f"going on: {event.done_segments} of {tally.total_segments} segments are done already,"
            why = f": {event.device_reason}" if event.device_reason else ""
            yield f"{begun if event.done_segments else 'merging'} with {_how(event)}{why}"
        case events.SegmentDone() if tally.done_segments >= tally.total_segments:
            yield from _merged(tally)
        case events.DuplicatesFound():
            yield from duplicate_lines(event)
        case events.EncodingErrorsFound():
            yield from encoding_lines(event)
        case events.WorkerLeft():
            yield f"{event.worker} has nothing more to do and leaves"
        case events.Stopping():
            yield _stopping(event.seconds, tally.part)
        case events.Verified():
            yield f"verified: {event.tensors} tensors, {format_size(event.nbytes)}, all as planned"
        case events.Published():
            yield from _published(event, tally, output)


def _warnings(event: Event, part: str) -> Iterator[tuple[str, str]]:
    """Warnings, each with the key by which it is shown once; "" for one that is always shown."""
    match event:
        case events.EncodingErrorsFound() if event.above is not None:
            yield "", encoding_warning(event.above)
        case events.DeviceFailed():
            instead = f"{part} {event.segment} was made on the CPU, and so is any other that it fails in"
            yield event.worker, f"warning: the GPU of {event.worker} failed ({event.reason}); {instead}"
        case events.NodeOfNoUse():
            yield "", f"warning: workers on {event.node}, which joined, get no {part}s: {event.lack}"
        case events.RoomAwaited():
            most = format_duration(event.seconds)
            yield "", f"waiting for the cluster to grow, {most} at most: {event.lack}"
        case events.WorkerLost():
            passed = f"{counted(len(event.segments), part)} in hand pass to another"
            given = passed if event.segments else "it had nothing in hand"
            yield "", f"warning: {event.worker} was lost ({event.reason}); {given}"
        case events.MemoryShort():
            what = f"{part} {event.segment} ran out of memory on {event.worker} ({event.reason})"
            yield "", f"warning: {what}; it is made again alone, with {format_size(event.budget)}"
        case events.StorageFailed():
            for fault in sorted(event.faults):
                yield fault, f"storage failed for a moment, and was asked again: {fault}"


def _stopping(seconds: float | None, part: str) -> str:
    if seconds is None:
        return f"stopping: the {part}s in hand are finished first; Ctrl-C again stops at once"
    if not seconds:
        return f"stopping at once: the {part}s in hand are given up"
    return f"stopping: the {part}s in hand have {seconds:g} s to finish"


def _title(event: events.StepStarted | events.StepKept | events.StageStarted | events.StageKept) -> str:
    note = ", made already" if isinstance(event, events.StepKept | events.StageKept) else ""
    if isinstance(event, events.StageStarted | events.StageKept):
        return f"stage {event.number} of {event.total}: {event.title}{note}"
    return f"merge {event.number} of {event.total}{f': {event.name}' if event.name else ''}{note}"


def _merged(tally: Tally) -> Iterator[str]:
    yield f"merged: {format_size(tally.made_bytes)} read and written at {_rate(tally, tally.made_bytes)}"
    # It is 0 where it was not measured.
    if tally.peak_bytes and tally.plan is not None:
        projected = format_size(tally.plan.projected_peak)
        yield f"  peak: {format_size(tally.peak_bytes)} of {projected} a worker"
    for name, worker in tally.workers.items():
        made = f"{counted(worker.segments, 'segment')}, {format_size(worker.nbytes)}"
        yield f"  {name}: {made}, {_rate(tally, worker.nbytes)}"


def _rate(tally: Tally, nbytes: int) -> str:
    return f"{format_size(round(tally.speed(nbytes)))}/s"


def _published(event: events.Published, tally: Tally, output: str) -> Iterator[str]:
    how = f" with {_how(tally.started)}" if tally.started is not None else ""
    took = f"in {format_duration(event.seconds)}{how}"
    if not (tally.is_last and output):
        yield f"made {took}"
        return
    yield from (f"done: {output}", f"  {took}")
    if tally.plan is not None:
        yield f"  digest {tally.plan.digest}"


def _how(started: events.Started | events.StageStarted) -> str:
    threads = started.threads if isinstance(started, events.Started) else 1
    each = f" of {threads} threads" if threads > 1 else ""
    return f"{counted(len(started.workers), 'worker')}{each} on {started.device}"


@dataclass(slots=True)
class WorkerTally:
    segments: int = 0
    nbytes: int = 0
    is_lost: bool = False


class Tally:
    """Adds up events. Bytes of an earlier run count as done, but not for the speed.

    Of several merges and stages it counts the running one. Units of a stage count as segments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step: events.StepStarted | events.StepKept | None = None
        self.stage: events.StageStarted | events.StageKept | None = None
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self.plan: events.Planned | None = None
        self.started: events.Started | events.StageStarted | None = None
        self.workers: dict[str, WorkerTally] = {}
        self.total_bytes = self.total_segments = 0
        self.done_segments = self.made_bytes = self.peak_bytes = 0
        self._planned_bytes = self._begun_bytes = 0

    def take(self, event: Event) -> None:
        match event:
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
                self._begun_bytes = max(0, event.done_bytes - self._finished_bytes)
            case events.WorkerLost():
                self.workers.setdefault(event.worker, WorkerTally()).is_lost = True

    def _start(self, event: events.Started | events.StageStarted, done: int) -> None:
        self.started, self._began, self.done_segments = event, self._clock(), done
        self.workers = {name: WorkerTally() for name in event.workers}

    def _add(self, event: events.SegmentDone | events.UnitDone) -> None:
        nbytes = event.read_bytes + event.written_bytes
        worker = self.workers.setdefault(event.worker, WorkerTally())
        worker.segments += 1
        worker.nbytes += nbytes
        self.done_segments += 1
        self.made_bytes += nbytes
        if isinstance(event, events.SegmentDone):
            self.peak_bytes = max(self.peak_bytes, event.peak_bytes)
        self._planned_bytes += event.planned_bytes
        # What was begun of this unit is no more than all of it, so that the sum does not fall.
        self._begun_bytes = max(0, self._begun_bytes - event.planned_bytes)

    @property
    def is_last(self) -> bool:
        return self.step is None or self.step.number == self.step.total

    @property
    def part(self) -> str:
        return "segment" if self.stage is None else "unit"

    @property
    def _finished_bytes(self) -> int:
        return self._planned_bytes + (self.started.done_bytes if self.started is not None else 0)

    @property
    def done_bytes(self) -> int:
        return self._finished_bytes + self._begun_bytes

    @property
    def moved_bytes(self) -> int:
        return self.made_bytes + self._begun_bytes

    @property
    def fraction(self) -> float:
        return self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began if self._began is not None else 0.0

    def speed(self, nbytes: int) -> float:
        """Bytes a second in this run, for ``nbytes`` that were made in it."""
        return nbytes / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        speed = self.speed(self._planned_bytes + self._begun_bytes)
        return (self.total_bytes - self.done_bytes) / speed if speed > 0 else None
