"""``raymerge search``: the best values for what a recipe marks, and the merge of them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from raymerge.cli import options as shared
from raymerge.cli.messages import command
from raymerge.cli.plan import default_output, explain_search
from raymerge.cli.render.reports import show_accounts
from raymerge.cli.render.screen import make_console, own_stdout
from raymerge.cli.render.search import search_json, show_search
from raymerge.cli.running import Request, run, terminable
from raymerge.errors import OptionError, Problem
from raymerge.options import RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import parse_duration

_OUT_HELP = "Place of the best candidate's checkpoint; RECIPE-merged by default."
_EVALUATIONS_HELP = "Evaluate at most N candidates; by default as many as the recipe says."
_TIME_HELP = "Begin no evaluation after this time, like 90s, 30m or 2h; the same command goes on."
_EVALUATORS_HELP = "Evaluate N candidates at the same time, each in a process of Ray's."
_GPUS_HELP = "GPUs of each evaluator, such as 1 or 0.5."
_STEPS_HELP = "Directory for the trials, and for what stages make; by default beside OUT."


@command
def search(
    recipe: shared.RecipeFile,
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help=_OUT_HELP)] = None,
    evaluations: Annotated[int | None, typer.Option(metavar="N", min=1, help=_EVALUATIONS_HELP)] = None,
    time: Annotated[str | None, typer.Option(metavar="DURATION", help=_TIME_HELP)] = None,
    evaluators: Annotated[int, typer.Option(metavar="N", min=1, help=_EVALUATORS_HELP)] = 1,
    evaluator_gpus: Annotated[float, typer.Option(metavar="G", min=0.0, help=_GPUS_HELP)] = 0.0,
    workers: shared.Workers = None,
    threads: shared.Threads = None,
    memory: shared.Memory = None,
    device: shared.DeviceFlag = None,
    address: shared.Address = None,
    steps: Annotated[str | None, typer.Option(metavar="DIR", help=_STEPS_HELP)] = None,
    replace: shared.Replace = False,
    dry_run: shared.DryRun = False,
    as_json: shared.EventsAsJson = False,
) -> int:
    """Search for the best values of what a recipe marks, then merge, verify and publish the best candidate.

    A search that was stopped goes on by the same command."""
    flags = shared.given(
        workers=workers,
        threads=threads,
        memory=shared.read_memory(memory),
        device=device,
        address=address,
        steps=steps,
        replace=replace,
    )
    options, place = RunOptions(**flags), output or default_output(recipe)
    seconds = _seconds(time)
    with own_stdout(as_json=as_json) as out, terminable() as ending:
        with make_console(sys.stderr).status("reading the recipe"), heavy_imports():
            from raymerge.api import SearchOptions

        how = SearchOptions(evaluators, evaluator_gpus, seconds)
        if not dry_run:
            request = Request(recipe, recipe, place, options, search=how, evaluations=evaluations)
            return run(request, out, ending, makes="best")
        planned, accounts = explain_search(recipe, place, options, evaluations=evaluations)
        if as_json:
            out.json({"event": "dry_run", **search_json(planned), **accounts[-1].to_json(tensors=False)})
        else:
            show_search(out.console, recipe, planned)
            show_accounts(out.console, accounts)
            out.console.print("\ndry run: nothing was evaluated or written")
    return 0


def _seconds(time: str | None) -> float | None:
    if time is None:
        return None
    try:
        return parse_duration(time)
    except ValueError as error:
        raise OptionError(Problem("--time", f"{error}.", "Write it like 90s, 30m or 2h.")) from error
