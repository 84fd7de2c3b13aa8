"""Compiled loops and forms in torch, which serve other devices: the same bits for all input."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import random_inputs, same_bits

from raymerge.methods import Settings, Tile
from raymerge.methods.combine import (
    check_shares,
    combine,
    combine_in_torch,
    points_of_arcs,
    points_of_arcs_in_torch,
    shares,
    sum_of_products,
    sum_of_products_in_torch,
    sum_on_base,
    sum_on_base_in_torch,
)
from raymerge.methods.gram import Gram
from raymerge.methods.nearswap import swap_near, swap_near_in_torch
from raymerge.methods.reduce import (
    PIECE,
    add_pair,
    add_pair_in_torch,
    add_products_in_torch,
    add_squares,
    add_values,
    add_values_in_torch,
    row_grams,
    row_grams_in_torch,
)

SPECIAL = (0.0, -0.0, 1e-45, -3e-39, 1e-38, 3.4e38, -3.4e38, 1e20, float("nan"), float("inf"), -float("inf"))
LENGTHS = (0, 1, 2, 15, 16, 17, 255, 256, 257, 1023, 1025, 4096, PIECE - 1, PIECE, 2 * PIECE + 300)

any_length = st.sampled_from(LENGTHS)
any_seed = st.integers(0, 1000)
any_factor = st.sampled_from((0.0, -0.0, 1.0, -1.0, 0.3, -0.7, 1 / 3, 2.5, 1e-30, 1e39, float("nan")))
some = settings(deadline=None, max_examples=60)


def vectors(count: int, length: int, seed: int) -> torch.Tensor:
    """A matrix whose rows may lie apart, some of them alike; every third one has special elements."""
    generator = np.random.default_rng((seed, count, length))
    apart = seed % 4
    elements = generator.standard_normal((count, length + apart)).astype(np.float32)
    if seed % 2:
        elements[1:] = elements[:1] + generator.integers(0, 2, (max(0, count - 1), 1)) * elements[1:]
    if seed % 3 == 0:
        places = generator.random(elements.shape) < 0.2
        elements[places] = generator.choice(np.array(SPECIAL, np.float32), int(places.sum()))
    if seed % 5 == 0:
        with np.errstate(all="ignore"):
            elements *= np.float32(1e-38)
    return torch.from_numpy(elements)[:, :length]


def vector(length: int, seed: int) -> torch.Tensor:
    return vectors(1, length, 7 * seed + 1)[0].contiguous()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, where one NaN is as good as another."""
    assert left.dtype == right.dtype
    bits = torch.int32 if left.dtype is torch.float32 else torch.int64
    equal = left.contiguous().view(bits) == right.contiguous().view(bits)
    return left.shape == right.shape and bool((equal | (left.isnan() & right.isnan())).all())


def same_numbers(left: npt.NDArray[np.float64] | float, right: npt.NDArray[np.float64] | float) -> bool:
    return same(torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))


# Sums -------------------------------------------------------------------------------------------------


@some
@given(length=any_length, seed=any_seed, total=st.sampled_from((0.0, 1.5, -1e30)))
def test_sums_of_one_and_of_two(length: int, seed: int, total: float) -> None:
    left, right = vectors(2, length, seed)
    assert same_numbers(add_values(total, left), add_values_in_torch(total, left))
    assert same_numbers(add_squares(total, left), add_products_in_torch(total, left, left))
    found, expected = np.array([total, 0.0, 2.0]), np.array([total, 0.0, 2.0])
    add_pair(found, left, right)
    add_pair_in_torch(expected, left, right)
    assert same_numbers(found, expected)


@some
@given(count=st.integers(0, 9), length=any_length, seed=any_seed, with_origin=st.booleans())
def test_inner_products(count: int, length: int, seed: int, with_origin: bool) -> None:
    """Of nine vectors there are more products than are in work at once."""
    matrix, origin = vectors(count, length, seed), vector(length, seed) if with_origin else None
    found, expected = Gram(count), Gram(count)
    for _ in range(2):
        found.add(matrix, origin)
        expected.add_in_torch(matrix, origin)
    assert same_numbers(found.products, expected.products)


SHAPES = ((0, 5), (5, 1), (16, 4), (33, 16), (7, 257), (40, 100), (3, PIECE + 20), (1, 3000))


@some
@given(shape=st.sampled_from(SHAPES), count=st.integers(1, 4), seed=any_seed, with_origin=st.booleans())
def test_rows(shape: tuple[int, int], count: int, seed: int, with_origin: bool) -> None:
    length = shape[0] * shape[1]
    matrix, origin = vectors(count, length, seed), vector(length, seed) if with_origin else None
    found = row_grams(matrix, origin, shape[1])
    assert found.shape == (count * (count + 1) // 2, shape[0])
    assert same(found, row_grams_in_torch(matrix, origin, shape[1]))


# Combinations -----------------------------------------------------------------------------------------


@some
@given(factors=st.lists(any_factor, min_size=1, max_size=6), length=any_length, seed=any_seed)
def test_sums_of_products(factors: list[float], length: int, seed: int) -> None:
    matrix = vectors(len(factors), length, seed)
    assert same(sum_of_products(matrix, factors), sum_of_products_in_torch(matrix, factors))


@some
@given(
    factors=st.lists(any_factor, min_size=1, max_size=4), factor=any_factor, length=any_length, seed=any_seed
)
def test_sums_on_the_base(factors: list[float], factor: float, length: int, seed: int) -> None:
    tile = Tile(vector(length, seed), vectors(len(factors), length, seed), 0)
    assert same(sum_on_base(tile, factors, factor), sum_on_base_in_torch(tile, factors, factor))


@some
@given(shape=st.sampled_from(SHAPES), count=st.integers(1, 3), seed=any_seed)
def test_sums_on_the_base_with_a_factor_for_each_row(shape: tuple[int, int], count: int, seed: int) -> None:
    length = shape[0] * shape[1]
    tile = Tile(vector(length, seed), vectors(count, length, seed), 0)
    factors = vector(shape[0], seed + 1).double()
    coefficients = (1.0, 0.5, -2.0)[:count]
    assert same(sum_on_base(tile, coefficients, factors), sum_on_base_in_torch(tile, coefficients, factors))


@some
@given(
    factors=st.lists(any_factor, min_size=1, max_size=6),
    length=any_length,
    seed=any_seed,
    with_origin=st.booleans(),
)
def test_combinations(factors: list[float], length: int, seed: int, with_origin: bool) -> None:
    matrix, origin = vectors(len(factors), length, seed), vector(length, seed) if with_origin else None
    for coefficients in (tuple(factors), (1 / len(factors),) * len(factors)):
        found = combine(matrix, coefficients, origin)
        assert same(found, combine_in_torch(matrix, coefficients, origin))


@some
@given(shape=st.sampled_from(SHAPES), seed=any_seed, with_origin=st.booleans())
def test_points_of_arcs(shape: tuple[int, int], seed: int, with_origin: bool) -> None:
    length = shape[0] * shape[1]
    start, other = vectors(2, length, seed)
    origin = vector(length, seed) if with_origin else None
    factors = vectors(2, shape[0], seed + 1).contiguous()
    factors[0, ::2] = 0.0
    found = points_of_arcs(start, other, origin, factors)
    assert same(found, points_of_arcs_in_torch(start, other, origin, factors))


@some
@given(length=any_length, seed=any_seed, t=st.sampled_from((0.0, 0.03, 0.5, -0.1, 1e-6, 1e38)))
def test_swaps(length: int, seed: int, t: float) -> None:
    base, source = vectors(2, length, seed)
    source = torch.where(base.abs() > 0.3, base + 0.05 * source, source)
    assert same(swap_near(base, source, t), swap_near_in_torch(base, source, t))


# Against the definition ------------------------------------------------------------------------------


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
