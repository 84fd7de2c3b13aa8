"""That there is a directory for the results between, where there are any, and that it does no harm."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from raymerge.errors import OptionError, Problem
from raymerge.options import STEPS_WANTED, RunOptions
from raymerge.planner.chained_merges import PlannedMerge
from raymerge.publish.output_place import INSIDE, relation
from raymerge.publish.steps_place import steps_directory
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.local.store import nearest

_ELSEWHERE = "Choose another --steps."


def check_steps(output: Path | str, options: RunOptions, merges: Sequence[PlannedMerge]) -> None:
    """See that there is a directory for the results between, if there are any.

    Raises:
        OptionError: there is none, it lies where it would do harm, or nothing can be written there.
    """
    problems = dict.fromkeys(steps_problems(output, options, merges))
    if options.steps is not None and has_steps(merges):
        place = nearest(steps_directory(output, options.steps).parent)
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            what = f"{place} is a file." if not place.is_dir() else f"you may not write in {place}."
            problems[Problem(options.steps, what, _ELSEWHERE)] = None
    if problems:
        raise OptionError(problems)


def steps_problems(
    output: Path | str, options: RunOptions, merges: Sequence[PlannedMerge]
) -> Iterator[Problem]:
    """What is wrong with where the results between are to be; nothing where there are no such results.

    It is not looked at: it may be another machine's.
    """
    if not has_steps(merges):
        return
    if options.steps is None and is_remote(str(output)):
        yield Problem(shown(str(output)), *STEPS_WANTED)
        return
    root = steps_directory(output, options.steps)
    if (found := relation(str(root), str(output))) is not None:
        yield Problem(str(root), f"the directory for results between {found} the output place.", _ELSEWHERE)
    # It is removed at the end, with all that is in it.
    for name, model, is_file in _models(merges):
        found = relation(str(root), model)
        # Beside the output it lies inside what the output lies inside, which is refused for that.
        if found is not None and not (found == INSIDE and (is_file or options.steps is None)):
            what = f"the directory for results between {found} the source {name}."
            yield Problem(str(root), what, _ELSEWHERE)


def chosen_steps(output: Path | str, options: RunOptions, merges: Sequence[PlannedMerge]) -> str:
    """The directory for the results between, where there are any and the user chose it; else ""."""
    is_chosen = options.steps is not None and has_steps(merges)
    return str(steps_directory(output, options.steps)) if is_chosen else ""


def has_steps(merges: Sequence[PlannedMerge]) -> bool:
    """Whether anything is made on the way to the last of these merges."""
    return len(merges) > 1 or bool(merges[-1].stages)


def _models(merges: Sequence[PlannedMerge]) -> Iterator[tuple[str, str, bool]]:
    """Name and place of every model and adapter that nobody has to make first, and whether it is one file."""
    for source in (each for merge in merges for each in merge.sources):
        if source.checkpoint.unwritten is None:
            yield source.checkpoint.name, source.checkpoint.root, source.checkpoint.is_single_file
        if source.adapter is not None:
            yield source.adapter.name, source.adapter.root, False
