"""Runs of ``raymerge calibrate``: any workers, and stops in between, leave the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kits.calibrations import reading_model, write_text

import raymerge
from raymerge.errors import IncompleteError, TargetError
from raymerge.events import Event, UnitDone
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import RESULT_FILE
from raymerge.stages.calibration import blocks

INLINE = RunOptions(inline=True)
LENGTH = 60


def test_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "UNIT_TOKENS", 2 * LENGTH)
    reading_model(tmp_path / "model", "olmoe")
    text = write_text(tmp_path / "text.txt", 6 * LENGTH)
    measure: Any = partial(raymerge.calibrate, tmp_path / "model", length=LENGTH)
    measure([text], tmp_path / "whole", INLINE)

    def end(event: Event) -> None:
        if isinstance(event, UnitDone):
            raise IncompleteError("as after kill -9")

    with pytest.raises(IncompleteError):
        measure([text], tmp_path / "stopped", INLINE, on_event=end)
    events: list[Event] = []
    measure([text], tmp_path / "stopped", INLINE, on_event=events.append)
    assert [event.unit for event in events if isinstance(event, UnitDone)] == [1, 2]
    assert _result(tmp_path / "stopped") == _result(tmp_path / "whole")
    other = write_text(tmp_path / "other.txt", LENGTH, seed=8)
    with pytest.raises(TargetError, match="holds other statistics"):
        measure([other], tmp_path / "whole", INLINE)
    with pytest.raises(TargetError, match="holds no statistics"):
        measure([text], tmp_path / "model", INLINE)


@pytest.mark.slow
@pytest.mark.ray
def test_workers_and_a_kill_change_no_byte(tmp_path: Path, ray_cluster: Any) -> None:
    del ray_cluster
    model = reading_model(tmp_path / "model", "qwen3_moe").checkpoint.root
    text = write_text(tmp_path / "text.txt", 3 * blocks.UNIT_TOKENS)
    raymerge.calibrate(model, [text], tmp_path / "one", INLINE, length=LENGTH)
    raymerge.calibrate(model, [text], tmp_path / "two", RunOptions(workers=2), length=LENGTH)
    command = [sys.executable, "-m", "raymerge.cli", "calibrate", model, "--texts", str(text), "--inline"]
    command += ["--length", str(LENGTH), "-o", str(tmp_path / "killed"), "--json"]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if '"unit_done"' in line)
        process.kill()
    assert not (tmp_path / "killed" / RESULT_FILE).exists()
    raymerge.calibrate(model, [text], tmp_path / "killed", INLINE, length=LENGTH)
    assert _result(tmp_path / "one") == _result(tmp_path / "two") == _result(tmp_path / "killed")


def _result(place: Path) -> bytes:
    return (place / RESULT_FILE).read_bytes()
