"""Sums by weights, and weights that are divided by their sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import random_inputs, same_bits

from raymerge.methods import Settings, Tile
from raymerge.methods.combine import check_shares, shares, sum_of_products, sum_on_base


def weighted(*weights: float, normalize: bool = True) -> Settings:
    return Settings({"normalize": normalize}, tuple({"weight": weight} for weight in weights))


@pytest.mark.parametrize("weights", [(0.3,), (0.3, -0.7), (0.1, 0.2, 0.3, 0.4)])
def test_every_product_and_every_sum_is_rounded(weights: tuple[float, ...]) -> None:
    _, sources = random_inputs(len(weights), (70_001,))
    expected = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        expected = expected + source * weight
    vectors = torch.stack(sources)
    assert same_bits(sum_of_products(vectors, weights), expected)
    assert same_bits(vectors, torch.stack(sources))


@pytest.mark.parametrize(("weights", "factor"), [((0.3,), 1.0), ((0.3, -0.7), 0.4), ((0.1, 0.2, 0.3), -2.0)])
def test_a_sum_is_added_to_the_base(weights: tuple[float, ...], factor: float) -> None:
    base, deltas = random_inputs(len(weights), (70_001,))
    tile = Tile(base, torch.stack(deltas), 0)
    expected = base + sum_of_products(tile.sources, weights) * factor
    assert same_bits(sum_on_base(tile, weights, factor), expected)
    rows = torch.tensor([factor, 0.25, 3.0], dtype=torch.float64)
    part = Tile(base[:69_999], tile.sources[:, :69_999], 0)
    by_rows = base[:69_999] + (
        sum_of_products(part.sources, weights).view(3, -1) * rows.float().unsqueeze(1)
    ).view(-1)
    assert same_bits(sum_on_base(part, weights, rows), by_rows)


@pytest.mark.parametrize("factor", [0.0, 1.0, -1.0])
def test_where_the_sum_is_0_the_base_keeps_its_bits(factor: float) -> None:
    base = torch.tensor([-0.0, 0.0, 1.0])
    for zero in (0.0, -0.0):
        tile = Tile(base, torch.full((2, 3), zero), 0)
        assert same_bits(sum_on_base(tile, (0.5, -0.5), factor), base)


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=6))
def test_shares_sum_to_1_or_are_refused(weights: list[float]) -> None:
    given_ = weighted(*weights)
    if check_shares(given_, normalize="normalize") is None:
        found = shares(given_, normalize="normalize")
        assert math.fsum(found) == pytest.approx(1.0, abs=1e-15 * math.fsum(map(abs, found)))
    else:
        assert abs(math.fsum(weights)) <= 1e-8 * math.fsum(map(abs, weights))
