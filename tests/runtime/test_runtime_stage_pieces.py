"""What units of real stages left is looked at before it is used: layers of one file, and whole files."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import tiny_llama
from kits.gate_stages import reading_base, stage_of, three_experts
from kits.merge_cases import INLINE, EventLog, digests, flip
from kits.permuted_experts import MIXTRAL, make_model, moved, store
from kits.stage_maker import UNITS, PieceWork, gate_stage, run_chain, staged, with_stage

from raymerge.api import plan_for
from raymerge.device_numerics import torch_threads
from raymerge.errors import IncompleteError, OptionError
from raymerge.events import Event, StageStarted, Stopping, UnitDone, UnitProgress, WorkerProgress
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import RESULT_FILE
from raymerge.planner.merges import PlannedMerge
from raymerge.runtime.driver import versions
from raymerge.runtime.driver.chained_merges import MergeJob, disk_nbytes, stage_lines, steps_directory
from raymerge.runtime.driver.stage_run import StageWork, work_of
from raymerge.runtime.driver.unit_run import progress_by_unit, reporting_progress
from raymerge.runtime.driver.versions import digests_of
from raymerge.runtime.workers.pool import InlinePool
from raymerge.storage.store import Range


def _aligned(tmp_path: Path, output: Path) -> PlannedMerge:
    """A mean of two mixtures whose experts are put in order first, layer by layer."""
    if not (tmp_path / "one").exists():
        model = make_model(MIXTRAL, 1)
        store(tmp_path / "one", model, MIXTRAL)
        store(tmp_path / "two", moved(model, MIXTRAL, 2), MIXTRAL)
    models = [
        {
            "model": {"model": str(tmp_path / name), "override_architecture": "Mixture"},
            "parameters": {"weight": 0.5},
        }
        for name in ("one", "two")
    ]
    return plan_for({"merge_method": "linear", "models": models, "align": "experts"}, output)[0]


def _routed(tmp_path: Path, output: Path) -> PlannedMerge:
    """A copy of a model, with router rows before it that are made in one unit."""
    base = reading_base(tmp_path / "base")
    recipe = {"merge_method": "passthrough", "models": [{"model": base.checkpoint.root}]}
    return with_stage(plan_for(recipe, output)[0], stage_of(base, "hidden", three_experts()), output)


def _run(merge: PlannedMerge, output: Path, *, stop_after: int = 0) -> tuple[StageStarted, list[int]]:

    def look(event: Event) -> None:
        if isinstance(event, UnitDone) and len(events.of(UnitDone)) == stop_after:
            signal.raise_signal(signal.SIGINT)

    events, pool = EventLog(look), InlinePool("cpu")
    pool.start()
    chain = MergeJob([merge], output, INLINE, on_event=events)
    if stop_after:
        with pytest.raises(IncompleteError):
            chain.carry_out(pool)
    else:
        chain.carry_out(pool)
    (started,) = events.of(StageStarted)
    return started, [event.unit for event in events.of(UnitDone)]


def _staging(output: Path) -> Path:
    (found,) = steps_directory(output).glob(".*.raymerge-*/units-*")
    return found


def _offsets(merge: PlannedMerge, layer: int) -> list[int]:
    tensors = merge.stages[0].layout.tensors
    return [tensor.offset for tensor in tensors if f".layers.{layer}." in tensor.name]


@pytest.mark.parametrize("is_hit", [False, True])
def test_a_layer_whose_bytes_were_lost_is_matched_again(tmp_path: Path, *, is_hit: bool) -> None:
    """All layers are in one file; bytes of another layer are nobody's concern."""
    output = tmp_path / "out"
    merge = _aligned(tmp_path, output)
    _, done = _run(merge, output, stop_after=1)
    layer = done[0] if is_hit else 1 - done[0]
    flip(_staging(output) / RESULT_FILE, max(_offsets(merge, layer)))
    started, again = _run(_aligned(tmp_path, output), output)
    assert started.done_units == (0 if is_hit else 1)
    assert sorted(again) == ([0, 1] if is_hit else [1 - done[0]])
    fresh = tmp_path / "fresh"
    _run(_aligned(tmp_path, fresh), fresh)
    assert digests(output)[RESULT_FILE] == digests(fresh)[RESULT_FILE]


def test_a_layer_whose_report_was_lost_is_matched_again(tmp_path: Path) -> None:
    output = tmp_path / "out"
    _, done = _run(_aligned(tmp_path, output), output, stop_after=1)
    (_staging(output) / f"layer-{done[0]}.json").write_text("[]")
    started, _ = _run(_aligned(tmp_path, output), output)
    assert started.done_units == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("harm", "kept"),
    [
        (lambda _: None, 1),
        (lambda staging: flip(staging / RESULT_FILE, -1), 0),
        (lambda staging: (staging / "layers.json").unlink(), 0),
    ],
)
def test_router_rows_that_were_lost_are_made_again(tmp_path: Path, harm: Any, kept: int) -> None:
    output = tmp_path / "out"
    merge = _routed(tmp_path, output)
    _run(merge, output, stop_after=1)
    harm(_staging(output))
    started, again = _run(merge, output)
    assert started.done_units == kept
    assert len(again) == 1 - kept


TOTAL = 1000
"""Bytes of all units."""


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    root = tiny_llama(tmp_path / "models" / "one", 0, hidden=32, layers=1)
    return {"merge_method": "passthrough", "models": [{"model": str(root)}]}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody tells and looks as often as can be."""
    monkeypatch.setattr("raymerge.runtime.workers.pool.TICK_SECONDS", 0.02)
    monkeypatch.setattr("raymerge.runtime.driver.unit_run._EVERY_SECONDS", 0.0)


def _check_growing(events: EventLog) -> None:
    """What is told grows, and is never less than what is done, nor more than all."""
    done = 0
    before = 0
    for event in events.of(UnitDone, UnitProgress):
        if isinstance(event, UnitDone):
            done += event.planned_bytes
            continue
        assert before < event.done_bytes <= event.total_bytes == TOTAL
        assert done < event.done_bytes
        before = event.done_bytes
    assert done == TOTAL


@pytest.mark.usefixtures("often")
def test_the_driver_tells_how_far_the_units_in_hand_are(recipe: dict[str, Any], tmp_path: Path) -> None:
    events = EventLog()
    output = tmp_path / "out"
    keep = RunOptions(inline=True, keep_intermediates=True)
    run_chain(staged(recipe, output), output, keep, on_event=events, pause=0.2, steps=10)
    assert len(events.of(UnitProgress)) >= UNITS
    _check_growing(events)
    seen = [part for event in events.of(WorkerProgress) for part in event.parts if part.total_bytes < TOTAL]
    totals = {(part.part, part.total_bytes) for part in seen}
    assert totals == {(unit, 100 * (1 + unit)) for unit in range(UNITS)}
    assert any(0 < part.done_bytes < part.total_bytes for part in seen)
    assert not list(steps_directory(output).rglob("*progress*"))


@pytest.mark.usefixtures("often")
def test_a_second_ctrl_c_gives_up_the_unit_in_hand(recipe: dict[str, Any], tmp_path: Path) -> None:
    """A unit of a large model takes hours; the run ends at its next word."""

    def stop_twice(event: Event) -> None:
        if isinstance(event, UnitProgress):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    output, began, events = tmp_path / "out", time.monotonic(), EventLog(stop_twice)
    with pytest.raises(IncompleteError, match="stopped at once") as caught:
        run_chain(staged(recipe, output), output, on_event=events, pause=60, steps=1200)
    assert time.monotonic() - began < 30
    assert caught.value.exit_code == 3
    assert events.of(Stopping) == [Stopping(None), Stopping(0.0)]
    assert events.of(UnitDone) == []
    events = EventLog()
    run_chain(staged(recipe, output), output, on_event=events)
    assert events.of(StageStarted)[0].done_units == 0


KEEP = RunOptions(inline=True, keep_intermediates=True)
CPU = torch.device("cpu")


def _leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_a_stage_without_room_is_refused_before_the_first_byte(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave(monkeypatch, 50 << 20)
    run_chain(staged(recipe, output), output, KEEP)
    shutil.rmtree(output)
    shutil.rmtree(steps_directory(output))
    with pytest.raises(
        OptionError, match=r"what is made before it, takes 104\.87 MB, and 52\.43 MB are free"
    ):
        run_chain(staged(recipe, output), output, KEEP, spill_nbytes=100 << 20)
    assert list(output.parent.iterdir()) == []


def test_what_was_begun_is_not_looked_at_again(
    recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its space is taken by now, and nobody knows how much of it."""
    with pytest.raises(IncompleteError):
        run_chain(staged(recipe, output), output, KEEP, fails_with=OSError(5, "once"), spill_nbytes=1 << 30)
    _leave(monkeypatch, 50 << 20)
    run_chain(staged(recipe, output), output, KEEP, spill_nbytes=1 << 30)


def test_results_stay_until_the_output_is_there(recipe: dict[str, Any], output: Path) -> None:
    (merge,) = staged(recipe, output)
    merge = with_stage(merge, gate_stage(merge.sources[0], name="second"), output)
    result = merge.stages[0].layout.nbytes
    written = sum(merge.plan["shards"].column("nbytes").to_pylist())
    taken = {"router-rows": 5 * result, "second": 5 * result}

    def wanted() -> int:
        steps = steps_directory(output)
        return disk_nbytes(
            [merge], lambda _: output, steps, staging_of=lambda each: taken[each.name]
        ).together

    assert wanted() == 2 * result + written
    taken["second"] = 100 * written
    assert wanted() == result + 100 * written
    first, second = (stage.directory for stage in merge.stages)
    (steps_directory(output) / second).mkdir(parents=True)
    assert wanted() == result + written
    (steps_directory(output) / f".{first}.raymerge-0123456789abcdef").mkdir(parents=True)
    assert wanted() == written


def test_results_between_count_too(tmp_path: Path, recipe: dict[str, Any], output: Path) -> None:
    last = {"merge_method": "passthrough", "models": [{"model": "between"}], "name": "last"}
    merges = plan_for([{**recipe, "name": "between"}, last], output)
    written = [sum(merge.plan["shards"].column("nbytes").to_pylist()) for merge in merges]
    steps = steps_directory(output)

    def wanted() -> int:
        places = {"between": steps / "between", "last": output}
        found = disk_nbytes(merges, lambda each: places[str(each.recipe.name)], steps, staging_of=lambda _: 0)
        return found.together

    assert wanted() == sum(written)
    # What is not to go on goes before it is begun anew.
    other = output.with_name(f".{output.name}.raymerge-0123456789abcdef")
    other.mkdir(parents=True)
    with (other / "model.safetensors.unfinished").open("wb") as file:
        file.write(bytes(1 << 14))
        os.fsync(file.fileno())
    assert wanted() <= sum(written) - (1 << 14)
    shutil.rmtree(other)
    (steps / "between").mkdir(parents=True)
    assert wanted() == written[1]


def test_what_units_in_hand_take_goes_by_their_number(recipe: dict[str, Any], output: Path) -> None:
    (merge,) = staged(recipe, output)

    def disk(options: RunOptions) -> int | None:
        lines, _ = stage_lines(merge, options, works=lambda stage: PieceWork(stage, spill_nbytes=1 << 20))
        return lines[0].disk_bytes

    alone = disk(KEEP)
    assert alone is not None
    assert disk(RunOptions(workers=2)) == alone + (1 << 20)
    assert disk(RunOptions(workers=99)) == alone + ((UNITS - 1) << 20)
    assert disk(RunOptions(address="ray://somewhere")) == alone + ((UNITS - 1) << 20)


def _most_taken(work: StageWork, staging: Path, budget: int) -> int:
    """Bytes that the files of a stage take at most, looked at after each layer."""
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, sum(path.stat().st_size for path in staging.rglob("*") if path.is_file()))

    staging.mkdir()
    with torch_threads(1):
        for number in range(work.num_units):
            work.unit(number, staging=staging, device=CPU, budget=budget, tell=look)
        work.conclude(staging)
    look(0)
    return most


@pytest.mark.parametrize(
    ("mode", "unit_tokens", "spills"),
    [
        ("ridge", 20, True),
        ("ridge", 1 << 16, False),
        ("hidden", 20, False),
        ("hidden", 1 << 16, True),
        ("random", 1 << 16, True),
    ],
)
def test_router_rows_take_what_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, unit_tokens: int, *, spills: bool
) -> None:
    monkeypatch.setattr("raymerge.stages.router.prompts.UNIT_TOKENS", unit_tokens)
    work = work_of(stage_of(reading_base(tmp_path / "base"), mode, three_experts()))
    budget = work.least_budget() + (0 if spills else 1 << 30)
    expected = work.staging_nbytes(budget=budget, busy=1)
    most = _most_taken(work, tmp_path / "staging", budget)
    assert 0.7 * expected <= most <= expected
    assert work.staging_nbytes(budget=budget, busy=2) >= expected


def test_aligned_experts_take_their_result(tmp_path: Path) -> None:
    model = make_model(MIXTRAL, 1)
    roots = [
        store(tmp_path / "one", model, MIXTRAL),
        store(tmp_path / "two", moved(model, MIXTRAL, 2), MIXTRAL),
    ]
    models = [
        {"model": {"model": str(root), "override_architecture": "Mixture"}, "parameters": {"weight": 0.5}}
        for root in roots
    ]
    recipe = {"merge_method": "linear", "models": models, "align": "experts"}
    (merge,) = plan_for(recipe, tmp_path / "out")
    (line,), problems = stage_lines(merge, KEEP)
    assert (line.disk_bytes, problems) == (merge.stages[0].layout.nbytes, ())
    pool = InlinePool("cpu")
    pool.start()
    MergeJob([merge], tmp_path / "out", KEEP, on_event=lambda _: None).carry_out(pool)


# How far a unit is


def test_numbers_are_there_while_their_units_are_in_hand(tmp_path: Path) -> None:
    event = threading.Event()
    (tmp_path / "progress-two").write_text("2")
    (tmp_path / "progress-4").write_text("")
    with (
        suppress(ValueError),
        reporting_progress(tmp_path, 0, event) as one,
        reporting_progress(tmp_path, 11, event) as other,
        # What cannot be written is no reason to give up.
        reporting_progress(tmp_path / "absent", 1, event) as nowhere,
    ):
        assert progress_by_unit(tmp_path) == {}
        nowhere(3)
        one(5)
        other(7)
        assert progress_by_unit(tmp_path) == {0: 5, 11: 7}
        raise ValueError("it is odd")
    assert progress_by_unit(tmp_path) == {}


def test_a_unit_that_was_given_up_ends_when_it_next_tells(tmp_path: Path) -> None:
    aborted = threading.Event()
    with reporting_progress(tmp_path, 0, aborted) as tell:
        tell(1)
        aborted.set()
        with pytest.raises(IncompleteError, match="stopped at once"):
            tell(2)


# What a unit leaves


def test_a_file_has_the_digest_of_its_bytes_unless_it_is_absent_or_too_short(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"")
    wanted = {key: xxhash.xxh3_128_hexdigest(data) for key, data in (("a", b"one"), ("b", b""))}
    asked = {"a": (), "b": (), "other": ()}
    assert digests_of(tmp_path, asked) == wanted
    assert digests_of(tmp_path, {"a": (Range(0, 2), Range(2, 2))}) == {}


@given(
    data=st.binary(min_size=1, max_size=60),
    cuts=st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), min_size=1, max_size=4),
    chunk=st.integers(1, 70),
)
@settings(deadline=None, max_examples=20)
def test_ranges_are_digested_one_after_the_other(
    data: bytes, cuts: list[tuple[int, int]], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("files")
    (root / "piece.bin").write_bytes(data)
    spans = [sorted((min(a, len(data)), min(b, len(data)))) for a, b in cuts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "_CHUNK", chunk)
        found = digests_of(root, {"piece.bin": [Range(start, end - start) for start, end in spans]})
    assert found == {"piece.bin": xxhash.xxh3_128_hexdigest(b"".join(data[a:b] for a, b in spans))}
