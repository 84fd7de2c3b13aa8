"""What a file system refuses, in words."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raymerge.errors import Problem, RoomError, UnreadableError
from raymerge.storage.retry import KEPT, said
from raymerge.units import format_size

OUT_OF_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What is said by a full file system, a quota that is used up, and a file system of small files."""

_SMALLER = "Raise that limit, or give another place."


def size_limit() -> str:
    """What limits the size of a file that this process writes, as a phrase."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY:
        return "the file system takes no file of that size"
    return f"this process may write {most} bytes to one (ulimit -f)"


@contextmanager
def reading(path: str, offset: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableError(_unreadable(path, offset, error)) from error


@contextmanager
def writing(path: str, nbytes: int) -> Iterator[None]:
    """Says of a full file system how much it lacks."""
    try:
        yield
    except OSError as error:
        raise room_error(path, nbytes, error) from error


def room_error(path: str, wanted: int, error: OSError) -> OSError | RoomError:
    """What it means that ``wanted`` more bytes were refused; the error itself where it is not about room."""
    if error.errno not in OUT_OF_ROOM:
        return error
    if error.errno == errno.EFBIG:
        return RoomError(f"{path}: is larger than a file may be here: {size_limit()}. {_SMALLER} {KEPT}")
    status = os.statvfs(os.path.dirname(path))
    free = status.f_bavail * status.f_frsize
    missing = max(0, wanted - free)
    lack = f"{missing} bytes ({format_size(missing)}) are missing" if missing else said(error)
    what = f"cannot take {wanted} more bytes: the file system has {free} free, {lack}."
    return RoomError(f"{path}: {what} Free space there. {KEPT}")


def ends_early(path: str, offset: int, *, wanted: int) -> Problem:
    """A file that is shorter than it was said to be."""
    return ends_before(path, offset, wanted=wanted, nbytes=os.stat(path).st_size)


def ends_before(path: str, offset: int, *, wanted: int, nbytes: int) -> Problem:
    """A file of ``nbytes`` bytes, of which more are wanted."""
    what = f"ends at byte {nbytes}, but bytes {offset} to {offset + wanted} were wanted."
    return Problem(path, what, "The file is cut off or was changed meanwhile: download or copy it again.")


def changed(path: str) -> Problem:
    """A file that is not the one which was expected."""
    what = "the file was changed while it was merged."
    return Problem(path, what, "Leave the sources alone, and start again with --replace.")


def unlistable(directory: Path, error: OSError) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(str(directory), "there is no such directory.", "Check the path.")
    what = f"cannot be listed: {error.strerror}."
    return Problem(str(directory), what, "Give the directory of a model that may be read.")


def _unreadable(path: str, offset: int, error: OSError) -> Problem:
    what = f"cannot be read at byte {offset}: {error.strerror}."
    return Problem(path, what, "Check that the file is there, whole and readable, then run again.")
