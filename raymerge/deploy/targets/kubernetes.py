"""The target kubernetes: one RayJob of KubeRay per run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from raymerge.deploy.manifests import OUTPUT_LABEL, RECIPE_FILE, SENT_ANNOTATION, check, output_digest
from raymerge.deploy.targets.kubernetes_api import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    RAY_JOBS,
    AnswerError,
    BusyError,
    Kind,
    Server,
    missing,
    open_server,
)
from raymerge.deploy.targets.kubernetes_status import DriverLog, given_up, pod_troubles, reported, warnings
from raymerge.deploy.targets.sending import AwayError, look_patiently, other_recipe, recipe_digest
from raymerge.deploy.targets.target import RunReport, RunState, Submission, Where
from raymerge.errors import OptionError, Problem

Json = dict[str, Any]

_POLL_SECONDS = 3.0
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
        _manifests(submission)
        kubernetes = submission.profile.kubernetes
        if kubernetes is not None and (problems := list(missing(self.server, kubernetes))):
            raise OptionError(problems)

    def submit(self, submission: Submission) -> str:
        """Send a run; an existing one for the same output is returned instead."""
        config, job = _manifests(submission)
        active = [each for each in self._making(submission.output) if not reported(each).state.is_over]
        if active:
            run: str = active[-1]["metadata"]["name"]
            self._check_same(run, submission)
            return run
        for kind, body in ((CONFIG_MAPS, config), (RAY_JOBS, job)):
            self.server.create(kind, body, dry_run=True)
        self._send(config, _stamped(job))
        return submission.run

    def report(self, run: str) -> RunReport:
        """The state of a run, with what keeps its pods from running."""
        log = DriverLog()
        if (job := self.server.read(RAY_JOBS, run)) is None:
            return self._unknown(run)
        report = self._report(job)
        if report.state not in (RunState.RUNNING, RunState.STOPPED) or log.read(self.server, job):
            return report
        if report.state is RunState.STOPPED:
            return given_up(report, log.error())
        segments = log.segments()
        return replace(report, details={**report.details, "segments": segments}) if segments else report

    def logs(self, run: str, *, follow: bool) -> Iterator[str]:
        """Lines of the driver's log; with ``follow`` until the run is over, with other news in between, once
        each.
        """
        log, shown = DriverLog(), set[str]()
        # A log that is not followed is not waited for.
        passing = (AwayError, BusyError) if follow else ()
        look = partial(self._look, run, log)
        while True:
            seen, pause = look_patiently(
                look, run, passing, pause=self.poll_seconds, away_seconds=self.away_seconds
            )
            if seen is None:
                break
            report, obstacle = seen
            yield from log.new_lines(is_over=report.state.is_over)
            if not follow and obstacle:
                raise OptionError(Problem(run, f"its log cannot be had: {obstacle}.", _ASK_THE_OUTPUT))
            if not follow or report.state.is_over:
                return
            news = [line for line in _news(report, obstacle) if line not in shown]
            yield from (f"{run}: {line}" for line in news)
            shown.update(news)
            time.sleep(pause)
        if not follow:
            raise OptionError(Problem(run, self._unknown(run).message, _ASK_THE_OUTPUT))

    def stop(self, run: str) -> RunReport:
        """Delete the RayJob and everything that belongs to it."""
        report = self.report(run)
        if report.state.is_over or report.state is RunState.UNKNOWN:
            return report
        self.server.delete(RAY_JOBS, run)
        until = time.monotonic() + self.ending_seconds
        while (job := self.server.read(RAY_JOBS, run)) is not None and time.monotonic() < until:
            time.sleep(self.poll_seconds)
        with suppress(AnswerError):
            self.server.delete(CONFIG_MAPS, run)
        ending = " Some of its pods have not ended yet." if job is not None else ""
        message = f"it was stopped.{ending} Submit it again; it goes on where it stopped."
        return replace(report, state=RunState.STOPPED, message=message)

    def find(self, output: str) -> str | None:
        jobs = self._making(output)
        return jobs[-1]["metadata"]["name"] if jobs else None

    def _making(self, output: str) -> list[Json]:
        """RayJobs that make an output, oldest first, without those being deleted."""
        jobs = self.server.select(RAY_JOBS, labels=f"{OUTPUT_LABEL}={output_digest(output)}")
        return sorted((job for job in jobs if "deletionTimestamp" not in job["metadata"]), key=_age)

    def _check_same(self, run: str, submission: Submission) -> None:
        config = self.server.read(CONFIG_MAPS, run)
        text = None if config is None else config["data"].get(RECIPE_FILE)
        if text is not None and recipe_digest(text) != recipe_digest(submission.recipe_text):
            raise other_recipe(run, submission.output)

    def _send(self, config: Json, job: Json) -> None:
        made = self._create(CONFIG_MAPS, config)
        try:
            owner = self._create(RAY_JOBS, job)
        except OptionError:
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

    def _look(self, run: str, log: DriverLog) -> tuple[RunReport, str] | None:
        """The report, and why the log cannot be read; None if there is no RayJob."""
        if (job := self.server.read(RAY_JOBS, run)) is None:
            return None
        return self._report(job), log.read(self.server, job)

    def _report(self, job: Json) -> RunReport:
        report = reported(job)
        troubles = () if report.state.is_over else self._troubles(job)
        return replace(report, message="\n".join((report.message, *troubles)))

    def _unknown(self, run: str) -> RunReport:
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


def _manifests(submission: Submission) -> tuple[Json, Json]:
    return check(
        submission.profile,
        submission.recipe_text,
        submission.output,
        submission.run,
        submission.recipe_name,
        flags=submission.flags,
    )


def _stamped(job: Json) -> Json:
    metadata, now = job["metadata"], datetime.now(UTC).isoformat(timespec="microseconds")
    annotations = {**metadata.get("annotations", {}), SENT_ANNOTATION: now}
    return {**job, "metadata": {**metadata, "annotations": annotations}}


def _age(job: Json) -> tuple[str, str]:
    """Sort key of RayJobs, oldest first; the senders' clocks only decide within a second."""
    metadata = job["metadata"]
    return str(metadata["creationTimestamp"]), str(metadata.get("annotations", {}).get(SENT_ANNOTATION, ""))


def _news(report: RunReport, obstacle: str) -> Iterator[str]:
    yield from report.message.splitlines()
    if obstacle and report.state is RunState.RUNNING:
        yield f"its log cannot be shown: {obstacle}. `raymerge status` tells how far it is."
