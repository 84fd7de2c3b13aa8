"""Shows a run: a live view on a terminal, occasional lines elsewhere, or events as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raymerge import events
from raymerge.cli.render.ending import Step, ending, how, summary_rows
from raymerge.cli.render.reports import duplicate_lines, encoding_lines, encoding_warning
from raymerge.cli.render.screen import counted, lines_of, make_console, make_table, printable, put_json
from raymerge.cli.render.search import search_view
from raymerge.cli.render.tally import SearchTally, Tally, WorkerTally
from raymerge.errors import shortlist
from raymerge.events import Event, OnEvent
from raymerge.units import format_duration, format_size

_QUIET_SECONDS = 5.0
_QUIET_PART = 0.1
_SILENT_SECONDS = 60.0
_MOST_REASON = 300
"""Characters of why an output of a sweep failed; the error at the end has all."""
_REFRESH_PER_SECOND = 4
_MOST_ROWS, _OTHER_LINES = 12, 12
"""Workers that are shown, and lines of a terminal that other things need."""
_TENSOR_COLUMNS, _PLAIN_COLUMNS = 64, 44
"""Of a terminal from which on there is room for the name of a tensor, and for what is done with it."""
_ACTIVITIES = ("computing", "writing", "reading", "waiting")
"""Of several parts in hand the first of these is told."""


@contextmanager
def make_progress(
    stream: IO[str],
    *,
    as_json: bool,
    output: str,
    clock: Callable[[], float] = time.monotonic,
    then: Callable[[], Sequence[Step]] = lambda: (),
) -> Iterator[OnEvent]:
    """Shows events in the way that suits the stream; ``clock`` returns seconds, ``then`` what is useful next,
    for the last event as JSON."""
    console = make_console(stream)
    if as_json:
        yield JsonProgress(stream, then, clock=clock)
    elif console.is_terminal and not console.is_dumb_terminal:
        with LiveProgress(console, output, clock=clock) as live:
            yield live
    else:
        yield PlainProgress(console, output, clock=clock)


class JsonProgress:
    def __init__(
        self, stream: IO[str], then: Callable[[], Sequence[Step]], *, clock: Callable[[], float]
    ) -> None:
        self._stream, self._then, self._tally = stream, then, Tally(clock)

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        # The first is for eyes; of an error there is an event of the command itself.
        if isinstance(event, events.WorkerProgress | events.Ended):
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        more = ending(self._tally, self._then()) if self._tally.is_end(event) else {}
        put_json(self._stream, {**event.to_json(), **more, "time": now})


class Progress:
    """Tells in lines what happened; its subclasses also how far it is."""

    def __init__(self, console: Console, output: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._output, self._clock = console, output, clock
        self._tally = Tally(clock)
        self._warned: set[str] = set()
        self._shown_at, self._shown_part = clock(), 0.0

    def _tell(self, event: Event) -> None:
        for line in _lines(event, self._tally):
            self._print(line)
        for about, line in _warnings(event, self._tally.part):
            # Of a GPU that fails and of storage that is away for a moment once: others meet the same.
            if about not in self._warned:
                self._print(line, style="yellow")
                self._tally.num_warnings += line.startswith("warning: ")
            self._warned |= {about} - {""}
        if self._tally.is_end(event):
            self._print(f"done: {self._output or event.path}", style="bold green")
            self._print_rows(summary_rows(self._tally, event))

    def _print(self, text: str, style: str = "") -> None:
        self._keep(Text(printable(text), style=style))

    def _print_rows(self, rows: Iterator[tuple[str, str]]) -> None:
        table = make_table(("", ""), ((f"  {name}", value) for name, value in rows))
        self._keep(table if self._console.is_terminal else lines_of(table))

    def _keep(self, renderable: RenderableType) -> None:
        # A log keeps a sentence on one line; a terminal wraps it between words.
        self._console.print(renderable, soft_wrap=not self._console.is_terminal)


_MOVES = events.SegmentDone | events.UnitDone | events.UnitProgress | events.WorkerProgress


class PlainProgress(Progress):
    def __call__(self, event: Event) -> None:
        tally = self._tally
        tally.take(event)
        self._tell(event)
        waited = self._clock() - self._shown_at
        is_further = waited >= _QUIET_SECONDS and tally.fraction >= self._shown_part + _QUIET_PART
        is_time = isinstance(event, _MOVES) and (is_further or waited >= _SILENT_SECONDS)
        if is_time and not waiting(tally):
            self._console.print(f"{tally.fraction:.0%}: {summary(tally)}", soft_wrap=True)
        if is_time or isinstance(event, events.Started | events.StageStarted):
            self._shown_at, self._shown_part = self._clock(), tally.fraction


class LiveProgress(Progress):
    def __init__(self, console: Console, output: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, output, clock=clock)
        self._waiting = Spinner("dots", "Planning and starting the workers")
        self._waits_for, self._waits_since = "", 0.0
        self._live = Live(
            console=console, get_renderable=self._view, refresh_per_second=_REFRESH_PER_SECOND, transient=True
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        if isinstance(event, events.Ended) or self._tally.is_end(event):
            self._live.stop()
        elif not self._live.is_started:
            self._live.start()
        self._tell(event)

    def _so_long(self, now: str) -> str:
        if now != self._waits_for:
            self._waits_for, self._waits_since = now, self._clock()
        waited = self._clock() - self._waits_since
        return f", {format_duration(waited)} so far" if waited >= _QUIET_SECONDS else ""

    @property
    def is_live(self) -> bool:
        return self._live.is_started

    def refresh(self) -> None:
        self._live.refresh()

    def _view(self) -> RenderableType:
        if self._tally.search is not None:
            return search_view(self._tally.search)
        now = waiting(self._tally)
        if now:
            self._waiting.text = Text(printable(now) + self._so_long(now))
            return self._waiting
        return view(self._tally, self._console)


def view(tally: Tally, console: Console) -> RenderableType:
    """How far a run is, in as many columns and lines as the console has."""
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    done = ProgressBar(total=max(1, tally.total_bytes), completed=tally.done_bytes)
    bar.add_row(done, f"{tally.fraction:.0%}")
    steps = (tally.outputs, tally.step, tally.stage)
    titles = [Text(printable(_title(each))) for each in steps if each is not None]
    return Group(*titles, bar, Text(summary(tally)), *_worker_rows(tally, console))


def summary(tally: Tally) -> str:
    left = tally.seconds_left
    # Of a stage nothing may be known yet; often it has one unit alone.
    waited = "" if tally.stage is None else f"{format_duration(tally.elapsed)} so far"
    parts = (
        f"{format_size(tally.done_bytes)} of {format_size(tally.total_bytes)}",
        _per_second(tally.rate) if tally.rate else "",
        f"{format_duration(left)} left" if left is not None else waited,
        f"{tally.done_segments} of {counted(tally.total_segments, tally.part)}",
    )
    return ", ".join(part for part in parts if part)


def waiting(tally: Tally) -> str:
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


def _worker_rows(tally: Tally, console: Console) -> Iterator[RenderableType]:
    """The workers that moved most, and the others in one line."""
    # Events change it in another thread.
    workers = [(name, worker) for name, worker in tuple(tally.workers.items()) if not worker.is_lost]
    most = max(1, min(_MOST_ROWS, console.size.height - _OTHER_LINES))
    busiest = {name for name, _ in sorted(workers, key=lambda each: -each[1].moved_bytes)[:most]}
    shown = [each for each in workers if each[0] in busiest]
    widest = max((len(name) for name, _ in shown), default=0)
    rows = [_worker_row(name.ljust(widest), worker, tally, console.width) for name, worker in shown]
    yield make_table([""] * len(rows[0]) if rows else (), rows, numbers=(len(rows[0]) - 1,) if rows else ())
    others = [worker for name, worker in workers if name not in busiest]
    if others:
        rate = sum(tally.rate_of(worker) for worker in others)
        yield Text(f"and {counted(len(others), 'other')}: {_per_second(rate)}")


def _worker_row(name: str, worker: WorkerTally, tally: Tally, columns: int) -> tuple[str, ...]:
    rate = _per_second(tally.rate_of(worker)) if worker.moved_bytes else ""
    order = {activity: number for number, activity in enumerate(_ACTIVITIES)}
    part = min(worker.parts, key=lambda each: order[each.activity], default=None)
    if columns < _PLAIN_COLUMNS:
        return name, rate
    activity = "" if part is None else part.activity
    share = f"{part.done_bytes / part.total_bytes:.0%}" if part is not None and part.total_bytes else ""
    if columns < _TENSOR_COLUMNS:
        return name, activity, share, rate
    what = "" if part is None else part.tensor or f"{tally.part} {part.part}"
    done = f"{worker.segments} done"
    room = columns - len(name) - sum(map(len, ("computing", "100%", "9999 done", "999.99 MB/s"))) - 10
    return name, f"{activity:9}", _tail(what, room).ljust(room), f"{share:>4}", f"{done:>9}", f"{rate:>11}"


def _tail(name: str, room: int) -> str:
    """The end of a name, which says most."""
    return name if len(name) <= room else f"...{name[3 - room :]}"


def _lines(event: Event, tally: Tally) -> Iterator[str]:
    match event:
        case (
            events.OutputsStarted()
            | events.StepStarted()
            | events.StepKept()
            | events.StageStarted()
            | events.StageKept()
        ):
            yield _title(event)
            if isinstance(event, events.StageStarted) and event.done_units:
                yield f"going on: {event.done_units} of {counted(event.units, 'unit')} are done already"
        case events.CheckpointsPassedOver():
            yield from (f"passed over: {place}: {why}" for place, why in event.unfinished.items())
        case events.SearchStarted():
            going = f", {event.done} are done already" if event.done else ""
            yield f"searching: at most {counted(event.evaluations, 'evaluation')} by {event.strategy}{going}"
        case events.TrialEvaluated() if tally.search is not None and not event.is_recorded:
            yield from _trial_lines(event, tally.search)
        case events.SearchEnded():
            best = f"trial {event.number} with {event.score:.6g}: {_values(event.values)}"
            yield f"the best of {counted(event.trials, 'trial')} is {best}; it is merged now"
        case events.OutputKept():
            yield f"{event.name}: made already, and left as it is"
        case events.StageReport() if isinstance(tally.stage, events.StageStarted):
            yield f"made in {format_duration(tally.elapsed)} with {how(tally.stage)}"
        case events.Planned():
            peak = f"at most {format_size(event.projected_peak)} of memory a worker"
            yield f"planned: {event.tensors} tensors, {format_size(event.output_bytes)}; {peak}"
            yield from (f"  note: {note}" for note in event.notes)
        case events.RayLeftOut():
            yield "in this process: Ray takes longer to start than so small a merge (--workers 1 starts it)"
        case events.Started():
            begun = f"going on: {event.done_segments} of {tally.total_segments} segments are done already,"
            why = f": {event.device_reason}" if event.device_reason else ""
            yield f"{begun if event.done_segments else 'merging'} with {how(event)}{why}"
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
            yield from _published(event, tally)


def _trial_lines(event: events.TrialEvaluated, tally: SearchTally) -> Iterator[str]:
    if event.score is not None and event.share == 1.0:
        note = ", the best so far" if tally.is_best(event) else ""
        seconds = format_duration(event.seconds)
        yield f"trial {event.number}: {event.score:.6g}{note} ({_values(event.values)}), in {seconds}"


def _values(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _warnings(event: Event, part: str) -> Iterator[tuple[str, str]]:
    """Warnings, each with the key by which it is shown once; "" for one that is always shown."""
    match event:
        case events.EncodingErrorsFound() if event.above is not None:
            yield "", encoding_warning(event.above)
        case events.TrialEvaluated() if event.error and not event.is_recorded:
            yield "", f"warning: trial {event.number} failed: {event.error[:_MOST_REASON]}"
        case events.OutputFailed():
            why = event.message.partition("\n")[0][:_MOST_REASON]
            yield "", f"warning: {event.name} is given up, and others go on: {why}"
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


_Step: TypeAlias = (
    events.OutputsStarted | events.StepStarted | events.StepKept | events.StageStarted | events.StageKept
)


def _title(event: _Step) -> str:
    if isinstance(event, events.OutputsStarted):
        names = f"{counted(len(event.names), 'output')}: {shortlist(event.names)}"
        return names if event.total == 1 else f"read {event.number} of {event.total}, {names}"
    note = ", made already" if isinstance(event, events.StepKept | events.StageKept) else ""
    if isinstance(event, events.StageStarted | events.StageKept):
        return f"stage {event.number} of {event.total}: {event.title}{note}"
    return f"merge {event.number} of {event.total}{f': {event.name}' if event.name else ''}{note}"


def _merged(tally: Tally) -> Iterator[str]:
    yield f"merged: {format_size(tally.made_bytes)} read and written at {_per_second(tally.speed)}"
    made = sorted(worker.nbytes for worker in tally.workers.values() if not worker.is_lost)
    if len(made) > 1:
        yield f"  by {len(made)} workers: {format_size(made[0])} to {format_size(made[-1])} each"


def _per_second(rate: float) -> str:
    return f"{format_size(round(rate))}/s"


def _published(event: events.Published, tally: Tally) -> Iterator[str]:
    if tally.outputs is not None and (tally.step is None or tally.step.number == tally.step.total):
        yield f"published: {event.path}"
    elif not tally.is_last:
        by = f" with {how(tally.started)}" if tally.started is not None else ""
        yield f"made in {format_duration(event.seconds)}{by}"
