"""RayJobs, pods and events in words, and what a RayJob rests on: nothing here asks a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kits.kubernetes_profiles import kubernetes_profile

from raymerge.deploy.targets.kubernetes import (
    DriverLog,
    given_up,
    last_words,
    needs,
    pod_troubles,
    reported,
    warnings,
)
from raymerge.deploy.targets.kubernetes_api import (
    CLAIMS,
    CONFIG_MAPS,
    PRIORITIES,
    QUEUES,
    RUNTIME_CLASSES,
    SECRETS,
    SERVICE_ACCOUNTS,
)
from raymerge.deploy.targets.target import RunState

SAID = "recipe.yml:3:5: no method is called 'tyes'."
ERROR = json.dumps({"event": "error", "exit_code": 2, "message": SAID})


def _job(*, deployment: str = "", driver: str = "", backoff: int = 2, **status: Any) -> dict[str, Any]:
    told = {"jobDeploymentStatus": deployment, "jobStatus": driver, **status}
    return {
        "metadata": {
            "name": "raymerge-0123456789ab",
            "namespace": "merges",
            "annotations": {"raymerge.io/output": "s3://bucket/merged"},
        },
        "spec": {"backoffLimit": backoff},
        "status": {key: value for key, value in told.items() if value != ""},
    }


@pytest.mark.parametrize(
    ("deployment", "driver", "state", "said"),
    [
        ("", "", RunState.QUEUED, "operator has not taken it up"),
        ("Initializing", "", RunState.QUEUED, "pods of its Ray cluster are being started"),
        ("Waiting", "", RunState.QUEUED, "InteractiveMode"),
        ("Suspending", "RUNNING", RunState.QUEUED, "being suspended"),
        ("Suspended", "", RunState.QUEUED, "spec.suspend"),
        ("Retrying", "FAILED", RunState.QUEUED, "an attempt failed"),
        ("Running", "", RunState.QUEUED, "being started"),
        ("Running", "PENDING", RunState.QUEUED, "being started"),
        ("Running", "RUNNING", RunState.RUNNING, "its driver runs"),
        ("Complete", "SUCCEEDED", RunState.SUCCEEDED, "published"),
        ("Complete", "STOPPED", RunState.STOPPED, "goes on where it stopped"),
        ("Failed", "FAILED", RunState.FAILED, "goes on where it stopped"),
        ("ValidationFailed", "", RunState.FAILED, "operator refuses the RayJob"),
        ("Dreaming", "", RunState.UNKNOWN, "Dreaming"),
    ],
)
def test_every_state_of_a_rayjob_has_its_words(
    deployment: str, driver: str, state: RunState, said: str
) -> None:
    report = reported(_job(deployment=deployment, driver=driver))
    assert (report.state, report.output) == (state, "s3://bucket/merged")
    assert said in report.message
    assert report.details["namespace"] == "merges"


@pytest.mark.parametrize(
    ("reason", "message", "code", "said"),
    [
        ("AppFailed", f"Job entrypoint command failed with exit code 2, last:\n{ERROR}\n", "2", "'tyes'"),
        ("AppFailed", "Job entrypoint command failed with exit code 1, last:\nbug\n", "1", "bug"),
        ("AppFailed", "Job entrypoint command failed with exit code 137, last:\n", "3", "driver failed"),
        ("AppFailed", "", "3", "its driver failed. Submit it again"),
        ("DeadlineExceeded", "", "3", "active_deadline_seconds"),
        ("JobStatusCheckTimeoutExceeded", "", "3", "did not answer the operator"),
        ("NewReason", "of tomorrow", "3", "gave it up, NewReason: of tomorrow"),
    ],
)
def test_a_failure_is_told_with_its_reason_and_the_exit_code_of_a_local_run(
    reason: str, message: str, code: str, said: str
) -> None:
    report = reported(_job(deployment="Failed", driver="FAILED", reason=reason, message=message))
    assert (report.state, report.details["exit_code"]) == (RunState.FAILED, code)
    assert said in report.message
    assert ("Submit it again" in report.message) == (code != "2")


def test_a_driver_that_had_its_job_stopped_has_failed() -> None:
    stopped = reported(_job(deployment="Complete", driver="STOPPED"))
    failed = given_up(stopped, json.loads(ERROR))
    assert (failed.state, failed.details["exit_code"]) == (RunState.FAILED, "2")
    assert failed.message == f"its driver failed, and is not begun again: {SAID}"
    # Others stop it in the midst of things.
    for error in ({}, {"event": "error", "exit_code": 3, "message": "stopped with 1 of 2 segments done."}):
        assert given_up(stopped, error) == stopped


def test_attempts_are_counted() -> None:
    report = reported(_job(deployment="Running", driver="RUNNING", failed=1))
    assert "attempt 2 of 3" in report.message
    assert reported(_job(deployment="Failed", driver="FAILED", failed=3)).details["attempt"] == "3 of 3"
    assert "attempt" not in reported(_job(deployment="Running", backoff=0)).details


def test_a_rayjob_that_is_being_deleted_is_stopped_whatever_it_says() -> None:
    job = _job(deployment="Running", driver="RUNNING")
    job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert reported(job).state is RunState.STOPPED
    # One that was over before is what it was.
    job["status"] |= {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
    assert reported(job).state is RunState.SUCCEEDED


def test_last_words_are_the_error_or_the_last_lines() -> None:
    noise = "\n".join(f"line {number}" for number in range(40))
    assert last_words(f"{noise}\n{ERROR}\n{{broken\n") == SAID
    assert last_words(noise).splitlines() == [f"line {number}" for number in range(35, 40)]
    assert last_words('{"event": "published"}\n[1]\n') == '{"event": "published"}\n[1]'
    assert last_words("") == ""


def _pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "head-0"}, "status": status}


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        (
            _pod(initContainerStatuses=[{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]),
            "pod head-0: CrashLoopBackOff. See `kubectl logs`",
        ),
        (
            _pod(containerStatuses=[{"state": {}, "lastState": {"terminated": {"reason": "OOMKilled"}}}]),
            "OOMKilled: it used more memory than its limit. Give the group more memory",
        ),
        (
            _pod(phase="Failed", reason="Evicted", message="the node was low on disk"),
            "Evicted: the node was low",
        ),
    ],
)
def test_what_keeps_a_pod_from_running_is_told(pod: dict[str, Any], said: str) -> None:
    (told,) = pod_troubles([pod])
    assert said in told


def test_pods_that_are_on_their_way_are_no_trouble() -> None:
    starting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    assert list(pod_troubles([_pod(), _pod(phase="Running", containerStatuses=[starting])])) == []


def test_warnings_are_told_once_and_shortly() -> None:
    event = {"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota " * 60}
    told = list(warnings([event, {**event}, {"type": "Normal", "reason": "Created"}]))
    assert len(told) == 1
    assert len(told[0]) < 330


def test_everything_that_a_run_names_is_needed_once() -> None:
    models = {"name": "a", "mount_path": "/a", "pvc": "models"}
    settings = {"name": "b", "mount_path": "/b", "config_map": "settings"}
    keys = {"name": "c", "mount_path": "/c", "secret": "keys"}
    cache = {"name": "d", "mount_path": "/d", "empty_dir": {}}
    data = {"name": "e", "mount_path": "/e", "pvc": "data"}
    change = {
        "service_account": "merger",
        "priority_class": "low",
        "queue": "night",
        "token_secret": "token",
        "image_pull_secrets": ["registry"],
        "env_from_secrets": ["store"],
        "head": {"runtime_class": "kata"},
        "volumes": [models, settings, keys, cache],
    }
    kubernetes = kubernetes_profile(change, {"runtime_class": "nvidia", "volumes": [models, data]}).kubernetes
    assert kubernetes is not None
    assert needs(kubernetes) == [
        (CONFIG_MAPS, "settings"),
        (QUEUES, "night"),
        (CLAIMS, "data"),
        (CLAIMS, "models"),
        (PRIORITIES, "low"),
        (RUNTIME_CLASSES, "kata"),
        (RUNTIME_CLASSES, "nvidia"),
        *((SECRETS, name) for name in ("keys", "registry", "store", "token")),
        (SERVICE_ACCOUNTS, "merger"),
    ]


def test_a_log_tells_how_far_a_run_is() -> None:
    log = DriverLog()
    events: list[dict[str, Any]] = [
        {"event": "planned", "segments": 9},
        {"event": "started", "done_segments": 3},
    ]
    log.text = "\n".join(["noise", *map(json.dumps, [*events, {"event": "segment_done", "segment": 7}])])
    assert log.segments() == "4 of 9"
    log.text = "Runtime env is setting up.\n"
    assert log.segments() == ""
