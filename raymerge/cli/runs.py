"""``raymerge status``, ``logs`` and ``stop``: runs of another process, or the records at an output place."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from raymerge import events
from raymerge.cli.messages import STOPPED, Failure, command, show_failure
from raymerge.cli.options import ProfileFile, TargetChoice
from raymerge.cli.render.progress import make_progress
from raymerge.cli.render.screen import Output, make_console, make_table, own_stdout, printable, show_table
from raymerge.deploy.targets import TARGETS
from raymerge.errors import OptionError, Problem, RaymergeError
from raymerge.events import Event, OnEvent
from raymerge.storage.addresses import (
    NO_OPTIONS,
    StoreOptions,
    check_alone,
    is_remote,
    parse_place,
    with_options,
)

if TYPE_CHECKING:
    from raymerge.deploy.targets.sending import RunNotes
    from raymerge.deploy.targets.target import RunReport, Runs, Where

RunName: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its output place.")]
ServerAddress: TypeAlias = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDR", help="The dashboard of a cluster: http://HEAD:8265."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Give the answer as JSON.")]
_ENDS = ("error", "ended")
"""Events that say why a run made no output: of the command line, and of a journal."""


@command
def status(
    run: RunName,
    *,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: ServerAddress = None,
    as_json: AsJson = False,
) -> int:
    """Tell how far a run is."""
    with own_stdout(as_json=as_json) as out:
        _show(known(reported(seek(run, profile, target, address)), run), out)
    return 0


@command
def logs(
    run: RunName,
    *,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over; Ctrl-C ends this alone.")
    ] = False,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: ServerAddress = None,
    as_json: AsJson = False,
) -> int:
    """Show what a run has told so far."""
    with own_stdout(as_json=as_json) as out:
        sought = seek(run, profile, target, address)
        if following:
            return follow(sought.runs, sought.run, out, sought.place, named=run)
        known(sought.runs.report(sought.run), run)
        with relaying(out, sought.place) as relay:
            for line in sought.runs.logs(sought.run, follow=False):
                relay.take(line)
    return 0


@command
def stop(
    run: RunName,
    *,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: ServerAddress = None,
    as_json: AsJson = False,
) -> int:
    """Stop a run. What is done is kept: submitted again, it goes on from there."""
    with own_stdout(as_json=as_json) as out:
        sought = seek(run, profile, target, address)
        report = known(sought.runs.stop(sought.run), run)
        _show(report, out)
    return 0 if report.state.is_over else STOPPED


@dataclass(frozen=True, slots=True)
class RunQuery:
    runs: Runs
    run: str
    place: str
    storage: StoreOptions


def seek(text: str, profile: str | None, target: str | None, address: str | None) -> RunQuery:
    from raymerge.deploy.targets.target import is_run_name, target_of

    if not text.strip():
        raise OptionError(Problem("RUN", "no run is named.", "Give its name, or its output place."))
    check_alone(text)
    is_name, notes = is_run_name(text), run_notes(os.environ)
    where = where_of(profile, target, address) if profile or target or address else None
    place = "" if is_name else place_text(text)
    note = notes.of_run(text) if is_name else notes.of_output(place)
    if where is None and note is not None:
        where, place = _noted(note.profile, note.target, note.address), note.output
    storage = NO_OPTIONS if where is None else where.profile.storage
    runs = None if where is None else target_of(where, os.environ)
    if runs is None:
        if is_name:
            what = "no run of this name was sent away from this machine by this user."
            ways = "--profile FILE or --address http://HEAD:8265."
            raise OptionError(Problem(text, what, f"Name its output place, or say where it runs: {ways}"))
        return _by_records(text, storage)
    try:
        name = text if is_name else runs.find(place)
    except OptionError:
        if _recorded(place, storage) is None:
            raise
        name = None
    # What no server knows any more may have left its records.
    return _by_records(text, storage) if name is None else RunQuery(runs, name, place, storage)


def _by_records(place: str, storage: StoreOptions) -> RunQuery:
    from raymerge.deploy.targets.local import PlaceRuns

    return RunQuery(PlaceRuns(), with_options(place, storage), place, storage)


def reported(sought: RunQuery) -> RunReport:
    """The report of who runs it, and of its records at the place where visible here."""
    from raymerge.deploy.targets.local import PlaceRuns
    from raymerge.deploy.targets.target import RunState

    if isinstance(sought.runs, PlaceRuns):
        return sought.runs.report(sought.run)
    try:
        report = sought.runs.report(sought.run)
    except OptionError as error:
        recorded = _recorded(sought.place, sought.storage)
        if recorded is None:
            raise
        silent = f"Its server does not answer: {error.problems[0].what}"
        return replace(recorded, run=sought.run, message=f"{recorded.message} {silent}")
    recorded = _recorded(report.output or sought.place, sought.storage)
    if recorded is None:
        return report
    if report.state is RunState.UNKNOWN:
        return replace(recorded, run=sought.run)
    details = {**recorded.details, **report.details}
    return replace(report, details=details, outputs=recorded.outputs)


def _recorded(place: str, storage: StoreOptions) -> RunReport | None:
    """The report from the records at a place; None if none is visible here."""
    from raymerge.deploy.targets.local import PlaceRuns
    from raymerge.deploy.targets.target import RunState

    if not place:
        return None
    try:
        report = PlaceRuns().report(with_options(place, storage))
    except RaymergeError:
        return None
    return None if report.state is RunState.UNKNOWN else report


def where_of(profile: str | None, target: str | None, address: str | None) -> Where:
    from raymerge.deploy.profiles import load_profile
    from raymerge.deploy.targets.target import choose

    if target is not None and target not in TARGETS:
        what = f"there is no target '{target}'."
        raise OptionError(Problem("--target", what, f"Give one of {', '.join(TARGETS)}."))
    return choose(None if profile is None else load_profile(profile), target, address)


def run_notes(environment: Mapping[str, str]) -> RunNotes:
    from raymerge.deploy.targets.sending import RunNotes

    home = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return RunNotes(Path(home) / "raymerge" / "runs")


def place_text(place: str) -> str:
    """An output place in the one spelling by which runs are distinguished."""
    return place.rstrip("/") if is_remote(place) else os.path.abspath(parse_place(place).text)


def sent_place(place: str) -> str:
    """An output place as sent to another machine. Relative paths stay, to be refused there."""
    return place_text(place) if os.path.isabs(place) or "://" in place else place


def _noted(profile: str, target: str, address: str) -> Where:
    from raymerge.deploy.profiles import parse_profile
    from raymerge.deploy.targets.target import choose

    noted = parse_profile(profile, "the note on this run") if profile.strip(" \n{}") else None
    return choose(noted, target, address or None)


def _show(report: RunReport, out: Output) -> None:
    if out.as_json:
        out.json(report.to_json())
        return
    console = out.console
    console.print(f"{printable(report.run)}: {report.state.value}", style="bold", soft_wrap=True)
    facts = {"output": report.output, **report.details}
    facts.pop("exit_code", None)
    console.print(make_table(("", ""), [(f"  {name}", value) for name, value in facts.items() if value]))
    if report.message:
        console.print(printable(report.message), soft_wrap=not console.is_terminal)
    if report.outputs:
        rows = [(each.run, *_how_far(each)) for each in report.outputs]
        show_table(console, ("output", "", ""), rows)


def _how_far(output: RunReport) -> tuple[str, str]:
    """The state of one output of a sweep, in a word, and what there is to say of it."""
    from raymerge.deploy.targets.target import RunState

    segments = output.details.get("segments", "")
    done = f"{segments} segments" if segments else ""
    match output.state:
        case RunState.SUCCEEDED:
            return "published", ""
        case RunState.RUNNING:
            return "in progress", done
        case RunState.QUEUED:
            return "waiting", ""
        case _:
            return output.state.value, output.message


class Relay:
    show: OnEvent

    def __init__(self, out: Output) -> None:
        self._out = out
        self._now: float | None = None
        self._others = make_console(sys.stderr)
        self.end: Mapping[str, Any] | None = None
        """The event that says why there is no output."""
        self.is_silent = True

    def take(self, line: str) -> None:
        self.is_silent = False
        record = _event(line)
        if record is None:
            if line.strip():
                self._others.print(printable(line.expandtabs()), style="dim", soft_wrap=True)
            return
        if record["event"] in _ENDS:
            self.end = record
        elif record["event"] == "planned":
            self.end = None  # of an earlier attempt, which this one follows
        if self._out.as_json:
            self._out.json(record)
            return
        with suppress(ValueError):
            self._now = datetime.fromisoformat(str(record.get("time"))).timestamp()
        event = event_from_json(record)
        if event is not None:
            self.show(event)

    def clock(self) -> float:
        """The time of the shown event, so that a replay shows the original durations."""
        return time.time() if self._now is None else self._now


@contextmanager
def relaying(out: Output, place: str) -> Iterator[Relay]:
    relay = Relay(out)
    with make_progress(out.stream, as_json=out.as_json, output=place, clock=relay.clock) as relay.show:
        yield relay


def follow(runs: Runs, run: str, out: Output, place: str, *, named: str | None = None) -> int:
    """Show a run until it is over; Ctrl-C ends only the display. Returns the exit code of the run."""
    try:
        with relaying(out, place) as relay:
            for line in runs.logs(run, follow=True):
                relay.take(line)
        report = runs.report(run)
    except KeyboardInterrupt:
        make_console(sys.stderr).print(f"\n{detached(run)}", soft_wrap=True)
        return STOPPED
    if named is not None and relay.is_silent:
        known(report, named)
    return _ended(report, relay.end, out)


def known(report: RunReport, named: str) -> RunReport:
    from raymerge.deploy.targets.target import RunState

    if report.state is RunState.UNKNOWN:
        remedy = "Check the name; --profile or --address say where it was sent to."
        raise OptionError(Problem(named, report.message, remedy))
    return report


def detached(run: str) -> str:
    return (
        f"{run} goes on without this command. 'raymerge status {run}' tells how far it is, "
        f"'raymerge logs -f {run}' shows it again, 'raymerge stop {run}' ends it."
    )


def exit_code_of(report: RunReport) -> int:
    from raymerge.deploy.targets.target import RunState

    if report.state is RunState.SUCCEEDED:
        return 0
    code = report.details.get("exit_code", "")
    # A driver that was killed has none of ours; what it did is kept.
    return int(code) if report.state is RunState.FAILED and code in ("1", "2", "3") else STOPPED


def _ended(report: RunReport, end: Mapping[str, Any] | None, out: Output) -> int:
    from raymerge.deploy.targets.target import RunState

    code = exit_code_of(report)
    failure = Failure(code, report.message)
    if end is not None and report.state is RunState.FAILED:
        problems: tuple[Problem, ...] = ()
        with suppress(TypeError):
            problems = tuple(Problem(**each) for each in end.get("problems", ()))
        failure = Failure(code, "" if problems else str(end.get("message")), problems)
    if code and not out.as_json:
        show_failure(make_console(sys.stderr), failure)
    elif code and end is None:
        out.json(failure.to_json())
    return code


def _event(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


def event_from_json(record: Mapping[str, Any]) -> Event | None:
    """The inverse of ``Event.to_json``; None for anything else, or another version."""
    known = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    kind = {each.kind(): each for each in known if each is not Event}.get(str(record.get("event")))
    if kind is None:
        return None
    names = [each.name for each in fields(kind) if each.name in record]
    try:
        return kind(**{name: _value(name, record[name]) for name in names})
    except (TypeError, KeyError):
        return None


def _value(name: str, value: Any) -> Any:
    from raymerge.merge_plan.report import (
        ConversionProof,
        DuplicateGroup,
        ErrorsAbove,
        RoleError,
        TensorError,
    )

    if name in ("groups", "unforeseen"):
        return tuple(DuplicateGroup(**each) for each in value)
    if name == "roles":
        return tuple(RoleError(**{**each, "worst": TensorError(**each["worst"])}) for each in value)
    if name == "above" and value is not None:
        return ErrorsAbove(**{**value, "worst": TensorError(**value["worst"])})
    if name == "proof" and value is not None:
        worst = None if value["worst"] is None else TensorError(**value["worst"])
        return ConversionProof(**{**value, "worst": worst})
    return tuple(value) if isinstance(value, list) else value
