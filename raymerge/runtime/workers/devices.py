"""Which device a worker computes on, and what the bytes that it makes depend on there."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import torch

from raymerge.device_numerics import check_full_float32
from raymerge.errors import OptionError, Problem, first_line
from raymerge.options import Device


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The kind of device for a run that leaves it open."""

    device: Literal["cpu", "cuda"]
    reason: str


NO_GPU_WORKS = DeviceChoice("cpu", "no GPU works where workers look for one")


def choose_device(device: Device) -> torch.device:
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
