"""Router rows that no text decides."""

from __future__ import annotations

import math

import torch

from raymerge.methods import normal, random_key, uniform

_CPU = torch.device("cpu")


def random_rows(mode: str, seed: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Normal numbers, or with ``uniform_random`` uniform ones between -1 and 1 over the root of H.

    Each element is a function of seed, name and index: no two rows are alike, whatever their experts are.

    Args:
        mode: ``random`` or ``uniform_random``.
        seed: of the recipe.
        name: of the tensor in the stage's result.
        shape: experts and H.

    Returns:
        float32 of ``shape``.
    """
    key, count = random_key(seed, name, 0), math.prod(shape)
    if mode == "random":
        return normal(key, 0, count, _CPU).view(shape)
    # Exact up to the one rounding of the quotient: the numbers are multiples of 2**-24.
    return uniform(key, 0, count, _CPU).mul_(2.0).sub_(1.0).div_(math.sqrt(shape[1])).view(shape)
