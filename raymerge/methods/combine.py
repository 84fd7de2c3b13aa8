"""Linear combinations of tensors: weighted sums, sums on a base, anchored sums and points of arcs. Each is
one compiled loop on the CPU and has a torch form with the same bits for other devices."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.kernel import AnchoredSum, Settings, Stored, Tile
from raymerge.methods.reduce import elements, flat, row_places

Coefficients: TypeAlias = Sequence[float]
Words: TypeAlias = NDArray[np.uint16]
Vector: TypeAlias = NDArray[np.float32] | Words
Places: TypeAlias = NDArray[np.int64]

# Half the distance from 1 to the next float32 below.
NEGLIGIBLE = 2.0**-25
"""Relative to a float32: a summand this small is lost in rounding."""
_CANCELS = 1e-8
_STRAIGHT = 1e-7


def shares(settings: Settings, *, normalize: str) -> tuple[float, ...]:
    """The weights, divided by their sum where the flag ``normalize`` says so."""
    weights, is_mean = settings.per_source("weight"), settings.flag(normalize)
    total = math.fsum(weights)
    return tuple([weight / total for weight in weights]) if is_mean else weights


def check_shares(settings: Settings, *, normalize: str) -> str | None:
    """Why ``shares`` has no answer, or None: weights of both signs may cancel out."""
    weights, is_mean = settings.per_source("weight"), settings.flag(normalize)
    cancels = abs(math.fsum(weights)) <= _CANCELS * math.fsum(map(abs, weights))
    return "the weights sum to 0, so they cannot be normalised" if is_mean and cancels else None


# Sums -------------------------------------------------------------------------------------------------


def sum_of_products(vectors: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """``sum c v`` over the rows of float32 ``[N, n]`` in order; a new float32 ``[n]``."""
    _check_count(vectors, coefficients)
    if not vectors.is_cpu:
        return sum_of_products_in_torch(vectors, coefficients)
    out = torch.empty(vectors.shape[1], dtype=torch.float32)
    loops.combine.weighted_sum(out.numpy(), flat(vectors), row_places(vectors), _doubles(coefficients))
    return out


def stored_sum_of_products(stored: Stored, coefficients: Coefficients, out: Words) -> None:
    _check_count(stored.places, coefficients)
    loops.combine.weighted_sum(out, stored.words, stored.places, _doubles(coefficients))


def sum_of_products_in_torch(vectors: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    total: torch.Tensor = vectors[0] * coefficients[0]
    product = torch.empty_like(total)
    for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
        # Not add(alpha=...): it fuses the product into the sum in some lanes and not in others.
        total.add_(torch.mul(vector, coefficient, out=product))
    return total


def sum_on_base(tile: Tile, coefficients: Coefficients, factor: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``B + f * sum c d`` over the deltas in order; a new float32 ``[n]``. Where the sum is 0 it is the base.
    ``factor`` is one for all elements, or ``[rows]``."""
    _check_count(tile.sources, coefficients)
    if not tile.sources.is_cpu:
        return sum_on_base_in_torch(tile, coefficients, factor)
    base, deltas = tile.require_base(), tile.sources
    out = torch.empty(base.numel(), dtype=torch.float32)
    _write_sum_on_base(out.numpy(), base.numpy(), flat(deltas), row_places(deltas), coefficients, factor)
    return out


def stored_sum_on_base(stored: Stored, coefficients: Coefficients, out: Words, factor: float = 1.0) -> None:
    """``sum_on_base``, rounded into ``out``; the first input is the base."""
    _check_count(stored.places[1:], coefficients)
    _write_sum_on_base(out, stored.input(0), stored.words, stored.places[1:], coefficients, factor)


def _write_sum_on_base(
    out: Vector,
    base: Vector,
    memory: Vector,
    places: Places,
    coefficients: Coefficients,
    factor: float | torch.Tensor,
) -> None:
    if isinstance(factor, float) and len(coefficients) <= loops.combine.FEW:
        vectors = _vectors(memory, places, out.size)
        loops.combine.sum_of_few_on_base(out, base, vectors, tuple(map(float, coefficients)), factor)
        return
    factors = np.array([factor]) if isinstance(factor, float) else factor.double().numpy()
    loops.combine.weighted_sum_on_base(out, memory, places, _doubles(coefficients), base, factors)


def sum_on_base_in_torch(
    tile: Tile, coefficients: Coefficients, factor: float | torch.Tensor = 1.0
) -> torch.Tensor:
    merged = sum_of_products_in_torch(tile.sources, coefficients)
    if isinstance(factor, float):
        merged.mul_(factor)
    elif merged.numel():
        merged.view(factor.numel(), -1).mul_(factor.float().unsqueeze(1))
    return on_base(merged, tile)


def on_base(delta: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The base plus a merged delta, which is overwritten; where that is 0 the base's very bits: a plain sum
    would turn its -0.0 into 0.0."""
    return torch.sub(tile.require_base(), delta.neg_().add_(0.0), out=delta)


# Anchored sums ----------------------------------------------------------------------------------------


def combine(sources: torch.Tensor, coefficients: Coefficients, origin: torch.Tensor | None) -> torch.Tensor:
    """``O + sum c_i (T_i - O)`` of float32 ``[N, n]``, with O the origin ``[n]``, or 0 without one.

    Added up as changes to the source A of the largest coefficient, ``A + (sum c_i - 1) (A - O) + sum c_i (T_i
    - A)``: where the sources agree and c sums to 1 that is A to the last bit, and so is the end of an arc.
    Changes are subtracted, and as 0.0 rather than -0.0: no difference must not turn A's -0.0 into 0.0. NaN
    and infinity reach the result even with coefficient 0."""
    if not sources.is_cpu:
        return combine_in_torch(sources, coefficients, origin)
    out = torch.empty(sources.shape[1], dtype=torch.float32)
    _write_combination(out.numpy(), flat(sources), row_places(sources), coefficients, elements(origin))
    return out


def combine_stored(stored: Stored, coefficients: Coefficients, out: Words) -> None:
    """``combine``, rounded into ``out``; with one input more than coefficients, the first one is O."""
    origin, places = stored.origin(len(coefficients))
    _write_combination(out, stored.words, places, coefficients, origin)


def _write_combination(
    out: Vector, memory: Vector, places: Places, coefficients: Coefficients, origin: Vector
) -> None:
    anchor, excess = _anchor(coefficients)
    if excess or len(coefficients) > loops.combine.FEW:
        loops.combine.combination(out, memory, places, _doubles(coefficients), anchor, excess, origin)
        return
    order = sorted(range(len(coefficients)), key=lambda index: index != anchor)
    vectors = _vectors(memory, places[order], out.size)
    loops.combine.combination_of_few(out, vectors, tuple([float(coefficients[index]) for index in order]))


def _vectors(memory: Vector, places: Places, length: int) -> tuple[Vector, ...]:
    return tuple([memory[place : place + length] for place in places.tolist()])


def combine_in_torch(
    sources: torch.Tensor, coefficients: Coefficients, origin: torch.Tensor | None
) -> torch.Tensor:
    anchor, excess = _anchor(coefficients)
    start = sources[anchor]
    merged, change = start.clone(), torch.empty_like(start)
    if excess:
        centre = torch.zeros((), device=start.device) if origin is None else origin
        merged.sub_(torch.sub(centre, start, out=change).mul_(excess).add_(0.0))
    for index, source in enumerate(sources):
        if index != anchor:
            merged.sub_(torch.sub(start, source, out=change).mul_(coefficients[index]).add_(0.0))
    return merged


def anchored_sum(coefficients: Coefficients) -> AnchoredSum:
    return AnchoredSum(tuple(coefficients), *_anchor(coefficients))


def _anchor(coefficients: Coefficients) -> tuple[int, float]:
    """The index of the anchor, and ``excess_of`` the coefficients."""
    magnitudes = [abs(coefficient) for coefficient in coefficients]
    return magnitudes.index(max(magnitudes)), excess_of(coefficients)


def excess_of(coefficients: Coefficients) -> float:
    """By how much the coefficients' sum exceeds 1; 0 where that would be lost in rounding."""
    excess = math.fsum(coefficients) - 1.0
    return 0.0 if abs(excess) < NEGLIGIBLE else excess


# Arcs -------------------------------------------------------------------------------------------------


def arc_coefficients(first: float, mixed: float, second: float, *, t: float) -> tuple[float, float]:
    """Coefficients of two vectors u and v a share t of the way from u to v along an arc, from the inner
    products u u, u v and v v; NaN where one is not finite.

    ``sin((1-t)a)/sin(a)`` and ``sin(ta)/sin(a)`` with a the angle (Shoemake: Animating rotation with
    quaternion curves, SIGGRAPH 1985). Where sin(a) is below 1e-7, which is what rounding leaves of parallel
    and of opposite vectors, ``1-t`` and ``t``. A zero vector counts as orthogonal to all others."""
    if not math.isfinite(first + mixed + second):
        return math.nan, math.nan
    norms = math.sqrt(first) * math.sqrt(second)
    cosine = max(-1.0, min(1.0, mixed / norms)) if norms else 0.0
    sine = math.sqrt((1.0 - cosine) * (1.0 + cosine))
    return (1.0 - t, t) if sine < _STRAIGHT else on_arc(cosine, t)


def on_arc(cosine: float, t: float) -> tuple[float, float]:
    """Coefficients for vectors that are not parallel."""
    angle = math.acos(cosine)
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def points_of_arcs(
    start: torch.Tensor,
    other: torch.Tensor,
    origin: torch.Tensor | None,
    factors: torch.Tensor,
    *,
    by_column: bool = False,
) -> torch.Tensor:
    """``S - c (S - T) - e (O - S)`` for many vectors (rows, or columns ``by_column``) of float32 ``[n]``; e +
    1 is the sum of both coefficients, and ``factors`` float32 ``[2, vectors]`` are e and c.

    Counted from one end, and without -0.0, for the reasons given in ``combine``."""
    if by_column or not start.is_cpu:
        return points_of_arcs_in_torch(start, other, origin, factors, by_column=by_column)
    out = torch.empty(start.numel(), dtype=torch.float32)
    loops.combine.arcs(out.numpy(), start.numpy(), other.numpy(), elements(origin), factors.numpy())
    return out


def points_of_arcs_in_torch(
    start: torch.Tensor,
    other: torch.Tensor,
    origin: torch.Tensor | None,
    factors: torch.Tensor,
    *,
    by_column: bool = False,
) -> torch.Tensor:
    excess, of_other = factors.unsqueeze(1 if by_column else 2)
    length = factors.shape[1] if by_column else start.numel() // max(1, factors.shape[1])
    change = start - other
    change.view(-1, length or 1).mul_(of_other)
    merged = start - change.add_(0.0)
    if origin is None:
        torch.neg(start, out=change)
    else:
        torch.sub(origin, start, out=change)
    change.view(-1, length or 1).mul_(excess)
    return merged.sub_(change.add_(0.0))


def _doubles(coefficients: Coefficients) -> NDArray[np.float64]:
    return np.array(coefficients, dtype=np.float64)


def _check_count(vectors: Sized, coefficients: Coefficients) -> None:
    if len(vectors) != len(coefficients):
        raise ValueError(f"{len(vectors)} vectors need as many coefficients, are given {len(coefficients)}")
