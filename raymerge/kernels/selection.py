"""Counting the bit patterns of magnitudes, for ``raymerge.methods.selection``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.jit import compiled, inlined

RUN = 1024
"""Elements that are in work at once, in arrays that the first-level cache holds."""

EVERY = np.uint32(0x8000_0000)
"""Patterns that magnitudes can have."""

# Numbers of 32 bits throughout: 16 of them are compared at once.
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_ONE, _EIGHT, _WORDS = np.uint64(1), 8, RUN // 64
# Bits of a word are counted by adding up neighbours: of 2, of 4, of 8, then all bytes.
_PAIRS, _FOURS, _BYTES, _BYTE = (
    np.uint64(number)
    for number in (0x5555_5555_5555_5555, 0x3333_3333_3333_3333, 0x0F0F_0F0F_0F0F_0F0F, 0x0101_0101_0101_0101)
)
_TWO, _FOUR, _LAST_BYTE = np.uint64(2), np.uint64(4), np.uint64(56)
# Places that are written for every word, whether it has as many or not.
_AT_LEAST = 4
# Times a number of which one bit is 1, the top 6 bits tell which: no two windows of this one are alike.
_WINDOWS, _TOP = np.uint64(0x03F7_9D71_B4CB_0A89), np.uint64(58)


def _places_of_bits() -> NDArray[np.int64]:
    """By those 6 bits, where the flag lies that the bit stands for, in words of eight flags from the word's.

    Bit ``8 * byte + word`` is flag ``byte`` of the ``word``-th of eight words, ``_WORDS`` from each other.
    """
    offsets = np.empty(64, np.int64)
    for bit in range(64):
        offsets[(int(_WINDOWS) << bit & (1 << 64) - 1) >> int(_TOP)] = 8 * _WORDS * (bit % 8) + bit // 8
    return offsets


_OFFSETS = _places_of_bits()


MIXED = 1 << 62
"""In a bin's count: some of what it counts is not the bin's first pattern."""
COUNTED = np.int64(MIXED - 1)
"""The rest of a bin's count: how many it counts."""


class Bins(NamedTuple):
    """Where magnitudes are counted."""

    low: np.uint32
    """Pattern of the smallest one."""
    high: np.uint32
    """The first pattern above."""
    shift: np.uint32
    """Binary logarithm of how many patterns share a bin."""


class Finder(NamedTuple):
    """Arrays in which a few elements of a run are found."""

    flags: NDArray[np.uint8]
    """1 where an element is one of them, else 0, ``[RUN]``."""
    words: NDArray[np.uint64]
    """The same, a bit for each, ``[RUN // 64]``."""
    sizes: NDArray[np.int64]
    """How many bits of each are set."""
    found: NDArray[np.int64]
    """Where they are, and behind that room for what is written too much, ``[RUN + 4]``."""


@compiled
def make_finder() -> Finder:
    """Scratch for one run; no flag is set."""
    words, sizes = np.empty(_WORDS, np.uint64), np.empty(_WORDS, np.int64)
    return Finder(np.zeros(RUN, np.uint8), words, sizes, np.empty(RUN + _AT_LEAST, np.int64))


@compiled
def count(patterns: NDArray[np.uint32], bins: Bins, counts: NDArray[np.int64]) -> int:
    """Count the magnitudes from ``low`` on and below ``high``, each in bin ``(magnitude - low) >> shift``.

    Few of them are expected to lie there, so finding those is a step of its own, many at once.

    Args:
        patterns: bits of float32 numbers ``[n]``, the sign among them.
        bins: where to count.
        counts: int64, one for each bin, added to.

    Returns:
        how many are not below ``high``.
    """
    if bins.high - bins.low == EVERY:
        count_all(patterns, bins.shift, counts)
        return 0
    above, finder = 0, make_finder()
    low, width = bins.low, np.uint32(bins.high - bins.low)
    for begin in range(0, patterns.size, RUN):
        run, over = patterns[begin : begin + RUN], np.uint32(0)
        finder.flags[run.size :] = 0
        for i in range(run.size):
            magnitude = run[i] & _MAGNITUDE
            finder.flags[i] = np.uint32(magnitude - low) < width
            over = np.uint32(over + np.uint32(magnitude >= bins.high))
        above += int(over)
        for place in finder.found[: places(finder)]:
            add_one(np.uint32((run[place] & _MAGNITUDE) - low), bins.shift, counts)
    return above


@inlined
def add_one(distance: np.uint32, shift: np.uint32, counts: NDArray[np.int64]) -> None:
    """Count a pattern of some distance from the first one, in a bin of ``1 << shift`` patterns."""
    place = np.uint64(distance >> shift)
    is_first = np.uint32(distance >> shift) << shift == distance
    counts[place] = (counts[place] + 1) | (np.int64(not is_first) * MIXED)


@compiled
def count_all(patterns: NDArray[np.uint32], shift: np.uint32, counts: NDArray[np.int64]) -> int:
    """Count every magnitude in the bin ``magnitude >> shift``, and return all of them or-ed."""
    bits = 0
    for pattern in patterns:
        magnitude = np.uint32(pattern & _MAGNITUDE)
        add_one(magnitude, shift, counts)
        bits |= int(magnitude)
    return bits


@inlined
def places(finder: Finder) -> int:
    """Write the places of the flags that are 1 into ``found``, in no order, and return how many there are.

    Eight words of eight flags become one word, many at once. Most flags are 0, and a word has a few places as
    a rule: so many are written for each word, since a branch for each of them would be foretold wrongly.
    """
    eights, words, found = finder.flags.view(np.uint64), finder.words, finder.found
    for i in range(words.size):
        word = np.uint64(0)
        for bit in range(_EIGHT):
            word |= eights[_WORDS * bit + i] << np.uint64(bit)
        words[i] = word
        finder.sizes[i] = _num_bits(word)
    num_found = 0
    for i in range(words.size):
        word = words[i]
        for place in range(num_found, num_found + _AT_LEAST):
            lowest = word & (~word + _ONE)
            found[place] = 8 * i + _OFFSETS[(lowest * _WINDOWS) >> _TOP]
            word ^= lowest
        place = num_found + _AT_LEAST
        while word:
            lowest = word & (~word + _ONE)
            found[place] = 8 * i + _OFFSETS[(lowest * _WINDOWS) >> _TOP]
            place += 1
            word ^= lowest
        num_found += finder.sizes[i]
    return num_found


@inlined
def _num_bits(word: np.uint64) -> np.int64:
    """How many bits of a word are set."""
    word -= (word >> _ONE) & _PAIRS
    word = (word & _FOURS) + ((word >> _TWO) & _FOURS)
    return np.int64((((word + (word >> _FOUR)) & _BYTES) * _BYTE) >> _LAST_BYTE)


@compiled
def bin_of_rank(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The bin that holds the ``rank``-th largest, and how many lie in higher bins; -1 where counts end."""
    above = 0
    for end in range(counts.size, 0, -RUN):
        begin = max(0, end - RUN)
        run = 0
        for counted in counts[begin:end]:
            run += counted & COUNTED
        if above + run >= rank:
            for i in range(end - 1, begin - 1, -1):
                above += counts[i] & COUNTED
                if above >= rank:
                    return i, above - (counts[i] & COUNTED)
        above += run
    return -1, above


@compiled
def count_runs(patterns: NDArray[np.uint32], low: np.uint32, counts: NDArray[np.int64]) -> None:
    """Write how many magnitudes of each run are not below ``low``; as many equal runs as there are counts."""
    length = patterns.size // counts.size
    for run in range(counts.size):
        over = np.uint32(0)
        for pattern in patterns[run * length : (run + 1) * length]:
            over = np.uint32(over + np.uint32(np.uint32(pattern & _MAGNITUDE) >= low))
        counts[run] = over


@compiled
def write_deviations(
    deltas: NDArray[np.float32], stride: int, num_sources: int, out: NDArray[np.float32]
) -> int:
    """Write how far the deltas of each element lie apart, the root of the sum of their squared distances from
    their mean, and return of how many elements it is not 0.

    Args:
        deltas: row ``s`` from ``s * stride`` on.
        stride: elements from one row to the next.
        num_sources: rows.
        out: ``[n]``.
    """
    totals, squares, differing = np.empty(RUN), np.empty(RUN), 0
    share = 1.0 / num_sources
    for begin in range(0, out.size, RUN):
        size = min(RUN, out.size - begin)
        totals[:] = 0.0
        squares[:] = 0.0
        for source in range(num_sources):
            row = deltas[source * stride + begin : source * stride + begin + size]
            for i in range(size):
                totals[i] += row[i]
        for source in range(num_sources):
            row = deltas[source * stride + begin : source * stride + begin + size]
            for i in range(size):
                distance = num_sources * np.float64(row[i]) - totals[i]
                squares[i] += distance * distance
        nonzero = 0
        for i in range(size):
            deviation = np.float32(np.sqrt(squares[i]) * share)
            out[begin + i] = deviation
            nonzero += deviation != 0
        differing += nonzero
    return differing
