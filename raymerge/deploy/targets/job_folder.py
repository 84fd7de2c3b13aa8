"""The directory that goes with a job: recipe and profile, and what the user sends along."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from raymerge.deploy.targets.target import Submission
from raymerge.errors import OptionError, Problem
from raymerge.storage.own_directory import OwnDirectory
from raymerge.units import format_size

RECIPE, PROFILE = "recipe.yml", "profile.yml"
"""What a job finds in its directory."""
_MOST_NBYTES = 100_000_000
"""Of all files together: a server of jobs takes a package of 100 MiB."""
_ENTRY_NBYTES = 256
"""What a package says of a file beside its bytes; so that an endless circle of links ends as well."""


def along_of(submission: Submission) -> Path | None:
    """The directory that the user sends with a job; None for none."""
    along = submission.profile.job.working_dir
    return None if along is None else Path(along)


def folder_problems(submission: Submission) -> Iterator[Problem]:
    """What keeps a directory from being sent with a job."""
    along = along_of(submission)
    if along is None:
        return
    where = _where(submission)
    if not along.is_dir():
        yield Problem(where, f"there is no directory {along}.", "Write one, or take it out.")
    elif _is_large(along):
        most = format_size(_MOST_NBYTES)
        what = f"{along} holds more than {most}, and a job is sent no more."
        remedy = "Name a smaller directory, and put what is large where the cluster sees it."
        yield Problem(where, what, remedy)


@contextmanager
def folder_of(submission: Submission) -> Iterator[Path]:
    """The working directory of a job, as long as it is needed.

    Raises:
        OptionError: it cannot be made, as where a file cannot be read.
    """
    with OwnDirectory() as root:
        folder = root / "job"
        try:
            _fill(folder, submission)
        except OSError as error:
            what = f"cannot be copied: {_said(error)}."
            remedy = "See that all in it can be read, and that the temporary directory has room."
            raise OptionError(Problem(_where(submission), what, remedy)) from error
        yield folder


def _fill(folder: Path, submission: Submission) -> None:
    along = along_of(submission)
    if along is None:
        folder.mkdir()
    else:
        shutil.copytree(along, folder, symlinks=False, ignore=_left_out)
    (folder / RECIPE).write_text(submission.recipe_text, encoding="utf-8")
    inside = submission.profile.for_inside(submission.output)
    (folder / PROFILE).write_text(inside.as_yaml(), encoding="utf-8")


def _left_out(directory: str, names: Sequence[str]) -> set[str]:
    """Links that lead nowhere, as editors make them, and what is neither a file nor a directory."""
    paths = {name: os.path.join(directory, name) for name in names}
    return {name for name, path in paths.items() if not (os.path.isfile(path) or os.path.isdir(path))}


def _is_large(along: Path) -> bool:
    nbytes = 0
    for directory, _, names in os.walk(along, followlinks=True):
        nbytes += _ENTRY_NBYTES
        for name in set(names) - _left_out(directory, names):
            nbytes += os.stat(os.path.join(directory, name)).st_size + _ENTRY_NBYTES
        if nbytes > _MOST_NBYTES:
            return True
    return False


def _where(submission: Submission) -> str:
    return submission.profile.where("job", "working_dir")


def _said(error: OSError) -> str:
    """The first of what may be many failures."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return str(error)
