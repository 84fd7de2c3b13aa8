"""The target kubernetes: one RayJob of KubeRay per run; its needs, its state, its pods, its driver's log.

The log comes from the Jobs API of the run's Ray cluster through the proxy of the API server: in HTTPMode it
is a file of the head, and no pod prints it."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from raymerge.deploy import manifests
from raymerge.deploy.profiles import Kubernetes
from raymerge.deploy.targets import kubernetes_api as api
from raymerge.deploy.targets.sending import AwayError, look_patiently, other_recipe, recipe_digest
from raymerge.deploy.targets.target import LogText, RunReport, RunState, Submission, Where
from raymerge.errors import OptionError, Problem

_ASK_THE_OUTPUT = "Ask with the output place instead of the run: `raymerge logs OUT`."


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    server: api.Server
    poll_seconds: float = 3.0
    ending_seconds: float = 120.0
    away_seconds: float = 300.0
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
            sent = self.server.read(api.CONFIG_MAPS, run) or {"data": {}}
            text = sent["data"].get(manifests.RECIPE_FILE, submission.recipe_text)
            if recipe_digest(text) != recipe_digest(submission.recipe_text):
                raise other_recipe(run, submission.output)
            return run
        for kind, body in ((api.CONFIG_MAPS, config), (api.RAY_JOBS, job)):
            self.server.create(kind, body, dry_run=True)
        self._send(config, _stamped(job))
        return submission.run

    def report(self, run: str) -> RunReport:
        """The state of a run, with what keeps its pods from running."""
        log = DriverLog()
        if (job := self.server.read(api.RAY_JOBS, run)) is None:
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
        each."""
        log, shown = DriverLog(), set[str]()
        # A log that is not followed is not waited for.
        passing = (AwayError, api.BusyError) if follow else ()
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
            news = report.message.splitlines()
            if obstacle and report.state is RunState.RUNNING:
                news += [f"its log cannot be shown: {obstacle}. `raymerge status` tells how far it is."]
            news = [line for line in news if line not in shown]
            yield from (f"{run}: {line}" for line in news)
            shown.update(news)
            time.sleep(pause)
        if not follow:
            raise OptionError(Problem(run, self._unknown(run).message, _ASK_THE_OUTPUT))

    def stop(self, run: str) -> RunReport:
        report = self.report(run)
        if report.state.is_over or report.state is RunState.UNKNOWN:
            return report
        self.server.delete(api.RAY_JOBS, run)
        until = time.monotonic() + self.ending_seconds
        while (job := self.server.read(api.RAY_JOBS, run)) is not None and time.monotonic() < until:
            time.sleep(self.poll_seconds)
        with suppress(api.AnswerError):
            self.server.delete(api.CONFIG_MAPS, run)
        ending = " Some of its pods have not ended yet." if job is not None else ""
        message = f"it was stopped.{ending} {_RESUMED}"
        return replace(report, state=RunState.STOPPED, message=message)

    def find(self, output: str) -> str | None:
        jobs = self._making(output)
        return jobs[-1]["metadata"]["name"] if jobs else None

    def _making(self, output: str) -> list[api.Json]:
        """RayJobs that make an output, oldest first, without those being deleted."""
        jobs = self.server.select(
            api.RAY_JOBS, labels=f"{manifests.OUTPUT_LABEL}={manifests.output_digest(output)}"
        )
        return sorted((job for job in jobs if "deletionTimestamp" not in job["metadata"]), key=_age)

    def _send(self, config: api.Json, job: api.Json) -> None:
        made = self._create(api.CONFIG_MAPS, config)
        try:
            owner = self._create(api.RAY_JOBS, job)
        except OptionError:
            self.server.delete(api.CONFIG_MAPS, config["metadata"]["name"])
            raise
        identity = {key: owner["metadata"][key] for key in ("name", "uid")}
        made["metadata"]["ownerReferences"] = [{key: job[key] for key in ("apiVersion", "kind")} | identity]
        # The recipe goes when the RayJob does; where rights are too few for that, with a stop.
        with suppress(api.AnswerError):
            self.server.replace(api.CONFIG_MAPS, made)

    def _create(self, kind: api.Kind, body: api.Json) -> api.Json:
        try:
            return self.server.create(kind, body)
        except api.AnswerError as error:
            # Names are chance: what is there already was made by a request whose answer was lost.
            made = self.server.read(kind, body["metadata"]["name"]) if error.code == 409 else None
            if made is None:
                raise
            return made

    def _look(self, run: str, log: DriverLog) -> tuple[RunReport, str] | None:
        """The report, and why the log cannot be read; None if there is no RayJob."""
        if (job := self.server.read(api.RAY_JOBS, run)) is None:
            return None
        return self._report(job), log.read(self.server, job)

    def _report(self, job: api.Json) -> RunReport:
        report = reported(job)
        troubles = () if report.state.is_over else self._troubles(job)
        return replace(report, message="\n".join((report.message, *troubles)))

    def _unknown(self, run: str) -> RunReport:
        namespace = self.server.namespace
        what = f"the namespace {namespace} has no RayJob {run}: it was stopped, or never sent here."
        return RunReport(run, RunState.UNKNOWN, "", what, {"target": "kubernetes"})

    def _troubles(self, job: api.Json) -> Iterator[str]:
        cluster = job.get("status", {}).get("rayClusterName", "")
        try:
            if cluster:
                yield from pod_troubles(self.server.select(api.PODS, labels=f"ray.io/cluster={cluster}"))
            for name in filter(None, (job["metadata"]["name"], cluster)):
                yield from warnings(self.server.select(api.EVENTS, fields=f"involvedObject.name={name}"))
        except api.AnswerError as error:
            # Whoever may not look at pods still learns how the RayJob is.
            if error.code != 403:
                raise


def open_kubernetes(where: Where, _: Mapping[str, str]) -> KubernetesTarget:
    """Raises OptionError: no cluster configuration, or lightkube is not installed."""
    kubernetes = where.profile.kubernetes
    return KubernetesTarget(api.open_server(kubernetes.namespace if kubernetes else None))


def _manifests(sent: Submission) -> tuple[api.Json, api.Json]:
    text, name = sent.recipe_text, sent.recipe_name
    return manifests.check(sent.profile, text, sent.output, sent.run, name, flags=sent.flags)


def _stamped(job: api.Json) -> api.Json:
    metadata, now = job["metadata"], datetime.now(UTC).isoformat(timespec="microseconds")
    annotations = {**metadata.get("annotations", {}), manifests.SENT_ANNOTATION: now}
    return {**job, "metadata": {**metadata, "annotations": annotations}}


def _age(job: api.Json) -> tuple[str, str]:
    """Sort key of RayJobs, oldest first; the senders' clocks only decide within a second."""
    sent = job["metadata"].get("annotations", {}).get(manifests.SENT_ANNOTATION, "")
    return str(job["metadata"]["creationTimestamp"]), str(sent)


_INSTALL = (
    "Have an administrator run `helm install kuberay-operator kuberay/kuberay-operator`, after "
    "`helm repo add kuberay https://ray-project.github.io/kuberay-helm/`."
)
_NOUNS = {
    api.SERVICE_ACCOUNTS: ("service account", "service_account"),
    api.SECRETS: ("secret", "the secrets"),
    api.CLAIMS: ("persistent volume claim", "the volumes"),
    api.CONFIG_MAPS: ("config map", "the volumes"),
    api.QUEUES: ("Kueue queue", "queue"),
    api.PRIORITIES: ("priority class", "priority_class"),
    api.RUNTIME_CLASSES: ("runtime class", "runtime_class"),
}
_ACTS = (("create", api.RAY_JOBS), ("get", api.RAY_JOBS), ("list", api.RAY_JOBS), ("create", api.CONFIG_MAPS))


def needs(kubernetes: Kubernetes) -> list[tuple[api.Kind, str]]:
    """The objects that a run names, each once, sorted by kind and name."""
    volumes = [*kubernetes.volumes, *(each for group in kubernetes.workers for each in group.volumes or ())]
    secrets = (kubernetes.token_secret, *kubernetes.image_pull_secrets, *kubernetes.env_from_secrets)
    runtime_classes = (group.runtime_class for group in kubernetes.workers)
    named = {
        api.SERVICE_ACCOUNTS: [kubernetes.service_account],
        api.PRIORITIES: [kubernetes.priority_class],
        api.QUEUES: [kubernetes.queue],
        api.SECRETS: [*secrets, *(volume.secret for volume in volumes)],
        api.RUNTIME_CLASSES: [kubernetes.head.runtime_class, *runtime_classes],
        api.CLAIMS: [volume.pvc for volume in volumes],
        api.CONFIG_MAPS: [volume.config_map for volume in volumes],
    }
    pairs = {(kind, name) for kind, names in named.items() for name in names if name is not None}
    return sorted(pairs, key=lambda need: (need[0].plural, need[1]))


def missing(server: api.Server, kubernetes: Kubernetes) -> Iterator[Problem]:
    if not server.has(api.RAY_JOBS):
        what = f"the cluster at {server.url} has no KubeRay: it does not know RayJobs (ray.io/v1)."
        yield Problem(api.WHERE, what, _INSTALL)
    if not _is_there(server, api.NAMESPACES, server.namespace):
        what = f"the cluster at {server.url} has no namespace {server.namespace}."
        remedy = f"Run `kubectl create namespace {server.namespace}`, or name another in the profile."
        yield Problem(api.WHERE, what, remedy)
        return
    for verb, kind in _ACTS:
        if not server.permits(verb, kind):
            what = f"your credentials may not {verb} {kind.plural} in the namespace {server.namespace}."
            yield Problem(api.WHERE, what, "Ask an administrator for a role that allows it.")
    for kind, name in needs(kubernetes):
        if not _is_there(server, kind, name):
            noun, field = _NOUNS[kind]
            what = f"the namespace {server.namespace} has no {noun} {name}."
            yield Problem(api.WHERE, what, f"Create it, or change {field} of the profile.")


def _is_there(server: api.Server, kind: api.Kind, name: str) -> bool:
    """Also if it may not be looked at: somebody who may use one namespace may often not look at namespaces,
    and of what is absent all the same the pods will tell."""
    try:
        return server.read(kind, name) is not None
    except api.AnswerError as error:
        if error.code == 403:
            return True
        raise


_MOST_LINES = 5
_RESUMABLE = 3
_EXIT_CODE = re.compile(r"failed with exit code (\d+)")
_RESUMED = "Submit it again; it goes on where it stopped."
_STOPPED = (
    "its job was stopped, by somebody, or by its driver because you must change something; its log told what."
)
"""For a run whose RayJob still exists; raymerge's own stop deletes it."""

_ENDED_BY: Mapping[str, str] = {
    "AppFailed": "its driver failed",
    "DeadlineExceeded": "it ran longer than active_deadline_seconds of the profile",
    "PreRunningDeadlineExceeded": "its Ray cluster was not ready before preRunningDeadlineSeconds",
    "SubmissionFailed": "the operator could not hand the job to its Ray cluster",
    "JobStatusCheckTimeoutExceeded": "the head of its Ray cluster did not answer the operator for minutes",
    "JobDeploymentStatusTransitionGracePeriodExceeded": "its job ended, and the operator was not told so",
    "ValidationFailed": "the operator refuses the RayJob",
}
_BEFORE: Mapping[str, str] = {
    "": "KubeRay's operator has not taken it up yet",
    "Initializing": "the pods of its Ray cluster are being started",
    "Waiting": "its Ray cluster waits for somebody to name a job (InteractiveMode)",
    "Suspending": "it is being suspended: its pods are ending",
    "Suspended": "it is suspended, and goes on when spec.suspend is false",
    "Retrying": "an attempt failed; the next begins, on a new Ray cluster, where it stopped",
}
_JOB_STATES: Mapping[str, RunState] = {
    "SUCCEEDED": RunState.SUCCEEDED,
    "FAILED": RunState.FAILED,
    "STOPPED": RunState.STOPPED,
}


def reported(job: api.Json) -> RunReport:
    status, metadata = job.get("status", {}), job["metadata"]
    state, message = _state_and_message(job, status)
    details = _details(job, status)
    if state is RunState.FAILED:
        details["exit_code"] = str(_exit_code(status))
    output = metadata.get("annotations", {}).get(manifests.OUTPUT_ANNOTATION, "")
    return RunReport(metadata["name"], state, output, message, details)


def given_up(report: RunReport, error: Mapping[str, Any]) -> RunReport:
    """A stopped job as a failed run, if its driver stopped itself by ``error``; empty for none."""
    if error.get("exit_code") != 2:
        return report
    message = f"its driver failed, and is not begun again: {error.get('message', '')}"
    details = {**report.details, "exit_code": "2"}
    return replace(report, state=RunState.FAILED, message=message, details=details)


def _state_and_message(job: api.Json, status: api.Json) -> tuple[RunState, str]:
    deployment, driver = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    if "deletionTimestamp" in job["metadata"]:
        state = _JOB_STATES.get(driver, RunState.STOPPED)
        return state, f"it was stopped; its pods are ending. {_RESUMED}"
    if deployment == "Complete":
        state = _JOB_STATES.get(driver, RunState.SUCCEEDED)
        if state is RunState.SUCCEEDED:
            return state, "the checkpoint is published."
        return state, _why_failed(status) if state is RunState.FAILED else f"{_STOPPED} {_RESUMED}"
    if deployment in ("Failed", "ValidationFailed"):
        return RunState.FAILED, _why_failed(status)
    state, message = _on_its_way(job, deployment, driver)
    attempt, attempts = _attempts(job)
    return state, f"{message}.{f' It is attempt {attempt} of {attempts}.' if attempt > 1 else ''}"


def _on_its_way(job: api.Json, deployment: str, driver: str) -> tuple[RunState, str]:
    if deployment == "Running":
        # The job itself is accepted some seconds before its driver runs.
        if driver in ("", "PENDING"):
            return RunState.QUEUED, "its driver is being started"
        return RunState.RUNNING, "its driver runs"
    if deployment == "Suspended" and (queue := job["metadata"].get("labels", {}).get(manifests.QUEUE_LABEL)):
        return RunState.QUEUED, f"it waits in the queue {queue} for its quota (Kueue)"
    if deployment in _BEFORE:
        return RunState.QUEUED, _BEFORE[deployment]
    return RunState.UNKNOWN, f"the operator is in a state that raymerge does not know, {deployment}"


def _why_failed(status: api.Json) -> str:
    reason = status.get("reason") or "ValidationFailed"
    why = _ENDED_BY.get(reason, f"the operator gave it up, {reason}")
    tail = last_words(status.get("message", ""))
    remedy = "" if _exit_code(status) == 2 else f" {_RESUMED}"
    return f"{why}{': ' if tail else '.'}{tail}{remedy}"


def last_words(message: str) -> str:
    """The driver's error if it gave one, or the last lines of its log, from the ``message`` of a status."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return str(LogText(message).error().get("message") or "\n".join(lines[-_MOST_LINES:]))


def _exit_code(status: api.Json) -> int:
    """The driver's exit code, if it is one of raymerge's; 3 if the run can go on."""
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return 2
    match = _EXIT_CODE.search(status.get("message", ""))
    code = int(match[1]) if match else _RESUMABLE
    return code if code in (1, 2) else _RESUMABLE


def _attempts(job: api.Json) -> tuple[int, int]:
    status = job.get("status", {})
    return int(status.get("failed", 0)) + 1, int(job["spec"].get("backoffLimit", 0)) + 1


def _details(job: api.Json, status: api.Json) -> dict[str, str]:
    attempt, attempts = _attempts(job)
    facts = {
        "target": "kubernetes",
        "namespace": job["metadata"].get("namespace", ""),
        "rayjob": status.get("jobDeploymentStatus", ""),
        "job": status.get("jobStatus", ""),
        "ray cluster": status.get("rayClusterName", ""),
        "started": status.get("startTime", ""),
        "ended": status.get("endTime", ""),
        "attempt": f"{min(attempt, attempts)} of {attempts}" if attempts > 1 else "",
    }
    return {key: value for key, value in facts.items() if value}


_TOKEN_KEY = "auth_token"
_TOKEN_HEADER = "x-ray-authorization"
"""The API server keeps ``Authorization`` to itself; Ray also reads this one."""


@dataclass(slots=True)
class DriverLog(LogText):
    _attempt: str = ""
    """Id of the Ray job; each attempt has another."""

    def read(self, server: api.Server, job: api.Json) -> str:
        """Read the whole log; returns why that failed, or "". Raises AwayError: the server is away."""
        status = job.get("status", {})
        attempt, address = status.get("jobId", ""), status.get("dashboardURL", "")
        if not attempt or not address:
            return "its Ray cluster does not run"
        if attempt != self._attempt:
            self.text, self._num_shown, self._attempt = "", 0, attempt
        try:
            headers = _headers(server, job)
        except api.AnswerError as error:
            return f"the token of its Ray cluster cannot be read: {error.message}"
        except LookupError as error:
            return f"the token of its Ray cluster cannot be read: {error}"
        host, _, port = address.removeprefix("http://").rpartition(":")
        service = f"{host.partition('.')[0]}:{port}"
        try:
            code, text = server.service(service, f"api/jobs/{attempt}/logs", headers)
        except AwayError:
            return "its Jobs API does not answer"
        if code != 200:
            return f"its Jobs API answers {code}: {_message(text)}"
        try:
            self.text = str(json.loads(text)["logs"])
        except (ValueError, KeyError, TypeError):
            return "its Jobs API answers something else than a log"
        return ""

    def segments(self) -> str:
        """Progress by the log: ``5 of 27``; "" if unknown."""
        total, done = 0, 0
        for event in self.events():
            kind = event.get("event")
            if kind == "planned":
                total, done = int(event.get("segments", 0)), 0
            elif kind == "started":
                done = int(event.get("done_segments", 0))
            elif kind == "segment_done":
                done += 1
        return f"{done} of {total}" if total else ""


def _headers(server: api.Server, job: api.Json) -> dict[str, str]:
    """Raises LookupError: there is no token."""
    options = job["spec"].get("rayClusterSpec", {}).get("authOptions", {})
    if options.get("mode") != "token":
        return {}
    name = options.get("secretName") or job["status"].get("rayClusterName", "")
    secret = server.read(api.SECRETS, name)
    if secret is None or _TOKEN_KEY not in secret.get("data", {}):
        raise LookupError(f"the secret {name} has no {_TOKEN_KEY}")
    token = base64.b64decode(secret["data"][_TOKEN_KEY]).decode().strip()
    return {_TOKEN_HEADER: f"Bearer {token}"}


def _message(text: str) -> str:
    """The message of a Status, or the start of any other answer."""
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text
    return _short(str(message))


_REMEDIES = {
    "ErrImagePull": "See that the image exists and that image_pull_secrets let the nodes pull it.",
    "ImagePullBackOff": "See that the image exists and that image_pull_secrets let the nodes pull it.",
    "InvalidImageName": "Correct the image of the profile.",
    "CreateContainerConfigError": "See that every secret and config map that the profile names exists.",
    "CrashLoopBackOff": "See `kubectl logs` of the pod; the image needs bash, python, ray and raymerge.",
    "OOMKilled": "Give the group more memory, or lower run.memory or run.workers.",
    "Unschedulable": "Ask for less, or let the cluster have more nodes; it is tried again by itself.",
}
_HARMLESS = frozenset({"ContainerCreating", "PodInitializing"})


def pod_troubles(pods: Iterable[api.Json]) -> Iterator[str]:
    """A sentence for each pod that cannot be scheduled, pull its image, or stay alive."""
    for pod in pods:
        name = pod["metadata"]["name"]
        for reason, message in _reasons(pod.get("status", {})):
            trouble = f"{reason}: {_short(message)}" if message else reason
            yield f"pod {name}: {trouble.rstrip('.')}. {_REMEDIES.get(reason, '')}".rstrip()


def warnings(events: Iterable[api.Json]) -> Iterable[str]:
    in_order = sorted(events, key=lambda each: str(each.get("lastTimestamp") or ""))
    return dict.fromkeys(
        f"{event.get('reason', '')}: {_short(event.get('message', ''))}"
        for event in in_order
        if event.get("type") == "Warning"
    )


def _reasons(status: api.Json) -> Iterator[tuple[str, str]]:
    for condition in status.get("conditions", ()):
        if (condition.get("type"), condition.get("status")) == ("PodScheduled", "False"):
            yield condition.get("reason", "Unschedulable"), condition.get("message", "")
    if status.get("phase") == "Failed" and status.get("reason"):
        yield status["reason"], status.get("message", "")
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting and waiting.get("reason", "") not in _HARMLESS:
            yield waiting.get("reason", "Waiting"), waiting.get("message", "")
        for moment in ("state", "lastState"):
            ended = container.get(moment, {}).get("terminated", {})
            if ended.get("reason") == "OOMKilled":
                yield "OOMKilled", ended.get("message", "it used more memory than its limit")


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 300 else f"{one[:299]}…"
