"""Sums by weights, and weights that are divided by their sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import FEW_BYTES, MemoryMeter, random_inputs, same_bits

from raymerge.methods import Settings, Tile
from raymerge.methods.sums import check_shares, shares, sum_of_products, weighted_sum

CANCELLED = "the weights sum to 0, so they cannot be normalised"


def weighted(*weights: float, normalize: bool = True) -> Settings:
    return Settings({"normalize": normalize}, tuple({"weight": weight} for weight in weights))


@pytest.mark.parametrize("weights", [(0.3,), (0.3, -0.7), (0.1, 0.2, 0.3, 0.4)])
def test_every_product_and_every_sum_is_rounded(weights: tuple[float, ...]) -> None:
    _, sources = random_inputs(len(weights), (70_001,))
    expected = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        expected = expected + source * weight
    before = [source.clone() for source in sources]
    assert same_bits(sum_of_products(sources, weights), expected)
    assert same_bits(weighted_sum(Tile(None, torch.stack(list(sources)), 0), weighted(*weights)), expected)
    assert all(same_bits(*pair) for pair in zip(sources, before, strict=True))


def test_a_sum_takes_one_temporary() -> None:
    _, sources = random_inputs(4, (70_001,))
    with MemoryMeter() as meter:
        total = sum_of_products(sources, (0.1, 0.2, 0.3, 0.4))
    assert meter.peak_bytes <= 2 * total.nbytes + FEW_BYTES


def test_each_tensor_has_a_coefficient() -> None:
    _, sources = random_inputs(3, (5,))
    with pytest.raises(ValueError, match="zip"):
        sum_of_products(sources, (0.5, 0.5))


def test_shares_by_hand() -> None:
    assert shares(weighted(1.0, 3.0), normalize="normalize") == (0.25, 0.75)
    assert shares(weighted(3.0, -1.0), normalize="normalize") == (1.5, -0.5)
    assert shares(weighted(1.0, 3.0, normalize=False), normalize="normalize") == (1.0, 3.0)


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=6))
def test_shares_sum_to_1_or_are_refused(weights: list[float]) -> None:
    given_ = weighted(*weights)
    if check_shares(given_, normalize="normalize") is None:
        found = shares(given_, normalize="normalize")
        assert math.fsum(found) == pytest.approx(1.0, abs=1e-15 * math.fsum(map(abs, found)))
    else:
        assert abs(math.fsum(weights)) <= 1e-8 * math.fsum(map(abs, weights))


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ((1.0, -1.0), CANCELLED),
        ((0.0, 0.0), CANCELLED),
        ((1.0, -1.0 + 1e-9), CANCELLED),
        ((1.0, -1.0 + 1e-7), None),
        ((1e-30, 1e-30), None),
    ],
)
def test_weights_that_cancel_out_have_no_shares(weights: tuple[float, ...], sentence: str | None) -> None:
    assert check_shares(weighted(*weights), normalize="normalize") == sentence
    assert check_shares(weighted(*weights, normalize=False), normalize="normalize") is None
