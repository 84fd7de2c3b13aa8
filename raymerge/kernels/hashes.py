"""The hash behind all masks: one 64-bit number for each pair of neighbouring elements, half for each.

SplitMix64's finaliser over a Weyl sequence, with a second half of the key between its rounds;
raymerge/methods/random.py has it in torch, with its source."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.jit import compiled

_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
# 64-bit throughout: a shift by a signed number would make a float64 of the rest.
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(0xFFFF_FFFF)
_32 = np.uint64(32)
# Lowers both halves by 2**31, as signed numbers of 32 bits.
_LOWERED = np.uint64(0x8000_0000_8000_0000)
_LOWEST = 1 << 31


@compiled
def hashed(first: np.uint64, second: np.uint64, index: int) -> np.uint64:
    """The index hashed, good in the high bits: the finaliser without its last xor."""
    word = np.uint64(index) * _WEYL + first
    word = (word ^ (word >> _SHIFTS[0])) * _FIRST_FACTOR + second
    return (word ^ (word >> _SHIFTS[1])) * _SECOND_FACTOR


@compiled
def hashed_pair(first: np.uint64, second: np.uint64, pair: int) -> np.uint64:
    """The number of the elements ``2 * pair``, its lower half, and ``2 * pair + 1``, its upper half."""
    word = hashed(first, second, pair)
    return word ^ (word >> _SHIFTS[2])


@compiled
def _half(first: np.uint64, second: np.uint64, index: int) -> np.uint64:
    word = hashed_pair(first, second, index >> 1)
    return word >> _32 if index & 1 else word & _HALF


@compiled
def keep(first: np.uint64, second: np.uint64, index: int, limit: int) -> bool:
    """Whether the element's half of its pair's number, from 0 to 2**32 - 1, is below ``limit``, from 0 to
    2**32 (``random.limit_of``). The words are those of ``random.key_words``."""
    return bool(np.int64(_half(first, second, index)) < limit)


@compiled
def fill_numbers(first: np.uint64, second: np.uint64, start: int, out: NDArray[np.int32]) -> None:
    """Write the halves of the elements from ``start`` on, each less 2**31; ``out`` is ``[n]``."""
    if start & 1 and out.size:
        out[0] = np.int32(_half(first, second, start) ^ _LOWERED)
    # A slice, so that the compiler sees that no place in it is negative, and writes many at once.
    pairs, place = out[start & 1 :], (start + 1) >> 1
    for pair in range(pairs.size >> 1):
        word = hashed_pair(first, second, place + pair) ^ _LOWERED
        pairs[2 * pair] = np.int32(word & _HALF)
        pairs[2 * pair + 1] = np.int32(word >> _32)
    if pairs.size & 1:
        pairs[-1] = np.int32(_half(first, second, 2 * place + pairs.size - 1) ^ _LOWERED)


@compiled
def fill_factors(
    first: np.uint64, second: np.uint64, start: int, limit: int, factor: np.float32, out: NDArray[np.float32]
) -> None:
    """Write ``factor`` where ``keep`` keeps elements from ``start`` on, 0 elsewhere; ``out`` is ``[n]``."""
    if limit <= 0:
        out[:] = 0.0
        return
    numbers = out.view(np.int32)
    fill_numbers(first, second, start, numbers)
    last, factor_bits = np.int32(limit - 1 - _LOWEST), np.float32(factor).view(np.int32)
    for index in range(numbers.size):
        numbers[index] = factor_bits if numbers[index] <= last else np.int32(0)
