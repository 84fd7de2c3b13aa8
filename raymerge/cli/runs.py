"""``raymerge status``, ``logs`` and ``stop``: runs that go on elsewhere, or left their traces at a place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from raymerge.cli.following import Relay, follow, known
from raymerge.cli.messages import STOPPED, guarded
from raymerge.cli.options import ProfileFile
from raymerge.cli.render.screen import make_console, make_table, own_stdout, printable, put_json
from raymerge.deploy.targets import TARGETS
from raymerge.errors import OptionError, Problem, RaymergeError

if TYPE_CHECKING:
    from typing import IO

    from raymerge.deploy.targets.sending import RunNotes
    from raymerge.deploy.targets.target import RunReport, Runs, Target, Where
    from raymerge.storage.addresses import StoreOptions

Run: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its output place.")]
TargetChoice: TypeAlias = Annotated[
    str | None, typer.Option("--target", metavar="T", help="local, cluster, job or kubernetes.")
]
ServerAddress: TypeAlias = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDR", help="The dashboard of a cluster: http://HEAD:8265."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Give the answer as JSON.")]


@dataclass(frozen=True, slots=True)
class RunQuery:
    """A run that somebody asks about."""

    runs: Runs
    run: str
    place: str
    """Its output place; "" where that is not known yet."""
    storage: StoreOptions


def status(
    run: Run,
    *,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: ServerAddress = None,
    as_json: AsJson = False,
) -> None:
    """Tell how far a run is."""

    def verb() -> int:
        with own_stdout() as stdout:
            sought = seek(run, profile, target, address)
            report = known(reported(sought), run)
            _show(report, stdout, as_json=as_json)
        return 0

    raise typer.Exit(guarded(verb, as_json=as_json))


def logs(
    run: Run,
    *,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over; Ctrl-C ends this alone.")
    ] = False,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: ServerAddress = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run has told so far."""

    def verb() -> int:
        with own_stdout() as stdout:
            sought = seek(run, profile, target, address)
            if following:
                place = sought.place
                return follow(sought.runs, sought.run, stdout, as_json=as_json, output=place, named=run)
            known(sought.runs.report(sought.run), run)
            with Relay(stdout, as_json=as_json, output=sought.place) as relay:
                relay.take_all(sought.runs.logs(sought.run, follow=False))
        return 0

    raise typer.Exit(guarded(verb, as_json=as_json))


def stop(
    run: Run,
    *,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: ServerAddress = None,
    as_json: AsJson = False,
) -> None:
    """Stop a run. What is done is kept: submitted again, it goes on from there."""

    def verb() -> int:
        with own_stdout() as stdout:
            sought = seek(run, profile, target, address)
            report = known(sought.runs.stop(sought.run), run)
            _show(report, stdout, as_json=as_json)
        return 0 if report.state.is_over else STOPPED

    raise typer.Exit(guarded(verb, as_json=as_json))


def seek(text: str, profile: str | None, target: str | None, address: str | None) -> RunQuery:
    """The run that is meant by a name or an output place.

    Raises:
        OptionError: nothing tells where it is, or nobody there answers.
        ProfileError: the profile is not valid.
    """
    from raymerge.deploy.targets.target import is_run_name
    from raymerge.storage.addresses import NO_OPTIONS, check_alone

    if not text.strip():
        raise OptionError(Problem("RUN", "no run is named.", "Give its name, or its output place."))
    check_alone(text)
    notes = run_notes(os.environ)
    is_name = is_run_name(text)
    where = where_of(profile, target, address) if profile or target or address else None
    place = "" if is_name else place_text(text)
    note = notes.of_run(text) if is_name else notes.of_output(place)
    if where is None and note is not None:
        where = _noted(note.profile, note.target, note.address)
        place = note.output
    from raymerge.deploy.targets.choose import target_of

    storage = NO_OPTIONS if where is None else where.profile.storage
    there = None if where is None else target_of(where, os.environ)
    if there is None and is_name:
        raise OptionError(_unknown_name(text))
    if there is None:
        return _by_traces(text, storage)
    name = text if is_name else _found(there, place, storage)
    # What no server knows any more may have left its traces.
    return _by_traces(text, storage) if name is None else RunQuery(there, name, place, storage)


def _found(there: Target, place: str, storage: StoreOptions) -> str | None:
    """Name of the run that makes a place; None where no server tells, but the place itself does."""
    try:
        return there.find(place)
    except OptionError:
        if _traces(place, storage) is None:
            raise
        return None


def _by_traces(place: str, storage: StoreOptions) -> RunQuery:
    """By what runs left at their place, as far as it is seen from here."""
    from raymerge.deploy.targets.local import PlaceRuns
    from raymerge.storage.addresses import with_options

    return RunQuery(PlaceRuns(), with_options(place, storage), place, storage)


def reported(sought: RunQuery) -> RunReport:
    """What is known of a run: by who runs it, and by its traces at its place where that is seen here."""
    from raymerge.deploy.targets.local import PlaceRuns
    from raymerge.deploy.targets.target import RunState

    if isinstance(sought.runs, PlaceRuns):
        return sought.runs.report(sought.run)
    try:
        report = sought.runs.report(sought.run)
    except OptionError as error:
        traces = _traces(sought.place, sought.storage)
        if traces is None:
            raise
        silent = f"Its server does not answer: {error.problems[0].what}"
        return replace(traces, run=sought.run, message=f"{traces.message} {silent}")
    traces = _traces(report.output or sought.place, sought.storage)
    if traces is None:
        return report
    if report.state is RunState.UNKNOWN:
        return replace(traces, run=sought.run)
    return replace(report, details={**traces.details, **report.details})


def _traces(place: str, storage: StoreOptions) -> RunReport | None:
    """What a run left at its place; None where nothing of it is seen from here."""
    from raymerge.deploy.targets.local import PlaceRuns
    from raymerge.deploy.targets.target import RunState
    from raymerge.storage.addresses import with_options

    if not place:
        return None
    try:
        found = PlaceRuns().report(with_options(place, storage))
    except RaymergeError:
        return None
    return None if found.state is RunState.UNKNOWN else found


def where_of(profile: str | None, target: str | None, address: str | None) -> Where:
    """The target that flags mean.

    Raises:
        OptionError: there is no such target, or the flags contradict each other.
        ProfileError: the profile is not valid.
    """
    from raymerge.deploy.profiles import load_profile
    from raymerge.deploy.targets.choose import choose

    if target is not None and target not in TARGETS:
        what = f"there is no target '{target}'."
        raise OptionError(Problem("--target", what, f"Give one of {', '.join(TARGETS)}."))
    said = None if profile is None else load_profile(profile)
    return choose(said, target, address)


def run_notes(environment: Mapping[str, str]) -> RunNotes:
    """This machine's notes on runs, where the user's programs keep their state."""
    from raymerge.deploy.targets.sending import RunNotes

    home = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return RunNotes(Path(home) / "raymerge" / "runs")


def place_text(place: str) -> str:
    """An output place as runs are told apart by it: one spelling for one place."""
    from raymerge.storage.addresses import is_remote, parse_place

    return place.rstrip("/") if is_remote(place) else os.path.abspath(parse_place(place).text)


def sent_place(place: str) -> str:
    """An output place as another machine is told of it. A path that is relative to a directory of this one
    stays as it is, to be refused there."""
    return place_text(place) if os.path.isabs(place) or "://" in place else place


def _noted(profile: str, target: str, address: str) -> Where:
    from raymerge.deploy.profiles import parse_profile
    from raymerge.deploy.targets.choose import choose

    said = parse_profile(profile, "the note on this run") if profile.strip(" \n{}") else None
    return choose(said, target, address or None)


def _unknown_name(run: str) -> Problem:
    what = "no run of this name was sent away from this machine by this user."
    remedy = "Name its output place, or say where it runs: --profile FILE or --address http://HEAD:8265."
    return Problem(run, what, remedy)


def _show(report: RunReport, stdout: IO[str], *, as_json: bool) -> None:
    if as_json:
        put_json(stdout, report.to_json())
        return
    console = make_console(stdout)
    console.print(f"{printable(report.run)}: {report.state.value}", style="bold", soft_wrap=True)
    facts = {"output": report.output, **report.details}
    facts.pop("exit_code", None)
    console.print(make_table(("", ""), [(f"  {name}", value) for name, value in facts.items() if value]))
    if report.message:
        console.print(printable(report.message), soft_wrap=not console.is_terminal)
