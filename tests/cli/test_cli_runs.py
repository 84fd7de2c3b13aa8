"""``raymerge status``, ``logs`` and ``stop`` by an output place alone, with no server to ask."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.command_line import Outcome, run_command
from kits.driver_process import PATIENCE_SECONDS, driver, wait_for_receipts
from kits.merge_cases import Family, digests, make_family, merge, recipes

from raymerge.deploy.targets.local import PlaceRuns
from raymerge.deploy.targets.sending import RunNote, RunNotes
from raymerge.publish.lease import myself
from raymerge.publish.stop_request import StopRequest


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("medium"), hidden=256, files=2)


@pytest.fixture(scope="module")
def recipe(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yml"
    path.write_text(json.dumps(recipes(medium)["linear"]))
    return path


def _say(tmp_path: Path, *args: str) -> Outcome:
    return run_command(*args, cwd=tmp_path, env={"XDG_STATE_HOME": str(tmp_path / "state")})


@pytest.mark.slow
def test_a_run_is_watched_and_stopped_by_its_place(recipe: Path, tmp_path: Path) -> None:
    merge(str(recipe), tmp_path / "expected")
    output = tmp_path / "out"
    with driver(str(recipe), output, pause=0.8) as process:
        wait_for_receipts(output, 2)
        told = _say(tmp_path, "status", "out")
        assert told.code == 0
        assert "out: running" in told.text
        assert f"process {process.pid} of" in told.text
        stopped = _say(tmp_path, "stop", "out")
        assert (stopped.code, "out: stopped" in stopped.text) == (0, True), stopped.text
        events = [json.loads(line) for line in process.communicate(timeout=PATIENCE_SECONDS)[0].splitlines()]
    assert process.returncode == 3
    assert [each["event"] for each in events if each["event"] in ("stopping", "error")] == [
        "stopping",
        "error",
    ]
    assert not list(tmp_path.glob(".out.raymerge-stop*"))
    report = json.loads(_say(tmp_path, "status", "out", "--json").text)
    assert report["state"] == "stopped"
    made, total = map(int, report["details"]["segments"].split(" of "))
    assert 2 <= made < total
    assert _say(tmp_path, "stop", "out").code == 0

    # A request to a process that has ended is none to those that come after it.
    StopRequest.beside(output).make(replace(myself(""), pid=1))
    merged = merge(str(recipe), output)
    assert merged.result.output == output
    assert digests(output) == digests(tmp_path / "expected")
    report = json.loads(_say(tmp_path, "status", "out", "--json").text)
    assert (report["state"], report["details"]["exit_code"]) == ("succeeded", "0")
    # What was told, once more: of both runs, with the first one's end.
    shown = _say(tmp_path, "logs", "out").text
    assert "stopping: the segments in hand have 1 s to finish" in shown
    assert f"going on: {made} of {total} segments are done already" in shown
    assert "verified: " in shown
    lines = [json.loads(line) for line in _say(tmp_path, "logs", "out", "--json").text.splitlines()]
    assert [each["exit_code"] for each in lines if each["event"] == "ended"] == [3]
    assert lines[-1]["event"] == "published"
    assert all(each["time"] for each in lines)
    assert _say(tmp_path, "logs", "-f", "out").code == 0


@pytest.mark.slow
def test_a_run_that_died_says_so(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with driver(str(recipe), output, pause=0.4) as process:
        wait_for_receipts(output, 1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    report = json.loads(_say(tmp_path, "status", "out", "--json").text)
    assert report["state"] == "failed"
    assert "died" in report["message"]
    assert "Submit it again" in report["message"]
    followed = _say(tmp_path, "logs", "-f", "out")
    assert (followed.code, "died" in followed.text) == (3, True), followed.text


def test_where_no_server_answers_the_place_tells(recipe: Path, tmp_path: Path) -> None:
    output, run = tmp_path / "out", "raymerge-0123456789ab"
    notes = RunNotes(tmp_path / "state" / "raymerge" / "runs")
    notes.keep(RunNote(run, "job", "http://127.0.0.1:9", str(output), "{}", "now"))
    for asked in (run, "out"):
        nobody = _say(tmp_path, "status", asked)
        assert (nobody.code, "no Jobs API of Ray answers" in nobody.text) == (2, True), nobody.text
    merge(str(recipe), output)
    by_name, by_place = (json.loads(_say(tmp_path, "status", asked, "--json").text) for asked in (run, "out"))
    assert (by_name["run"], by_name["state"], by_place["state"]) == (run, "succeeded", "succeeded")
    assert "Its server does not answer" in by_name["message"]
    assert "published" in _say(tmp_path, "logs", "out", "--json").text


def test_a_place_without_a_run_is_told(tmp_path: Path) -> None:
    for verb in (("status",), ("logs",), ("logs", "-f"), ("stop",)):
        outcome = _say(tmp_path, *verb, "out")
        assert (outcome.code, "there is nothing of raymerge at out" in outcome.text) == (2, True)
        outcome = _say(tmp_path, *verb, " ")
        assert (outcome.code, "RUN: no run is named" in outcome.text) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_followed_at_once(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out whether its holder on another machine lives takes seconds, and a server may be away."""
    merge(str(recipe), tmp_path / "out")
    asked: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        answer = getattr(PlaceRuns, name)

        def ask(*arguments: Any, **more: Any) -> Any:
            asked.append(name)
            return answer(*arguments, **more)

        return ask

    for name in ("report", "logs"):
        monkeypatch.setattr(PlaceRuns, name, noted(name))
    assert _say(tmp_path, "logs", "-f", "out").code == 0
    assert asked == ["logs", "report"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--detach",), "a run of the target local is this very process"),
        (("--target", "cluster"), "the target cluster needs the address of a head node"),
        (("--target", "kubernetes"), "needs a profile with a section 'kubernetes'"),
        (("--target", "cluster", "--address", "http://10.0.0.1:8265"), "is the address of a dashboard"),
        (("--address", "http://127.0.0.1:9"), "no output place is named"),
        (("--address", "http://127.0.0.1:9", "-o", "out"), "the output place 'out' is relative"),
        (("--address", "http://127.0.0.1:9", "-o", "/out", "--inline"), "is not in this process"),
    ],
)
def test_targets_that_cannot_be_are_refused(
    args: tuple[str, ...], said: str, recipe: Path, tmp_path: Path
) -> None:
    outcome = _say(tmp_path, "submit", str(recipe), *args)
    assert (outcome.code, said in outcome.text) == (2, True), outcome.text
    assert list(tmp_path.iterdir()) == []


def test_paths_of_this_machine_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    models = ("./model", "org/name", "file:///mnt/tune")
    (tmp_path / "recipe.yml").write_text(
        json.dumps({"merge_method": "linear", "models": [{"model": each} for each in models]})
    )
    outcome = _say(tmp_path, "submit", "recipe.yml", "-o", "/out", "--address", "http://127.0.0.1:9")
    assert outcome.code == 2
    assert "'./model' is a path of this machine" in outcome.text
    assert "org/name" not in outcome.text
    assert "/mnt/tune" not in outcome.text


def test_a_profile_gives_what_no_flag_gives(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "profile.yml").write_text(f"output: {tmp_path / 'there'}\nrun: {{workers: 0}}\n")
    refused = _say(tmp_path, "submit", str(recipe), "--profile", "profile.yml", "--inline")
    assert (refused.code, "profile.yml:2" in refused.text) == (2, True), refused.text
    (tmp_path / "profile.yml").write_text(
        f"output: {tmp_path / 'there'}\nrun: {{threads: 1, device: cuda}}\n"
    )
    outcome = _say(
        tmp_path, "submit", str(recipe), "--profile", "profile.yml", "--inline", "--device", "cpu", "--json"
    )
    assert outcome.code == 0, outcome.text
    started = next(each for each in map(json.loads, outcome.text.splitlines()) if each["event"] == "started")
    assert (started["device"], started["threads"]) == ("cpu", 1)
    assert (tmp_path / "there" / "config.json").is_file()
