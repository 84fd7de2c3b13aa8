"""Magnitudes of stored bfloat16 deltas counted and added up, for ``raymerge.methods.selection``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.bf16 import CHUNK, load_deltas, widened
from raymerge.kernels.elect_stored import MOST, FewInputs
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.selection import RUN, Bins, add_one, count, make_finder, places, spread
from raymerge.kernels.spread import count_spread_few, counts_few
from raymerge.kernels.sums import add_values

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
# What is above each of two places is counted in one number.
_BITS_OF_OVER, _ALL_OF_OVER = 16, np.uint32(0xFFFF)


@compiled
def count_delta(
    words: NDArray[np.uint16],
    first: NDArray[np.int64],
    size: int,
    bins: tuple[Bins, ...],
    counts: tuple[NDArray[np.int64], ...],
    above: NDArray[np.int64],
) -> None:
    """Count the magnitudes of one delta as ``selection.count`` does, never writing them down.

    Args:
        words: memory that holds base and source.
        first: where in it they begin, ``[2]``.
        size: elements of each.
        bins: where to count, one place or two: not everywhere, which is ``count_every``.
        counts: for each place one for each bin, added to.
        above: for each place how many are not below its ``high``, added to.
    """
    finder = make_finder()
    for begin in range(0, size, RUN):
        length, over = min(RUN, size - begin), np.uint32(0)
        base = words[first[0] + begin : first[0] + begin + length]
        source = words[first[1] + begin : first[1] + begin + length]
        finder.flags[length:] = 0
        for i in range(length):
            magnitude, is_inside = _magnitude(source[i], base[i]), False
            for place in range(len(bins)):
                is_inside |= _is_inside(magnitude, bins[place])
                # A run is too short to overflow 16 bits.
                one = np.uint32(1 << _BITS_OF_OVER * place)
                over = np.uint32(over + (one if magnitude >= bins[place].high else np.uint32(0)))
            finder.flags[i] = is_inside
        for place in range(len(bins)):
            above[place] += (over >> np.uint32(_BITS_OF_OVER * place)) & _ALL_OF_OVER
        for element in finder.found[: places(finder)]:
            at = np.uint64(element)
            magnitude = _magnitude(source[at], base[at])
            for place in range(len(bins)):
                if _is_inside(magnitude, bins[place]):
                    add_one(np.uint32(magnitude - bins[place].low), bins[place].shift, counts[place])


@inlined
def _is_inside(magnitude: np.uint32, bins: Bins) -> bool:
    """Whether a magnitude is counted."""
    return bool(np.uint32(magnitude - bins.low) < np.uint32(bins.high - bins.low))


@compiled
def count_every(
    words: NDArray[np.uint16],
    first: NDArray[np.int64],
    size: int,
    shift: np.uint32,
    counts: NDArray[np.int64],
) -> None:
    """``selection.count_all`` of a delta; see ``count_delta``."""
    base, source = words[first[0] :][:size], words[first[1] :][:size]
    for i in range(size):
        add_one(_magnitude(source[i], base[i]), shift, counts)


@inlined
def _magnitude(source: np.uint16, base: np.uint16) -> np.uint32:
    """The pattern of how far two patterns of bfloat16 lie apart in float32."""
    return np.float32(widened(source) - widened(base)).view(np.uint32) & _MAGNITUDE


def count_spread(
    words: NDArray[np.uint16], places: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """Count how far the deltas of each element lie apart, as ``selection.spread`` has it.

    Args:
        words: memory that holds base and sources.
        places: where in it they begin, ``[1 + N]``.
        size: elements of each.
        bins: where to count.
        counts: one for each bin, added to.

    Returns:
        the number of ``count_delta``, and in how many elements deltas differ.
    """
    if not 1 < places.size - 1 <= MOST:
        return count_spread_of_rows(words, places, size, bins, counts)
    return _count_spread_of_few(FewInputs(words, tuple(places.astype(np.uint64)), 0), size, bins, counts)


@compiled
def _count_spread_of_few(
    inputs: FewInputs, size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """The same of few sources, compiled with both ways."""
    if counts_few(bins):
        return count_spread_few(inputs, size, bins, counts)
    return count_spread_of_rows(inputs.words, np.array(inputs.places).astype(np.int64), size, bins, counts)


@compiled
def count_spread_of_rows(
    words: NDArray[np.uint16], places: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """The same, source by source."""
    above, differing = 0, 0
    rows, deviations = np.empty((places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(words, places, begin, length, rows)
        differing += spread(rows[1:].reshape(-1), CHUNK, places.size - 1, deviations[:length])
        above += count(deviations[:length].view(np.uint32), bins, counts)
    return above, differing


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
