"""The device of a worker, and what is said where a GPU cannot be used."""

from __future__ import annotations

import pytest
import torch

from raymerge.errors import OptionError
from raymerge.runtime.devices import choose_device, first_line, kernels_of, numerics_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "device"),
    [("auto", False, CPU), ("cpu", True, CPU), ("auto", True, GPU), ("cuda", True, GPU)],
)
def test_the_device_is_what_is_wanted_and_there(
    wanted: str, has_gpu: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device(wanted) == device  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"--device: cuda was asked for, but no GPU is visible here\."):
        choose_device("cuda")


def test_a_gpu_that_cannot_be_used_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> str:
        raise RuntimeError("CUDA error: all devices are busy.\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    said = (
        r"^--device: cuda cannot be used here: CUDA error: all devices are busy\. "
        r"Look at nvidia-smi, or give --device cpu\.$"
    )
    with pytest.raises(OptionError, match=said):
        kernels_of(GPU)


def test_kernels_go_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Paper 1")
    assert kernels_of(GPU)["processor"] == "Paper 1"
    assert kernels_of(CPU)["processor"] == torch.backends.cpu.get_cpu_capability()
    assert numerics_of(GPU) == {"device": "cuda", "torch": torch.__version__}


@pytest.mark.parametrize(
    ("text", "line"), [("one.\ntwo", "one"), ("", "ValueError"), ("\n  one \n", "one"), ("a.b", "a.b")]
)
def test_errors_in_short(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
