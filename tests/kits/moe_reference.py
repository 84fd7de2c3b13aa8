"""Merges in float64, written from the papers and from mergekit's rules, and nothing of raymerge in them.

A method sees one matrix of one expert at a time, as ``kits.moe_maker.pieces`` cuts it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from kits.moe_maker import pieces

Merge = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def linear(*weights: float) -> Merge:
    total = sum(weights)

    def merge(parents: Sequence[torch.Tensor]) -> torch.Tensor:
        mean = torch.zeros_like(parents[0])
        for weight, parent in zip(weights, parents, strict=True):
            mean += parent * (weight / total)
        return mean

    return merge


def slerp(t: float) -> Merge:

    def merge(parents: Sequence[torch.Tensor]) -> torch.Tensor:
        one, other = parents
        norms = one.norm() * other.norm()
        cosine = float((one * other).sum() / norms) if norms > 0 else 0.0
        if abs(cosine) > 0.9995:
            return one * (1 - t) + other * t
        angle = math.acos(cosine)
        return (one * math.sin((1 - t) * angle) + other * math.sin(t * angle)) / math.sin(angle)

    return merge


def ties(weights: Sequence[float], density: float) -> Merge:
    """TIES (2306.01708): trimmed deltas, a sign elected by their weighted sum, the mean of those with it."""

    def merge(parents: Sequence[torch.Tensor]) -> torch.Tensor:
        base, *tuned = parents
        deltas = [w * _trimmed(each - base, density) for w, each in zip(weights, tuned, strict=True)]
        elected = torch.where(sum(deltas, torch.zeros_like(base)) >= 0, 1.0, -1.0)
        total, share = torch.zeros_like(base), torch.zeros_like(base)
        for weight, delta in zip(weights, deltas, strict=True):
            agrees = (delta.sign() == elected).to(base.dtype)
            total += delta * agrees
            share += weight * agrees
        return base + total / torch.where(share == 0, 1.0, share)

    return merge


def merged_states(
    states: Sequence[Mapping[str, torch.Tensor]], merge: Merge, *, layout: str, num_experts: int
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            found[name] = first
            continue
        parents = [state[name].double() for state in states]
        found[name] = result = parents[0].clone()
        split = [pieces(name, parent, layout, num_experts) for parent in (result, *parents)]
        for target, *members in zip(*split, strict=True):
            target.copy_(merge(members))
    return found


def _trimmed(delta: torch.Tensor, density: float) -> torch.Tensor:
    keep = int(density * delta.numel())
    order = delta.flatten().abs().argsort(descending=True)
    kept = torch.zeros(delta.numel(), dtype=delta.dtype)
    kept[order[:keep]] = 1
    return delta * kept.view_as(delta)
