"""``raymerge extract-lora``, and the report of an adapter that ``extract-lora`` or ``submit`` made."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from raymerge.cli.messages import command
from raymerge.cli.render.ending import show_next
from raymerge.cli.render.next_steps import after_extraction
from raymerge.cli.render.screen import (
    Output,
    counted,
    heading,
    make_console,
    own_stdout,
    printable,
    show_table,
)
from raymerge.errors import shortlist
from raymerge.options import Device
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.api import Combination, Extraction, ModuleReport
    from raymerge.lora.writer import OnModule


@command
def extract_lora(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The trained model.")],
    *,
    base: Annotated[str, typer.Option("--base", metavar="BASE", help="The model that it was trained from.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="Directory of the new adapter.")
    ],
    rank: Annotated[int, typer.Option(metavar="N", help="Largest rank of a matrix.")] = 32,
    energy: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of a change that is enough, like 0.99.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Take only tensors of such names.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave out tensors of such names.")
    ] = None,
    embeddings: Annotated[
        Literal["adapter", "full", "skip"],
        typer.Option(help="Embedding and head: factors, saved whole, or left out."),
    ] = "full",
    rest: Annotated[
        Literal["full", "skip"],
        typer.Option(help="Norms, biases, routers, fused experts: saved whole, or left out."),
    ] = "full",
    device: Annotated[Device, typer.Option(help="Where the arithmetic runs.")] = "auto",
    modules: Annotated[bool, typer.Option("--modules", help="List every module, one line each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Give the report as JSON.")] = False,
) -> int:
    """Write what a model changed of its base as a LoRA adapter that peft loads."""
    with heavy_imports():
        from raymerge.api import ExtractOptions, Limits, Selection, extract_lora

    selection = Selection(tuple(include or ()), tuple(exclude or ()), embeddings, rest)
    options = ExtractOptions(Limits(rank, energy), selection, device)
    with own_stdout(as_json=as_json) as out:
        with told_modules(make_console(sys.stderr), "reading headers") as tell:
            made = extract_lora(model, base, output, options, on_module=tell)
        if as_json:
            out.json(_adapter_json(made))
        else:
            _show_adapter(out.console, made, modules=modules)
            show_next(out.console, [*after_extraction(output, model, base, rank, made.relative_error)])
    return 0


def show_combination(out: Output, made: Combination) -> None:
    if out.as_json:
        out.json({"event": "adapter_merged", **_adapter_json(made)})
    else:
        _show_adapter(out.console, made)


def _facts(made: Extraction | Combination) -> Iterator[tuple[str, str]]:
    from raymerge.api import Extraction

    is_extraction = isinstance(made, Extraction)
    ranks = [module.rank for module in made.modules]
    least, most = min(ranks), max(ranks)
    yield "factors", f"{counted(len(ranks), 'module')}, rank {f'{least} to ' if least < most else ''}{most}"
    if made.saved or is_extraction:
        yield "saved whole", _listed(made.saved)
    if isinstance(made, Extraction):
        if made.biases:
            yield "biases", _listed(made.biases)
        yield "unchanged", counted(made.num_unchanged, "module")
        yield "left out", _listed([f"{each.name} ({each.reason})" for each in made.left_out])
    worst = min(made.modules, key=lambda module: module.energy)
    yield "energy", f"at least {worst.energy:.4f} of a module's change, in {worst.name}"
    of = "whole" if is_extraction else "merged"
    yield "error", f"{made.relative_error:.4f} of the length of the {of} change"
    yield "size", format_size(made.nbytes)


@contextmanager
def told_modules(console: Console, beginning: str) -> Iterator[OnModule]:
    """A terminal line like ``3 of 42 modules``, removed at the end."""
    done = 0
    with console.status(printable(beginning)) as status:

        def tell(report: ModuleReport, num_modules: int) -> None:
            nonlocal done
            done += 1
            text = f"{done} of {counted(num_modules, 'module')}: {report.name}, rank {report.rank}"
            status.update(Text(printable(text)))

        yield tell


def _adapter_json(made: Extraction | Combination) -> dict[str, Any]:
    listed = [{**asdict(module), "energy": module.energy} for module in made.modules]
    return {**asdict(made), "modules": listed}


def _show_adapter(console: Console, made: Extraction | Combination, *, modules: bool = False) -> None:
    console.print(heading(f"Adapter in {made.output}"))
    show_table(console, ("", ""), _facts(made))
    if modules:
        rows = [(each.name, str(each.rank), f"{each.energy:.4f}") for each in made.modules]
        show_table(console, ("module", "rank", "energy"), rows, numbers=(1, 2))
    for note in made.notes:
        console.print()
        console.print(Text(printable(note)))


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)}: {shortlist(names)}" if names else "none"
