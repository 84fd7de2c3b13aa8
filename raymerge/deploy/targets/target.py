"""What every target does with a run that is sent away: check, submit, report, show logs, stop, find."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from raymerge.deploy.profiles import Profile

RUN_PREFIX = "raymerge-"
"""What the names of runs begin with."""
_RUN_HEX = 12


class RunState(StrEnum):
    """How far a run is."""

    QUEUED = "queued"
    """Accepted; its driver does not run yet."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """The checkpoint is published."""
    FAILED = "failed"
    """It ended with an error; submitted again, it goes on where that is possible."""
    STOPPED = "stopped"
    """Somebody stopped it; submitted again, it goes on."""
    UNKNOWN = "unknown"
    """Nothing tells; it was never submitted there, or all trace of it is gone."""

    @property
    def is_over(self) -> bool:
        """Whether it will not change by itself any more."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED)


@dataclass(frozen=True, slots=True)
class Submission:
    """What is sent away."""

    recipe_text: str
    """The recipe, as its file has it."""
    recipe_name: str
    output: str
    """The output place, as the cluster sees it."""
    profile: Profile
    run: str
    """Its name, ``raymerge-`` and 12 hexadecimal digits."""
    flags: tuple[str, ...] = ()
    """Flags of the command line that go behind the entry point's: ``--replace``, ``--keep-intermediates``."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is known of a run."""

    run: str
    """Its name; where no server knows it, its output place."""
    state: RunState
    output: str
    """Its output place; "" where that is not known."""
    message: str
    """What to tell: sentences."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Facts by their names, for people: where it runs, segments done, when it was last heard of.
    ``exit_code`` is that of its driver, where it is known."""

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
    """Where a run is."""

    target: str
    address: str | None
    """Of its Ray cluster or its dashboard; None for the targets without."""
    profile: Profile


class Runs(Protocol):
    """Runs that somebody asks about. Every method raises ``OptionError`` where nobody can be asked."""

    def report(self, run: str) -> RunReport:
        """How far a run is; state ``UNKNOWN`` where nobody knows of it."""

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log, without line ends; with ``follow`` until the run is over."""

    def stop(self, run: str) -> RunReport:
        """Stop a run; it goes on when it is submitted again. What is over stays as it is."""


class Target(Runs, Protocol):
    """A place where runs go. Every method raises ``OptionError`` where it cannot be reached."""

    def check(self, submission: Submission) -> None:
        """Find all that can be refused before anything is sent; raises OptionError with every reason."""

    def submit(self, submission: Submission) -> str:
        """Send it; returns the run's name."""

    def find(self, output: str) -> str | None:
        """Name of the newest run that makes this output; None where there is none."""


def new_run_name() -> str:
    """A name that no other run has."""
    return RUN_PREFIX + secrets.token_hex(_RUN_HEX // 2)


def is_run_name(text: str) -> bool:
    """Whether this is the name of a run, and no output place."""
    digits = text.removeprefix(RUN_PREFIX)
    return len(digits) == _RUN_HEX and digits != text and not digits.strip("0123456789abcdef")
