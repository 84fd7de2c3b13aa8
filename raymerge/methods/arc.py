"""The way between two vectors along an arc, from their inner products (Shoemake: Animating rotation with
quaternion curves, SIGGRAPH 1985)."""

from __future__ import annotations

import math

import torch

from raymerge.methods.reduce import elements

_STRAIGHT = 1e-7


def arc_coefficients(first: float, mixed: float, second: float, *, t: float) -> tuple[float, float]:
    """Coefficients of two vectors u and v a share t of the way from u to v.

    ``sin((1-t)a)/sin(a)`` and ``sin(ta)/sin(a)`` with a the angle. Where sin(a) is below 1e-7, which is what
    rounding leaves of parallel and of opposite vectors, ``1-t`` and ``t``. A vector of zeros stands at a
    right angle to all others.

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
    if sine < _STRAIGHT:
        return 1.0 - t, t
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

    Counted from one of the ends, for the reasons that ``gram.combine`` has, and like it without -0.0.

    Args:
        start: float32 ``[n]``, S.
        other: the same, T.
        origin: the same, O; None for zeros.
        factors: float32 ``[2, vectors]``, e and c of each vector.
        by_column: whether the vectors are the columns of the matrices, not their rows.

    Returns:
        float32 ``[n]``.
    """
    if not start.is_cpu:
        return points_of_arcs_in_torch(start, other, origin, factors, by_column=by_column)
    from raymerge.kernels import combine

    out = torch.empty(start.numel(), dtype=torch.float32)
    write = combine.arcs_by_column if by_column else combine.arcs
    write(out.numpy(), start.numpy(), other.numpy(), elements(origin), factors.numpy())
    return out


def points_of_arcs_in_torch(
    start: torch.Tensor,
    other: torch.Tensor,
    origin: torch.Tensor | None,
    factors: torch.Tensor,
    *,
    by_column: bool = False,
) -> torch.Tensor:
    """The same points as ``points_of_arcs``, on any device; one temporary."""
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
