"""Predictions beside real runs: what is compared, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import simulation
from benchmarks.machine import machine
from benchmarks.parents import SIZES
from benchmarks.simulation import Comparison, Figures, asked_for, command, compare, medians, runs, section
from benchmarks.speeds import SpeedBench
from benchmarks.storage_probe import Gives
from benchmarks.tables import marks, replaced

from raymerge.methods import find_method
from raymerge.planner.simulation import MethodSpeeds
from raymerge.runtime.workers.sizing import cores_here

NEAR = Comparison("linear", "inline, 1 thread", 1.15, 1.0, "computing")
FAR = Comparison("ties", "2 workers, 1 thread", 0.74, 1.0, "reading")


def test_a_prediction_holds_within_25_percent_either_way() -> None:
    assert NEAR.is_near
    assert not FAR.is_near
    assert Comparison("", "", 0.76, 1.0, "").is_near
    assert not Comparison("", "", 1.26, 1.0, "").is_near


def test_the_table_ends_with_the_verdict() -> None:
    text = section("the command", "What it is made of.", [NEAR, FAR])
    command_line, told, table, verdict = text.strip().split("\n\n")
    assert command_line == f"`the command`; {machine()}."
    assert told == "What it is made of."
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows == [
        ["linear", "inline, 1 thread", "1.15", "1.00", "1.15", "yes", "computing"],
        ["ties", "2 workers, 1 thread", "0.74", "1.00", "0.74", "**no**", "reading"],
    ]
    assert verdict == "Within 25% of the real time: 1 of 2 predictions."


def test_the_documents_have_a_place_for_it() -> None:
    document = (simulation.ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    written = replaced(document, "new", simulation.SIMULATION)
    begin, end = marks(simulation.SIMULATION)
    assert f"{begin}\n\nnew\n\n{end}" in written
    assert written.partition(begin)[0] == document.partition(begin)[0]
    assert written.partition(end)[2] == document.partition(end)[2]


def test_what_is_written_repeats_the_run() -> None:
    given = ["--rounds", "5", "--place", "/somewhere", "--write", "--methods", "linear", "sce"]
    assert command(given) == ".venv/bin/python tests/benchmarks/simulation.py --rounds 5 --methods linear sce"
    assert asked_for(given).write


@pytest.mark.parametrize("name", ["tiez", "passthrough", "moe"])
def test_only_what_is_simulated_can_be_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked_for(["--methods", name])
    said = capsys.readouterr().err
    assert f"invalid choice: '{name}'" in said
    assert "model_stock" in said


def test_every_choice_is_a_method() -> None:
    assert all(find_method(name) is not None for name in simulation.COMPUTED)
    assert {"linear", "ties"} < set(simulation.COMPUTED)


def test_runs_use_all_cores_and_one() -> None:
    found = [(name, each.inline, each.workers, each.threads) for name, each in runs(4, with_ray=True)]
    assert found == [
        ("inline, 1 thread", True, None, 1),
        ("inline, 4 threads", True, None, 4),
        ("1 worker, 4 threads", False, 1, 4),
        ("2 workers, 2 threads", False, 2, 2),
    ]
    assert [name for name, _ in runs(1, with_ray=False)] == ["inline, 1 thread"]


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


def test_each_figure_is_the_median_of_the_rounds() -> None:
    found = medians([_figures(3.0, 0.1), _figures(1.0, 0.3), _figures(2.0, 0.2)])
    assert found == _figures(2.0, 0.2)


def _figures(storage: float, method: float) -> Figures:
    gives = Gives(storage, 2 * storage, 10 / storage, 2)
    speeds = MethodSpeeds(
        {"linear": method, "ties": 1 - method}, 0.0, 0.0, {"linear": 2 * method, "ties": 0.0}
    )
    return Figures(gives, {1: speeds, 2: MethodSpeeds({}, 0.0, 0.0, {})}, {True: method})
