"""GPUs as torch offers them, of any vendor. What torch has of them is stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from raymerge import devices
from raymerge.devices import DeviceError, failure_of

MEMORY, FAILED = "the GPU has too little memory: ", "the GPU failed: "


class _Module:
    """What ``torch.cuda`` and ``torch.xpu`` both have."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def device_count(self) -> int:
        return 2

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: torch.device) -> str:
        return f"Paper {device.index}"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 70 + device.index, 80

    def max_memory_allocated(self, device: torch.device) -> int:
        return 7 + device.index

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(device=device)

    def Event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: self.log.append(f"recorded on {stream.device}"))

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.log.append(f"on {stream.device}")
        yield


def _build(monkeypatch: pytest.MonkeyPatch, kind: str | None, *, is_available: bool = True) -> _Module:
    """Make torch one that is built for some kind of GPU."""
    module = _Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: {kind: module}[device.type])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None and is_available)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device(kind) if kind else None
    )
    return module


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_gpus_of_any_vendor_are_asked_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _build(monkeypatch, kind)
    assert devices.find_gpu() == torch.device(kind)
    first, second = devices.list_gpus()
    assert (first, second) == (torch.device(kind, 0), torch.device(kind, 1))
    assert (devices.name_of(second), devices.memory_of(second), devices.peak_bytes(second)) == (
        "Paper 1",
        (71, 80),
        8,
    )
    stream = devices.make_stream(second)
    with devices.on_stream(stream):
        devices.record_event(stream)
    assert module.log == [f"on {kind}:1", f"recorded on {kind}:1"]


def test_a_processor_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.peak_bytes(torch.device("cpu")) == 0
    for kind, is_available in ((None, True), ("cuda", False), ("mps", True)):
        _build(monkeypatch, kind, is_available=is_available)
        assert devices.find_gpu() is None
        assert devices.list_gpus() == ()


@pytest.mark.parametrize(
    ("versions", "build"),
    [
        ((None, None, None), ""),
        (("12.8", None, None), "CUDA 12.8"),
        ((None, "6.4", None), "ROCm 6.4"),
        ((None, None, "20250101"), "XPU 20250101"),
    ],
)
def test_what_torch_is_built_for(
    versions: tuple[str | None, ...], build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in zip(("cuda", "hip", "xpu"), versions, strict=True):
        monkeypatch.setattr(torch.version, name, version, raising=False)
    assert devices.build_of_torch() == build


# What GPUs fail with


def _accelerator_error(said: str) -> Exception:
    kind: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
    error = kind.__new__(kind)
    error.args = (said,)
    return error


@pytest.mark.parametrize(
    ("error", "note", "is_lasting"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried.\nGPU 0"),
            MEMORY + "CUDA out of memory. Tried.",
            False,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            MEMORY + "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            False,
        ),
        (_accelerator_error("an illegal access"), FAILED + "an illegal access", True),
        (RuntimeError("CUDA error: unknown error"), FAILED + "CUDA error: unknown error", True),
        (
            RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevd()`"),
            FAILED + "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnXsyevd()`",
            True,
        ),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
            FAILED + "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
            True,
        ),
        (
            torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2 GiB."),
            MEMORY + "XPU out of memory. Tried to allocate 2 GiB.",
            False,
        ),
        (
            RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
            MEMORY + "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            False,
        ),
        (
            RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
            FAILED + "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
            True,
        ),
        (
            RuntimeError("HIP error: invalid device function\nHIP kernel errors might be"),
            FAILED + "HIP error: invalid device function",
            True,
        ),
        (
            RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
            MEMORY + "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
            False,
        ),
        (RuntimeError("miopenStatusUnknownError"), FAILED + "miopenStatusUnknownError", True),
        (DeviceError("Found no driver"), FAILED + "Found no driver", True),
    ],
)
def test_what_a_gpu_fails_with(error: Exception, note: str, is_lasting: bool) -> None:
    failure = failure_of(error)
    assert failure is not None
    assert (failure.note, failure.is_lasting) == (note, is_lasting)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Expected all tensors to be on the same device, found at least two, cuda:0 and cpu!"),
        torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge"),
        ValueError("CUDA error: in a name"),
    ],
)
def test_what_is_not_the_gpu_s_fault(error: Exception) -> None:
    assert failure_of(error) is None
