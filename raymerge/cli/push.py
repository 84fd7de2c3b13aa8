"""``raymerge push``: a published checkpoint to the Hub."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raymerge.cli.messages import command
from raymerge.cli.options import EventsAsJson
from raymerge.cli.render.ending import Step
from raymerge.cli.render.screen import Output, make_console, own_stdout
from raymerge.cli.running import Ending, terminable
from raymerge.errors import IncompleteError
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from raymerge.publish.hub_push import PushTarget

PUBLIC_HELP = "Make the repository a public one; it is private otherwise."


@command
def push(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Directory of a checkpoint that raymerge made.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub.")],
    *,
    public: Annotated[bool, typer.Option("--public", help=PUBLIC_HELP)] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Let what else is in the repository give way.")
    ] = False,
    as_json: EventsAsJson = False,
) -> int:
    """Verify a published checkpoint and push it to the Hub, as one commit."""
    with heavy_imports():
        from raymerge.publish.hub_push import PushTarget

    with own_stdout(as_json=as_json) as stdout, terminable() as ending:
        ending.json_to = stdout.stream if as_json else None
        carry_out_push(out, PushTarget(repository, public, replace), stdout, ending)
    return 0


def carry_out_push(place: str, target: PushTarget, out: Output, ending: Ending) -> None:
    """Push what is published at ``place``; a stop says what is left."""
    from raymerge.publish.hub_push import push_checkpoint

    console = make_console(sys.stderr)
    ending.is_done = False
    ending.remedy = f"The checkpoint is whole at {place}; the same command goes on with the push."
    if not out.as_json:
        console.print(f"pushing {place} to {target.repository}", soft_wrap=True)
    try:
        pushed = push_checkpoint(place, target, shows_bars=console.is_terminal and not out.as_json)
    except (IncompleteError, KeyboardInterrupt) as error:
        error.add_note(Step(_command(place, target), "goes on with the push").line)
        raise
    if out.as_json:
        out.json({"event": "pushed", "path": place, **asdict(pushed)})
        return
    size = f"{pushed.files} files, {format_size(pushed.nbytes)}"
    done = f"pushed to {pushed.url}: {size}, commit {pushed.commit}"
    out.console.print(done if pushed.is_new else f"{pushed.url} has all of it already", soft_wrap=True)


def _command(place: str, target: PushTarget) -> str:
    flags = [*(["--public"] if target.is_public else []), *(["--replace"] if target.replaces else [])]
    return shlex.join(["raymerge", "push", place, target.repository, *flags])
