"""The state of a RayJob, its pods, and its driver's log.

The log comes from the Jobs API of the run's Ray cluster through the proxy of the API server: in HTTPMode it
is a file of the head, and no pod prints it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from raymerge.deploy.manifests import OUTPUT_ANNOTATION, QUEUE_LABEL
from raymerge.deploy.targets.kubernetes_api import SECRETS, AnswerError, Server
from raymerge.deploy.targets.sending import AwayError
from raymerge.deploy.targets.target import LogText, RunReport, RunState

Json = dict[str, Any]

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


def reported(job: Json) -> RunReport:
    status, metadata = job.get("status", {}), job["metadata"]
    state, message = _state_and_message(job, status)
    details = _details(job, status)
    if state is RunState.FAILED:
        details["exit_code"] = str(_exit_code(status))
    output = metadata.get("annotations", {}).get(OUTPUT_ANNOTATION, "")
    return RunReport(metadata["name"], state, output, message, details)


def given_up(report: RunReport, error: Mapping[str, Any]) -> RunReport:
    """A stopped job as a failed run, if its driver stopped itself because it cannot go on.

    Args:
        error: the driver's event of a failure; empty for none.
    """
    if error.get("exit_code") != 2:
        return report
    message = f"its driver failed, and is not begun again: {error.get('message', '')}"
    return replace(
        report, state=RunState.FAILED, message=message, details={**report.details, "exit_code": "2"}
    )


def _state_and_message(job: Json, status: Json) -> tuple[RunState, str]:
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


def _on_its_way(job: Json, deployment: str, driver: str) -> tuple[RunState, str]:
    if deployment == "Running":
        # The job itself is accepted some seconds before its driver runs.
        if driver in ("", "PENDING"):
            return RunState.QUEUED, "its driver is being started"
        return RunState.RUNNING, "its driver runs"
    if deployment == "Suspended" and (queue := job["metadata"].get("labels", {}).get(QUEUE_LABEL)):
        return RunState.QUEUED, f"it waits in the queue {queue} for its quota (Kueue)"
    if deployment in _BEFORE:
        return RunState.QUEUED, _BEFORE[deployment]
    return RunState.UNKNOWN, f"the operator is in a state that raymerge does not know, {deployment}"


def _why_failed(status: Json) -> str:
    reason = status.get("reason") or "ValidationFailed"
    why = _ENDED_BY.get(reason, f"the operator gave it up, {reason}")
    tail = last_words(status.get("message", ""))
    remedy = "" if _exit_code(status) == 2 else f" {_RESUMED}"
    return f"{why}{': ' if tail else '.'}{tail}{remedy}"


def last_words(message: str) -> str:
    """The driver's error if it gave one, or the last lines of its log.

    Args:
        message: of the status, with the last lines of the log.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return str(LogText(message).error().get("message") or "\n".join(lines[-_MOST_LINES:]))


def _exit_code(status: Json) -> int:
    """The driver's exit code, if it is one of raymerge's; 3 if the run can go on."""
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return 2
    found = _EXIT_CODE.search(status.get("message", ""))
    code = int(found[1]) if found else _RESUMABLE
    return code if code in (1, 2) else _RESUMABLE


def _attempts(job: Json) -> tuple[int, int]:
    status = job.get("status", {})
    return int(status.get("failed", 0)) + 1, int(job["spec"].get("backoffLimit", 0)) + 1


def _details(job: Json, status: Json) -> dict[str, str]:
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


class DriverLog(LogText):
    """A driver's log, polled."""

    def __init__(self) -> None:
        super().__init__()
        self._attempt = ""
        """Id of the Ray job; each attempt has another."""

    def read(self, server: Server, job: Json) -> str:
        """Read the whole log; returns why that failed, or "".

        Raises:
            AwayError: the server does not answer.
        """
        status = job.get("status", {})
        attempt, address = status.get("jobId", ""), status.get("dashboardURL", "")
        if not attempt or not address:
            return "its Ray cluster does not run"
        if attempt != self._attempt:
            self.text, self._num_shown, self._attempt = "", 0, attempt
        try:
            headers = _headers(server, job)
        except AnswerError as error:
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


def _headers(server: Server, job: Json) -> dict[str, str]:
    """Raises:
    LookupError: there is no token.
    """
    options = job["spec"].get("rayClusterSpec", {}).get("authOptions", {})
    if options.get("mode") != "token":
        return {}
    name = options.get("secretName") or job["status"].get("rayClusterName", "")
    secret = server.read(SECRETS, name)
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
    return " ".join(str(message).split())[:300]


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
_LONGEST = 300


def pod_troubles(pods: Iterable[Json]) -> Iterator[str]:
    """A sentence for each pod that cannot be scheduled, pull its image, or stay alive."""
    for pod in pods:
        name = pod["metadata"]["name"]
        for reason, message in _reasons(pod.get("status", {})):
            trouble = f"{reason}: {_short(message)}" if message else reason
            yield f"pod {name}: {trouble.rstrip('.')}. {_REMEDIES.get(reason, '')}".rstrip()


def warnings(events: Iterable[Json]) -> Iterable[str]:
    in_order = sorted(events, key=lambda each: str(each.get("lastTimestamp") or ""))
    return dict.fromkeys(
        f"{event.get('reason', '')}: {_short(event.get('message', ''))}"
        for event in in_order
        if event.get("type") == "Warning"
    )


def _reasons(status: Json) -> Iterator[tuple[str, str]]:
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
    return one if len(one) <= _LONGEST else one[: _LONGEST - 1] + "…"
