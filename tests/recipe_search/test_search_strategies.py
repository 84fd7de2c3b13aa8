"""What each strategy asks for: it comes near the best, its seed decides, and a soup is made by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from kits.searches import bowl, marked_recipe

from raymerge.errors import OptionError
from raymerge.recipe_search.strategies import make_strategy
from raymerge.recipes.axes import Plain
from raymerge.recipes.search import Parameter, Values, read_marked_mapping


def _parameters(*spaces: object) -> tuple[Parameter, ...]:
    return read_marked_mapping(marked_recipe({}, spaces)).parameters


def _numbers(values: Values) -> list[float]:
    return [float(each) for each in values.values()]


def _searched(name: str, parameters: Sequence[Parameter], rounds: int, seed: int) -> list[Values]:
    strategy = make_strategy(name, parameters, 4, seed)
    tried: list[Values] = []
    for _ in range(rounds):
        candidates = strategy.ask()
        tried += candidates
        # The third of each round fails, which hinders nobody.
        strategy.tell([None if n == 2 else bowl(_numbers(each)) for n, each in enumerate(candidates)])
    return tried


@pytest.mark.parametrize(
    ("name", "worst"), [("tpe", 0.02), ("cmaes", 0.05), pytest.param("gp", 0.001, marks=pytest.mark.slow)]
)
def test_a_strategy_comes_near_the_best_and_its_seed_decides(name: str, worst: float) -> None:
    parameters = _parameters([0, 1], [0, 1], [0, 1])
    tried = _searched(name, parameters, 12, seed=3)
    assert max(bowl(_numbers(each)) for each in tried) > -worst
    assert _searched(name, parameters, 3, seed=3) == tried[:12]
    assert _searched(name, parameters, 1, seed=4) != tried[:4]


def test_choices_and_steps_are_searched_too() -> None:
    parameters = _parameters({"choices": [0.1, 0.3, "ties"]}, {"low": 0, "high": 8, "step": 2})
    for name in ("tpe", "random"):
        tried = _first(name, parameters, 10)
        assert {each["models[1].weight"] for each in tried} == {0, 2, 4, 6, 8}
        assert {each["models[0].weight"] for each in tried} == {0.1, 0.3, "ties"}


def _first(name: str, parameters: Sequence[Parameter], rounds: int) -> list[Values]:
    strategy = make_strategy(name, parameters, 4, 0)
    tried: list[Values] = []
    for _ in range(rounds):
        candidates = strategy.ask()
        tried += candidates
        strategy.tell([0.0] * len(candidates))
    return tried


def test_a_grid_is_the_product_and_ends() -> None:
    parameters = _parameters({"low": 0.25, "high": 0.75, "step": 0.25}, {"choices": [1, 2]})
    expected: list[tuple[Plain, ...]] = [
        (0.25, 1), (0.25, 2), (0.5, 1), (0.5, 2), (0.75, 1), (0.75, 2),
    ]  # fmt: skip
    assert [tuple(each.values()) for each in _first("grid", parameters, 3)] == expected


def test_a_greedy_soup_keeps_what_does_not_make_it_worse() -> None:
    soup = make_strategy("soup", _parameters([0, 1], [0, 1], [0, 1], [0, 1]), 4, 0)
    names = [f"models[{number}].weight" for number in range(4)]

    def next_round() -> list[tuple[int, ...]]:
        return [tuple(int(each[name]) for name in names) for each in soup.ask()]

    assert next_round() == [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    soup.tell([0.5, 0.7, None, 0.6])
    # By hand: 1 is the best alone, then 3, then 0; 2 could not be evaluated.
    assert next_round() == [(0, 1, 0, 1)]
    soup.tell([0.69])
    assert next_round() == [(1, 1, 0, 0)]
    soup.tell([0.7])
    assert next_round() == []


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OptionError) as refused:
        make_strategy("tpe", _parameters([0, 1]), 4, 0)
    assert str(refused.value) == (
        "search: the strategy 'tpe' needs optuna, which is not installed. Give: pip install "
        "'raymerge[search]'. The strategies random, grid and soup need nothing more."
    )
