"""Linear combinations of vectors in one sweep; all products, sums and differences are rounded to float32.

``raymerge.methods.combine`` and ``nearswap`` have the formulas' reasons. Vectors, base, origin and result are
all float32, or all stored bfloat16 (uint16). Factors are float64, rounded once. ``out`` is ``[n]``;
``places`` are the offsets of the vectors in the memory ``vectors``; ``coefficients`` are ``[N]``."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.kernels.elements import begin_run, delta_of, element_of, end_run, value_of, values_of
from raymerge.kernels.jit import compiled, inlined

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Elements: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
Few: TypeAlias = tuple[Elements, ...]

FEW = 6
"""Most vectors of the loops that keep what they compute of an element in registers."""
_RUN = 1024
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@compiled
def weighted_sum(out: Elements, vectors: Elements, places: Places, coefficients: Doubles) -> None:
    """Write ``sum c v``."""
    scratch = np.empty(_RUN, np.float32)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run = begin_run(target, scratch)
        for vector in range(coefficients.size):
            at, weight = places[vector] + begin, np.float32(coefficients[vector])
            values = vectors[at : at + run.size]
            if vector == 0:
                for i in range(run.size):
                    run[i] = value_of(values[i]) * weight
            else:
                for i in range(run.size):
                    run[i] += value_of(values[i]) * weight
        end_run(run, target)


@compiled
def sum_of_few_on_base(
    out: Elements, base: Elements, vectors: Few, coefficients: tuple[float, ...], factor: float
) -> None:
    """``weighted_sum_on_base`` of at most ``FEW`` vectors ``[n]`` with one factor, for the same reason."""
    for i in range(out.size):
        at = np.uint64(i)
        start = value_of(base[at])
        total = delta_of(vectors[0][at], start) * np.float32(coefficients[0])
        for vector in range(1, len(vectors)):
            total += delta_of(vectors[vector][at], start) * np.float32(coefficients[vector])
        out[at] = element_of(start - (_ZERO - total * np.float32(factor)), base[at])


@compiled
def weighted_sum_on_base(
    out: Elements, vectors: Elements, places: Places, coefficients: Doubles, base: Elements, factors: Doubles
) -> None:
    """Write ``b + f * sum c d``, with a factor f for each of several equal stretches. Vectors are the deltas
    d if float32; else d is a vector less the base ``[n]``."""
    scratch, of_base = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    length = out.size // max(1, factors.size)
    for stretch in range(factors.size):
        factor, end = np.float32(factors[stretch]), (stretch + 1) * length
        for begin in range(stretch * length, end, _RUN):
            target = out[begin : min(begin + _RUN, end)]
            run = begin_run(target, scratch)
            start = values_of(base[begin : begin + run.size], of_base)
            for vector in range(coefficients.size):
                at, weight = places[vector] + begin, np.float32(coefficients[vector])
                values = vectors[at : at + run.size]
                if vector == 0:
                    for i in range(run.size):
                        run[i] = delta_of(values[i], start[i]) * weight
                else:
                    for i in range(run.size):
                        run[i] += delta_of(values[i], start[i]) * weight
            for i in range(run.size):
                run[i] = start[i] - (_ZERO - run[i] * factor)
            end_run(run, target)


@compiled
def combination_of_few(out: Elements, vectors: Few, coefficients: tuple[float, ...]) -> None:
    """``combination`` of at most ``FEW`` vectors ``[n]``, the anchor first, without an excess: half the time,
    nothing put aside. As their number is known when it is compiled, the loop over them is written out."""
    for i in range(out.size):
        at = np.uint64(i)
        start = value_of(vectors[0][at])
        total = start
        for vector in range(1, len(vectors)):
            total -= (start - value_of(vectors[vector][at])) * np.float32(coefficients[vector]) + _ZERO
        out[at] = element_of(total, vectors[0][at])


@compiled
def combination(
    out: Elements,
    vectors: Elements,
    places: Places,
    coefficients: Doubles,
    anchor: int,
    excess: float,
    origin: Elements,
) -> None:
    """Write ``v_a - e (o - v_a) - sum c_i (v_a - v_i)`` with a the anchor, e the excess, o the origin
    ``[n]``, empty for zeros. The anchor's c is ignored, and an excess of 0."""
    scratch, of_start = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run, at = begin_run(target, scratch), places[anchor] + begin
        start = values_of(vectors[at : at + run.size], of_start)
        copy(run, start)
        if excess != 0.0:
            subtract_excess(run, start, origin[begin : begin + run.size], np.float32(excess))
        for vector in range(coefficients.size):
            at = places[vector] + begin
            if vector != anchor:
                subtract_change(run, start, vectors[at : at + run.size], np.float32(coefficients[vector]))
        end_run(run, target)


@compiled
def arcs(out: Elements, start: Elements, other: Elements, origin: Elements, factors: Floats) -> None:
    """Write ``s - c (s - t) - e (o - s)`` with factors ``[2, stretches]``, e and c, for equal stretches of
    ``start`` s, ``other`` t and ``origin`` o, ``[n]``; an empty origin is zeros."""
    scratch, of_start = np.empty(_RUN, np.float32), np.empty(_RUN, np.float32)
    length = out.size // max(1, factors.shape[1])
    for stretch in range(factors.shape[1]):
        excess, of_other, end = factors[0, stretch], factors[1, stretch], (stretch + 1) * length
        for begin in range(stretch * length, end, _RUN):
            target = out[begin : min(begin + _RUN, end)]
            run = begin_run(target, scratch)
            source = values_of(start[begin : begin + run.size], of_start)
            copy(run, source)
            subtract_change(run, source, other[begin : begin + run.size], of_other)
            subtract_excess(run, source, origin[begin : begin + run.size], excess)
            end_run(run, target)


@compiled
def swap_near(out: Elements, base: Elements, source: Elements, t: float, least: float) -> None:
    """Write ``b + s (v - b)`` with ``s = t / max(|v - b|, least)``, clamped to 0 to 1, from the nearer
    end."""
    reach, shortest, scratch = np.float32(t), np.float32(least), np.empty(_RUN, np.float32)
    for begin in range(0, out.size, _RUN):
        target = out[begin : begin + _RUN]
        run = begin_run(target, scratch)
        starts, ends = base[begin : begin + run.size], source[begin : begin + run.size]
        for i in range(run.size):
            start, end = value_of(starts[i]), value_of(ends[i])
            change = end - start
            length = abs(change)
            # Written so that NaN stays as it is.
            share = reach / (shortest if length < shortest else length)
            share = _ZERO if share < _ZERO else share
            share = _ONE if share > _ONE else share
            swapped = share >= np.float32(0.5)
            rest = (_ONE if swapped else _ZERO) - share
            run[i] = (end if swapped else start) - (change * rest + _ZERO)
        end_run(run, target)


@inlined
def copy(run: Floats, values: Floats) -> None:
    for i in range(run.size):
        run[i] = values[i]


@inlined
def subtract_change(run: Floats, start: Floats, other: Elements, factor: np.float32) -> None:
    """Subtract ``c (s - t)``, as 0.0 rather than -0.0."""
    for i in range(run.size):
        run[i] -= (start[i] - value_of(other[i])) * factor + _ZERO


@inlined
def subtract_excess(run: Floats, start: Floats, origin: Elements, excess: np.float32) -> None:
    """Subtract ``e (o - s)``, as 0.0 rather than -0.0; an empty origin is zeros."""
    if origin.size:
        for i in range(run.size):
            run[i] -= (value_of(origin[i]) - start[i]) * excess + _ZERO
    else:
        for i in range(run.size):
            run[i] -= (_ZERO - start[i]) * excess + _ZERO
