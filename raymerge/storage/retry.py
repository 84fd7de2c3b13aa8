"""Errors of storage: retried where they may pass, explained where they do not."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from raymerge.errors import DiskSpaceError, Problem, TransientError, UnreadableError
from raymerge.units import format_size

_TRANSIENT_NAMES = (
    "EAGAIN ECONNABORTED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR EIO ENETDOWN ENETRESET ENETUNREACH "
    "ENOTCONN EREMOTEIO ESTALE ETIMEDOUT"
)
TRANSIENT = frozenset(getattr(errno, name) for name in _TRANSIENT_NAMES.split() if hasattr(errno, name))
"""Errors of file servers and networks that another attempt may pass. A broken disk says EIO as well."""
_RETRIES = 7
_FIRST_SECONDS = 0.1
KEPT = "What is done is kept: the same command goes on from there."

_Result = TypeVar("_Result")


class RetryPolicy:
    """Makes up to eight attempts within 13 seconds, with growing pauses. Thread-safe."""

    def __init__(
        self, *, sleep: Callable[[float], object] | None = None, chance: Callable[[], float] = random.random
    ) -> None:
        """``sleep``: None for a wait that ``end`` cuts short. ``chance``: 0 to 1; spreads the waits, so that
        workers do not all retry at the same moment."""
        self._ended = threading.Event()
        self._sleep = sleep or self._ended.wait
        self._chance = chance
        self._lock = threading.Lock()
        self._faults: Counter[str] = Counter()

    def have(
        self,
        attempt: Callable[[], _Result],
        *,
        path: str,
        doing: str,
        offset: int = 0,
        again: Callable[[], None] | None = None,
    ) -> _Result:
        """The result of the first attempt that does not fail with a transient error. ``again``: called before
        each further attempt. Raises TransientError: every attempt failed; OSError: an error that is not
        transient."""
        try:
            return attempt()
        except OSError as error:
            return self.retry(error, attempt, path=path, doing=doing, offset=offset, again=again)

    def retry(
        self,
        error: OSError,
        attempt: Callable[[], _Result],
        *,
        path: str,
        doing: str,
        offset: int = 0,
        again: Callable[[], None] | None = None,
    ) -> _Result:
        """As ``have``, after a first attempt that failed with ``error``."""
        fault = _transient(error)
        tried = 1
        for number in range(_RETRIES):
            self._note(path, fault)
            self._sleep(_FIRST_SECONDS * 2**number * (0.5 + self._chance() / 2))
            if self._ended.is_set():
                break
            if again is not None:
                again()
            tried += 1
            try:
                return attempt()
            except OSError as later:
                fault = _transient(later)
        times = f"{tried} times" if tried > 1 else "once"
        raise TransientError(
            f"{path}: {doing} at byte {offset} failed {times}, "
            f"the last time with {describe_error(fault)}. {KEPT}"
        ) from fault

    def end(self) -> None:
        self._ended.set()

    def take_faults(self) -> dict[str, int]:
        """Retried errors and their counts since the last call."""
        with self._lock:
            faults, self._faults = dict(self._faults), Counter()
        return faults

    def _note(self, path: str, fault: OSError) -> None:
        with self._lock:
            self._faults[f"{os.path.basename(path)}: {describe_error(fault)}"] += 1


def describe_error(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error} ({name})" if name else str(error)


def _transient(error: OSError) -> OSError:
    if error.errno not in TRANSIENT:
        raise error
    return error


OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_SMALLER = "Raise that limit, or give another place."


def size_limit() -> str:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY:
        return "the file system takes no file of that size"
    return f"this process may write {most} bytes to one (ulimit -f)"


@contextmanager
def reading(path: str, offset: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot be read at byte {offset}: {error.strerror}."
        remedy = "Check that the file is there, whole and readable, then run again."
        raise UnreadableError(Problem(path, what, remedy)) from error


@contextmanager
def writing(path: str, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_space_error(path, nbytes, error) from error


def disk_space_error(path: str, nbytes: int, error: OSError) -> OSError | DiskSpaceError:
    """The error for ``nbytes`` bytes that were refused; unchanged if it is not about space."""
    if error.errno not in OUT_OF_SPACE:
        return error
    if error.errno == errno.EFBIG:
        return DiskSpaceError(f"{path}: is larger than a file may be here: {size_limit()}. {_SMALLER} {KEPT}")
    status = os.statvfs(os.path.dirname(path))
    free = status.f_bavail * status.f_frsize
    missing = max(0, nbytes - free)
    lack = f"{missing} bytes ({format_size(missing)}) are missing" if missing else describe_error(error)
    what = f"cannot take {nbytes} more bytes: the file system has {free} free, {lack}."
    return DiskSpaceError(f"{path}: {what} Free space there. {KEPT}")


def ends_before(path: str, offset: int, *, length: int, nbytes: int) -> Problem:
    what = f"ends at byte {nbytes}, but bytes {offset} to {offset + length} were wanted."
    return Problem(path, what, "The file is cut off or was changed meanwhile: download or copy it again.")


def changed(path: str) -> Problem:
    what = "the file was changed while it was merged."
    return Problem(path, what, "Leave the sources alone, and start again with --replace.")
