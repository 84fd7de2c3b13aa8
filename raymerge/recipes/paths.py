"""The places that recipes read from, by where they say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.order import AnyRecipe, references
from raymerge.storage.addresses import as_path


def places_read(recipes: Sequence[AnyRecipe]) -> Iterator[tuple[str, str]]:
    """Every place that recipes name to read from, and where; results of other recipes among them are none.

    Args:
        recipes: all of a file.

    Returns:
        Pairs of a place in the text, ``recipe.yml:7:9``, and what stands there: a path, where that is a
        ``file://`` address.
    """
    names = {each.name for each in recipes if each.name}
    for recipe in recipes:
        for path, reference in references(recipe):
            for place in (reference.path, reference.lora_path):
                if place is not None and place not in names:
                    yield recipe.where(*path), as_path(place)
        yield from _files(recipe)


def _files(recipe: AnyRecipe) -> Iterator[tuple[str, str]]:
    if isinstance(recipe, MoeRecipe):
        for key, experts in (("experts", recipe.experts), ("shared_experts", recipe.shared_experts)):
            for index, expert in enumerate(experts):
                if expert.prompt_file is not None:
                    yield recipe.where(key, index, "prompt_file"), expert.prompt_file
    elif isinstance(recipe, ExpertSetRecipe) and recipe.experts.scores not in (None, "weights"):
        yield recipe.where("experts", "scores"), str(recipe.experts.scores)
