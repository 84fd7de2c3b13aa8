"""The target kubernetes: one RayJob of KubeRay per run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from raymerge.deploy.manifests import OUTPUT_LABEL, RECIPE_FILE, SENT_ANNOTATION, check, output_digest, rayjob
from raymerge.deploy.targets.kubernetes_api import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    RAY_JOBS,
    WHERE,
    AnswerError,
    AwayError,
    Kind,
    Server,
    missing,
    open_server,
)
from raymerge.deploy.targets.kubernetes_status import DriverLog, given_up, pod_troubles, reported, warnings
from raymerge.deploy.targets.sending import recipe_digest
from raymerge.deploy.targets.target import RunReport, RunState, Submission, Where
from raymerge.errors import IncompleteError, OptionError, Problem

Json = dict[str, Any]
Seen = TypeVar("Seen")

_POLL_SECONDS = 3.0
_POLL_PART = 10
"""Polls wait this many times as long as one takes: each sends the whole log."""
_ENDING_SECONDS = 120.0
_AWAY_SECONDS = 300.0
_ASK_THE_OUTPUT = "Ask with the output place instead of the run: `raymerge logs OUT`."


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    server: Server
    poll_seconds: float = _POLL_SECONDS
    ending_seconds: float = _ENDING_SECONDS
    away_seconds: float = _AWAY_SECONDS
    """How long following a run tolerates a server that does not answer."""

    def check(self, submission: Submission) -> None:
        config, job = self._manifests(submission)
        with _in_words(self.server):
            problems = list(missing(self.server, job, config["metadata"]["name"]))
        if problems:
            raise OptionError(problems)

    def submit(self, submission: Submission) -> str:
        """Send a run; an existing one for the same output is returned instead."""
        config, job = self._manifests(submission)
        with _in_words(self.server):
            if running := self._running(submission.output):
                self._check_same(running, submission)
                return running
            for kind, body in ((CONFIG_MAPS, config), (RAY_JOBS, job)):
                self.server.create(kind, body, dry_run=True)
            self._send(config, _stamped(job))
        return submission.run

    def report(self, run: str) -> RunReport:
        """The state of a run, with what keeps its pods from running."""
        with _in_words(self.server):
            job = self.server.read(RAY_JOBS, run)
            if job is None:
                return self._nowhere(run)
            found, log = self._found(job), DriverLog()
            if found.state not in (RunState.RUNNING, RunState.STOPPED) or log.read(self.server, job):
                return found
        return given_up(found, log.error()) if found.state is RunState.STOPPED else _counted(found, log)

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log; with ``follow`` until the run is over, with other news in between, once
        each.
        """
        log, told = DriverLog(), set[str]()

        def look() -> tuple[RunReport, str, float] | None:
            if (job := self.server.read(RAY_JOBS, run)) is None:
                return None
            began = time.monotonic()
            found, obstacle = self._found(job), log.read(self.server, job)
            return found, obstacle, time.monotonic() - began

        with _in_words(self.server):
            while (seen := self._patiently(run, look) if follow else look()) is not None:
                found, obstacle, took = seen
                yield from log.new_lines(is_over=found.state.is_over)
                if not follow and obstacle:
                    raise OptionError(Problem(run, f"its log cannot be had: {obstacle}.", _ASK_THE_OUTPUT))
                if not follow or found.state.is_over:
                    return
                fresh = [line for line in _said(found, obstacle) if line not in told]
                yield from (f"{run}: {line}" for line in fresh)
                told.update(fresh)
                time.sleep(max(self.poll_seconds, _POLL_PART * took))
        if not follow:
            raise OptionError(Problem(run, self._nowhere(run).message, _ASK_THE_OUTPUT))

    def stop(self, run: str) -> RunReport:
        """Delete the RayJob and everything that belongs to it."""
        found = self.report(run)
        if found.state.is_over or found.state is RunState.UNKNOWN:
            return found
        with _in_words(self.server):
            self.server.delete(RAY_JOBS, run)
            until = time.monotonic() + self.ending_seconds
            while (job := self.server.read(RAY_JOBS, run)) is not None and time.monotonic() < until:
                time.sleep(self.poll_seconds)
            with suppress(AnswerError):
                self.server.delete(CONFIG_MAPS, run)
        ending = " Some of its pods have not ended yet." if job is not None else ""
        message = f"it was stopped.{ending} Submit it again; it goes on where it stopped."
        return replace(found, state=RunState.STOPPED, message=message)

    def find(self, output: str) -> str | None:
        with _in_words(self.server):
            made = self._making(output)
        return made[-1]["metadata"]["name"] if made else None

    def _manifests(self, submission: Submission) -> tuple[Json, Json]:
        recipe, output, run = submission.recipe_text, submission.output, submission.run
        check(submission.profile, recipe, output, run, submission.recipe_name, flags=submission.flags)
        return rayjob(submission.profile, recipe, output, run, flags=submission.flags)

    def _running(self, output: str) -> str | None:
        on_its_way = [job for job in self._making(output) if not reported(job).state.is_over]
        return on_its_way[-1]["metadata"]["name"] if on_its_way else None

    def _check_same(self, run: str, submission: Submission) -> None:
        config = self.server.read(CONFIG_MAPS, run)
        text = None if config is None else config["data"].get(RECIPE_FILE)
        if text is not None and recipe_digest(text) != recipe_digest(submission.recipe_text):
            what = f"the run {run} makes it now, of another recipe."
            remedy = f"Wait for it, stop it with `raymerge stop {run}`, or choose another -o."
            raise OptionError(Problem(submission.output, what, remedy))

    def _making(self, output: str) -> list[Json]:
        """RayJobs that make an output, oldest first, without those being deleted."""
        found = self.server.select(RAY_JOBS, labels=f"{OUTPUT_LABEL}={output_digest(output)}")
        left = [job for job in found if "deletionTimestamp" not in job["metadata"]]
        return sorted(left, key=_age)

    def _send(self, config: Json, job: Json) -> None:
        made = self._create(CONFIG_MAPS, config)
        try:
            owner = self._create(RAY_JOBS, job)
        except (AnswerError, OptionError):
            self.server.delete(CONFIG_MAPS, config["metadata"]["name"])
            raise
        belongs = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        made["metadata"]["ownerReferences"] = [belongs]
        # The recipe goes when the RayJob does; where rights are too few for that, with a stop.
        with suppress(AnswerError):
            self.server.replace(CONFIG_MAPS, made)

    def _create(self, kind: Kind, body: Json) -> Json:
        try:
            return self.server.create(kind, body)
        except AnswerError as error:
            # Names are chance: what is there already was made by a request whose answer was lost.
            made = self.server.read(kind, body["metadata"]["name"]) if error.code == 409 else None
            if made is None:
                raise
            return made

    def _patiently(self, run: str, look: Callable[[], Seen]) -> Seen:
        until = time.monotonic() + self.away_seconds
        while True:
            try:
                return look()
            except (AwayError, AnswerError) as error:
                if isinstance(error, AnswerError) and not error.is_passing:
                    raise
                if time.monotonic() > until:
                    what = (
                        f"{error} The run may go on: `raymerge status {run}` tells, once the server answers."
                    )
                    raise IncompleteError(what) from None
            time.sleep(self.poll_seconds)

    def _found(self, job: Json) -> RunReport:
        found = reported(job)
        troubles = () if found.state.is_over else tuple(self._troubles(job))
        return replace(found, message="\n".join((found.message, *troubles))) if troubles else found

    def _nowhere(self, run: str) -> RunReport:
        what = (
            f"the namespace {self.server.namespace} has no RayJob {run}: it was stopped, or never sent here."
        )
        return RunReport(run, RunState.UNKNOWN, "", what, {"target": "kubernetes"})

    def _troubles(self, job: Json) -> Iterator[str]:
        cluster = job.get("status", {}).get("rayClusterName", "")
        try:
            if cluster:
                yield from pod_troubles(self.server.select(PODS, labels=f"ray.io/cluster={cluster}"))
            for name in filter(None, (job["metadata"]["name"], cluster)):
                yield from warnings(self.server.select(EVENTS, fields=f"involvedObject.name={name}"))
        except AnswerError as error:
            # Whoever may not look at pods still learns how the RayJob is.
            if error.code != 403:
                raise


def open_kubernetes(where: Where, _: Mapping[str, str]) -> KubernetesTarget:
    """Raises:
    OptionError: no cluster configuration, or lightkube is not installed.
    """
    kubernetes = where.profile.kubernetes
    return KubernetesTarget(open_server(kubernetes.namespace if kubernetes else None))


def _counted(found: RunReport, log: DriverLog) -> RunReport:
    segments = log.segments()
    return replace(found, details={**found.details, "segments": segments}) if segments else found


def _stamped(job: Json) -> Json:
    metadata, now = job["metadata"], datetime.now(UTC).isoformat(timespec="microseconds")
    annotations = {**metadata.get("annotations", {}), SENT_ANNOTATION: now}
    return {**job, "metadata": {**metadata, "annotations": annotations}}


def _age(job: Json) -> tuple[str, str]:
    """Sort key of RayJobs, oldest first; the senders' clocks only decide within a second."""
    metadata = job["metadata"]
    return str(metadata["creationTimestamp"]), str(metadata.get("annotations", {}).get(SENT_ANNOTATION, ""))


def _said(found: RunReport, obstacle: str) -> Iterator[str]:
    yield from found.message.splitlines()
    if obstacle and found.state is RunState.RUNNING:
        yield f"its log cannot be shown: {obstacle}. `raymerge status` tells how far it is."


@contextmanager
def _in_words(server: Server) -> Iterator[None]:
    try:
        yield
    except AnswerError as error:
        raise OptionError(_problem(server, error)) from None


def _problem(server: Server, error: AnswerError) -> Problem:
    if error.code == 401:
        what = f"the cluster at {server.url} does not accept your credentials."
        return Problem(WHERE, what, "Log in to it again; `kubectl get rayjobs` has to work from here.")
    if error.code == 403:
        remedy = "Ask an administrator for a role that allows it."
        return Problem(WHERE, f"the cluster at {server.url} does not allow it: {error}.", remedy)
    if error.code == 404:
        what = f"the cluster at {server.url} has no such thing: {error}."
        return Problem(WHERE, what, "See that KubeRay is installed and the namespace exists.")
    what = f"the cluster at {server.url} refuses it: {error}."
    return Problem(WHERE, what, "Change the profile; `raymerge cluster render` shows what was sent.")
