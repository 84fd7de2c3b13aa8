"""Scales as they are stored, and as float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raymerge.device_numerics import divisor
from raymerge.dtypes import DType

_NAN_BITS = 0x7FC00000
_HALF_LEAST_BITS = 0x00400000
_SMALLEST: Mapping[DType, float] = {DType.F16: 2.0**-24, DType.F8_E4M3: 2.0**-9}
_SMALLEST_NORMAL = 2.0**-126
# For float16 the largest power of two, which may be what is wanted.
_LARGEST: Mapping[DType, float] = {DType.F16: 2.0**15, DType.F8_E4M3: 448.0}


def load_scales(dtype: DType, stored: Tensor) -> Tensor:
    """Stored scales as float32.

    Args:
        dtype: F32, BF16, F16, F8_E4M3, or F8_E8M0 and U8, which are exponents: 2 ** (b - 127), 255 is NaN.
        stored: uint8 [nbytes].

    Returns:
        float32 [scales].
    """
    if dtype in (DType.F8_E8M0, DType.U8):
        exponents = stored.int()
        bits = torch.where(exponents == 0, _HALF_LEAST_BITS, exponents << 23)
        return torch.where(exponents == 255, _NAN_BITS, bits).view(torch.float32)
    # Bytes that were cut from a larger buffer may lie where no element of this dtype can begin.
    aligned = stored.clone() if stored.storage_offset() % (dtype.bits // 8) else stored
    return aligned.view(_torch_dtype(dtype)).float()


def store_scales(dtype: DType, scales: Tensor) -> Tensor:
    """The reverse: float32 [...], rounded to the nearest that can be stored, as uint8 [nbytes].

    What is stored as an exponent must be a power of two.
    """
    flat = scales.reshape(-1)
    if dtype in (DType.F8_E8M0, DType.U8):
        return (flat.view(torch.int32) >> 23).to(torch.uint8)
    return flat.to(_torch_dtype(dtype)).view(torch.uint8)


def storable_scales(dtype: DType, scales: Tensor) -> Tensor:
    """Wanted scales as the nearest that can be stored and serve as such; float32, of the same shape.

    0, which a block has that is all zeros, becomes 1. Scales become neither 0 nor infinite by rounding.
    """
    within = scales.clamp(_SMALLEST.get(dtype, _SMALLEST_NORMAL), _LARGEST.get(dtype))
    nonzero = torch.where(scales == 0, 1.0, within)
    return load_scales(dtype, store_scales(dtype, nonzero)).view(scales.shape)


def quotients(values: Tensor, number: float) -> Tensor:
    """Values over a number, rounded once on every device."""
    return values / divisor(number, values)


def power_of_two_above(scales: Tensor) -> Tensor:
    """The least powers of two that are not below the positive ``scales``; float32, of the same shape.

    Taken from the bits, since a logarithm is rounded differently on each device. Below 2 ** -126 that is the
    answer; 0 stays 0, infinity and NaN become infinity.
    """
    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponents.clamp(max=255) << 23).view(torch.float32)


def _torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch_name or "")
    assert isinstance(found, torch.dtype)
    return found
