"""How far the units in hand are: told by whoever does them in tiny files, and read by the driver."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raymerge.errors import IncompleteError
from raymerge.runtime.driver.interruptions import STOPPED_AT_ONCE

_PREFIX = "progress-"
_EVERY_SECONDS = 0.5


@contextmanager
def telling(
    staging: Path,
    unit: int,
    aborted: threading.Event,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """What a unit is to call now and then with the bytes that it has read so far.

    It writes them down at most twice a second. A number that cannot be written is no reason to give up, and
    none is kept when the unit ends.

    Args:
        staging: where the number is written to.
        unit: whose number.
        aborted: set once the unit is to be given up; the next call raises ``IncompleteError`` then.
        clock: seconds.
    """
    path, told_at = staging / f"{_PREFIX}{unit}", -_EVERY_SECONDS

    def tell(nbytes: int) -> None:
        nonlocal told_at
        if aborted.is_set():
            raise IncompleteError(STOPPED_AT_ONCE)
        now = clock()
        if now - told_at >= _EVERY_SECONDS:
            told_at = now
            with suppress(OSError):
                _write(path, nbytes)

    try:
        yield tell
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def told(staging: Path) -> dict[int, int]:
    """Bytes read so far, by the unit in hand."""
    found: dict[int, int] = {}
    for path in staging.glob(f"{_PREFIX}*"):
        # A unit may end while its number is read.
        with suppress(OSError, ValueError):
            found[int(path.name.removeprefix(_PREFIX))] = int(path.read_text(encoding="ascii"))
    return found


def _write(path: Path, nbytes: int) -> None:
    """Put the number into place whole; it need not survive a power cut."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    part.write_text(str(nbytes), encoding="ascii")
    part.replace(path)
