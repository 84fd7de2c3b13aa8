"""Imports of processes that belong to raymerge: its command, and its workers.

Where the library is imported into a process of others, it leaves the garbage collector to them.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HEAVY = "torch"


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Keep the garbage collector away while modules are loaded, and from them ever after.

    With torch come hundreds of thousands of objects that all stay. To look through them again and again
    while they are made takes as long as making them. Ctrl-C waits for the end of it: modules that are cut
    short fail in ways of their own.
    """
    if _HEAVY in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        with _uninterrupted():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
