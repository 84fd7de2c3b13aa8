"""Assignments: of least cost, the same every time, in place where moving gains nothing, groups kept whole."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.stages.alignment import (
    EXPERT_STEP,
    expert_costs,
    group_order,
    order_of,
    squared_distances,
    total_cost,
)

Matrix = Any


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _square(size: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return st.lists(row, min_size=size, max_size=size)


def _cost(costs: Matrix, order: tuple[int, ...]) -> float:
    return float(sum(costs[place, member] for place, member in enumerate(order)))


def _in_place(order: Any) -> int:
    return sum(place == member for place, member in enumerate(order))


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 5).flatmap(_square))
def test_the_order_costs_least_and_of_equals_it_leaves_most_in_place(rows: list[list[int]]) -> None:
    costs = np.array(rows, dtype=np.float64)
    order = order_of(costs.copy())
    every = list(permutations(range(len(rows))))
    least = min(_cost(costs, each) for each in every)
    assert total_cost(costs, order) == least
    assert _in_place(order) == max(_in_place(each) for each in every if _cost(costs, each) == least)


@settings(deadline=None, max_examples=60)
@given(_square(4), st.sampled_from([1, 2, 4]))
def test_groups_stay_together_at_least_cost(rows: list[list[int]], groups: int) -> None:
    costs = np.array(rows, dtype=np.float64)
    order = group_order(costs.copy(), groups)
    size = 4 // groups

    def is_whole(each: tuple[int, ...]) -> bool:
        return all(each[i] // size == each[i - i % size] // size for i in range(4))

    assert is_whole(tuple(order))
    assert sorted(order) == [0, 1, 2, 3]
    assert total_cost(costs, order) == min(_cost(costs, e) for e in permutations(range(4)) if is_whole(e))


def test_equals_stay_where_they_are() -> None:
    assert order_of(np.zeros((5, 5))).tolist() == list(range(5))
    assert group_order(np.zeros((6, 6)), 3).tolist() == list(range(6))
    twins = np.array([[0, 0, 4.0], [0, 0, 4.0], [4.0, 4.0, 0]])
    assert order_of(twins).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distances_are_those_of_the_definition_on_a_grid(dtype: torch.dtype) -> None:
    mine = [torch.randn(6, 300 + i, generator=_generator(i)).to(dtype) for i in range(3)]
    theirs = [torch.randn(6, 300 + i, generator=_generator(9 + i)).to(dtype) for i in range(3)]
    found = squared_distances(list(zip(mine, theirs, strict=True)))
    one, two = torch.cat(mine, 1).double(), torch.cat(theirs, 1).double()
    expected = torch.cdist(one, two).square()
    unit = float((one.square().sum(1).mean() + two.square().sum(1).mean()) / 2) / 2**30
    assert np.array_equal(found, np.rint(found))
    torch.testing.assert_close(torch.from_numpy(found) * unit, expected, rtol=1e-8, atol=1e-6)


def test_equal_rows_are_at_no_distance_and_threads_change_nothing() -> None:
    rows = torch.randn(40, 700, generator=_generator(1))
    mixed = rows[torch.randperm(40, generator=_generator(2))]
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(squared_distances([(rows, mixed)]))
    finally:
        torch.set_num_threads(threads)
    assert np.array_equal(found[0], found[1])
    assert (found[0].min(axis=1) == 0).all()
    assert squared_distances([(rows * 0, mixed * 0)]).max() == 0


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 24), st.integers(0, 2**20), st.floats(0.0, 0.3))
def test_rows_with_noise_find_their_places(size: int, seed: int, noise: float) -> None:
    generator = _generator(seed)
    rows = torch.randn(size, 200, generator=generator)
    order = torch.randperm(size, generator=generator)
    other = rows + noise * torch.randn(size, 200, generator=generator)
    found = order_of(squared_distances([(rows, other[order])]))
    assert torch.equal(order[torch.from_numpy(found)], torch.arange(size))


class TestExpertCosts:
    """Several features are judged alike, whatever their size."""

    def test_each_feature_counts_by_its_median(self) -> None:
        rows = [torch.randn(5, 50, generator=_generator(seed)) for seed in range(4)]
        plain = expert_costs([(rows[0], rows[1]), (rows[2], rows[3])])
        scaled = expert_costs([(rows[0] * 100, rows[1] * 100), (rows[2], rows[3])])
        assert np.allclose(plain, scaled, rtol=1e-6)
        assert np.median(expert_costs([(rows[0], rows[1])])) == 1.0

    def test_a_feature_in_which_all_are_equal_does_not_count(self) -> None:
        rows = torch.randn(5, 50, generator=_generator(1))
        same = torch.randn(1, 50, generator=_generator(2)).expand(5, 50)
        alone = expert_costs([(rows, rows)])
        assert np.array_equal(expert_costs([(rows, rows), (same, same)]), alone)

    def test_routers_tell_twins_apart(self) -> None:
        experts = torch.randn(2, 50, generator=_generator(1)).repeat_interleave(2, 0)
        router = torch.nn.functional.normalize(torch.randn(4, 8, generator=_generator(2)), dim=1)
        turned = torch.tensor([1, 0, 3, 2])
        costs = expert_costs([(experts, experts), (router, router[turned])])
        assert order_of(costs, step=EXPERT_STEP).tolist() == turned.tolist()

    def test_most_of_them_being_twins_does_not_hide_the_one_that_is_not(self) -> None:
        experts = torch.cat([torch.ones(3, 4), torch.randn(1, 4, generator=_generator(1))])
        costs = expert_costs([(experts, experts[[3, 0, 1, 2]])])
        assert order_of(costs, step=EXPERT_STEP).tolist() == [3, 1, 2, 0]
