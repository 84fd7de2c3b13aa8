"""Counting the bit patterns of magnitudes, for ``raymerge.methods.selection``."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.elements import delta_of, value_of
from raymerge.kernels.jit import compiled, inlined

Elements: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]

RUN = 1024
"""Elements processed at once, in first-level cache."""

EVERY = np.uint32(0x8000_0000)
"""Patterns that magnitudes can have."""

# Numbers of 32 bits throughout: 16 of them are compared at once.
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_ONE, _EIGHT, _WORDS = np.uint64(1), 8, RUN // 64
# What is above each of two places is counted in one number.
_BITS_OF_OVER, _ALL_OF_OVER = 16, np.uint32(0xFFFF)
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
    """For each bit of a packed word, the index of its flag, counted from the word's: bit ``8 * byte + word``
    is flag ``byte`` of the ``word``-th of eight words, ``_WORDS`` from each other."""
    offsets = np.empty(64, np.int64)
    for bit in range(64):
        offsets[(int(_WINDOWS) << bit & (1 << 64) - 1) >> int(_TOP)] = 8 * _WORDS * (bit % 8) + bit // 8
    return offsets


_OFFSETS = _places_of_bits()


MIXED = 1 << 62
"""In a bin's count: some of the patterns counted are not the bin's first."""
COUNTED = np.int64(MIXED - 1)
"""The number in a bin's count."""


class Bins(NamedTuple):
    low: np.uint32
    high: np.uint32
    """The first pattern above."""
    shift: np.uint32
    """Binary logarithm of the patterns per bin."""


class Finder(NamedTuple):
    """Buffers for finding the few flagged elements of a run."""

    flags: NDArray[np.uint8]
    """1 where an element is one of them, else 0, ``[RUN]``."""
    words: NDArray[np.uint64]
    """One bit per flag, ``[RUN // 64]``."""
    sizes: NDArray[np.int64]
    found: NDArray[np.int64]
    """Their indices, with room for surplus writes, ``[RUN + 4]``."""


@compiled
def make_finder() -> Finder:
    words, sizes = np.empty(_WORDS, np.uint64), np.empty(_WORDS, np.int64)
    return Finder(np.zeros(RUN, np.uint8), words, sizes, np.empty(RUN + _AT_LEAST, np.int64))


@compiled
def count(
    source: Elements,
    base: Elements,
    bins: tuple[Bins, ...],
    counts: tuple[NDArray[np.int64], ...],
    above: NDArray[np.int64],
) -> None:
    """Count a delta's magnitudes from ``low`` on and below ``high``, each in bin ``(it - low) >> shift``; few
    are expected there, so finding them is a vectorised step of its own.

    ``source`` and ``base`` are ``[n]``; a float32 source is the delta itself. There are one or two ``bins``,
    not over all patterns, for which there is ``count_all``; ``counts`` and ``above`` (magnitudes not below
    ``high``) are added to."""
    finder = make_finder()
    for begin in range(0, source.size, RUN):
        sources, bases, over = source[begin : begin + RUN], base[begin : begin + RUN], np.uint32(0)
        finder.flags[sources.size :] = 0
        for i in range(sources.size):
            magnitude, is_inside = _magnitude(sources[i], bases[i]), False
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
            magnitude = _magnitude(sources[at], bases[at])
            for place in range(len(bins)):
                if _is_inside(magnitude, bins[place]):
                    add_one(np.uint32(magnitude - bins[place].low), bins[place].shift, counts[place])


@compiled
def count_all(source: Elements, base: Elements, shift: np.uint32, counts: NDArray[np.int64]) -> int:
    """Count every magnitude of a delta in the bin ``magnitude >> shift``; returns all of them or-ed."""
    bits = np.uint32(0)
    for i in range(source.size):
        magnitude = _magnitude(source[i], base[i])
        add_one(magnitude, shift, counts)
        bits |= magnitude
    return int(bits)


@inlined
def _magnitude(source: Any, base: Any) -> np.uint32:
    return np.float32(delta_of(source, value_of(base))).view(np.uint32) & _MAGNITUDE


@inlined
def _is_inside(magnitude: np.uint32, bins: Bins) -> bool:
    return bool(np.uint32(magnitude - bins.low) < np.uint32(bins.high - bins.low))


@inlined
def add_one(distance: np.uint32, shift: np.uint32, counts: NDArray[np.int64]) -> None:
    """Count a pattern at a distance from the first one, in a bin of ``1 << shift`` patterns."""
    place = np.uint64(distance >> shift)
    is_first = np.uint32(distance >> shift) << shift == distance
    counts[place] = (counts[place] + 1) | (np.int64(not is_first) * MIXED)


@inlined
def places(finder: Finder) -> int:
    """Write the indices of set flags into ``indices``, in no order; returns their number.

    Eight words of eight flags are packed into one word. Most are empty, and others have a few flags: that
    many indices are written for each word, since a branch for each would be mispredicted."""
    eights, words, indices = finder.flags.view(np.uint64), finder.words, finder.found
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
            indices[place] = 8 * i + _OFFSETS[(lowest * _WINDOWS) >> _TOP]
            word ^= lowest
        place = num_found + _AT_LEAST
        while word:
            lowest = word & (~word + _ONE)
            indices[place] = 8 * i + _OFFSETS[(lowest * _WINDOWS) >> _TOP]
            place += 1
            word ^= lowest
        num_found += finder.sizes[i]
    return num_found


@inlined
def _num_bits(word: np.uint64) -> np.int64:
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
def write_deviations(
    deltas: NDArray[np.float32], stride: int, num_sources: int, out: NDArray[np.float32]
) -> int:
    """Write the root of the sum of squared distances of each element's deltas (row ``s`` from ``s * stride``
    on) from their mean; returns of how many elements it is not 0."""
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
