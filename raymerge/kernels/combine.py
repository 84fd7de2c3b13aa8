"""Linear combinations of float32 vectors in one sweep, and of bfloat16 as it is stored.

Element by element these are the operations of ``combine``, in its order and each rounded to float32. They are
written once more because words are widened on their way into the arithmetic: copies of the inputs in float32
would take as long again as all that is done here. What is kept is a run of the result and of the vector that
changes are counted from.

Arguments that all have: ``out`` ``[n]``, written to; ``words``, the memory that holds all inputs; ``places``,
where in it each input begins.

Linear combinations of vectors, in one sweep: all products, sums and differences are rounded to float32.

``raymerge.methods.sums``, ``gram``, ``arc`` and ``nearswap`` say what is computed and why so. Factors come as
float64 and are rounded once. Vectors are taken a run at a time, which the nearest cache holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raymerge.kernels.bf16 import narrow, widen
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


Words = npt.NDArray[np.uint16]
Places = npt.NDArray[np.int64]

# What is kept of it leaves most of the nearest cache to the inputs, and to whatever shares the processor.
_STORED_ZERO = np.float32(0.0)


@compiled
def stored_sum(out: Words, words: Words, places: Places, coefficients: Doubles) -> None:
    """Write ``sum c v``; ``coefficients`` ``[inputs]``."""
    merged = np.empty(_RUN, np.float32)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run = merged[: target.size]
        _write_scaled(
            run, words[places[0] + begin : places[0] + begin + run.size], np.float32(coefficients[0])
        )
        for vector in range(1, places.size):
            at = places[vector] + begin
            _add_scaled(run, words[at : at + run.size], np.float32(coefficients[vector]))
        narrow(run, target)


@compiled
def stored_sum_on_base(
    out: Words, words: Words, places: Places, coefficients: Doubles, factor: float
) -> None:
    """Write ``b + f * sum c (v - b)``, with b the first input and a coefficient for each of the others."""
    merged, base = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    of_vectors, by = places[1:], np.float32(factor)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run, origin = merged[: target.size], base[: target.size]
        widen(words[places[0] + begin : places[0] + begin + run.size], origin)
        at = of_vectors[0] + begin
        _write_scaled_delta(run, words[at : at + run.size], origin, np.float32(coefficients[0]))
        for vector in range(1, of_vectors.size):
            at = of_vectors[vector] + begin
            _add_scaled_delta(run, words[at : at + run.size], origin, np.float32(coefficients[vector]))
        for index in range(run.size):
            run[index] = origin[index] - (_STORED_ZERO - run[index] * by)
        narrow(run, target)


@compiled
def stored_combination(
    out: Words, words: Words, places: Places, coefficients: Doubles, anchor: int, excess: float
) -> None:
    """Write ``v_a - e (o - v_a) - sum c_i (v_a - v_i)``.

    Args:
        out: as above.
        words: as above.
        places: those of o, if there is one, and of all v.
        coefficients: one for each v; that of the anchor does not count.
        anchor: a.
        excess: e; 0 for nothing of that kind.
    """
    merged, anchored = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    num_origins = places.size - coefficients.size
    of_vectors = places[num_origins:]
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run, start = merged[: target.size], anchored[: target.size]
        _start(run, start, words[of_vectors[anchor] + begin : of_vectors[anchor] + begin + run.size])
        if excess != 0.0:
            at = places[0] + begin
            origin = words[at : at + run.size * num_origins]
            _subtract_stored_excess(run, start, origin, np.float32(excess))
        for vector in range(coefficients.size):
            at = of_vectors[vector] + begin
            if vector != anchor:
                _subtract_stored_change(
                    run, start, words[at : at + run.size], np.float32(coefficients[vector])
                )
        narrow(run, target)


@compiled
def stored_arc(out: Words, words: Words, places: Places, excess: float, of_other: float) -> None:
    """Write ``s - c (s - t) - e (0 - s)``, with s the first input and t the second."""
    merged, anchored = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run, start = merged[: target.size], anchored[: target.size]
        _start(run, start, words[places[0] + begin : places[0] + begin + run.size])
        _subtract_stored_change(
            run, start, words[places[1] + begin : places[1] + begin + run.size], np.float32(of_other)
        )
        _subtract_stored_excess(run, start, words[:0], np.float32(excess))
        narrow(run, target)


@compiled
def stored_swap(out: Words, words: Words, places: Places, t: float, least: float) -> None:
    """Write the first input moved towards the second, as ``combine.swap_near``."""
    base, source, merged = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run, start, end = merged[: target.size], base[: target.size], source[: target.size]
        widen(words[places[0] + begin : places[0] + begin + run.size], start)
        widen(words[places[1] + begin : places[1] + begin + run.size], end)
        swap_near(run, start, end, t, least)
        narrow(run, target)


@inlined
def value_of(word: np.uint16) -> np.float32:
    """A pattern's value. Sums and shifts of 32 bits are of 64 bits until they are made of 32 again."""
    value: np.float32 = np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)
    return value


@inlined
def _start(run: Floats, start: Floats, words: Words) -> None:
    """The values, twice."""
    for index in range(run.size):
        start[index] = value_of(words[index])
        run[index] = start[index]


@inlined
def _write_scaled(run: Floats, words: Words, weight: np.float32) -> None:
    for index in range(run.size):
        run[index] = value_of(words[index]) * weight


@inlined
def _add_scaled(run: Floats, words: Words, weight: np.float32) -> None:
    for index in range(run.size):
        run[index] += value_of(words[index]) * weight


@inlined
def _write_scaled_delta(run: Floats, words: Words, origin: Floats, weight: np.float32) -> None:
    for index in range(run.size):
        run[index] = (value_of(words[index]) - origin[index]) * weight


@inlined
def _add_scaled_delta(run: Floats, words: Words, origin: Floats, weight: np.float32) -> None:
    for index in range(run.size):
        run[index] += (value_of(words[index]) - origin[index]) * weight


@inlined
def _subtract_stored_change(run: Floats, start: Floats, other: Words, factor: np.float32) -> None:
    """Subtract ``c (s - t)``, as 0.0 rather than -0.0."""
    for index in range(run.size):
        run[index] -= (start[index] - value_of(other[index])) * factor + _STORED_ZERO


@inlined
def _subtract_stored_excess(run: Floats, start: Floats, origin: Words, excess: np.float32) -> None:
    """Subtract ``e (o - s)``, as 0.0 rather than -0.0, of zeros where the origin is empty."""
    if origin.size:
        for index in range(run.size):
            run[index] -= (value_of(origin[index]) - start[index]) * excess + _STORED_ZERO
    else:
        for index in range(run.size):
            run[index] -= (_STORED_ZERO - start[index]) * excess + _STORED_ZERO
