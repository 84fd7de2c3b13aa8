"""Shared parts of the stores that are read over a network."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from raymerge.storage.local.buffers import ALIGNMENT, room_for
from raymerge.storage.local.store import as_bytes
from raymerge.storage.store import FileInfo, location_below


class RemoteStore(ABC):
    """Files on a server: ``ReadStore`` without ``files``, ``info``, ``read_into`` and ``close``."""

    _top: str
    """Address of the place for messages: without options."""

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
        """As ``ReadStore.read_into``."""

    @abstractmethod
    def info(self, key: str) -> FileInfo | None: ...

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        return {key: self.info(key) for key in keys}

    def check_expected(self) -> None:  # noqa: B027 - what follows is true of most
        """Nothing to do: most stores check the version with every answer."""

    def location(self, key: str) -> str:
        return location_below(self._top, key)

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
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
        """As ``ReadStore.read_extent``; nothing is cached, so ``again`` has no effect.

        Returns:
            Position of the first byte in the buffer: ``like % ALIGNMENT`` if given, else ``offset %
            ALIGNMENT``.
        """
        del again
        view = as_bytes(buffer)
        if view.nbytes < room_for(nbytes):
            raise ValueError(f"{view.nbytes} bytes of buffer are too few for {nbytes} to read")
        begin = (offset if like is None else like) % ALIGNMENT
        self.read_into(key, offset, view[begin : begin + nbytes])
        return begin


NUM_THREADS = 4
"""Pieces of one store fetched at once; a server limits the speed of each connection."""
_LEAST_NBYTES = 4 << 20
_MOST_NBYTES = 16 << 20

Fetch = Callable[[int, memoryview], None]


class Pieces:
    """Splits ranges into pieces of 4 to 16 MiB and fetches up to four at once. Thread-safe.

    A range of at most one piece is fetched by the calling thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, fetch: Fetch, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``; on return or raise no piece is being written any more.

        Raises:
            Exception: that of the first failed piece, in order of offset.
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
