"""submit: one merge, several, attempts, and runs that are listed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.chains import CHAIN
from kits.command_line import Outcome, run_command
from kits.driver_process import PATIENCE_SECONDS, driver, wait_for_receipts
from kits.golden import check_golden
from kits.merge_cases import Family, digests, make_family, merge, recipes
from kits.merges import MEAN, make_models, write_recipe

import raymerge.api
from raymerge.deploy.targets.local import PlaceRuns
from raymerge.deploy.targets.sending import RunNote, RunNotes
from raymerge.errors import IncompleteError
from raymerge.events import Event, OnEvent, Published, Started, Stopping
from raymerge.options import RunOptions
from raymerge.publish.lease import StopRequest, myself
from raymerge.runtime.workers.pool import InlinePool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_models(tmp_path)
    write_recipe(tmp_path, MEAN)
    return tmp_path


def _submit(folder: Path, *args: str) -> Outcome:
    return run_command("submit", "recipe.yml", "--inline", *args, cwd=folder)


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "model.safetensors").is_file()


def _next(outcome: Outcome) -> list[list[str]]:
    """The commands that the last event of a command with --json names."""
    *_, event = map(json.loads, outcome.text.splitlines())
    return [shlex.split(step["command"]) for step in event["next"]]


def test_what_a_command_names_next_works_as_it_stands(folder: Path) -> None:
    merged = _next(_submit(folder, "--json", "-o", "my out"))
    converted = _next(
        run_command("convert", "one", "--to", "bf16", "-o", "c", "--inline", "--json", cwd=folder)
    )
    assert [command[1] for command in merged] == ["report", "verify", "diff"]
    assert [command[1] for command in converted] == ["diff", "verify", "inspect"]
    for _, *args in (*merged, *converted):
        extra = ["--inline"] if "report" in args else []
        ended = run_command(*args, *extra, cwd=folder)
        # Two checkpoints that differ are no error of the command's.
        assert ended.code == (2 if "diff" in args and "my out" in args else 0), ended.text


@pytest.mark.parametrize(
    "error", [IncompleteError("stopped with 1 of 2 segments done."), KeyboardInterrupt()]
)
def test_a_stopped_run_names_the_command_that_goes_on(
    error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, on_event: OnEvent) -> None:
        on_event(Started(("inline",), "cpu", 0, 0))
        raise type(error)(*error.args)

    monkeypatch.setattr("raymerge.api.submit", stopped)
    command = ("submit", "recipe.yml", "--inline", "-o", "my out", "--memory", "1GiB")
    shown = run_command(*command, cwd=folder)
    assert shown.code == 3
    again, logs = shown.text.splitlines()[-2:]
    assert again.split("  # ")[0].strip() == "raymerge submit recipe.yml --inline -o 'my out' --memory 1GiB"
    assert logs.split("  # ")[0].strip() == "raymerge logs 'my out'"
    named = _next(run_command(*command, "--json", cwd=folder))
    assert named == [["raymerge", *command, "--json"], ["raymerge", "logs", "my out"]]
    # A scheduler's run is started again by the scheduler.
    assert "next:" not in run_command(*command, "--run", "run-1", cwd=folder).text


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("args", "place"), [((), "recipe-merged"), (("-o", "out"), "out"), (("out",), "out")]
)
def test_the_output_is_where_it_was_asked_for(args: tuple[str, ...], place: str, folder: Path) -> None:
    outcome = _submit(folder, *args)
    assert outcome.code == 0, outcome.text
    assert _is_checkpoint(folder / place)
    assert f"done: {place}" in outcome.text.replace("./", "")


def test_two_output_places_are_refused(folder: Path) -> None:
    outcome = _submit(folder, "out", "-o", "other")
    outcome.check_refusal("out and other")
    assert not (folder / "out").exists()


def test_json_is_events_and_nothing_else(folder: Path) -> None:
    outcome = _submit(folder, "-o", "out", "--json")
    names = [json.loads(line)["event"] for line in outcome.text.splitlines()]
    assert outcome.code == 0
    assert names[:2] == ["planned", "started"]
    assert "segment_done" in names
    assert names[-3:] == ["shard_done", "verified", "published"]


def test_what_libraries_print_does_not_reach_standard_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from raymerge.cli.main import main

    def noisy(*_: object, **__: object) -> None:
        print("(raylet) a notice")

    monkeypatch.setattr(raymerge.api, "submit", noisy)
    monkeypatch.setattr(sys, "argv", ["raymerge", "submit", str(folder / "recipe.yml"), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (0, "")
    assert "a notice" in shown.err


def test_options_reach_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, RunOptions]] = []

    def record(recipe: str, output: str, options: RunOptions, *, on_event: object) -> None:
        assert callable(on_event)
        seen.append((recipe, output, options))

    monkeypatch.setattr(raymerge.api, "submit", record)
    args = ("--workers", "3", "--memory", "2GiB", "--device", "cuda", "--address", "auto", "--replace")
    assert run_command("submit", "recipe.yml", "out", *args, "--threads", "2", cwd=folder).code == 0
    wanted = RunOptions(3, 2 << 30, "cuda", "auto", replace=True, threads=2)
    assert seen == [("recipe.yml", "out", wanted)]


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--workers", "0"), "--workers"), (("--workers", "2"), "--inline"), (("--memory", "much"), "--memory")],
)
def test_options_that_cannot_be_honoured_are_refused(args: tuple[str, ...], said: str, folder: Path) -> None:
    outcome = _submit(folder, *args)
    outcome.check_refusal(said)
    assert not (folder / "recipe-merged").exists()


def test_a_taken_place_is_refused_and_replaced_on_demand(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")
    refused = _submit(folder, "-o", "out")
    refused.check_refusal("--replace")
    assert _submit(folder, "-o", "out", "--replace").code == 2
    assert (folder / "out" / "mine.txt").exists()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / "one" / name, folder / "out" / name)
    assert _submit(folder, "-o", "out", "--replace").code == 2
    (folder / "out" / "mine.txt").rename(folder / "mine.txt")
    assert _submit(folder, "-o", "out", "--replace").code == 0
    assert _is_checkpoint(folder / "out")


def test_a_dry_run_shows_the_plan_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    outcome = _submit(folder, "-o", "out", "--dry-run")
    assert outcome.code == 0
    assert "Plan of recipe.yml" in outcome.text
    assert "nothing was written" in outcome.text
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_dry_run_checks_the_output_place(as_json: tuple[str, ...], folder: Path) -> None:
    (folder / "out").write_text("a file")
    outcome = _submit(folder, "-o", "out", "--dry-run", *as_json)
    assert outcome.code == 2
    assert "a file is in the place" in outcome.text


def test_a_schedulers_signal_ends_the_command_as_ctrl_c_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heeded")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("raymerge.api.submit", interrupted)
    outcome = _submit(folder, "-o", "out")
    assert outcome.code == 3
    assert "the same command goes on" in outcome.text
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_published_is_a_success_whatever_signal_comes_then(
    number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not heeded")

    monkeypatch.setattr(InlinePool, "close", interrupted)
    # A shell has commands in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = _submit(folder, "-o", "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == 0, outcome.text
    assert "done: out" in outcome.text
    assert "goes on" not in outcome.text


def test_a_signal_while_what_was_there_is_removed_leaves_a_success(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _submit(folder, "-o", "out").code == 0
    before = (folder / "out").stat().st_ino
    remove = shutil.rmtree

    def interrupted(path: Path, **options: Any) -> None:
        if path.name.endswith(".replaced"):
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("the signal was not heeded")
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    outcome = _submit(folder, "-o", "out", "--replace")
    assert outcome.code == 0, outcome.text
    assert "done: out" in outcome.text
    assert (folder / "out").stat().st_ino != before


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stop_that_somebody_asked_for_at_the_output_place_is_final(
    is_asked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[object] = []

    def ends(*_: object, on_event: Callable[[Event], None]) -> None:
        on_event(Stopping(1.0, is_asked=is_asked))
        raise IncompleteError("stopped with 1 of 2 segments done.")

    monkeypatch.setattr("raymerge.api.submit", ends)
    monkeypatch.setattr("raymerge.deploy.targets.target.end_for_good", stopped.append)
    outcome = _submit(folder, "-o", "out", "--json", "--run", "raymerge-0123456789ab")
    assert (outcome.code, len(stopped)) == (3, int(is_asked))
    assert "stopped with 1 of 2" in outcome.text


def _ended_late(folder: Path, monkeypatch: pytest.MonkeyPatch, *events: Event) -> list[object]:
    """How a run is ended that tells of these and then takes long to clear up."""
    ends: list[object] = []
    is_ended = threading.Event()

    def end(number: int) -> None:
        ends.append(number)
        is_ended.set()

    def slow(*_: object, on_event: Callable[[Event], None]) -> None:
        for event in events:
            on_event(event)
        assert is_ended.wait(10)

    monkeypatch.setattr("raymerge.api.submit", slow)
    monkeypatch.setattr("raymerge.cli.running._LAST_SECONDS", 0.05)
    monkeypatch.setattr("raymerge.deploy.targets.target.end_for_good", lambda _: ends.append("for good"))
    with monkeypatch.context() as patched:
        patched.setattr("os._exit", end)
        # As JSON: to show the end of a merge it would have to have begun.
        _submit(folder, "-o", "out", "--json", "--run", "raymerge-0123456789ab")
    return ends


@pytest.mark.parametrize(("published", "code"), [("out", 0), (".out.raymerge.steps/a", 3)])
def test_who_is_slow_to_clear_up_after_a_signal_is_ended_with_what_came_of_the_run(
    published: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Published(os.path.realpath(folder / published), 1.0)
    assert _ended_late(folder, monkeypatch, Stopping(1.0), done) == [code]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stop_that_was_asked_for_is_final_also_for_who_is_slow_to_clear_up(
    is_asked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = _ended_late(folder, monkeypatch, Stopping(1.0, is_asked=is_asked))
    assert ends == ["for good"] * is_asked + [3]


STEPS = ".recipe-merged.raymerge.steps"


@pytest.fixture
def chain_folder(tmp_path: Path) -> Path:
    write_recipe(make_models(tmp_path), CHAIN)
    return tmp_path


def _plan(folder: Path, *args: str, columns: str = "1000") -> Outcome:
    return run_command("plan", "recipe.yml", "--memory", "1GiB", *args, cwd=folder, env={"COLUMNS": columns})


def test_plans_come_in_the_order_of_the_merges(chain_folder: Path) -> None:
    outcome = _plan(chain_folder, columns="80")
    assert outcome.code == 0
    check_golden("plan-several", outcome.text)


def test_the_json_is_a_list_with_names(chain_folder: Path) -> None:
    found = json.loads(_plan(chain_folder, "--json").text)
    assert [(each["recipe"], each["name"], each["is_made"]) for each in found] == [
        ("recipe.yml", "left", False),
        ("recipe.yml", "right", False),
        ("recipe.yml", None, False),
    ]
    assert [each["method"] for each in found] == ["linear", "task_arithmetic", "slerp"]
    assert all("tensors" not in each for each in found)


@pytest.mark.slow
def test_what_is_made_on_the_way_may_lie_elsewhere(chain_folder: Path) -> None:
    done = _submit(chain_folder, "-o", "out", "--keep-intermediates", "--steps", "steps")
    assert done.code == 0, done.text
    names = ["one", "out", "recipe.yml", "steps", "two"]
    assert sorted(path.name for path in chain_folder.iterdir()) == names
    (root,) = [path for path in (chain_folder / "steps").iterdir() if not path.name.startswith(".")]
    outcome = _plan(chain_folder, "-o", "out", "--steps", "steps")
    assert outcome.text.count("made already") == 2
    assert f"what is made on the way lies in {root}" in outcome.text
    found = json.loads(_plan(chain_folder, "-o", "out", "--steps", "steps", "--json").text)
    assert [each.get("steps") for each in found] == [None, None, str(root)]
    assert not any(each["is_made"] for each in json.loads(_plan(chain_folder, "-o", "out", "--json").text))
    audit = ("verify", "out", "--level", "audit", "--inline")
    kept = run_command(*audit, "--steps", "steps", cwd=chain_folder)
    assert (kept.code, "not audited" in kept.text) == (0, False)
    assert "not audited: 30 tensors" in run_command(*audit, cwd=chain_folder).text


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [("plan",), ("submit", "--dry-run"), ("submit", "--inline")])
def test_towards_a_store_it_must_be_named(chain_folder: Path, how: tuple[str, ...]) -> None:
    outcome = run_command(how[0], "recipe.yml", "-o", "s3://b/out", *how[1:], cwd=chain_folder)
    outcome.check_refusal("s3://b/out: this recipe has results between", "Give --steps DIR")


@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_problems_of_all_merges_have_their_lines(verb: str, chain_folder: Path) -> None:
    wrong = CHAIN.replace("{weight: 0.25}", "{wieght: 0.25}").replace("base_model: one", "base_model: absent")
    write_recipe(chain_folder, wrong)
    outcome = run_command(verb, "recipe.yml", cwd=chain_folder)
    assert outcome.code == 2
    places = [line.split(" ")[0] for line in outcome.text.splitlines() if line.startswith("recipe.yml")]
    assert [place.split(":")[1] for place in places] == ["3", "7"]
    assert "The merges of this file are 'left', 'right'" in outcome.text
    assert [path.name for path in chain_folder.iterdir() if path.name.startswith(".")] == []


def test_too_little_memory_is_told_once_for_each_cause(chain_folder: Path) -> None:
    outcome = run_command("plan", "recipe.yml", "--memory", "1MiB", cwd=chain_folder)
    assert outcome.code == 2
    causes = [line for line in outcome.text.splitlines() if line.startswith("--memory: ")]
    assert causes == ["--memory: 1.05 MB a worker are too little for any merge."]


@pytest.mark.slow
def test_intermediates_are_kept_on_demand_and_used_again(chain_folder: Path) -> None:
    outcome = _submit(chain_folder, "--keep-intermediates")
    assert outcome.code == 0, outcome.text
    lines = outcome.text.splitlines()
    assert [line for line in lines if line.startswith("merge ")] == [
        "merge 1 of 3: left",
        "merge 2 of 3: right",
        "merge 3 of 3",
    ]
    assert [line.split(" in ")[0] for line in lines if line.startswith("made in ")] == ["made", "made"]
    assert [line for line in lines if line.startswith("done: ")] == ["done: recipe-merged"]
    assert sorted(path.name for path in (chain_folder / STEPS).iterdir()) == ["left", "right"]
    simulate = ("--simulate", "storage=1GB/s", "startup=30s")
    found = json.loads(_plan(chain_folder, "--json", *simulate).text)
    assert [(each["is_made"], "simulation" in each) for each in found] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert found[2]["simulation"]["startup_seconds"] == 30.0
    text = _plan(chain_folder, *simulate).text
    assert text.count("made already: 'submit' takes the result that is there") == 2
    assert text.count("Simulated on 1 worker") == 1
    assert "merges  1 to make, 2 made already " in text
    elsewhere = json.loads(_plan(chain_folder, "--json", "-o", "elsewhere").text)
    assert [each["is_made"] for each in elsewhere] == [False, False, False]
    outcome = _submit(chain_folder, "--replace")
    assert (
        "merge 1 of 3: left, made already\nmerge 2 of 3: right, made already\nmerge 3 of 3\n" in outcome.text
    )
    assert not (chain_folder / STEPS).exists()


def test_a_dry_run_shows_every_merge(chain_folder: Path) -> None:
    text = _submit(chain_folder, "--dry-run").text
    assert all(f"merge {number} of 3" in text for number in (1, 2, 3))
    told, _, command = text.rstrip().rpartition("\nnext:\n")
    assert told.endswith("dry run: nothing was written; recipe-merged can be made")
    assert command.split("  # ")[0].strip() == "raymerge submit recipe.yml --inline"
    event: dict[str, Any] = json.loads(_submit(chain_folder, "--dry-run", "--json").text)
    assert (event["event"], event["place"]) == ("dry_run", "recipe-merged")
    assert [merge["name"] for merge in event["merges"]] == ["left", "right", None]


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
    names = [each["event"] for each in events]
    assert [name for name in names if name in ("stopping", "error")] == ["stopping", "error"]
    assert not list(tmp_path.glob(".out.raymerge-stop*"))
    report = json.loads(_say(tmp_path, "status", "out", "--json").text)
    assert report["state"] == "stopped"
    made, total = map(int, report["details"]["segments"].split(" of "))
    assert 2 <= made < total
    assert _say(tmp_path, "stop", "out").code == 0

    # A request to a process that has ended is none to those that come after it.
    StopRequest(output).make(replace(myself(""), pid=1))
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


@pytest.mark.sample(3)
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
    outcome.check_refusal("'./model' is a path of this machine")
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


RUN = "raymerge-0123456789ab"


def test_what_a_run_has_published_is_not_made_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(make_family(tmp_path / "models"))["linear"]))

    def attempt(*flags: str) -> tuple[int, list[dict[str, Any]]]:
        command = ("submit", str(recipe), "-o", "out", "--inline", "--json", *flags)
        outcome = run_command(*command, cwd=tmp_path)
        return outcome.code, [json.loads(line) for line in outcome.text.splitlines()]

    code, events = attempt("--run", RUN)
    made = (tmp_path / "out").stat().st_ino
    assert (code, events[-1]["event"]) == (0, "published")
    for flags in ((), ("--replace",)):
        code, again = attempt("--run", RUN, *flags)
        assert (code, [each["event"] for each in again]) == (0, ["published"])
        assert again[0]["path"] == events[-1]["path"]
        assert (tmp_path / "out").stat().st_ino == made
    # Anybody else's checkpoint is in the way, or replaced.
    other = RUN.replace("0", "f")
    assert attempt("--run", other)[0] == attempt()[0] == 2
    code, events = attempt("--run", other, "--replace")
    assert (code, events[0]["event"]) == (0, "planned")
    assert (tmp_path / "out").stat().st_ino != made
