"""``raymerge submit``: merge, verify, publish."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from raymerge.cli.plan import default_output, explain_all, read_memory, show_accounts
from raymerge.cli.progress import make_progress
from raymerge.cli.routing import show_routing
from raymerge.cli.screen import make_console, own_stdout, put_json
from raymerge.errors import OptionError, Problem
from raymerge.runtime.importing import heavy_imports
from raymerge.runtime.options import Device, RunOptions
from raymerge.units import format_size

if TYPE_CHECKING:
    from typing import IO

    from raymerge.api import Combination

_OUT_HELP = "Directory of the new checkpoint; RECIPE-merged where none is named."


@dataclass(frozen=True, slots=True)
class Request:
    """One submission."""

    recipe: str
    """File of the recipe."""
    output: str
    """Directory of the new checkpoint, as the user named it."""
    options: RunOptions
    """How to run."""
    as_json: bool
    """Whether events are given as JSON."""


def submit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe in mergekit's YAML.")],
    out: Annotated[str | None, typer.Argument(metavar="OUT", help="The same as --output.")] = None,
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help=_OUT_HELP)] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Workers; by default one per GPU, else one per 3 or 4 CPU cores."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads of a worker that compute; by default its cores, at most 4."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that one worker may use, like 4GiB.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the arithmetic runs.")] = "auto",
    address: Annotated[
        str | None, typer.Option(metavar="ADDR", help="A running Ray cluster, instead of an embedded Ray.")
    ] = None,
    inline: Annotated[bool, typer.Option("--inline", help="Run in this process, without Ray.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace what is at OUT, once the merge is verified.")
    ] = False,
    keep_intermediates: Annotated[
        bool,
        typer.Option(
            "--keep-intermediates",
            help="Keep what stages, and merges for others, made on the way, beside OUT.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan and check OUT; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Give events as JSON, one a line.")] = False,
) -> None:
    """Merge, verify and publish. A stopped run goes on by the same command.

    A recipe whose models are adapters gives an adapter.
    """

    def verb() -> int:
        budget = read_memory(memory)
        options = RunOptions(workers, budget, device, address, inline, replace, keep_intermediates, threads)
        request = Request(recipe, _place(recipe, out, output), options, as_json)
        with own_stdout() as stdout:
            return _rehearse(request, stdout) if dry_run else _carry_out(request, stdout)

    raise typer.Exit(guarded(verb, as_json=as_json))


def _place(recipe: str, out: str | None, output: str | None) -> str:
    """The one output place that is meant."""
    if out is not None and output is not None and Path(out) != Path(output):
        raise OptionError(
            Problem("-o", f"two output places are named, {out} and {output}.", "Name one of them.")
        )
    return output or out or default_output(recipe)


@contextmanager
def _terminable() -> Iterator[None]:
    """A scheduler's SIGTERM ends the command as Ctrl-C does, wherever it is: nothing leaks, exit code 3."""

    def interrupt(_: int, __: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _carry_out(request: Request, stdout: IO[str]) -> int:
    with _terminable():
        with make_console(sys.stderr).status("reading the recipe"):
            with heavy_imports():
                from raymerge.api import merges_adapters

            is_of_adapters = merges_adapters(request.recipe)
        return _merge_adapters(request, stdout) if is_of_adapters else _submit(request, stdout)


def _submit(request: Request, stdout: IO[str]) -> int:
    from raymerge.api import submit
    from raymerge.runtime.events import Event, StageReport

    reports: list[StageReport] = []
    with make_progress(stdout, as_json=request.as_json, output=request.output) as progress:

        def show(event: Event) -> None:
            if isinstance(event, StageReport):
                reports.append(event)
            progress(event)

        submit(request.recipe, request.output, request.options, on_event=show)
    if reports and not request.as_json:
        show_routing(make_console(stdout), reports)
    return 0


def _merge_adapters(request: Request, stdout: IO[str]) -> int:
    from raymerge.api import merge_adapters

    if problems := list(_unusable(request.options)):
        raise OptionError(problems)
    with told_modules(make_console(sys.stderr), "merging the adapters") as tell:
        made = merge_adapters(request.recipe, request.output, on_module=tell)
    if request.as_json:
        put_json(stdout, {"event": "adapter_merged", **adapter_json(made)})
    else:
        show_adapter(make_console(stdout), made, _adapter_facts(made))
    return 0


def _unusable(options: RunOptions) -> Iterator[Problem]:
    """Options that a merge of adapters cannot honour."""
    if options.workers not in (None, 1):
        yield _dropped("--workers", "is done by one process")
    if options.threads is not None:
        yield _dropped("--threads", "computes with as many threads as torch chooses")
    if options.memory is not None:
        yield _dropped("--memory", "keeps to no limit: it holds one module of every adapter at a time")
    if options.device == "cuda":
        yield _dropped("--device", "is computed on the CPU")
    if options.address is not None:
        yield _dropped("--address", "is done in this process, on no cluster")
    if options.keep_intermediates:
        yield _dropped("--keep-intermediates", "makes nothing on its way")
    if options.replace:
        what = "a merge of adapters replaces nothing: its output place must be absent or empty."
        yield Problem("--replace", what, "Drop it; choose another -o, or remove what is there first.")


def _dropped(option: str, reason: str) -> Problem:
    return Problem(option, f"a merge of adapters {reason}.", f"Drop {option}.")


def _adapter_facts(made: Combination) -> Iterator[Fact]:
    yield factors_fact(made.modules)
    if made.saved:
        yield "saved whole", listed(made.saved)
    yield energy_fact(made.modules)
    yield "error", f"{made.relative_error:.4f} of the length of the merged change"
    yield "size", format_size(made.nbytes)


def _rehearse(request: Request, stdout: IO[str]) -> int:
    """Everything that a submission finds out before it writes."""
    from raymerge.runtime.chain import Chain

    accounts = explain_all(request.recipe, request.output, request.options)
    if not request.as_json:
        show_accounts(stdout, accounts)
    merges = [account.merge for account in accounts]
    Chain(merges, Path(request.output), request.options, on_event=lambda _: None).check()
    if request.as_json:
        found = [account.to_json(tensors=False) for account in accounts]
        plans = found[0] if len(found) == 1 else {"merges": found}
        put_json(stdout, {"event": "dry_run", "place": request.output, **plans})
    else:
        console = make_console(stdout)
        console.print(f"\ndry run: nothing was written; {request.output} can be made", soft_wrap=True)
    return 0
