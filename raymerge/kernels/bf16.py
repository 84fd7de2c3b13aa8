"""bfloat16 as it is stored, to float32 and back, for loops that take stored bytes and give stored bytes.

A loop goes through a tile in chunks that stay in the cache: it widens a chunk of every input, computes, and
narrows the result. Nothing of it goes back to Python in between.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.jit import compiled, inlined

CHUNK = 16_384
"""Elements of a chunk: a piece of the sums (``raymerge.methods.reduce``), of which some fill half a cache."""


@inlined
def widened(word: np.uint16) -> np.float32:
    """A pattern as the float32 of the same value."""
    return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)


@inlined
def rounded(value: np.float32) -> np.uint16:
    """The nearest bfloat16, ties to even. Any NaN becomes a quiet one."""
    pattern = np.float32(value).view(np.uint32)
    nearest = (pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (pattern & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(0x7FC0) if is_nan else np.uint16(nearest)


@compiled
def widen(words: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    """Patterns as the float32 of the same value; both ``[n]``."""
    for i in range(words.size):
        values[i] = widened(words[i])


@compiled
def narrow(values: NDArray[np.float32], words: NDArray[np.uint16]) -> None:
    """float32 rounded to bfloat16; both ``[n]``."""
    for i in range(values.size):
        words[i] = rounded(values[i])


@compiled
def load_deltas(
    words: NDArray[np.uint16], places: NDArray[np.int64], begin: int, size: int, rows: NDArray[np.float32]
) -> None:
    """A chunk of every input as float32, those after the first less the first, which is the base.

    Args:
        words: memory that holds all inputs.
        places: where in it each input begins, ``[inputs]``.
        begin: first element of the chunk within each input.
        size: its elements, at most the length of a row.
        rows: ``[inputs, CHUNK]``, of which the first ``size`` elements of every row are written.
    """
    first = places[0] + begin
    base = rows[0, :size]
    widen(words[first : first + size], base)
    for index in range(1, places.size):
        first = places[index] + begin
        _widen_less(words[first : first + size], base, rows[index, :size])


@compiled
def _widen_less(words: NDArray[np.uint16], base: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    """Patterns as the float32 of the same value, less the base's, rounded; all ``[n]``."""
    for i in range(values.size):
        values[i] = widened(words[i]) - base[i]
