"""Signals to a whole command: Ctrl-C once and twice, and SIGTERM with three seconds to live."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kits.driver_process import driver, kin_of
from kits.merge_cases import Family, digests, merge, recipes

from raymerge.events import Started
from raymerge.publish.lease import lease_view

LONG = 60.0
"""Seconds that a segment takes which nobody waits for."""


@pytest.fixture(scope="module")
def recipe(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yml"
    path.write_text(json.dumps(recipes(medium)["linear"]))
    return str(path)


@pytest.fixture(scope="module")
def expected(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(recipe, output)
    return digests(output)


def _wait_for(process: subprocess.Popen[str], event: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == event:
            return
    raise AssertionError(f"it ended without {event}")


def _ended(process: subprocess.Popen[str], *, within: float) -> float:
    began = time.monotonic()
    process.wait(timeout=within)
    return time.monotonic() - began


def _goes_on(recipe: str, output: Path, expected: dict[str, str]) -> int:
    """Give the command again; how many segments were kept."""
    assert not output.exists()
    merged = merge(recipe, output)
    assert digests(output) == expected
    (started,) = merged.of(Started)
    return int(started.done_segments)


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"workers": 1}, marks=(pytest.mark.slow, pytest.mark.ray))],
    ids=["inline", "Ray"],
)
def test_sigterm_ends_a_run_within_three_seconds_whatever_is_in_hand(
    more: dict[str, int], recipe: str, expected: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with driver(recipe, output, pause=LONG, **more) as process:
        _wait_for(process, "started")
        process.send_signal(signal.SIGTERM)
        assert _ended(process, within=3.0) <= 3.0
        assert process.returncode == 3
    # Nobody on another machine has to wait until it counts as dead.
    assert lease_view(output) is None
    _goes_on(recipe, output, expected)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("process", ["gcs_server", "agent_stand_in.py"])
def test_a_run_whose_own_ray_dies_says_so_and_goes_on_by_the_same_command(
    recipe: str, expected: dict[str, str], tmp_path: Path, process: str
) -> None:
    output = tmp_path / "out"
    with driver(recipe, output, workers=1, pause=LONG) as run:
        _wait_for(run, "started")
        kin = kin_of(run)
        # The raylet has the programs of its agents in an option.
        words = {each: [word for word in each.cmdline() if word[:2] != "--"] for each in kin.processes}
        next(each for each, own in words.items() if any(word.endswith(process) for word in own)).kill()
        _ended(run, within=10.0)
        assert run.stdout is not None
        event = json.loads(run.stdout.read().splitlines()[-1])
        said = event["message"]
        assert (run.returncode, event["event"], event["exit_code"]) == (3, "error", 3)
        assert "the embedded Ray of this command has ended" in said
        assert "the same command goes on" in said
    _goes_on(recipe, output, expected)


@pytest.mark.slow
@pytest.mark.ray
def test_what_a_killed_run_left_of_its_own_ray_is_removed_by_the_next(recipe: str, tmp_path: Path) -> None:
    with driver(recipe, tmp_path / "out", workers=1, pause=LONG) as killed:
        _wait_for(killed, "started")
        (left,) = kin_of(killed).directories
        killed.kill()
        killed.wait()
        assert Path(left).is_dir()
        with driver(recipe, tmp_path / "other", workers=1, pause=LONG) as following:
            _wait_for(following, "started")
            assert not Path(left).exists()
            (own,) = kin_of(following).directories
            assert Path(own).is_dir()
