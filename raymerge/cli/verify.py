"""``raymerge verify``: prove a checkpoint; the exit code is the verdict."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from raymerge.cli.messages import guarded, show_problems
from raymerge.cli.screen import counted, make_console, printable, put_json
from raymerge.runtime.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.verifier.structure import Verdict


def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Directory of a checkpoint.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Give the verdict as JSON.")] = False,
) -> None:
    """Check a checkpoint's structure; the exit code is the verdict."""
    raise typer.Exit(guarded(lambda: _verify(out, as_json=as_json), as_json=as_json))


def _verify(out: str, *, as_json: bool) -> int:
    with heavy_imports():
        from raymerge.api import verify

    verdict = verify(out)
    if as_json:
        put_json(sys.stdout, {"sound": not verdict.problems, **asdict(verdict)})
    else:
        _show(verdict)
    return 2 if verdict.problems else 0


def _show(verdict: Verdict) -> None:

    if verdict.problems:
        said = ("NOT SOUND", "bold red"), f": {counted(len(verdict.problems), 'problem')}."
    else:
        plan = ", as its plan says" if verdict.against_plan else "; it keeps no plan to compare with"
        files = counted(verdict.files, "file")
        size = f"{counted(verdict.tensors, 'tensor')}, {format_size(verdict.nbytes)} in {files}"
        said = ("sound", "bold green"), f": {size}{plan}."
    console = make_console(sys.stdout)
    console.print(Text.assemble((printable(verdict.path), "bold"), " is ", *said))
    if verdict.problems:
        console.print()
        show_problems(make_console(sys.stderr), verdict.problems)
