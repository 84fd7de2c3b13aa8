"""Recipes read from texts, and what is wrong with such texts."""

from __future__ import annotations

from typing import TypeVar

import pytest

from raymerge.errors import RecipeError
from raymerge.recipes.load import parse_recipe, parse_recipes
from raymerge.recipes.order import AnyRecipe

R = TypeVar("R", bound=AnyRecipe)


def nowhere(_path: str) -> bool:
    return False


def recipe_of(kind: type[R], text: str) -> R:
    parsed = parse_recipe(text, "r.yml", exists=nowhere)
    assert isinstance(parsed, kind)
    return parsed


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipes(text, "r.yml", exists=nowhere)
    assert all(problem.remedy for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]
