"""The target job: a running Ray cluster by its Jobs API, from any machine that reaches its dashboard."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets import sending
from raymerge.deploy.targets.target import LogText, RunReport, RunState, Submission, Where
from raymerge.errors import OptionError, Problem, first_line
from raymerge.storage.temporary import OwnDirectory
from raymerge.units import format_size

RECIPE, PROFILE = "recipe.yml", "profile.yml"
_MOST_NBYTES = 100_000_000
"""Limit for all files; the job server takes a package of 100 MiB."""
_ENTRY_NBYTES = 256
"""Overhead of a file in a package; bounds endless circles of links as well."""


_DIRECTORY = ("job", "working_dir")


def directory_problems(directory: Path | None, where: str) -> Iterator[Problem]:
    if directory is None:
        return
    if not directory.is_dir():
        yield Problem(where, f"there is no directory {directory}.", "Write one, or take it out.")
    elif _is_large(directory):
        what = f"{directory} holds more than {format_size(_MOST_NBYTES)}, and a job is sent no more."
        remedy = "Name a smaller directory, and put what is large where the cluster sees it."
        yield Problem(where, what, remedy)


@contextmanager
def folder_of(submission: Submission) -> Iterator[Path]:
    """The working directory of a job, for the duration of the context. Raises OptionError: it cannot be made,
    for example because a file is unreadable."""
    with OwnDirectory() as root:
        folder, directory = root / "job", _working_directory(submission)
        try:
            if directory is None:
                folder.mkdir()
            else:
                shutil.copytree(directory, folder, symlinks=False, ignore=_left_out)
            (folder / RECIPE).write_text(submission.recipe_text, encoding="utf-8")
            inside = submission.profile.for_inside(submission.output)
            (folder / PROFILE).write_text(inside.as_yaml(), encoding="utf-8")
        except OSError as error:
            reason = str(error)
            if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
                source, _, cause = error.args[0][0]
                reason = f"{source}: {cause}"
            remedy = "See that all in it can be read, and that the temporary directory has room."
            where = submission.profile.where(*_DIRECTORY)
            raise OptionError(Problem(where, f"cannot be copied: {reason}.", remedy)) from error
        yield folder


def _working_directory(submission: Submission) -> Path | None:
    directory = submission.profile.job.working_dir
    return None if directory is None else Path(directory)


def _left_out(directory: str, names: Sequence[str]) -> set[str]:
    """Dangling links, as of editors, and what is neither file nor directory."""
    paths = {name: os.path.join(directory, name) for name in names}
    return {name for name, path in paths.items() if not (os.path.isfile(path) or os.path.isdir(path))}


def _is_large(root: Path) -> bool:
    nbytes = 0
    for directory, _, names in os.walk(root, followlinks=True):
        nbytes += _ENTRY_NBYTES
        for name in set(names) - _left_out(directory, names):
            nbytes += os.stat(os.path.join(directory, name)).st_size + _ENTRY_NBYTES
        if nbytes > _MOST_NBYTES:
            return True
    return False


RUN_KEY, OUTPUT_KEY, RECIPE_KEY = "raymerge.run", "raymerge.output", "raymerge.recipe"
_PACKAGE = Path(__file__).parents[2]
"""The package, sent along; its dependencies are those of the cluster."""
_ENTRYPOINT = f"python -m raymerge.cli submit {RECIPE} --profile {PROFILE} --json"
_STATES = {each.name: each for each in RunState} | {"PENDING": RunState.QUEUED}
_STATUS_CODE = re.compile(r"status code (\d{3})")
_STOP_SECONDS = 30.0
_TOKEN = "RAY_AUTH_TOKEN"
_AUTHORIZATION = "Authorization"

Connect = Callable[[str, Mapping[str, str]], Any]


@dataclass(slots=True)
class JobServer:
    address: str
    headers: Mapping[str, str] = field(repr=False)
    """Of every request; they may hold a token and are kept nowhere else."""
    connect: Connect = lambda address, headers: _connect(address, headers)
    poll_seconds: float = 1.0
    away_seconds: float = 300.0
    """How long following a run tolerates a server that does not answer."""
    _client: Any = None

    def check(self, submission: Submission) -> None:
        """Refuse before anything is sent. Raises RecipeError: the recipe is not valid; OptionError: the
        server does not answer or refuses the token, or a path is not valid there."""
        profile, directory = submission.profile, _working_directory(submission)
        text, name, output = submission.recipe_text, submission.recipe_name, submission.output
        problems = [*sending.sending_problems(text, name, output, along=directory, run=profile.run)]
        problems += directory_problems(directory, profile.where(*_DIRECTORY))
        if problems:
            raise OptionError(problems)
        with self._asking() as client:
            client.get_version()

    def ray_version(self) -> str:
        """The version of Ray there. Raises OptionError: as ``check``."""
        with self._asking() as client:
            client.get_version()
            reply = client._do_request("GET", "/api/version")
            return str(reply.json().get("ray_version", "of an unknown version"))

    def submit(self, submission: Submission) -> str:
        """Send it; an existing job for the same output and recipe is returned instead. Raises OptionError: a
        job makes the same output from another recipe, or the server refuses it."""
        digest = sending.recipe_digest(submission.recipe_text)
        active = [each for each in self._making(submission.output) if not _state(each).is_over]
        if active:
            if active[-1].metadata.get(RECIPE_KEY) != digest:
                raise sending.other_recipe(active[-1].submission_id, submission.output)
            return str(active[-1].submission_id)
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
        details = {"target": "job", "address": self.address}
        try:
            with self._asking() as client:
                info = client.get_job_info(run)
        except LookupError:
            return RunReport(run, RunState.UNKNOWN, "", self._no_such_run(run), details)
        code = getattr(info, "driver_exit_code", None)
        if code is not None:
            details["exit_code"] = str(code)
        output = (info.metadata or {}).get(OUTPUT_KEY, "")
        return RunReport(run, _state(info), output, self._message(run, info), details)

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log, polled whole: the server's own following may end while the job runs.

        Raises OptionError: the server does not know the run; IncompleteError: it did not answer for too long;
        the run may go on."""
        log = LogText()
        look = partial(self._look, run, log)
        while True:
            state, pause = sending.look_patiently(
                look, run, (sending.AwayError,), pause=self.poll_seconds, away_seconds=self.away_seconds
            )
            yield from log.new_lines(is_over=state.is_over)
            if state.is_over or not follow:
                return
            time.sleep(pause)

    def stop(self, run: str) -> RunReport:
        """The driver gets three seconds; what is done is kept."""
        report = self.report(run)
        if report.state.is_over or report.state is RunState.UNKNOWN:
            return report
        with self._asking() as client:
            client.stop_job(run)
        ends_at = time.monotonic() + _STOP_SECONDS
        while not report.state.is_over and time.monotonic() < ends_at:
            time.sleep(self.poll_seconds / 2)
            report = self.report(run)
        return report

    def find(self, output: str) -> str | None:
        jobs = self._making(output)
        return str(jobs[-1].submission_id) if jobs else None

    def _making(self, output: str) -> list[Any]:
        """Jobs that make an output, newest last."""
        with self._asking() as client:
            jobs = client.list_jobs()
        making = [each for each in jobs if (each.metadata or {}).get(OUTPUT_KEY) == output]
        return sorted((each for each in making if each.submission_id), key=lambda each: each.start_time or 0)

    def _look(self, run: str, log: LogText) -> RunState:
        try:
            with self._asking() as client:
                # First, so that what was written just before the end is not missed.
                state = _state(client.get_job_info(run))
                log.text = client.get_job_logs(run)
        except LookupError:
            remedy = "Check its name, or name its output place."
            raise OptionError(Problem(run, self._no_such_run(run), remedy)) from None
        return state

    def _no_such_run(self, run: str) -> str:
        return f"the cluster at {self.address} knows no run {run}."

    def _message(self, run: str, info: Any) -> str:
        message = str(info.message or "")
        match _state(info):
            case RunState.QUEUED:
                return message.strip() or "it waits for its driver to be started"
            case RunState.RUNNING:
                return "its driver runs."
            case RunState.SUCCEEDED:
                return "the checkpoint is published, and was verified before."
            case RunState.STOPPED:
                return "it was stopped. Submit it again: it goes on from there."
            case RunState.FAILED:
                with self._asking() as client:
                    error = LogText(client.get_job_logs(run)).error()
                said = message.strip()[:300].partition("\n")[0]
                silent = f"its driver ended without a word. {said}".rstrip()
                return str(error.get("message")) if error else silent
            case _:
                return message.strip()

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            if self._client is None:
                self._client = self.connect(self.address, self.headers)
            yield self._client
        except OptionError:
            raise
        except OSError as error:
            what = f"no Jobs API of Ray answers at {self.address} ({first_line(error)})."
            remedy = "Give http://HEAD:8265, the dashboard of a running head node."
            raise sending.AwayError(Problem("--address", what, remedy)) from error
        except RuntimeError as error:
            raise self._refused(error) from error
        except Exception as error:  # Ray's own kinds, which are not imported here
            if type(error).__name__ != "AuthenticationError":
                raise
            raise self._no_token(error) from error

    def _refused(self, error: RuntimeError) -> Exception:
        status = _STATUS_CODE.search(str(error))
        code = int(status.group(1)) if status else 0
        if code == 404:
            return LookupError(str(error))
        if code in (401, 403):
            return self._no_token(error)
        what = f"the server at {self.address} failed: {first_line(error)}."
        problem = Problem("--address", what, "Look at the head node's dashboard and its logs.")
        return sending.AwayError(problem) if code >= 500 else OptionError(problem)

    def _no_token(self, error: Exception) -> OptionError:
        what = f"the cluster at {self.address} does not accept the token, or wants one ({first_line(error)})."
        remedy = "Set RAY_AUTH_TOKEN to the cluster's token, or name its variable in the profile: "
        remedy += "job: {headers_from_env: {Authorization: NAME}}."
        return OptionError(Problem("--address", what, remedy))


def open_job_server(where: Where, environment: Mapping[str, str]) -> JobServer:
    """Raises OptionError: a variable named in the profile is not set."""
    return JobServer(where.address or "", _headers(where.profile, environment))


def _headers(profile: Profile, environment: Mapping[str, str]) -> dict[str, str]:
    """Request headers, with the token that Ray's own tools would send."""
    sources = profile.job.headers_from_env or {}
    where = profile.where("job", "headers_from_env")
    missing = [
        Problem(where, f"the environment variable {name} is not set.", f"Set {name} to the value.")
        for name in sources.values()
        if name not in environment
    ]
    if missing:
        raise OptionError(missing)
    headers = {header: environment[name] for header, name in sources.items()}
    if environment.get(_TOKEN) and not any(each.lower() == _AUTHORIZATION.lower() for each in headers):
        headers[_AUTHORIZATION] = f"Bearer {environment[_TOKEN]}"
    return headers


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
            raise OptionError(_no_client(first_line(error))) from error
        raise


def _state(info: Any) -> RunState:
    status = getattr(info.status, "value", info.status)
    return _STATES.get(str(status), RunState.UNKNOWN)


def _no_client(reason: str) -> Problem:
    what = f"Ray's client for jobs is not installed ({reason})."
    return Problem("--target job", what, "Install it: pip install 'raymerge[jobs]'.")
