"""What may come between a run and its end: signals, and a system that refuses something."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raymerge.errors import IncompleteError, Problem, RaymergeError, TargetError
from raymerge.runtime.events import OnEvent, Stopping
from raymerge.runtime.pool import Stop

STOPPED_AT_ONCE = "stopped at once. What is finished is kept: the same command goes on from there."
"""What is said when the parts in hand were given up."""
_LASTING = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
        errno.EXDEV,
    }
)
"""What the system would refuse again, however often the command is given."""


@contextmanager
def resumable(place: Path) -> Iterator[None]:
    """Tell what the system refuses for good at ``place`` from what another attempt may do.

    Raises:
        TargetError: it would refuse the same again.
        IncompleteError: reading or writing failed; the same command goes on.
    """
    try:
        yield
    except RaymergeError:
        raise
    except OSError as error:
        if error.errno in _LASTING:
            what = f"the system refused it: {error.strerror}."
            raise TargetError(
                Problem(str(error.filename or place), what, "Choose another -o, or clear what is there.")
            ) from error
        raise IncompleteError(
            f"reading or writing failed: {error}. What is done is kept: the same command goes on from there."
        ) from error


@contextmanager
def stopping(on_event: OnEvent) -> Iterator[Stop]:
    """First Ctrl-C or SIGTERM: finish what is in hand. Second: stop at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_: int, __: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.request()
        on_event(Stopping())

    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in wanted]
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise IncompleteError(STOPPED_AT_ONCE) from error
    finally:
        for number, old in zip(wanted, before, strict=True):
            signal.signal(number, old)
