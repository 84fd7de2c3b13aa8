"""bfloat16 as it is stored, to float32 and back, for loops that take stored bytes and give stored bytes.

A loop goes through a tile in chunks that stay in the cache: it widens a chunk of every input, computes, and
narrows the result. Nothing of it goes back to Python in between.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.jit import compiled

CHUNK = 16_384
"""Elements of a chunk: a piece of the sums (``raymerge.methods.reduce``), of which some fill half a cache."""


@compiled
def widen(words: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    """Patterns as the float32 of the same value; both ``[n]``."""
    patterns = values.view(np.uint32)
    for i in range(words.size):
        patterns[i] = np.uint32(words[i]) << np.uint32(16)


@compiled
def narrow(values: NDArray[np.float32], words: NDArray[np.uint16]) -> None:
    """float32 rounded to the nearest bfloat16, ties to even; both ``[n]``. Any NaN becomes a quiet one."""
    patterns = values.view(np.uint32)
    for i in range(values.size):
        pattern = patterns[i]
        rounded = (pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (pattern & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        words[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


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
        values[i] = np.uint32(np.uint32(words[i]) << np.uint32(16)).view(np.float32) - base[i]
