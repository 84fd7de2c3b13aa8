"""The parts of a run done by a pool, and what may come between: signals, requests, refusals of the system."""

from __future__ import annotations

import errno
import shutil
import signal
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

from raymerge.errors import (
    PROCESS_LIMIT,
    IncompleteError,
    Problem,
    RaymergeError,
    RoomError,
    TargetError,
    is_process_limit,
)
from raymerge.events import OnEvent, Planned, Stopping
from raymerge.merge_plan.tables import Plan
from raymerge.runtime.workers.pool import Pool, Receipts, Stop, Work
from raymerge.storage.retry import KEPT, OUT_OF_ROOM, room_error
from raymerge.units import format_size

GRACE_SECONDS = 1.0
"""How long parts in hand are waited for after SIGTERM: who sends that may give no more than three seconds,
and a pool tells once a second that nothing came."""
STOPPED_AT_ONCE = "stopped at once. What is finished is kept: the same command goes on from there."
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
            what = f"{error.filename or place}: the file system refused it: {error.strerror}. {KEPT}"
            raise RoomError(_without_room(what, place, missing())) from error
        if error.errno in _LASTING:
            what = f"the system refused it: {error.strerror}."
            raise TargetError(
                Problem(str(error.filename or place), what, "Choose another -o, or clear what is there.")
            ) from error
        raise IncompleteError(
            f"reading or writing failed: {error}. What is done is kept: the same command goes on from there."
        ) from error


def _without_room(what: str, place: Path, missing: int) -> str:
    try:
        free = shutil.disk_usage(place.parent).free
    except OSError:
        return what
    more = f"The output takes {format_size(missing)} more, and " if missing else ""
    return f"{what} {more}{format_size(free)} are free beside it."


def _never() -> bool:
    return False


def do_parts(
    pool: Pool,
    work: Work,
    numbers: Sequence[int],
    take: Callable[[Receipts], None],
    *,
    on_event: OnEvent,
    at_once: str = STOPPED_AT_ONCE,
    asked: Callable[[], bool] = _never,
) -> bool:
    """Have these parts done, and ``take`` called with receipts as they come; returns whether a stop was
    requested, by a signal as ``stopping`` heeds it, or by another process, as ``asked`` says.
    """
    with stopping(on_event, at_once) as stop, closing(pool.run(work, numbers, stop)) as made:
        for receipts in made:
            take(receipts)
            if not stop.requested and asked():
                stop.request(GRACE_SECONDS)
                on_event(Stopping(GRACE_SECONDS, is_asked=True))
            if stop.overdue:
                raise KeyboardInterrupt
        return stop.requested


def planned(plan: Plan, peak: int, notes: Sequence[str] = ()) -> Planned:
    """The event that begins a run over a plan's segments; ``peak`` is bytes of memory of a worker."""
    return Planned(
        digest=plan.digest,
        tensors=len(plan["tensors"]),
        output_bytes=sum(plan["shards"].column("nbytes").to_pylist()),
        total_bytes=sum(plan["segments"].column("cost").to_pylist()),
        segments=len(plan["segments"]),
        projected_peak=peak,
        notes=tuple(notes),
    )


def costliest_first(costs: Sequence[int], done: Container[int] = ()) -> list[int]:
    return sorted((part for part in range(len(costs)) if part not in done), key=lambda n: (-costs[n], n))


@contextmanager
def stopping(on_event: OnEvent, at_once: str = STOPPED_AT_ONCE) -> Iterator[Stop]:
    """Ctrl-C: finish the parts in hand. SIGTERM: finish those that end within ``GRACE_SECONDS``. A second
    signal: stop at once; raises IncompleteError with the text ``at_once``.
    """
    stop = Stop()

    def handle(number: int, _: FrameType | None) -> None:
        if stop.requested:
            on_event(Stopping(0.0))
            raise KeyboardInterrupt
        seconds = GRACE_SECONDS if number == signal.SIGTERM else None
        stop.request(seconds)
        on_event(Stopping(seconds))

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield stop
    except KeyboardInterrupt as error:
        raise IncompleteError(at_once) from error
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
