"""Stages on the screen: their progress, and the table of what router rows are like."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe
from rich.console import Console

from raymerge.api import RunOptions
from raymerge.cli.render.progress import JsonProgress, LiveProgress, PlainProgress, show_routing, summary
from raymerge.cli.render.tally import Tally
from raymerge.events import (
    Event,
    OnEvent,
    Planned,
    Published,
    SegmentDone,
    StageKept,
    StageReport,
    StageStarted,
    Started,
    StepStarted,
    Stopping,
    UnitDone,
    UnitProgress,
    Verified,
    WorkerLost,
)
from raymerge.stages.router.results import GateReport, LayerReport

WORKERS = ("worker-0", "worker-1")
STAGE = StageStarted("router rows", 1, 2, 3, 3000, WORKERS, "cpu", 0, 0)
REPORT = StageReport("router rows", {})
PLANNED = Planned("d" * 40, 10, 4000, 10_000, 2, 5_000_000)
MERGE = (
    PLANNED,
    Started(("worker-0",), "cpu", 0, 0),
    SegmentDone(0, "worker-0", 4000, 1000, 5000, 0.5),
    SegmentDone(1, "worker-0", 4000, 1000, 5000, 0.5),
    Verified(10, 4000),
    Published("/somewhere/out", 61.0),
)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _unit(number: int, worker: str = "worker-0") -> UnitDone:
    return UnitDone(number, worker, 1000, 200, 1000, 0.5)


def _fed(*events: Event, clock: Clock | None = None) -> Tally:
    tally = Tally(clock or Clock())
    for event in events:
        tally.take(event)
    return tally


def _said(*events: Event, seconds: float = 1.0) -> list[str]:
    """What plain progress prints, with time passing before each event."""
    clock, stream = Clock(), io.StringIO()
    with PlainProgress(Console(file=stream, width=80), "out", clock=clock) as progress:
        for event in events:
            clock.now += seconds
            progress(event)
    return stream.getvalue().splitlines()


# What adds up


def test_units_are_counted_as_segments_are() -> None:
    clock = Clock()
    tally = _fed(STAGE, _unit(0), _unit(2, "worker-1"), clock=clock)
    clock.now += 2
    assert (tally.part, tally.done_segments, tally.total_segments) == ("unit", 2, 3)
    assert (tally.done_bytes, tally.total_bytes, tally.made_bytes) == (2000, 3000, 2400)
    assert tally.fraction == pytest.approx(2 / 3)
    assert tally.seconds_left == pytest.approx(1)
    assert tally.workers["worker-1"].segments == 1


def test_a_stage_of_one_unit_tells_how_long_it_takes() -> None:
    clock = Clock()
    tally = _fed(StageStarted("rows", 1, 1, 1, 3000, WORKERS, "cpu", 0, 0), clock=clock)
    clock.now += 90
    assert summary(tally) == "0 B of 3.00 kB, 0 B/s, 1:30 so far, 0 of 1 unit"
    tally.take(PLANNED)
    assert "so far" not in summary(tally)


def test_the_bar_moves_within_a_unit() -> None:
    clock = Clock()
    tally = _fed(StageStarted("rows", 1, 1, 1, 3000, WORKERS, "cpu", 0, 0), clock=clock)
    clock.now += 10
    tally.take(UnitProgress(1000, 3000))
    assert (tally.done_bytes, tally.moved_bytes, tally.done_segments) == (1000, 1000, 0)
    assert tally.seconds_left == pytest.approx(20)
    assert summary(tally) == "1.00 kB of 3.00 kB, 100 B/s, 0:20 left, 0 of 1 unit"


def test_a_unit_that_was_begun_counts_once() -> None:
    tally = _fed(STAGE, _unit(0), UnitProgress(1600, 3000))
    assert (tally.done_bytes, tally.moved_bytes) == (1600, 1800)
    tally.take(_unit(1))
    assert (tally.done_bytes, tally.moved_bytes) == (2000, 2400)


@given(data=st.data(), units=st.integers(1, 5), before=st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_what_is_done_never_falls(data: st.DataObject, units: int, before: int) -> None:
    """Whatever is told of units in hand, and in whatever order they end."""
    total = (units + before) * 1000
    tally = _fed(StageStarted("rows", 1, 1, units + before, total, WORKERS, "cpu", before, before * 1000))
    begun = [0] * units
    seen = 0
    for unit in data.draw(st.permutations(range(units))):
        for each in data.draw(st.lists(st.integers(0, units - 1), max_size=4)):
            begun[each] = data.draw(st.integers(begun[each], 1000))
            tally.take(UnitProgress(before * 1000 + sum(begun), total))
            assert seen <= tally.done_bytes <= total
            seen = tally.done_bytes
        begun[unit] = 1000
        tally.take(_unit(unit))
        assert seen <= tally.done_bytes <= total
        seen = tally.done_bytes
    assert tally.fraction == 1.0


def test_a_stage_begins_without_what_another_had_begun() -> None:
    tally = _fed(STAGE, UnitProgress(900, 3000), STAGE)
    assert (tally.done_bytes, tally.moved_bytes) == (0, 0)
    assert _fed(STAGE, UnitProgress(900, 3000), *MERGE[:2]).done_bytes == 0


def test_units_of_an_earlier_run_count_as_done() -> None:
    resumed = StageStarted("router rows", 1, 1, 3, 3000, WORKERS, "cpu", 2, 2000)
    tally = _fed(resumed, _unit(1))
    assert (tally.done_segments, tally.done_bytes, tally.fraction) == (3, 3000, 1.0)


def test_a_merge_after_a_stage_begins_at_nothing() -> None:
    tally = _fed(STAGE, *map(_unit, range(3)), REPORT, *MERGE[:2])
    assert (tally.part, tally.done_segments, tally.total_segments) == ("segment", 0, 2)
    assert tally.workers.keys() == {"worker-0"}
    assert tally.is_last
    tally = _fed(StepStarted("left", 1, 2), STAGE)
    assert not tally.is_last
    assert tally.step is not None


def test_a_stage_after_another_begins_at_nothing() -> None:
    tally = _fed(STAGE, _unit(0), STAGE)
    assert (tally.done_segments, tally.made_bytes) == (0, 0)
    assert _fed(STAGE, _unit(0), StageKept("more", 2, 2)).total_segments == 0


# What is shown


def test_plain_lines_tell_what_became_of_a_stage() -> None:
    lines = _said(STAGE, *map(_unit, range(3)), REPORT, StageKept("order of experts", 2, 2), *MERGE)
    assert lines[:4] == [
        "stage 1 of 2: router rows",
        "made in 4.0 s with 2 workers on cpu",
        "stage 2 of 2: order of experts, made already",
        "planned: 10 tensors, 4.00 kB; at most 5.00 MB of memory a worker",
    ]
    assert lines[-3] == "done: out"


def test_plain_lines_tell_how_far_a_long_stage_is() -> None:
    lines = _said(STAGE, _unit(0), _unit(1), _unit(2), seconds=70)
    assert lines[1].startswith("33%: 1.00 kB of 3.00 kB, ")
    assert lines[1].endswith("1 of 3 units")


def test_plain_lines_tell_how_far_a_long_unit_is() -> None:
    lines = _said(STAGE, UnitProgress(100, 3000), UnitProgress(1500, 3000), seconds=30)
    assert lines[1:] == ["50%: 1.50 kB of 3.00 kB, 25 B/s, 1:00 left, 0 of 3 units"]


def test_going_on_with_units_is_said() -> None:
    resumed = StageStarted("router rows", 1, 1, 3, 3000, WORKERS, "cpu", 2, 2000)
    assert _said(resumed) == ["stage 1 of 1: router rows", "going on: 2 of 3 units are done already"]


def test_a_lost_worker_and_a_stop_speak_of_units() -> None:
    lines = _said(STAGE, WorkerLost("worker-0", "killed", (1,)), Stopping())
    assert lines[1] == "warning: worker-0 was lost (killed); 1 unit in hand pass to another"
    assert lines[2].startswith("stopping: the units in hand are finished first")


def test_the_live_view_names_the_stage_and_then_what_follows() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    drawn: list[str] = []

    def look() -> None:
        progress.refresh()
        drawn.append(stream.getvalue())
        stream.truncate(0)
        stream.seek(0)

    with LiveProgress(console, "out") as progress:
        progress(STAGE)
        for number in range(2):
            progress(_unit(number))
        look()
        progress(_unit(2))
        look()
        progress(StageKept("order of experts", 2, 2))
        look()
        for event in MERGE[:3]:
            progress(event)
        look()
    assert "stage 1 of 2: router rows" in drawn[0]
    assert "2 of 3 units" in drawn[0]
    assert "Concluding: router rows" in drawn[1]
    assert "Starting" in drawn[2]
    assert "1 of 2 segments" in drawn[3]


def test_events_of_stages_are_json() -> None:
    stream = io.StringIO()
    with JsonProgress(stream) as progress:
        for event in (STAGE, _unit(0), StageKept("more", 2, 2), StageReport("rows", {"kind": "gates"})):
            progress(event)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["stage_started", "unit_done", "stage_kept", "stage_report"]
    assert lines[0]["units"] == 3
    assert lines[3]["report"] == {"kind": "gates"}


# The table of router rows

LAYERS = (LayerReport(0, 2.5, (0.9, 0.5), (0.7, 0.3), 1.5), LayerReport(1, 7.0, (0.7, 0.5), (0.6, 0.4), 0.5))
ROWS = GateReport("ridge", ("expert 0 (code)", "expert 1 (french)"), LAYERS, (200, 30), (1,))


def _table(report: Mapping[str, Any]) -> str:
    stream = io.StringIO()
    show_routing(Console(file=stream, width=120), [StageReport("router rows of a mixture", report)])
    return stream.getvalue()


def test_the_table_says_what_the_rows_are_like() -> None:
    lines = [" ".join(line.split()) for line in _table(ROWS.to_json()).splitlines()]
    assert lines == [
        "",
        "router rows of a mixture",
        "gate mode ridge",
        "layers 2",
        "condition 7.0 at worst, good below 100",
        f"load entropy {ROWS.entropy:.2f} of 1.00 bits; in the lowest layer {LAYERS[0].entropy:.2f}",
        "margin 1 between the first and the second logit",
        "expert tokens chosen first for",
        "expert 0 (code) 200 80%",
        "expert 1 (french)* 30 50%",
        "* judged on the texts that its row was made from, for want of held-out ones",
    ]


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ((1.0, 4.0), "4.0 at worst, good below 5"),
        ((1.0, 6.0), "6.0 at worst; above 5, experts are hardly told apart, in layer 1"),
        ((math.inf, 9.0), "infinite at worst; above 5, experts are hardly told apart, in layers 0, 1"),
        ((9.0,) * 20, "in layers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_rows_that_hardly_differ_are_pointed_at(conditions: tuple[float, ...], said: str) -> None:
    layers = tuple(LayerReport(number, each) for number, each in enumerate(conditions))
    text = _table(GateReport("hidden", ("a", "b"), layers).to_json())
    assert said in text
    # No text was run, so nothing is said of routing.
    assert "expert " not in text
    assert "margin" not in text


def test_reports_of_other_stages_have_no_table() -> None:
    assert _table({}) == ""
    assert _table({"reference": "one", "other": "two", "layers": []}) == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_submit_ends_with_the_table(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table stands behind the lines of the run; JSON has the report as an event."""
    make_models(tmp_path)
    recipe = write_recipe(tmp_path, MEAN)

    def submit(recipe: str, output: str, options: RunOptions, *, on_event: OnEvent) -> None:
        for event in (STAGE, StageReport("router rows", ROWS.to_json()), *MERGE):
            on_event(event)

    monkeypatch.setattr("raymerge.api.submit", submit)
    outcome = run_command("submit", recipe, "-o", "out", *(["--json"] if as_json else []), cwd=tmp_path)
    assert outcome.code == 0
    if as_json:
        events = [json.loads(line) for line in outcome.text.splitlines()]
        assert [event["report"]["mode"] for event in events if event["event"] == "stage_report"] == ["ridge"]
    else:
        assert outcome.text.index("done: out") < outcome.text.index("gate mode")
