"""Hashes made into numbers, for raymerge/methods/draws.py, by operations that are all exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.hashes import hashed
from raymerge.kernels.jit import compiled

# Hashes are signed here: lowered by half of their range, hence the half that is added.
_TOP = np.uint64(1 << 63)
_SHIFT_TO_24, _SHIFT_TO_52 = np.uint64(40), np.uint64(12)


@compiled
def fill_uniform(first: np.uint64, second: np.uint64, start: int, out: NDArray[np.float32]) -> None:
    """Write the uniform numbers of the indices from ``start`` on, multiples of 2**-24; ``out`` is ``[n]``."""
    for index in range(out.size):
        word = hashed(first, second, start + index) ^ _TOP
        out[index] = np.float32(np.int32(word >> _SHIFT_TO_24)) * np.float32(2.0**-24)


@compiled
def fill_points(first: np.uint64, second: np.uint64, start: int, out: NDArray[np.float64]) -> None:
    """The same of 52 bits, halfway between multiples of 2**-52, hence never 0 or 1."""
    for index in range(out.size):
        word = hashed(first, second, start + index) ^ _TOP
        out[index] = (np.float64(np.int64(word >> _SHIFT_TO_52)) + 0.5) * 2.0**-52
