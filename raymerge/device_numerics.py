"""The device that a worker computes on: choice, full float32 precision, and CPU fallback for failing GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Literal, TypeVar

from raymerge import devices
from raymerge.deferred import torch
from raymerge.errors import OptionError, Problem, first_line

T = TypeVar("T")

_OPERATIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Backends with a precision setting of their own from torch 2.9 on."""
_PRODUCT_SIZE = 256
"""Matrix size for which the libraries would use reduced precision."""


def divisor(number: float, like: torch.Tensor) -> torch.Tensor:
    """A tensor to divide by: for a plain number a GPU would multiply by the reciprocal, and round twice."""
    return torch.full((), number, dtype=like.dtype, device=like.device)


def return_free_memory() -> None:
    """Have the C library (glibc) return free memory.

    Free blocks of large tensors are often too small for the next, so that a process would grow by several
    although only one lives."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads; None for as many as before.

    Libraries of linear algebra cut their sums by the number of threads, and so round in other places. The
    setting is the process's: where several threads compute, each of them has set it to 1 before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Which device


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: Literal["cpu", "cuda"]
    """As in the option ``--device``: "cuda" is a GPU of any vendor."""
    reason: str


NO_GPU_WORKS = DeviceChoice("cpu", "no GPU works where workers look for one")


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this worker process; ``auto`` takes a GPU that works.

    Raises OptionError: no GPU is visible, or it does not multiply float32 in full precision."""
    gpu = None if device == "cpu" else devices.find_gpu()
    if device == "cuda" and gpu is None:
        raise OptionError(
            Problem(
                "--device", "cuda was asked for, but no GPU is visible here.", "Use --device auto or cpu."
            )
        )
    return gpu if gpu is not None and (device == "cuda" or _works(gpu)) else torch.device("cpu")


def _works(gpu: torch.device) -> bool:
    try:
        check_full_float32(gpu)
    except (RuntimeError, AssertionError):
        return False
    return True


def numerics_of(device: torch.device) -> dict[str, str]:
    """What output bytes may depend on besides the plan.

    OptionError if the device, or its fallback CPU, does not multiply float32 in full precision."""
    check_full_float32(torch.device("cpu"))
    if device.type != "cpu":
        # A GPU that fails here is checked again by whoever computes, before it is used.
        with suppress(RuntimeError, AssertionError):
            check_full_float32(device)
    # A plain text: torch's own type of it would have the driver, which unpickles it, load torch.
    return {"device": device.type, "torch": str(torch.__version__), "float32": "full"}


def kernels_of(device: torch.device) -> dict[str, str]:
    """What the bytes of a stage may depend on besides ``numerics_of``: transformers computes layers with
    matrix products whose order of additions the libraries choose by processor.

    Raises OptionError: the GPU is broken, or another process has it for itself."""
    processor = torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        try:
            processor = devices.name_of(device)
        except RuntimeError as error:
            what = f"{device.type} cannot be used here: {first_line(error)}."
            raise OptionError(
                Problem("--device", what, "Look at nvidia-smi, or give --device cpu.")
            ) from error
    return {"transformers": version("transformers"), "processor": processor}


# Full float32


def set_full_float32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for operation in _operations():
        operation.fp32_precision = "ieee"


@contextmanager
def full_float32() -> Iterator[None]:
    """``set_full_float32`` for a block, in a process that belongs to others."""
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
    """Test by a product whether float32 numbers are multiplied in full precision.

    Environment variables of the libraries override torch's settings without torch's knowledge.

    Raises:
        OptionError: they are not.
        RuntimeError: a GPU failed, or has too little memory."""
    last_bits = torch.arange(_PRODUCT_SIZE**2, dtype=torch.float64, device=device).mul_(2.0**-23)
    values = last_bits.add_(1.0).float().view(_PRODUCT_SIZE, _PRODUCT_SIZE)
    one = torch.eye(_PRODUCT_SIZE, device=device)
    if not torch.equal(torch.mm(values, one), values) or not torch.equal(torch.mm(one, values), values):
        kind = "processor" if device.type == "cpu" else "GPU"
        what = f"float32 numbers are not multiplied with all of their bits on this {kind}."
        remedy = (
            "Take NVIDIA_TF32_OVERRIDE, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE out "
            "of the environment of the process that computes."
        )
        raise OptionError(Problem("--device", what, remedy))


def _operations() -> Iterator[Any]:
    for name in _OPERATIONS:
        with suppress(AttributeError):
            operation = attrgetter(name)(torch.backends)
            if hasattr(operation, "fp32_precision"):
                yield operation


def _read(setting: Callable[[], T]) -> T | None:
    """A setting; None if switches of both kinds were used, so that torch does not report it."""
    try:
        return setting()
    except RuntimeError:
        return None


# GPUs that fail


class Fallback:
    def __init__(self, device: torch.device, failure: str = "") -> None:
        self._device = device
        self._failure = failure
        self._is_checked = device.type == "cpu"

    def run(self, make: Callable[[torch.device, str], T]) -> T:
        """The result on the device, or again on the CPU after a GPU failure.

        A failed GPU is not used again, unless it only lacked memory. ``make`` takes a device and the note for
        a receipt, "" without failure."""
        if self._device.type == "cpu" or self._failure:
            return make(torch.device("cpu"), self._failure)
        try:
            self._check()
            return make(self._device, "")
        except RuntimeError as error:
            failure = devices.failure_of(error)
            if failure is None:
                raise
        # Outside of the handler: the error keeps alive all that was on the GPU.
        if failure.is_lasting:
            self._failure = failure.note
        return make(torch.device("cpu"), failure.note)

    def _check(self) -> None:
        if not self._is_checked:
            check_full_float32(self._device)
            self._is_checked = True
