"""What a recipe says of calibration, against what it calibrates models for."""

from __future__ import annotations

from collections.abc import Iterator

from raymerge.documents.fields import FieldPath
from raymerge.errors import Problem
from raymerge.methods import find_method
from raymerge.planner.regmean import makes_by_regmean
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.order import AnyRecipe
from raymerge.recipes.router_repair import REPAIR, RouterRepair
from raymerge.recipes.schema import ModelEntry, Recipe

_USERS = "'merge_method: fisher' or 'regmean', here or below 'methods'"


def unused_calibration(recipe: AnyRecipe) -> Iterator[Problem]:
    """Of a recipe as it is written: what would be ignored."""
    if isinstance(recipe, ExpertSetRecipe):
        if recipe.calibrate is not None and recipe.calibrate.model != "source":
            yield _of_regmean_alone(recipe.where("calibrate", "model"))
        return
    if not isinstance(recipe, Recipe):
        return
    names = {recipe.merge_method, *(rule.merge_method or recipe.merge_method for rule in recipe.methods)}
    methods = [find_method(name) for name in names]
    if None in methods:
        return  # Which is a problem of its own.
    is_fitted = makes_by_regmean(recipe)
    is_measured = is_fitted or any(method.statistics for method in methods if method is not None)
    is_repaired = recipe.router == REPAIR or isinstance(recipe.router, RouterRepair)
    if is_repaired or is_measured:
        if recipe.calibrate is not None and recipe.calibrate.model != "source" and not is_measured:
            yield _of_regmean_alone(recipe.where("calibrate", "model"))
        yield from _listed_again(recipe)
    unused = () if is_measured else ("statistics",) if is_repaired else ("texts", "statistics")
    for path in _given(recipe, unused):
        what = f"nothing of this recipe uses the '{path[-1]}' of a model."
        yield Problem(recipe.where(*path), what, f"Write {_USERS}, or remove it.")
    if recipe.calibrate is not None and not (is_measured or is_repaired):
        what = "nothing of this recipe is measured on texts."
        yield Problem(recipe.where("calibrate"), what, f"Write {_USERS}, or 'router: repair', or remove it.")


def _of_regmean_alone(place: str) -> Problem:
    what = "whose activations are taken is for 'regmean' to say, and nothing here is made by it."
    return Problem(place, what, "Remove the line.")


def _given(recipe: Recipe, keys: tuple[str, ...]) -> Iterator[FieldPath]:
    for index, entry in enumerate(recipe.models):
        yield from (("models", index, key) for key in keys if getattr(entry, key))


def _listed_again(recipe: Recipe) -> Iterator[Problem]:
    """Models that another entry gives other texts: a model is measured once."""
    first: dict[ModelReference, ModelEntry] = {}
    for index, entry in enumerate(recipe.models):
        before = first.setdefault(entry.model, entry)
        if (entry.texts, entry.statistics) != (before.texts, before.statistics):
            what = f"{entry.model} stands here again, with other texts, and a model is measured once."
            yield Problem(recipe.where("models", index), what, "Give each entry of it the same texts.")
