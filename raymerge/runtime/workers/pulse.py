"""Whether the threads that do parts get anywhere, by the processor time that they take.

A thread that comes back from a read or a write has taken some, however slow the storage is; one that waits
for something that does not come has not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pulse:
    """Processor time of the threads that are at work in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, float] = {}
        self._ended = 0.0

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Count what this thread takes meanwhile."""
        own = threading.get_ident()
        with self._lock:
            self._threads[own] = _taken(own)
        try:
            yield
        finally:
            # Under the lock: once it has ended, a thread's clock must not be asked for.
            with self._lock:
                self._ended += _taken(own) - self._threads.pop(own)

    @property
    def seconds(self) -> float:
        """Seconds that all of them have taken so far; more than before exactly if one of them got on."""
        with self._lock:
            return self._ended + sum(_taken(each) - begun for each, begun in self._threads.items())


def _taken(thread: int) -> float:
    """Seconds of processor time of a thread; where the system keeps no such clock, time goes by for all."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))
