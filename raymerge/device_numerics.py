"""Devices that torch computes on: which, with all bits of float32, and the processor where a GPU fails."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch

from raymerge.errors import OptionError, Problem, first_line

T = TypeVar("T")

_PROCESSOR = torch.device("cpu")

_OPERATIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""What has a precision of its own, from torch 2.9 on."""
_PRODUCT_SIZE = 256
"""Of matrices that the libraries would take the short way with."""

_FAILURE = re.compile(
    r"\bcuda (?:\w+ )?error\b|\bcuda out of memory\b"
    r"|\bcu(?:blas|blaslt|solver|dnn|sparse|fft|rand)(?: error\b| api failed\b|_status_)",
    re.IGNORECASE,
)
"""What torch and NVIDIA's libraries say where a GPU fails, in errors that have no kind of their own."""
_NO_MEMORY = re.compile(r"out of memory|_status_alloc_failed\b", re.IGNORECASE)


def divisor(number: float, like: torch.Tensor) -> torch.Tensor:
    """A number to divide a tensor by: of a plain one, a GPU would take the reciprocal, and round twice."""
    return torch.full((), number, dtype=like.dtype, device=like.device)


def return_free_memory() -> None:
    """Have the C library return what it holds on to, where it can do that (glibc).

    What large tensors leave is often too small for the next, and without a word the process grows by several
    of them though only one lives.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Which device


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The kind of device for a run that leaves it open."""

    device: Literal["cpu", "cuda"]
    reason: str


NO_GPU_WORKS = DeviceChoice("cpu", "no GPU works where workers look for one")


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device that a worker in this process uses; ``auto`` takes a GPU that works.

    Raises:
        OptionError: a GPU is asked for and this process sees none; or it does not multiply float32 numbers
            with all of their bits.
    """
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise OptionError(
            Problem(
                "--device", "cuda was asked for, but no GPU is visible here.", "Use --device auto or cpu."
            )
        )
    is_taken = has_gpu and (device == "cuda" or _works(torch.device("cuda")))
    return torch.device("cuda" if is_taken else "cpu")


def _works(gpu: torch.device) -> bool:
    try:
        check_full_float32(gpu)
    except (RuntimeError, AssertionError):
        return False
    return True


def numerics_of(device: torch.device) -> dict[str, str]:
    """What the bytes of a merge may depend on beside the plan.

    Raises:
        OptionError: the device, or the processor that stands in for it, does not multiply float32 numbers
            with all of their bits.
    """
    check_full_float32(torch.device("cpu"))
    # A GPU that fails here is checked again by whoever computes, before it is used.
    with suppress(RuntimeError, AssertionError):
        check_full_float32(device)
    return {"device": device.type, "torch": torch.__version__, "float32": "full"}


def kernels_of(device: torch.device) -> dict[str, str]:
    """What the bytes of a stage's result may depend on beside ``numerics_of``.

    Layers of a model are computed by transformers, with matrix products whose order of additions the
    libraries choose by the processor.

    Raises:
        OptionError: the GPU is broken, or another process has it for itself.
    """
    if device.type == "cuda":
        processor = _gpu_name(device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    return {"transformers": version("transformers"), "processor": processor}


def _gpu_name(device: torch.device) -> str:
    try:
        return torch.cuda.get_device_name(device)
    except RuntimeError as error:
        what = f"cuda cannot be used here: {first_line(error)}."
        raise OptionError(Problem("--device", what, "Look at nvidia-smi, or give --device cpu.")) from error


# Full float32


def set_full_float32() -> None:
    """Have this process multiply float32 numbers with all of their bits, on GPUs and on processors."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for operation in _operations():
        operation.fp32_precision = "ieee"


@contextmanager
def full_float32() -> Iterator[None]:
    """The same for as long as this lasts, in a process that belongs to others."""
    cudnn = torch.backends.cudnn
    in_all, in_cudnn = _read(torch.get_float32_matmul_precision), _read(lambda: cudnn.allow_tf32)
    before = [(operation, operation.fp32_precision) for operation in _operations()]
    set_full_float32()
    try:
        yield
    finally:
        if in_all is not None:
            torch.set_float32_matmul_precision(in_all)
        if in_cudnn is not None:
            cudnn.allow_tf32 = in_cudnn
        for operation, precision in before:
            operation.fp32_precision = precision


def check_full_float32(device: torch.device) -> None:
    """Find out by a product whether float32 numbers are multiplied with all of their bits.

    Environment variables of the libraries are stronger than torch's settings, and torch does not know them.

    Raises:
        OptionError: they are not.
        RuntimeError: a GPU failed, or has too little memory.
    """
    last_bits = torch.arange(_PRODUCT_SIZE**2, dtype=torch.float64, device=device).mul_(2.0**-23)
    values = last_bits.add_(1.0).float().view(_PRODUCT_SIZE, _PRODUCT_SIZE)
    one = torch.eye(_PRODUCT_SIZE, device=device)
    if not torch.equal(torch.mm(values, one), values) or not torch.equal(torch.mm(one, values), values):
        what = f"float32 numbers are not multiplied with all of their bits on this {_name_of(device)}."
        remedy = (
            "Take NVIDIA_TF32_OVERRIDE, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE out "
            "of the environment of the process that computes."
        )
        raise OptionError(Problem("--device", what, remedy))


def _operations() -> Iterator[Any]:
    """The switches of each operation, if this version of torch has them."""
    for name in _OPERATIONS:
        with suppress(AttributeError):
            operation = attrgetter(name)(torch.backends)
            if hasattr(operation, "fp32_precision"):
                yield operation


def _read(setting: Callable[[], T]) -> T | None:
    """A setting; None where somebody used switches of both kinds, and torch does not say what it is."""
    try:
        return setting()
    except RuntimeError:
        return None


def _name_of(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "processor"


# GPUs that fail


class DeviceError(RuntimeError):
    """A device cannot be used, whatever is to be computed there."""


@dataclass(frozen=True, slots=True)
class DeviceFailure:
    """How a GPU failed."""

    note: str
    is_lasting: bool
    """Whether it fails whatever comes after; memory may be free again later."""


def failure_of(error: Exception) -> DeviceFailure | None:
    """What an error says of the GPU; None where the GPU is not to blame.

    torch has a kind of error for what CUDA reports (from 2.8 on) and for memory of its own. What cuBLAS,
    cuSOLVER and cuDNN report is a plain RuntimeError, and so are the defects of a program.
    """
    kinds = (DeviceError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", DeviceError))
    said = str(error)
    if not isinstance(error, kinds) and not (isinstance(error, RuntimeError) and _FAILURE.search(said)):
        return None
    line = (said.strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(said):
        return DeviceFailure(f"the GPU has too little memory: {line}", is_lasting=False)
    return DeviceFailure(f"the GPU failed: {line}", is_lasting=True)


class Fallback:
    """A device, and the processor in its place where a GPU fails."""

    def __init__(self, device: torch.device, failure: str = "") -> None:
        self._device = device
        self._failure = failure
        self._is_checked = device.type == "cpu"

    def run(self, make: Callable[[torch.device, str], T]) -> T:
        """What is made on the device, or anew on the processor where a GPU fails.

        A GPU that failed is not used again, but for one that had too little memory.

        Args:
            make: given a device and the note for a receipt, which is "" if nothing failed.
        """
        if self._device.type == "cpu" or self._failure:
            return make(_PROCESSOR, self._failure)
        try:
            self._check()
            return make(self._device, "")
        except RuntimeError as error:
            failure = failure_of(error)
            if failure is None:
                raise
        # Outside of the handler: the error keeps alive all that was on the GPU.
        if failure.is_lasting:
            self._failure = failure.note
        return make(_PROCESSOR, failure.note)

    def _check(self) -> None:
        if not self._is_checked:
            check_full_float32(self._device)
            self._is_checked = True
