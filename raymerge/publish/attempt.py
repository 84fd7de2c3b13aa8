"""How an unfinished run begins and how it is thrown away, so that workers of one that is gone do no harm.

A directory that is begun anew may get the name of one that was thrown away, and a worker that was given up
may still write there by name what was right for the old one. So each beginning has a mark of its own, by
chance. Numbers of files would not do: file systems give them out again.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from pathlib import Path

from raymerge.checkpoints.files import RECORD_DIRECTORY
from raymerge.errors import IncompleteError
from raymerge.storage.local.store import LocalStore

RECORD = RECORD_DIRECTORY
"""Directory of the run record within a checkpoint: plan, ledger, recipe, numerics and choice of device."""


MARK = "begun"
"""File of the run record that tells one beginning from another; it is not published."""


def begin(record: Path) -> None:
    """Have a new mark in a run record, durably: who had another is refused from then on."""
    with LocalStore(record) as store:
        store.write_atomic(MARK, uuid.uuid4().hex.encode())


def mark_of(record: Path) -> str:
    """The mark of a run record; "" where there is none."""
    try:
        return (record / MARK).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def check_begun(record: Path, mark: str) -> None:
    """See that a run is still the one that was begun with ``mark``.

    A file that was opened before this is of that run, whatever happens to its name later.

    Raises:
        IncompleteError: it was thrown away, or published.
    """
    if mark_of(record) != mark:
        raise IncompleteError(
            f"{record.parent}: this is no longer the run that the worker writes for; another began there, "
            "or it is published. The worker gives up."
        )


def throw_away(directory: Path, place: Path) -> None:
    """Remove an unfinished run: after a crash at any moment it is whole or nobody takes it up.

    What cannot be deleted is left to ``remove_thrown_away``.

    Args:
        directory: need not exist.
        place: beside which it is.

    Raises:
        OSError: it cannot be renamed, and stays as it was.
    """
    away = place.parent / f"{_thrown_away(place)}{uuid.uuid4().hex[:8]}"
    try:
        directory.rename(away)
    except FileNotFoundError:
        return
    sync_directory(place.parent)
    shutil.rmtree(away, ignore_errors=True)


def remove_thrown_away(place: Path) -> None:
    """Delete what a crash left of runs that were thrown away beside ``place``."""
    for left in place.parent.glob(glob.escape(_thrown_away(place)) + "*"):
        shutil.rmtree(left, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Return once the names in a directory would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _thrown_away(place: Path) -> str:
    # Not as unfinished runs are named: it is none any more.
    return f".{place.name}.raymerge.discarded-"
