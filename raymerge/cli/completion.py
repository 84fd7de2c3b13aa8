"""``raymerge completion``: what a shell needs to complete commands, and the answers while somebody types.

``raymerge schema``: what an editor needs to complete recipes and profiles."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from raymerge.cli.messages import command
from raymerge.deploy.targets import TARGETS
from raymerge.runtime.workers.importing import heavy_imports

Shell = Literal["bash", "zsh", "fish"]

_VARIABLE = "_RAYMERGE_COMPLETE"
"""Set by the script when the shell asks what may follow."""
_SHELL_HELP = 'The shell: eval "$(raymerge completion bash)" in its startup file.'
_TABLE = re.compile(r"for method in \(\n(.*?)\n\s*\)\n", re.DOTALL)
_RECIPES = (".yml", ".yaml")


@command
def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help=_SHELL_HELP)]) -> int:
    """Print what has bash, zsh or fish complete this command's verbs, options, methods and recipes."""
    sys.stdout.write(get_completion_script(prog_name="raymerge", complete_var=_VARIABLE, shell=shell) + "\n")
    return 0


@command
def schema(
    document: Annotated[
        Literal["recipe", "profile"], typer.Argument(metavar="[recipe|profile]", help="Which documents.")
    ] = "recipe",
) -> int:
    """Print the JSON Schema of recipes or profiles, by which editors complete and check them."""
    with heavy_imports():
        from raymerge.deploy.profiles import profile_schema
        from raymerge.documents.json_schema import schema_text
        from raymerge.planner.recipe_schema import recipe_schema
        from raymerge.recipe_search.settings import SEARCH_GRAMMAR

    sys.stdout.write(schema_text(recipe_schema(SEARCH_GRAMMAR) if document == "recipe" else profile_schema()))
    return 0


def prepare(environment: Mapping[str, str]) -> None:
    """Where a shell asks what may follow: let typer answer."""
    if _VARIABLE in environment:
        completion_init()


def methods(incomplete: str) -> list[str]:
    """Names of merge methods, read from the text of their table: importing it takes torch, and seconds."""
    table = _TABLE.search((files("raymerge") / "methods" / "table.py").read_text(encoding="utf-8"))
    names = re.findall(r"\w+", table[1]) if table is not None else []
    return _beginning(incomplete, map(str.lower, names))


def recipes(incomplete: str) -> list[str]:
    """YAML files; where none fits the shell offers all files, directories among them."""
    directory, name = os.path.split(incomplete)
    place = Path(os.path.expanduser(directory or "."))
    try:
        names = sorted(each.name for each in place.iterdir() if each.suffix in _RECIPES and each.is_file())
    except OSError:
        return []
    return [os.path.join(directory, each) for each in _beginning(name, names)]


def formats(incomplete: str) -> list[str]:
    from raymerge.recipes.settings import OUT_FORMATS

    return _beginning(incomplete, OUT_FORMATS)


def one_of(*words: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return _beginning(incomplete, words)

    return complete


targets = one_of(*TARGETS)


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
