"""What may come between a run and its end: signals, and refusals of the system."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raymerge.errors import IncompleteError, Problem, RaymergeError, RoomError, TargetError
from raymerge.events import OnEvent, Stopping
from raymerge.runtime.workers.pool import Stop
from raymerge.runtime.workers.system_limits import PROCESS_LIMIT, is_process_limit
from raymerge.storage.retry import KEPT, OUT_OF_ROOM, room_error
from raymerge.units import format_size

GRACE_SECONDS = 1.0
"""How long parts in hand are waited for after SIGTERM: who sends that may give no more than three seconds,
and a pool tells once a second that nothing came."""
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
def resumable(place: Path, missing: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Tell lasting refusals of the system at ``place`` from passing ones; ``missing`` is the bytes of disk
    wanted there and not reserved yet.

    Raises TargetError: it would refuse the same again. RoomError: there is no room now. IncompleteError:
    reading or writing failed, and the same command goes on.
    """
    try:
        yield
    except RoomError as error:
        is_of_size = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG
        if is_of_size:
            raise
        raise RoomError(_without_room(str(error), place, missing())) from error
    except RaymergeError:
        raise
    except (OSError, RuntimeError) as error:
        if is_process_limit(error):
            raise IncompleteError(f"{PROCESS_LIMIT} {KEPT}") from error
        if not isinstance(error, OSError):
            raise
        if error.errno == errno.EFBIG:
            raise room_error(str(error.filename or place), 0, error) from error
        if error.errno in OUT_OF_ROOM:
            said = f"{error.filename or place}: the file system refused it: {error.strerror}."
            raise RoomError(_without_room(f"{said} {KEPT}", place, missing())) from error
        if error.errno in _LASTING:
            what = f"the system refused it: {error.strerror}."
            raise TargetError(
                Problem(str(error.filename or place), what, "Choose another -o, or clear what is there.")
            ) from error
        raise IncompleteError(
            f"reading or writing failed: {error}. What is done is kept: the same command goes on from there."
        ) from error


def _without_room(said: str, place: Path, missing: int) -> str:
    try:
        free = shutil.disk_usage(place.parent).free
    except OSError:
        return said
    more = f"The output takes {format_size(missing)} more, and " if missing else ""
    return f"{said} {more}{format_size(free)} are free beside it."


def check_overdue(stop: Stop) -> None:
    """Heed a request from outside, and give up the parts in hand past their deadline; within ``stopping``."""
    stop.look()
    if stop.overdue:
        raise KeyboardInterrupt


def _never() -> bool:
    return False


def _heed(stop: Stop, asked: Callable[[], bool], on_event: OnEvent) -> None:
    if not stop.requested and asked():
        stop.request(GRACE_SECONDS)
        on_event(Stopping(GRACE_SECONDS, is_asked=True))


@contextmanager
def stopping(
    on_event: OnEvent, said: str = STOPPED_AT_ONCE, *, asked: Callable[[], bool] = _never
) -> Iterator[Stop]:
    """Ctrl-C: finish the parts in hand. SIGTERM: finish those that end within ``GRACE_SECONDS``. A second
    signal: stop at once; raises IncompleteError. ``said`` announces it; ``asked`` is whether another process
    asks for what SIGTERM does.
    """
    stop = Stop(lambda: _heed(stop, asked, on_event))

    def handle(number: int, _: FrameType | None) -> None:
        if stop.requested:
            on_event(Stopping(0.0))
            raise KeyboardInterrupt
        seconds = GRACE_SECONDS if number == signal.SIGTERM else None
        stop.request(seconds)
        on_event(Stopping(seconds))

    is_main = threading.current_thread() is threading.main_thread()
    wanted = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = [signal.signal(number, handle) for number in wanted]
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise IncompleteError(said) from error
    finally:
        for number, old in zip(wanted, before, strict=True):
            signal.signal(number, old)
