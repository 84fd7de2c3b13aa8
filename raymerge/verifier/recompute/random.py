"""The draws of chance, written anew from their definition (docs/methods.md, "Chance"), in numpy."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from raymerge.verifier.numbers import Floats

Indices = NDArray[np.int64]

# SplitMix64's finaliser with key material before each of its rounds.
_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST, _SECOND = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
_HALF = np.uint64((1 << 32) - 1)
NUMBERS = 1 << 32
"""How many values the number of an element may have."""


def hashes(key: int, words: Indices) -> NDArray[np.uint64]:
    """The 64-bit hash of each index under a key, before the last step that serves its low bits."""
    second = hashlib.blake2b(
        (key % (1 << 64)).to_bytes(8, "little"), digest_size=8, person=b"raymerge word"
    ).digest()
    found = words.astype(np.uint64) * _WEYL + np.uint64(key % (1 << 64))
    found = (found ^ (found >> np.uint64(30))) * _FIRST + np.uint64(int.from_bytes(second, "little"))
    return (found ^ (found >> np.uint64(27))) * _SECOND


def element_numbers(key: int, indices: Indices) -> Indices:
    """The number of each element, from 0 to 2**32 - 1: a half of the hash of its pair."""
    words = hashes(key, indices >> 1)
    words ^= words >> np.uint64(31)
    return np.where(indices & 1, words >> np.uint64(32), words & _HALF).astype(np.int64)


def limit_of(density: float) -> int:
    """What the number of an element must be below for it to stay."""
    return min(NUMBERS, max(0, math.ceil(density * NUMBERS)))


def normal_numbers(key: int, indices: Indices) -> Floats:
    """Normal numbers: the inverse of the distribution function at 52 bits of the hash."""
    # Here, since it takes some tenths of a second of every command, and few draw anything.
    from scipy.special import ndtri

    signed = hashes(key, indices).view(np.int64) >> 12
    return np.asarray(ndtri((signed + 0.5) * 2.0**-52 + 0.5))
