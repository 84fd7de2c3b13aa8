"""The probe: on a GPU of paper its figures are what the clock says, and nothing that it does stays behind."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raymerge.methods import Stored
from raymerge.methods.linear import LinearKernel
from raymerge.runtime.devices import probe as device_probe
from raymerge.runtime.devices.choice import Choice, GpuError
from raymerge.runtime.devices.probe import Sample, measure
from raymerge.storage.local.store import LocalStore


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
    assert probe.read is not None
    assert 1e6 < probe.read < 1e13
    assert probe.write is not None
    assert 1e4 < probe.write < 1e13
    assert 1e6 < probe.cpu < 1e13
    assert torch.get_num_threads() == threads
    assert os.listdir(sample.target) == []


def test_storage_that_cannot_be_measured_is_unknown_and_no_error(sample: Sample, tmp_path: Path) -> None:
    gone = Sample(sample.root, "absent.bin", 100, str(tmp_path / "model.bin"))
    probe = measure(torch.device("cpu"), gone, threads=1)
    assert (probe.read, probe.write) == (None, None)


def test_little_is_written_and_nothing_reserved(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def write(store: LocalStore, key: str, nbytes: int) -> float:
        assert str(store.root) == sample.target
        assert key.startswith(".raymerge-probe-")
        written.append(nbytes)
        return 1.0

    monkeypatch.setattr(device_probe, "measure_write", write)
    assert measure(torch.device("cpu"), sample, threads=1).write == 1.0
    assert written == [256 << 20]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: device busy\nCompile with ..."), "CUDA error: device busy"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "CUDA out of memory. Tried to"),
        (RuntimeError(""), "RuntimeError"),
    ],
)
@pytest.mark.parametrize("place", ["synchronize", "get_device_name"])
def test_a_gpu_that_fails_cannot_be_measured(
    error: Exception, said: str, place: str, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, place, fail)
    with pytest.raises(GpuError) as caught:
        measure(torch.device("cpu"), sample, threads=1)
    assert str(caught.value) == said
    # It comes from a worker, whose errors travel pickled.
    assert str(pickle.loads(pickle.dumps(caught.value))) == said
    assert caught.value.choice() == Choice("cpu", f"the GPU cannot be measured: {said}")


def test_what_is_timed_is_what_merges_do() -> None:
    """On processors the loop over bfloat16 as it is stored, on GPUs the method between two conversions."""
    sources = torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.0, -8.0]], dtype=torch.bfloat16)
    found = device_probe._combined(sources)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.5, 1.0]
    words = sources.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    out = np.zeros(2, np.uint16)
    device_probe._combine_stored(Stored(words, np.array([0, 2, 4]), 2, 0), out)
    assert torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).tolist() == [1.5, 1.0]


def test_processors_are_timed_with_the_loop_over_stored_tiles(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles: list[Stored] = []
    whole = LinearKernel.apply_stored

    def apply(kernel: LinearKernel, stored: Stored, *rest: Any) -> bool:
        tiles.append(stored)
        return whole(kernel, stored, *rest)

    monkeypatch.setattr(LinearKernel, "apply_stored", apply)
    measure(torch.device("cpu"), sample, threads=2)
    assert {(len(each.places), each.count) for each in tiles} == {(3, 1 << 20)}
    # Each thread has a tile of its own.
    assert len({each.words.ctypes.data for each in tiles}) == 2
