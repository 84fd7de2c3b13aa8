"""The merge that makes everything but the experts of a mixture, as a recipe of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raymerge.recipes.entry import Parameters, Reading
from raymerge.recipes.locate import Places
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.schema import ModelEntry, Recipe

_BASE = ("base_model",)


def trunk_recipe(recipe: MoeRecipe, per_model: Collection[str]) -> Recipe:
    """The trunk of a mixture: the base as it is, or what its ``trunk`` asks for.

    Its places are those of the mixture's own recipe.

    Args:
        recipe: what is asked.
        per_model: parameters of which each model has its own. They are written at the trunk's models, so that
            none of them is for a base that is not listed: it gives its names, and no weights.
    """
    trunk = recipe.trunk
    if trunk is None:
        models: tuple[ModelEntry, ...] = (ModelEntry(model=recipe.base_model),)
    else:
        sources = dict.fromkeys(expert.source_model for expert in recipe.experts)
        models = trunk.models or tuple(ModelEntry(model=source) for source in sources)
        theirs = {name: value for name, value in trunk.parameters.items() if name in per_model}
        models = tuple(
            each.model_copy(update={"parameters": {**theirs, **each.parameters}}) for each in models
        )
    asked = {
        "merge_method": "passthrough" if trunk is None else trunk.merge_method,
        "models": models,
        "parameters": {} if trunk is None else _without(trunk.parameters, per_model),
        "methods": () if trunk is None else trunk.methods,
        "base_model": recipe.base_model,
        "dtype": recipe.dtype,
        "seed": recipe.seed,
        "shard_size": recipe.shard_size,
        "duplicates": recipe.duplicates,
        "pickled_weights": recipe.pickled_weights,
    }
    return Recipe.model_validate(asked, context=Reading(_places(recipe), None))


def _without(parameters: Parameters, names: Collection[str]) -> Parameters:
    return {name: value for name, value in parameters.items() if name not in names}


def _places(recipe: MoeRecipe) -> Places:
    """Places of the mixture's recipe, by the paths that they have in the trunk's."""
    places = recipe._places
    marks = {path: mark for path, mark in places.marks.items() if path == () or path == _BASE}
    if recipe.trunk is None:
        return replace(places, marks=marks | ({("models", 0): marks[_BASE]} if _BASE in marks else {}))
    inside = {path[1:]: mark for path, mark in places.marks.items() if path[:1] == ("trunk",)}
    return replace(places, marks=marks | inside)
