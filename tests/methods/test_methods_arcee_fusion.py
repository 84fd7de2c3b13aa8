"""arcee_fusion, against the definition in float64, with the same bits for every tiling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import (
    Case,
    MethodKit,
    assert_as_expected,
    expected_of,
    make_settings,
    merge,
    method_named,
    random_inputs,
    same_bits,
    threads,
)
from numpy.typing import NDArray

from raymerge.methods.arcee_fusion import _divergences

Array = NDArray[np.float64]
SHAPE = (37, 101)


def run(base: torch.Tensor, source: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    method = method_named("arcee_fusion")
    return merge(method, make_settings(method, Case(), base.shape), base, [source], cuts)


class TestArceeFusion(MethodKit):
    name = "arcee_fusion"
    scales = False
    cases = (Case(),)


# Against the definition -------------------------------------------------------------------------------


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True)) + 1e-8


def test_by_hand() -> None:
    """Two rows of four. Only the second row's softmax changes, so that only its elements matter; its shift by
    5 in one element is taken, its small shifts are not."""
    base = torch.zeros(2, 4)
    source = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.5, 0.5, 0.5]])
    q, p = 0.25 + 1e-8, [math.exp(x) / (math.exp(5) + 3 * math.exp(0.5)) + 1e-8 for x in (5.0, 0.5)]
    divergence = p[0] * math.log(p[0] / q) + 3 * p[1] * math.log(p[1] / q)
    # Sorted importances: 0 0 0 0, then 0.5 three times and 5 once the divergence.
    assert 5 * divergence >= 0.0 + 1.5 * (0.5 * divergence - 0.0) > 0.5 * divergence
    assert run(base, source).tolist() == [[0.0] * 4, [5.0, 0.0, 0.0, 0.0]]


def test_quartiles_are_exact_beyond_a_million_elements() -> None:
    """mergekit draws a sample there, and another one for the median."""
    base, [source] = random_inputs(1, (1100, 1000))
    result = run(base, source)
    method = method_named("arcee_fusion")
    settings = make_settings(method, Case(), base.shape)
    assert_as_expected(result, expected_of(method, settings, base, [source]))
    assert same_bits(run(base, source), result)


def test_what_changes_nothing_is_the_base_and_a_single_column_the_source() -> None:
    base, _ = random_inputs(1, SHAPE)
    assert same_bits(run(base, base), base)
    column, [other] = random_inputs(1, (20, 1))
    torch.testing.assert_close(run(column, other), other)


# Small changes ----------------------------------------------------------------------------------------


def divergences(base: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _divergences(base, source, -(-base.shape[1] // 64) * 64)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 20_000])
def test_divergences_are_those_of_the_definition(length: int) -> None:
    base, [source] = random_inputs(1, (3, length))
    p, q = softmax(source.double().numpy()), softmax(base.double().numpy())
    expected = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(divergences(base, source).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("exponent", [8, 14, 20, 30])
def test_divergences_of_tiny_changes_do_not_drown_in_rounding(exponent: int) -> None:
    """They fall with the square of the change: half the variance of the change under q."""
    base, change = torch.zeros(1, 256), torch.linspace(-1.0, 1.0, 256).unsqueeze(0)
    expected = float(change.double().var(correction=0)) / 2
    measured = float(divergences(base, change * 2.0**-exponent)) * 4.0**exponent
    assert measured == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("exponent", [10, 20, 30])
def test_the_merged_delta_is_as_small_as_the_deltas(exponent: int) -> None:
    """Over a uniform row, of which the softmax moves in proportion to the change when that is small."""
    _, (first, second) = random_inputs(2, SHAPE)
    delta, factor = (first - second) * 2.0**-5, 2.0**-exponent
    large, small = run(torch.zeros(SHAPE), delta), run(torch.zeros(SHAPE), delta * factor)
    taken = large != 0
    assert 0 < int(taken.sum()) < taken.numel()
    assert float(((small != 0) != taken).double().mean()) < 0.01
    both = taken & (small != 0)
    assert torch.equal(small[both], large[both] * factor)


def test_large_values_overflow_nothing() -> None:
    base = torch.tensor([[-1e4, 0.0, 1e4, 3.0]])
    source = torch.tensor([[1e4, 0.0, -1e4, 3.0]])
    assert bool(divergences(base, source).isfinite().all())
    assert bool(run(base, source).isfinite().all())


# The same bits ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    length=st.sampled_from([1, 7, 63, 64, 65, 1501, 16_383, 33_001]),
    first=st.integers(0, 9),
    count=st.integers(1, 9),
)
def test_a_divergence_depends_on_its_row_alone(length: int, first: int, count: int) -> None:
    base, [source] = random_inputs(1, (10, length))
    part = slice(first, first + count)
    whole, alone = divergences(base, source)[part], divergences(base[part], source[part])
    assert torch.equal(whole.view(torch.int64), alone.view(torch.int64))


def test_threads_do_not_change_a_bit_of_long_and_short_rows() -> None:
    for shape in ((40, 3001), (2, 70_001), (120_001,), (30_000, 3)):
        base, [source] = random_inputs(1, shape)
        with threads(1):
            alone = run(base, source)
        with threads(2):
            assert same_bits(run(base, source), alone)
