"""``raymerge convert``: one model with its numbers stored in other formats."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from raymerge.cli import completion
from raymerge.cli import options as shared
from raymerge.cli.messages import command
from raymerge.cli.render.screen import make_console, own_stdout
from raymerge.cli.running import Request, rehearse, run, terminable
from raymerge.errors import OptionError, Problem
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports

_TO_HELP = (
    "How numbers are stored: same, bf16, fp8_block, fp8_channel, fp8_tensor, mxfp8, mxfp4, nvfp4, "
    "nvfp4_modelopt or int4; for a role or a pattern of names as in --to attention:bf16 "
    "--to '*.experts.*:same'. The first that speaks of a tensor holds."
)
_LIKE_HELP = (
    "A training checkpoint (torch's .metadata and *.distcp, Megatron's torch_dist, shards for the Hub): the "
    "model's tensors are written in its files and chunks, and the state of its training is copied."
)


@command
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=shared.MODEL_HELP)],
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="Directory of the new checkpoint.")
    ],
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="[SELECTOR:]FORMAT", help=_TO_HELP, autocompletion=completion.formats),
    ] = None,
    like: Annotated[str | None, typer.Option(metavar="DIR", help=_LIKE_HELP)] = None,
    workers: shared.Workers = None,
    threads: shared.Threads = None,
    memory: shared.Memory = None,
    device: shared.DeviceFlag = None,
    address: shared.Address = None,
    inline: shared.MergeInline = False,
    patience: shared.Patience = None,
    replace: shared.Replace = False,
    dry_run: shared.DryRun = False,
    as_json: shared.EventsAsJson = False,
) -> int:
    """Store a model's numbers in other formats (--to), or as a training checkpoint (--like DIR).

    Verified and published like a merge; a stopped run goes on by the same command."""
    flags = shared.given(
        workers=workers,
        threads=threads,
        memory=shared.read_memory(memory),
        device=device,
        address=address,
        inline=inline,
        patience=patience,
        replace=replace,
    )
    options = RunOptions(**flags)
    if not to and like is None:
        raise OptionError(Problem("--to", "is missing.", "Say the format: --to bf16; or --like DIR."))
    with own_stdout(as_json=as_json) as out, terminable() as ending:
        with make_console(sys.stderr).status("reading headers"), heavy_imports():
            from raymerge.api import conversion

        recipe = conversion(model, to or "same", layout=like)
        request = Request(recipe, f"converting {model}", output, options, converted=model)
        return rehearse(request, out) if dry_run else run(request, out, ending)
