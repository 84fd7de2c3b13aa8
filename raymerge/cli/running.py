"""Options and display of the commands that write a checkpoint."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from raymerge.cli.adapters import show_combination
from raymerge.cli.messages import STOPPED, STOPPED_EARLY, Failure
from raymerge.cli.plan import explain_all, explain_sweep, is_sweep
from raymerge.cli.render.ending import Step, show_next
from raymerge.cli.render.next_steps import (
    after_adapter,
    after_conversion,
    after_merge,
    after_rehearsal,
    after_stop,
    after_sweep,
)
from raymerge.cli.render.progress import make_progress
from raymerge.cli.render.reports import has_router, show_accounts, show_routing
from raymerge.cli.render.screen import Output, counted, make_console
from raymerge.cli.render.search import show_trials
from raymerge.cli.render.sweeps import show_sweep
from raymerge.cli.render.tally import Tally
from raymerge.errors import AskedError, IncompleteError, PlanError
from raymerge.events import (
    Event,
    OnEvent,
    OutputsPublished,
    OutputsStarted,
    Planned,
    Published,
    RayEnded,
    StageReport,
    StageStarted,
    Started,
    Stopping,
)
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.storage.addresses import check_alone, is_remote, join, shown
from raymerge.storage.retry import KEPT
from raymerge.units import format_duration

if TYPE_CHECKING:
    from typing import IO

    from raymerge.api import RecipeLike, SearchOptions
Makes: TypeAlias = Literal["checkpoint", "adapter", "outputs", "best"]
"""What a recipe makes: one model, one adapter, several models, or the best one that a search finds."""
_LAST_SECONDS = 2.75
"""From SIGTERM to the end of the process, whatever is in hand: some schedulers kill after three."""


@dataclass(frozen=True, slots=True)
class Request:
    recipe: RecipeLike
    title: str
    output: str
    options: RunOptions
    converted: str | None = None
    """The model that ``recipe`` only stores in another format."""
    is_reported: bool = False
    """Whether a report follows."""
    search: SearchOptions | None = None
    evaluations: int | None = None
    """Of a search; None for what the recipe says."""

    def __post_init__(self) -> None:
        check_alone(self.output)


@dataclass(slots=True)
class Ending:
    """Ends the process ``_LAST_SECONDS`` after a stop request unless it has ended: a hanging request or a
    long computation is not waited for. All finished work is durable."""

    is_done: bool = False
    """Whether only cleanup is left: then the run counts as successful whatever ends the process."""
    is_asked: bool = False
    """Whether the stop was requested at the output place."""
    run: str | None = None
    """``--run``, which must not be restarted after such a stop."""
    json_to: IO[str] | None = None
    remedy: str = KEPT
    _timers: list[threading.Timer] = field(default_factory=list)

    def heed(self, event: Event) -> None:
        if isinstance(event, Stopping) and event.seconds is not None:
            self.is_asked = self.is_asked or event.is_asked
            self.soon()
        if isinstance(event, RayEnded):
            self.without_ray(event.process)

    def soon(self) -> None:
        timer = threading.Timer(_LAST_SECONDS, self._end)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def without_ray(self, process: str) -> None:
        """End the process before Ray does, which would exit with 1 silently; the next run removes what Ray
        leaves."""
        self._say(f"the embedded Ray of this command has ended ({process} died). {self.remedy}")
        os._exit(0 if self.is_done else STOPPED)

    def _end(self) -> None:
        is_done = self.is_done
        self._say(STOPPED_EARLY)
        try:
            if self.is_asked and not is_done:
                give_up(self.run)
        finally:
            os._exit(0 if is_done else STOPPED)

    def _say(self, text: str) -> None:
        """Show why it ends, past buffers that another thread may hold and readers that take nothing; silent
        on success."""
        if self.is_done:
            return
        descriptor, line = 2, f"\nraymerge: {text}\n"
        with suppress(OSError, ValueError):
            if self.json_to is not None:
                descriptor = self.json_to.fileno()
                line = json.dumps(Failure(STOPPED, text).to_json()) + "\n"
            _, ready, _ = select.select([], [descriptor], [], 0)
            if ready:
                os.write(descriptor, line.encode())


@contextmanager
def terminable() -> Iterator[Ending]:
    """A scheduler's SIGTERM ends the command as Ctrl-C does: nothing leaks, exit code 3."""
    ending = Ending()
    is_main = threading.current_thread() is threading.main_thread()

    def interrupt(_: int, __: object) -> None:
        ending.soon()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt) if is_main else None
    try:
        yield ending
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
        ending.cancel()


@contextmanager
def examining(what: str, out: Output) -> Iterator[OnEvent]:
    """Work that writes no checkpoint: shown on a terminal, and ended in time after a stop request."""
    with terminable() as ending:
        ending.json_to, ending.remedy = out.stream if out.as_json else None, "Give the same command again."
        with shown_status(what, ending) as show:
            yield show


@contextmanager
def shown_status(what: str, ending: Ending) -> Iterator[OnEvent]:
    tally = Tally()
    with make_console(sys.stderr).status(what) as status:

        def show(event: Event) -> None:
            ending.heed(event)
            tally.take(event)
            left = tally.seconds_left
            more = "" if left is None else f", {format_duration(left)} to go"
            status.update(f"{what}: {tally.fraction:.0%}{more}")

        yield show


def run(request: Request, out: Output, ending: Ending, *, makes: Makes = "checkpoint") -> int:
    ending.run = request.options.run
    ending.json_to = out.stream if out.as_json else None
    watched = _Watched()
    try:
        _run(request, out, ending, watched, makes=makes)
    except KeyboardInterrupt as error:
        if not ending.is_done:
            _advise(error, request, watched)
            raise
    except IncompleteError as error:
        if ending.is_asked:
            raise AskedError(str(error)) from error
        _advise(error, request, watched)
        raise
    return 0


@dataclass(slots=True)
class _Watched:
    """What the events of a run told, as far as it is wanted later."""

    lead: str = ""
    num_merged: int = 0
    is_loadable: bool = True
    names: tuple[str, ...] = ()
    """Of the outputs of a sweep."""
    first: str = ""
    """Of those that are made now."""
    is_begun: bool = False
    reports: list[StageReport] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, StageReport):
            self.reports.append(event)
        if isinstance(event, OutputsPublished):
            self.names = event.names
        if isinstance(event, OutputsStarted):
            self.first = event.names[0]
        if isinstance(event, Planned):
            self.lead, self.num_merged = event.lead, event.made.get("merged", 0)
            self.is_loadable = event.is_loadable
        self.is_begun = self.is_begun or isinstance(event, Started | StageStarted)


def _advise(error: BaseException, request: Request, watched: _Watched) -> None:
    # What a scheduler starts it starts again by itself.
    if not request.options.run:
        for step in after_stop(_told_at(request, watched), is_begun=watched.is_begun):
            error.add_note(step.line)


def _told_at(request: Request, watched: _Watched) -> str:
    """The place whose journal has what the run told."""
    return join(request.output, watched.first) if watched.first else request.output


def _run(request: Request, out: Output, ending: Ending, watched: _Watched, *, makes: Makes) -> None:
    from raymerge.api import merge_adapters, search, submit, submit_sweep

    def then() -> tuple[Step, ...]:
        if makes == "adapter":
            return tuple(after_adapter(request.output))
        loadable = watched.is_loadable
        if makes == "outputs":
            return tuple(after_sweep(request.output, watched.names, is_loadable=loadable))
        if request.converted is not None:
            return tuple(after_conversion(request.output, request.converted, is_loadable=loadable))
        # A mixture has other tensors than the model that it was built on.
        lead = "" if any(has_router(each) for each in watched.reports) else watched.lead
        reported, merged = request.is_reported, watched.num_merged
        how = {"is_reported": reported, "is_loadable": loadable}
        return tuple(after_merge(request.output, lead, num_merged=merged, **how))

    remote = is_remote(request.output)
    place = shown(request.output) if remote else os.path.realpath(request.output)
    shows = make_progress(out.stream, as_json=out.as_json, output=request.output, then=then)
    with shows as progress:

        def show(event: Event) -> None:
            watched.take(event)
            # Results between are published too, elsewhere.
            if isinstance(event, OutputsPublished) or (isinstance(event, Published) and event.path == place):
                ending.is_done = True
            ending.heed(event)
            progress(event)

        if (seconds := _seconds_taken(request)) is not None:
            show(Published(place, seconds))
            return
        match makes:
            case "adapter":
                made = merge_adapters(request.recipe, request.output, request.options, on_event=show)
            case "outputs":
                submit_sweep(request.recipe, request.output, request.options, on_event=show)
            case "best":
                how, most = request.search, request.evaluations
                recipe = str(request.recipe)
                best = search(recipe, request.output, request.options, how, evaluations=most, on_event=show)
            case _:
                submit(request.recipe, request.output, request.options, on_event=show)
    if makes == "adapter":
        show_combination(out, made)
    if makes == "best" and not out.as_json:
        show_trials(out.console, best)
    if not out.as_json:
        show_routing(out.console, watched.reports)
        show_next(out.console, then())


def give_up(run: str | None) -> None:
    if run:
        from raymerge.deploy.targets.target import end_for_good

        end_for_good(os.environ)


def _seconds_taken(request: Request) -> float | None:
    """Duration of an earlier attempt at this run that published but whose end was not recorded; else None."""
    from raymerge.publish.output_place import place_of
    from raymerge.publish.run_records import records_of, seconds_taken

    if not request.options.run:
        return None
    return seconds_taken(records_of(str(place_of(request.output, request.options))), request.options.run)


def rehearse(request: Request, out: Output) -> int:
    from raymerge.publish.output_place import place_of
    from raymerge.runtime.driver.chained_merges import MergeJob

    if request.options.device == "cuda" and request.options.address is None:
        _require_gpu()
    if is_sweep(request.recipe):
        return _rehearse_sweep(request, out)
    accounts = explain_all(request.recipe, request.output, request.options, title=request.title)
    if not out.as_json:
        show_accounts(out.console, accounts)
    merges = [account.merge for account in accounts]
    place, is_here = place_of(request.output, request.options), accounts[-1].is_in_process
    options = replace(request.options, inline=True) if is_here else request.options
    MergeJob(merges, place, options, on_event=lambda _: None).check()
    reports = [account.to_json(tensors=False) for account in accounts]
    _tell_rehearsed(request, out, reports[0] if len(reports) == 1 else {"merges": reports}, is_here=is_here)
    return 0


def _rehearse_sweep(request: Request, out: Output) -> int:
    from raymerge.publish.output_place import place_of
    from raymerge.runtime.driver.sweep_run import SweepJob

    account = explain_sweep(request.recipe, request.output, request.options, title=request.title)
    if not out.as_json:
        show_sweep(out.console, account)
    options = replace(request.options, inline=True) if account.is_in_process else request.options
    place = place_of(request.output, request.options)
    if account.problems:
        raise PlanError(account.problems)
    SweepJob(account.places, place, options, on_event=lambda _: None).check()
    _tell_rehearsed(request, out, account.to_json(tensors=False), is_here=account.is_in_process)
    return 0


def _tell_rehearsed(request: Request, out: Output, plans: Mapping[str, Any], *, is_here: bool) -> None:
    if out.as_json:
        out.json({"event": "dry_run", "place": request.output, **plans})
    else:
        by = " in this process" if is_here else _by_whom(request.options)
        what = f"{request.output} can be made{by}"
        out.console.print(f"\ndry run: nothing was written; {what}", soft_wrap=True)
        show_next(out.console, [*after_rehearsal()])


def _require_gpu() -> None:
    with heavy_imports():
        from raymerge.device_numerics import choose_device

    choose_device("cuda")


def _by_whom(options: RunOptions) -> str:
    """The workers of a run on this machine; empty where it depends on the recipe or on a cluster."""
    from raymerge.runtime.workers.sizing import local_layouts

    if options.inline or options.address is not None or len(layouts := local_layouts(options)) > 1:
        return ""
    (layout,) = layouts
    return f" by {counted(layout.workers, 'worker')} of {counted(layout.threads, 'thread')}"
