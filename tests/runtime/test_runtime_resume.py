"""A driver that is killed outright, and the same command given again."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from kits.driver_process import driver, kin_of, wait_for_receipts
from kits.merge_cases import Family, digests, merge, recipes

from raymerge.events import Planned, SegmentDone, Started


@pytest.fixture(scope="module")
def expected(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the output of a run that nothing disturbs."""
    output = tmp_path_factory.mktemp("expected") / "out"
    merge(recipes(medium)["dare_ties"], output)
    return digests(output)


def test_a_killed_driver_is_resumed(medium: Family, tmp_path: Path, expected: dict[str, str]) -> None:
    recipe, output = recipes(medium)["dare_ties"], tmp_path / "out"
    with driver(recipe, output, pause=0.1) as process:
        wait_for_receipts(output, 6)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = wait_for_receipts(output, 6)
    assert not output.exists()
    merged = merge(recipe, output)
    (started,) = merged.of(Started)
    assert started.done_segments == done
    assert len(merged.of(SegmentDone)) == merged.of(Planned)[0].segments - done
    assert digests(output) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_driver_killed_again_and_again_ends(
    medium: Family, tmp_path: Path, expected: dict[str, str]
) -> None:
    recipe, output = recipes(medium)["dare_ties"], tmp_path / "out"
    for wanted in (3, 8):
        with driver(recipe, output, pause=0.1) as process:
            wait_for_receipts(output, wanted)
            process.kill()
    merged = merge(recipe, output)
    assert merged.of(Started)[0].done_segments >= 8
    assert digests(output) == expected


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_its_own_ray_is_resumed_when_the_driver_or_everything_was_killed(
    medium: Family, tmp_path: Path, expected: dict[str, str]
) -> None:
    recipe, output = recipes(medium)["dare_ties"], tmp_path / "out"
    with driver(recipe, output, workers=2, pause=0.3) as process:
        wait_for_receipts(output, 4)
        kin = kin_of(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = kin.surviving_workers()
        kin.end()
    done = wait_for_receipts(output, 4)
    assert left == []
    assert not output.exists()
    with driver(recipe, output, workers=2, pause=0.3) as process:
        wait_for_receipts(output, done + 2)
        kin = kin_of(process)
        for each in (psutil.Process(process.pid), *kin.processes):
            each.kill()
        kin.end()
    done = wait_for_receipts(output, done + 2)
    assert not output.exists()
    merged = merge(recipe, output)
    assert merged.of(Started)[0].done_segments == done
    assert len(merged.of(SegmentDone)) == merged.of(Planned)[0].segments - done
    assert digests(output) == expected
