"""``raymerge diff``: what two checkpoints differ in."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from raymerge.cli.messages import looking
from raymerge.cli.options import MODEL_HELP, AllAsJson, ProfileFile, reached
from raymerge.cli.render.screen import counted, heading, make_table, own_stdout, printable, show_table
from raymerge.cli.report import page_place, put_report
from raymerge.cli.running import examining
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports

if TYPE_CHECKING:
    from raymerge.verifier.compare import ComparedTensor, Comparison

_SHOWN = 10
_REPORT_HELP = "Write a page of what B changes of A there, and its numbers beside it as .parquet."
_STATUSES = ("equal", "same_numbers", "different", "only_a", "only_b")
_TITLES = (
    *("role", "equal", "same numbers", "different", "only A", "only B"),
    *("rel. error", "max abs", "cosine"),
)


@looking
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=MODEL_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=MODEL_HELP)],
    *,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tensors compared at once; by default the cores, at most 8."),
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="FILE", help=_REPORT_HELP)] = None,
    profile: ProfileFile = None,
    as_json: AllAsJson = False,
) -> int:
    """Compare two checkpoints, in whatever files and layouts; the exit code is 0 where they are equal."""
    page = None if report is None else page_place(report, b)
    with heavy_imports():
        from raymerge.api import diff, report_difference

    with own_stdout(as_json=as_json) as out:
        places = reached(a, profile), reached(b, profile)
        comparison = diff(*places, threads=threads)
        if as_json:
            out.json(comparison.to_json())
        else:
            _show(out.console, comparison)
        if page is not None:
            with examining("measuring", out) as show:
                made = report_difference(*places, RunOptions(threads=threads), on_event=show)
            put_report(made, page, out)
    return 0 if comparison.is_equal else 2


def _show(console: Console, comparison: Comparison) -> None:
    verdict = ("are equal, byte by byte.", "bold green") if comparison.is_equal else ("differ.", "bold red")
    names = f"A = {printable(comparison.a)} and B = {printable(comparison.b)} "
    console.print(Text.assemble(names, verdict))
    rows = [
        (
            role.role,
            *(str(role.counts.get(status, "")) for status in _STATUSES),
            *map(_figure, (role.relative_error, role.max_abs_error, role.cosine)),
        )
        for role in comparison.roles
    ]
    # What no role has would leave a terminal of 80 columns no room for their names.
    used = [index for index in range(len(_TITLES)) if any(row[index] for row in rows)]
    titles = [_TITLES[index] for index in used]
    cells = [[row[index] for index in used] for row in rows]
    show_table(console, titles, cells, numbers=range(1, len(titles)))
    files = comparison.companions
    for title, lines in (
        ("tensors", list(_tensors(comparison))),
        ("config.json", [(field.path, field.a, field.b) for field in comparison.config]),
        ("companions", [(key, each.replace("_", " "), "") for key, each in files.items() if each != "equal"]),
    ):
        if lines:
            console.print()
            console.print(heading(title, note="A, B" if title == "config.json" else ""))
            console.print(make_table(("", "", ""), lines))


def _tensors(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    # What cannot be compared by numbers first, then the largest errors.
    ranked = sorted(
        comparison.tensors,
        key=lambda each: -(each.relative_error if each.relative_error is not None else inf),
    )
    yield from ((tensor.name, tensor.status.replace("_", " "), _stored(tensor)) for tensor in ranked[:_SHOWN])
    if len(ranked) > _SHOWN:
        yield f"and {counted(len(ranked) - _SHOWN, 'tensor')} more; --json lists all", "", ""


def _stored(tensor: ComparedTensor) -> str:
    stored = " / ".join(dict.fromkeys(filter(None, (tensor.stored_a, tensor.stored_b))))
    error = "" if tensor.relative_error is None else f", relative error {_figure(tensor.relative_error)}"
    lost = f", {tensor.num_not_finite} not finite" if tensor.num_not_finite else ""
    return f"{stored}{error}{lost}"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.6f}" if 0.001 < abs(value) <= 1 else f"{value:.3g}"
