"""Weighted sum or mean (model soups, arXiv 2203.05482)."""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math

import torch

from raymerge.methods.gram import combine
from raymerge.methods.method import Access, BaseUse, Method, Parameter, Settings, SinglePass, Takes, Tile

_CANCELS = 1e-8


class LinearKernel(SinglePass):
    """``sum w_i T_i``, divided by ``sum w_i`` under ``normalize``."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """The weighted sum; coefficients are normalised in float64 before they meet the elements.

        A mean is added up as changes to one source, so that sources that agree give their very bits.
        """
        coefficients = _coefficients(settings)
        if settings.flag("normalize"):
            return combine(tile.sources, coefficients, None)
        merged = tile.sources[0] * coefficients[0]
        product = torch.empty_like(merged)
        for source, coefficient in zip(tile.sources[1:], coefficients[1:], strict=True):
            # Not add(alpha=...): it fuses the product into the sum in some lanes and not in others.
            merged.add_(torch.mul(source, coefficient, out=product))
        return merged


def _coefficients(settings: Settings) -> tuple[float, ...]:
    weights = settings.per_source("weight")
    if not settings.flag("normalize"):
        return weights
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def _check(settings: Settings) -> str | None:
    weights = settings.per_source("weight")
    cancels = abs(math.fsum(weights)) <= _CANCELS * math.fsum(map(abs, weights))
    if settings.flag("normalize") and cancels:
        return "the weights sum to 0, so they cannot be normalised"
    return None


def _identity(settings: Settings) -> int | None:
    """One source counts as itself: a mean of one, or a sum with weight 1."""
    weights = settings.per_source("weight")
    alone = len(weights) == 1 and _check(settings) is None
    return 0 if alone and _coefficients(settings) == (1.0,) else None


LINEAR = Method(
    name="linear",
    summary="Weighted mean of the sources, or their weighted sum.",
    paper="2203.05482",
    access=Access.ELEMENT,
    base=BaseUse.UNUSED,
    takes=Takes.WEIGHTS,
    kernel=LinearKernel(),
    parameters=(
        Parameter("weight", "float", "source", "coefficient of the source", required=True),
        Parameter("normalize", "bool", "global", "divide by the sum of the weights", default=True),
    ),
    check=_check,
    identity=_identity,
)
