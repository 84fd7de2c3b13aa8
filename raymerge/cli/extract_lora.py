"""``raymerge extract-lora``: the difference of two models as an adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raymerge.cli.adapters import (
    Fact,
    adapter_json,
    energy_fact,
    factors_fact,
    listed,
    show_adapter,
    told_modules,
)
from raymerge.cli.messages import guarded
from raymerge.cli.render.screen import counted, make_console, own_stdout, put_json
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.api import Extraction, ExtractOptions

Device = Literal["auto", "cpu", "cuda"]
Embeddings = Literal["adapter", "full", "skip"]
Rest = Literal["full", "skip"]


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
        with heavy_imports():
            from raymerge.api import ExtractOptions, Limits, Selection

        selection = Selection(tuple(include or ()), tuple(exclude or ()), embeddings, rest)
        options = ExtractOptions(Limits(rank, energy), selection, device)
        return _extract((model, base, output), options, modules=modules, as_json=as_json)

    raise typer.Exit(guarded(verb, as_json=as_json))


def _extract(places: tuple[str, str, str], options: ExtractOptions, *, modules: bool, as_json: bool) -> int:
    from raymerge.api import extract_lora

    model, base, output = places
    with own_stdout() as stdout, told_modules(make_console(sys.stderr), "reading headers") as tell:
        extraction = extract_lora(model, base, output, options, on_module=tell)
    if as_json:
        put_json(stdout, adapter_json(extraction))
    else:
        show_adapter(make_console(stdout), extraction, _facts(extraction), modules=modules)
    return 0


def _facts(extraction: Extraction) -> Iterator[Fact]:
    yield factors_fact(extraction.modules)
    yield "saved whole", listed(extraction.saved)
    if extraction.biases:
        yield "biases", listed(extraction.biases)
    yield "unchanged", counted(extraction.num_unchanged, "module")
    yield "left out", listed(f"{each.name} ({each.reason})" for each in extraction.left_out)
    yield energy_fact(extraction.modules)
    yield "error", f"{extraction.relative_error:.4f} of the length of the whole change"
    yield "size", format_size(extraction.nbytes)
