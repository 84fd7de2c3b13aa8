"""``raymerge submit``: merge, verify, publish."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raymerge.cli import options as shared
from raymerge.cli.messages import guarded
from raymerge.cli.plan import default_output
from raymerge.cli.push import PUBLIC_HELP, carry_out_push
from raymerge.cli.render.ending import show_next
from raymerge.cli.render.next_steps import after_sent
from raymerge.cli.render.screen import Output, make_console, own_stdout
from raymerge.cli.report import REPORT_HELP, page_place, put_report
from raymerge.cli.running import Makes, Request, examining, give_up, rehearse, run, terminable
from raymerge.cli.runs import detached, follow, run_notes, sent_place, where_of
from raymerge.deploy.targets import TARGETS
from raymerge.errors import OptionError, Problem
from raymerge.runtime.workers.importing import heavy_imports
from raymerge.storage.addresses import check_output_address, is_remote

if TYPE_CHECKING:
    from raymerge.deploy.targets.target import Submission, Where
    from raymerge.publish.hub_push import PushTarget

_OUT_HELP = "Place of the new checkpoint; RECIPE-merged where neither this nor a profile names one."
_ADDRESS_HELP = "A running Ray cluster: HOST:PORT from within, or its dashboard, http://HEAD:8265."
_DETACH_HELP = "Leave it alone once it is sent; targets job and kubernetes."
_SCRATCH_HELP = "Directory for a shard until it is uploaded."
_STEPS_HELP = "Directory for what stages, and merges for others, make on the way; by default beside OUT."
_PUSH_HELP = "Push the result to this repository on the Hub, once it is verified; --replace is for it too."
_FORWARDED = ("replace", "keep_intermediates")
"""Options that no profile has."""
_KEEP_HELP = "Keep what stages, and merges for others, made on the way."


def submit(
    recipe: shared.RecipeFile,
    out: Annotated[str | None, typer.Argument(metavar="OUT", help="The same as --output.")] = None,
    *,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help=_OUT_HELP)] = None,
    workers: shared.Workers = None,
    threads: shared.Threads = None,
    memory: shared.Memory = None,
    device: shared.DeviceFlag = None,
    profile: shared.ProfileFile = None,
    target: shared.TargetChoice = None,
    address: Annotated[str | None, typer.Option(metavar="ADDR", help=_ADDRESS_HELP)] = None,
    detach: Annotated[bool, typer.Option("--detach", help=_DETACH_HELP)] = False,
    inline: shared.MergeInline = False,
    patience: shared.Patience = None,
    scratch: Annotated[str | None, typer.Option(metavar="DIR", help=_SCRATCH_HELP)] = None,
    steps: Annotated[str | None, typer.Option(metavar="DIR", help=_STEPS_HELP)] = None,
    replace: shared.Replace = False,
    report: Annotated[str | None, typer.Option(metavar="FILE", help=REPORT_HELP)] = None,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help=_PUSH_HELP)] = None,
    public: Annotated[bool, typer.Option("--public", help=f"--push: {PUBLIC_HELP}")] = False,
    keep_intermediates: Annotated[bool, typer.Option("--keep-intermediates", help=_KEEP_HELP)] = False,
    dry_run: shared.DryRun = False,
    as_json: shared.EventsAsJson = False,
    # The run that this is an attempt at.
    run_name: Annotated[str | None, typer.Option("--run", metavar="NAME", hidden=True)] = None,
) -> None:
    """Merge, verify and publish. A stopped run goes on by the same command.

    Adapters give an adapter, a sweep OUT/NAME of each output. Options of mergekit are accepted as well."""

    def verb() -> int:
        flags = shared.given(
            workers=workers,
            threads=threads,
            memory=shared.read_memory(memory),
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
        made_at = place or default_output(recipe)
        page = _page(report, where.target, made_at)
        pushed = _push_target(push, where.target, made_at, is_public=public, replaces=replace)
        with own_stdout(as_json=as_json) as stdout:
            if TARGETS[where.target]:
                submission = _submission(recipe, place, where, flags)
                return _send(submission, where, stdout, detach=detach, dry_run=dry_run)
            _check_here(recipe, where.target, pushed, detach=detach)
            options = shared.options_from(where.profile, flags, address=where.address)
            request = Request(recipe, recipe, made_at, options, is_reported=page is not None)
            return rehearse(request, stdout) if dry_run else _carry_out(request, stdout, page, pushed)

    raise typer.Exit(guarded(verb, as_json=as_json, when_final=lambda: give_up(run_name)))


def _check_here(recipe: str, target: str, pushed: PushTarget | None, *, detach: bool) -> None:
    if detach:
        what = f"a run of the target {target} is this very process, and ends with it."
        remedy = "Drop --detach, and start the command with nohup, in tmux or as a batch job."
        raise OptionError(Problem("--detach", what, remedy))
    if pushed is not None:
        _check_push(recipe, pushed)


def _place(out: str | None, output: str | None) -> str | None:
    if out is not None and output is not None and Path(out) != Path(output):
        what = f"two output places are named, {out} and {output}."
        raise OptionError(Problem("-o", what, "Name one of them."))
    return output or out


def _page(report: str | None, target: str, made_at: str) -> Path | None:
    if report is not None and TARGETS[target]:
        what = f"a run of the target {target} is elsewhere, and this page would be here."
        raise OptionError(Problem("--report", what, "Give 'raymerge report OUT' when it is done."))
    return None if report is None else page_place(report, made_at)


def _push_target(
    repository: str | None, target: str, made_at: str, *, is_public: bool, replaces: bool
) -> PushTarget | None:
    """None without --push. Raises OptionError: the result of this run cannot be pushed from here."""
    if repository is None:
        if is_public:
            what = "is for --push, which is not given."
            raise OptionError(Problem("--public", what, "Add --push ORG/NAME."))
        return None
    what = ""
    if TARGETS[target]:
        what = f"a run of the target {target} is elsewhere, and this machine would push."
    elif is_remote(made_at):
        what = "files are pushed from a directory, and the output is in an object store."
    if what:
        remedy = f"Leave it out, and give 'raymerge push OUT {repository}' where OUT is a directory."
        raise OptionError(Problem(f"--push {repository}", what, remedy))
    from raymerge.publish.hub_push import PushTarget

    return PushTarget(repository, is_public, replaces)


def _check_push(recipe: str, target: PushTarget) -> None:
    """Before hours of merging. Raises OptionError or IncompleteError."""
    with make_console(sys.stderr).status("asking the Hub"), heavy_imports():
        from raymerge.api import is_sweep, merges_adapters
        from raymerge.publish.hub_push import check_push

        several = is_sweep(recipe)
        if several or merges_adapters(recipe):
            made = "several outputs" if several else "an adapter, which has no record to push by"
            remedy = "Push one by 'raymerge push OUT/NAME ORG/NAME'." if several else "Use 'hf upload'."
            raise OptionError(Problem("--push", f"this recipe makes {made}.", remedy))
        check_push(target)


def _carry_out(request: Request, out: Output, page: Path | None, pushed: PushTarget | None) -> int:
    with terminable() as ending:
        with make_console(sys.stderr).status("reading the recipe"):
            with heavy_imports():
                from raymerge.api import is_sweep, merges_adapters

            is_several = is_sweep(request.recipe)
            is_adapter = not is_several and merges_adapters(request.recipe)
        if page is not None and (is_adapter or is_several):
            what, remedy = (
                ("a merge of adapters has no plan to measure.", "merge models with the adapters on them.")
                if is_adapter
                else ("this recipe makes several outputs.", "give 'raymerge report OUT/NAME' of one.")
            )
            raise OptionError(Problem("--report", what, f"Leave it out, or {remedy}"))
        makes: Makes = "adapter" if is_adapter else "outputs" if is_several else "checkpoint"
        if pushed is not None and _is_published(request):
            make_console(sys.stderr).print(f"{request.output} is published already", soft_wrap=True)
        else:
            run(request, out, ending, makes=makes)
        if pushed is not None:
            carry_out_push(request.output, pushed, out, ending)
    if page is not None:
        from raymerge.api import report

        with examining("measuring", out) as show:
            steps = request.options.steps
            made = report(request.output, request.options, steps=steps, on_event=show)
        put_report(made, page, out)
    return 0


def _is_published(request: Request) -> bool:
    """Whether an earlier run of this recipe was published and only its push is left."""
    from raymerge.publish.record import object_at
    from raymerge.recipes.order import merge_order
    from raymerge.verifier.structure import PROVENANCE_FILE

    recorded = object_at(Path(request.output, PROVENANCE_FILE)).get("recipes")
    if not recorded or request.options.replace:
        return False
    from raymerge.api import read_recipes

    return list(recorded) == [recipe.text for recipe in merge_order(read_recipes(request.recipe))]


def _submission(recipe: str, output: str | None, where: Where, flags: Mapping[str, Any]) -> Submission:
    """What is sent to a target; ``output`` as the cluster sees it, None if not given."""
    from raymerge.deploy.targets.target import Submission, new_run_name
    from raymerge.documents.positions import read_file
    from raymerge.recipes.entry import RECIPE

    if output is None:
        what = f"no output place is named, and nobody can guess where a run on {where.target} has room."
        raise OptionError(Problem("-o", what, "Give -o OUT, or write 'output' in the profile."))
    if "inline" in flags:
        what = f"a run of the target {where.target} is not in this process."
        raise OptionError(Problem("--inline", what, "Drop --inline."))
    # It is written down at the target and here, for others to read.
    check_output_address(output)
    place, profile = sent_place(output), shared.with_flags(where.profile, flags)
    forwarded = tuple(f"--{name.replace('_', '-')}" for name in _FORWARDED if name in flags)
    return Submission(read_file(recipe, RECIPE), recipe, place, profile, new_run_name(), forwarded)


def _send(submission: Submission, where: Where, out: Output, *, detach: bool, dry_run: bool) -> int:
    from raymerge.deploy.targets.sending import RunNote
    from raymerge.deploy.targets.target import target_of

    target = target_of(where, os.environ)
    assert target is not None
    target.check(submission)
    if dry_run:
        taken = f"{where.target} would take it, and make {submission.output}"
        make_console(sys.stderr).print(f"dry run: nothing was sent; {taken}", soft_wrap=True)
        return 0
    run, place = target.submit(submission), submission.output
    now, profile = datetime.now(UTC).isoformat(timespec="seconds"), submission.profile.as_yaml()
    run_notes(os.environ).keep(RunNote(run, where.target, where.address or "", place, profile, now))
    is_new = run == submission.run
    if out.as_json:
        sent = {"run": run, "target": where.target, "output": place, "is_new": is_new}
        out.json({"event": "submitted", **sent})
    else:
        what = f"submitted as {run}" if is_new else f"{run} makes it already, and is shown from here on"
        out.console.print(what, soft_wrap=True)
    if not detach:
        code = follow(target, run, out, place)
        if not out.as_json:
            show_next(out.console if code == 0 else make_console(sys.stderr), [*after_sent(run, place, code)])
        return code
    if not out.as_json:
        make_console(sys.stderr).print(detached(run), soft_wrap=True)
    return 0
