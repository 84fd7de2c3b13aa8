"""Long ranges fetched in pieces, several at once, each to where it belongs in the caller's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

NUM_THREADS = 4
"""Pieces of one store that are fetched at once; a server gives each connection a part of what it can give."""
_LEAST_NBYTES = 4 << 20
_MOST_NBYTES = 16 << 20

Fetch = Callable[[int, memoryview], None]
"""Fills a view from an offset of a file."""


class Pieces:
    """Cuts ranges into pieces of 4 to 16 MiB and fetches up to four of them at once. Thread-safe.

    What is no longer than a piece is fetched by the thread that asks for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, fetch: Fetch, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``; returns or raises when no piece is written to any more.

        Raises:
            Exception: what the first piece, in their order, raised that failed.
        """
        length = min(_MOST_NBYTES, max(_LEAST_NBYTES, -(-len(view) // NUM_THREADS)))
        starts = range(0, len(view), length)
        if len(starts) <= 1:
            fetch(offset, view)
            return
        pool = self._opened()
        futures = [pool.submit(fetch, offset + start, view[start : start + length]) for start in starts]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads; they are started again when they are needed."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _opened(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fetch")
            return self._pool
