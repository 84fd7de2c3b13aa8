"""della and della_linear: chances by rank, rescaling by them, and masks that no tile or thread changes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.method_kit import Case, MethodKit, make_settings, merge, random_inputs
from numpy.typing import NDArray

from raymerge.methods import Method, Settings, Value, find_method, keep_mask, random_key
from raymerge.methods.random import keep_by

Array = NDArray[np.float64]
CPU = torch.device("cpu")
SHAPE = (37, 101)
NAMES = ["della", "della_linear"]
WEIGHTS = [(0.6, 0.3, 0.5), (1.0, -0.4), (0.7,)]


def method_named(name: str) -> Method:
    method = find_method(name)
    assert method is not None
    return method


def settings_for(name: str, case: Case, shape: tuple[int, ...]) -> Settings:
    return make_settings(method_named(name), case, shape)


def run(name: str, case: Case, base: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    return merge(method_named(name), settings_for(name, case, base.shape), base, sources)


def sources_of(*weights: float, **others: Value) -> tuple[dict[str, Value], ...]:
    return tuple({"weight": weight, **others} for weight in weights)


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
    """The random number of each element, found by halving from the masks of ``keep_mask``."""
    low, high = np.zeros(count), np.ones(count)
    for _ in range(30):
        middle = (low + high) / 2
        kept = np.array([bool(keep_mask(key, i, 1, float(m), CPU)) for i, m in enumerate(middle)])
        low, high = np.where(kept, low, middle), np.where(kept, middle, high)
    return high


@pytest.mark.parametrize(("density", "epsilon"), [(0.5, 0.1), (0.6, 0.3), (0.3, 0.0)])
@pytest.mark.parametrize("shape", [(40,), (4, 10), (2, 4, 5), (40, 1), ()])
def test_masks_follow_the_definition(density: float, epsilon: float, shape: tuple[int, ...]) -> None:
    base, [source] = random_inputs(1, shape)
    case = Case({"rescale": False}, sources_of(1.0, density=density, epsilon=epsilon))
    settings = settings_for("della_linear", case, shape)
    kept = merge(method_named("della_linear"), settings, base, [source]) != base
    delta = (source - base).double().numpy().reshape(shape or (1,))
    numbers = uniforms(settings.keys[0], delta.size).reshape(delta.shape)
    assert np.array_equal(kept.numpy().reshape(delta.shape), numbers <= chances_of(delta, density, epsilon))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("values", [{}, {"normalize": True, "lambda": 0.5}, {"rescale": False}])
def test_against_the_definition(name: str, weights: tuple[float, ...], values: dict[str, Value]) -> None:
    base, sources = random_inputs(len(weights), SHAPE)
    case = Case(values, sources_of(*weights, density=0.6, epsilon=0.25))
    settings = settings_for(name, case, SHAPE)
    terms = []
    for weight, key, source in zip(weights, settings.keys, sources, strict=True):
        delta = (source - base).double().numpy()
        chances = chances_of(delta, 0.6, 0.25)
        mask = keep_by(key, 0, torch.from_numpy(chances.reshape(-1))).numpy().reshape(SHAPE)
        terms.append(weight * delta * mask / (chances if settings.flag("rescale") else 1.0))
    merged = family_reference(terms, weights, settings, elect=name == "della")
    result = run(name, case, base, sources).double().numpy()
    np.testing.assert_allclose(result, base.double().numpy() + merged, rtol=2e-6, atol=4e-7)


def family_reference(
    terms: list[Array], weights: tuple[float, ...], settings: Settings, *, elect: bool
) -> Array:
    sign = np.where(np.asarray(sum(terms)) >= 0, 1.0, -1.0)
    takes_part = [np.sign(term) == sign if elect else np.ones_like(term) for term in terms]
    merged = np.asarray(sum(term * part for term, part in zip(terms, takes_part, strict=True)))
    if settings.flag("normalize"):
        total = np.asarray(sum(w * part for w, part in zip(weights, takes_part, strict=True)))
        merged = merged / np.where(np.abs(total) < 1e-8, 1.0, total)
    return np.asarray(merged * settings.number("lambda"))


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("density", "kept"), [(0.0, False), (1.0, True)])
def test_all_and_nothing(name: str, density: float, kept: bool) -> None:
    base, [source] = random_inputs(1, SHAPE)
    case = Case(sources=sources_of(1.0, density=density, epsilon=0.9))
    assert method_named(name).check(settings_for(name, case, SHAPE)) is None
    result = run(name, case, base, [source])
    torch.testing.assert_close(result, source if kept else base, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_merged_delta_is_as_small_as_the_deltas(name: str) -> None:
    base, (first, second) = random_inputs(2, SHAPE)
    deltas = [first - base, second - base]
    case = Case(sources=sources_of(0.6, 0.5, density=0.7))
    large = run(name, case, torch.zeros(SHAPE), deltas)
    small = run(name, case, torch.zeros(SHAPE), [delta * 2.0**-40 for delta in deltas])
    torch.testing.assert_close(small * 2.0**40, large, rtol=1e-6, atol=0)


def test_a_row_does_not_depend_on_its_tensor() -> None:
    """Rows further down keep their ranks; only their random numbers are those of their place."""
    base, [source] = random_inputs(1, (64, 50))
    case = Case({"rescale": False}, sources_of(1.0, density=0.5, epsilon=0.4))
    settings = settings_for("della_linear", case, (64, 50))
    whole = merge(method_named("della_linear"), settings, base, [source])
    first = merge(method_named("della_linear"), replace(settings, shape=(16, 50)), base[:16], [source[:16]])
    assert torch.equal(whole[:16], first)


def test_sources_are_thinned_independently() -> None:
    case = Case({"rescale": False}, sources_of(1.0, 1.0, density=0.5, epsilon=0.1))
    result = run("della_linear", case, torch.zeros(100, 100), [torch.ones(100, 100)] * 2)
    shares = [float((result == value).double().mean()) for value in (0.0, 1.0, 2.0)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


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


def test_defaults() -> None:
    for name, normalize in (("della", True), ("della_linear", False)):
        values = {p.name: p.default for p in method_named(name).parameters}
        assert (values["normalize"], values["rescale"], values["epsilon"]) == (normalize, True, 0.15)


# Masks of many probabilities --------------------------------------------------------------------------


@hypothesis_settings(deadline=None, max_examples=50)
@given(
    key=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**45),
    density=st.floats(0.25, 1.0, exclude_max=True),
)
def test_equal_chances_give_the_common_mask(key: int, start: int, density: float) -> None:
    chances = torch.full((200,), density, dtype=torch.float64)
    assert torch.equal(keep_by(key, start, chances), keep_mask(key, start, 200, density, CPU))


@pytest.mark.parametrize("chance", [0.0, 0.003, 0.1, 0.5, 0.997, 1.0])
def test_frequency(chance: float) -> None:
    count = 1 << 20
    chances = torch.full((count,), chance, dtype=torch.float64)
    kept = int(keep_by(random_key(0, "t", 0), 2**34 + 17, chances).sum())
    assert abs(kept - count * chance) <= 4.5 * math.sqrt(count * chance * (1 - chance))
    assert bool((chances == chance).all())


def test_a_larger_chance_keeps_more_of_the_same() -> None:
    chances = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few, many = keep_by(8, 0, chances * 0.5), keep_by(8, 0, chances)
    assert not bool((few & ~many).any())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits() -> None:
    chances = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(keep_by(5, 2**33, chances.cuda()).cpu(), keep_by(5, 2**33, chances))
