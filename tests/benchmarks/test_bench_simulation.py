"""Predictions beside real runs: what is compared, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.parents import SIZES
from benchmarks.simulation import asked_for, compare, runs
from benchmarks.speeds import SpeedBench

from raymerge.runtime.workers.sizing import cores_here


@pytest.mark.slow
def test_merges_are_carried_out_and_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.speeds._LEAST_ELEMENTS", 1)
    bench = SpeedBench(tmp_path / "speeds", shape=(256, 256), brief=(16, 256), matrix=(16, 16))
    asked = asked_for(["--rounds", "1", "--no-ray", "--methods", "linear", "slerp"])
    told: list[str] = []
    found = list(compare(tmp_path, SIZES["tiny"], bench, asked, say=told.append))
    kinds = [name for name, _ in runs(cores_here(), with_ray=False)]
    assert [(each.merge, each.run) for each in found] == [
        (name, kind) for name in ("linear", "slerp") for kind in kinds
    ]
    assert all(each.predicted > 0 and each.measured > 0 for each in found)
    assert all(each.limiter != "start-up" for each in found)
    assert len(told) == 1
    assert "linear " in told[0]
    assert "slerp " in told[0]
    assert not (tmp_path / "out").exists()
