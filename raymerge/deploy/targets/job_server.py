"""The target job: a running Ray cluster by its Jobs API, from any machine that reaches its dashboard."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets.sending import recipe_digest, sending_problems
from raymerge.deploy.targets.target import LogText, RunReport, RunState, Submission, Where
from raymerge.errors import IncompleteError, OptionError, Problem
from raymerge.storage.temporary import OwnDirectory
from raymerge.units import format_size

RECIPE, PROFILE = "recipe.yml", "profile.yml"
_MOST_NBYTES = 100_000_000
"""Limit for all files; the job server takes a package of 100 MiB."""
_ENTRY_NBYTES = 256
"""Overhead of a file in a package; bounds endless circles of links as well."""


def along_of(submission: Submission) -> Path | None:
    along = submission.profile.job.working_dir
    return None if along is None else Path(along)


def folder_problems(submission: Submission) -> Iterator[Problem]:
    along = along_of(submission)
    if along is None:
        return
    where = _where(submission)
    if not along.is_dir():
        yield Problem(where, f"there is no directory {along}.", "Write one, or take it out.")
    elif _is_large(along):
        most = format_size(_MOST_NBYTES)
        what = f"{along} holds more than {most}, and a job is sent no more."
        remedy = "Name a smaller directory, and put what is large where the cluster sees it."
        yield Problem(where, what, remedy)


@contextmanager
def folder_of(submission: Submission) -> Iterator[Path]:
    """The working directory of a job, for the duration of the context.

    Raises:
        OptionError: it cannot be made, for example because a file is unreadable.
    """
    with OwnDirectory() as root:
        folder = root / "job"
        try:
            _fill(folder, submission)
        except OSError as error:
            what = f"cannot be copied: {_said(error)}."
            remedy = "See that all in it can be read, and that the temporary directory has room."
            raise OptionError(Problem(_where(submission), what, remedy)) from error
        yield folder


def _fill(folder: Path, submission: Submission) -> None:
    along = along_of(submission)
    if along is None:
        folder.mkdir()
    else:
        shutil.copytree(along, folder, symlinks=False, ignore=_left_out)
    (folder / RECIPE).write_text(submission.recipe_text, encoding="utf-8")
    inside = submission.profile.for_inside(submission.output)
    (folder / PROFILE).write_text(inside.as_yaml(), encoding="utf-8")


def _left_out(directory: str, names: Sequence[str]) -> set[str]:
    """Dangling links, as of editors, and what is neither file nor directory."""
    paths = {name: os.path.join(directory, name) for name in names}
    return {name for name, path in paths.items() if not (os.path.isfile(path) or os.path.isdir(path))}


def _is_large(along: Path) -> bool:
    nbytes = 0
    for directory, _, names in os.walk(along, followlinks=True):
        nbytes += _ENTRY_NBYTES
        for name in set(names) - _left_out(directory, names):
            nbytes += os.stat(os.path.join(directory, name)).st_size + _ENTRY_NBYTES
        if nbytes > _MOST_NBYTES:
            return True
    return False


def _where(submission: Submission) -> str:
    return submission.profile.where("job", "working_dir")


def _said(error: OSError) -> str:
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return str(error)


RUN_KEY, OUTPUT_KEY, RECIPE_KEY = "raymerge.run", "raymerge.output", "raymerge.recipe"
_PACKAGE = Path(__file__).parents[2]
"""The package, sent along; its dependencies are those of the cluster."""
_ENTRYPOINT = f"python -m raymerge.cli submit {RECIPE} --profile {PROFILE} --json"
_STATES = {
    "PENDING": RunState.QUEUED,
    "RUNNING": RunState.RUNNING,
    "SUCCEEDED": RunState.SUCCEEDED,
    "FAILED": RunState.FAILED,
    "STOPPED": RunState.STOPPED,
}
_STATUS_CODE = re.compile(r"status code (\d{3})")
_POLL_SECONDS = 1.0
_POLL_PART = 10
"""Polls wait this many times as long as one takes: each sends the whole log."""
_AWAY_SECONDS = 300.0
_STOP_SECONDS = 30.0
_ABSENT = 404
_TOKEN = "RAY_AUTH_TOKEN"
_AUTHORIZATION = "Authorization"
_MOST_SAID = 300

Connect = Callable[[str, Mapping[str, str]], Any]


class JobServer:
    def __init__(
        self,
        address: str,
        headers: Mapping[str, str],
        *,
        connect: Connect | None = None,
        poll_seconds: float = _POLL_SECONDS,
        away_seconds: float = _AWAY_SECONDS,
    ) -> None:
        """Args:
        headers: of every request; they may hold a token and are kept nowhere else.
        away_seconds: how long following a run tolerates a server that does not answer.
        """
        self._address = address
        self._headers = headers
        self._connect = connect or _connect
        self._poll_seconds = poll_seconds
        self._away_seconds = away_seconds
        self._made: Any = None

    def check(self, submission: Submission) -> None:
        """Refuse before anything is sent.

        Raises:
            RecipeError: the recipe is not valid.
            OptionError: the server does not answer or refuses the token, or a path is not valid there.
        """
        found = list(
            sending_problems(
                submission.recipe_text,
                submission.recipe_name,
                submission.output,
                along=along_of(submission),
                run=submission.profile.run,
            )
        )
        found.extend(folder_problems(submission))
        if found:
            raise OptionError(found)
        with self._asking() as client:
            client.get_version()

    def submit(self, submission: Submission) -> str:
        """Send it; an existing job for the same output and recipe is returned instead.

        Raises:
            OptionError: a job makes the same output from another recipe, or the server refuses it.
        """
        digest = recipe_digest(submission.recipe_text)
        running = self._active(submission.output)
        if running is not None:
            _check_same(running, submission.output, digest)
            return str(running.submission_id)
        job = submission.profile.job
        with folder_of(submission) as folder, self._asking() as client:
            client.submit_job(
                entrypoint=" ".join((_ENTRYPOINT, *submission.flags)),
                submission_id=submission.run,
                runtime_env={
                    "working_dir": str(folder),
                    "py_modules": [str(_PACKAGE)],
                    "excludes": ["__pycache__"],
                    "env_vars": dict(job.env),
                },
                metadata={RUN_KEY: submission.run, OUTPUT_KEY: submission.output, RECIPE_KEY: digest},
                entrypoint_num_cpus=job.num_cpus,
            )
        return submission.run

    def report(self, run: str) -> RunReport:
        try:
            with self._asking() as client:
                info = client.get_job_info(run)
        except LookupError:
            what = f"the cluster at {self._address} knows no run {run}."
            return RunReport(run, RunState.UNKNOWN, "", what, {"target": "job", "address": self._address})
        state = _state(info)
        output = (info.metadata or {}).get(OUTPUT_KEY, "")
        return RunReport(run, state, output, self._message(run, state, info), self._details(info))

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log.

        The server's own following may end while the job runs, so the whole log is polled, until the job's
        state says that it is over.

        Raises:
            OptionError: the server does not know the run.
            IncompleteError: it did not answer for too long; the run may go on.
        """
        log = LogText()
        while True:
            began = time.monotonic()
            state, log.text = self._patiently(run)
            yield from log.new_lines(is_over=state.is_over)
            if state.is_over or not follow:
                return
            time.sleep(max(self._poll_seconds, _POLL_PART * (time.monotonic() - began)))

    def stop(self, run: str) -> RunReport:
        """The driver gets three seconds; what is done is kept."""
        found = self.report(run)
        if found.state.is_over or found.state is RunState.UNKNOWN:
            return found
        with self._asking() as client:
            client.stop_job(run)
        ends_at = time.monotonic() + _STOP_SECONDS
        while not found.state.is_over and time.monotonic() < ends_at:
            time.sleep(self._poll_seconds / 2)
            found = self.report(run)
        return found

    def find(self, output: str) -> str | None:
        jobs = self._making(output)
        return str(jobs[-1].submission_id) if jobs else None

    def _making(self, output: str) -> list[Any]:
        """Jobs that make an output, newest last."""
        with self._asking() as client:
            jobs = client.list_jobs()
        found = [each for each in jobs if (each.metadata or {}).get(OUTPUT_KEY) == output]
        return sorted((each for each in found if each.submission_id), key=lambda each: each.start_time or 0)

    def _active(self, output: str) -> Any | None:
        found = [each for each in self._making(output) if not _state(each).is_over]
        return found[-1] if found else None

    def _patiently(self, run: str) -> tuple[RunState, str]:
        """State and log of a run; tolerates short absences of the server."""
        began = time.monotonic()
        while True:
            try:
                with self._asking() as client:
                    # First, so that what was written just before the end is not missed.
                    state = _state(client.get_job_info(run))
                    return state, client.get_job_logs(run)
            except LookupError:
                what = f"the cluster at {self._address} knows no run {run}."
                raise OptionError(Problem(run, what, "Check its name, or name its output place.")) from None
            except _AwayError as error:
                if time.monotonic() - began > self._away_seconds:
                    raise IncompleteError(_away(run, error)) from error
                time.sleep(self._poll_seconds)

    def _message(self, run: str, state: RunState, info: Any) -> str:
        if state is not RunState.FAILED:
            said = {
                RunState.QUEUED: str(info.message or "it waits for its driver to be started"),
                RunState.RUNNING: "its driver runs.",
                RunState.SUCCEEDED: "the checkpoint is published, and was verified before.",
                RunState.STOPPED: "it was stopped. Submit it again: it goes on from there.",
            }
            return said.get(state, str(info.message or "")).strip()
        log = LogText()
        with self._asking() as client:
            log.text = client.get_job_logs(run)
        if error := log.error():
            return str(error.get("message"))
        return f"its driver ended without a word. {_first_line(str(info.message or ''))}".rstrip()

    def _details(self, info: Any) -> dict[str, str]:
        details = {"target": "job", "address": self._address}
        code = getattr(info, "driver_exit_code", None)
        if code is not None:
            details["exit_code"] = str(code)
        return details

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            if self._made is None:
                self._made = self._connect(self._address, self._headers)
            yield self._made
        except OptionError:
            raise
        except OSError as error:
            raise _AwayError(_unreachable(self._address, error)) from error
        except RuntimeError as error:
            raise self._refused(error) from error
        except Exception as error:  # Ray's own kinds, which are not imported here
            if type(error).__name__ != "AuthenticationError":
                raise
            raise OptionError(_no_token(self._address, error)) from error

    def _refused(self, error: RuntimeError) -> Exception:
        found = _STATUS_CODE.search(str(error))
        code = int(found.group(1)) if found else 0
        if code == _ABSENT:
            return LookupError(str(error))
        if code in (401, 403):
            return OptionError(_no_token(self._address, error))
        said = f"the server at {self._address} failed: {_first(error)}."
        problem = Problem("--address", said, "Look at the head node's dashboard and its logs.")
        return _AwayError(problem) if code >= 500 else OptionError(problem)


def open_job_server(where: Where, environment: Mapping[str, str]) -> JobServer:
    """Raises:
    OptionError: a variable named in the profile is not set.
    """
    return JobServer(where.address or "", _headers(where.profile, environment))


def _headers(profile: Profile, environment: Mapping[str, str]) -> dict[str, str]:
    """Request headers, with the token that Ray's own tools would send."""
    sources = profile.job.headers_from_env or {}
    missing = [name for name in sources.values() if name not in environment]
    if missing:
        where = profile.where("job", "headers_from_env")
        raise OptionError(
            [
                Problem(where, f"the environment variable {name} is not set.", f"Set {name} to the value.")
                for name in missing
            ]
        )
    headers = {header: environment[name] for header, name in sources.items()}
    if environment.get(_TOKEN) and not any(each.lower() == _AUTHORIZATION.lower() for each in headers):
        headers[_AUTHORIZATION] = f"Bearer {environment[_TOKEN]}"
    return headers


class _AwayError(OptionError):
    """The server does not answer; it may later."""


def _connect(address: str, headers: Mapping[str, str]) -> Any:
    from raymerge.runtime.workers.ray_environment import import_ray

    import_ray(embedded=False)
    try:
        from ray.job_submission import JobSubmissionClient

        # They say with every submission what is packed and uploaded.
        for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return JobSubmissionClient(address, headers=dict(headers))
    except ImportError as error:
        raise OptionError(_no_client(str(error))) from error
    except RuntimeError as error:
        if "ray[default]" in str(error):
            raise OptionError(_no_client(_first(error))) from error
        raise


def _state(info: Any) -> RunState:
    status = getattr(info.status, "value", info.status)
    return _STATES.get(str(status), RunState.UNKNOWN)


def _check_same(job: Any, output: str, digest: str) -> None:
    if (job.metadata or {}).get(RECIPE_KEY) != digest:
        what = f"the run {job.submission_id} makes it now, of another recipe."
        remedy = f"Wait for it, stop it with 'raymerge stop {job.submission_id}', or choose another -o."
        raise OptionError(Problem(output, what, remedy))


def _unreachable(address: str, error: OSError) -> Problem:
    what = f"no Jobs API of Ray answers at {address} ({_first(error)})."
    return Problem("--address", what, "Give http://HEAD:8265, the dashboard of a running head node.")


def _away(run: str, error: OptionError) -> str:
    how = f"'raymerge status {run}' tells, once the server answers."
    return f"{error.problems[0].what} The run may go on: {how}"


def _no_token(address: str, error: Exception) -> Problem:
    what = f"the cluster at {address} does not accept the token, or wants one ({_first(error)})."
    remedy = "Set RAY_AUTH_TOKEN to the cluster's token, or name its variable in the profile: "
    return Problem("--address", what, f"{remedy}job: {{headers_from_env: {{Authorization: NAME}}}}.")


def _no_client(reason: str) -> Problem:
    what = f"Ray's client for jobs is not installed ({reason})."
    return Problem("--target job", what, "Install it: pip install 'raymerge[jobs]'.")


def _first(error: BaseException) -> str:
    return (_first_line(str(error)) or type(error).__name__).rstrip(".")


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:_MOST_SAID] if lines else ""
