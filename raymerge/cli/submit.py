"""``raymerge submit``: merge, verify, publish."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

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
from raymerge.cli.following import detached, follow
from raymerge.cli.messages import guarded
from raymerge.cli.options import Flags, ProfileFile, options_from, read_memory, with_flags
from raymerge.cli.plan import default_output
from raymerge.cli.render.screen import make_console, own_stdout, put_json
from raymerge.cli.running import (
    AsJson,
    DeviceFlag,
    DryRun,
    Inline,
    Memory,
    PatienceFlag,
    Replace,
    Request,
    RunName,
    Scratch,
    Steps,
    Threads,
    Workers,
    give_up,
    rehearse,
    run,
    terminable,
)
from raymerge.cli.runs import TargetChoice, run_notes, sent_place, where_of
from raymerge.deploy.targets import TARGETS
from raymerge.errors import OptionError, Problem
from raymerge.options import USUAL_PATIENCE, RunOptions
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.units import format_size

if TYPE_CHECKING:
    from typing import IO

    from raymerge.api import Combination
    from raymerge.deploy.targets.target import Submission, Target, Where


def send(
    recipe: str,
    output: str | None,
    where: Where,
    flags: Flags,
    stdout: IO[str],
    *,
    detach: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Send a recipe to where it runs, and show it as it goes; returns the exit code.

    Args:
        output: the output place as the cluster sees it; None where nobody named one.
        detach: whether to leave it alone once it is sent.
        dry_run: whether to check it only.

    Raises:
        RaymergeError: it is refused; nothing was sent then.
    """
    from raymerge.deploy.targets.choose import target_of

    target = target_of(where, os.environ)
    assert target is not None
    submission = _submission(recipe, output, where, flags)
    target.check(submission)
    if dry_run:
        make_console(sys.stderr).print("dry run: nothing was sent", soft_wrap=True)
        return 0
    run = target.submit(submission)
    _remember(run, submission, where)
    _tell(run, submission, where, stdout, as_json=as_json)
    if detach:
        if not as_json:
            make_console(sys.stderr).print(detached(run), soft_wrap=True)
        return 0
    return _follow(target, run, submission, stdout, as_json=as_json)


def _follow(target: Target, run: str, submission: Submission, stdout: IO[str], *, as_json: bool) -> int:
    return follow(target, run, stdout, as_json=as_json, output=submission.output)


def _submission(recipe: str, output: str | None, where: Where, flags: Flags) -> Submission:
    from raymerge.deploy.targets.target import Submission, new_run_name
    from raymerge.documents.yaml_text import read_file
    from raymerge.recipes.entry import RECIPE
    from raymerge.storage.addresses import check_output_address

    if output is None:
        what = f"no output place is named, and nobody can guess where a run on {where.target} has room."
        raise OptionError(Problem("-o", what, "Give -o OUT, or write 'output' in the profile."))
    if flags.inline:
        what = f"a run of the target {where.target} is not in this process."
        raise OptionError(Problem("--inline", what, "Drop --inline."))
    # It is written down at the target and here, for others to read.
    check_output_address(output)
    place, profile = sent_place(output), with_flags(where.profile, flags)
    return Submission(read_file(recipe, RECIPE), recipe, place, profile, new_run_name(), flags.forwarded())


def _remember(run: str, submission: Submission, where: Where) -> None:
    from raymerge.deploy.targets.sending import RunNote

    now = datetime.now(UTC).isoformat(timespec="seconds")
    profile = submission.profile.as_yaml()
    note = RunNote(run, where.target, where.address or "", submission.output, profile, now)
    run_notes(os.environ).keep(note)


def _tell(run: str, submission: Submission, where: Where, stdout: IO[str], *, as_json: bool) -> None:
    is_new = run == submission.run
    if as_json:
        sent = {"run": run, "target": where.target, "output": submission.output, "is_new": is_new}
        put_json(stdout, {"event": "submitted", **sent})
        return
    what = f"submitted as {run}" if is_new else f"{run} makes it already, and is shown from here on"
    make_console(stdout).print(what, soft_wrap=True)


_OUT_HELP = "Place of the new checkpoint; RECIPE-merged where neither this nor a profile names one."
_ADDRESS_HELP = "A running Ray cluster: HOST:PORT from within, or its dashboard, http://HEAD:8265."

Detach: TypeAlias = Annotated[
    bool, typer.Option("--detach", help="Leave it alone once it is sent; targets job and kubernetes.")
]
KeepIntermediates: TypeAlias = Annotated[
    bool,
    typer.Option("--keep-intermediates", help="Keep what stages, and merges for others, made on the way."),
]


def submit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe in mergekit's YAML.")],
    out: Annotated[str | None, typer.Argument(metavar="OUT", help="The same as --output.")] = None,
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help=_OUT_HELP)] = None,
    workers: Workers = None,
    threads: Threads = None,
    memory: Memory = None,
    device: DeviceFlag = None,
    profile: ProfileFile = None,
    target: TargetChoice = None,
    address: Annotated[str | None, typer.Option(metavar="ADDR", help=_ADDRESS_HELP)] = None,
    detach: Detach = False,
    inline: Inline = False,
    patience: PatienceFlag = None,
    scratch: Scratch = None,
    steps: Steps = None,
    replace: Replace = False,
    keep_intermediates: KeepIntermediates = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    run_name: RunName = None,
) -> None:
    """Merge, verify and publish. A stopped run goes on by the same command.

    A recipe whose models are adapters gives an adapter.
    """

    def verb() -> int:
        budget = read_memory(memory)
        flags = Flags(
            workers=workers,
            threads=threads,
            memory=budget,
            device=device,
            patience=patience,
            inline=inline,
            replace=replace,
            keep_intermediates=keep_intermediates,
            scratch=scratch,
            steps=steps,
            run=run_name,
        )
        where = where_of(profile, target, address)
        place = _place(out, output) or where.profile.output
        with own_stdout() as stdout:
            if TARGETS[where.target]:
                return send(
                    recipe, place, where, flags, stdout, detach=detach, dry_run=dry_run, as_json=as_json
                )
            _check_attached(where, detach=detach)
            options = options_from(where.profile, flags, address=where.address)
            request = Request(recipe, recipe, place or default_output(recipe), options, as_json)
            return rehearse(request, stdout) if dry_run else _carry_out(request, stdout)

    raise typer.Exit(guarded(verb, as_json=as_json, when_final=lambda: give_up(run_name)))


def _check_attached(where: Where, *, detach: bool) -> None:
    if detach:
        what = f"a run of the target {where.target} is this very process, and ends with it."
        remedy = "Drop --detach, and start the command with nohup, in tmux or as a batch job."
        raise OptionError(Problem("--detach", what, remedy))


def _place(out: str | None, output: str | None) -> str | None:
    if out is not None and output is not None and Path(out) != Path(output):
        raise OptionError(
            Problem("-o", f"two output places are named, {out} and {output}.", "Name one of them.")
        )
    return output or out


def _carry_out(request: Request, stdout: IO[str]) -> int:
    with terminable() as ending:
        with make_console(sys.stderr).status("reading the recipe"):
            with heavy_imports():
                from raymerge.api import merges_adapters

            is_of_adapters = merges_adapters(request.recipe)
        return _merge_adapters(request, stdout) if is_of_adapters else run(request, stdout, ending)


def _merge_adapters(request: Request, stdout: IO[str]) -> int:
    from raymerge.api import merge_adapters

    if problems := list(_unusable(request.options)):
        raise OptionError(problems)
    with told_modules(make_console(sys.stderr), "merging the adapters") as tell:
        made = merge_adapters(request.recipe, request.output, request.options, on_module=tell)
    if request.as_json:
        put_json(stdout, {"event": "adapter_merged", **adapter_json(made)})
    else:
        show_adapter(make_console(stdout), made, _adapter_facts(made))
    return 0


def _unusable(options: RunOptions) -> Iterator[Problem]:
    """Options that a merge of adapters cannot honour."""
    if options.workers not in (None, 1):
        yield _dropped("--workers", "is done by one process")
    if options.device == "cuda":
        yield _dropped("--device", "is computed on the CPU")
    if options.address is not None:
        yield _dropped("--address", "is done in this process, on no cluster")
    if options.patience != USUAL_PATIENCE:
        yield _dropped("--patience", "has no workers that could hang")
    if options.scratch is not None:
        yield _dropped("--scratch", "uploads nothing")
    if options.steps is not None:
        yield _dropped("--steps", "makes nothing on its way")
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
