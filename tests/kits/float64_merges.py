"""Merges in float64, written from the papers and from mergekit's rules, and nothing of raymerge in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from kits.quantised_numbers import Values

Merge = Callable[[Sequence[Values]], Values]
"""Of one matrix of each parent, what may come out of it: [outcomes, ...]."""


def linear(*weights: float) -> Merge:
    return lambda parents: np.average(np.stack(parents), axis=0, weights=weights)[None]


def slerp(t: float) -> Merge:

    def merge(parents: Sequence[Values]) -> Values:
        one, other = parents
        norms = float(np.linalg.norm(one) * np.linalg.norm(other))
        cosine = float((one * other).sum()) / norms if norms > 0 else 0.0
        if abs(cosine) > 0.9995:
            return (one * (1 - t) + other * t)[None]
        angle = math.acos(cosine)
        arc = one * math.sin((1 - t) * angle) + other * math.sin(t * angle)
        return np.asarray(arc / math.sin(angle))[None]

    return merge


def ties(weights: Sequence[float], density: float) -> Merge:
    """TIES (2306.01708) on the first: trimmed deltas, an elected sign, the mean of those that have it.

    Which of equal magnitudes at the cut stay is free: there is an outcome for each choice.
    """

    def merge(parents: Sequence[Values]) -> Values:
        base, *tuned = parents
        choices = [_trimmed(each - base, density) for each in tuned]
        return np.stack([base + _consensus(deltas, weights) for deltas in product(*choices)])

    return merge


def _trimmed(delta: Values, density: float) -> tuple[Values, Values]:
    magnitudes = np.abs(delta)
    keep = math.floor(density * delta.size)
    cut = np.sort(magnitudes, axis=None)[-keep]
    margin = 1e-6 * cut + 1e-9 * magnitudes.max()
    return tuple(np.where(magnitudes > cut + sign * margin, delta, 0.0) for sign in (-1, 1))  # type: ignore[return-value]


def _consensus(deltas: Sequence[Values], weights: Sequence[float]) -> Values:
    terms = [weight * delta for weight, delta in zip(weights, deltas, strict=True)]
    elected = np.where(sum(terms) >= 0, 1.0, -1.0)
    agrees = [np.sign(term) == elected for term in terms]
    total = sum(term * mask for term, mask in zip(terms, agrees, strict=True))
    share = sum(weight * mask for weight, mask in zip(weights, agrees, strict=True))
    return np.asarray(total / np.where(share == 0, 1.0, share))
