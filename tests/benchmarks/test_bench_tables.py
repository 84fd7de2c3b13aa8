"""The tables of the benchmark: what is computed, and how it is written down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks import programme as run
from benchmarks.groups import Results
from benchmarks.measure import Sample
from benchmarks.tables import (
    BENCH,
    above_idle,
    in_run,
    marks,
    middle,
    ratio,
    replaced,
    results_table,
    section,
    targets,
    targets_table,
    whole,
)

MB = 10**6
BEGIN, END = marks(BENCH)


def _sample(seconds: float, peak: int = 0, **fields: int) -> Sample:
    return replace(Sample(seconds + 1, seconds, seconds, peak, peak // 2), **fields)


def _results(**runs: list[float]) -> Results:
    results = Results()
    for program, seconds in runs.items():
        for number, each in enumerate(seconds):
            results.add("linear", program, number, _sample(each))
    return results


def test_a_ratio_is_taken_round_by_round() -> None:
    """The machine was three times slower in the second round: medians of each side would not show 2."""
    results = _results(ours=[2.0, 6.0, 2.2], limit=[1.0, 3.0, 1.0])
    assert ratio(results, "linear", "ours", "limit", in_run) == 2.0
    assert middle(results, "linear", "ours", in_run) == 2.2
    assert middle(results, "linear", "ours", whole) == pytest.approx(3.2)


def test_a_run_is_judged_by_every_target_that_it_tells_of() -> None:
    results = _results(
        **{run.LIMIT: [1.0], run.INLINE: [1.25], run.RAY: [2.0], run.PEER: [9.0], run.TIGHT: [2.0]}
    )
    found = {each.text: each for each in targets(results) if each.measured is not None}
    assert found["linear: in the run, times the limit"].measured == 1.25
    assert found["linear: in the run on a Ray worker, times --inline"].measured == 1.6
    assert found["linear: mergekit's time over --inline's, start-up apart"].measured == 7.2
    assert found["linear: mergekit's whole process over --inline's"].measured == pytest.approx(10 / 2.25)
    assert found["linear with 256 MiB: in the run, times that with ample memory"].is_met is False


def test_the_submit_of_a_tiny_model_is_judged_as_users_give_it_and_on_ray() -> None:
    results = Results()
    results.add(run.SUBMIT, run.DEFAULT, 0, _sample(2.0))
    results.add(run.SUBMIT, run.RAY, 0, _sample(4.0))
    found = [each for each in targets(results) if each.text.startswith(run.SUBMIT)]
    assert [(each.measured, each.is_met) for each in found] == [(3.0, False), (5.0, True)]


def test_memory_is_counted_above_the_same_merge_of_hardly_anything() -> None:
    results = Results()
    results.add(run.IDLE, "linear", 0, _sample(1, 900 * MB))
    results.add(run.IDLE, "linear", 1, _sample(1, 300 * MB))
    for number, peak in enumerate((350 * MB, 420 * MB)):
        results.add("linear", run.INLINE, number, _sample(1, peak, projected=100 * MB))
    assert above_idle(results, "linear", run.INLINE) == 120 * MB
    assert above_idle(results, "linear", run.TIGHT) is None
    (worst,) = [each for each in targets(results) if each.text.startswith("memory above idle")]
    assert (worst.measured, worst.is_met) == (1.2, False)


def test_mergekit_s_memory_is_judged_without_the_files_that_it_maps() -> None:
    results = Results()
    results.add("linear", run.PEER, 0, _sample(1, 6000 * MB, own=1000 * MB))
    results.add("linear", run.INLINE, 0, _sample(1, 240 * MB, own=200 * MB))
    found = {each.text: each for each in targets(results) if "memory over that of" in each.text}
    judged = found[f"linear: mergekit's own memory over that of {run.INLINE}"]
    told = found[f"linear: mergekit's own memory over that of {run.INLINE}, mapped files counted"]
    assert (judged.measured, judged.is_met) == (5.0, False)
    assert (told.measured, told.bound, told.is_met) == (25.0, None, None)
    lines = targets_table([judged, told]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
    assert cells == [["at least 10", "5.00", "**no**"], ["", "25.00", ""]]


def test_the_table_tells_medians_the_most_memory_and_the_floor() -> None:
    results = Results()
    for number, (seconds, peak) in enumerate(((1.0, 5 * MB), (2.0, 9 * MB), (4.0, 7 * MB))):
        results.add("linear", run.LIMIT, number, _sample(1.0))
        results.add("linear", run.INLINE, number, _sample(seconds, peak))
    results.add(run.IDLE, "linear", 0, _sample(1.0))
    lines = results_table(results).splitlines()
    assert len(lines) == 4
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells == ["linear", run.INLINE, "3.00", "2.00", "2.00", "2.0", "9", "4", "3"]


def test_a_section_is_replaced_and_nothing_else() -> None:
    document = f"# Title\n\n{BEGIN}\nold\n{END}\n\nmore\n"
    text = section("here", "make bench", _results(ours=[1.0]), [])
    written = replaced(document, text)
    assert written.startswith(f"# Title\n\n{BEGIN}\n\n`make bench`; here.\n\n|")
    assert written.endswith(f"|\n\n{END}\n\nmore\n")
    assert "old" not in written
    assert "Failed" not in written
    assert replaced(written, text) == written
    with pytest.raises(ValueError, match="simulation: begin"):
        replaced(document, text, "simulation")
