"""``raymerge evaluate`` and ``calibrate``: how well a model predicts texts, and what it does with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from raymerge.cli import options as shared
from raymerge.cli.messages import command, looking
from raymerge.cli.options import MODEL_HELP, AllAsJson, ProfileFile, reached, read_memory
from raymerge.cli.render.progress import make_progress
from raymerge.cli.render.reports import show_dropping
from raymerge.cli.render.screen import Output, counted, make_console, own_stdout, printable, show_table
from raymerge.cli.running import terminable
from raymerge.options import Device, RunOptions
from raymerge.runtime.workers.importing import heavy_imports

if TYPE_CHECKING:
    from raymerge.events import Event
    from raymerge.stages.loss import Evaluation, OnLayer

_TEXTS_HELP = "A text file, or conversations as .jsonl; again for each other file."
_LENGTH_HELP = "Tokens of a window; 512 by default, or what the model reads at once if that is less."
_KIND_HELP = "experts: what each expert does; inputs: what linear maps see; fisher: what the loss depends on."
_MEMORY_HELP = "Memory to use, like 4GiB; half of what is free by default."


@looking
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a recipe.")],
    *,
    texts: Annotated[list[str], typer.Option("--texts", metavar="FILE", help=_TEXTS_HELP)],
    length: Annotated[int | None, typer.Option(metavar="N", help=_LENGTH_HELP)] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of each file, from its start.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help=_MEMORY_HELP)] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads that compute; by default one for each core.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the arithmetic runs; auto takes a GPU.")] = "auto",
    scratch: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory for hidden states that do not fit the memory."),
    ] = None,
    profile: ProfileFile = None,
    as_json: AllAsJson = False,
) -> int:
    """Measure the loss of texts under a model, with one layer in memory at a time.

    Of a recipe, what it would make is measured without being written."""
    place, limit = reached(model, profile), read_memory(memory)
    with own_stdout(as_json=as_json) as out:
        with _progress(out) as show:
            with heavy_imports():
                from raymerge.api import evaluate

            result = evaluate(
                place,
                texts,
                length=length,
                tokens=tokens,
                memory=limit,
                threads=threads,
                device=device,
                scratch=scratch,
                on_layer=show,
            )
        if as_json:
            out.json(result.to_json())
        else:
            _show(out.console, result)
    return 0


@contextmanager
def _progress(out: Output) -> Iterator[OnLayer]:
    with terminable() as ending, make_console(sys.stderr).status("reading model and texts") as status:
        ending.json_to, ending.remedy = out.stream if out.as_json else None, "Give the same command again."

        def show(done: int, layers: int) -> None:
            status.update(f"evaluating: {done} of {counted(layers, 'layer')}")

        yield show


def _show(console: Console, result: Evaluation) -> None:
    console.print(f"{printable(result.model)}, in windows of {counted(result.length, 'token')}:")
    rows = [
        (printable(text.name), str(text.num_tokens), f"{text.loss:.4f}", _perplexity(text.perplexity))
        for text in result.texts
    ]
    if len(rows) > 1:
        rows.append(("mean", "", f"{result.mean:.4f}", ""))
    show_table(console, ("file", "tokens", "loss", "perplexity"), rows, numbers=(1, 2, 3))


def _perplexity(value: float) -> str:
    return f"{value:.4g}" if value < 1e6 else f"{value:.2e}"


@command
def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=shared.MODEL_HELP)],
    *,
    texts: Annotated[list[str], typer.Option("--texts", metavar="FILE", help=_TEXTS_HELP)],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="Directory of the statistics.")
    ],
    statistics: Annotated[Literal["experts", "inputs", "fisher"], typer.Option(help=_KIND_HELP)] = "experts",
    length: Annotated[int | None, typer.Option(metavar="N", help=_LENGTH_HELP)] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of each file.")] = 65536,
    workers: shared.Workers = None,
    memory: shared.Memory = None,
    device: shared.DeviceFlag = None,
    address: shared.Address = None,
    inline: shared.Inline = False,
    patience: shared.Patience = None,
    replace: shared.Replace = False,
    as_json: shared.EventsAsJson = False,
) -> int:
    """Measure what a model does with texts, with one layer in memory at a time.

    A recipe uses the result: 'scores: OUT' of an expert set, or 'statistics: OUT' of a model that is merged.
    A stopped run goes on by the same command."""
    flags = shared.given(
        workers=workers,
        memory=shared.read_memory(memory),
        device=device,
        address=address,
        inline=inline,
        patience=patience,
        replace=replace,
    )
    options = RunOptions(**flags)
    with own_stdout(as_json=as_json) as out, terminable() as ending:
        ending.json_to, ending.remedy = out.stream if out.as_json else None, "Give the same command again."
        with make_progress(out.stream, as_json=as_json, output=output) as progress:

            def show(event: Event) -> None:
                ending.heed(event)
                progress(event)

            with heavy_imports():
                from raymerge.api import calibrate as measure

            report = measure(
                model,
                texts,
                output,
                options,
                statistics=statistics,
                tokens=tokens,
                length=length,
                on_event=show,
            )
        if not as_json:
            _show_statistics(out, report, output)
    return 0


def _show_statistics(out: Output, report: Mapping[str, Any], output: str) -> None:
    tokens = sum(text["tokens"] for text in report["texts"])
    what = f"statistics of {counted(tokens, 'token')} in {output}"
    out.console.print(printable(what), soft_wrap=True)
    if report["statistics"] == "experts":
        show_dropping(out.console, report)
