"""Protocols of targets, to which runs are sent: check, submit, report, logs, stop, find."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from raymerge.deploy.profiles import Profile

RUN_PREFIX = "raymerge-"
_RUN_HEX = 12


class RunState(StrEnum):
    QUEUED = "queued"
    """Accepted; the driver does not run yet."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """The checkpoint is published."""
    FAILED = "failed"
    """Ended with an error; a new submission resumes if possible."""
    STOPPED = "stopped"
    """Stopped by a user; a new submission resumes."""
    UNKNOWN = "unknown"
    """Never submitted there, or all traces are gone."""

    @property
    def is_over(self) -> bool:
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


@dataclass(frozen=True, slots=True)
class Submission:
    recipe_text: str
    recipe_name: str
    output: str
    """The output place, as the cluster sees it."""
    profile: Profile
    run: str
    """``raymerge-`` and 12 hexadecimal digits."""
    flags: tuple[str, ...] = ()
    """Command line flags passed on: ``--replace``, ``--keep-intermediates``."""


@dataclass(frozen=True, slots=True)
class RunReport:
    run: str
    """The run's name; if no server knows it, its output place."""
    state: RunState
    output: str
    """"" if unknown."""
    message: str
    """Sentences for users."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Facts for users: host, segments done, last sign of life; ``exit_code`` of the driver if known."""

    def to_json(self) -> dict[str, Any]:
        return {
            "event": "run",
            "run": self.run,
            "state": self.state.value,
            "output": self.output,
            "message": self.message,
            "details": dict(self.details),
        }


@dataclass(frozen=True, slots=True)
class Where:
    target: str
    address: str | None
    """Of the Ray cluster or its dashboard; None for targets without."""
    profile: Profile


class Runs(Protocol):
    """Runs to ask about. Every method raises ``OptionError`` if there is no answer."""

    def report(self, run: str) -> RunReport:
        """State ``UNKNOWN`` if there is no trace of it."""

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log, without line ends; with ``follow`` until the run is over."""

    def stop(self, run: str) -> RunReport:
        """Stop a run; a new submission resumes. No effect on a finished one."""


class Target(Runs, Protocol):
    """A place to send runs to. Every method raises ``OptionError`` if it cannot be reached."""

    def check(self, submission: Submission) -> None:
        """Refuse before anything is sent; raises OptionError with every reason."""

    def submit(self, submission: Submission) -> str:
        """Send it; returns the run's name."""

    def find(self, output: str) -> str | None:
        """The newest run that makes this output, if any."""


def new_run_name() -> str:
    return RUN_PREFIX + secrets.token_hex(_RUN_HEX // 2)


def is_run_name(text: str) -> bool:
    digits = text.removeprefix(RUN_PREFIX)
    return len(digits) == _RUN_HEX and digits != text and not digits.strip("0123456789abcdef")
