"""The base plus a sum of sparsified, weighted deltas, in one loop over cache-sized runs.
``raymerge.methods.task_arithmetic`` and ``trim`` define it. Stored bfloat16 is widened, merged as float32 and
rounded a chunk at a time."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.elements import CHUNK, load_deltas, narrow, rounded, widened
from raymerge.kernels.hashes import fill_factors, fill_numbers, keep
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.ranks import sparsify_rows
from raymerge.kernels.selection import RUN, Finder, make_finder, places, write_deviations
from raymerge.kernels.sums import add_squares


class Rows(NamedTuple):
    """Vectors of one length in one array, each contiguous."""

    flat: NDArray[np.float32]
    """Row ``s`` starts at ``s * stride``."""
    stride: int


class Sum(NamedTuple):
    """How terms are added up, in float32 throughout."""

    coefficients: NDArray[np.float32]
    """Factors from sparsified deltas to terms, ``[N]``."""
    shares: NDArray[np.float32]
    """A further factor of each agreeing term, ``[N]``."""
    weights: NDArray[np.float32]
    """What each agreeing term adds to the divisor, ``[N]``."""
    factor: np.float32
    elects: bool
    """Whether terms must agree with the sign of their sum."""
    divides: bool


class Thresholds(NamedTuple):
    """Which elements are among the largest; two thresholds for each source, kept elements and outliers."""

    above: NDArray[np.float32]
    """Larger magnitudes are selected, ``[2N]``; for outliers at a tied level, the number just below it."""
    tied: NDArray[np.float32]
    """A share of the elements of this magnitude is selected, ``[2N]``; NaN for none."""
    limits: NDArray[np.int64]
    """That share, as ``hashes.keep`` takes it, ``[2N]``."""
    words: NDArray[np.uint64]
    """The two words of its key, ``[2N, 2]``."""


class Choice(NamedTuple):
    """How a threshold selects among tied elements."""

    tied: np.float32
    limit: int
    """With the key's words, see ``hashes.keep``."""
    first: np.uint64
    second: np.uint64


class Chances(NamedTuple):
    """Which elements are kept at random, and their factors."""

    words: NDArray[np.uint64]
    """``hashes.keep``'s words, ``[N, 2]``."""
    limits: NDArray[np.int64]
    """Its limits, ``[N]``."""
    factors: NDArray[np.float32]
    """Of kept elements, ``[N]``."""


BY_MAGNITUDE, BY_DEVIATION, AT_RANDOM = range(3)
"""By magnitude in each delta, by how far the deltas lie apart, or at random."""


class Selection(NamedTuple):
    by: int
    """One of the three."""
    levels: Thresholds
    """By magnitude, two for each delta; by deviation, the first two for all."""
    chances: Chances


_NONE, _NO_WORDS = np.empty(0, np.float32), np.empty((0, 2), np.uint64)
NO_THRESHOLDS = Thresholds(_NONE, _NONE, np.empty(0, np.int64), _NO_WORDS)
NO_CHANCES = Chances(_NO_WORDS, np.empty(0, np.int64), _NONE)


class Scratch(NamedTuple):
    """Buffers of one run."""

    terms: NDArray[np.float32]
    """``[N, RUN]``."""
    votes: NDArray[np.float32]
    merged: NDArray[np.float32]
    divisor: NDArray[np.float32]
    """Sum of the weights of agreeing terms, ``[RUN]``."""
    finder: Finder


@compiled
def make_scratch(num_sources: int) -> Scratch:
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
    """Write the merge of the selected elements; ``start`` is the first element's index."""
    scratch = make_scratch(how.coefficients.size)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        _add_selected(deltas, begin, end - begin, selection, start, how, scratch)
        _merge(base[begin:end], how, scratch, out[begin:end])


@compiled
def merge_factors(
    base: NDArray[np.float32], deltas: Rows, factors: Rows, how: Sum, out: NDArray[np.float32]
) -> None:
    """Write the merge of deltas times elementwise factors."""
    num_sources = how.coefficients.size
    scratch = make_scratch(num_sources)
    for begin in range(0, out.size, RUN):
        end = min(begin + RUN, out.size)
        scratch.votes[:] = 0.0
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            factor = factors.flat[source * factors.stride + begin : source * factors.stride + end]
            _weigh(delta, factor, how.coefficients[source], scratch.terms[source], scratch.votes)
        _merge(base[begin:end], how, scratch, out[begin:end])


@compiled
def write_selected(deltas: Rows, levels: Thresholds, start: int, out: NDArray[np.float32]) -> None:
    """Write the deltas ``[N, n]``, 0 where not selected by deviation."""
    num_sources, num_elements = out.shape
    scratch, marks = make_scratch(1), np.empty(RUN, np.float32)
    for begin in range(0, num_elements, RUN):
        end = min(begin + RUN, num_elements)
        write_deviations(deltas.flat[begin:], deltas.stride, num_sources, scratch.merged[: end - begin])
        _mark(scratch.merged[: end - begin], levels, start + begin, marks, scratch.finder)
        for source in range(num_sources):
            delta = deltas.flat[source * deltas.stride + begin : source * deltas.stride + end]
            for i in range(delta.size):
                out[source, begin + i] = marks[i] * delta[i]


@inlined
def _add_selected(
    deltas: Rows, begin: int, size: int, selection: Selection, start: int, how: Sum, scratch: Scratch
) -> None:
    """Write the terms of a run, and their sum as votes."""
    num_sources, factors = how.coefficients.size, scratch.merged[:size]
    scratch.votes[:] = 0.0
    if selection.by == BY_DEVIATION:
        write_deviations(deltas.flat[begin:], deltas.stride, num_sources, scratch.divisor[:size])
        _mark(scratch.divisor[:size], selection.levels, start + begin, factors, scratch.finder)
    for source in range(num_sources):
        first = source * deltas.stride + begin
        delta, coefficient = deltas.flat[first : first + size], how.coefficients[source]
        if selection.by == BY_MAGNITUDE:
            _trim(delta, selection.levels, source, start + begin, coefficient, scratch)
            continue
        if selection.by == AT_RANDOM:
            key, limit = selection.chances.words[source], selection.chances.limits[source]
            fill_factors(key[0], key[1], start + begin, limit, selection.chances.factors[source], factors)
        _weigh(delta, factors, coefficient, scratch.terms[source], scratch.votes)


@inlined
def _trim(
    delta: NDArray[np.float32],
    levels: Thresholds,
    source: int,
    start: int,
    coefficient: np.float32,
    scratch: Scratch,
) -> None:
    """Write the source's terms, 0 where an element is dropped, and add them to the votes.

    A product, not a choice: NaN must reach the result even where it is dropped, and infinity makes one there.
    The few elements tied at a threshold come last, one by one."""
    above, tied = levels.above[2 * source], levels.tied[2 * source]
    over, level = levels.above[2 * source + 1], levels.tied[2 * source + 1]
    terms, votes, flags = scratch.terms[source], scratch.votes, scratch.finder.flags
    one, zero = np.float32(1.0), np.float32(0.0)
    for i in range(delta.size):
        size = np.abs(delta[i])
        selected = one if (size > above) & (size <= over) else zero
        is_level = (size == tied) | (size == level)
        term = zero if is_level else selected * delta[i] * coefficient
        terms[i] = term
        votes[i] += term
        flags[i] = is_level
    if np.isnan(tied) and np.isnan(level):
        return
    flags[delta.size :] = 0
    first, second = choice_of(levels, 2 * source), choice_of(levels, 2 * source + 1)
    for place in scratch.finder.found[: places(scratch.finder)]:
        size, index = np.abs(delta[place]), start + place
        is_first, is_second = is_among(size, index, above, first), is_among(size, index, over, second)
        term = (np.float32(is_first) - np.float32(is_second)) * delta[place] * coefficient
        terms[place] = term
        votes[place] += term


@inlined
def _mark(
    values: NDArray[np.float32], levels: Thresholds, start: int, marks: NDArray[np.float32], finder: Finder
) -> None:
    """Write 1 where the first threshold keeps an element and the second does not drop it, else 0."""
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
    """Whether an element of magnitude ``size`` is among the largest by one threshold. Takes numbers, since
    passing arrays for one element takes longer than all else."""
    chosen = keep(choice.first, choice.second, index, choice.limit)
    return chosen if size == choice.tied else bool(size > above)


@inlined
def choice_of(levels: Thresholds, cut: int) -> Choice:
    return Choice(levels.tied[cut], levels.limits[cut], levels.words[cut, 0], levels.words[cut, 1])


@inlined
def _weigh(
    delta: NDArray[np.float32],
    factors: NDArray[np.float32],
    coefficient: np.float32,
    terms: NDArray[np.float32],
    votes: NDArray[np.float32],
) -> None:
    """Write the terms ``factor * delta * coefficient`` and add them to the votes. A product, not a choice:
    NaN must reach the result even where it is dropped."""
    for i in range(delta.size):
        term = factors[i] * delta[i] * coefficient
        terms[i] = term
        votes[i] += term


@inlined
def _merge(base: NDArray[np.float32], how: Sum, scratch: Scratch, out: NDArray[np.float32]) -> None:
    if not how.elects:
        _finish(base, scratch.votes, how.factor, out)
        return
    _elect(out.size, how, scratch)
    merged, divisor, zero, one = scratch.merged, scratch.divisor, np.float32(0.0), np.float32(1.0)
    if how.divides:
        for i in range(out.size):
            merged[i] = merged[i] / (divisor[i] if divisor[i] != zero else one)
    _finish(base, merged, how.factor, out)


@inlined
def _finish(
    base: NDArray[np.float32], merged: NDArray[np.float32], factor: np.float32, out: NDArray[np.float32]
) -> None:
    """Write the base plus the factor times the merged delta; where that is 0, the base's very bits, whose
    -0.0 a plain sum would turn into 0.0."""
    for i in range(out.size):
        out[i] = base[i] - (-(merged[i] * factor) + np.float32(0.0))


@inlined
def _elect(size: int, how: Sum, scratch: Scratch) -> None:
    """Add up the agreeing terms, and the weights of those that are not 0."""
    votes, merged, divisor, zero = scratch.votes, scratch.merged, scratch.divisor, np.float32(0.0)
    merged[:] = zero
    divisor[:] = zero
    for source in range(how.coefficients.size):
        term, share, weight = scratch.terms[source], how.shares[source], how.weights[source]
        for i in range(size):
            # NaN makes NaN of the votes, and passes as not negative, like them.
            agreeing = (term[i] if (term[i] < zero) == (votes[i] < zero) else zero) * share
            merged[i] += agreeing
            divisor[i] += weight if agreeing != zero else zero


class Inputs(NamedTuple):
    words: NDArray[np.uint16]
    places: NDArray[np.int64]
    """Offset of each in it, ``[1 + N]``."""
    start: int


class Ranked(NamedTuple):
    """What becomes of the elements of each delta by their ranks in their rows."""

    words: NDArray[np.uint64]
    tables: NDArray[np.int64]
    """See ``ranks.sparsify_rows``; ``[tables, row length]``."""
    chosen: NDArray[np.int64]
    """The table of each delta; -1 for none, ``[N]``."""
    factors: NDArray[np.float32]
    """Factors of the deltas without a table, ``[N]``."""


@compiled
def merge_selected_stored(inputs: Inputs, selection: Selection, how: Sum, out: NDArray[np.uint16]) -> None:
    """``merge_selected`` of stored elements, rounded into ``[n]``."""
    rows, merged = np.empty((inputs.places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    deltas = Rows(rows[1:].reshape(-1), CHUNK)
    for begin in range(0, out.size, CHUNK):
        size = min(CHUNK, out.size - begin)
        load_deltas(inputs.words, inputs.places, begin, size, rows)
        merge_selected(rows[0, :size], deltas, selection, inputs.start + begin, how, merged[:size])
        narrow(merged[:size], out[begin : begin + size])


@compiled
def merge_ranked_stored(inputs: Inputs, ranked: Ranked, how: Sum, out: NDArray[np.uint16]) -> None:
    """``merge_factors`` of deltas sparsified by rank, rounded; ``out`` is whole rows."""
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
    """Write the factor of each element of some rows of a delta."""
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
    """Add the squares of each delta, if it ``selects`` of selected elements only, to ``squares`` ``[N]``,
    piece after piece; the inputs begin with a piece."""
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


# Of a few sources what is computed of an element stays in registers from the stored numbers to the result.
# For that the number of sources must be known when a loop is compiled, so it is the length of tuples. With so
# many or fewer the compiler writes out the loops over them and works on many elements at once; with more it
# does neither, so those merges go source by source.
MOST = 6
"""Most sources of the loops below."""

Each: TypeAlias = tuple[np.float32, ...]

_LOWEST_BIT = np.array([0, *((number & -number).bit_length() - 1 for number in range(1, 1 << MOST))])
# A mark has a bit for each source that keeps the element, and one for each where it lies at a cut's level.
_KEPT, _AT_LEVEL = 1, 256
_LOWEST = 1 << 31


class Numbers(NamedTuple):
    """``Selection`` and ``Sum`` as tuples, a number for each source."""

    above: Each
    """Smaller magnitudes, and this one, are dropped."""
    over: Each
    """Larger magnitudes are dropped as outliers."""
    tied: Each
    """Elements of this magnitude are selected one by one; NaN for none."""
    level: Each
    """The same for outliers."""
    factors: Each
    """Factors on kept elements, before the coefficients."""
    coefficients: Each
    """As in ``Sum``, like all that follow."""
    shares: Each
    weights: Each
    factor: np.float32
    elects: bool
    divides: bool


class FewInputs(NamedTuple):
    words: NDArray[np.uint16]
    places: tuple[np.uint64, ...]
    """Offset of each in it, the base first; unsigned, since signed indices could count from the end and
    prevent vectorising."""
    start: int


def numbers_of(how: Sum, selection: Selection) -> Numbers:
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


class FewScratch(NamedTuple):
    """Buffers for tied elements."""

    places: NDArray[np.uint64]
    """Offsets of the inputs, ``[1 + N]``."""
    finder: Finder


@compiled
def merge_few(inputs: FewInputs, selection: Selection, numbers: Numbers, out: NDArray[np.uint16]) -> None:
    """``merge_selected_stored``, but for selection by deviation."""
    marks, chosen = np.empty(RUN, np.uint16), np.empty(RUN, np.int32)
    scratch, words = FewScratch(np.array(inputs.places), make_finder()), inputs.words
    settles = _are_tied(numbers)
    for begin in range(0, out.size, RUN):
        size, first = min(RUN, out.size - begin), np.uint64(begin)
        if selection.by == BY_MAGNITUDE:
            _mark_by_magnitude(words, inputs.places, first, size, numbers, marks)
            if settles:
                _settle(inputs, begin, size, selection, marks, scratch)
        else:
            _mark_at_random(selection, inputs.start + begin, size, chosen, marks)
        if numbers.elects:
            merge_elected(words, inputs.places, first, marks, numbers, out[begin : begin + size])
        else:
            _merge_few(words, inputs.places, first, marks, numbers, out[begin : begin + size])


@compiled
def mark_few(inputs: FewInputs, selection: Selection, numbers: Numbers, marks: NDArray[np.uint16]) -> None:
    """Mark what each source keeps by magnitude, for ``merge_marked``."""
    scratch, settles = FewScratch(np.array(inputs.places), make_finder()), _are_tied(numbers)
    for begin in range(0, marks.size, RUN):
        size = min(RUN, marks.size - begin)
        run = marks[begin : begin + size]
        _mark_by_magnitude(inputs.words, inputs.places, np.uint64(begin), size, numbers, run)
        if settles:
            _settle(inputs, begin, size, selection, run, scratch)


@compiled
def merge_marked(
    inputs: FewInputs, marks: NDArray[np.uint16], numbers: Numbers, out: NDArray[np.uint16]
) -> None:
    """``merge_few`` of what is marked already."""
    if numbers.elects:
        merge_elected(inputs.words, inputs.places, np.uint64(0), marks, numbers, out)
    else:
        _merge_few(inputs.words, inputs.places, np.uint64(0), marks, numbers, out)


@inlined
def _are_tied(numbers: Numbers) -> bool:
    """Whether there are elements to be selected one by one."""
    settles = False
    for source in range(len(numbers.tied)):
        settles |= not (np.isnan(numbers.tied[source]) and np.isnan(numbers.level[source]))
    return settles


@inlined
def _mark_by_magnitude(
    words: NDArray[np.uint16],
    places: tuple[np.uint64, ...],
    first: np.uint64,
    size: int,
    numbers: Numbers,
    marks: NDArray[np.uint16],
) -> None:
    """Mark what each source keeps, and its tied elements, which are not kept yet."""
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
    inputs: FewInputs,
    begin: int,
    size: int,
    selection: Selection,
    marks: NDArray[np.uint16],
    scratch: FewScratch,
) -> None:
    """Mark the tied elements that are kept, without a branch on a source's tie, which is unpredictable."""
    words, flags, indices, firsts = inputs.words, scratch.finder.flags, scratch.finder.found, scratch.places
    above, tied, limits, keys = selection.levels
    for i in range(size):
        flags[i] = marks[i] >= np.uint16(_AT_LEVEL)
    flags[size:] = 0
    for place in indices[: places(scratch.finder)]:
        at, mark = np.uint64(begin + place), marks[place]
        base = widened(words[firsts[0] + at])
        left = mark >> np.uint16(8)
        while left:
            source = _LOWEST_BIT[left]
            magnitude = np.abs(widened(words[firsts[source + 1] + at]) - base)
            cut, index = 2 * source, inputs.start + begin + place
            choice = Choice(tied[cut], limits[cut], keys[cut, 0], keys[cut, 1])
            other = Choice(tied[cut + 1], limits[cut + 1], keys[cut + 1, 0], keys[cut + 1, 1])
            survives = is_among(magnitude, index, above[cut], choice)
            lost = is_among(magnitude, index, above[cut + 1], other)
            mark |= np.uint16((np.uint16(survives) & ~np.uint16(lost)) << np.uint16(source))
            left &= left - np.uint16(1)
        marks[place] = mark


@inlined
def _mark_at_random(
    selection: Selection, start: int, size: int, numbers: NDArray[np.int32], marks: NDArray[np.uint16]
) -> None:
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
def _merge_few(
    words: NDArray[np.uint16],
    places: tuple[np.uint64, ...],
    first: np.uint64,
    marks: NDArray[np.uint16],
    numbers: Numbers,
    out: NDArray[np.uint16],
) -> None:
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
    """Write the base plus the factor times the sum of the agreeing terms."""
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
