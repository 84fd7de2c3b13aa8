"""Sums of few tensors take a loop of their own: the same bits as torch gives, as for many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raymerge.methods.combine import (
    combine,
    combine_in_torch,
    combine_stored,
    stored_sum_on_base,
    sum_on_base,
    sum_on_base_in_torch,
)
from raymerge.methods.kernel import Stored, Tile

COUNT = 5003
"""No multiple of what a loop takes at once."""
WEIGHTS = (0.25, 0.125, -0.125, 0.5, -0.375, 0.75, 0.3)


def weights_of(num: int, largest: int) -> list[float]:
    """Weights that sum to 1, the largest at a place: a mean without an excess, counted from there."""
    rest = [0.125 * (-1) ** number for number in range(num - 1)]
    return [*rest[:largest], 1.0 - sum(rest), *rest[largest:]]


def made(num: int) -> tuple[torch.Tensor, Stored]:
    """Vectors of bfloat16 values, zeros of both signs among them, as float32 and as stored."""
    vectors = torch.randn(num, COUNT, generator=torch.Generator().manual_seed(num)).bfloat16()
    vectors[:, ::7], vectors[:, 3::11] = 0.0, -0.0
    words = vectors.view(torch.int16).numpy().view(np.uint16).ravel()
    return vectors.float(), Stored(words, np.arange(num) * COUNT, COUNT, 0)


@pytest.mark.parametrize(("num", "largest"), [(n, at) for n in (2, 3, 6, 7) for at in range(n)])
def test_a_mean_is_what_torch_gives(num: int, largest: int) -> None:
    vectors, stored = made(num)
    weights = weights_of(num, largest)
    expected = combine_in_torch(vectors, weights, None)
    assert torch.equal(combine(vectors, weights, None).view(torch.int32), expected.view(torch.int32))
    out = np.empty(COUNT, np.uint16)
    combine_stored(stored, weights, out)
    assert out.tobytes() == expected.bfloat16().view(torch.int16).numpy().tobytes()


@pytest.mark.sample(3)
@pytest.mark.parametrize("num", [1, 2, 6, 7])
@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_a_sum_on_a_base_is_what_torch_gives(num: int, factor: float) -> None:
    vectors, stored = made(num + 1)
    tile = Tile(vectors[0], vectors[1:] - vectors[0], 0)
    expected = sum_on_base_in_torch(tile, WEIGHTS[:num], factor)
    assert torch.equal(sum_on_base(tile, WEIGHTS[:num], factor).view(torch.int32), expected.view(torch.int32))
    out = np.empty(COUNT, np.uint16)
    stored_sum_on_base(stored, WEIGHTS[:num], out, factor)
    assert out.tobytes() == expected.bfloat16().view(torch.int16).numpy().tobytes()
