"""A small merge runs in this process where nothing asks for Ray, and is the same merge."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.parents import SIZES, make_sparse
from kits.command_line import run_command
from kits.driver_process import driver
from kits.merge_cases import Family, digests, merge, recipes

from raymerge.api import plan_for, submit
from raymerge.cli.plan import explain_all
from raymerge.errors import TargetError
from raymerge.events import Ended, RayLeftOut, Started
from raymerge.options import USUAL_PATIENCE, RunOptions
from raymerge.planner.merges import PlannedMerge
from raymerge.runtime.driver import in_process
from raymerge.runtime.driver.in_process import RAY_SECONDS, SMALL_SECONDS, run_options

pytestmark = pytest.mark.usefixtures("without_ray")

OUT = "/nowhere/out"


def _is_here(merges: Sequence[PlannedMerge], output: Path | str, options: RunOptions) -> bool:
    return bool(run_options([merges], output, options).inline)


@pytest.fixture(scope="module")
def recipe(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yml"
    path.write_text(json.dumps(recipes(medium)["linear"]))
    return str(path)


@pytest.fixture(scope="module")
def small(recipe: str) -> tuple[PlannedMerge, ...]:
    return plan_for(recipe, OUT)


def test_a_small_merge_is_for_this_process(small: tuple[PlannedMerge, ...]) -> None:
    assert _is_here(small, OUT, RunOptions())
    assert _is_here(small, OUT, RunOptions(threads=1, memory=1 << 30, device="cpu", replace=True))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 1},
        {"inline": False},
        {"address": "auto"},
        {"patience": 30.0},
        {"patience": USUAL_PATIENCE},
        {"device": "cuda"},
        {"run": "raymerge-0123456789ab"},
        # It says itself that this is too little.
        {"memory": 1},
    ],
)
def test_whoever_asks_for_workers_gets_them(options: dict[str, Any], small: tuple[PlannedMerge, ...]) -> None:
    assert not _is_here(small, OUT, RunOptions(**options))


def test_what_may_take_long_is_for_ray(small: tuple[PlannedMerge, ...], tmp_path: Path) -> None:
    (merge_of_one,) = small
    assert not _is_here((replace(merge_of_one), merge_of_one), OUT, RunOptions())
    assert not _is_here(small, "s3://bucket/out", RunOptions())
    assert not _is_here(_linear(tmp_path, "7B", 2), OUT, RunOptions(device="cpu"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("cores", [1, 2, 32])
def test_three_parents_of_1_gb_are_merged_here_and_ten_are_not(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that reads 1.5 GB a second would make the ten in the time for three of one that reads 0.5."""
    _have_cores(monkeypatch, cores)
    assert _is_here(_linear(tmp_path / "few", "1GB", 3), OUT, RunOptions(device="cpu"))
    assert not _is_here(_linear(tmp_path / "many", "1GB", 10), OUT, RunOptions(device="cpu"))


def _linear(root: Path, size: str, count: int) -> tuple[PlannedMerge, ...]:
    places = [make_sparse(root / str(number), SIZES[size]) for number in range(count)]
    models = [{"model": str(each), "parameters": {"weight": 0.5}} for each in places]
    return plan_for({"merge_method": "linear", "models": models, "dtype": "bfloat16"}, OUT)


def _have_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(in_process, "cores_here", lambda: cores)
    monkeypatch.setattr("raymerge.runtime.workers.sizing.cores_here", lambda: cores)


def test_plan_and_dry_run_state_what_the_run_in_this_process_takes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray these cores would have eight workers, which share the memory that is free."""
    _have_cores(monkeypatch, 32)
    monkeypatch.setattr("raymerge.runtime.workers.sizing.free_memory", lambda: 2 << 30)
    monkeypatch.setattr("raymerge.devices.list_gpus", tuple)
    (usual,) = explain_all(recipe, OUT, RunOptions(), title="")
    (asked,) = explain_all(recipe, OUT, RunOptions(inline=True), title="")
    (on_ray,) = explain_all(recipe, OUT, RunOptions(inline=False), title="")
    assert usual.explanation.memory == asked.explanation.memory != on_ray.explanation.memory
    assert [each.to_json(tensors=False)["is_in_process"] for each in (usual, asked)] == [True, False]
    rehearsed = run_command("submit", recipe, "--dry-run", "--memory", "1GiB", cwd=tmp_path)
    assert (rehearsed.code, "can be made in this process" in rehearsed.text) == (0, True)


def test_what_is_refused_is_not_announced(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    events: list[object] = []
    with pytest.raises(TargetError):
        submit(recipe, tmp_path, on_event=events.append)
    assert [type(each) for each in events] == [Ended]


@pytest.mark.parametrize(
    ("here", "on_workers", "expected"),
    [
        (SMALL_SECONDS, SMALL_SECONDS, True),
        (SMALL_SECONDS + 0.1, SMALL_SECONDS, False),
        (RAY_SECONDS + 2.0, 2.0, True),
        (RAY_SECONDS + 2.1, 2.0, False),
    ],
)
def test_workers_that_save_more_than_ray_takes_are_started(
    here: float,
    on_workers: float,
    expected: bool,
    small: tuple[PlannedMerge, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _have_cores(monkeypatch, 64)
    seconds = {(True, 1): here, (None, 8): on_workers}
    monkeypatch.setattr(
        in_process, "_seconds", lambda _, options, layout: seconds[options.inline, layout.workers]
    )
    assert _is_here(small, OUT, RunOptions()) == expected


def test_with_a_gpu_to_choose_or_a_ray_at_hand_nothing_changes(
    small: tuple[PlannedMerge, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert not _is_here(small, OUT, RunOptions())
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert _is_here(small, OUT, RunOptions())
    monkeypatch.setattr("raymerge.devices.list_gpus", lambda: ["cuda"])
    assert not _is_here(small, OUT, RunOptions())
    assert _is_here(small, OUT, RunOptions(device="cpu"))


@pytest.mark.slow
def test_plan_and_run_say_it_unless_a_profile_decides(recipe: str, tmp_path: Path) -> None:
    planned = run_command("plan", recipe, cwd=tmp_path)
    assert "in the process of 'submit'" in planned.text
    asked = merge(recipe, tmp_path / "asked")
    assert not asked.of(RayLeftOut)
    usual = merge(recipe, tmp_path / "usual", RunOptions())
    assert usual.of(RayLeftOut) == [RayLeftOut()]
    assert usual.of(Started)[0].workers == ("inline",)
    assert digests(tmp_path / "usual") == digests(tmp_path / "asked")
    for text in ("run: {threads: 1}", "target: local"):
        (tmp_path / "profile.yml").write_text(f"{text}\n")
        profiled = run_command("plan", recipe, "--profile", "profile.yml", cwd=tmp_path)
        assert (profiled.code, "in the process" in profiled.text) == (0, False)


@pytest.mark.slow
@pytest.mark.ray
def test_what_was_begun_in_this_process_goes_on_with_ray(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It may go on with a Ray that an earlier test has connected to.
    monkeypatch.undo()
    output = tmp_path / "out"
    with driver(recipe, output, pause=0.3) as process:
        _stop_after_a_segment(process)
    assert not output.exists()
    ended = merge(recipe, output, RunOptions(workers=1))
    assert ended.of(Started)[0].done_segments > 0
    merge(recipe, tmp_path / "whole")
    assert digests(output) == digests(tmp_path / "whole")


def _stop_after_a_segment(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "segment_done":
            process.send_signal(signal.SIGINT)
            break
    assert process.wait(timeout=60.0) == 3
