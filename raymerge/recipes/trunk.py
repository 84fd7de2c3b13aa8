"""The merge that makes everything but the experts of a mixture, as a recipe of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from raymerge.documents.faults import Path
from raymerge.documents.yaml_text import Places
from raymerge.recipes.entry import Parameters, Reading
from raymerge.recipes.moe import MoeRecipe, Trunk
from raymerge.recipes.schema import ModelEntry, Recipe

_BASE = ("base_model",)
_TRUNK = ("trunk",)


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
    written = recipe._places
    places = _TrunkPlaces(written.name, written.marks, trunk=recipe.trunk, written=written)
    return Recipe.model_validate(asked, context=Reading(places, None))


def _without(parameters: Parameters, names: Collection[str]) -> Parameters:
    return {name: value for name, value in parameters.items() if name not in names}


@dataclass(frozen=True, slots=True)
class _TrunkPlaces(Places):
    """Places of the mixture's recipe, asked for by the paths that they have in the trunk's."""

    trunk: Trunk | None = None
    """The mixture's ``trunk``."""
    written: Places = field(default_factory=lambda: Places("recipe"))
    """The mixture's own places."""

    def mark(self, path: Path) -> tuple[int, int]:
        """Line and column in the mixture's recipe."""
        return self.written.mark(self._moved(path))

    def at(self, path: Path) -> str:
        """The place in the mixture's recipe."""
        return self.written.at(self._moved(path))

    def _moved(self, path: Path) -> Path:
        """Where the mixture's recipe says what the trunk's has at a path."""
        is_models = path[:1] == ("models",)
        if self.trunk is None:
            return _BASE if is_models else path
        if path and path[0] not in Trunk.model_fields:
            return path
        if is_models and path[2:3] == ("parameters",) and not self._is_written(path):
            return (*_TRUNK, *path[2:])
        return _TRUNK if is_models and not self.trunk.models else (*_TRUNK, *path)

    def _is_written(self, path: Path) -> bool:
        """Whether a parameter is written at that model, and not for all of them."""
        models = self.trunk.models if self.trunk is not None else ()
        entry = next((each for number, each in enumerate(models) if number == path[1]), None)
        return entry is not None and set(path[3:4]) <= entry.parameters.keys()
