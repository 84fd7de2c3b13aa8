"""A small merge runs in this process where nothing asks for Ray, and is the same merge."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.parents import SIZES, make_sparse
from kits.command_line import run_command
from kits.driver_process import driver
from kits.merge_cases import Family, digests, merge, recipes

from raymerge.api import plan_for
from raymerge.events import RayLeftOut, Started
from raymerge.options import RunOptions
from raymerge.planner.merges import PlannedMerge
from raymerge.runtime.driver import in_process
from raymerge.runtime.driver.in_process import RAY_SECONDS, SMALL_SECONDS, is_for_this_process

OUT = "/nowhere/out"


@pytest.fixture(scope="module")
def recipe(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yml"
    path.write_text(json.dumps(recipes(medium)["linear"]))
    return str(path)


@pytest.fixture(scope="module")
def small(recipe: str) -> tuple[PlannedMerge, ...]:
    return plan_for(recipe, OUT)


def test_a_small_merge_is_for_this_process(small: tuple[PlannedMerge, ...]) -> None:
    assert is_for_this_process(small, OUT, RunOptions())
    assert is_for_this_process(small, OUT, RunOptions(threads=1, memory=1 << 30, device="cpu", replace=True))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 1},
        {"inline": False},
        {"address": "auto"},
        {"patience": 30.0},
        {"device": "cuda"},
        {"run": "raymerge-0123456789ab"},
        # It says itself that this is too little.
        {"memory": 1},
    ],
)
def test_whoever_asks_for_workers_gets_them(options: dict[str, Any], small: tuple[PlannedMerge, ...]) -> None:
    assert not is_for_this_process(small, OUT, RunOptions(**options))


def test_what_may_take_long_is_for_ray(small: tuple[PlannedMerge, ...], tmp_path: Path) -> None:
    (merge_of_one,) = small
    assert not is_for_this_process((replace(merge_of_one), merge_of_one), OUT, RunOptions())
    assert not is_for_this_process(small, "s3://bucket/out", RunOptions())
    models = [
        {"model": str(make_sparse(tmp_path / name, SIZES["7B"])), "parameters": {"weight": 0.5}}
        for name in "ab"
    ]
    large = plan_for({"merge_method": "linear", "models": models, "dtype": "bfloat16"}, OUT)
    assert not is_for_this_process(large, OUT, RunOptions())


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
    monkeypatch.setattr(in_process, "cores_here", lambda: 64)
    monkeypatch.setattr("raymerge.runtime.workers.sizing.cores_here", lambda: 64)
    seconds = {1: here, 8: on_workers}
    monkeypatch.setattr(in_process, "_seconds", lambda _plan, _options, layout: seconds[layout.workers])
    assert is_for_this_process(small, OUT, RunOptions()) == expected


def test_with_a_gpu_to_choose_or_a_ray_at_hand_nothing_changes(
    small: tuple[PlannedMerge, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert not is_for_this_process(small, OUT, RunOptions())
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert is_for_this_process(small, OUT, RunOptions())
    monkeypatch.setattr("raymerge.devices.list_gpus", lambda: ["cuda"])
    assert not is_for_this_process(small, OUT, RunOptions())
    assert is_for_this_process(small, OUT, RunOptions(device="cpu"))


def test_plan_and_run_say_it_unless_a_profile_decides(recipe: str, tmp_path: Path) -> None:
    planned = run_command("plan", recipe, cwd=tmp_path)
    assert "in the process of 'submit'" in planned.text
    asked = merge(recipe, tmp_path / "asked")
    assert not asked.of(RayLeftOut)
    usual = merge(recipe, tmp_path / "usual", RunOptions())
    assert usual.of(RayLeftOut) == [RayLeftOut()]
    assert usual.of(Started)[0].workers == ("inline",)
    assert digests(tmp_path / "usual") == digests(tmp_path / "asked")
    (tmp_path / "profile.yml").write_text("run: {threads: 1}\n")
    profiled = run_command("plan", recipe, "--profile", "profile.yml", cwd=tmp_path)
    assert (profiled.code, "in the process" in profiled.text) == (0, False)


@pytest.mark.slow
@pytest.mark.ray
def test_what_was_begun_in_this_process_goes_on_with_ray(recipe: str, tmp_path: Path) -> None:
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
