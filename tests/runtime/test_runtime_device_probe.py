"""The probe: on a GPU of paper its figures are what the clock says, and nothing that it does stays behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from raymerge.runtime import device_probe
from raymerge.runtime.device_probe import Sample, measure


class PaperEvent:
    """Time on a GPU: two milliseconds pass from one event to the next."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Nothing to record."""

    def elapsed_time(self, later: PaperEvent) -> float:
        """Milliseconds."""
        assert later is not self
        return 6.0


@pytest.fixture(autouse=True)
def _paper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", PaperEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Paper 1")


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    (tmp_path / "out").mkdir()
    (tmp_path / "model.bin").write_bytes(os.urandom(3 << 20))
    return Sample(str(tmp_path), "model.bin", 3 << 20, str(tmp_path / "out"))


def test_speeds_are_bytes_over_the_gpus_own_time(sample: Sample) -> None:
    threads = torch.get_num_threads()
    probe = measure(torch.device("cpu"), sample, threads=2)
    assert probe.to_device == probe.from_device == pytest.approx((64 << 20) / 0.002)
    assert probe.gpu == pytest.approx(3 * 2 * (1 << 22) / 0.002)
    assert probe.name == "Paper 1"
    assert 1e6 < probe.read < 1e13
    assert 1e4 < probe.write < 1e13
    assert 1e6 < probe.cpu < 1e13
    assert torch.get_num_threads() == threads
    assert os.listdir(sample.target) == []


def test_storage_that_cannot_be_measured_is_no_limit_and_no_error(sample: Sample, tmp_path: Path) -> None:
    gone = Sample(sample.root, "absent.bin", 100, str(tmp_path / "model.bin"))
    probe = measure(torch.device("cpu"), gone, threads=1)
    assert probe.read == probe.write == 1e12


def test_what_is_timed_is_a_merge() -> None:
    sources = torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.0, -8.0]], dtype=torch.bfloat16)
    found = device_probe._combine(sources)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.5, 1.0]
