"""GPUs as torch offers them: which there are, their memory, streams and events, and what they fail with.

Nothing else in the package names a vendor's module of torch. A build of torch is made for one vendor:
``cuda`` is NVIDIA's, or AMD's in builds for ROCm, and ``xpu`` is Intel's; the two have the same functions."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from raymerge.deferred import torch

_KINDS = ("cuda", "xpu")
"""Not Apple's ``mps``: it has no float64, which sums are made in."""


def find_gpu() -> torch.device | None:
    """The GPU of this process; None if there is none."""
    # In this order: torch 2.6 raises an error where it is built for no GPU.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and device.type in _KINDS else None


def list_gpus() -> tuple[torch.device, ...]:
    gpu = find_gpu()
    return () if gpu is None else tuple(torch.device(gpu.type, i) for i in range(_module(gpu).device_count()))


def name_of(gpu: torch.device) -> str:
    """Raises RuntimeError: the GPU is broken, or another process has it for itself."""
    return str(_module(gpu).get_device_name(gpu))


class Memory(NamedTuple):
    free: int
    total: int


def memory_of(gpu: torch.device) -> Memory:
    return Memory(*_module(gpu).mem_get_info(gpu))


def peak_bytes(device: torch.device) -> int:
    """The most that tensors of this process have taken on a GPU; 0 for a processor."""
    return 0 if device.type == "cpu" else int(_module(device).max_memory_allocated(device))


def build_of_torch() -> str:
    """What torch is built for, such as "CUDA 12.8"; "" for processors alone."""
    versions = {name: getattr(torch.version, name.lower(), None) for name in ("CUDA", "HIP", "XPU")}
    return next(
        (f"{name} {version}".replace("HIP", "ROCm") for name, version in versions.items() if version), ""
    )


def make_stream(gpu: torch.device) -> torch.Stream:
    stream: torch.Stream = _module(gpu).Stream(gpu)
    return stream


def record_event(stream: torch.Stream) -> torch.Event:
    """An event that is reached when what is now on the stream is done."""
    event: torch.Event = _module(stream.device).Event()
    event.record(stream)
    return event


def on_stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    """What is begun within is put on the stream."""
    context: AbstractContextManager[Any] = _module(stream.device).stream(stream)
    return context


def pinned_buffer(nbytes: int) -> torch.Tensor:
    """Page-locked memory, uint8 ``[nbytes]``. torch takes the next power of two for it, and keeps it."""
    # What others have done with would stay beside it. Older versions of torch cannot let go of that, but have
    # the next buffers of a size lie there.
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
    if empty_host_cache is not None:
        empty_host_cache()
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _module(device: torch.device) -> Any:
    """``torch.cuda`` or ``torch.xpu``: ``torch.accelerator`` has no names, and no memory before torch 2.9."""
    return torch.get_device_module(device)


# What GPUs fail with

_FAILURE = re.compile(
    r"\b(?:cuda|hip|xpu) (?:\w+ )?error\b|\b(?:cuda|hip|xpu) out of memory\b"
    r"|\b(?:cu|hip)(?:blas|blaslt|solver|dnn|sparse|fft|rand)(?: error\b| api failed\b|_status_)"
    r"|\bmiopenstatus|\brocblas_status_|\bur_result_error_",
    re.IGNORECASE,
)
"""GPU failures in messages of torch and vendors' libraries whose errors have no type of their own."""
_NO_MEMORY = re.compile(r"out of memory|_status_alloc_failed\b|_out_of_device_memory\b", re.IGNORECASE)


class DeviceError(RuntimeError):
    """A device cannot be used at all."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    note: str
    is_lasting: bool
    """Whether it will fail again; memory may be free again later."""


def failure_of(error: Exception) -> DeviceFailure | None:
    """The GPU failure behind an error; None if there is none.

    torch has error types for GPUs (from 2.8 on) and for memory. Libraries of linear algebra raise plain
    RuntimeErrors, as program defects do."""
    kinds = (DeviceError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", DeviceError))
    message = str(error)
    if not isinstance(error, kinds) and not (isinstance(error, RuntimeError) and _FAILURE.search(message)):
        return None
    line = (message.strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(message):
        return DeviceFailure(f"the GPU has too little memory: {line}", is_lasting=False)
    return DeviceFailure(f"the GPU failed: {line}", is_lasting=True)
