"""What a target of runs is, and which one by profile, flags or an address; the job that this process is."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pkgutil import resolve_name
from typing import Any, Protocol

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets import TARGETS
from raymerge.errors import OptionError, Problem
from raymerge.publish.record import entries_of

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
    outputs: tuple[RunReport, ...] = ()
    """Of a sweep, each under its name."""

    def to_json(self) -> dict[str, Any]:
        return {"event": "run", **asdict(self)}


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


@dataclass(slots=True)
class LogText:
    """A driver's log, read whole again and again while it grows."""

    text: str = ""
    _num_shown: int = 0

    def new_lines(self, *, is_over: bool) -> list[str]:
        """Lines not given before; an incomplete line waits until it is complete or the run is over."""
        end = len(self.text) if is_over else self.text.rfind("\n") + 1
        lines = self.text[self._num_shown : end].splitlines()
        self._num_shown = max(self._num_shown, end)
        return lines

    def events(self) -> Iterator[Mapping[str, Any]]:
        return entries_of(self.text.encode())

    def error(self) -> Mapping[str, Any]:
        """The driver's last event of a failure; empty for none."""
        return [{}, *(each for each in self.events() if each.get("event") == "error")][-1]


_DASHBOARD = ("http://", "https://")


def choose(profile: Profile | None, target: str | None, address: str | None) -> Where:
    """Flags win over the profile; an address of a dashboard means ``job``. Raises OptionError: contradictory
    arguments, or a missing address."""
    profile = profile or Profile()
    kind = target or profile.target
    if target is None and address is not None:
        kind = "job" if address.startswith(_DASHBOARD) else "cluster"
    address = address or {"job": profile.job.address, "cluster": profile.cluster.address}.get(kind)
    if problem := _address_problem(kind, address):
        raise OptionError(problem)
    if kind == "kubernetes" and profile.kubernetes is None:
        what = "the target kubernetes needs a profile with a section 'kubernetes'."
        raise OptionError(Problem("--target", what, "Give --profile FILE; see configs/run."))
    return Where(kind, address, profile)


def _address_problem(kind: str, address: str | None) -> Problem | None:
    is_dashboard = address is not None and address.startswith(_DASHBOARD)
    match kind:
        case "job" if address is None:
            what = "the target job needs the address of a dashboard."
            return Problem("--target", what, "Give --address http://HEAD:8265, or write it in the profile.")
        case "job" if not is_dashboard:
            what = f"{address} is the address of a Ray cluster from inside it, and no dashboard."
            return Problem("--address", what, "Give http://HEAD:8265, or --target cluster.")
        case "cluster" if address is None:
            what = "the target cluster needs the address of a head node."
            return Problem("--target", what, "Give --address HOST:PORT, or auto on a node of the cluster.")
        case "cluster" if is_dashboard:
            what = f"{address} is the address of a dashboard, which the target cluster does not use."
            return Problem("--address", what, "Give HOST:PORT of the head node, or --target job.")
        case "local" | "kubernetes" if address is not None:
            what = f"the target {kind} has no address of a Ray cluster, and {address} was given."
            return Problem("--address", what, "Drop it, or give --target cluster or job.")
    return None


def target_of(where: Where, environment: Mapping[str, str]) -> Target | None:
    """The target to send runs to; None if this process makes them. ``environment``: variables that headers
    are taken from. Raises OptionError: a variable named in the profile is not set, or a package is missing.
    """
    opener = TARGETS.get(where.target)
    return resolve_name(opener)(where, environment) if opener else None


_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_STOP_SECONDS = 30.0
"""Limit of a stop request: Ray's client waits for ever for a server that does not answer."""


def own_job(environment: Mapping[str, str]) -> str:
    """Name of the job whose driver this process is; "" for none."""
    try:
        return str(json.loads(environment[_CONFIG])["metadata"]["job_submission_id"])
    except (KeyError, ValueError, TypeError):
        return ""


def end_for_good(environment: Mapping[str, str]) -> None:
    """Have Ray stop this process's own job: KubeRay restarts failed jobs, but not stopped ones.

    Ray sends SIGTERM, so this returns only if there is no job, or the stop failed."""
    if not (job := own_job(environment)):
        return

    def stop() -> None:
        # What cannot be stopped ends with its exit code, and is tried again.
        with suppress(Exception):
            there = target_of(Where("job", "auto", Profile()), environment)
            if there is not None:
                there.stop(job)

    stopping = threading.Thread(target=stop, name="own job", daemon=True)
    stopping.start()
    stopping.join(_STOP_SECONDS)
