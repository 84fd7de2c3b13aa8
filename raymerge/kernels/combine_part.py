"""Linear combinations of vectors, in one sweep: all products, sums and differences are rounded to float32.

``raymerge.methods.sums``, ``gram``, ``arc`` and ``nearswap`` say what is computed and why so. Factors come as
float64 and are rounded once. Vectors are taken a run at a time, which the nearest cache holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raymerge.kernels.jit import compiled, inlined

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_RUN = 1024
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@compiled
def weighted_sum(out: Floats, vectors: Floats, stride: int, coefficients: Doubles) -> None:
    """Write ``sum c v``.

    Args:
        out: ``[n]``.
        vectors: elements of all vectors, each vector ``stride`` after the one before it.
        stride: elements.
        coefficients: ``[N]``.
    """
    for begin in range(0, out.size, _RUN):
        _write_sum(out[begin : begin + _RUN], vectors, stride, coefficients, begin)


@compiled
def weighted_sum_on_base(
    out: Floats, vectors: Floats, stride: int, coefficients: Doubles, base: Floats, factors: Doubles
) -> None:
    """Write ``b + f * sum c v``, as ``weighted_sum``, with a factor for each of several equal stretches."""
    length = out.size // max(1, factors.size)
    for stretch in range(factors.size):
        factor, end = np.float32(factors[stretch]), (stretch + 1) * length
        for begin in range(stretch * length, end, _RUN):
            run = out[begin : min(begin + _RUN, end)]
            start = base[begin : begin + run.size]
            _write_sum(run, vectors, stride, coefficients, begin)
            for index in range(run.size):
                run[index] = start[index] - (_ZERO - run[index] * factor)


@compiled
def combination(
    out: Floats,
    vectors: Floats,
    stride: int,
    coefficients: Doubles,
    anchor: int,
    excess: float,
    origin: Floats,
) -> None:
    """Write ``v_a - e (o - v_a) - sum c_i (v_a - v_i)``.

    Args:
        out: ``[n]``.
        vectors: as in ``weighted_sum``.
        stride: elements.
        coefficients: ``[N]``; that of the anchor does not count.
        anchor: a.
        excess: e; 0 for nothing of that kind.
        origin: ``[n]``; empty for zeros.
    """
    for begin in range(0, out.size, _RUN):
        run = out[begin : begin + _RUN]
        start = vectors[anchor * stride + begin : anchor * stride + begin + run.size]
        _copy(run, start)
        if excess != 0.0:
            _subtract_excess(run, start, origin[begin : begin + _RUN], np.float32(excess))
        for vector in range(coefficients.size):
            at = vector * stride + begin
            if vector != anchor:
                _subtract_change(run, start, vectors[at : at + run.size], np.float32(coefficients[vector]))


@compiled
def arcs(out: Floats, start: Floats, other: Floats, origin: Floats, factors: Floats) -> None:
    """Write ``s - c (s - t) - e (o - s)`` with factors for each of several equal stretches.

    Args:
        out: ``[n]``.
        start: ``[n]``, s.
        other: ``[n]``, t.
        origin: ``[n]``, o; empty for zeros.
        factors: ``[2, stretches]``: e and c.
    """
    length = out.size // max(1, factors.shape[1])
    for stretch in range(factors.shape[1]):
        excess, of_other, end = factors[0, stretch], factors[1, stretch], (stretch + 1) * length
        for begin in range(stretch * length, end, _RUN):
            run = out[begin : min(begin + _RUN, end)]
            source = start[begin : begin + run.size]
            _copy(run, source)
            _subtract_change(run, source, other[begin : begin + run.size], of_other)
            _subtract_excess(run, source, origin[begin : begin + run.size], excess)


@compiled
def arcs_by_column(out: Floats, start: Floats, other: Floats, origin: Floats, factors: Floats) -> None:
    """As ``arcs``, with factors for each column of the matrices that the vectors are."""
    length = factors.shape[1]
    excesses, of_others = factors[0], factors[1]
    for begin in range(0, out.size, max(1, length)):
        run, source = out[begin : begin + length], start[begin : begin + length]
        target, centre = other[begin : begin + length], origin[begin : begin + length]
        for column in range(length):
            run[column] = source[column] - ((source[column] - target[column]) * of_others[column] + _ZERO)
        if centre.size:
            for column in range(length):
                run[column] -= (centre[column] - source[column]) * excesses[column] + _ZERO
        else:
            for column in range(length):
                run[column] -= (_ZERO - source[column]) * excesses[column] + _ZERO


@compiled
def swap_near(out: Floats, base: Floats, source: Floats, t: float, least: float) -> None:
    """Write ``b + s (v - b)`` with ``s = t / max(|v - b|, least)``, cut off at 0 and 1.

    Counted from the nearer end.
    """
    reach, shortest = np.float32(t), np.float32(least)
    for index in range(out.size):
        start, end = base[index], source[index]
        change = end - start
        length = abs(change)
        # Written so that NaN stays as it is.
        share = reach / (shortest if length < shortest else length)
        share = _ZERO if share < _ZERO else share
        share = _ONE if share > _ONE else share
        swapped = share >= np.float32(0.5)
        rest = (_ONE if swapped else _ZERO) - share
        out[index] = (end if swapped else start) - (change * rest + _ZERO)


@inlined
def _write_sum(run: Floats, vectors: Floats, stride: int, coefficients: Doubles, begin: int) -> None:
    """Write ``sum c v`` for the run from one element on."""
    first, factor = vectors[begin : begin + run.size], np.float32(coefficients[0])
    for index in range(run.size):
        run[index] = first[index] * factor
    for vector in range(1, coefficients.size):
        at = vector * stride + begin
        values, weight = vectors[at : at + run.size], np.float32(coefficients[vector])
        for index in range(run.size):
            run[index] += values[index] * weight


@inlined
def _copy(run: Floats, values: Floats) -> None:
    for index in range(run.size):
        run[index] = values[index]


@inlined
def _subtract_change(run: Floats, start: Floats, other: Floats, factor: np.float32) -> None:
    """Subtract ``c (s - t)``, as 0.0 rather than -0.0."""
    for index in range(run.size):
        run[index] -= (start[index] - other[index]) * factor + _ZERO


@inlined
def _subtract_excess(run: Floats, start: Floats, origin: Floats, excess: np.float32) -> None:
    """Subtract ``e (o - s)``, as 0.0 rather than -0.0."""
    if origin.size:
        for index in range(run.size):
            run[index] -= (origin[index] - start[index]) * excess + _ZERO
    else:
        for index in range(run.size):
            run[index] -= (_ZERO - start[index]) * excess + _ZERO
