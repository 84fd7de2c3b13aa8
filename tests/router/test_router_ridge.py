"""Ridge against its definition, and its length against text that it was not made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.errors import RecipeError
from raymerge.recipes import parse_recipe
from raymerge.stages.router.gates import UNPROVEN, Ridge, ridge_rows


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(
    classes: Sequence[torch.Tensor], firsts: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gram matrices, means and shares of the inputs of some experts, by halves."""
    firsts = firsts or [len(each) // 2 for each in classes]
    halves = [
        [part / len(each) ** 0.5 for part in (each[:first], each[first:])]
        for each, first in zip(classes, firsts, strict=True)
    ]
    grams = [sum((each[half].T @ each[half] for each in halves), torch.zeros(())) for half in (0, 1)]
    sums = [
        torch.stack([each[half].sum(0) / len(of) ** 0.5 for each, of in zip(halves, classes, strict=True)])
        for half in (0, 1)
    ]
    first = torch.tensor([n / len(each) for n, each in zip(firsts, classes, strict=True)]).double()
    return torch.stack(grams) / len(classes), torch.stack(sums), torch.stack([first, 1 - first])


def ridge(classes: Sequence[torch.Tensor], penalty: float, firsts: Sequence[int] | None = None) -> Ridge:
    gram, means, shares = moments(classes, firsts)
    return ridge_rows(gram, means, shares=shares, penalty=penalty)


def plain_rows(classes: Sequence[torch.Tensor], penalty: float) -> torch.Tensor:
    """Ridge regression to centred targets, by its definition."""
    gram = torch.stack([each.T @ each / len(each) for each in classes]).mean(0)
    means = torch.stack([each.mean(0) for each in classes])
    strength = penalty * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    found: torch.Tensor = torch.linalg.solve(gram + strength, ((means - means.mean(0)) / len(classes)).T)
    return found.T


def pairs_of(count: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(a)]


# Directions


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.floats(1e-3, 1.0), st.integers(0, 99))
def test_rows_have_the_directions_of_the_regression(count: int, penalty: float, seed: int) -> None:
    classes = [randn(12, 6, seed=seed + at) + at for at in range(count)]
    rows, wanted = ridge(classes, penalty).rows, plain_rows(classes, penalty)
    factor = float((rows * wanted).sum() / wanted.square().sum())
    assert factor > 0
    torch.testing.assert_close(rows, factor * wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rows.sum(0), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-8)


def test_rows_of_all_texts_do_not_depend_on_the_halves() -> None:
    classes = [randn(40, 5, seed=at) + at for at in range(3)]
    even, uneven = ridge(classes, 0.1).rows, ridge(classes, 0.1, [4, 30, 20]).rows
    torch.testing.assert_close(even / even.norm(), uneven / uneven.norm())


def test_a_shared_expert_does_not_touch_the_routed_rows() -> None:
    classes = [randn(30, 5, seed=at) + at for at in range(2)]
    gram, means, shares = moments(classes)
    own = randn(2, 1, 5, seed=7)
    every = ridge_rows(gram.clone(), torch.cat([means, own], 1), shares=shares, penalty=0.1)
    alone = ridge(classes, 0.1)
    torch.testing.assert_close(every.rows[:2], alone.rows)
    assert every.separation == pytest.approx(alone.separation)
    total = gram.sum(0)
    strength = 0.1 * total.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(every.rows[2], torch.linalg.solve(total + strength, own.sum(0)[0]))


def test_a_density_like_the_routed_experts_has_logit_one() -> None:
    classes = [randn(4000, 3, seed=at) + torch.tensor([4.0, at, 0.0]) for at in range(2)]
    gram, means, shares = moments(classes)
    every = torch.cat([means, means.mean(1, keepdim=True)], 1)
    rows = ridge_rows(gram, every, shares=shares, penalty=1e-6).rows
    assert float((torch.cat(classes) @ rows[2]).mean()) == pytest.approx(1.0, abs=0.1)


def test_one_expert_has_a_row_and_no_separation() -> None:
    found = ridge([randn(8, 4) + 1], 0.1)
    assert found.separation is None
    assert float(found.rows.norm()) > 0


# Lengths


def test_differences_are_log_odds() -> None:
    # Two normal classes of one covariance and opposite means: the odds are known, and need no constant.
    spread = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    mean = torch.tensor([0.5, -0.3, 0.8, 0.0], dtype=torch.float64)
    classes = [randn(200_000, 4, seed=at) * spread + sign * mean for at, sign in enumerate((1, -1))]
    rows, separation = ridge(classes, 1e-6)
    torch.testing.assert_close(rows[0] - rows[1], 2 * mean / spread**2, rtol=0.03, atol=0.01)
    assert separation == pytest.approx(float((2 * mean / spread).norm()), rel=0.02)


@pytest.mark.parametrize("firsts", [[15, 15, 15, 15], [6, 20, 15, 29]])
def test_the_length_is_that_of_both_trials(firsts: list[int]) -> None:
    classes = [randn(30, 5, seed=at) + randn(5, seed=90 + at) for at in range(4)]
    gaps = spreads = 0.0
    for is_swapped in (False, True):
        split = [(each[:n], each[n:]) for each, n in zip(classes, firsts, strict=True)]
        learnt, tried = zip(*(parts[::-1] if is_swapped else parts for parts in split), strict=True)
        # Every expert's tokens weigh what they do in all texts, in each half.
        weights = torch.tensor([len(each) / 30 for each in learnt]).double()
        gram = sum((w * x.T @ x / len(x) for w, x in zip(weights, learnt, strict=True)), torch.zeros(()))
        means = torch.stack([each.mean(0) for each in learnt])
        strength = 0.3 * gram.diagonal().mean() * torch.eye(5, dtype=torch.float64)
        rows = torch.linalg.solve(gram + strength, (means - means.mean(0)).T).T
        distances = torch.stack([(rows[a] - rows[b]).square().sum() for a, b in pairs_of(4)])
        rows /= distances.mean().sqrt()
        weights = torch.tensor([len(each) for each in tried]).double()
        covariances = torch.stack([(x - x.mean(0)).T @ (x - x.mean(0)) / len(x) for x in tried])
        within = (weights[:, None, None] * covariances).sum(0) / weights.sum()
        centres = torch.stack([each.mean(0) for each in tried])
        for a, b in pairs_of(4):
            gaps += float((rows[a] - rows[b]) @ (centres[a] - centres[b]))
            spreads += float((rows[a] - rows[b]) @ within @ (rows[a] - rows[b]))
    found = ridge(classes, 0.3, firsts)
    distances = torch.stack([(found.rows[a] - found.rows[b]).square().sum() for a, b in pairs_of(4)])
    assert float(distances.mean().sqrt()) == pytest.approx(gaps / spreads)
    assert found.separation == pytest.approx((gaps / 12) / math.sqrt(spreads / 12))


@pytest.mark.parametrize(("penalty", "margin"), [(0.1, 0.05), (0.001, 0.1)])
@pytest.mark.parametrize("num_tokens", [6, 20, 64, 200, 1000])
def test_logits_are_as_sure_as_new_text_allows(num_tokens: int, penalty: float, margin: float) -> None:
    """Fewer tokens than the width or more: no other length makes the cross-entropy of new text much less.

    With hardly a penalty and as many tokens in a half as the width, a half's rows are far worse than those of
    all text, so that a longer margin is left there.
    """
    width, count = 128, 4
    centres = randn(count, width, seed=1) * (4 / (2 * width)) ** 0.5 + randn(width, seed=2)
    classes = [centres[at] + randn(num_tokens, width, seed=10 + at) for at in range(count)]
    tokens = torch.cat([centres[at] + randn(800, width, seed=20 + at) for at in range(count)])
    whose = torch.arange(count).repeat_interleave(800)
    logits = tokens @ ridge(classes, penalty).rows.T

    def loss(scale: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits * scale, whose))

    best = min(loss(10 ** (at / 20)) for at in range(-60, 41))
    assert loss(1.0) < best + margin
    assert loss(1.0) < math.log(count) + 0.01, "worse than knowing nothing"


def test_where_nothing_generalises_rows_are_short() -> None:
    # Tokens of one distribution, fewer than the width: each half tells its own noise apart, and nothing else.
    noise = [randn(20, 64, seed=at) + 1 for at in range(3)]
    found = ridge(noise, 0.1)
    assert found.separation is not None
    assert found.separation < 0.5
    # Halves that say the opposite of each other.
    mean = randn(64, seed=9)
    opposite = [
        torch.cat([sign * mean + randn(10, 64, seed=at), -sign * mean + randn(10, 64, seed=at)])
        for at, sign in enumerate((1, -1))
    ]
    rows, separation = ridge(opposite, 0.1)
    assert separation is not None
    assert separation < 0
    logits = torch.cat(opposite) @ rows.T
    assert 0 < float((logits[:, 0] - logits[:, 1]).square().mean().sqrt()) < 2 * UNPROVEN


def test_a_token_an_expert_is_too_little_for_a_trial() -> None:
    found = ridge([randn(1, 4), randn(1, 4, seed=1)], 0.1)
    assert found.separation == 0.0
    assert 0 < float(found.rows.norm()) < math.inf
    third = [randn(9, 4, seed=at) + 3 * at for at in (2, 3)]
    rows, separation = ridge([randn(1, 4), *third], 0.1)
    assert separation is not None
    assert separation > 1, "the others are tried without it"
    assert bool(torch.isfinite(rows).all())


def test_texts_without_variety_make_no_endless_rows() -> None:
    classes = [torch.ones(8, 3, dtype=torch.float64) * sign for sign in (1, -1)]
    rows, separation = ridge(classes, 0.1)
    assert separation == pytest.approx(10.0)
    assert float((rows[0] - rows[1]) @ torch.ones(3).double()) * 2 == pytest.approx(100.0)


def test_equal_texts_for_all_experts_give_rows_of_nothing() -> None:
    rows, separation = ridge([randn(9, 4)] * 3, 0.1)
    assert torch.equal(rows, torch.zeros(3, 4, dtype=torch.float64))
    assert separation == 0.0
    # The same but for rounding, as sums over other orders of units are.
    gram, means, shares = moments([randn(9, 4)] * 3)
    means[:, 1] *= 1 + 1e-15
    assert torch.equal(ridge_rows(gram, means, shares=shares, penalty=0.1).rows, torch.zeros(3, 4).double())


# What cannot be solved


@pytest.mark.parametrize("seed", range(20))
def test_a_matrix_of_lower_rank_is_refused_though_it_has_a_factor(seed: int) -> None:
    # Rounding may leave every pivot above zero: then rows of 10**13 would come of it.
    scales = torch.logspace(0, -3, 32, dtype=torch.float64)
    classes = [randn(10, 32, seed=2 * seed + at) * scales for at in (0, 1)]
    with pytest.raises(ArithmeticError, match="positive definite"):
        ridge(classes, 0.0)


def test_the_least_penalty_of_a_recipe_is_enough_for_any_text() -> None:
    # One direction that holds nearly all, as router inputs have, and hardly any tokens.
    scales = torch.full((256,), 1e-4, dtype=torch.float64)
    scales[0] = 100.0
    classes = [randn(6, 256, seed=at) * scales for at in (0, 1)]
    assert bool(torch.isfinite(ridge(classes, 1e-6).rows).all())


@pytest.mark.parametrize("penalty", ["0", "9e-7", "2e6"])
def test_a_recipe_has_no_penalty_that_cannot_be_solved(penalty: str) -> None:
    text = "base_model: a\ngate_mode: ridge\nexperts: [{source_model: b, positive_prompts: [x]}]\n"
    with pytest.raises(RecipeError, match=r"gate_ridge: .* is (out of range|not above 0)"):
        parse_recipe(f"{text}gate_ridge: {penalty}\n", "r.yml", exists=lambda _: False)
