"""The device of a worker, and what is said where a GPU cannot be used."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from kits.gpu_arithmetic import multiply_in_tf32

from raymerge.device_numerics import choose_device, full_float32, kernels_of, numerics_of
from raymerge.errors import OptionError, first_line
from raymerge.runtime.workers.pool import InlinePool
from raymerge.runtime.workers.worker import MergeWorker

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "works", "device"),
    [
        ("auto", False, True, CPU),
        ("cpu", True, True, CPU),
        ("auto", True, True, GPU),
        ("auto", True, False, CPU),
        ("cuda", True, False, GPU),
    ],
)
def test_the_device_is_what_is_wanted_and_works(
    wanted: str, has_gpu: bool, works: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: torch.device) -> None:
        if not works:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: GPU if has_gpu else None)
    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", check)
    assert choose_device(wanted) == device  # type: ignore[arg-type]


def test_a_worker_keeps_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: torch.device("cuda"))
    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", lambda _: None)
    with full_float32():
        worker = MergeWorker("worker-0", "auto")
    torch.set_num_threads(before)
    assert worker._device == GPU
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: None)
    assert worker._device == GPU


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.devices.find_gpu", lambda: None)
    with pytest.raises(OptionError, match=r"--device: cuda was asked for, but no GPU is visible here\."):
        choose_device("cuda")


def test_a_gpu_that_cannot_be_used_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> str:
        raise RuntimeError("CUDA error: all devices are busy.\nCUDA kernel errors might be ...")

    monkeypatch.setattr("raymerge.devices.name_of", fail)
    said = (
        r"^--device: cuda cannot be used here: CUDA error: all devices are busy\. "
        r"Look at nvidia-smi, or give --device cpu\.$"
    )
    with pytest.raises(OptionError, match=said):
        kernels_of(GPU)


def test_kernels_go_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.devices.name_of", lambda _: "Paper 1")
    assert kernels_of(GPU)["processor"] == "Paper 1"
    assert kernels_of(CPU)["processor"] == torch.backends.cpu.get_cpu_capability()


def test_numerics_say_that_float32_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert numerics_of(CPU) == {"device": "cpu", "torch": torch.__version__, "float32": "full"}
    multiply_in_tf32(monkeypatch, is_forced=True)
    with pytest.raises(OptionError, match="not multiplied with all of their bits"):
        numerics_of(CPU)


def test_numerics_of_a_gpu_that_fails_are_left_to_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        if device.type == "cuda":
            raise RuntimeError("CUDA error: all devices are busy.")

    monkeypatch.setattr("raymerge.device_numerics.check_full_float32", fail)
    assert numerics_of(GPU)["device"] == "cuda"


def test_the_processor_that_stands_in_for_a_gpu_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_tf32(monkeypatch, is_forced=True)
    with pytest.raises(OptionError, match="on this processor"):
        numerics_of(GPU)


def test_every_worker_computes_float32_in_full() -> None:
    before = torch.get_num_threads()
    with full_float32():
        torch.set_float32_matmul_precision("medium")
        MergeWorker("worker-0", "cpu")
        assert torch.get_float32_matmul_precision() == "highest"
        torch.set_float32_matmul_precision("medium")
        with closing(InlinePool("cpu")) as pool:
            pool.start()
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "line"), [("one.\ntwo", "one"), ("", "ValueError"), ("\n  one \n", "one"), ("a.b", "a.b")]
)
def test_errors_in_short(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
