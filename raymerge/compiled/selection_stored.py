"""Magnitudes of stored bfloat16 deltas counted and added up, for ``raymerge.methods.selection``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.bf16 import CHUNK, load_deltas
from raymerge.compiled.jit import compiled
from raymerge.compiled.selection import count, count_all, spread
from raymerge.compiled.sums import add_values

_LAST = np.uint32(0x8000_0000)


class Bins(NamedTuple):
    """Where magnitudes are counted."""

    low: np.uint32
    """Pattern of the smallest one."""
    high: np.uint32
    """The first pattern above."""
    shift: np.uint32
    """Binary logarithm of how many patterns share a bin."""


@compiled
def count_delta(
    words: NDArray[np.uint16], places: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """Count the magnitudes of one delta as ``selection.count`` does.

    Args:
        words: memory that holds base and source.
        places: where in it they begin, ``[2]``.
        size: elements of each.
        bins: where to count.
        counts: one for each bin, added to.

    Returns:
        how many are not below ``bins.high``, and all distances of those inside from ``bins.low``, or-ed.
    """
    above, bits = 0, 0
    rows = np.empty((2, CHUNK), np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(words, places, begin, length, rows)
        more, others = _count(rows[1, :length], bins, counts)
        above += more
        bits |= others
    return above, bits


@compiled
def count_spread(
    words: NDArray[np.uint16], places: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Count how far the deltas of each element lie apart, as ``selection.spread`` has it.

    Args:
        words: memory that holds base and sources.
        places: where in it they begin, ``[1 + N]``.
        size: elements of each.
        bins: where to count.
        counts: one for each bin, added to.

    Returns:
        the numbers of ``count_delta``, and in how many elements deltas differ.
    """
    above, bits, differing = 0, 0, 0
    rows, deviations = np.empty((places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(words, places, begin, length, rows)
        differing += spread(rows[1:].reshape(-1), CHUNK, places.size - 1, deviations[:length])
        more, others = _count(deviations[:length], bins, counts)
        above += more
        bits |= others
    return above, bits, differing


@compiled
def add_delta(
    words: NDArray[np.uint16],
    places: NDArray[np.int64],
    size: int,
    ends: NDArray[np.float32],
    totals: NDArray[np.float64],
) -> None:
    """Add up magnitudes of one delta, piece after piece.

    Args:
        words: memory that holds base and source.
        places: where in it they begin, ``[2]``.
        size: elements of each; the first one begins a piece of the tensor.
        ends: for each sum, what a magnitude must be larger than to be added; NaN is added.
        totals: the sums, added to.
    """
    rows, chosen = np.empty((2, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(words, places, begin, length, rows)
        for index in range(ends.size):
            _write_larger(rows[1, :length], ends[index], chosen)
            totals[index] = add_values(totals[index], chosen[:length])


@compiled
def _write_larger(values: NDArray[np.float32], end: np.float32, out: NDArray[np.float32]) -> None:
    """Magnitudes, those up to the end as 0."""
    for i in range(values.size):
        size = np.abs(values[i])
        out[i] = np.float32(0.0) if size <= end else size


@compiled
def _count(values: NDArray[np.float32], bins: Bins, counts: NDArray[np.int64]) -> tuple[int, int]:
    """Count magnitudes in all there are, or in part of it."""
    patterns = values.view(np.uint32)
    if bins.high - bins.low == _LAST:
        return 0, count_all(patterns, bins.shift, counts)
    return count(patterns, bins.low, bins.high, bins.shift, counts)
