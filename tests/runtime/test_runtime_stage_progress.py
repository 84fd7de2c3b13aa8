"""How far a stage is while its units are in hand, and how a unit in hand is given up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kits import stage_maker
from kits.checkpoint_maker import tiny_llama
from kits.gate_stages import LAYERS, reading_base, stage_of, three_experts
from kits.merge_cases import INLINE
from kits.stage_maker import UNITS, run_chain, staged, with_stage

from raymerge.api import plan_for
from raymerge.errors import IncompleteError
from raymerge.events import Event, SegmentDone, StageStarted, Stopping, UnitDone, UnitProgress
from raymerge.options import RunOptions
from raymerge.runtime.driver.chained_merges import Chain, steps_directory
from raymerge.runtime.driver.run import InlinePool
from raymerge.runtime.workers.ray_pool import RayPool

TWO = RunOptions(workers=2, memory=16 << 20)
TOTAL = 1000
"""Bytes of all units."""


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A copy of one model."""
    root = tiny_llama(tmp_path / "models" / "one", 0, hidden=32, layers=1)
    return {"merge_method": "passthrough", "models": [{"model": str(root)}]}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody tells and looks as often as can be."""
    for place in ("driver.run", "workers.dispatcher"):
        monkeypatch.setattr(f"raymerge.runtime.{place}.TICK_SECONDS", 0.02)
    monkeypatch.setattr("raymerge.runtime.driver.stage_work._EVERY_SECONDS", 0.0)


def _of(events: list[Event], *kinds: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kinds)]


def _check_growing(events: list[Event]) -> None:
    """What is told grows, and is never less than what is done, nor more than all."""
    done = 0
    before = 0
    for event in _of(events, UnitDone, UnitProgress):
        if isinstance(event, UnitDone):
            done += event.planned_bytes
            continue
        assert before < event.done_bytes <= event.total_bytes == TOTAL
        assert done < event.done_bytes
        before = event.done_bytes
    assert done == TOTAL


@pytest.mark.usefixtures("often")
def test_the_driver_tells_how_far_the_units_in_hand_are(recipe: dict[str, Any], tmp_path: Path) -> None:
    events: list[Event] = []
    output = tmp_path / "out"
    keep = RunOptions(inline=True, keep_intermediates=True)
    run_chain(staged(recipe, output), output, keep, on_event=events.append, pause=0.2, steps=10)
    assert len(_of(events, UnitProgress)) >= UNITS
    _check_growing(events)
    assert not list(steps_directory(output).rglob("*progress*"))


@pytest.mark.usefixtures("often")
def test_a_unit_that_tells_too_much_is_done_and_no_more(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Costs are about right, and a unit may read more."""
    events: list[Event] = []

    def look(event: Event) -> None:
        events.append(event)
        if isinstance(event, StageStarted):
            (staging,) = steps_directory(tmp_path / "out").glob(".router-rows.raymerge-*")
            (staging / "progress-1").write_text("1000000")

    run_chain(staged(recipe, tmp_path / "out"), tmp_path / "out", on_event=look, pause=0.2, steps=10)
    _check_growing(events)


@pytest.mark.usefixtures("often")
def test_what_a_killed_run_told_is_forgotten(recipe: dict[str, Any], tmp_path: Path) -> None:
    merges = staged(recipe, tmp_path / "out")
    with pytest.raises(IncompleteError):
        run_chain(merges, tmp_path / "out", fails_with=OSError(5, "once"))
    (staging,) = steps_directory(tmp_path / "out").glob(".router-rows.raymerge-*")
    (staging / "progress-0").write_text("99")

    def look(event: Event) -> None:
        if isinstance(event, StageStarted):
            assert not (staging / "progress-0").exists()

    run_chain(merges, tmp_path / "out", on_event=look)


def test_a_stage_without_news_tells_nothing(recipe: dict[str, Any], tmp_path: Path) -> None:
    events: list[Event] = []
    run_chain(staged(recipe, tmp_path / "out"), tmp_path / "out", on_event=events.append)
    assert _of(events, UnitProgress) == []


@pytest.mark.usefixtures("often")
def test_a_second_ctrl_c_gives_up_the_unit_in_hand(recipe: dict[str, Any], tmp_path: Path) -> None:
    """A unit of a large model takes hours; the run ends at its next word."""
    events: list[Event] = []

    def stop_twice(event: Event) -> None:
        events.append(event)
        if isinstance(event, UnitProgress):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    output, began = tmp_path / "out", time.monotonic()
    with pytest.raises(IncompleteError, match="stopped at once") as caught:
        run_chain(staged(recipe, output), output, on_event=stop_twice, pause=60, steps=1200)
    assert time.monotonic() - began < 30
    assert caught.value.exit_code == 3
    assert _of(events, Stopping) == [Stopping(None), Stopping(0.0)]
    assert _of(events, UnitDone) == []
    events.clear()
    run_chain(staged(recipe, output), output, on_event=events.append)
    assert _of(events, StageStarted)[0].done_units == 0


@pytest.mark.usefixtures("often")
def test_a_stage_of_router_rows_tells_after_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of a real stage: one unit, which is looked at while it runs."""
    base = reading_base(tmp_path / "base")
    output = tmp_path / "out"
    (merge,) = plan_for({"merge_method": "passthrough", "models": [{"model": base.checkpoint.root}]}, output)
    merge = with_stage(merge, stage_of(base, "hidden", three_experts()), output)
    seen: list[int] = []
    _note(monkeypatch, seen.append)
    pool = InlinePool("cpu")
    pool.start()
    Chain([merge], output, INLINE, on_event=lambda _: None).carry_out(pool)
    assert len(seen) == LAYERS
    assert seen == sorted(set(seen))


def _note(monkeypatch: pytest.MonkeyPatch, note: Callable[[int], None]) -> None:
    """Have every number that is written noted."""

    def write(path: Path, nbytes: int) -> None:
        del path
        note(nbytes)

    monkeypatch.setattr("raymerge.runtime.driver.stage_work._write", write)


@pytest.mark.usefixtures("often")
def test_a_merge_passes_over_the_time_without_receipts(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raymerge.execute.segment import SegmentRunner

    run, ticks = SegmentRunner.run, []

    def slow(self: SegmentRunner, segment: int) -> Any:
        time.sleep(0.3)
        return run(self, segment)

    class Counting(InlinePool):
        def run(self, *args: Any) -> Any:
            for each in super().run(*args):
                ticks.append(each)
                yield each

    monkeypatch.setattr(SegmentRunner, "run", slow)
    events: list[Event] = []
    chain = Chain(plan_for(recipe, tmp_path / "out"), tmp_path / "out", INLINE, on_event=events.append)
    pool = Counting("cpu")
    pool.start()
    chain.carry_out(pool)
    assert ticks.count(()) >= 3
    assert len(_of(events, SegmentDone)) == sum(map(len, ticks))


@pytest.mark.slow
@pytest.mark.ray
def test_workers_on_ray_tell_how_far_they_are(
    recipe: dict[str, Any], tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymerge.runtime.workers.dispatcher.TICK_SECONDS", 0.1)
    ray_cluster.cloudpickle.register_pickle_by_value(stage_maker)
    try:
        events: list[Event] = []
        pool = RayPool(TWO, events.append)
        output = tmp_path / "out"
        run_chain(staged(recipe, output), output, TWO, on_event=events.append, pool=pool, pause=1.6, steps=16)
    finally:
        ray_cluster.cloudpickle.unregister_pickle_by_value(stage_maker)
    assert len(_of(events, UnitProgress)) >= 2
    _check_growing(events)
