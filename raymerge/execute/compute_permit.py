"""Leave to compute: of a worker's lanes only as many have it at a time as the worker has threads for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ComputePermit:
    """One lane's leave to compute; while it reads and writes, others have theirs."""

    def __init__(self, turns: threading.Semaphore) -> None:
        """
        Args:
            turns: shared by the lanes.
        """
        self._turns = turns
        self._is_held = False

    def take(self) -> None:
        """Wait until it may compute."""
        if not self._is_held:
            self._turns.acquire()
            self._is_held = True

    def rest(self) -> None:
        """Let others compute."""
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
