"""A file of a store for readers that want a file, as zipfile and torch do, and read it in small pieces."""

from __future__ import annotations

import io
from bisect import bisect_right, insort
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raymerge.storage.store import FileInfo, ReadStore

_END_NBYTES = 256 << 10
"""Of each end of a file, where torch keeps what describes it."""
_READERS = 16


class StoreFile(io.RawIOBase):
    """A file of a store. Of a store that is far, what is asked for by and by is fetched before, all at once:
    an archive has a directory at its end and a head for each record, and requests take long to begin."""

    def __init__(self, store: ReadStore, info: FileInfo) -> None:
        """
        Args:
            store: has the file.
            info: the file.
        """
        super().__init__()
        self._store = store
        self._info = info
        self._at = 0
        self._kept: list[tuple[int, bytes]] = []
        if info.nbytes > 2 * _END_NBYTES:
            self.look_ahead([(0, _END_NBYTES), (info.nbytes - _END_NBYTES, _END_NBYTES)])
        else:
            self.look_ahead([(0, info.nbytes)])

    def look_ahead(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch offsets and numbers of bytes that are read later; no more than there is of the file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not self._store.is_far:
            return
        inside = ((start, min(nbytes, self._info.nbytes - start)) for start, nbytes in spans)
        wanted = [(start, nbytes) for start, nbytes in inside if len(self._ahead(start)) < nbytes]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="header") as threads:
            for found in threads.map(self._fetched, wanted):
                insort(self._kept, found)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``, wherever the next byte is read.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        ahead = self._ahead(offset)[:nbytes]
        return bytes(ahead) if len(ahead) == nbytes else self._store.read(self._info.key, offset, nbytes)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Choose where the next byte is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.nbytes}[whence]
        if start + offset < 0:
            raise OSError(f"byte {start + offset} is before the file")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or as much of it as is at hand, or as the file has bytes left."""
        view = memoryview(buffer).cast("B")
        ahead = self._ahead(self._at)[: len(view)]
        nbytes = len(ahead) or max(0, min(len(view), self._info.nbytes - self._at))
        if ahead:
            view[:nbytes] = ahead
        elif nbytes:
            self._store.read_into(self._info.key, self._at, view[:nbytes])
        self._at += nbytes
        return nbytes

    def _fetched(self, span: tuple[int, int]) -> tuple[int, bytes]:
        return span[0], self._store.read(self._info.key, *span)

    def _ahead(self, offset: int) -> memoryview:
        """What was fetched before of the bytes from an offset on."""
        place = bisect_right(self._kept, offset, key=lambda each: each[0]) - 1
        if place < 0:
            return memoryview(b"")
        start, data = self._kept[place]
        return memoryview(data)[offset - start :]
