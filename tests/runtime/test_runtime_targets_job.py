"""The target job against a real head node: submitted, left alone, asked, stopped, submitted again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.command_line import WIDE, Outcome, run_command
from kits.driver_process import wait_for_receipts
from kits.merge_cases import Family, digests, merge, recipes
from kits.ray_head import RayHead, ray_head

pytestmark = [pytest.mark.ray, pytest.mark.service]

SECRET = "c2VjcmV0LW9mLXRoZS1zdG9yZQ"
RUN = re.compile(r"raymerge-[0-9a-f]{12}")
_GATE = """
import importlib.abc, importlib.util, os, sys, time


class Gate(importlib.abc.MetaPathFinder):
    \"\"\"Every worker makes two segments, and the others once the gate is open.\"\"\"

    def find_spec(self, name, path, target=None):
        if name != "raymerge.runtime.workers.worker" or "GATE" not in os.environ:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), hold(module.MergeWorker))
        return spec


def hold(worker):
    run, made = worker.run, []

    def held(self, *args):
        made.append(args)
        while len(made) > 2 and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.05)
        return run(self, *args)

    worker.run = held


sys.meta_path.insert(0, Gate())
"""


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head() as found:
        yield found


@pytest.fixture(scope="module")
def recipe(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yml"
    path.write_text(json.dumps(recipes(medium)["linear"]))
    return path


@pytest.fixture(scope="module")
def expected(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(str(recipe), output)
    return digests(output)


Say = Callable[..., Outcome]


@pytest.fixture
def environment(head: RayHead, tmp_path: Path) -> dict[str, str]:
    """What a user's shell has."""
    mine = {"XDG_STATE_HOME": str(tmp_path / "state"), "AWS_SECRET_ACCESS_KEY": SECRET}
    return {**head.environment, **mine}


@pytest.fixture
def say(environment: dict[str, str], tmp_path: Path) -> Say:
    """Gives a command, from another directory than the one before."""

    def give(*args: str, **more: str) -> Outcome:
        return run_command(*args, cwd=tmp_path, env={**environment, **more})

    return give


@pytest.fixture
def profile(head: RayHead, tmp_path: Path) -> Path:
    """The user's profile; the gate is closed until somebody opens it."""
    along = tmp_path / "along"
    along.mkdir()
    (along / "sitecustomize.py").write_text(_GATE)
    path = tmp_path / "profile.yml"
    job = {"address": head.jobs, "working_dir": str(along), "env": {"GATE": str(tmp_path / "gate")}}
    path.write_text(json.dumps({"target": "job", "job": job, "run": {"workers": 1, "memory": "64MiB"}}))
    return path


def test_a_run_outlives_its_terminal_is_stopped_and_goes_on(
    head: RayHead,
    recipe: Path,
    profile: Path,
    expected: dict[str, str],
    environment: dict[str, str],
    say: Say,
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "raymerge.cli", "submit", str(recipe), "-o", str(output)]
    with subprocess.Popen(
        [*command, "--profile", str(profile)],
        env={**os.environ, **WIDE, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as terminal:
        wait_for_receipts(output, 2)
        terminal.kill()
        said = terminal.communicate()[0]
    run = RUN.findall(said)[0]
    assert f"submitted as {run}" in said

    # The name alone says where it is; so does the place, here and elsewhere.
    for asked in ((run,), (str(output),), (str(output), "--profile", str(profile))):
        told = say("status", *asked)
        assert (told.code, f"{run}: running" in told.text) == (0, True), told.text
        assert re.search(r"segments +2 of \d\d", told.text), told.text
    shown = say("logs", run)
    assert shown.code == 0
    assert "planned: " in shown.text
    lines = [json.loads(line) for line in say("logs", run, "--json").text.splitlines() if line[0] == "{"]
    assert {"planned", "started", "segment_done"} <= {line["event"] for line in lines}

    # Submitted again while it runs it is shown, not doubled.
    again = say("submit", str(recipe), "-o", str(output), "--profile", str(profile), "--detach", "--json")
    (sent,) = [json.loads(line) for line in again.text.splitlines()]
    assert (again.code, sent["run"], sent["is_new"]) == (0, run, False)
    _another_recipe_is_refused(recipe, output, profile, say, run)

    stopped = say("stop", run)
    assert (stopped.code, f"{run}: stopped" in stopped.text) == (0, True), stopped.text
    assert not output.exists()
    assert say("stop", run).code == 0
    # Where no server is asked, the records of the place tell.
    place = say("status", str(output), "--target", "local", "--json")
    report = json.loads(place.text)
    assert (report["state"], report["details"]["segments"].split()[0]) == ("stopped", "2"), report

    (tmp_path / "gate").touch()
    done = say("submit", str(recipe), "-o", str(output), "--profile", str(profile))
    assert done.code == 0, done.text
    assert re.search(r"going on: 2 of \d\d segments are done already", done.text)
    assert f"done: {output}" in done.text
    assert digests(output) == expected
    (second,) = set(RUN.findall(done.text))
    assert second != run
    assert f"{second}: succeeded" in say("status", second).text
    assert f"{second}: succeeded" in say("status", str(output)).text
    _no_secret_is_told(head, output, environment)


def _another_recipe_is_refused(recipe: Path, output: Path, profile: Path, say: Say, run: str) -> None:
    other = recipe.with_name("other.yml")
    other.write_text(json.dumps({**json.loads(recipe.read_text()), "dtype": "bfloat16"}))
    refused = say("submit", str(other), "-o", str(output), "--profile", str(profile))
    assert refused.code == 2
    assert f"the run {run} makes it now, of another recipe" in refused.text


def _no_secret_is_told(head: RayHead, output: Path, environment: dict[str, str]) -> None:
    """Not in what the cluster tells of jobs, not in the record, not in the notes."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(head.jobs, headers={"Authorization": f"Bearer {head.token}"})
    jobs = client.list_jobs()
    texts = [str(each) for each in jobs] + [client.get_job_logs(str(each.submission_id)) for each in jobs]
    places = (output / "raymerge", Path(environment["XDG_STATE_HOME"]))
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "events.jsonl" for path in files)
    assert any(RUN.match(path.name) for path in files)
    texts += [path.read_bytes().decode(errors="replace") for path in files]
    for secret in (head.token, SECRET):
        assert not any(secret in text for text in texts)


def test_what_the_driver_refuses_is_the_commands_own_refusal(
    recipe: Path, profile: Path, say: Say, tmp_path: Path
) -> None:
    broken = json.loads(recipe.read_text())
    broken["models"][0]["model"] = str(tmp_path / "absent")
    path = tmp_path / "broken.yml"
    path.write_text(json.dumps(broken))
    outcome = say("submit", str(path), "-o", str(tmp_path / "out"), "--profile", str(profile))
    assert outcome.code == 2
    assert f"{tmp_path / 'absent'}: there is no such directory. Check the path." in " ".join(
        outcome.text.replace("→", "").split()
    )
    (run,) = set(RUN.findall(outcome.text))
    told = say("status", run, "--json")
    report: dict[str, Any] = json.loads(told.text)
    assert (report["state"], report["details"]["exit_code"]) == ("failed", "2")
    assert "there is no such directory" in report["message"]
    # The same from its log, later.
    late = say("logs", "-f", run)
    assert (late.code, "there is no such directory" in late.text) == (2, True)
