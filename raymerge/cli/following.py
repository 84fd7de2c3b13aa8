"""Shows what a run far away says, line by line, as a run of this machine is shown; and how it ended."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from raymerge import events
from raymerge.cli.messages import STOPPED, Failure, show_failure
from raymerge.cli.render.progress import make_progress
from raymerge.cli.render.screen import make_console, printable, put_json
from raymerge.errors import OptionError, Problem
from raymerge.events import Event

if TYPE_CHECKING:
    from raymerge.deploy.targets.target import RunReport, Runs


_ENDS = ("error", "ended")
"""Events that say why a run made no output: of the command line, and of a journal."""


class Relay:
    """Takes the lines of a driver's log: events are shown as events, all else as text."""

    def __init__(self, stdout: IO[str], *, as_json: bool, output: str) -> None:
        self._stdout = stdout
        self._as_json = as_json
        self._now: float | None = None
        self._progress = make_progress(stdout, as_json=False, output=output, clock=self._clock)
        self._others = make_console(sys.stderr)
        self.end: Mapping[str, Any] | None = None
        """The event that says why there is no output; None while there is none."""
        self.is_silent = True
        """Whether no line came yet."""

    def __enter__(self) -> Relay:
        if not self._as_json:
            self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._as_json:
            self._progress.__exit__(kind, error, trace)

    def take_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.take(line)

    def take(self, line: str) -> None:
        self.is_silent = False
        found = _event(line)
        if found is None:
            if line.strip():
                self._others.print(printable(line.expandtabs()), style="dim", soft_wrap=True)
            return
        if found["event"] in _ENDS:
            self.end = found
        elif found["event"] == "planned":
            self.end = None  # of an earlier attempt, which this one follows
        if self._as_json:
            put_json(self._stdout, found)
        else:
            self._show(found)

    def _show(self, found: Mapping[str, Any]) -> None:

        with suppress(ValueError):
            self._now = datetime.fromisoformat(str(found.get("time"))).timestamp()
        event = event_from_json(found)
        if event is not None:
            self._progress(event)

    def _clock(self) -> float:
        """The time of the event that is shown: what is told again took as long as it took."""
        return time.time() if self._now is None else self._now


def follow(
    runs: Runs, run: str, stdout: IO[str], *, as_json: bool, output: str, named: str | None = None
) -> int:
    """Show a run until it is over; Ctrl-C only ends the showing. Returns the run's exit code.

    Args:
        named: what the user called it; None where this process began it.

    Raises:
        OptionError: nobody knows a run that was called so.
    """
    relay = Relay(stdout, as_json=as_json, output=output)
    try:
        with relay:
            relay.take_all(runs.logs(run, follow=True))
        report = runs.report(run)
    except KeyboardInterrupt:
        make_console(sys.stderr).print(f"\n{detached(run)}", soft_wrap=True)
        return STOPPED
    if named is not None and relay.is_silent:
        known(report, named)
    return _ended(report, relay.end, as_json=as_json)


def known(report: RunReport, named: str) -> RunReport:
    """The report of a run that somebody knows.

    Raises:
        OptionError: nobody does.
    """
    from raymerge.deploy.targets.target import RunState

    if report.state is RunState.UNKNOWN:
        remedy = "Check the name; --profile or --address say where it was sent to."
        raise OptionError(Problem(named, report.message, remedy))
    return report


def detached(run: str) -> str:
    """What is said of a run that goes on without this process."""
    return (
        f"{run} goes on without this command. 'raymerge status {run}' tells how far it is, "
        f"'raymerge logs -f {run}' shows it again, 'raymerge stop {run}' ends it."
    )


def exit_code_of(report: RunReport) -> int:
    """The exit code of a run that is over: that of its driver, where it is known."""
    from raymerge.deploy.targets.target import RunState

    if report.state is RunState.SUCCEEDED:
        return 0
    code = report.details.get("exit_code", "")
    # A driver that was killed has none of ours; what it did is kept.
    return int(code) if report.state is RunState.FAILED and code in ("1", "2", "3") else STOPPED


def _ended(report: RunReport, end: Mapping[str, Any] | None, *, as_json: bool) -> int:
    from raymerge.deploy.targets.target import RunState

    code = exit_code_of(report)
    if report.state is RunState.SUCCEEDED:
        return 0
    if as_json:
        if end is None:
            put_json(sys.stdout, Failure(code, report.message).to_json())
        return code
    failure = Failure(code, report.message)
    if end is not None and report.state is RunState.FAILED:
        failure = _failure(end, code)
    show_failure(make_console(sys.stderr), failure)
    return code


def _failure(end: Mapping[str, Any], code: int) -> Failure:
    """What the driver said when it ended."""
    try:
        problems = tuple(Problem(**each) for each in end.get("problems", ()))
    except TypeError:
        problems = ()
    return Failure(code, "" if problems else str(end.get("message")), problems)


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def event_from_json(found: Mapping[str, Any]) -> Event | None:
    """The event that ``Event.to_json`` gave; None for what is no event, or one of another version."""
    kind = _kinds().get(str(found.get("event")))
    if kind is None:
        return None
    wanted = [each.name for each in fields(kind)]
    try:
        return kind(**{name: _value(name, found[name]) for name in wanted if name in found})
    except (TypeError, KeyError):
        return None


def _kinds() -> dict[str, type[Event]]:
    """Every kind of event by the name that it has in JSON."""
    kinds = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]
    return {_name(each): each for each in kinds if each is not Event}


def _name(kind: type[Event]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _value(name: str, value: Any) -> Any:
    """A field as it was before: JSON knows neither tuples nor the values that some events hold."""
    if name in ("groups", "unforeseen"):
        from raymerge.merge_plan.report import DuplicateGroup

        return tuple(DuplicateGroup(**each) for each in value)
    if name == "roles":
        from raymerge.merge_plan.report import RoleError, TensorError

        return tuple(RoleError(**{**each, "worst": TensorError(**each["worst"])}) for each in value)
    if name == "above" and value is not None:
        from raymerge.merge_plan.report import ErrorsAbove, TensorError

        return ErrorsAbove(**{**value, "worst": TensorError(**value["worst"])})
    return tuple(value) if isinstance(value, list) else value
