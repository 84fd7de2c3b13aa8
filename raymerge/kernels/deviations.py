"""How far deltas of stored bfloat16 lie apart, and how large they are.

``selection.write_deviations`` defines the deviation, in float64 and with a root. For nearly all elements
float32 decides whether it is above a level: the sum of squared differences of all pairs, over the number of
deltas, is its square but for a small relative rounding error. Elements closer to the level are computed one
by one, so no result depends on that sum.

The number of sources is the length of tuples, as in ``raymerge.kernels.elect``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raymerge.kernels.elect import (
    MOST,
    FewInputs,
    Inputs,
    Numbers,
    Selection,
    Sum,
    Thresholds,
    add_squares_stored,
    choice_of,
    is_among,
    merge_elected,
    merge_selected_stored,
)
from raymerge.kernels.elements import CHUNK, load_deltas, widened
from raymerge.kernels.jit import compiled, inlined
from raymerge.kernels.selection import (
    EVERY,
    RUN,
    Bins,
    Finder,
    add_one,
    count,
    count_all,
    make_finder,
    places,
    write_deviations,
)
from raymerge.kernels.sums import LANES, RUNS, add_values, fold_piece, fold_run
from raymerge.kernels.sums import RUN as FOLDED

# Many times what rounding makes of a sum of squares of up to six deltas, for which 2**-19 would do.
_MARGIN = 2.0**-16
# Levels whose square float32 tells from 0 and from infinity.
_LEAST, _MOST = np.float32(2.0**-50), np.float32(2.0**60)
_LEAST_PATTERN, _INFINITY = np.uint32(0x2680_0000), np.uint32(0x7F80_0000)
# Every source keeps the element.
_ALL = np.uint16(0xFFFF)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)


@compiled
def counts_few(bins: Bins) -> bool:
    """Whether ``count_deviations_few`` can place most elements below or above the bins."""
    return bool((bins.low == 0 or bins.low >= _LEAST_PATTERN) and _LEAST_PATTERN <= bins.high <= _INFINITY)


@inlined
def _picks_few(levels: Thresholds) -> bool:
    """Whether most elements are certain to be on one side of a threshold."""
    return bool(levels.above[0] < 0 or levels.above[0] >= _LEAST)


@compiled
def count_deviations_few(
    inputs: FewInputs, size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """``count_deviations`` of few sources; ``bins`` do not cover all patterns."""
    above, differing, marks, finder = 0, 0, np.empty(RUN, np.uint16), make_finder()
    low, width = bins.low, np.uint32(bins.high - bins.low)
    lowest, _ = _certain(np.uint32(low).view(np.float32), len(inputs.places))
    _, highest = _certain(np.uint32(bins.high).view(np.float32), len(inputs.places))
    for begin in range(0, size, RUN):
        length, first, over = min(RUN, size - begin), np.uint64(begin), np.uint32(0)
        differing += int(
            _compare(inputs.words, inputs.places, first, length, lowest, highest, marks, finder.flags)
        )
        for i in range(length):
            over = np.uint32(over + np.uint32(marks[i] != 0))
        above += int(over)
        finder.flags[length:] = 0
        for place in finder.found[: places(finder)]:
            deviation = _deviation(inputs, first + np.uint64(place))
            pattern = np.float32(deviation).view(np.uint32) & _MAGNITUDE
            distance = np.uint32(pattern - low)
            if distance < width:
                add_one(distance, bins.shift, counts)
            else:
                above += int(pattern >= bins.high)
    return above, differing


@compiled
def add_squares_few(
    inputs: FewInputs, size: int, levels: Thresholds, selects: bool, squares: NDArray[np.float64]
) -> None:
    if not _picks_few(levels):
        add_squares_stored(_rows_of(inputs), size, levels, selects, squares)
        return
    marks, run, finder = np.ones(RUN, np.uint16), np.empty(FOLDED), make_finder()
    lanes = np.empty((squares.size, RUNS, LANES))
    for begin in range(0, size, CHUNK):
        end = min(begin + CHUNK, size)
        for at in range(begin, end, RUN):
            length = min(RUN, end - at)
            if selects:
                _mark(inputs, at, length, levels, marks, finder)
            for part in range(0, length, FOLDED):
                own = marks[part : min(part + FOLDED, length)]
                for source in range(squares.size):
                    _load_marked(inputs, source, at + part, own, run)
                    fold_run(lanes[source, (at + part - begin) // FOLDED], run, run)
        for source in range(squares.size):
            fold_piece(lanes[source], end - begin)
            squares[source] += lanes[source, 0, 0]


@compiled
def merge_by_deviation_few(
    inputs: FewInputs, selection: Selection, how: Sum, numbers: Numbers, out: NDArray[np.uint16]
) -> None:
    """``elect.merge_selected_stored`` of few sources, selected by deviation and elected."""
    if not _picks_few(selection.levels):
        merge_selected_stored(_rows_of(inputs), selection, how, out)
        return
    marks, finder = np.empty(RUN, np.uint16), make_finder()
    for begin in range(0, out.size, RUN):
        size = min(RUN, out.size - begin)
        _mark(inputs, begin, size, selection.levels, marks, finder)
        merge_elected(
            inputs.words, inputs.places, np.uint64(begin), marks, numbers, out[begin : begin + size]
        )


@inlined
def _rows_of(inputs: FewInputs) -> Inputs:
    """The same elements, for the loops that go source by source."""
    return Inputs(inputs.words, np.array(inputs.places).astype(np.int64), inputs.start)


@compiled
def _certain(level: np.float32, num_inputs: int) -> tuple[np.float32, np.float32]:
    """A sum of squared differences below the first, or above the second, is certainly that side of the
    level."""
    if level < 0 or level == np.inf:
        return level, level
    square = np.float64(level) * level * (num_inputs - 1)
    if not _LEAST <= level <= _MOST:
        return np.float32(0.0), np.float32(np.inf)
    return np.float32(square * (1.0 - _MARGIN)), np.float32(square * (1.0 + _MARGIN))


@inlined
def _compare(
    words: NDArray[np.uint16],
    starts: tuple[np.uint64, ...],
    first: np.uint64,
    size: int,
    low: np.float32,
    high: np.float32,
    marks: NDArray[np.uint16],
    flags: NDArray[np.uint8],
) -> np.uint32:
    """Mark elements certain to be above the high sum, flag those between; returns how many elements
    differ."""
    differing, none = np.uint32(0), np.uint16(0)
    zero, infinity = np.float32(0.0), np.float32(np.inf)
    for i in range(size):
        at, total, differs = first + np.uint64(i), zero, np.uint32(0)
        base = widened(words[starts[0] + at])
        for left in range(1, len(starts)):
            delta = widened(words[starts[left] + at]) - base
            for right in range(left + 1, len(starts)):
                distance = (widened(words[starts[right] + at]) - base) - delta
                total += distance * distance
                differs |= np.uint32(distance != zero)
        is_above = (total > high) & (total < infinity)
        marks[i] = _ALL if is_above else none
        flags[i] = not (is_above | (total < low))
        differing = np.uint32(differing + differs)
    return differing


@inlined
def _mark(
    inputs: FewInputs, begin: int, size: int, levels: Thresholds, marks: NDArray[np.uint16], finder: Finder
) -> None:
    """Set all bits of a mark where the first threshold keeps the element, else 0."""
    first, above, choice = np.uint64(begin), levels.above[0], choice_of(levels, 0)
    low, high = _certain(above, len(inputs.places))
    _compare(inputs.words, inputs.places, first, size, low, high, marks, finder.flags)
    finder.flags[size:] = 0
    for place in finder.found[: places(finder)]:
        deviation = _deviation(inputs, first + np.uint64(place))
        is_picked = is_among(deviation, inputs.start + begin + place, above, choice)
        marks[place] = _ALL if is_picked else np.uint16(0)


@inlined
def _deviation(inputs: FewInputs, at: np.uint64) -> np.float32:
    words, starts, total, squares = inputs.words, inputs.places, 0.0, 0.0
    base, count = widened(words[starts[0] + at]), len(starts) - 1
    for source in range(count):
        total += np.float64(widened(words[starts[source + 1] + at]) - base)
    for source in range(count):
        distance = count * np.float64(widened(words[starts[source + 1] + at]) - base) - total
        squares += distance * distance
    return np.float32(np.sqrt(squares) * (1.0 / count))


@inlined
def _load_marked(
    inputs: FewInputs, source: int, begin: int, marks: NDArray[np.uint16], run: NDArray[np.float64]
) -> None:
    """A run of a delta in float64, zero where not marked, padded with zeros."""
    base, first = inputs.places[0] + np.uint64(begin), inputs.places[source + 1] + np.uint64(begin)
    bases, words = inputs.words[base:][: marks.size], inputs.words[first:][: marks.size]
    one, zero = np.float32(1.0), np.float32(0.0)
    for i in range(marks.size):
        # A product, not a choice: NaN makes NaN of the sum even where it is dropped.
        run[i] = (one if marks[i] != 0 else zero) * (widened(words[i]) - widened(bases[i]))
    for i in range(marks.size, run.size):
        run[i] = 0.0


def count_deviations(
    words: NDArray[np.uint16], places: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    """Count the deviations of ``selection.write_deviations``; returns how many lie above the bins, and in how
    many elements deltas differ."""
    if not 1 < places.size - 1 <= MOST:
        return count_deviations_of_rows(words, places, size, bins, counts)
    return _count_deviations_few(FewInputs(words, tuple(places.astype(np.uint64)), 0), size, bins, counts)


@compiled
def _count_deviations_few(
    inputs: FewInputs, size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    if counts_few(bins):
        return count_deviations_few(inputs, size, bins, counts)
    return count_deviations_of_rows(
        inputs.words, np.array(inputs.places).astype(np.int64), size, bins, counts
    )


@compiled
def count_deviations_of_rows(
    words: NDArray[np.uint16], places: NDArray[np.int64], size: int, bins: Bins, counts: NDArray[np.int64]
) -> tuple[int, int]:
    above, differing = np.zeros(1, np.int64), 0
    rows, deviations = np.empty((places.size, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(words, places, begin, length, rows)
        differing += write_deviations(rows[1:].reshape(-1), CHUNK, places.size - 1, deviations[:length])
        if bins.high - bins.low == EVERY:
            count_all(deviations[:length], deviations[:length], bins.shift, counts)
        else:
            count(deviations[:length], deviations[:length], (bins,), (counts,), above)
    return above[0], differing


@compiled
def add_delta(
    words: NDArray[np.uint16],
    places: NDArray[np.int64],
    size: int,
    ends: NDArray[np.float32],
    totals: NDArray[np.float64],
) -> None:
    """Add magnitudes of one delta to ``totals``, piece after piece, the first element beginning a piece; to
    each, those above its end, and NaN. ``places`` ``[2]`` are the offsets of base and source."""
    rows, chosen = np.empty((2, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    for begin in range(0, size, CHUNK):
        length = min(CHUNK, size - begin)
        load_deltas(words, places, begin, length, rows)
        for index in range(ends.size):
            _write_larger(rows[1, :length], ends[index], chosen)
            totals[index] = add_values(totals[index], chosen[:length])


@compiled
def _write_larger(values: NDArray[np.float32], end: np.float32, out: NDArray[np.float32]) -> None:
    for i in range(values.size):
        size = np.abs(values[i])
        out[i] = np.float32(0.0) if size <= end else size
