"""Sums by weights, as several methods start from them, and weights that are divided by their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from raymerge.methods.method import Rows, Settings, Tile

_CANCELS = 1e-8


def weighted_sum(tile: Tile, settings: Settings) -> torch.Tensor:
    """``sum w d`` over the sources in order, as ``sum_of_products``."""
    return sum_of_products(tile.sources, settings.per_source("weight"))


def sum_of_products(tensors: Rows, coefficients: Sequence[float]) -> torch.Tensor:
    """``sum c T`` in order, every product rounded: a new float32 ``[n]``, with one temporary of its size."""
    total = tensors[0] * coefficients[0]
    product = torch.empty_like(total)
    for tensor, coefficient in zip(tensors[1:], coefficients[1:], strict=True):
        # Not add(alpha=...): it fuses the product into the sum in some lanes and not in others.
        total.add_(torch.mul(tensor, coefficient, out=product))
    return total


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
