"""The weighted sum of deltas that several methods start from."""

from __future__ import annotations

import torch

from raymerge.methods.method import Settings, Tile
from raymerge.methods.task_arithmetic import sum_of_terms


def weighted_sum(tile: Tile, settings: Settings) -> torch.Tensor:
    """``sum w d`` over the sources in order: a new float32 ``[n]``, with one temporary of its size."""
    weights = settings.per_source("weight")

    def term(index: int, out: torch.Tensor) -> None:
        torch.mul(tile.sources[index], weights[index], out=out)

    return sum_of_terms(tile, term)
