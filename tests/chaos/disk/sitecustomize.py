"""A disk that is slow or fails, under every Python process that finds this directory on its PYTHONPATH.

Python loads a module of this name by itself, in drivers and in workers of Ray alike, so that raymerge runs as
it is installed. Of files below ``CHAOS_DISK`` every positioned read and write

- waits as many seconds as the file ``CHAOS_PAUSE`` says now, if there is one,
- fails with EIO by the chance ``CHAOS_FAILURES``, if that is set,
- fails with EDQUOT, if it is a write, as long as there is the file ``CHAOS_QUOTA``,
- and is noted in the file ``CHAOS_NOTES``, if that is set: the time, what it was and how it ended.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

_DISK = os.environ.get("CHAOS_DISK", "")
_PAUSE = os.environ.get("CHAOS_PAUSE", "")
_FAILURES = float(os.environ.get("CHAOS_FAILURES", "0"))
_QUOTA = os.environ.get("CHAOS_QUOTA", "")
_NOTES = os.environ.get("CHAOS_NOTES", "")


def _pause() -> float:
    try:
        with open(_PAUSE, encoding="ascii") as file:
            return float(file.read() or "0")
    except OSError:
        return 0.0


def _note(kind: str, outcome: str) -> None:
    if _NOTES:
        with open(_NOTES, "a", encoding="ascii") as file:
            file.write(f"{time.time():.3f} {os.getpid()} {kind} {outcome}\n")


def _on_this_disk(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(_DISK)
    except OSError:
        return False


def _troubled(transfer: Callable[..., int]) -> Callable[..., int]:
    kind = transfer.__name__

    @functools.wraps(transfer)
    def trouble(descriptor: int, *args: Any) -> int:
        if not _on_this_disk(descriptor):
            return transfer(descriptor, *args)
        time.sleep(_pause())
        if random.random() < _FAILURES:
            _note(kind, "failed")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if transfer is _pwrite and os.path.exists(_QUOTA):
            _note(kind, "failed")
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        done = transfer(descriptor, *args)
        _note(kind, "done")
        return done

    return trouble


_pwrite = os.pwrite
if _DISK:
    os.preadv = _troubled(os.preadv)
    os.pwrite = _troubled(os.pwrite)
