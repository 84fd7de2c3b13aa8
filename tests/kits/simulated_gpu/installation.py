"""How torch gets a simulated GPU, and loses it again."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.simulated_gpu.gpu import DeviceTensor, Layout, SimulatedGpu, layout_of, never
from kits.simulated_gpu.timeline import DEVICE

_MADE_ON_HOST = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
"""Factories of torch that would resize a tensor to fill it."""
_CUDA, _META = 1, 14
"""Numbers of types of devices in torch."""
_GUARDED_METHODS = 32
"""More than the virtual functions of a guard."""


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")


@contextmanager
def simulated_gpu(seed: int = 0, *, memory_bytes: int = 4 << 30) -> Iterator[SimulatedGpu]:
    """Give torch a GPU, in this process and all of its threads; see the package.

    One at a time, where there is no other GPU."""
    gpu = SimulatedGpu(seed, memory_bytes)
    with ExitStack() as stack:
        stack.enter_context(_device_guard())
        stack.enter_context(_kernels(gpu))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(DeviceTensor, "gpu", gpu)
        _patch_cuda(patch, gpu)
        _patch_accelerator(patch, gpu)
        _patch_pinned_memory(patch, gpu)
        yield gpu
        gpu.fault = never
        gpu.timeline.synchronize()


@contextmanager
def _device_guard() -> Iterator[None]:
    """A guard for the type of device, which torch's C++ asks for the current device.

    That of the meta device does nothing; ours is a copy of it with another current device."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (_META + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    before, meta = registry[_CUDA], ctypes.cast(registry[_META], ctypes.POINTER(ctypes.c_void_p))
    methods = (ctypes.c_void_p * _GUARDED_METHODS)()
    ctypes.memmove(methods, meta[0], ctypes.sizeof(methods))
    # A device is two bytes: type and index.
    current = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(lambda _: _CUDA)
    methods[2] = ctypes.cast(current, ctypes.c_void_p).value
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    registry[_CUDA] = ctypes.addressof(guard)
    try:
        yield
    finally:
        registry[_CUDA] = before


@contextmanager
def _kernels(gpu: SimulatedGpu) -> Iterator[None]:
    """What torch calls for tensors that are made on the GPU, or copied there."""
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, memory_format: Any = None, **options: Any) -> DeviceTensor:
        like = torch.empty(size, dtype=options.get("dtype"), memory_format=memory_format, device="meta")
        return gpu.empty(layout_of(like))

    def empty_strided(size: Any, stride: Any, **options: Any) -> DeviceTensor:
        return gpu.empty(
            Layout(tuple(size), tuple(stride), options.get("dtype") or torch.get_default_dtype())
        )

    with warnings.catch_warnings():
        # Of a build for CUDA, whose kernels they replace.
        warnings.simplefilter("ignore")
        library.impl("empty.memory_format", empty, "CUDA")
        library.impl("empty_strided", empty_strided, "CUDA")
        library.impl("copy_", gpu.copy, "CUDA")
        for name in _MADE_ON_HOST:
            library.impl(name, _made_on_host(getattr(torch.ops.aten, name.partition(".")[0])), "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _made_on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **options: Any) -> torch.Tensor:
        return factory(*args, dtype=options.get("dtype"), device="cpu").to(DEVICE)

    return make


def _patch_cuda(patch: pytest.MonkeyPatch, gpu: SimulatedGpu) -> None:
    timeline = gpu.timeline
    for name, value in {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda _=None: "Simulated GPU",
        "synchronize": timeline.synchronize,
        "Stream": timeline.stream_type,
        "Event": timeline.event_type,
        "stream": timeline.on,
        "current_stream": lambda _=None: timeline.current,
        "default_stream": lambda _=None: timeline.default,
        "set_stream": lambda stream: setattr(timeline, "current", stream),
        "max_memory_allocated": lambda _=None: gpu.peak_bytes,
        "memory_allocated": lambda _=None: gpu.allocated_bytes,
        "mem_get_info": lambda _=None: (gpu.memory_bytes - gpu.allocated_bytes, gpu.memory_bytes),
    }.items():
        patch.setattr(torch.cuda, name, value)


def _patch_accelerator(patch: pytest.MonkeyPatch, gpu: SimulatedGpu) -> None:
    """What ``torch.accelerator`` asks of torch's C++; the rest of it asks ``torch.cuda``."""
    for name, value in {
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_get_accelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_synchronizeDevice": gpu.timeline.synchronize,
        "_accelerator_emptyHostCache": lambda: None,
    }.items():
        patch.setattr(torch._C, name, value)


def _patch_pinned_memory(patch: pytest.MonkeyPatch, gpu: SimulatedGpu) -> None:
    empty = torch.empty

    def maybe_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*size, **options)
        like = empty(*size, **options, device="meta")
        return gpu.pinned(like.nbytes).view(like.dtype).view(like.shape)

    patch.setattr(torch, "empty", maybe_pinned)
    patch.setattr(torch.Tensor, "is_pinned", lambda self: gpu.is_pinned(self))
