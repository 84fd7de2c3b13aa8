"""``device: auto``: a rule on what is to be computed, and the same device when a run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.merge_cases import Family, digests, merge, recipes
from kits.stage_maker import gate_stage

from raymerge.api import plan_for
from raymerge.device_numerics import DeviceChoice
from raymerge.errors import IncompleteError, TargetError
from raymerge.events import Started
from raymerge.options import RunOptions
from raymerge.publish.record import Ledger
from raymerge.runtime.driver.chained_merges import device_for
from raymerge.runtime.workers.pool import InlinePool

AUTO = RunOptions(inline=True, memory=64 << 20)
BEGUN = "what is there was begun on it"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: torch.device("cuda"))
    monkeypatch.setattr("raymerge.devices.list_gpus", lambda: [torch.device("cuda")] * 1)
    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", lambda _: None)


@pytest.mark.parametrize(
    ("method", "choice"),
    [
        ("linear", DeviceChoice("cpu", "storage limits this merge, and a GPU would not help")),
        ("iso_c", DeviceChoice("cuda", "iso_c decomposes matrices")),
    ],
)
def test_a_gpu_is_for_decompositions(
    method: str, choice: DeviceChoice, small: Family, tmp_path: Path
) -> None:
    recipe = {**recipes(small)["task_arithmetic"], "merge_method": method}
    if method == "linear":
        recipe = recipes(small)[method]
    merges = plan_for(recipe, tmp_path / "out", AUTO)
    assert device_for(merges, ()) == choice


def test_a_gpu_is_for_stages(small: Family, tmp_path: Path) -> None:
    merges = plan_for(recipes(small)["linear"], tmp_path / "out", AUTO)
    stage = gate_stage(merges[0].sources[0])
    assert device_for([replace(each, stages=(stage,)) for each in merges], ()).device == "cuda"


def test_a_run_tells_why(small: Family, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes(small)["linear"]
    (chosen,) = merge(recipe, tmp_path / "auto", AUTO).of(Started)
    (named,) = merge(recipe, tmp_path / "named", replace(AUTO, device="cpu")).of(Started)
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: None)
    (lone,) = merge(recipe, tmp_path / "lone", AUTO).of(Started)
    assert [each.device for each in (chosen, named, lone)] == ["cpu"] * 3
    assert chosen.device_reason.startswith("storage limits this merge")
    assert (named.device_reason, lone.device_reason) == ("", "")
    assert digests(tmp_path / "auto") == digests(tmp_path / "named") == digests(tmp_path / "lone")


@pytest.mark.parametrize(("begun", "chosen"), [("cpu", "cpu"), ("cuda", "cuda")])
def test_a_run_goes_on_where_it_was_begun(
    begun: Any, chosen: str, small: Family, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device that it was begun on, though the rule has none or the other."""
    recipe, output, seen = recipes(small)["linear"], tmp_path / "out", []

    def run(self: InlinePool, *_: object) -> Any:
        seen.append((self.device, self.device_reason))
        raise IncompleteError("far enough")

    monkeypatch.setattr(InlinePool, "run", run)
    for device in (begun, "auto"):
        with pytest.raises(IncompleteError, match="far enough"):
            merge(recipe, output, replace(AUTO, device=device))
    assert seen == [(begun, ""), (chosen, BEGUN)]
    (ledger,) = tmp_path.glob(".out.raymerge-*/raymerge/ledger.jsonl")
    assert (Ledger.conditions(ledger) or {})["numerics"]["device"] == chosen


def test_a_place_that_cannot_be_looked_at_is_refused_as_such(
    small: Family, tmp_path: Path, gpu: None
) -> None:
    with pytest.raises(TargetError):
        merge(recipes(small)["linear"], tmp_path / ("x" * 250), AUTO)


@pytest.mark.parametrize(
    ("works", "device", "reason"),
    [(True, "cuda", "because"), (False, "cpu", "no GPU works where workers look for one")],
)
def test_a_gpu_that_does_not_work_is_not_taken(
    works: bool, device: str, reason: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    if not works:
        monkeypatch.setattr("raymerge.device_numerics.check_full_float32", fail)
    pool = InlinePool("auto", 3)
    pool.start()
    pool.settle(lambda: DeviceChoice("cuda", "because"))
    assert (pool.device, pool.device_reason, pool.threads) == (device, reason, 3)
    pool.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_was_named_is_not_chosen(device: Any, gpu: None) -> None:
    pool = InlinePool(device)
    pool.start()
    pool.settle(lambda: pytest.fail("there is nothing to choose"))
    assert (pool.device, pool.device_reason) == (device, "")
    assert pool.threads == 1 or device == "cpu"
    pool.close()
