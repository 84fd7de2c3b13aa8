"""Magnitudes of stored bfloat16 deltas counted and added up, for ``raymerge.methods.selection``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.compiled.bf16 import CHUNK, load_deltas, widened
from raymerge.compiled.jit import compiled, inlined
from raymerge.compiled.selection import EVERY, RUN, Bins, count, make_finder, places, spread
from raymerge.compiled.sums import add_values

_MAGNITUDE = np.uint32(0x7FFF_FFFF)


@compiled
def count_delta(
    words: NDArray[np.uint16], first: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """Count the magnitudes of one delta as ``selection.count`` does, never writing them down.

    Args:
        words: memory that holds base and source.
        first: where in it they begin, ``[2]``.
        size: elements of each.
        bins: where to count.
        counts: one for each bin, added to.

    Returns:
        how many are not below ``bins.high``, and all distances of those inside from ``bins.low``, or-ed.
    """
    if bins.high - bins.low == EVERY:
        return 0, _count_all(words[first[0] :][:size], words[first[1] :][:size], bins.shift, counts)
    above, bits, finder = 0, 0, make_finder()
    low, width = bins.low, np.uint32(bins.high - bins.low)
    for begin in range(0, size, RUN):
        length, over = min(RUN, size - begin), np.uint32(0)
        base = words[first[0] + begin : first[0] + begin + length]
        source = words[first[1] + begin : first[1] + begin + length]
        finder.flags[length:] = 0
        for i in range(length):
            magnitude = _magnitude(source[i], base[i])
            finder.flags[i] = np.uint32(magnitude - low) < width
            over = np.uint32(over + np.uint32(magnitude >= bins.high))
        above += int(over)
        for place in finder.found[: places(finder)]:
            distance = np.uint32(_magnitude(source[place], base[place]) - low)
            counts[distance >> bins.shift] += 1
            bits |= int(distance)
    return above, bits


@compiled
def _count_all(
    base: NDArray[np.uint16], source: NDArray[np.uint16], shift: np.uint32, counts: NDArray[np.int64]
) -> int:
    """``selection.count_all`` of a delta."""
    bits = 0
    for i in range(base.size):
        magnitude = _magnitude(source[i], base[i])
        counts[magnitude >> shift] += 1
        bits |= int(magnitude)
    return bits


@inlined
def _magnitude(source: np.uint16, base: np.uint16) -> np.uint32:
    """The pattern of how far two patterns of bfloat16 lie apart in float32."""
    return np.float32(widened(source) - widened(base)).view(np.uint32) & _MAGNITUDE


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
        more, others = count(deviations[:length].view(np.uint32), bins, counts)
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
