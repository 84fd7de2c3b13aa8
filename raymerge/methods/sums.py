"""Sums by weights, as several methods start from them, and weights that are divided by their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized

import numpy as np
import torch
from numpy.typing import NDArray

from raymerge.methods.method import Settings, Stored, Tile
from raymerge.methods.reduce import flat

_CANCELS = 1e-8


def weighted_sum(tile: Tile, settings: Settings) -> torch.Tensor:
    """``sum w d`` over the sources in order, as ``sum_of_products``."""
    return sum_of_products(tile.sources, settings.per_source("weight"))


def sum_of_products(vectors: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """``sum c v`` over the rows of float32 ``[N, n]`` in order, every product rounded; a new float32 ``[n]``.

    Raises:
        ValueError: not as many coefficients as vectors.
    """
    _check_count(vectors, coefficients)
    if not vectors.is_cpu:
        return sum_of_products_in_torch(vectors, coefficients)
    from raymerge.kernels import combine

    out = torch.empty(vectors.shape[1], dtype=torch.float32)
    of_vectors = np.array(coefficients, dtype=np.float64)
    combine.weighted_sum(out.numpy(), flat(vectors), vectors.stride(0), of_vectors)
    return out


def stored_sum_of_products(stored: Stored, coefficients: Sequence[float], out: NDArray[np.uint16]) -> None:
    """The same sum of all inputs, rounded into ``out``.

    Raises:
        ValueError: not as many coefficients as inputs.
    """
    _check_count(stored.places, coefficients)
    from raymerge.kernels import combine as combine_stored

    of_vectors = np.array(coefficients, dtype=np.float64)
    combine_stored.stored_sum(out, stored.words, stored.places, of_vectors)


def sum_of_products_in_torch(vectors: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """The same sum as ``sum_of_products``, on any device; one temporary of its size."""
    total: torch.Tensor = vectors[0] * coefficients[0]
    product = torch.empty_like(total)
    for vector, coefficient in zip(vectors[1:], coefficients[1:], strict=True):
        # Not add(alpha=...): it fuses the product into the sum in some lanes and not in others.
        total.add_(torch.mul(vector, coefficient, out=product))
    return total


def sum_on_base(
    tile: Tile, coefficients: Sequence[float], factor: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """``B + f * sum c d`` over the deltas in order, every product rounded; a new float32 ``[n]``.

    Where the sum is 0 that is the base to the last bit.

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

    base = tile.require_base()
    out = torch.empty(base.numel(), dtype=torch.float32)
    factors = np.array([factor]) if isinstance(factor, float) else factor.double().numpy()
    of_deltas = np.array(coefficients, dtype=np.float64)
    deltas, stride = flat(tile.sources), tile.sources.stride(0)
    combine.weighted_sum_on_base(out.numpy(), deltas, stride, of_deltas, base.numpy(), factors)
    return out


def stored_sum_on_base(
    stored: Stored, coefficients: Sequence[float], out: NDArray[np.uint16], factor: float = 1.0
) -> None:
    """The same result from the base and all other inputs, rounded into ``out``.

    Raises:
        ValueError: not as many coefficients as inputs beside the base.
    """
    _check_count(stored.places[1:], coefficients)
    from raymerge.kernels import combine as combine_stored

    of_deltas = np.array(coefficients, dtype=np.float64)
    combine_stored.stored_sum_on_base(out, stored.words, stored.places, of_deltas, factor)


def sum_on_base_in_torch(
    tile: Tile, coefficients: Sequence[float], factor: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """The same result as ``sum_on_base``, on any device."""
    merged = sum_of_products_in_torch(tile.sources, coefficients)
    if isinstance(factor, float):
        merged.mul_(factor)
    elif merged.numel():
        merged.view(factor.numel(), -1).mul_(factor.float().unsqueeze(1))
    # Subtracted, and as 0.0 rather than -0.0: no change must not turn the base's -0.0 into 0.0.
    return torch.sub(tile.require_base(), merged.neg_().add_(0.0), out=merged)


def _check_count(vectors: Sized, coefficients: Sequence[float]) -> None:
    if len(vectors) != len(coefficients):
        raise ValueError(f"{len(vectors)} vectors need as many coefficients, are given {len(coefficients)}")


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
