"""``raymerge submit``, in this process: where it writes, what it prints, how it refuses, how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kits.command_line import Outcome, run_command
from kits.merges import MEAN, make_models, write_recipe

import raymerge.api
from raymerge.errors import IncompleteError
from raymerge.events import Event, Published, Stopping
from raymerge.options import RunOptions
from raymerge.runtime.driver.run import InlinePool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models and the recipe of their mean."""
    make_models(tmp_path)
    write_recipe(tmp_path, MEAN)
    return tmp_path


def _submit(folder: Path, *args: str) -> Outcome:
    return run_command("submit", "recipe.yml", "--inline", *args, cwd=folder)


def _events(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcome.text.splitlines()]


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "model.safetensors").is_file()


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
    assert outcome.code == 2
    assert "out and other" in outcome.text
    assert not (folder / "out").exists()


def test_json_is_events_and_nothing_else(folder: Path) -> None:
    outcome = _submit(folder, "-o", "out", "--json")
    names = [event["event"] for event in _events(outcome)]
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
    wanted = RunOptions(3, 2 << 30, "cuda", "auto", inline=False, replace=True, threads=2)
    assert seen == [("recipe.yml", "out", wanted)]


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--workers", "0"), "--workers"), (("--workers", "2"), "--inline"), (("--memory", "much"), "--memory")],
)
def test_options_that_cannot_be_honoured_are_refused(args: tuple[str, ...], said: str, folder: Path) -> None:
    outcome = _submit(folder, *args)
    assert outcome.code == 2
    assert said in outcome.text
    assert not (folder / "recipe-merged").exists()


def test_a_taken_place_is_refused_and_replaced_on_demand(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("mine")
    refused = _submit(folder, "-o", "out")
    assert refused.code == 2
    assert "--replace" in refused.text
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
    monkeypatch.setattr("raymerge.deploy.targets.choose.end_for_good", stopped.append)
    outcome = _submit(folder, "-o", "out", "--json", "--run", "raymerge-0123456789ab")
    assert (outcome.code, len(stopped)) == (3, int(is_asked))
    assert "stopped with 1 of 2" in outcome.text


@pytest.mark.parametrize(("published", "code"), [("out", 0), (".out.raymerge.steps/a", 3)])
def test_who_is_slow_to_clear_up_after_a_signal_is_ended_with_what_came_of_the_run(
    published: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    is_ended = threading.Event()

    def end(number: int) -> None:
        codes.append(number)
        is_ended.set()

    def slow(*_: object, on_event: Callable[[Event], None]) -> None:
        on_event(Stopping(1.0))
        on_event(Published(os.path.realpath(folder / published), 1.0))
        assert is_ended.wait(10)

    monkeypatch.setattr("raymerge.api.submit", slow)
    monkeypatch.setattr("raymerge.cli.running._LAST_SECONDS", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr("os._exit", end)
        # As JSON: to show the end of a merge it would have to have begun.
        _submit(folder, "-o", "out", "--json")
    assert codes == [code]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stop_that_was_asked_for_is_final_also_for_who_is_slow_to_clear_up(
    is_asked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    is_ended = threading.Event()

    def end(number: int) -> None:
        told.append(number)
        is_ended.set()

    def slow(*_: object, on_event: Callable[[Event], None]) -> None:
        on_event(Stopping(1.0, is_asked=is_asked))
        assert is_ended.wait(10)

    monkeypatch.setattr("raymerge.api.submit", slow)
    monkeypatch.setattr("raymerge.cli.running._LAST_SECONDS", 0.05)
    monkeypatch.setattr(
        "raymerge.deploy.targets.choose.end_for_good", lambda _: told.append("stopped for good")
    )
    with monkeypatch.context() as patched:
        patched.setattr("os._exit", end)
        _submit(folder, "-o", "out", "--json", "--run", "raymerge-0123456789ab")
    assert told == ["stopped for good"] * is_asked + [3]
