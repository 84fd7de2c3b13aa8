"""``raymerge extract-lora``: the difference of two models as an adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from raymerge.cli.messages import guarded
from raymerge.cli.screen import counted, heading, make_console, make_table, own_stdout, printable, put_json
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.lora import Extraction, ExtractOptions, ModuleReport

Device = Literal["auto", "cpu", "cuda"]
Embeddings = Literal["adapter", "full", "skip"]
Rest = Literal["full", "skip"]

_NAMES_SHOWN = 3


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
        Embeddings, typer.Option(help="Embedding and head: factors, saved whole, or left out.")
    ] = "full",
    rest: Annotated[
        Rest, typer.Option(help="Norms, biases, routers, fused experts: saved whole, or left out.")
    ] = "full",
    device: Annotated[Device, typer.Option(help="Where the arithmetic runs.")] = "auto",
    modules: Annotated[bool, typer.Option("--modules", help="List every module, one line each.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Give the report as JSON.")] = False,
) -> None:
    """Write what a model changed of its base as a LoRA adapter that peft loads."""

    def verb() -> int:
        from raymerge.lora import ExtractOptions, Limits, Selection

        selection = Selection(tuple(include or ()), tuple(exclude or ()), embeddings, rest)
        options = ExtractOptions(Limits(rank, energy), selection, device)
        return _extract((model, base, output), options, modules=modules, as_json=as_json)

    raise typer.Exit(guarded(verb, as_json=as_json))


def _extract(places: tuple[str, str, str], options: ExtractOptions, *, modules: bool, as_json: bool) -> int:
    from raymerge.lora import extract_lora

    model, base, output = places
    errors = make_console(sys.stderr)
    with own_stdout() as stdout, errors.status("reading headers") as status:
        done = 0

        def tell(report: ModuleReport, num_modules: int) -> None:
            nonlocal done
            done += 1
            status.update(printable(f"{done} of {num_modules}: {report.name}, rank {report.rank}"))

        extraction = extract_lora(model, base, output, options, on_module=tell)
    if as_json:
        put_json(stdout, _as_json(extraction))
    else:
        _show(make_console(stdout), extraction, modules=modules)
    return 0


def _as_json(extraction: Extraction) -> dict[str, Any]:
    listed = [{**asdict(module), "energy": module.energy} for module in extraction.modules]
    return {**asdict(extraction), "modules": listed}


def _show(console: Console, extraction: Extraction, *, modules: bool) -> None:
    console.print(heading(f"Adapter in {extraction.output}"))
    console.print()
    console.print(make_table(("", ""), list(_facts(extraction))))
    if modules:
        rows = [(each.name, str(each.rank), f"{each.energy:.4f}") for each in extraction.modules]
        console.print()
        console.print(make_table(("module", "rank", "energy"), rows, numbers=(1, 2)))
    for note in extraction.notes:
        console.print()
        console.print(Text(printable(note)))


def _facts(extraction: Extraction) -> Iterator[tuple[str, str]]:
    ranks = [module.rank for module in extraction.modules]
    yield "factors", f"{counted(len(ranks), 'module')}, rank {_span(min(ranks), max(ranks))}"
    yield "saved whole", _listed(extraction.saved)
    if extraction.biases:
        yield "biases", _listed(extraction.biases)
    yield "unchanged", counted(extraction.num_unchanged, "module")
    yield "left out", _listed([f"{each.name} ({each.reason})" for each in extraction.left_out])
    least = min(extraction.modules, key=lambda module: module.energy)
    yield "energy", f"at least {least.energy:.4f} of a module's change, in {least.name}"
    yield "error", f"{extraction.relative_error:.4f} of the length of the whole change"
    yield "size", format_size(extraction.nbytes)


def _span(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _NAMES_SHOWN} more" if len(every) > _NAMES_SHOWN else ""
    return f"{len(every)}: {', '.join(every[:_NAMES_SHOWN])}{more}" if every else "none"
