"""What all stores have in common that are read over a network."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from raymerge.storage.local.buffers import ALIGNMENT, room_for
from raymerge.storage.local.direct_io import as_bytes
from raymerge.storage.store import FileInfo, is_key


class FarStore(ABC):
    """Files on a server: all of ``ReadStore`` but ``files``, ``info``, ``read_into`` and ``close``."""

    _top: str
    """The address of the place, for messages: without options."""

    @property
    def is_far(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole ``buffer`` from ``offset``.

        Raises:
            UnreadableError: the file cannot be read.
            CheckpointError: it ends before the buffer is full, or is not the one expected.
            TransientError: the storage failed for longer than is waited.
        """

    @abstractmethod
    def info(self, key: str) -> FileInfo | None: ...

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        return {key: self.info(key) for key in keys}

    def check_expected(self) -> None:  # noqa: B027 - what follows is true of most
        """Nothing is left to see where every answer is of the version that was asked for."""

    def location(self, key: str) -> str:
        """The address of ``key``, for messages: without options.

        Raises:
            ValueError: the key is empty, absolute or leads out of the place.
        """
        if not is_key(key):
            raise ValueError(f"{key!r} is not a key: it must be a relative path that stays below the root")
        path = os.path.normpath(key)
        return self._top if path == "." else f"{self._top}/{path}"

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``; raises as ``read_into`` does."""
        data = bytearray(nbytes)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,
        like: int | None = None,
    ) -> int:
        """Read bytes into a page-aligned buffer of at least ``room_for(nbytes)`` bytes.

        Nothing is kept at hand for another time: what is read ``again`` is fetched again.

        Returns:
            Position of the first byte in the buffer: ``like % ALIGNMENT`` where that was given, else
            ``offset % ALIGNMENT``.

        Raises:
            CheckpointError: as ``read_into`` does.
            TransientError: as ``read_into`` does.
            ValueError: the buffer is too small.
        """
        del again
        view = as_bytes(buffer)
        if view.nbytes < room_for(nbytes):
            raise ValueError(f"{view.nbytes} bytes of buffer are too few for {nbytes} to read")
        begin = (offset if like is None else like) % ALIGNMENT
        self.read_into(key, offset, view[begin : begin + nbytes])
        return begin


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
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _opened(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fetch")
            return self._pool
