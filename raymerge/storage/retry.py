"""Tries again what storage refuses for a moment."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from raymerge.errors import TransientError

TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        *([errno.EREMOTEIO] if hasattr(errno, "EREMOTEIO") else []),
    }
)
"""What file servers and networks say when another attempt may do. A broken disk says EIO as well."""
_RETRIES = 7
_FIRST_SECONDS = 0.1
KEPT = "What is done is kept: the same command goes on from there."

_Result = TypeVar("_Result")


class RetryPolicy:
    """Makes a bounded number of attempts, ever longer apart: seven more in 13 seconds. Thread-safe."""

    def __init__(
        self, *, sleep: Callable[[float], object] | None = None, chance: Callable[[], float] = random.random
    ) -> None:
        """
        Args:
            sleep: waits so many seconds; None for a wait that ``end`` cuts short.
            chance: from 0 to 1. Waits differ by it, so that all workers do not come back at one moment.
        """
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
        again: Callable[[str], None],
    ) -> _Result:
        """The result of the first attempt that is not refused for a moment.

        Args:
            attempt: may be called several times.
            again: called with the path before each further attempt.

        Raises:
            TransientError: none of them was.
            OSError: what would be refused again.
        """
        try:
            return attempt()
        except OSError as error:
            fault = _transient(error)
        tried = 1
        for number in range(_RETRIES):
            self._note(path, fault)
            self._sleep(_FIRST_SECONDS * 2**number * (0.5 + self._chance() / 2))
            if self._ended.is_set():
                break
            again(path)
            tried += 1
            try:
                return attempt()
            except OSError as error:
                fault = _transient(error)
        times = f"{tried} times" if tried > 1 else "once"
        raise TransientError(
            f"{path}: {doing} at byte {offset} failed {times}, the last time with {said(fault)}. {KEPT}"
        ) from fault

    def end(self) -> None:
        """Wait no more, and give up what is waited for."""
        self._ended.set()

    def take_faults(self) -> dict[str, int]:
        """What was tried again since this was last asked, whatever came of it, and how often."""
        with self._lock:
            found, self._faults = dict(self._faults), Counter()
        return found

    def _note(self, path: str, fault: OSError) -> None:
        with self._lock:
            self._faults[f"{os.path.basename(path)}: {said(fault)}"] += 1


def said(error: OSError) -> str:
    """What the system said, with the name of its number."""
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error} ({name})" if name else str(error)


def _transient(error: OSError) -> OSError:
    if error.errno not in TRANSIENT:
        raise error
    return error
