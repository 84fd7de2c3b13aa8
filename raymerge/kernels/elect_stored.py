"""The merges of ``raymerge.kernels.elect``, of bfloat16 as it is stored.

What is computed of an element stays in registers from the stored numbers to the result. For that the number
of sources must be known when a loop is compiled, so it is the length of tuples. With ``MOST`` sources or
fewer the compiler writes out the loops over them and works on many elements at once; with more it does
neither, so those merges go source by source.

A chunk of every input is widened, merged by the loops there and rounded, before the next one is.

The merges of ``raymerge.kernels.elect_stored`` of a few deltas thinned by rank.

The terms of a chunk are found delta after delta; what is made of those of an element stays in registers, as
in ``raymerge.kernels.elect_stored``.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.bf16 import CHUNK, load_deltas, narrow, rounded, widened
from raymerge.kernels.elect import (
    BY_SIZE,
    Choice,
    Cuts,
    Picks,
    Rows,
    Sum,
    is_among,
    merge_factors,
    merge_picked,
    write_selected,
)
from raymerge.kernels.hashes import fill_numbers
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.ranks import thin_rows
from raymerge.kernels.selection import RUN, Finder, make_finder, places
from raymerge.kernels.sums import add_squares


class Inputs(NamedTuple):
    """A run of elements of base and sources."""

    words: NDArray[np.uint16]
    """Memory that holds them."""
    places: NDArray[np.int64]
    """Where in it each of them begins, ``[1 + N]``."""
    start: int
    """Index of the first element within the logical tensor."""


class Ranked(NamedTuple):
    """What becomes of the elements of each delta, by their ranks in their rows."""

    words: NDArray[np.uint64]
    """The two words of the key, ``[N, 2]``."""
    tables: NDArray[np.int64]
    """As ``ranks.thin_rows`` takes them, ``[tables, row length]``."""
    chosen: NDArray[np.int64]
    """For each delta, which of the tables is its; -1 for none, ``[N]``."""
    factors: NDArray[np.float32]
    """What the elements of a delta without a table are multiplied by, ``[N]``."""


@compiled
def merge_picked_stored(inputs: Inputs, picks: Picks, how: Sum, out: NDArray[np.uint16]) -> None:
    """Write what ``elect.merge_picked`` makes of the deltas, rounded; ``out`` is ``[n]``."""
    rows, merged = np.empty((inputs.places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    deltas = Rows(rows[1:].reshape(-1), CHUNK)
    for begin in range(0, out.size, CHUNK):
        size = min(CHUNK, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        merge_picked(rows[0, :size], deltas, picks, inputs.start + begin, how, merged[:size])
        narrow(merged[:size], out[begin : begin + size])


@compiled
def merge_ranked_stored(inputs: Inputs, ranked: Ranked, how: Sum, out: NDArray[np.uint16]) -> None:
    """Write what ``elect.merge_factors`` makes of deltas thinned by rank, rounded; ``out`` is whole rows."""
    length, num_sources = ranked.tables.shape[1], how.coefficients.size
    chunk = max(1, CHUNK // length) * length
    rows, merged = np.empty((1 + num_sources, chunk), np.float32), np.empty(chunk, np.float32)
    factors = np.empty((num_sources, chunk), np.float32)
    deltas, thinned = Rows(rows[1:].reshape(-1), chunk), Rows(factors.reshape(-1), chunk)
    for begin in range(0, out.size, chunk):
        size = min(chunk, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        for source in range(num_sources):
            row = rows[1 + source, :size]
            write_factors(row, ranked, source, inputs.start + begin, factors[source, :size])
        merge_factors(rows[0, :size], deltas, thinned, how, merged[:size])
        narrow(merged[:size], out[begin : begin + size])


@compiled
def write_factors(
    delta: NDArray[np.float32], ranked: Ranked, source: int, start: int, out: NDArray[np.float32]
) -> None:
    """What each element of some rows of a delta is multiplied by."""
    table = ranked.chosen[source]
    if table < 0:
        out[:] = ranked.factors[source]
        return
    fill_numbers(ranked.words[source, 0], ranked.words[source, 1], start, out.view(np.int32))
    thin_rows(delta, ranked.tables[table], out)


@compiled
def add_squares_stored(
    inputs: Inputs, size: int, cuts: Cuts, selects: bool, squares: NDArray[np.float64]
) -> None:
    """Add up the squares of each delta, piece after piece.

    Args:
        inputs: the first element begins a piece of the tensor.
        size: elements of each input.
        cuts: as ``elect.write_selected`` takes them.
        selects: whether only those count that it would select.
        squares: ``[N]``, added to.
    """
    rows = np.empty((inputs.places.size, CHUNK), np.float32)
    chosen = np.empty((squares.size, CHUNK if selects else 0), np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(inputs.words, inputs.places, begin, length, rows)
        if selects:
            # What lies behind a short chunk is of no matter.
            write_selected(Rows(rows[1:].reshape(-1), CHUNK), cuts, inputs.start + begin, chosen)
        for source in range(squares.size):
            row = chosen[source, :length] if selects else rows[1 + source, :length]
            squares[source] = add_squares(squares[source], row)


MOST = 6
"""Sources that may be merged in this way."""

Each: TypeAlias = tuple[np.float32, ...]
"""A number for each source."""

_LOWEST_BIT = np.array([0, *((number & -number).bit_length() - 1 for number in range(1, 1 << MOST))])
# A mark has a bit for each source that keeps the element, and one for each where it lies at a cut's level.
_KEPT, _AT_LEVEL = 1, 256
_LOWEST = 1 << 31


class Numbers(NamedTuple):
    """The numbers of ``Picks`` and ``Sum`` that go with each element, as tuples."""

    above: Each
    """What is larger is kept,"""
    over: Each
    """if it is not larger than this."""
    tied: Each
    """What has this magnitude or"""
    level: Each
    """this is chosen one by one; NaN for none."""
    factors: Each
    """What kept elements are multiplied by first."""
    coefficients: Each
    """What makes them terms."""
    shares: Each
    """What each term that agrees is multiplied by once more."""
    weights: Each
    """What each term that agrees adds to the divisor."""
    factor: np.float32
    """Factor on the sum."""
    elects: bool
    """Whether terms must agree with the sign of their sum."""
    divides: bool
    """Whether the sum is divided by the weights that went in."""


class FewInputs(NamedTuple):
    """A run of elements of base and sources."""

    words: NDArray[np.uint16]
    """Memory that holds them."""
    places: tuple[np.uint64, ...]
    """Where in it each of them begins, the base first; without a sign, as what could count from the end is
    looked up one by one."""
    start: int
    """Index of the first element within the logical tensor."""


def numbers_of(picks: Picks, how: Sum) -> Numbers:
    """Those of a few sources."""
    ones, none = np.ones(how.weights.size, np.float32), np.full(how.weights.size, np.nan, np.float32)
    is_by_size = picks.by == BY_SIZE
    above, tied = picks.cuts.above, picks.cuts.tied
    return Numbers(
        above=tuple(above[::2] if is_by_size else none),
        over=tuple(above[1::2] if is_by_size else none),
        tied=tuple(tied[::2] if is_by_size else none),
        level=tuple(tied[1::2] if is_by_size else none),
        factors=tuple(ones if is_by_size else picks.chances.factors),
        coefficients=tuple(how.coefficients),
        shares=tuple(how.shares),
        weights=tuple(how.weights),
        factor=how.factor,
        elects=how.elects,
        divides=how.divides,
    )


class Room(NamedTuple):
    """Arrays for the elements at a level, made once in a call."""

    places: NDArray[np.uint64]
    """Those of the inputs, ``[1 + N]``."""
    finder: Finder
    """Finds where an element lies at the level of a cut."""


@compiled
def merge_few(inputs: FewInputs, picks: Picks, numbers: Numbers, out: NDArray[np.uint16]) -> None:
    """Write what ``elect_stored.merge_picked_stored`` writes; nothing is picked by spread."""
    marks, chosen = np.empty(RUN, np.uint16), np.empty(RUN, np.int32)
    room = Room(np.array(inputs.places), make_finder())
    words, settles = inputs.words, False
    for source in range(len(numbers.tied)):
        settles |= not (np.isnan(numbers.tied[source]) and np.isnan(numbers.level[source]))
    for begin in range(0, out.size, RUN):
        size, first = min(RUN, out.size - begin), np.uint64(begin)
        if picks.by == BY_SIZE:
            _mark_by_size(words, inputs.places, first, size, numbers, marks)
            if settles:
                _settle(inputs, begin, size, picks, marks, room)
        else:
            _mark_by_chance(picks, inputs.start + begin, size, chosen, marks)
        if numbers.elects:
            _merge_elected(words, inputs.places, first, marks, numbers, out[begin : begin + size])
        else:
            _merge(words, inputs.places, first, marks, numbers, out[begin : begin + size])


@inlined
def _mark_by_size(
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
    inputs: FewInputs, begin: int, size: int, picks: Picks, marks: NDArray[np.uint16], room: Room
) -> None:
    """Mark what is kept of the elements at a level.

    Without a branch on what a source has there, which nothing foretells.
    """
    words, flags, found, firsts = inputs.words, room.finder.flags, room.finder.found, room.places
    above, tied, limits, keys = picks.cuts
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
def _mark_by_chance(
    picks: Picks, start: int, size: int, numbers: NDArray[np.int32], marks: NDArray[np.uint16]
) -> None:
    """Mark what each source keeps."""
    marks[:] = 0
    for source in range(picks.chances.limits.size):
        limit, bit = picks.chances.limits[source], np.uint16(_KEPT << source)
        if limit > 0:
            key = picks.chances.words[source]
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
def _merge_elected(
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


@compiled
def merge_ranked_few(inputs: FewInputs, ranked: Ranked, numbers: Numbers, out: NDArray[np.uint16]) -> None:
    """Write what ``elect_stored.merge_ranked_stored`` writes."""
    length, words, places = ranked.tables.shape[1], inputs.words, inputs.places
    chunk = max(1, CHUNK // length) * length
    delta, terms = np.empty(chunk, np.float32), np.empty((len(numbers.weights), chunk), np.float32)
    for begin in range(0, out.size, chunk):
        size, first = min(chunk, out.size - begin), np.uint64(begin)
        bases, results = words[places[0] + first :][:size], out[begin : begin + size]
        for source in range(len(numbers.weights)):
            own, term = words[places[source + 1] + first :][:size], terms[source, :size]
            for i in range(size):
                delta[i] = widened(own[i]) - widened(bases[i])
            write_factors(delta[:size], ranked, source, inputs.start + begin, term)
            coefficient = numbers.coefficients[source]
            for i in range(size):
                term[i] = term[i] * delta[i] * coefficient
        if numbers.elects:
            _merge_ranked_elected(bases, terms, numbers, results)
        else:
            _merge_ranked(bases, terms, numbers, results)


@inlined
def _merge_ranked(
    bases: NDArray[np.uint16], terms: NDArray[np.float32], numbers: Numbers, out: NDArray[np.uint16]
) -> None:
    """Write the base plus the factor times the sum of the terms."""
    weights, zero = numbers.weights, np.float32(0.0)
    for i in range(out.size):
        total = zero
        for source in range(len(weights)):
            total += terms[source, i]
        out[i] = rounded(widened(bases[i]) - (-(total * numbers.factor) + zero))


@inlined
def _merge_ranked_elected(
    bases: NDArray[np.uint16], terms: NDArray[np.float32], numbers: Numbers, out: NDArray[np.uint16]
) -> None:
    """Write the base plus the factor times the sum of the terms that have the sign of all."""
    shares, weights, zero, one = numbers.shares, numbers.weights, np.float32(0.0), np.float32(1.0)
    for i in range(out.size):
        votes, merged, divisor = zero, zero, zero
        for source in range(len(weights)):
            votes += terms[source, i]
        for source in range(len(weights)):
            term = terms[source, i]
            # NaN makes NaN of the votes, and passes as not negative, like them.
            agreeing = (term if (term < zero) == (votes < zero) else zero) * shares[source]
            merged += agreeing
            divisor += weights[source] if agreeing != zero else zero
        if numbers.divides:
            merged = merged / (divisor if divisor != zero else one)
        out[i] = rounded(widened(bases[i]) - (-(merged * numbers.factor) + zero))
