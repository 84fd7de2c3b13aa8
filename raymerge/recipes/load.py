"""From a file, a text or a mapping to a checked recipe; everything that is wrong is told at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from raymerge.documents.secrets import check_text
from raymerge.documents.text import check_length, read_file
from raymerge.documents.yaml_text import Located, Part, Places, read_document, split_documents, spot
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.draft import Draft, draft_document, join_drafts, with_order_problems
from raymerge.recipes.genre import RECIPE
from raymerge.recipes.order import AnyRecipe
from raymerge.recipes.reference import Exists
from raymerge.recipes.schema import Recipe

_CHANGE_NO_BYTE = {"name", "warn_encoding_error"}
"""Fields that say so of themselves."""


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
    return draft_recipes(path, exists=exists).require()


def draft_recipes(path: str | os.PathLike[str], *, exists: Exists = os.path.isdir) -> Draft:
    """All recipes in a YAML file as far as they can be read, with what is wrong.

    Args:
        path: the file; messages name it as given.
        exists: whether a text is a local directory.
    """
    name = os.fspath(path)
    try:
        return _draft_parts(_split(read_file(name, RECIPE), name), name, exists)
    except RecipeError as error:
        return Draft((), error.problems)


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
    return _draft_parts(parts, name, exists).require()[0]


def parse_recipes(
    text: str, name: str = "recipe", *, exists: Exists = os.path.isdir
) -> tuple[AnyRecipe, ...]:
    """All recipes in a YAML text, in its order; ``name`` stands before line and column in messages.

    Raises:
        RecipeError: all that is wrong with each of them and between them.
    """
    return _draft_parts(_split(text, name), name, exists).require()


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
    return draft_mapping(data, name, exists=exists).require()[0]


def draft_mapping(
    data: Mapping[str, Any], name: str | Places = "recipe", *, exists: Exists = os.path.isdir
) -> Draft:
    """The recipe of ``recipe_from_mapping`` as far as it can be read, with what is wrong."""
    places = name if isinstance(name, Places) else Places(name)
    return draft_document(Located(data, places, ()), None, exists)


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


def _draft_parts(parts: Sequence[Part], name: str, exists: Exists) -> Draft:
    drafts: list[Draft] = []
    for part in parts:
        try:
            document = read_document(part, name, RECIPE)
        except RecipeError as error:
            drafts.append(Draft((), error.problems))
        else:
            drafts.append(draft_document(document, part.text, exists))
    return with_order_problems(join_drafts(drafts), exists)
