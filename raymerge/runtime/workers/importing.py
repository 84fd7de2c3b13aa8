"""Imports in raymerge's own processes; as a library it leaves the garbage collector alone."""

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
    """Keep the garbage collector from modules while they are loaded, and forever after: torch makes hundreds
    of thousands of permanent objects, and walking them again and again takes as long as making them. Ctrl-C
    waits for the end: modules that are cut short fail in obscure ways."""
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
