"""How many threads compute: torch's own, and the lanes of a worker that have leave to at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ComputePermit:
    """One lane's leave to compute; while it reads and writes, others have theirs."""

    def __init__(self, turns: threading.Semaphore) -> None:
        self._turns = turns
        self._is_held = False

    def take(self) -> None:
        if not self._is_held:
            self._turns.acquire()
            self._is_held = True

    def rest(self) -> None:
        if self._is_held:
            self._is_held = False
            self._turns.release()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let others compute meanwhile; afterwards it may again where it might before."""
        was_held = self._is_held
        self.rest()
        try:
            yield
        finally:
            if was_held:
                self.take()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, whatever the worker has.

    Libraries of linear algebra cut their sums by the number of threads, and so round in other places. The
    setting is the process's: where several threads compute, each of them has set it to 1 before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
