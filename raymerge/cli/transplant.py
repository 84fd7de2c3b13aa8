"""``raymerge transplant``: another model's vocabulary on the body of a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from raymerge.cli import completion
from raymerge.cli import options as shared
from raymerge.cli.messages import command
from raymerge.cli.render.screen import make_console, own_stdout
from raymerge.cli.running import Request, rehearse, run, terminable
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports

_DONOR_HELP = "The model whose tokenizer the result has: a directory or a Hub name."
_HOW_HELP = (
    "How rows are made for tokens that MODEL lacks: omp (of shared tokens, as they make up the donor's row), "
    "subword (of MODEL's own tokens for the same text) or mean."
)
_K_HELP = "Shared tokens that omp makes a row of; 64 by default."
_PAD_HELP = "Round the number of rows up to a multiple of this."
_STEPS_HELP = "Directory for the new rows until they are in place; by default beside OUT."
_KEEP_HELP = "Keep the new rows, so that 'raymerge verify --level audit' can compute with them."


@command
def transplant(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=shared.MODEL_HELP)],
    *,
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="DONOR", help=_DONOR_HELP)],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="Directory of the new checkpoint.")
    ],
    approximation: Annotated[
        str,
        typer.Option(
            metavar="HOW", help=_HOW_HELP, autocompletion=completion.one_of("omp", "subword", "mean")
        ),
    ] = "omp",
    k: Annotated[int | None, typer.Option("--k", metavar="N", help=_K_HELP)] = None,
    pad_to_multiple_of: Annotated[int | None, typer.Option(metavar="N", help=_PAD_HELP)] = None,
    workers: shared.Workers = None,
    threads: shared.Threads = None,
    memory: shared.Memory = None,
    device: shared.DeviceFlag = None,
    address: shared.Address = None,
    inline: shared.MergeInline = False,
    patience: shared.Patience = None,
    steps: Annotated[str | None, typer.Option(metavar="DIR", help=_STEPS_HELP)] = None,
    replace: shared.Replace = False,
    keep_intermediates: Annotated[bool, typer.Option("--keep-intermediates", help=_KEEP_HELP)] = False,
    dry_run: shared.DryRun = False,
    as_json: shared.EventsAsJson = False,
) -> int:
    """Give a model the vocabulary of another, as a draft model for speculative decoding needs it.

    All but embedding and head is copied. A stopped run goes on by the same command."""
    flags = shared.given(
        workers=workers,
        threads=threads,
        memory=shared.read_memory(memory),
        device=device,
        address=address,
        inline=inline,
        patience=patience,
        steps=steps,
        replace=replace,
        keep_intermediates=keep_intermediates,
    )
    with own_stdout(as_json=as_json) as out, terminable() as ending:
        with make_console(sys.stderr).status("reading headers and tokenizers"), heavy_imports():
            from raymerge.api import transplantation

        recipe = transplantation(model, tokenizer, approximation, k=k, pad_to_multiple_of=pad_to_multiple_of)
        request = Request(recipe, f"the vocabulary of {tokenizer} on {model}", output, RunOptions(**flags))
        return rehearse(request, out) if dry_run else run(request, out, ending)
