"""A driver has its own job of Ray stopped where another attempt would only meet the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from kits.command_line import run_command

from raymerge.deploy.targets import target as module
from raymerge.deploy.targets.target import Where, end_for_good, own_job
from raymerge.errors import OptionError, Problem

JOB = "raymerge-0123456789ab-x7"
DRIVER = {
    "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": JOB}}),
    "RAY_AUTH_TOKEN": "t" * 32,
}


class _Jobs:
    """Whom a stop is asked of."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.error: Exception | None = None

    def target_of(self, where: Where, environment: Mapping[str, str]) -> _Jobs:
        assert (where.target, where.address) == ("job", "auto")
        assert environment["RAY_AUTH_TOKEN"] == DRIVER["RAY_AUTH_TOKEN"]
        return self

    def stop(self, run: str) -> None:
        self.stopped.append(run)
        if self.error is not None:
            raise self.error


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> _Jobs:
    jobs = _Jobs()
    monkeypatch.setattr(module, "target_of", jobs.target_of)
    return jobs


@pytest.mark.parametrize(
    "said", ["", "{", "[]", "{}", json.dumps({"metadata": {}}), json.dumps({"metadata": 1})]
)
def test_whoever_is_no_driver_stops_nothing(said: str, jobs: _Jobs) -> None:
    environment = {**DRIVER, "RAY_JOB_CONFIG_JSON_ENV_VAR": said}
    assert own_job(environment) == own_job({}) == ""
    end_for_good(environment)
    end_for_good({})
    assert jobs.stopped == []


@pytest.mark.parametrize(
    "error", [None, OptionError(Problem("--address", "no answer.", "")), ValueError("no GCS")]
)
def test_a_driver_stops_its_job_and_goes_on_to_its_exit_code_where_that_fails(
    error: Exception | None, jobs: _Jobs
) -> None:
    jobs.error = error
    end_for_good(DRIVER)
    assert jobs.stopped == [JOB]


def test_who_does_not_answer_does_not_keep_a_driver_from_its_end(
    jobs: _Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.05)
    is_over = threading.Event()
    monkeypatch.setattr(jobs, "stop", lambda _: is_over.wait())
    end_for_good(DRIVER)
    is_over.set()


def test_only_an_attempt_at_a_named_run_stops_its_job(tmp_path: Path, jobs: _Jobs) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("merge_method: linear\nmodels: ./none\n")
    command = ("submit", "recipe.yml", "-o", "out", "--inline")
    assert run_command(*command, cwd=tmp_path, env=DRIVER).code == 2
    assert jobs.stopped == []
    named = (*command, "--run", "raymerge-0123456789ab")
    assert run_command(*named, cwd=tmp_path, env=DRIVER).code == 2
    assert jobs.stopped == [JOB]
    # It may be there when the volume is.
    recipe.write_text("merge_method: linear\nmodels: [{model: ./none}]\ndtype: float32\n")
    assert run_command(*named, cwd=tmp_path, env=DRIVER).code == 2
    assert jobs.stopped == [JOB]
