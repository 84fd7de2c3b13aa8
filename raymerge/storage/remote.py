"""Shared parts of the stores that are read over a network."""

from __future__ import annotations

import errno
import os
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from raymerge.errors import CheckpointError
from raymerge.storage.addresses import shown
from raymerge.storage.retry import RetryPolicy, ends_before, reading
from raymerge.storage.store import Buffer, FileInfo, UnmappedStore, as_bytes, location_below


class RemoteStore(UnmappedStore):
    """Files on a server: ``ReadStore`` without ``files``, ``info``, ``read_into`` and ``close``.

    Pickles as its place and the expected files."""

    def __init__(self, root: str, retry_policy: RetryPolicy | None, expected: Mapping[str, FileInfo]) -> None:
        self.root = root
        self._top = shown(root)
        self._retry_policy = retry_policy or RetryPolicy()
        self._expected = dict(expected)
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[str, dict[str, FileInfo]]:
        return self.root, self._expected

    def __setstate__(self, state: tuple[str, dict[str, FileInfo]]) -> None:
        self.__init__(state[0], expected=state[1])  # type: ignore[misc]

    @property
    def is_far(self) -> bool:
        return True

    @abstractmethod
    def info(self, key: str) -> FileInfo | None: ...

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        return {key: self.info(key) for key in keys}

    def check_expected(self) -> None:
        """Nothing to do: most stores check the version with every answer."""

    def location(self, key: str) -> str:
        return location_below(self._top, key)


NUM_THREADS = 4
"""Pieces of one store fetched at once; a server limits the speed of each connection."""
_LEAST_NBYTES = 4 << 20
_MOST_NBYTES = 16 << 20


class RangedStore(RemoteStore):
    """Files whose versions are known before they are read: by ranges, in pieces of 4 to 16 MiB, four at once.

    A range of at most one piece is fetched by the calling thread."""

    def __init__(self, root: str, retry_policy: RetryPolicy | None, expected: Mapping[str, FileInfo]) -> None:
        super().__init__(root, retry_policy, expected)
        self._pool: ThreadPoolExecutor | None = None

    @abstractmethod
    def _current(self, key: str) -> FileInfo | None:
        """The file as this store saw it first."""

    @abstractmethod
    def _chunks(self, info: FileInfo, location: str, offset: int, nbytes: int) -> Iterator[Buffer]:
        """Bytes of a range of this version; fewer if the connection ends before. Raises OSError: an errno
        that ``RetryPolicy`` knows; CheckpointError: refused, or the file has another version."""

    def _forget(self, key: str) -> None:
        """Called before a file is asked for again."""

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """On return or raise no piece is being written any more; the first failure by offset is raised."""
        view, location = as_bytes(buffer), self.location(key)
        if not len(view):
            return
        info = self._expected.get(key) or self._current(key)
        if info is None:
            with reading(location, 0):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location)
        if offset + len(view) > info.nbytes:
            raise CheckpointError(ends_before(location, offset, length=len(view), nbytes=info.nbytes))
        length = min(_MOST_NBYTES, max(_LEAST_NBYTES, -(-len(view) // NUM_THREADS)))
        starts = range(0, len(view), length)
        if len(starts) == 1:
            self._fetch(info, location, offset, view)
            return
        with self._lock:
            pool = self._pool = self._pool or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fetch")
        pieces = [(offset + start, view[start : start + length]) for start in starts]
        futures = [pool.submit(self._fetch, info, location, *piece) for piece in pieces]
        wait(futures)
        for future in futures:
            future.result()

    def _fetch(self, info: FileInfo, location: str, offset: int, view: memoryview) -> None:
        """Fill a view; each attempt continues where the last one broke off."""
        done = 0

        def go_on() -> None:
            nonlocal done
            begin = done
            for chunk in self._chunks(info, location, offset + done, len(view) - done):
                if len(chunk) > len(view) - done:
                    done = begin  # which of its bytes are those of the range is not known
                    raise OSError(errno.EIO, "an answer with more bytes than were asked for")
                view[done : done + len(chunk)] = chunk
                done += len(chunk)
            if done < len(view):
                raise OSError(errno.ECONNRESET, "the connection ended in the middle of an answer")

        forget = partial(self._forget, info.key)
        with reading(location, offset):
            self._retry_policy.have(go_on, path=location, doing="reading", offset=offset, again=forget)
