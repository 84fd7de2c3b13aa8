"""Inner products of several vectors, linear combinations, and the coefficients of an arc."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import random_inputs, same_bits

from raymerge.methods.combine import arc_coefficients, combine
from raymerge.methods.gram import Gram


def gram_of(vectors: list[torch.Tensor], origin: torch.Tensor | None = None) -> Gram:
    gram = Gram(len(vectors))
    gram.add(torch.stack(vectors), origin)
    return gram


# Inner products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_origin", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_products_of_all_pairs(with_origin: bool, count: int) -> None:
    origin, vectors = random_inputs(count, (3000,))
    gram = gram_of(vectors, origin if with_origin else None)
    arrays = np.stack([(v - origin if with_origin else v).double().numpy() for v in vectors])
    found = [[gram.product(i, j) for j in range(count)] for i in range(count)]
    np.testing.assert_allclose(found, arrays @ arrays.T, rtol=1e-12)
    np.testing.assert_allclose(gram.norms(), np.linalg.norm(arrays, axis=1), rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gram_knows_whether_all_was_finite(bad: float) -> None:
    vectors = [torch.full((4,), torch.finfo(torch.float32).max), torch.ones(4)]
    assert gram_of(vectors).is_finite
    vectors[1][2] = bad
    assert not gram_of(vectors).is_finite


# Combinations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_origin", [False, True])
def test_one_source_alone_is_taken_to_the_last_bit(with_origin: bool) -> None:
    base, sources = random_inputs(3, (50,))
    sources[1][7] = -0.0
    result = combine(torch.stack(sources), (0.0, 1.0, 0.0), base if with_origin else None)
    assert same_bits(result, sources[1])


# Arcs -------------------------------------------------------------------------------------------------


def on_the_circle(angle: float, t: float, lengths: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
    """Coefficients for two vectors of the plane of that angle between them."""
    first, second = lengths
    return arc_coefficients(first**2, first * second * math.cos(angle), second**2, t=t)


@settings(deadline=None, max_examples=60)
@given(angle=st.floats(0.001, 3.0), t=st.floats(-0.5, 1.5), scale=st.floats(1e-6, 1e6))
def test_the_arc_between_unit_vectors_stays_on_the_circle(angle: float, t: float, scale: float) -> None:
    one, other = on_the_circle(angle, t)
    point = (one + other * math.cos(angle), other * math.sin(angle))
    assert point == pytest.approx((math.cos(t * angle), math.sin(t * angle)), abs=1e-9)
    assert on_the_circle(angle, t, (scale, 1 / scale)) == pytest.approx((one, other), abs=1e-6)


def test_small_angles_go_over_into_the_straight_line() -> None:
    for angle in (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 0.0):
        assert on_the_circle(angle, 0.3) == pytest.approx((0.7, 0.3), abs=1e-6)
    assert on_the_circle(0.0, 0.3) == (0.7, 0.3)


def test_the_smallest_vectors_have_angles_too() -> None:
    least = 2.0**-298
    assert arc_coefficients(least, 0.0, least, t=0.5) == arc_coefficients(1.0, 0.0, 1.0, t=0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_angle_without_finite_products(bad: float) -> None:
    for products in itertools.permutations((bad, 1.0, 1.0)):
        assert all(math.isnan(part) for part in arc_coefficients(*products, t=0.5))
