"""Parameters by the names that were most likely meant, so that a slip of the pen is one problem."""

from __future__ import annotations

from collections.abc import Sequence

from raymerge.documents.suggest import closest
from raymerge.methods import Method
from raymerge.planner.spans import Parameters
from raymerge.recipes import ModelEntry, Recipe


def with_names_meant(recipe: Recipe, own: Method, ruled: Sequence[Method]) -> Recipe:
    """The recipe with each unknown parameter under the known name that it is most like, if there is one.

    Only what whole models, rules and the recipe say: slices and modules stay as they are.

    Args:
        recipe: what is asked, with names of which some are no parameter's.
        own: its ``merge_method``.
        ruled: the method of each of its rules.
    """
    known = [parameter.name for method in (own, *ruled) for parameter in method.parameters]
    models = [_meant(entry, known) for entry in recipe.models]
    rules = [
        rule.model_copy(update={"parameters": _renamed(rule.parameters, [p.name for p in method.parameters])})
        for rule, method in zip(recipe.methods, ruled, strict=True)
    ]
    changes = {
        "parameters": _renamed(recipe.parameters, known),
        "models": tuple(models),
        "methods": tuple(rules),
    }
    return recipe.model_copy(update=changes)


def _meant(entry: ModelEntry, known: Sequence[str]) -> ModelEntry:
    return entry.model_copy(update={"parameters": _renamed(entry.parameters, known)})


def _renamed(parameters: Parameters, known: Sequence[str]) -> Parameters:
    """What is spelt rightly holds before what is not."""
    meant = {closest(name, known) or name: value for name, value in parameters.items() if name not in known}
    return {**meant, **{name: value for name, value in parameters.items() if name in known}}
