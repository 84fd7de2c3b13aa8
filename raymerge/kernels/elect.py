"""The base plus a sum of sparsified, weighted deltas, in one loop over cache-sized runs.

For ``raymerge.methods.task_arithmetic`` and ``raymerge.methods.trim``, which say what is computed. Of
bfloat16 as it is stored a chunk of every input is widened, merged as float32 and rounded, before the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.elements import CHUNK, load_deltas, narrow
from raymerge.kernels.hashes import fill_factors, fill_numbers, keep
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.ranks import sparsify_rows
from raymerge.kernels.selection import RUN, Finder, make_finder, places, write_deviations
from raymerge.kernels.sums import add_squares


class Rows(NamedTuple):
    """Vectors of one length in one array, each contiguous."""

    flat: NDArray[np.float32]
    """Row ``s`` lies from ``s * stride`` on."""
    stride: int
    """Elements from one row to the next."""


class Sum(NamedTuple):
    """What is done with the terms of all sources, float32 throughout."""

    coefficients: NDArray[np.float32]
    """What each sparsified delta is multiplied by to make its term, ``[N]``."""
    shares: NDArray[np.float32]
    """What each term that agrees is multiplied by once more, ``[N]``."""
    weights: NDArray[np.float32]
    """What each term that agrees adds to the divisor, ``[N]``."""
    factor: np.float32
    """Factor on the sum."""
    elects: bool
    """Whether terms must agree with the sign of their sum."""
    divides: bool
    """Whether the sum is divided by the weights that went in."""


class Thresholds(NamedTuple):
    """Which elements are among the largest; two levels for each source, of which the second takes away."""

    above: NDArray[np.float32]
    """Elements of larger magnitude are, ``[2N]``; of a second cut with a level, the number just below it."""
    tied: NDArray[np.float32]
    """Of those of this magnitude some are, ``[2N]``; NaN for none."""
    limits: NDArray[np.int64]
    """How many, as ``hashes.keep`` takes it, ``[2N]``."""
    words: NDArray[np.uint64]
    """The two words of the key that chooses them, ``[2N, 2]``."""


class Choice(NamedTuple):
    """How a cut chooses among equals."""

    tied: np.float32
    """Their magnitude."""
    limit: int
    """As ``hashes.keep`` takes it, like the words of the key."""
    first: np.uint64
    second: np.uint64


class Chances(NamedTuple):
    """Which elements are kept by chance, and what makes up for the others."""

    words: NDArray[np.uint64]
    """The two words of the key, ``[N, 2]``."""
    limits: NDArray[np.int64]
    """As ``hashes.keep`` takes it, ``[N]``."""
    factors: NDArray[np.float32]
    """What the kept elements are multiplied by, ``[N]``."""


BY_MAGNITUDE, BY_DEVIATION, AT_RANDOM = range(3)
"""By what elements are picked: their magnitude in each delta, how far the deltas lie apart there, chance."""


class Selection(NamedTuple):
    """Which elements of the deltas are added up."""

    by: int
    """One of the above."""
    levels: Thresholds
    """By magnitude, for each delta; by deviation, of which the first two hold for all."""
    chances: Chances
    """By chance."""


_NONE, _NO_WORDS = np.empty(0, np.float32), np.empty((0, 2), np.uint64)
NO_THRESHOLDS = Thresholds(_NONE, _NONE, np.empty(0, np.int64), _NO_WORDS)
"""Where chance selects."""
NO_CHANCES = Chances(_NO_WORDS, np.empty(0, np.int64), _NONE)
"""Where it does not."""


class Scratch(NamedTuple):
    """Arrays of one run, made once in a call."""

    terms: NDArray[np.float32]
    """Of each source, ``[N, RUN]``."""
    votes: NDArray[np.float32]
    """Sum of the terms, ``[RUN]``."""
    merged: NDArray[np.float32]
    """Sum of the terms that agree with it, ``[RUN]``."""
    divisor: NDArray[np.float32]
    """Sum of their weights, ``[RUN]``."""
    finder: Finder
    """Finds where an element lies at the level of a cut."""


@compiled
def make_scratch(num_sources: int) -> Scratch:
    """Scratch for so many sources."""
    votes, merged, divisor = np.empty(RUN, np.float32), np.empty(RUN, np.float32), np.empty(RUN, np.float32)
    return Scratch(np.empty((num_sources, RUN), np.float32), votes, merged, divisor, make_finder())


@compiled
def merge_selected(
    base: NDArray[np.float32],
    deltas: Rows,
    selection: Selection,
    start: int,
    how: Sum,
    out: NDArray[np.float32],
) -> None:
    """Write the merge of what is picked of the deltas; ``start`` is the first element's index."""
    room = make_scratch(how.coefficients.size)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        _add_selected(deltas, begin, end - begin, selection, start, how, room)
        _merge(base[begin:end], how, room, out[begin:end])


@compiled
def merge_factors(
    base: NDArray[np.float32], deltas: Rows, factors: Rows, how: Sum, out: NDArray[np.float32]
) -> None:
    """Write the merge of deltas that are multiplied by factors element by element."""
    num_sources = how.coefficients.size
    room = make_scratch(num_sources)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        room.votes[:] = 0.0
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            factor = factors.flat[source * factors.stride + begin : source * factors.stride + end]
            _weigh(delta, factor, how.coefficients[source], room.terms[source], room.votes)
        _merge(base[begin:end], how, room, out[begin:end])


@compiled
def write_selected(deltas: Rows, levels: Thresholds, start: int, out: NDArray[np.float32]) -> None:
    """Write the deltas ``[N, n]`` with 0 where they are not selected by deviation."""
    num_sources, num_elements = out.shape
    room, marks = make_scratch(1), np.empty(RUN, np.float32)
    for begin in range(0, num_elements, RUN):
        end = min(begin + RUN, num_elements)
        write_deviations(deltas.flat[begin:], deltas.stride, num_sources, room.merged[: end - begin])
        _mark(room.merged[: end - begin], levels, start + begin, marks, room.finder)
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            for i in range(delta.size):
                out[source, begin + i] = marks[i] * delta[i]


@inlined
def _add_selected(
    deltas: Rows, begin: int, size: int, selection: Selection, start: int, how: Sum, room: Scratch
) -> None:
    """Write the terms of a run, and add them up to the votes."""
    num_sources, factors = how.coefficients.size, room.merged[:size]
    room.votes[:] = 0.0
    if selection.by == BY_DEVIATION:
        write_deviations(deltas.flat[begin:], deltas.stride, num_sources, room.divisor[:size])
        _mark(room.divisor[:size], selection.levels, start + begin, factors, room.finder)
    for source in range(num_sources):
        first = source * deltas.stride + begin
        delta, coefficient = deltas.flat[first : first + size], how.coefficients[source]
        if selection.by == BY_MAGNITUDE:
            _trim(delta, selection.levels, source, start + begin, coefficient, room)
            continue
        if selection.by == AT_RANDOM:
            key, limit = selection.chances.words[source], selection.chances.limits[source]
            fill_factors(key[0], key[1], start + begin, limit, selection.chances.factors[source], factors)
        _weigh(delta, factors, coefficient, room.terms[source], room.votes)


@inlined
def _trim(
    delta: NDArray[np.float32],
    levels: Thresholds,
    source: int,
    start: int,
    coefficient: np.float32,
    room: Scratch,
) -> None:
    """Write the source's terms, 0 where an element is not kept, and add them to the votes.

    A product, not a choice: NaN must reach the result even where it is dropped, and infinity makes one there.
    Elements at the level of a cut come last, since few of them have to be looked at one by one.
    """
    above, tied = levels.above[2 * source], levels.tied[2 * source]
    over, level = levels.above[2 * source + 1], levels.tied[2 * source + 1]
    terms, votes, flags = room.terms[source], room.votes, room.finder.flags
    one, zero = np.float32(1.0), np.float32(0.0)
    for i in range(delta.size):
        size = np.abs(delta[i])
        kept = one if (size > above) & (size <= over) else zero
        is_level = (size == tied) | (size == level)
        term = zero if is_level else kept * delta[i] * coefficient
        terms[i] = term
        votes[i] += term
        flags[i] = is_level
    if np.isnan(tied) and np.isnan(level):
        return
    flags[delta.size :] = 0
    first, second = choice_of(levels, 2 * source), choice_of(levels, 2 * source + 1)
    for place in room.finder.found[: places(room.finder)]:
        size, index = np.abs(delta[place]), start + place
        is_first, is_second = is_among(size, index, above, first), is_among(size, index, over, second)
        term = (np.float32(is_first) - np.float32(is_second)) * delta[place] * coefficient
        terms[place] = term
        votes[place] += term


@inlined
def _mark(
    values: NDArray[np.float32], levels: Thresholds, start: int, marks: NDArray[np.float32], finder: Finder
) -> None:
    """Write 1 where the first cut keeps an element and the second does not take it away, else 0."""
    above, tied, over, level = levels.above[0], levels.tied[0], levels.above[1], levels.tied[1]
    one, zero = np.float32(1.0), np.float32(0.0)
    for i in range(values.size):
        size = np.abs(values[i])
        marks[i] = one if (size > above) & (size <= over) else zero
        finder.flags[i] = (size == tied) | (size == level)
    if np.isnan(tied) and np.isnan(level):
        return
    finder.flags[values.size :] = 0
    first, second = choice_of(levels, 0), choice_of(levels, 1)
    for place in finder.found[: places(finder)]:
        size, index = np.abs(values[place]), start + place
        is_first, is_second = is_among(size, index, above, first), is_among(size, index, over, second)
        marks[place] = np.float32(is_first) - np.float32(is_second)


@inlined
def is_among(size: np.float32, index: int, above: np.float32, choice: Choice) -> bool:
    """Whether an element of that size is among the largest by a cut.

    Of which this takes the numbers: to hand on arrays for one element takes longer than all else.
    """
    chosen = keep(choice.first, choice.second, index, choice.limit)
    return chosen if size == choice.tied else bool(size > above)


@inlined
def choice_of(levels: Thresholds, cut: int) -> Choice:
    """How one of the levels chooses among equals."""
    return Choice(levels.tied[cut], levels.limits[cut], levels.words[cut, 0], levels.words[cut, 1])


@inlined
def _weigh(
    delta: NDArray[np.float32],
    factors: NDArray[np.float32],
    coefficient: np.float32,
    terms: NDArray[np.float32],
    votes: NDArray[np.float32],
) -> None:
    """Write the terms ``factor * delta * coefficient`` and add them to the votes.

    A product, not a choice: NaN must reach the result even where it is dropped.
    """
    for i in range(delta.size):
        term = factors[i] * delta[i] * coefficient
        terms[i] = term
        votes[i] += term


@inlined
def _merge(base: NDArray[np.float32], how: Sum, room: Scratch, out: NDArray[np.float32]) -> None:
    """Write the base plus the factor times the (elected) sum of the terms."""
    if not how.elects:
        _finish(base, room.votes, how.factor, out)
        return
    _elect(out.size, how, room)
    merged, divisor, zero, one = room.merged, room.divisor, np.float32(0.0), np.float32(1.0)
    if how.divides:
        for i in range(out.size):
            merged[i] = merged[i] / (divisor[i] if divisor[i] != zero else one)
    _finish(base, merged, how.factor, out)


@inlined
def _finish(
    base: NDArray[np.float32], merged: NDArray[np.float32], factor: np.float32, out: NDArray[np.float32]
) -> None:
    """Write the base plus the factor times what is merged.

    Where nothing is added the base's very bits stay; a plain sum would make 0.0 of its -0.0.
    """
    for i in range(out.size):
        out[i] = base[i] - (-(merged[i] * factor) + np.float32(0.0))


@inlined
def _elect(size: int, how: Sum, room: Scratch) -> None:
    """Add up the terms that have the sign of the votes, and the weights of those that are not 0."""
    votes, merged, divisor, zero = room.votes, room.merged, room.divisor, np.float32(0.0)
    merged[:] = zero
    divisor[:] = zero
    for source in range(how.coefficients.size):
        term, share, weight = room.terms[source], how.shares[source], how.weights[source]
        for i in range(size):
            # NaN makes NaN of the votes, and passes as not negative, like them.
            agreeing = (term[i] if (term[i] < zero) == (votes[i] < zero) else zero) * share
            merged[i] += agreeing
            divisor[i] += weight if agreeing != zero else zero


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
    """As ``ranks.sparsify_rows`` takes them, ``[tables, row length]``."""
    chosen: NDArray[np.int64]
    """For each delta, which of the tables is its; -1 for none, ``[N]``."""
    factors: NDArray[np.float32]
    """What the elements of a delta without a table are multiplied by, ``[N]``."""


@compiled
def merge_selected_stored(inputs: Inputs, selection: Selection, how: Sum, out: NDArray[np.uint16]) -> None:
    """Write what ``elect.merge_selected`` makes of the deltas, rounded; ``out`` is ``[n]``."""
    rows, merged = np.empty((inputs.places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    deltas = Rows(rows[1:].reshape(-1), CHUNK)
    for begin in range(0, out.size, CHUNK):
        size = min(CHUNK, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        merge_selected(rows[0, :size], deltas, selection, inputs.start + begin, how, merged[:size])
        narrow(merged[:size], out[begin : begin + size])


@compiled
def merge_ranked_stored(inputs: Inputs, ranked: Ranked, how: Sum, out: NDArray[np.uint16]) -> None:
    """Write what ``merge_factors`` makes of deltas sparsified by rank, rounded; ``out`` is whole rows."""
    length, num_sources = ranked.tables.shape[1], how.coefficients.size
    chunk = max(1, CHUNK // length) * length
    rows, merged = np.empty((1 + num_sources, chunk), np.float32), np.empty(chunk, np.float32)
    factors = np.empty((num_sources, chunk), np.float32)
    deltas, sparsified = Rows(rows[1:].reshape(-1), chunk), Rows(factors.reshape(-1), chunk)
    for begin in range(0, out.size, chunk):
        size = min(chunk, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        for source in range(num_sources):
            row = rows[1 + source, :size]
            write_factors(row, ranked, source, inputs.start + begin, factors[source, :size])
        merge_factors(rows[0, :size], deltas, sparsified, how, merged[:size])
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
    sparsify_rows(delta, ranked.tables[table], out)


@compiled
def add_squares_stored(
    inputs: Inputs, size: int, levels: Thresholds, selects: bool, squares: NDArray[np.float64]
) -> None:
    """Add the squares of each delta to ``squares`` ``[N]``, piece after piece; the inputs begin with a piece.

    Where it ``selects``, only what ``write_selected`` would select counts.
    """
    rows = np.empty((inputs.places.size, CHUNK), np.float32)
    chosen = np.empty((squares.size, CHUNK if selects else 0), np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(inputs.words, inputs.places, begin, length, rows)
        if selects:
            # What lies behind a short chunk is of no matter.
            write_selected(Rows(rows[1:].reshape(-1), CHUNK), levels, inputs.start + begin, chosen)
        for source in range(squares.size):
            row = chosen[source, :length] if selects else rows[1 + source, :length]
            squares[source] = add_squares(squares[source], row)
