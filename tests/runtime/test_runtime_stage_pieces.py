"""What units of real stages left is looked at before it is used: layers of one file, and whole files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from kits.gate_stages import reading_base, stage_of, three_experts
from kits.merge_cases import INLINE, digests
from kits.permuted_experts import MIXTRAL, make_model, moved, store
from kits.stage_maker import with_stage

from raymerge.api import plan_for
from raymerge.errors import IncompleteError
from raymerge.events import Event, StageStarted, UnitDone
from raymerge.planner.chained_merges import PlannedMerge
from raymerge.planner.inputs.source import RESULT_FILE
from raymerge.runtime.driver.chained_merges import Chain, steps_directory
from raymerge.runtime.driver.run import InlinePool


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
    """How a run began, and the units that it did."""
    events: list[Event] = []

    def look(event: Event) -> None:
        events.append(event)
        done = sum(isinstance(each, UnitDone) for each in events)
        if isinstance(event, UnitDone) and done == stop_after:
            signal.raise_signal(signal.SIGINT)

    pool = InlinePool("cpu")
    pool.start()
    chain = Chain([merge], output, INLINE, on_event=look)
    if stop_after:
        with pytest.raises(IncompleteError):
            chain.carry_out(pool)
    else:
        chain.carry_out(pool)
    (started,) = (event for event in events if isinstance(event, StageStarted))
    return started, [event.unit for event in events if isinstance(event, UnitDone)]


def _staging(output: Path) -> Path:
    (found,) = steps_directory(output).glob(".*.raymerge-*")
    return found


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


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
    _flip(_staging(output) / RESULT_FILE, max(_offsets(merge, layer)))
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


def _harm_nothing(staging: Path) -> None:
    del staging


def _harm_rows(staging: Path) -> None:
    _flip(staging / RESULT_FILE, -1)


def _harm_choices(staging: Path) -> None:
    (staging / "choices.safetensors").unlink()


@pytest.mark.parametrize(("harm", "kept"), [(_harm_nothing, 1), (_harm_rows, 0), (_harm_choices, 0)])
def test_router_rows_that_were_lost_are_made_again(tmp_path: Path, harm: Any, kept: int) -> None:
    output = tmp_path / "out"
    merge = _routed(tmp_path, output)
    _run(merge, output, stop_after=1)
    harm(_staging(output))
    started, again = _run(merge, output)
    assert started.done_units == kept
    assert len(again) == 1 - kept
