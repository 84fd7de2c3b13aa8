"""The merges of ``raymerge.kernels.elect`` of a few sources, of bfloat16 as it is stored.

What is computed of an element stays in registers from the stored numbers to the result. For that the number
of sources must be known when a loop is compiled, so it is the length of tuples. With ``MOST`` sources or
fewer the compiler writes out the loops over them and works on many elements at once; with more it does
neither, so those merges go source by source.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.elect import AT_RANDOM, BY_MAGNITUDE, Choice, Selection, Sum, is_among
from raymerge.kernels.elements import rounded, widened
from raymerge.kernels.hashes import fill_numbers
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.selection import RUN, Finder, make_finder, places

MOST = 6
"""Sources that may be merged in this way."""

Each: TypeAlias = tuple[np.float32, ...]
"""A number for each source."""

_LOWEST_BIT = np.array([0, *((number & -number).bit_length() - 1 for number in range(1, 1 << MOST))])
# A mark has a bit for each source that keeps the element, and one for each where it lies at a cut's level.
_KEPT, _AT_LEVEL = 1, 256
_LOWEST = 1 << 31


class Numbers(NamedTuple):
    """The numbers of ``Selection`` and ``Sum`` that go with each element, as tuples."""

    above: Each
    """Magnitudes that are not larger are dropped."""
    over: Each
    """Magnitudes that are larger are dropped as outliers."""
    tied: Each
    """Elements of this magnitude are chosen one by one; NaN for none."""
    level: Each
    """The same for outliers."""
    factors: Each
    """What kept elements are multiplied by first."""
    coefficients: Each
    """As in ``Sum``, like all that follow."""
    shares: Each
    weights: Each
    factor: np.float32
    elects: bool
    divides: bool


class FewInputs(NamedTuple):
    """A run of elements of base and sources."""

    words: NDArray[np.uint16]
    """Memory that holds them."""
    places: tuple[np.uint64, ...]
    """Where in it each of them begins, the base first; without a sign, as what could count from the end is
    looked up one by one."""
    start: int
    """Index of the first element within the logical tensor."""


def numbers_of(how: Sum, selection: Selection) -> Numbers:
    """Those of a few sources."""
    none, ones = (np.float32(np.nan),) * how.weights.size, (np.float32(1.0),) * how.weights.size
    if selection.by != BY_MAGNITUDE:
        above, over, tied, level = none, none, none, none
    else:
        above, over = tuple(selection.levels.above[::2]), tuple(selection.levels.above[1::2])
        tied, level = tuple(selection.levels.tied[::2]), tuple(selection.levels.tied[1::2])
    factors = tuple(selection.chances.factors) if selection.by == AT_RANDOM else ones
    coefficients, shares, weights = tuple(how.coefficients), tuple(how.shares), tuple(how.weights)
    rest = coefficients, shares, weights, how.factor, how.elects, how.divides
    return Numbers(above, over, tied, level, factors, *rest)


class Scratch(NamedTuple):
    """Arrays for the elements at a level, made once in a call."""

    places: NDArray[np.uint64]
    """Those of the inputs, ``[1 + N]``."""
    finder: Finder
    """Finds where an element lies at the level of a cut."""


@compiled
def merge_few(inputs: FewInputs, selection: Selection, numbers: Numbers, out: NDArray[np.uint16]) -> None:
    """Write what ``elect.merge_selected_stored`` writes; nothing is selected by deviation."""
    marks, chosen = np.empty(RUN, np.uint16), np.empty(RUN, np.int32)
    room = Scratch(np.array(inputs.places), make_finder())
    words, settles = inputs.words, False
    for source in range(len(numbers.tied)):
        settles |= not (np.isnan(numbers.tied[source]) and np.isnan(numbers.level[source]))
    for begin in range(0, out.size, RUN):
        size, first = min(RUN, out.size - begin), np.uint64(begin)
        if selection.by == BY_MAGNITUDE:
            _mark_by_magnitude(words, inputs.places, first, size, numbers, marks)
            if settles:
                _settle(inputs, begin, size, selection, marks, room)
        else:
            _mark_at_random(selection, inputs.start + begin, size, chosen, marks)
        if numbers.elects:
            merge_elected(words, inputs.places, first, marks, numbers, out[begin : begin + size])
        else:
            _merge(words, inputs.places, first, marks, numbers, out[begin : begin + size])


@inlined
def _mark_by_magnitude(
    words: NDArray[np.uint16],
    places: tuple[np.uint64, ...],
    first: np.uint64,
    size: int,
    numbers: Numbers,
    marks: NDArray[np.uint16],
) -> None:
    """Mark what each source keeps or has at a level; what it has there is not kept yet."""
    above, over, tied, level = numbers.above, numbers.over, numbers.tied, numbers.level
    for i in range(size):
        at, mark = first + np.uint64(i), np.uint16(0)
        base = widened(words[places[0] + at])
        for source in range(len(above)):
            magnitude = np.abs(widened(words[places[source + 1] + at]) - base)
            is_kept = (magnitude > above[source]) & (magnitude <= over[source])
            is_at_level = (magnitude == tied[source]) | (magnitude == level[source])
            mark |= np.uint16(_KEPT << source) if is_kept else np.uint16(0)
            mark |= np.uint16(_AT_LEVEL << source) if is_at_level else np.uint16(0)
        marks[i] = mark


@inlined
def _settle(
    inputs: FewInputs, begin: int, size: int, selection: Selection, marks: NDArray[np.uint16], room: Scratch
) -> None:
    """Mark what is kept of the elements at a level.

    Without a branch on what a source has there, which nothing foretells.
    """
    words, flags, found, firsts = inputs.words, room.finder.flags, room.finder.found, room.places
    above, tied, limits, keys = selection.levels
    for i in range(size):
        flags[i] = marks[i] >= np.uint16(_AT_LEVEL)
    flags[size:] = 0
    for place in found[: places(room.finder)]:
        at, mark = np.uint64(begin + place), marks[place]
        base = widened(words[firsts[0] + at])
        left = mark >> np.uint16(8)
        while left:
            source = _LOWEST_BIT[left]
            magnitude = np.abs(widened(words[firsts[source + 1] + at]) - base)
            cut, index = 2 * source, inputs.start + begin + place
            choice = Choice(tied[cut], limits[cut], keys[cut, 0], keys[cut, 1])
            other = Choice(tied[cut + 1], limits[cut + 1], keys[cut + 1, 0], keys[cut + 1, 1])
            kept = is_among(magnitude, index, above[cut], choice)
            lost = is_among(magnitude, index, above[cut + 1], other)
            mark |= np.uint16((np.uint16(kept) & ~np.uint16(lost)) << np.uint16(source))
            left &= left - np.uint16(1)
        marks[place] = mark


@inlined
def _mark_at_random(
    selection: Selection, start: int, size: int, numbers: NDArray[np.int32], marks: NDArray[np.uint16]
) -> None:
    """Mark what each source keeps."""
    marks[:] = 0
    for source in range(selection.chances.limits.size):
        limit, bit = selection.chances.limits[source], np.uint16(_KEPT << source)
        if limit > 0:
            key = selection.chances.words[source]
            fill_numbers(key[0], key[1], start, numbers[:size])
            last = np.int32(limit - 1 - _LOWEST)
            for i in range(size):
                marks[i] |= bit if numbers[i] <= last else np.uint16(0)


@inlined
def _merge(
    words: NDArray[np.uint16],
    places: tuple[np.uint64, ...],
    first: np.uint64,
    marks: NDArray[np.uint16],
    numbers: Numbers,
    out: NDArray[np.uint16],
) -> None:
    """Write the base plus the factor times the sum of the terms."""
    factors, coefficients, zero = numbers.factors, numbers.coefficients, np.float32(0.0)
    for i in range(out.size):
        at, mark, total = first + np.uint64(i), marks[i], zero
        base = widened(words[places[0] + at])
        for source in range(len(factors)):
            factor = factors[source] if mark & np.uint16(_KEPT << source) else zero
            total += factor * (widened(words[places[source + 1] + at]) - base) * coefficients[source]
        out[i] = rounded(base - (-(total * numbers.factor) + zero))


@inlined
def merge_elected(
    words: NDArray[np.uint16],
    places: tuple[np.uint64, ...],
    first: np.uint64,
    marks: NDArray[np.uint16],
    numbers: Numbers,
    out: NDArray[np.uint16],
) -> None:
    """Write the base plus the factor times the sum of the terms that have the sign of all."""
    factors, coefficients, shares, weights = (
        numbers.factors,
        numbers.coefficients,
        numbers.shares,
        numbers.weights,
    )
    zero, one = np.float32(0.0), np.float32(1.0)
    for i in range(out.size):
        at, mark, votes = first + np.uint64(i), marks[i], zero
        base = widened(words[places[0] + at])
        for source in range(len(factors)):
            factor = factors[source] if mark & np.uint16(_KEPT << source) else zero
            votes += factor * (widened(words[places[source + 1] + at]) - base) * coefficients[source]
        merged, divisor = zero, zero
        for source in range(len(factors)):
            # The same terms again: the compiler has them still.
            factor = factors[source] if mark & np.uint16(_KEPT << source) else zero
            term = factor * (widened(words[places[source + 1] + at]) - base) * coefficients[source]
            agreeing = (term if (term < zero) == (votes < zero) else zero) * shares[source]
            merged += agreeing
            divisor += weights[source] if agreeing != zero else zero
        if numbers.divides:
            merged = merged / (divisor if divisor != zero else one)
        out[i] = rounded(base - (-(merged * numbers.factor) + zero))
