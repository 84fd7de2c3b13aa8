"""Sends a submission away, and follows it."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from raymerge.cli.following import detached, follow
from raymerge.cli.options import Flags, with_flags
from raymerge.cli.render.screen import make_console, put_json
from raymerge.cli.runs import run_notes, sent_place
from raymerge.errors import OptionError, Problem

if TYPE_CHECKING:
    from typing import IO

    from raymerge.deploy.targets.choose import Where
    from raymerge.deploy.targets.target import Submission, Target


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
        recipe: its file.
        output: the output place as the cluster sees it; None where nobody named one.
        where: the target.
        flags: of the command line.
        stdout: where it is shown.
        detach: whether to leave it alone once it is sent.
        dry_run: whether to check it only.
        as_json: events as JSON.

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
