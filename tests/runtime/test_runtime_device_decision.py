"""``device: auto``: measured once, kept in the run record, and the same device when a run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.merge_cases import Family, digests, merge, recipes

from raymerge.errors import IncompleteError
from raymerge.events import Event, SegmentDone, Started
from raymerge.options import RunOptions
from raymerge.publish.ledger import Ledger
from raymerge.runtime.devices.choice import Choice, GpuError, Probe
from raymerge.runtime.devices.probe import Sample
from raymerge.runtime.driver import run as inline_module
from raymerge.runtime.driver.chained_merges import Chain, settle_device
from raymerge.runtime.driver.run import InlinePool
from raymerge.runtime.workers.pool import Measure
from raymerge.runtime.workers.sizing import WorkerGroupSize

AUTO = RunOptions(inline=True, memory=64 << 20)
SLOW_DISK = Probe(1e6, 1e6, 1e10, 1e10, 1e10, 1e12, "Paper 1")
SLOW_CPU = replace(SLOW_DISK, read=1e12, write=1e12, cpu=1e5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """A machine with a GPU and a slow disk; what is measured is noted."""
    found: list[Sample] = []

    def measure(_: torch.device, sample: Sample, *, threads: int) -> Probe:
        assert threads >= 1
        found.append(sample)
        return SLOW_DISK

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(inline_module, "measure", measure)
    return found


def _record(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "raymerge" / "device.json").read_text())
    return found


def test_a_disk_that_is_the_limit_keeps_the_run_on_the_cpu(
    small: Family, tmp_path: Path, measured: list[Sample]
) -> None:
    merged = merge(recipes(small)["linear"], tmp_path / "deep" / "out", AUTO)
    (started,) = merged.of(Started)
    assert started.device == "cpu"
    assert started.device_reason.endswith("and the GPU would not help")
    record = _record(tmp_path / "deep" / "out")
    assert record["device"] == "cpu"
    assert record["reason"] == started.device_reason
    assert Probe.from_json(record["probe"]) == SLOW_DISK
    (sample,) = measured
    file = Path(sample.root) / sample.key
    assert file.stat().st_size == sample.nbytes
    assert sample.target == str(tmp_path)


def test_without_a_choice_nothing_is_measured_or_recorded(
    small: Family, tmp_path: Path, measured: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(recipes(small)["linear"], tmp_path / "asked", replace(AUTO, device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    merged = merge(recipes(small)["linear"], tmp_path / "plain", AUTO)
    assert merged.of(Started)[0].device_reason == ""
    assert measured == []
    for output in (tmp_path / "asked", tmp_path / "plain"):
        assert not (output / "raymerge" / "device.json").exists()
    assert digests(tmp_path / "asked") == digests(tmp_path / "plain")


def test_a_run_goes_on_where_it_was_begun(
    medium: Family, tmp_path: Path, measured: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun without a GPU; now there is one, and a disk as fast as can be."""
    recipe, output = recipes(medium)["linear"], tmp_path / "out"
    run = InlinePool.run

    def broken(*args: Any) -> Any:
        yield next(receipts for receipts in run(*args) if receipts)
        raise IncompleteError("the power went")

    with monkeypatch.context() as before:
        before.setattr(InlinePool, "run", broken)
        before.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(IncompleteError):
            merge(recipe, output, AUTO)
    merged = merge(recipe, output, AUTO)
    (started,) = merged.of(Started)
    assert started.done_segments >= 1
    assert (started.device, started.device_reason) == ("cpu", "what is there was begun on it")
    assert measured == []
    assert _record(output) == {"device": "cpu", "reason": "what is there was begun on it", "probe": None}


def test_the_first_choice_stays_in_the_record(
    medium: Family, tmp_path: Path, measured: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, output = recipes(medium)["linear"], tmp_path / "out"

    def stop(event: Event) -> None:
        if isinstance(event, SegmentDone):
            raise IncompleteError("the power went")

    from raymerge.api import submit

    with pytest.raises(IncompleteError):
        submit(recipe, output, AUTO, on_event=stop)
    merge(recipe, output, AUTO)
    assert len(measured) == 1
    assert Probe.from_json(_record(output)["probe"]) == SLOW_DISK


def test_a_pool_takes_what_is_chosen(measured: list[Sample]) -> None:
    pool = InlinePool("auto", 3)
    pool.start()
    assert pool.device == "cuda"
    seen: list[object] = []

    def choose(measure: Measure) -> Choice:
        found = measure(Sample("/models", "x", 1, "/out"))
        seen.append((found.probe, found.cpu, found.gpu))
        return Choice("cuda", "because")

    pool.settle(choose)
    assert seen == [(SLOW_DISK, WorkerGroupSize(1, 1), WorkerGroupSize(1, 1))]
    assert (pool.device, pool.choice) == ("cuda", Choice("cuda", "because"))
    assert pool.threads == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_was_named_is_not_chosen(device: Any, measured: list[Sample]) -> None:
    pool = InlinePool(device)
    pool.start()
    pool.settle(lambda _: pytest.fail("there is nothing to choose"))
    assert (pool.device, pool.choice) == (device, None)
    assert pool.threads == 1 or device == "cpu"


def _broken(*_: object, **__: object) -> Probe:
    raise GpuError("CUDA error: all CUDA-capable devices are busy or unavailable")


def test_a_gpu_that_cannot_be_measured_is_not_taken(
    small: Family, tmp_path: Path, measured: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline_module, "measure", _broken)
    output = tmp_path / "out"
    (started,) = merge(recipes(small)["linear"], output, AUTO).of(Started)
    said = "the GPU cannot be measured: CUDA error: all CUDA-capable devices are busy or unavailable"
    assert (started.device, started.device_reason) == ("cpu", said)
    assert _record(output) == {"device": "cpu", "reason": said, "probe": None}


def _with_stage(monkeypatch: pytest.MonkeyPatch) -> list[Choice | None]:
    """A merge with a stage before it, up to where its work would begin; the choices that were made."""
    found: list[Choice | None] = []

    def carry_out(self: Chain, pool: InlinePool) -> None:
        merges = [replace(each, stages=(object(),)) for each in self._merges]  # type: ignore[arg-type]
        settle_device(pool, merges, self._output, ledgers=())
        found.append(pool.choice)
        raise IncompleteError("far enough")

    monkeypatch.setattr(Chain, "carry_out", carry_out)
    return found


@pytest.mark.parametrize("works", [True, False])
def test_stages_take_a_gpu_that_works(
    works: bool, small: Family, tmp_path: Path, measured: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not works:
        monkeypatch.setattr(inline_module, "measure", _broken)
    found = _with_stage(monkeypatch)
    with pytest.raises(IncompleteError, match="far enough"):
        merge(recipes(small)["linear"], tmp_path / "out", AUTO)
    (choice,) = found
    assert choice is not None
    if works:
        reason = "what comes before the merge computes layers of a model"
        assert choice == Choice("cuda", reason, SLOW_DISK)
    else:
        assert choice.device == "cpu"
        assert choice.reason.startswith("the GPU cannot be measured: ")


def test_a_fast_disk_and_a_slow_processor_take_the_gpu(
    small: Family, tmp_path: Path, measured: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only up to the choice: there is no GPU to go on with."""
    monkeypatch.setattr(inline_module, "measure", lambda *_, **__: SLOW_CPU)
    chosen: list[str] = []

    def run(self: InlinePool, *_: object) -> Any:
        chosen.append(self.device)
        raise IncompleteError("far enough")

    monkeypatch.setattr(InlinePool, "run", run)
    with pytest.raises(IncompleteError, match="far enough"):
        merge(recipes(small)["ties"], tmp_path / "out", AUTO)
    assert chosen == ["cuda"]
    (ledger,) = tmp_path.glob(".out.raymerge-*/raymerge/ledger.jsonl")
    assert (Ledger.conditions(ledger) or {})["numerics"]["device"] == "cuda"
    assert json.loads((ledger.parent / "device.json").read_text())["device"] == "cuda"
