"""Rows from sums: lengths, centring, ridge against its definition, and random rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.router.gates import difference, mean_rows, ridge_rows, unit
from raymerge.router.prompts import TokenRun
from raymerge.router.random_gates import random_rows
from raymerge.router.readings import schedule


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(classes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gram matrix and means of the inputs of some experts."""
    gram = torch.stack([each.T @ each / len(each) for each in classes]).mean(0)
    return gram, torch.stack([each.mean(0) for each in classes])


# Means


def test_units_have_length_one_and_nothing_stays_nothing() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]], dtype=torch.float64)
    assert torch.equal(unit(vectors), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.1, 0.0]], dtype=torch.float64))


def test_difference_of_means_over_runs() -> None:
    runs = [TokenRun(0, 1, (1,)), TokenRun(0, 1, (2,)), TokenRun(0, -1, (3,)), TokenRun(1, 1, (4,))]
    plan = schedule(runs, "hidden", num_routed=2, num_shared=0)
    sums = torch.tensor([[[2.0, 4.0], [5.0, 6.0]], [[1.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    assert difference(sums, plan).tolist() == [[0.0, 1.0], [5.0, 6.0]]


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 6), st.integers(0, 2), st.integers(0, 99))
def test_centring_takes_what_routed_experts_have_in_common(routed: int, shared: int, seed: int) -> None:
    vectors, common = randn(routed + shared, 8, seed=seed), randn(8, seed=seed + 1)
    before = vectors.clone()
    moved = vectors.clone()
    moved[:routed] += common
    found = mean_rows(vectors, routed, centred=True)
    torch.testing.assert_close(mean_rows(moved, routed, centred=True), found)
    torch.testing.assert_close(found[routed:], unit(vectors[routed:]))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(routed + shared, dtype=torch.float64))
    assert torch.equal(vectors, before)
    assert torch.equal(mean_rows(vectors, routed, centred=False), unit(vectors))


def test_a_single_expert_is_not_centred() -> None:
    assert torch.equal(mean_rows(randn(1, 4), 1, centred=True), unit(randn(1, 4)))


# Ridge


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.floats(1e-3, 1.0), st.integers(0, 99))
def test_ridge_solves_its_normal_equations(count: int, penalty: float, seed: int) -> None:
    classes = [randn(12, 6, seed=seed + at) + at for at in range(count)]
    gram, means = moments(classes)
    strength = penalty * gram.diagonal().mean()
    rows = ridge_rows(gram.clone(), means, num_routed=count, penalty=penalty)
    found = rows @ (gram + strength * torch.eye(6, dtype=torch.float64))
    wanted = (means - means.mean(0)) / count
    factor = (found * wanted).sum() / wanted.square().sum()
    assert float(factor) > 0
    torch.testing.assert_close(found, factor * wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rows.sum(0), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-8)


def test_ridge_makes_differences_log_odds() -> None:
    # Two normal classes of one covariance and opposite means: the odds are known, and need no constant.
    spread = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    mean = torch.tensor([0.5, -0.3, 0.8, 0.0], dtype=torch.float64)
    classes = [randn(200_000, 4, seed=at) * spread + sign * mean for at, sign in enumerate((1, -1))]
    rows = ridge_rows(*moments(classes), num_routed=2, penalty=1e-6)
    torch.testing.assert_close(rows[0] - rows[1], 2 * mean / spread**2, rtol=0.03, atol=0.01)


def test_the_factor_is_that_of_the_sums_over_pairs() -> None:
    classes = [randn(30, 5, seed=at) + randn(5, seed=90 + at) for at in range(4)]
    gram, means = moments(classes)
    strength = 0.3 * gram.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    within = gram - means.T @ means / 4 + strength
    plain = torch.linalg.solve(gram + strength, ((means - means.mean(0)) / 4).T).T
    pairs = [(a, b) for a in range(4) for b in range(a)]
    gaps = sum(float((plain[a] - plain[b]) @ (means[a] - means[b])) for a, b in pairs)
    spreads = sum(float((plain[a] - plain[b]) @ within @ (plain[a] - plain[b])) for a, b in pairs)
    found = ridge_rows(gram.clone(), means, num_routed=4, penalty=0.3)
    torch.testing.assert_close(found, plain * (gaps / spreads))


def test_ridge_of_a_shared_expert_does_not_touch_the_routed_rows() -> None:
    gram, means = moments([randn(30, 5, seed=at) + at for at in range(2)])
    own = randn(5, seed=7)
    rows = ridge_rows(gram.clone(), torch.cat([means, own[None]]), num_routed=2, penalty=0.1)
    alone = ridge_rows(gram.clone(), means, num_routed=2, penalty=0.1)
    torch.testing.assert_close(rows[:2], alone)
    strength = 0.1 * gram.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(rows[2], torch.linalg.solve(gram + strength, own))


def test_a_density_like_the_routed_experts_has_logit_one() -> None:
    classes = [randn(4000, 3, seed=at) + torch.tensor([4.0, at, 0.0]) for at in range(2)]
    gram, means = moments(classes)
    rows = ridge_rows(gram, torch.cat([means, means.mean(0)[None]]), num_routed=2, penalty=1e-6)
    assert float((torch.cat(classes) @ rows[2]).mean()) == pytest.approx(1.0, abs=0.1)


def test_equal_texts_for_all_experts_give_rows_of_nothing() -> None:
    gram, means = moments([randn(9, 4)] * 3)
    rows = ridge_rows(gram, means, num_routed=3, penalty=0.1)
    torch.testing.assert_close(rows, torch.zeros(3, 4, dtype=torch.float64), rtol=0, atol=1e-12)


def test_ridge_without_a_penalty_needs_independent_inputs() -> None:
    gram, means = moments([torch.ones(5, 4, dtype=torch.float64)] * 2)
    with pytest.raises(ArithmeticError, match="positive definite"):
        ridge_rows(gram, means, num_routed=2, penalty=0.0)


# Random rows


def test_normal_rows() -> None:
    rows = random_rows("random", 0, "router.0", (64, 1024)).double()
    assert rows.shape == (64, 1024)
    assert float(rows.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(rows.std()) == pytest.approx(1.0, abs=0.02)
    products = rows @ rows.T / 1024
    products.fill_diagonal_(0)
    assert float(products.abs().max()) < 0.2


def test_uniform_rows() -> None:
    rows = random_rows("uniform_random", 0, "router.0", (64, 1024)).double()
    limit = 1 / math.sqrt(1024)
    assert float(rows.abs().max()) <= limit
    assert float(rows.mean()) == pytest.approx(0.0, abs=limit * 0.02)
    assert float(rows.std()) == pytest.approx(limit / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("mode", ["random", "uniform_random"])
def test_random_rows_are_a_function_of_seed_and_name(mode: str) -> None:
    def rows(seed: int, name: str) -> torch.Tensor:
        return random_rows(mode, seed, name, (4, 8))

    first = rows(0, "router.0")
    assert torch.equal(rows(0, "router.0"), first)
    for other in ((1, "router.0"), (0, "router.1"), (0, "shared_gate.0")):
        assert not torch.isin(rows(*other), first).any()
