"""The recipe of a conversion: one model as it is, but for how its numbers are stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from raymerge.documents.faults import Fault, FaultError, Path
from raymerge.documents.fields import choice_of
from raymerge.documents.suggest import did_you_mean
from raymerge.documents.yaml_text import Places
from raymerge.errors import Problem, RecipeError
from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.order import AnyRecipe
from raymerge.recipes.out_format import OUT_FORMATS
from raymerge.recipes.reference import Exists
from raymerge.recipes.selector import ROLE_NAMES

_NAME = "convert"
_PLACE = "--to"
_PATTERN = frozenset("*?[.")
"""What a pattern of names has one of, and a role has not."""


def conversion_recipe(model: str, to: Sequence[str], *, exists: Exists = os.path.isdir) -> AnyRecipe:
    """A passthrough of one model with ``out_format``.

    Args:
        model: a directory or a Hub name, as in a recipe.
        to: ``[SELECTOR:]FORMAT``, the first that speaks of a tensor holds for it. A selector is a role or a
            pattern of names; without one a format is for all tensors.
        exists: whether a text is a local directory.

    Raises:
        RecipeError: with all that is wrong.
    """
    lines: list[dict[str, str]] = []
    problems: list[Problem] = []
    for text in to:
        try:
            lines.append(_line(text))
        except FaultError as error:
            problems += (Problem(f"{_PLACE} {text}", fault.what, fault.remedy) for fault in error.faults)
    problems += _never_reached(to, lines) if not problems else ()
    if problems:
        raise RecipeError(problems)
    wanted = {"merge_method": "passthrough", "models": [{"model": model}], "out_format": lines}
    return recipe_from_mapping(wanted, _ArgumentPlaces(_NAME, arguments=tuple(to)), exists=exists)


@dataclass(frozen=True, slots=True)
class _ArgumentPlaces(Places):
    """Places of a recipe that is made of arguments."""

    arguments: tuple[str, ...] = ()
    """Those of ``--to``: one is a line of ``out_format``."""

    def at(self, path: Path) -> str:
        """The argument that says what the recipe has there."""
        if path[:1] != ("out_format",):
            return Places(self.name, self.marks).at(path)
        line = path[1] if len(path) > 1 else None
        told = self.arguments[line] if isinstance(line, int) else ""
        return f"{_PLACE} {told}".rstrip()


def _line(text: str) -> dict[str, str]:
    """A line of ``out_format``."""
    selector, colon, form = text.rpartition(":")
    line = {"value": choice_of(*OUT_FORMATS)(form)}
    if not colon:
        return line
    if selector in ROLE_NAMES:
        return {"role": selector, **line}
    if not _PATTERN.isdisjoint(selector):
        return {"glob": selector, **line}
    what = f"'{selector}' is no role, and no pattern of names either."
    hint = did_you_mean(selector, ROLE_NAMES)
    remedy = f"{hint} Roles are {', '.join(ROLE_NAMES)}; a pattern is like '*.self_attn.*'.".lstrip()
    raise FaultError(Fault((), what, remedy))


def _never_reached(to: Sequence[str], lines: Sequence[dict[str, str]]) -> list[Problem]:
    """What stands behind a format for all tensors."""
    place = next((index for index, line in enumerate(lines) if len(line) == 1), len(lines))
    what = f"'{to[place]}' stands before it and is for all tensors." if place < len(to) else ""
    return [Problem(f"{_PLACE} {text}", what, f"Give '{to[place]}' last.") for text in to[place + 1 :]]
