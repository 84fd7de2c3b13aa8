"""Shows a run as it goes: a live view on a terminal, a line now and then elsewhere, or events as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raymerge.cli.render.duplicates import duplicate_lines, encoding_lines, encoding_warning
from raymerge.cli.render.screen import counted, heading, make_console, make_table, printable, put_json
from raymerge.cli.render.tally import Tally
from raymerge.events import (
    DeviceFailed,
    DuplicatesFound,
    EncodingErrorsFound,
    Event,
    MemoryShort,
    NodeOfNoUse,
    Planned,
    Published,
    RoomAwaited,
    SegmentDone,
    StageKept,
    StageReport,
    StageStarted,
    Started,
    StepKept,
    StepStarted,
    Stopping,
    StorageFailed,
    UnitDone,
    UnitProgress,
    Verified,
    WorkerLeft,
    WorkerLost,
)
from raymerge.units import format_duration, format_size

if TYPE_CHECKING:
    from raymerge.stages.router.results import GateReport


OfWorkers = MemoryShort | NodeOfNoUse | RoomAwaited | WorkerLeft | WorkerLost


def worker_lines(event: OfWorkers, part: str) -> Iterator[tuple[str, str]]:
    """The lines of an event, each with its style; ``part`` is what a part of the work is called."""
    if isinstance(event, WorkerLeft):
        yield f"{event.worker} has nothing more to do and leaves", ""
    elif isinstance(event, NodeOfNoUse):
        yield f"warning: workers on {event.node}, which joined, get no {part}s: {event.lack}", "yellow"
    elif isinstance(event, RoomAwaited):
        most = format_duration(event.seconds)
        yield f"waiting for the cluster to grow, {most} at most: {event.lack}", "yellow"
    elif isinstance(event, WorkerLost):
        yield _lost(event, part), "yellow"
    else:
        yield _short(event, part), "yellow"


def _lost(event: WorkerLost, part: str) -> str:
    given = (
        f"{counted(len(event.segments), part)} in hand pass to another"
        if event.segments
        else "it had nothing in hand"
    )
    return f"warning: {event.worker} was lost ({event.reason}); {given}"


def _short(event: MemoryShort, part: str) -> str:
    again = f"it is made again alone, with {format_size(event.budget)}"
    return f"warning: {part} {event.segment} ran out of memory on {event.worker} ({event.reason}); {again}"


_QUIET_SECONDS = 5.0
_QUIET_PART = 0.1
_SILENT_SECONDS = 60.0
_REFRESH_PER_SECOND = 4


class Progress(Protocol):
    """Takes events while it is entered."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, event: Event) -> None: ...


def make_progress(
    stream: IO[str], *, as_json: bool, output: str, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """The kind of progress that suits the stream.

    Args:
        clock: tells the seconds; another than this machine's for what is told again.
    """
    if as_json:
        return JsonProgress(stream)
    console = make_console(stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, output, clock=clock)
    return PlainProgress(console, output, clock=clock)


class JsonProgress:
    """Every event as one line of JSON."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __enter__(self) -> JsonProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, event: Event) -> None:
        """Write the event, with the time, which tells of a log when it was that way."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        put_json(self._stream, {**event.to_json(), "time": now})


class PlainProgress:
    """Lines for logs and pipes: beginning, end, and now and then how far it is."""

    def __init__(self, console: Console, output: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = _Report(console, output)
        self._console = console
        self._tally = Tally(clock)
        self._clock = clock
        self._said_at = clock()
        self._said_part = 0.0

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __call__(self, event: Event) -> None:
        """Print the event if it is one of those that matter, or the time for a line has come."""
        self._tally.take(event)
        self._report.tell(event, self._tally)
        if isinstance(event, Started | StageStarted):
            self._said_at, self._said_part = self._clock(), self._tally.fraction
        if isinstance(event, SegmentDone | UnitDone | UnitProgress) and self._is_time():
            self._said_at, self._said_part = self._clock(), self._tally.fraction
            self._console.print(f"{self._tally.fraction:.0%}: {summary(self._tally)}", soft_wrap=True)

    def _is_time(self) -> bool:
        waited = self._clock() - self._said_at
        is_further = self._tally.fraction >= self._said_part + _QUIET_PART
        return waited >= _SILENT_SECONDS or (waited >= _QUIET_SECONDS and is_further)


class LiveProgress:
    """A bar, the numbers and a line a worker, redrawn in place; gone when the run ends."""

    def __init__(self, console: Console, output: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = _Report(console, output)
        self._tally = Tally(clock)
        self._waiting = Spinner("dots", "Planning and starting the workers")
        self._live = Live(
            console=console, get_renderable=self._view, refresh_per_second=_REFRESH_PER_SECOND, transient=True
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        self._tally.take(event)
        if isinstance(event, Published) and self._tally.is_last:
            self._live.stop()
        self._report.tell(event, self._tally)

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
        bar.add_row(
            ProgressBar(total=max(1, tally.total_bytes), completed=tally.done_bytes), f"{tally.fraction:.0%}"
        )
        titles = [] if tally.step is None else [_step(tally.step)]
        titles += [] if tally.stage is None else [_stage(tally.stage)]
        return Group(
            *(Text(printable(title)) for title in titles), bar, Text(summary(tally)), _worker_table(tally)
        )


def summary(tally: Tally) -> str:
    """How far, how fast, how long, in one line."""
    left = tally.seconds_left
    parts = (
        f"{format_size(tally.done_bytes)} of {format_size(tally.total_bytes)}",
        _rate(tally, tally.moved_bytes),
        f"{format_duration(left)} left" if left is not None else _waited(tally),
        f"{tally.done_segments} of {counted(tally.total_segments, tally.part)}",
    )
    return ", ".join(part for part in parts if part)


def _waited(tally: Tally) -> str:
    """How long a stage goes on of which nothing is known yet; often it has one unit alone."""
    return "" if tally.stage is None else f"{format_duration(tally.elapsed)} so far"


def _waiting(tally: Tally) -> str:
    """What is done while no part of any work is under way; "" while one is."""
    if isinstance(tally.stage, StageKept):
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


class _Report:
    """The lines that stay: both kinds of display for people print them."""

    def __init__(self, console: Console, output: str) -> None:
        self._console = console
        self._output = output
        self._failed: set[str] = set()
        self._faults: set[str] = set()

    def tell(self, event: Event, tally: Tally) -> None:
        if isinstance(event, StepStarted | StepKept):
            self._print(_step(event))
        elif isinstance(event, StageStarted | StageKept):
            for line in _begun(event):
                self._print(line)
        elif isinstance(event, StageReport) and isinstance(tally.stage, StageStarted):
            self._print(f"made in {format_duration(tally.elapsed)} with {_how(tally.stage)}")
        elif isinstance(event, Planned):
            self._print(_planned(event))
            for note in event.notes:
                self._print(f"  note: {note}")
        elif isinstance(event, Started):
            self._print(_started(event, tally))
        elif isinstance(event, SegmentDone) and tally.done_segments >= tally.total_segments:
            for line in _merged(tally):
                self._print(line)
        elif isinstance(event, DuplicatesFound):
            for line in duplicate_lines(event):
                self._print(line)
        elif isinstance(event, EncodingErrorsFound):
            self._tell_encoded(event)
        elif isinstance(event, DeviceFailed):
            self._tell_failed(event, tally.part)
        elif isinstance(event, OfWorkers):
            for line, style in worker_lines(event, tally.part):
                self._print(line, style=style)
        elif isinstance(event, StorageFailed):
            self._tell_storage(event)
        elif isinstance(event, Stopping):
            self._print(_stopping(event, tally.part))
        elif isinstance(event, Verified):
            self._print(f"verified: {event.tensors} tensors, {format_size(event.nbytes)}, all as planned")
        elif isinstance(event, Published):
            for line in _published(event, tally, self._output if tally.is_last else ""):
                self._print(line)

    def _tell_failed(self, event: DeviceFailed, part: str) -> None:
        """Once for each worker: where a GPU fails once, it often fails again."""
        if event.worker not in self._failed:
            self._failed.add(event.worker)
            instead = f"{part} {event.segment} was made on the CPU, and so is any other that it fails in"
            text = f"warning: the GPU of {event.worker} failed ({event.reason}); {instead}"
            self._print(text, style="yellow")

    def _tell_storage(self, event: StorageFailed) -> None:
        """Each fault once: a server that is away for a moment is so for many."""
        for fault in sorted(set(event.faults) - self._faults):
            self._faults.add(fault)
            self._print(f"storage failed for a moment, and was asked again: {fault}", style="yellow")

    def _tell_encoded(self, event: EncodingErrorsFound) -> None:
        for line in encoding_lines(event):
            self._print(line)
        if event.above is not None:
            self._print(encoding_warning(event.above), style="yellow")

    def _print(self, text: str, style: str = "") -> None:
        # A log keeps a sentence on one line; a terminal wraps it between words.
        self._console.print(Text(printable(text), style=style), soft_wrap=not self._console.is_terminal)


def _stopping(event: Stopping, part: str) -> str:
    if event.seconds is None:
        return f"stopping: the {part}s in hand are finished first; Ctrl-C again stops at once"
    if not event.seconds:
        return f"stopping at once: the {part}s in hand are given up"
    return f"stopping: the {part}s in hand have {event.seconds:g} s to finish"


def _step(event: StepStarted | StepKept) -> str:
    name = f": {event.name}" if event.name else ""
    kept = ", made already" if isinstance(event, StepKept) else ""
    return f"merge {event.number} of {event.total}{name}{kept}"


def _stage(event: StageStarted | StageKept) -> str:
    kept = ", made already" if isinstance(event, StageKept) else ""
    return f"stage {event.number} of {event.total}: {event.title}{kept}"


def _begun(event: StageStarted | StageKept) -> Iterator[str]:
    yield _stage(event)
    if isinstance(event, StageStarted) and event.done_units:
        yield f"going on: {event.done_units} of {counted(event.units, 'unit')} are done already"


def _planned(event: Planned) -> str:
    peak = f"at most {format_size(event.projected_peak)} of memory a worker"
    return f"planned: {event.tensors} tensors, {format_size(event.output_bytes)}; {peak}"


def _started(event: Started, tally: Tally) -> str:
    begun = f"going on: {event.done_segments} of {tally.total_segments} segments are done already, "
    why = f": {event.device_reason}" if event.device_reason else ""
    return f"{begun if event.done_segments else 'merging '}with {_how(event)}{why}"


def _merged(tally: Tally) -> tuple[str, ...]:
    total = f"merged: {format_size(tally.made_bytes)} read and written at {_rate(tally, tally.made_bytes)}"
    return (
        total,
        *_peak(tally),
        *(
            f"  {name}: {counted(worker.segments, 'segment')}, {format_size(worker.nbytes)}, "
            f"{_rate(tally, worker.nbytes)}"
            for name, worker in tally.workers.items()
        ),
    )


def _peak(tally: Tally) -> Iterator[str]:
    """What a worker used at most of what it might; nothing where it was not measured."""
    if tally.peak_bytes and tally.plan is not None:
        projected = format_size(tally.plan.projected_peak)
        yield f"  peak: {format_size(tally.peak_bytes)} of {projected} a worker"


def _rate(tally: Tally, nbytes: int) -> str:
    return f"{format_size(round(tally.speed(nbytes)))}/s"


def _published(event: Published, tally: Tally, output: str) -> tuple[str, ...]:
    """The end of a run; ``output`` is "" for a result that other merges use."""
    how = f" with {_how(tally.started)}" if tally.started is not None else ""
    if not output:
        return (f"made in {format_duration(event.seconds)}{how}",)
    lines = [f"done: {output}", f"  in {format_duration(event.seconds)}{how}"]
    if tally.plan is not None:
        lines.append(f"  digest {tally.plan.digest}")
    return tuple(lines)


def _how(started: Started | StageStarted) -> str:
    threads = started.threads if isinstance(started, Started) else 1
    each = f" of {threads} threads" if threads > 1 else ""
    return f"{counted(len(started.workers), 'worker')}{each} on {started.device}"


_LAYERS_SHOWN = 8


def show_routing(console: Console, reports: Iterable[StageReport]) -> None:
    """Print a short table for each stage that made router rows; other stages have none."""
    from raymerge.stages.router.results import KIND, GateReport

    for each in reports:
        if each.report.get("kind") == KIND:
            _show(console, each.title, GateReport.from_json(each.report))


def _show(console: Console, title: str, report: GateReport) -> None:
    console.print()
    console.print(heading(title))
    console.print(make_table(("", ""), list(_facts(report))))
    if report.routing is not None:
        rows = list(_experts(report, report.routing))
        console.print(make_table(("expert", "tokens", "chosen first for"), rows, numbers=(1, 2)))
    if report.on_own:
        console.print("* judged on the texts that its row was made from, for want of held-out ones")


def _facts(report: GateReport) -> Iterator[tuple[str, str]]:
    yield "gate mode", report.mode
    yield "layers", str(len(report.layers))
    yield "condition", _condition(report)
    if report.entropy is not None and report.lowest_entropy is not None:
        lowest = f"; in the lowest layer {report.lowest_entropy:.2f}"
        yield "load entropy", f"{report.entropy:.2f} of {report.most_entropy:.2f} bits{lowest}"
    if report.margin is not None:
        yield "margin", f"{report.margin:.3g} between the first and the second logit"
    if report.unproven:
        layers = ", ".join(map(str, report.unproven[:_LAYERS_SHOWN]))
        yield "unproven", f"half of the texts does not hold for the other half in layers {layers}: give more"


def _condition(report: GateReport) -> str:
    """The worst condition number, and the layers whose rows are hardly told apart."""
    worst = f"{report.condition:.1f}" if math.isfinite(report.condition) else "infinite"
    found = report.ill_conditioned
    if not found:
        return f"{worst} at worst, good below {report.limit:g}"
    shown = ", ".join(map(str, found[:_LAYERS_SHOWN]))
    more = f" and {len(found) - _LAYERS_SHOWN} more" if len(found) > _LAYERS_SHOWN else ""
    layers = f"layer{'s' if len(found) > 1 else ''} {shown}{more}"
    return f"{worst} at worst; above {report.limit:g}, experts are hardly told apart, in {layers}"


def _experts(report: GateReport, routing: tuple[float, ...]) -> Iterator[tuple[str, str, str]]:
    for number, (name, share) in enumerate(zip(report.experts, routing, strict=True)):
        judged = str(report.num_judged[number]) if report.num_judged else ""
        yield f"{name}{'*' if number in report.on_own else ''}", judged, f"{share:.0%}"
