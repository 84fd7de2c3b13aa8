"""From a file, a text or a mapping to a checked recipe; everything that is wrong is told at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from raymerge.documents.faults import Fault, FaultError, faults_of, kind
from raymerge.documents.locate import Part, Places, read_document, split_documents, spot
from raymerge.documents.secrets import check_text, secrets_in
from raymerge.documents.text import check_length, read_file
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.entry import Reading
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.genre import RECIPE
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.order import AnyRecipe, order_problems
from raymerge.recipes.reference import Exists
from raymerge.recipes.schema import Recipe

_CHANGE_NO_BYTE = {"name", "warn_encoding_error"}
"""Fields that say so of themselves."""
_EXPERTS_FORMS = (
    "Write a list to build a mixture of experts from dense models: experts: [{source_model: PATH}, ...]; "
    "or a map to change the experts of one: experts: {keep: [0, 1]}."
)


def load_recipe(path: str | os.PathLike[str], *, exists: Exists = os.path.isdir) -> AnyRecipe:
    """The only recipe in a YAML file.

    Args:
        path: the file; messages name it as given.
        exists: whether a text is a local directory. Paths of models are relative to the current
            directory, not to the recipe.

    Raises:
        RecipeError: all that is wrong with it, each with ``file:line:column`` and what to write instead;
            or it holds several recipes.
    """
    name = os.fspath(path)
    return parse_recipe(read_file(name, RECIPE), name, exists=exists)


def load_recipes(path: str | os.PathLike[str], *, exists: Exists = os.path.isdir) -> tuple[AnyRecipe, ...]:
    """All recipes in a YAML file, in its order; ``merge_order`` has them in that of their merges.

    Args:
        path: the file; messages name it as given.
        exists: whether a text is a local directory.

    Raises:
        RecipeError: all that is wrong with each of them and between them.
    """
    name = os.fspath(path)
    return parse_recipes(read_file(name, RECIPE), name, exists=exists)


def parse_recipe(text: str, name: str = "recipe", *, exists: Exists = os.path.isdir) -> AnyRecipe:
    """The only recipe in a YAML text; ``name`` stands before line and column in messages.

    Raises:
        RecipeError: all that is wrong with it, or the text holds several recipes.
    """
    parts = _split(text, name)
    if len(parts) > 1:
        what = f"a second recipe starts here, the file has {len(parts)}; one is expected."
        remedy = (
            "Give the file to 'raymerge submit', which carries out all of them, or keep one recipe in it."
        )
        raise RecipeError(Problem(spot(name, parts[1].mark), what, remedy))
    return _read_parts(parts, name, exists)[0]


def parse_recipes(
    text: str, name: str = "recipe", *, exists: Exists = os.path.isdir
) -> tuple[AnyRecipe, ...]:
    """All recipes in a YAML text, in its order; ``name`` stands before line and column in messages.

    Raises:
        RecipeError: all that is wrong with each of them and between them.
    """
    return _read_parts(_split(text, name), name, exists)


def recipe_from_mapping(
    data: Mapping[str, Any], name: str | Places = "recipe", *, exists: Exists = os.path.isdir
) -> AnyRecipe:
    """The recipe that a mapping of plain values means; it has the keys of the YAML form.

    Args:
        data: what the recipe says.
        name: what messages call it, or where they say that a value of it stands.
        exists: whether a text is a local directory.

    Raises:
        RecipeError: all that is wrong with it, by path: ``recipe: models[0].parameters.weight``.
    """
    places = name if isinstance(name, Places) else Places(name)
    return _validate(data, Reading(places, None, exists), [])


def canonical(recipe: AnyRecipe) -> str:
    """One line of JSON with every field that can change an output byte, for digests.

    Equal recipes give equal texts, however they were spelled, laid out or named.
    """
    plain = recipe.model_dump(mode="json", exclude=_CHANGE_NO_BYTE)
    if isinstance(recipe, Recipe) and recipe.tokenizer is not None:
        # Tokens are added in the order of the recipe, which sorted keys would hide.
        plain["tokenizer"]["tokens"] = list(plain["tokenizer"]["tokens"].items())
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _split(text: str, name: str) -> tuple[Part, ...]:
    check_length(text, name, RECIPE)
    check_text(text, name, RECIPE)
    return split_documents(text, name, RECIPE)


def _read_parts(parts: Sequence[Part], name: str, exists: Exists) -> tuple[AnyRecipe, ...]:
    recipes: list[AnyRecipe] = []
    problems: list[Problem] = []
    for part in parts:
        try:
            document = read_document(part, name, RECIPE)
            reading = Reading(document.places, part.text, exists)
            recipes.append(_validate(document.data, reading, list(document.faults)))
        except RecipeError as error:
            problems += error.problems
    problems += order_problems(recipes, exists=exists, are_all=not problems)
    if problems:
        raise RecipeError(problems)
    return tuple(recipes)


def _validate(data: Mapping[str, Any], reading: Reading, faults: list[Fault]) -> AnyRecipe:
    if secret := list(secrets_in(data, RECIPE)):
        # Alone, for messages on the same values would repeat them.
        raise RecipeError(reading.places.problems(secret))
    try:
        recipe = _kind(data).model_validate(data, context=reading)
    except (ValidationError, FaultError) as error:
        found = error.faults if isinstance(error, FaultError) else faults_of(error)
        # What YAML could not give is missing below: one fault for one cause.
        broken = {fault.path for fault in faults}
        faults = [*faults, *(fault for fault in found if fault.path not in broken)]
    if faults:
        raise RecipeError(reading.places.problems(faults))
    return recipe


def _kind(data: Mapping[str, Any]) -> type[Recipe] | type[MoeRecipe] | type[ExpertSetRecipe]:
    """Which kind of recipe is meant, by what ``experts`` is.

    Raises:
        FaultError: it is there, and neither of the two things that it may be.
    """
    experts = data.get("experts")
    if isinstance(experts, Mapping):
        return ExpertSetRecipe
    if isinstance(experts, (list, tuple)) or "gate_mode" in data:
        return MoeRecipe
    if "experts" not in data:
        return Recipe
    raise FaultError(Fault(("experts",), f"'experts' is {kind(experts)}.", _EXPERTS_FORMS))
