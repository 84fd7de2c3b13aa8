"""della and della_linear: chances by rank, rescaling by them, and masks that no tile or thread changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.method_kit import (
    Case,
    MethodKit,
    merge,
    method_named,
    random_inputs,
    run,
    same_bits,
    settings_for,
    sources_of,
)
from numpy.typing import NDArray

from raymerge.methods.della import _ranks, _sparsify, _sparsify_in_torch
from raymerge.methods.random import write_numbers

Array = NDArray[np.float64]
CPU = torch.device("cpu")
SHAPE = (37, 101)
NAMES = ["della", "della_linear"]


class TestDella(MethodKit):
    name = "della"
    cases = (
        Case(sources=sources_of(0.5, 0.3, 0.4, density=0.4, epsilon=0.2)),
        Case({"normalize": False, "rescale": False}, sources_of(0.5, -0.3, density=0.7)),
        Case({"lambda": 1.5}, (*sources_of(0.5, density=0.5), *sources_of(0.3))),
        Case(sources=sources_of(1.0, density=0.0)),
        Case(sources=sources_of(1.0)),
    )


class TestDellaLinear(MethodKit):
    name = "della_linear"
    cases = (
        Case(sources=sources_of(0.5, 0.3, -0.2, density=0.4, epsilon=0.2)),
        Case({"normalize": True, "rescale": False}, sources_of(0.5, 0.3, density=0.7)),
        Case(sources=(*sources_of(0.5, density=0.5, epsilon=0.0), *sources_of(0.3))),
        # A table for each of them, and not all at once.
        Case(sources=tuple(source for d in range(2, 8) for source in sources_of(0.2, density=d / 10))),
    )


# Against the definition -------------------------------------------------------------------------------


def chances_of(delta: Array, density: float, epsilon: float) -> Array:
    """The paper's: linear in the rank within the row; ranks by counting, element by element."""
    rows = np.abs(delta).reshape(-1, delta.shape[-1])
    columns = rows.shape[1]
    if columns == 1:
        return np.full(delta.shape, density)
    ranks = np.zeros_like(rows)
    for column in range(columns):
        own = rows[:, column : column + 1]
        earlier_equal = (rows[:, :column] == own).sum(axis=1)
        ranks[:, column] = (rows < own).sum(axis=1) + earlier_equal
    low = density - epsilon
    return np.asarray(low + 2 * epsilon * ranks / (columns - 1)).reshape(delta.shape)


def uniforms(key: int, count: int) -> Array:
    """The random number of each element, from 0 to 1: what its chance must be above."""
    numbers = write_numbers(key, 0, out=torch.empty(count, dtype=torch.int32))
    return (numbers.double().numpy() + 2.0**31) / 2.0**32


@pytest.mark.parametrize(("density", "epsilon"), [(0.5, 0.1), (0.6, 0.3), (0.3, 0.0)])
@pytest.mark.parametrize("shape", [(40,), (4, 10), (2, 4, 5), (40, 1), ()])
def test_masks_follow_the_definition(density: float, epsilon: float, shape: tuple[int, ...]) -> None:
    base, [source] = random_inputs(1, shape)
    case = Case({"rescale": False}, sources_of(1.0, density=density, epsilon=epsilon))
    settings = settings_for("della_linear", case, shape)
    kept = merge(method_named("della_linear"), settings, base, [source]) != base
    delta = (source - base).double().numpy().reshape(shape or (1,))
    numbers = uniforms(settings.keys[0], delta.size).reshape(delta.shape)
    assert np.array_equal(kept.numpy().reshape(delta.shape), numbers < chances_of(delta, density, epsilon))


def test_by_hand() -> None:
    """Density 0.5 and epsilon 0.25 over three elements: chances 0.25, 0.5 and 0.75, factors 4, 2 and 4/3."""
    base = torch.zeros(400, 3)
    row = torch.tensor([3.0, -1.0, 2.0])
    case = Case({"normalize": False}, sources_of(1.0, density=0.5, epsilon=0.25))
    result = run("della", case, base, [row.expand(400, 3)])
    large, small, middle = (set(column.tolist()) for column in result.unbind(dim=1))
    assert (large, small, middle) == ({0.0, 4.0}, {-0.0, -4.0}, {0.0, 4.0})
    shares = (result != 0).double().mean(dim=0)
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.25, 0.5]).double(), rtol=0, atol=0.08)


def test_equal_magnitudes_rank_by_index() -> None:
    delta = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]).repeat(4000, 1)
    case = Case({"rescale": False}, sources_of(1.0, density=0.5, epsilon=0.4))
    shares = (run("della_linear", case, torch.zeros(4000, 5), [delta]) != 0).double().mean(dim=0)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).double(), rtol=0, atol=0.04)


# What the method is for -------------------------------------------------------------------------------


@pytest.mark.parametrize(("density", "epsilon"), [(0.2, 0.1), (0.5, 0.4), (0.9, 0.05)])
def test_the_expected_delta_is_the_whole_one(density: float, epsilon: float) -> None:
    """The reason for one over the chance, element by element: small and large ones alike."""
    rows = 20_000
    delta = torch.arange(1.0, 9.0).repeat(rows, 1)
    case = Case(sources=sources_of(1.0, density=density, epsilon=epsilon))
    means = run("della_linear", case, torch.zeros(rows, 8), [delta]).double().mean(dim=0)
    chances = density - epsilon + 2 * epsilon * torch.arange(8) / 7
    allowed = 5 * delta[0] * ((1 / chances - 1) / rows).sqrt()
    assert bool(((means - delta[0]).abs() < allowed).all())


# Settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "epsilon", "fits"),
    [
        (0.5, 0.15, True),
        (0.9, 0.15, False),
        (0.85, 0.15, False),
        (0.1, 0.15, False),
        (0.15, 0.15, False),
        (0.0, 0.5, True),
        (1.0, 0.5, True),
        (0.5, 0.0, True),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_chances_must_be_chances(name: str, density: float, epsilon: float, fits: bool) -> None:
    sources = (*sources_of(1.0), *sources_of(1.0, density=density, epsilon=epsilon))
    sentence = method_named(name).check(settings_for(name, Case(sources=sources), SHAPE))
    assert (sentence is None) == fits


def test_the_objection_says_what_is_wrong() -> None:
    case = Case(sources=sources_of(1.0, density=0.9, epsilon=0.15))
    assert method_named("della").check(settings_for("della", case, SHAPE)) == (
        "density 0.9 and epsilon 0.15 give chances from 0.75 to 1.05, which must lie between 0 and 1"
    )


# Two forms --------------------------------------------------------------------------------------------


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, math.inf, -math.inf, math.nan, -math.nan]


def in_both_forms(delta: torch.Tensor, length: int, *, density: float, epsilon: float) -> list[torch.Tensor]:
    """The factors of the rows by the compiled form and by torch's."""
    sources = sources_of(1.0, density=density, epsilon=epsilon)
    settings = settings_for("della", Case(sources=sources), (delta.numel() // length, length))
    ranks = _ranks(density, epsilon, settings, CPU)
    found = [torch.empty(delta.numel()) for _ in range(2)]
    for factors, sparsify in zip(found, (_sparsify, _sparsify_in_torch), strict=True):
        write_numbers(11, 7, out=factors.view(torch.int32))
        sparsify(delta, ranks, factors)
    return found


@hypothesis_settings(deadline=None, max_examples=60)
@given(data=st.data(), length=st.integers(1, 70), num_rows=st.integers(0, 5))
def test_both_forms_give_the_same_bits(data: st.DataObject, length: int, num_rows: int) -> None:
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    size = length * num_rows
    delta = torch.tensor(data.draw(st.lists(value, min_size=size, max_size=size)), dtype=torch.float32)
    compiled, plain = in_both_forms(delta, length, density=0.5, epsilon=0.45)
    assert same_bits(compiled, plain)


@pytest.mark.parametrize("length", [1000, 4096, 50_000])
@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_both_forms_give_the_same_bits_of_long_rows(length: int, epsilon: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base, [source] = random_inputs(1, (3, length), dtype)
        delta = (source - base).flatten()
        compiled, plain = in_both_forms(delta, length, density=0.6, epsilon=epsilon)
        assert same_bits(compiled, plain)


def test_the_smallest_chance_is_made_up_for() -> None:
    """A chance below 2**-32 is as good as 2**-32, and so is the factor."""
    settings = settings_for("della", Case(sources=sources_of(1.0, density=1e-12)), (1, 4))
    ranks = _ranks(1e-12, 0.0, settings, CPU)
    assert ranks.bitwise_right_shift(32).tolist() == [-(2**31)] * 4
    assert ranks.to(torch.int32).view(torch.float32).tolist() == [2.0**32] * 4


def test_the_largest_chance_keeps_everything() -> None:
    settings = settings_for("della", Case(sources=sources_of(1.0, density=0.5)), (1, 4))
    ranks = _ranks(1 - 2.0**-34, 0.0, settings, CPU)
    assert ranks.bitwise_right_shift(32).tolist() == [2**31 - 1] * 4
    assert ranks.to(torch.int32).view(torch.float32).tolist() == [1.0] * 4
