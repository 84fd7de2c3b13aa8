"""Linear combinations of tensors: weighted sums, sums on a base, anchored sums and points of arcs.

Each is computed in one compiled loop on the processor, of float32 or of elements as they are stored, and has
a form in torch for all other devices with the same bits: every product, sum and difference is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from raymerge.methods.kernel import AnchoredSum, Settings, Stored, Tile
from raymerge.methods.reduce import elements, flat, row_places

Coefficients: TypeAlias = Sequence[float]
Words: TypeAlias = NDArray[np.uint16]

# Half the distance from 1 to the next float32 below.
NEGLIGIBLE = 2.0**-25
"""A share of a float32 that is lost when it is added to it."""
_CANCELS = 1e-8
_STRAIGHT = 1e-7


def shares(settings: Settings, *, normalize: str) -> tuple[float, ...]:
    """The weights, divided by their sum where the flag ``normalize`` says so."""
    weights = settings.per_source("weight")
    if not settings.flag(normalize):
        return weights
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def check_shares(settings: Settings, *, normalize: str) -> str | None:
    """A sentence on why ``shares`` has no answer, or None: weights of both signs may cancel out."""
    weights = settings.per_source("weight")
    cancels = abs(math.fsum(weights)) <= _CANCELS * math.fsum(map(abs, weights))
    if settings.flag(normalize) and cancels:
        return "the weights sum to 0, so they cannot be normalised"
    return None


# Sums -------------------------------------------------------------------------------------------------


def sum_of_products(vectors: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """``sum c v`` over the rows of float32 ``[N, n]`` in order; a new float32 ``[n]``.

    Raises:
        ValueError: not as many coefficients as vectors.
    """
    _check_count(vectors, coefficients)
    if not vectors.is_cpu:
        return sum_of_products_in_torch(vectors, coefficients)
    from raymerge.kernels import combine

    out = torch.empty(vectors.shape[1], dtype=torch.float32)
    combine.weighted_sum(out.numpy(), flat(vectors), row_places(vectors), _doubles(coefficients))
    return out


def stored_sum_of_products(stored: Stored, coefficients: Coefficients, out: Words) -> None:
    """The same sum of all inputs, rounded into ``out``."""
    _check_count(stored.places, coefficients)
    from raymerge.kernels import combine

    combine.weighted_sum(out, stored.words, stored.places, _doubles(coefficients))


def sum_of_products_in_torch(vectors: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """``sum_of_products`` on any device; one temporary of its size."""
    total: torch.Tensor = vectors[0] * coefficients[0]
    product = torch.empty_like(total)
    for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
        # Not add(alpha=...): it fuses the product into the sum in some lanes and not in others.
        total.add_(torch.mul(vector, coefficient, out=product))
    return total


def sum_on_base(tile: Tile, coefficients: Coefficients, factor: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``B + f * sum c d`` over the deltas in order; a new float32 ``[n]``. Where the sum is 0 it is the base.

    Args:
        tile: deltas, and the base.
        coefficients: one for each delta.
        factor: for all elements; or ``[rows]``, for the rows that the tile consists of.

    Raises:
        ValueError: not as many coefficients as deltas, or no base.
    """
    _check_count(tile.sources, coefficients)
    if not tile.sources.is_cpu:
        return sum_on_base_in_torch(tile, coefficients, factor)
    from raymerge.kernels import combine

    base, deltas = tile.require_base(), tile.sources
    out = torch.empty(base.numel(), dtype=torch.float32)
    factors = np.array([factor]) if isinstance(factor, float) else factor.double().numpy()
    combine.weighted_sum_on_base(
        out.numpy(), flat(deltas), row_places(deltas), _doubles(coefficients), base.numpy(), factors
    )
    return out


def stored_sum_on_base(stored: Stored, coefficients: Coefficients, out: Words, factor: float = 1.0) -> None:
    """The same of the base, which is the first input, and all others, rounded into ``out``."""
    _check_count(stored.places[1:], coefficients)
    from raymerge.kernels import combine

    base, factors = stored.input(0), np.array([factor])
    combine.weighted_sum_on_base(out, stored.words, stored.places[1:], _doubles(coefficients), base, factors)


def sum_on_base_in_torch(
    tile: Tile, coefficients: Coefficients, factor: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """``sum_on_base`` on any device."""
    merged = sum_of_products_in_torch(tile.sources, coefficients)
    if isinstance(factor, float):
        merged.mul_(factor)
    elif merged.numel():
        merged.view(factor.numel(), -1).mul_(factor.float().unsqueeze(1))
    return on_base(merged, tile)


def on_base(delta: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The base plus a merged delta, which is overwritten; where that is 0 the base's very bits.

    A plain sum would turn the base's -0.0 into 0.0 there, and a model merged with itself into another.
    """
    return torch.sub(tile.require_base(), delta.neg_().add_(0.0), out=delta)


# Anchored sums ----------------------------------------------------------------------------------------


def combine(sources: torch.Tensor, coefficients: Coefficients, origin: torch.Tensor | None) -> torch.Tensor:
    """``O + sum c_i (T_i - O)`` of float32 ``[N, n]``, with O the origin ``[n]``, or 0 without one.

    Added up as changes to the source A of the largest coefficient, ``A + (sum c_i - 1) (A - O) + sum c_i
    (T_i - A)``: where the sources agree and c sums to 1 that is A to the last bit, and so is the end of an
    arc. Changes are subtracted, and as 0.0 rather than -0.0: no difference must not turn A's -0.0 into 0.0.
    What is not finite in a source of coefficient 0 reaches the result all the same.
    """
    if not sources.is_cpu:
        return combine_in_torch(sources, coefficients, origin)
    from raymerge.kernels.combine import combination

    out = torch.empty(sources.shape[1], dtype=torch.float32)
    anchor, excess = _anchor(coefficients)
    places = row_places(sources)
    combination(out.numpy(), flat(sources), places, _doubles(coefficients), anchor, excess, elements(origin))
    return out


def combine_stored(stored: Stored, coefficients: Coefficients, out: Words) -> None:
    """The same, rounded into ``out``; with one input more than coefficients, the first one is O."""
    from raymerge.kernels.combine import combination

    anchor, excess = _anchor(coefficients)
    origin, places = stored.origin(len(coefficients))
    combination(out, stored.words, places, _doubles(coefficients), anchor, excess, origin)


def combine_in_torch(
    sources: torch.Tensor, coefficients: Coefficients, origin: torch.Tensor | None
) -> torch.Tensor:
    """``combine`` on any device."""
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
    """What ``combine`` computes of these coefficients without an origin."""
    return AnchoredSum(tuple(coefficients), *_anchor(coefficients))


def _anchor(coefficients: Coefficients) -> tuple[int, float]:
    """The index of the source that changes are counted from, and by what the coefficients' sum exceeds 1."""
    magnitudes = [abs(coefficient) for coefficient in coefficients]
    return magnitudes.index(max(magnitudes)), excess_of(coefficients)


def excess_of(coefficients: Coefficients) -> float:
    """By what the sum of the coefficients exceeds 1; 0 where that would be lost in rounding."""
    excess = math.fsum(coefficients) - 1.0
    return 0.0 if abs(excess) < NEGLIGIBLE else excess


# Arcs -------------------------------------------------------------------------------------------------


def arc_coefficients(first: float, mixed: float, second: float, *, t: float) -> tuple[float, float]:
    """Coefficients of two vectors u and v a share t of the way from u to v along an arc.

    ``sin((1-t)a)/sin(a)`` and ``sin(ta)/sin(a)`` with a the angle (Shoemake: Animating rotation with
    quaternion curves, SIGGRAPH 1985). Where sin(a) is below 1e-7, which is what rounding leaves of parallel
    and of opposite vectors, ``1-t`` and ``t``. A vector of zeros stands at a right angle to all others.

    Args:
        first: inner product of u with itself.
        mixed: of u with v.
        second: of v with itself.
        t: 0 gives u, 1 gives v.

    Returns:
        Both coefficients; NaN where an inner product is not finite.
    """
    if not math.isfinite(first + mixed + second):
        return math.nan, math.nan
    norms = math.sqrt(first) * math.sqrt(second)
    cosine = max(-1.0, min(1.0, mixed / norms)) if norms else 0.0
    sine = math.sqrt((1.0 - cosine) * (1.0 + cosine))
    return (1.0 - t, t) if sine < _STRAIGHT else on_arc(cosine, t)


def on_arc(cosine: float, t: float) -> tuple[float, float]:
    """Both coefficients, of vectors that are not parallel."""
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
    """``S - c (S - T) - e (O - S)`` for many vectors: ``e`` more than 1 is the sum of both coefficients.

    Counted from one of the ends, for the reasons that ``combine`` has, and like it without -0.0.

    Args:
        start: float32 ``[n]``, S.
        other: the same, T.
        origin: the same, O; None for zeros.
        factors: float32 ``[2, vectors]``, e and c of each vector.
        by_column: whether the vectors are the columns of the matrices, not their rows.
    """
    if by_column or not start.is_cpu:
        return points_of_arcs_in_torch(start, other, origin, factors, by_column=by_column)
    from raymerge.kernels.combine import arcs

    out = torch.empty(start.numel(), dtype=torch.float32)
    arcs(out.numpy(), start.numpy(), other.numpy(), elements(origin), factors.numpy())
    return out


def points_of_arcs_in_torch(
    start: torch.Tensor,
    other: torch.Tensor,
    origin: torch.Tensor | None,
    factors: torch.Tensor,
    *,
    by_column: bool = False,
) -> torch.Tensor:
    """``points_of_arcs`` on any device; one temporary."""
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
