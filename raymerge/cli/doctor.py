"""``raymerge doctor``: what would hinder a merge here, at a place, on a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raymerge.cli import options as shared
from raymerge.cli.messages import command
from raymerge.cli.render.screen import counted, make_console, own_stdout, printable
from raymerge.cli.runs import where_of
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.storage.addresses import check_alone

if TYPE_CHECKING:
    from raymerge.diagnosis.check import Check

_PLACE_HELP = "Where models are or will be: a directory or an address; the current directory if left out."
_ADDRESS_HELP = "Ask a running Ray cluster too: HOST:PORT from within, or its dashboard, http://HEAD:8265."
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_WIDTH = 7
"""Of the longest verdict."""
_TOPIC_WIDTH = 16


@command
def doctor(
    place: Annotated[str | None, typer.Argument(metavar="PLACE", help=_PLACE_HELP)] = None,
    *,
    address: Annotated[str | None, typer.Option(metavar="ADDR", help=_ADDRESS_HELP)] = None,
    profile: shared.ProfileFile = None,
    as_json: shared.AllAsJson = False,
) -> int:
    """Look for what would hinder a merge: versions, GPUs, memory, disks, credentials, a cluster."""
    where = where_of(profile, None, address)
    # What is sent elsewhere is neither read nor written by this machine.
    places = [place] if place else ["."] if where.target in ("local", "cluster") else []
    if place is None and where.target == "local" and where.profile.output:
        places.append(where.profile.output)
    for each in places:
        check_alone(each)
    with own_stdout(as_json=as_json) as out:
        with heavy_imports():
            from raymerge.diagnosis.diagnosis import diagnose
        checks = list(_shown(diagnose(where, places, os.environ), None if as_json else out.console))
        if as_json:
            out.json({"checks": [each.to_json() for each in checks]})
        else:
            _conclude(out.console, checks)
    return 2 if _count(checks, "problem") else 0


def _shown(checks: Iterable[Check], console: Console | None) -> Iterator[Check]:
    """Each check as soon as it is there."""
    with make_console(sys.stderr).status("looking"):
        for check in checks:
            if console is not None:
                _show(console, check)
            yield check


def _show(console: Console, check: Check) -> None:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=_WIDTH)
    row.add_column(width=_TOPIC_WIDTH, overflow="fold")
    row.add_column(overflow="fold")
    verdict = Text(check.verdict, style=_STYLES[check.verdict])
    row.add_row(verdict, Text(printable(check.topic)), Text(printable(check.fact)))
    console.print(row)
    if check.remedy:
        arrow = "->" if console.options.ascii_only else "→"
        remedy = Text(f"{arrow} {printable(check.remedy)}", style="green")
        console.print(Padding(remedy, (0, 0, 0, _WIDTH + _TOPIC_WIDTH + 4), expand=False))


def _conclude(console: Console, checks: Iterable[Check]) -> None:
    checks = list(checks)
    problems, notes = (_count(checks, verdict) for verdict in ("problem", "note"))
    more = f"; {counted(notes, 'note')}" if notes else ""
    if problems:
        console.print(f"\n{counted(problems, 'problem')} in the way of a merge{more}")
    else:
        console.print(f"\nnothing is in the way of a merge{more}")


def _count(checks: Iterable[Check], verdict: str) -> int:
    return sum(check.verdict == verdict for check in checks)
