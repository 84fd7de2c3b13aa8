"""``raymerge init``: a first recipe for some models."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raymerge.cli.messages import looking
from raymerge.cli.options import ProfileFile
from raymerge.cli.render.ending import Step, show_next
from raymerge.cli.render.screen import make_console, own_stdout, show_table
from raymerge.errors import OptionError, Problem
from raymerge.runtime.workers.importing import heavy_imports

if TYPE_CHECKING:
    from rich.console import Console

    from raymerge.api import Suggestion

_MODELS_HELP = "Models or adapters: directories, Hub names or addresses; the base among them, if you have it."
_STDOUT = "-"


@looking
def init(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help=_MODELS_HELP)],
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - for standard output.")
    ] = "recipe.yml",
    moe: Annotated[bool, typer.Option("--moe", help="Build a mixture of experts of dense models.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    profile: ProfileFile = None,
) -> int:
    """Write a commented recipe that fits some models; reads headers, no weights."""
    if output != _STDOUT and os.path.lexists(output) and not force:
        what = "is there already."
        raise OptionError(Problem(f"-o {output}", what, "Name another file, or give --force to replace it."))
    with own_stdout() as out:
        with make_console(sys.stderr).status("reading headers"), heavy_imports():
            from raymerge.api import suggest_recipe, suggestion_text
            from raymerge.deploy.profiles import Profile, load_profile
            from raymerge.planner.suggestion.text import next_commands, title

            loaded = Profile() if profile is None else load_profile(profile)
            suggestion = suggest_recipe(models, moe=moe, storage=loaded.storage)
        if output == _STDOUT:
            out.stream.write(suggestion_text(suggestion))
            return 0
        _write(Path(output), suggestion_text(suggestion, output))
        out.console.print(f"{output}: {title(suggestion)}", soft_wrap=True)
        options = () if profile is None else ("--profile", profile)
        _show(
            out.console, suggestion, next_commands(suggestion, output, options, is_placed=bool(loaded.output))
        )
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what, remedy = f"it cannot be written ({error.strerror}).", "Name a file in a writable directory."
        raise OptionError(Problem(f"-o {path}", what, remedy)) from error


def _show(console: Console, suggestion: Suggestion, commands: Sequence[tuple[str, str]]) -> None:
    from raymerge.planner.suggestion.text import base_words, facts

    rows = [(each.name, facts(each), base_words(suggestion, each)) for each in suggestion.everyone]
    show_table(console, ("model", "what it is", "base"), rows)
    console.print()
    show_next(console, [Step(*each) for each in commands])
