"""A merge of adapters is a run like any other: resumed, replaced, stopped, on any number of workers."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_merges import adapter, recipe

from raymerge import api
from raymerge.api import merge_adapters
from raymerge.errors import CheckpointError, IncompleteError, OptionError, TargetError
from raymerge.events import Event, OnEvent, Published, StageStarted, UnitDone, UnitProgress, WorkerProgress
from raymerge.lora import combine
from raymerge.options import RunOptions
from raymerge.publish.lease import StopRequest, myself
from raymerge.runtime.workers.pool import InlinePool, Receipts, Stop, Work

FILES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Adapters in ``in``, whose merge has a unit for each of three modules."""
    monkeypatch.setattr(combine, "_UNIT_BYTES", 0)
    return [adapter(tmp_path / "in" / str(seed), seed) for seed in range(2)]


def _weights(root: Path) -> bytes:
    assert sorted(path.name for path in root.iterdir()) == FILES
    return (root / "adapter_model.safetensors").read_bytes()


def _merge(roots: Sequence[Path], out: Path | str, *, stop_after: int = 9, **options: Any) -> list[Event]:
    """The events of a merge, which ends as if killed after so many units."""
    events: list[Event] = []

    def take(event: Event) -> None:
        events.append(event)
        if sum(isinstance(each, UnitDone) for each in events) == stop_after:
            raise IncompleteError("as after kill -9")

    merge_adapters(recipe("ties", roots), out, RunOptions(**{"threads": 1, **options}), on_event=take)
    return events


def _break_off(roots: Sequence[Path], out: Path, **options: Any) -> None:
    with pytest.raises(IncompleteError):
        _merge(roots, out, stop_after=1, **options)
    assert not out.exists()


def _beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith("."))


def test_a_killed_merge_goes_on_with_the_same_bytes(roots: list[Path], tmp_path: Path) -> None:
    whole = _merge(roots, tmp_path / "whole")
    steps = [type(event) for event in whole if not isinstance(event, UnitProgress | WorkerProgress)]
    assert steps == [StageStarted, *[UnitDone] * 3, Published]
    out = tmp_path / "out"
    _break_off(roots, out)
    (staging,) = tmp_path.glob(".out.raymerge-*")
    events = [each for each in _merge(roots, out) if isinstance(each, StageStarted)]
    assert [(each.done_units, each.units) for each in events] == [(1, 3)]
    assert _weights(out) == _weights(tmp_path / "whole")
    assert not staging.exists()
    assert _beside(out) == []


def test_what_a_crash_left_half_written_is_made_again(roots: list[Path], tmp_path: Path) -> None:
    _break_off(roots, tmp_path / "out")
    (staging,) = tmp_path.glob(".out.raymerge-*")
    (data,) = staging.glob("units-*/unit-*.data")
    data.write_bytes(bytes(data.stat().st_size))
    (started, *_) = _merge(roots, tmp_path / "out")
    assert isinstance(started, StageStarted)
    assert started.done_units == 0
    _merge(roots, tmp_path / "whole")
    assert _weights(tmp_path / "out") == _weights(tmp_path / "whole")


class ThreeWorkers(InlinePool):
    """Workers that take turns, and have the work as it travels."""

    def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
        del stop
        runners = [pickle.loads(pickle.dumps(work)).open(self._device, f"worker-{n}") for n in range(3)]
        for number, runner in zip(numbers, itertools.cycle(runners), strict=False):
            yield (runner.run(number),)


def test_three_workers_make_the_bytes_of_one(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _merge(roots, tmp_path / "one")
    asked: list[RunOptions] = []

    def pool(options: RunOptions, emit: OnEvent, *, parts: int) -> ThreeWorkers:
        assert parts == 3
        asked.append(options)
        return ThreeWorkers("cpu", 1, on_event=emit)

    monkeypatch.setattr(api, "_pool", pool)
    events = _merge(roots, tmp_path / "three", workers=3)
    assert {each.worker for each in events if isinstance(each, UnitDone)} == {f"worker-{n}" for n in range(3)}
    assert [(each.workers, each.inline) for each in asked] == [(3, None)]
    assert _weights(tmp_path / "three") == _weights(tmp_path / "one")


def test_a_worker_that_was_given_up_writes_nothing_for_the_next_run(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Work] = []

    class Pool(InlinePool):
        def run(self, work: Work, numbers: Sequence[int], stop: Stop) -> Generator[Receipts, None, None]:
            works.append(work)
            return super().run(work, numbers, stop)

    monkeypatch.setattr(api, "_pool", lambda *_, **__: Pool("cpu", 1))
    out = tmp_path / "out"
    _break_off(roots, out)
    (staging,) = tmp_path.glob(".out.raymerge-*")
    record = staging / "raymerge" / "ledger.jsonl"
    lines = record.read_text().splitlines()
    record.write_text(lines[0].replace('"cpu"', '"cuda"') + "\n")
    with pytest.raises(TargetError, match=r'numerics > device was "cuda", is "cpu"'):
        _merge(roots, out)
    with pytest.raises(IncompleteError):
        _merge(roots, out, stop_after=1, replace=True)
    before, after = works
    assert before.place != after.place
    with contextlib.closing(before.open(torch.device("cpu"), "lost")) as lost:
        with pytest.raises(IncompleteError, match="no longer the run that the worker writes for"):
            lost.run(0)
        _merge(roots, out)
        with pytest.raises(IncompleteError, match="no longer the run that the worker writes for"):
            lost.run(0)
    assert _beside(out) == []


@pytest.mark.slow
@pytest.mark.ray
def test_workers_of_ray_make_the_same_bytes(roots: list[Path], tmp_path: Path, ray_cluster: Any) -> None:
    del ray_cluster
    _merge(roots, tmp_path / "one")
    events = _merge(roots, tmp_path / "two", workers=2, memory=16 << 20)
    assert {each.worker for each in events if isinstance(each, UnitDone)} <= {"worker-0", "worker-1"}
    assert _weights(tmp_path / "two") == _weights(tmp_path / "one")


def test_an_unfinished_merge_of_another_recipe_is_discarded_on_demand_alone(
    roots: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _break_off(roots, out)
    with pytest.raises(
        TargetError, match=r"an unfinished run is in .*recipe > models > 3 > model was absent.*--replace"
    ):
        _merge([*roots, roots[0]], out)
    assert len(_beside(out)) == 1
    _merge([*roots, roots[0]], out, replace=True)
    assert _beside(out) == []


def test_an_adapter_alone_is_replaced_once_the_new_one_is_made(roots: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    _merge(roots[:1] * 2, out)
    before = _weights(out)
    with pytest.raises(TargetError, match="this directory is not empty"):
        _merge(roots, out)
    with pytest.raises(IncompleteError):
        _merge(roots, out, stop_after=2, replace=True)
    assert _weights(out) == before
    _merge(roots, out, replace=True)
    assert _weights(out) != before
    assert _beside(out) == []
    (out / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match=r"no part of the adapter, such as notes\.txt"):
        _merge(roots, out, replace=True)
    (out / FILES[0]).unlink()
    with pytest.raises(TargetError, match="no adapter is there to replace"):
        _merge(roots, out, replace=True)
    assert sorted(path.name for path in out.iterdir()) == [FILES[1], "notes.txt"]


def test_no_source_is_replaced(roots: list[Path]) -> None:
    before = _weights(roots[0])
    for out in (roots[0], roots[0].parent, roots[0] / "deep"):
        with pytest.raises(TargetError, match=r"the output place (is|holds|lies inside) the source"):
            _merge(roots, out, replace=True)
    assert _weights(roots[0]) == before


def test_a_source_that_changes_meanwhile_is_an_error(roots: list[Path], tmp_path: Path) -> None:
    def touch(event: Event) -> None:
        if isinstance(event, UnitDone):
            os.utime(roots[0] / FILES[1], ns=(1, 1))

    with pytest.raises(CheckpointError, match="the file was changed while it was merged"):
        merge_adapters(recipe("ties", roots), tmp_path / "out", on_event=touch)
    assert not (tmp_path / "out").exists()


def test_a_request_to_stop_is_heeded(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymerge.publish.lease._ASK_SECONDS", 0.0)
    StopRequest(tmp_path / "out").make(myself(""))
    with pytest.raises(IncompleteError, match=r"stopped with \d of 3 units done of: the merge of 2 adapters"):
        _merge(roots, tmp_path / "out")
    _merge(roots, tmp_path / "out")


def test_options_are_those_of_any_run(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: None)
    with pytest.raises(OptionError, match="cuda"):
        _merge(roots, tmp_path / "out", device="cuda")
    with pytest.raises(OptionError, match="are free here"):
        _merge(roots, tmp_path / "out", memory=1 << 60)
    with pytest.raises(OptionError, match="written to a directory of this machine"):
        _merge(roots, "s3://bucket/out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
