"""Sums and inner products in float64, in the order that ``raymerge.methods.reduce`` defines.

A run of elements is kept as float64 in first-level cache while all products of it are taken, and each product
is folded to a few lanes in registers. Elements are reached through slices, whose indices cannot be negative:
possibly negative ones prevent vectorising. Stored bfloat16 (uint16) becomes float64 a run at a time: float32
copies of pieces would cost up to a third more."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.kernels.elements import value_of
from raymerge.kernels.jit import compiled, inlined

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Elements: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

PIECE, RUN, LANES = 16_384, 256, 16
RUNS = PIECE // RUN
# Products whose lanes are kept at once: 256 KiB of them.
AT_ONCE = 32
_NOTHING = np.empty(0, dtype=np.float32)


@compiled
def add_values(total: float, values: Floats) -> float:
    """``total`` plus the sum of ``values`` (``[n]``)."""
    run, ones, lanes = np.empty(RUN), np.ones(RUN), np.empty((RUNS, LANES))
    for begin in range(0, values.size, PIECE):
        piece = values[begin : begin + PIECE]
        for at in range(0, piece.size, RUN):
            _load(run, piece[at : at + RUN], _NOTHING)
            fold_run(lanes[at // RUN], run, ones)
        fold_piece(lanes, piece.size)
        total += lanes[0, 0]
    return total


@compiled
def add_squares(total: float, values: Floats) -> float:
    """``total`` plus the sum of the squares of ``values`` (``[n]``)."""
    run, lanes = np.empty(RUN), np.empty((RUNS, LANES))
    for begin in range(0, values.size, PIECE):
        piece = values[begin : begin + PIECE]
        for at in range(0, piece.size, RUN):
            _load(run, piece[at : at + RUN], _NOTHING)
            fold_run(lanes[at // RUN], run, run)
        fold_piece(lanes, piece.size)
        total += lanes[0, 0]
    return total


@compiled
def add_pair(totals: Doubles, left: Elements, right: Elements) -> None:
    """Add the inner products of left and left, left and right, right and right (``[n]`` both) to ``[3]``."""
    lefts, rights, lanes = np.empty(RUN), np.empty(RUN), np.empty((RUNS, 3 * LANES))
    for begin in range(0, left.size, PIECE):
        piece, other = left[begin : begin + PIECE], right[begin : begin + PIECE]
        for at in range(0, piece.size, RUN):
            _load(lefts, piece[at : at + RUN], piece[:0])
            _load(rights, other[at : at + RUN], other[:0])
            sums = lanes[at // RUN]
            fold_run(sums[:LANES], lefts, lefts)
            fold_run(sums[LANES : 2 * LANES], lefts, rights)
            fold_run(sums[2 * LANES :], rights, rights)
        fold_piece(lanes, piece.size)
        for pair in range(3):
            totals[pair] += lanes[0, pair * LANES]


@compiled
def add_grams(totals: Doubles, vectors: Elements, places: Places, size: int, origin: Elements) -> None:
    """Add the inner products of all pairs of vectors, less the origin ``[size]`` (empty for none), for each
    of equal stretches: ``[stretches, N * (N + 1) / 2]``, each vector with those before it and with itself."""
    num_pairs, length = totals.shape[1], size // max(1, totals.shape[0])
    runs, lanes = np.empty((places.size, RUN)), np.empty((RUNS, LANES * min(AT_ONCE, num_pairs)))
    for stretch in range(totals.shape[0]):
        for begin in range(stretch * length, (stretch + 1) * length, PIECE):
            count = min(PIECE, (stretch + 1) * length - begin)
            for first in range(0, num_pairs, AT_ONCE):
                last = min(first + AT_ONCE, num_pairs)
                used = places[: num_vectors(last)]
                for at in range(begin, begin + count, RUN):
                    end = min(at + RUN, begin + count)
                    for index in range(used.size):
                        _load(runs[index], vectors[used[index] + at : used[index] + end], origin[at:end])
                    fold_pairs(lanes[(at - begin) // RUN], runs, first, last)
                fold_piece(lanes, count)
                for pair in range(first, last):
                    totals[stretch, pair] += lanes[0, (pair - first) * LANES]


@inlined
def num_vectors(num_pairs: int) -> int:
    count = 0
    while count * (count + 1) // 2 < num_pairs:
        count += 1
    return count


@inlined
def _load(run: Doubles, values: Elements, origin: Elements) -> None:
    """Values (less an origin that is not empty, in float32) as float64, padded with zeros."""
    if origin.size:
        for index in range(values.size):
            run[index] = value_of(values[index]) - value_of(origin[index])
    else:
        for index in range(values.size):
            run[index] = value_of(values[index])
    for index in range(values.size, run.size):
        run[index] = 0.0


@inlined
def fold_pairs(lanes: Doubles, runs: Doubles, first: int, last: int) -> None:
    left, right = 0, first
    while right > left:
        left += 1
        right -= left
    for at in range(0, (last - first) * LANES, LANES):
        fold_run(lanes[at : at + LANES], runs[left], runs[right])
        right += 1
        if right > left:
            left, right = left + 1, 0


@inlined
def fold_run(lanes: Doubles, left: Doubles, right: Doubles) -> None:
    """The products of two runs, their rows of LANES elements folded in halves."""
    for lane in range(LANES):
        even = _four(left, right, lane) + _four(left, right, lane + 2 * LANES)
        odd = _four(left, right, lane + LANES) + _four(left, right, lane + 3 * LANES)
        lanes[lane] = even + odd


@inlined
def _four(left: Doubles, right: Doubles, at: int) -> float:
    """The products of every fourth row, folded in halves."""
    return _two(left, right, at) + _two(left, right, at + RUN // 4)


@inlined
def _two(left: Doubles, right: Doubles, at: int) -> float:
    """The products of two rows half a run apart."""
    total: float = left[at] * right[at] + left[at + RUN // 2] * right[at + RUN // 2]
    return total


@compiled
def fold_piece(lanes: Doubles, size: int) -> None:
    """Fold a piece's runs in halves, then what is left of each product to the first of its lanes. Runs are as
    many as the elements need, rounded up to a power of two: the others would be zeros."""
    used, count = (size + RUN - 1) // RUN, 1
    while count < used:
        count *= 2
    for index in range(used, count):
        lanes[index, :] = 0.0
    while count > 1:
        count //= 2
        for index in range(count):
            _add(lanes[index], lanes[count + index])
    for begin in range(0, lanes.shape[1], LANES):
        width = LANES
        while width > 1:
            width //= 2
            _add(lanes[0, begin : begin + width], lanes[0, begin + width : begin + 2 * width])


@inlined
def _add(total: Doubles, values: Doubles) -> None:
    for index in range(total.size):
        total[index] += values[index]
