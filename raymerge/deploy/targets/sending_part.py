"""What is asked of a recipe and an output place that go to a machine which has another disk than this one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from raymerge.deploy.profiles.feasible import steps_faults
from raymerge.deploy.profiles.run import RunSettings
from raymerge.errors import Problem
from raymerge.recipes import canonical, parse_recipes
from raymerge.recipes.paths import places_read
from raymerge.storage.addresses import as_path, is_remote, shown

_USUAL = RunSettings()
_OPTIONS: Mapping[tuple[str | int, ...], str] = {("output",): "-o", ("run", "steps"): "--steps"}
"""The option that says what a key of a profile says."""
_ABSOLUTE = "Write its absolute path as the cluster sees it, or an address such as s3://bucket/dir."


def recipe_digest(text: str) -> str:
    """What tells recipes apart, however they are spelled.

    Raises:
        RecipeError: it is not valid.
    """
    said = "\n".join(canonical(each) for each in parse_recipes(text))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def sending_problems(
    text: str, name: str, output: str, *, along: Path | None = None, run: RunSettings = _USUAL
) -> tuple[Problem, ...]:
    """Paths that mean nothing on another machine; all of them.

    Args:
        text: of the recipe.
        name: what messages call it.
        output: the output place.
        along: a directory that is sent with it, and is the current one there.
        run: how it is to be run.

    Raises:
        RecipeError: the recipe is not valid.
    """
    found, recipes = list(_output_problems(output)), parse_recipes(text, name)
    found += (
        Problem(_OPTIONS[each.path], each.what, each.remedy)
        for each in steps_faults(run, output, len(recipes))
    )
    for where, path in places_read(recipes):
        if _is_of_here(path) and not (along is not None and (along / path).exists()):
            what = f"'{shown(path)}' is a path of this machine, which the cluster does not have."
            found.append(Problem(where, what, _ABSOLUTE))
    return tuple(dict.fromkeys(found))


def _output_problems(output: str) -> Iterator[Problem]:
    if not is_remote(output) and not os.path.isabs(as_path(output)):
        what = f"the output place '{output}' is relative to a directory of this machine."
        yield Problem("-o", what, _ABSOLUTE)


def _is_of_here(path: str) -> bool:
    """Whether a path means something on this machine alone: it is relative, and no name on the Hub."""
    if is_remote(path) or os.path.isabs(path):
        return False
    return path.startswith((".", "~")) or path.count("/") != 1 or os.path.exists(path)
