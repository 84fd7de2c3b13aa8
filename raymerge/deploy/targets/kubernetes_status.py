"""What a RayJob says of itself, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raymerge.deploy.manifests import OUTPUT_ANNOTATION
from raymerge.deploy.targets.target import RunReport, RunState

Json = dict[str, Any]

_MOST_LINES = 5
"""Of a driver's log that end a message."""
_RESUMABLE = 3
_EXIT_CODE = re.compile(r"failed with exit code (\d+)")
_RESUMED = "Submit it again; it goes on where it stopped."
_STOPPED = (
    "its job was stopped, by somebody, or by its driver because you must change something; its log told what."
)
"""Of a run whose RayJob is still there; a stop by raymerge deletes it."""

_ENDED_BY: Mapping[str, str] = {
    "AppFailed": "its driver failed",
    "DeadlineExceeded": "it ran longer than active_deadline_seconds of the profile",
    "PreRunningDeadlineExceeded": "its Ray cluster was not ready before preRunningDeadlineSeconds",
    "SubmissionFailed": "the operator could not hand the job to its Ray cluster",
    "JobStatusCheckTimeoutExceeded": "the head of its Ray cluster did not answer the operator for minutes",
    "JobDeploymentStatusTransitionGracePeriodExceeded": "its job ended, and the operator was not told so",
    "ValidationFailed": "the operator refuses the RayJob",
}
"""Why it is over, by the operator's own word."""
_BEFORE: Mapping[str, str] = {
    "": "KubeRay's operator has not taken it up yet",
    "Initializing": "the pods of its Ray cluster are being started",
    "Waiting": "its Ray cluster waits for somebody to name a job (InteractiveMode)",
    "Suspending": "it is being suspended: its pods are ending",
}
"""Before its driver runs, by the operator's state."""
_JOB_STATES: Mapping[str, RunState] = {
    "SUCCEEDED": RunState.SUCCEEDED,
    "FAILED": RunState.FAILED,
    "STOPPED": RunState.STOPPED,
}


def reported(job: Json) -> RunReport:
    """How far a run is, as its RayJob says.

    Args:
        job: the object, with its status.
    """
    status = job.get("status", {})
    deployment, driver = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    state = _state(job, deployment, driver)
    details = _details(job, status)
    if state is RunState.FAILED:
        details["exit_code"] = str(_exit_code(status))
    said = _said(job, state, status)
    name, notes = job["metadata"]["name"], job["metadata"].get("annotations", {})
    return RunReport(name, state, notes.get(OUTPUT_ANNOTATION, ""), said, details)


def given_up(report: RunReport, error: Mapping[str, Any]) -> RunReport:
    """A run whose job was stopped, with what its driver said: it does that itself where nobody can go on.

    Args:
        report: of the run.
        error: the event that tells of a failure; empty for none.
    """
    if error.get("exit_code") != 2:
        return report
    message = f"its driver failed, and is not begun again: {error.get('message', '')}"
    return replace(
        report, state=RunState.FAILED, message=message, details={**report.details, "exit_code": "2"}
    )


def _state(job: Json, deployment: str, driver: str) -> RunState:
    if "deletionTimestamp" in job["metadata"]:
        return _JOB_STATES.get(driver, RunState.STOPPED)
    if deployment == "Complete":
        return _JOB_STATES.get(driver, RunState.SUCCEEDED)
    if deployment in ("Failed", "ValidationFailed"):
        return RunState.FAILED
    if deployment == "Running":
        # The job itself is accepted some seconds before its driver runs.
        return RunState.QUEUED if driver in ("", "PENDING") else RunState.RUNNING
    if deployment in ("Suspended", "Retrying") or deployment in _BEFORE:
        return RunState.QUEUED
    return RunState.UNKNOWN


def _said(job: Json, state: RunState, status: Json) -> str:
    """One or two sentences for people."""
    if "deletionTimestamp" in job["metadata"]:
        return f"it was stopped; its pods are ending. {_RESUMED}"
    if state is RunState.SUCCEEDED:
        return "the checkpoint is published."
    if state is RunState.STOPPED:
        return f"{_STOPPED} {_RESUMED}"
    if state is RunState.FAILED:
        return _why_failed(status)
    attempt, attempts = _attempts(job)
    again = f" It is attempt {attempt} of {attempts}." if attempt > 1 else ""
    return f"{_on_its_way(job, status)}.{again}"


def _on_its_way(job: Json, status: Json) -> str:
    deployment, driver = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    if deployment == "Running":
        return "its driver is being started" if driver in ("", "PENDING") else "its driver runs"
    if deployment == "Suspended":
        return _suspended(job)
    if deployment == "Retrying":
        return "an attempt failed; the next begins, on a new Ray cluster, where it stopped"
    return _BEFORE.get(deployment, f"the operator is in a state that raymerge does not know, {deployment}")


def _suspended(job: Json) -> str:
    queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    if queue is None:
        return "it is suspended, and goes on when spec.suspend is false"
    return f"it waits in the queue {queue} for its quota (Kueue)"


def _why_failed(status: Json) -> str:
    reason = status.get("reason") or "ValidationFailed"
    why = _ENDED_BY.get(reason, f"the operator gave it up, {reason}")
    tail = last_words(status.get("message", ""))
    remedy = "" if _exit_code(status) == 2 else f" {_RESUMED}"
    return f"{why}{': ' if tail else '.'}{tail}{remedy}"


def last_words(message: str) -> str:
    """What the end of a driver's log says: its error if it told one, or its last lines.

    Args:
        message: the status's, which has the last lines of the log in it.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{") and (told := _error_of(line)):
            return told
    return "\n".join(lines[-_MOST_LINES:])


def _error_of(line: str) -> str:
    """The message of an error event; "" for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(event, dict) or event.get("event") != "error":
        return ""
    return str(event.get("message", ""))


def _exit_code(status: Json) -> int:
    """That of the driver, as far as it is one of raymerge's; 3 where the run can go on."""
    if status.get("jobDeploymentStatus") == "ValidationFailed":
        return 2
    found = _EXIT_CODE.search(status.get("message", ""))
    code = int(found[1]) if found else _RESUMABLE
    return code if code in (1, 2) else _RESUMABLE


def _attempts(job: Json) -> tuple[int, int]:
    """Which attempt it is, and how many there may be."""
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
