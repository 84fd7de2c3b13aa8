"""The way between two vectors along an arc, from their inner products (Shoemake: Animating rotation with
quaternion curves, SIGGRAPH 1985)."""

from __future__ import annotations

import math

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
