"""``raymerge report``: what the parents of a merge change, as one page and one file of numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raymerge.cli.messages import command
from raymerge.cli.options import (
    Address,
    AllAsJson,
    Inline,
    Memory,
    ProfileFile,
    Threads,
    Workers,
    reached,
    read_memory,
    read_sources,
)
from raymerge.cli.render.screen import Output, own_stdout, printable
from raymerge.cli.running import examining
from raymerge.errors import OptionError, Problem
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.storage.addresses import is_remote

if TYPE_CHECKING:
    from raymerge.verifier.measurements import Report

REPORT_HELP = "Write a page of what the parents change there, and its numbers beside it as .parquet."
_WHAT_HELP = "A recipe, before it is merged, or the place of a checkpoint that raymerge made."
_OUTPUT_HELP = "The page; by default NAME-report.html here. Its numbers lie beside it as .parquet."
_ENDINGS = (".html", ".htm")


@command
def report(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=_WHAT_HELP)],
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help=_OUTPUT_HELP)] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Read every element, not a sample.")] = False,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Of a checkpoint: where a source of its recipe is now."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="DIR", help="Of a checkpoint: what submit was given.")
    ] = None,
    workers: Workers = None,
    threads: Threads = None,
    memory: Memory = None,
    address: Address = None,
    inline: Inline = False,
    profile: ProfileFile = None,
    as_json: AllAsJson = False,
) -> int:
    """Show what the parents of a merge change, where they disagree, and what is wrong with them.

    It reads a sample of every tensor, in this process unless workers are asked for."""
    place = what if os.path.isfile(what) else reached(what, profile)
    page = page_place(output if output is not None else default_page(what), place)
    options = RunOptions(workers, read_memory(memory), "cpu", address, inline, threads=threads)
    sources = {name: reached(where, profile) for name, where in read_sources(source)}
    with own_stdout(as_json=as_json) as out:
        with heavy_imports():
            from raymerge.api import report

        with examining("measuring", out) as show:
            made = report(place, options, is_exact=exact, sources=sources, steps=steps, on_event=show)
        put_report(made, page, out)
    return 0


def default_page(what: str) -> str:
    name = (
        os.path.basename(os.path.realpath(what)) if os.path.exists(what) else what.rstrip("/").split("/")[-1]
    )
    return f"{name.removesuffix('.yml').removesuffix('.yaml') or 'merge'}-report.html"


def page_place(output: str, checkpoint: str) -> Path:
    """Where the page goes, checked before anything is read. Raises OptionError."""
    page = Path(output).expanduser()
    numbers = page.with_suffix(".parquet")
    problem = None
    if not output.lower().endswith(_ENDINGS):
        problem = "the page is HTML.", f"Name it like {page.with_suffix('').name or 'report'}.html."
    elif page.is_dir():
        problem = "this is a directory.", "Name a file in it."
    elif not os.access(page.absolute().parent, os.W_OK):
        problem = "its directory is not there, or not writable.", "Make it first, or name another place."
    elif not is_remote(checkpoint) and page.resolve().is_relative_to(Path(checkpoint).resolve()):
        problem = "it would lie in the checkpoint, where no such file belongs.", "Name a place beside it."
    elif numbers.exists() and not _is_of_report(numbers):
        problem = (
            f"the numbers would replace {numbers}, which is of no report.",
            "Give the page another name.",
        )
    if problem:
        raise OptionError(Problem(output, *problem))
    return page


def _is_of_report(numbers: Path) -> bool:
    from raymerge.verifier.measurements import Report

    return Report.is_at(numbers)


def put_report(report: Report, page: Path, out: Output) -> None:
    """Write the page and the numbers, and show what they say."""
    from raymerge.cli.render.report_page import report_page, show_report
    from raymerge.verifier.observations import observations

    observed, numbers = observations(report), page.with_suffix(".parquet")
    text = report_page(report, observed, numbers=printable(numbers.name))
    # Under other names at first, so that a full disk leaves no half of a page.
    for place, write in ((numbers, report.save), (page, lambda new: new.write_text(text, encoding="utf-8"))):
        unfinished = place.with_name(f".{place.name}.part")
        write(unfinished)
        unfinished.replace(place)
    if out.as_json:
        lines = [
            {"kind": each.kind, "severity": each.severity, "sentence": each.sentence, "remedy": each.remedy}
            for each in observed
        ]
        out.json({"event": "report", "page": str(page), "numbers": str(numbers), "observations": lines})
    else:
        show_report(out.console, report, observed, page)
