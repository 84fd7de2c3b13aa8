"""What all stores have in common that are read over a network."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from raymerge.storage.local.buffers import ALIGNMENT, room_for
from raymerge.storage.local.transfers import as_bytes
from raymerge.storage.store import is_key


class FarStore(ABC):
    """Files on a server: what ``ReadStore`` asks for, told by ``read_into``, ``close`` and ``_named``."""

    @property
    def is_far(self) -> bool:
        """Requests go to a server."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give back what is held open; the store may be used again afterwards."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole ``buffer`` from ``offset``.

        Raises:
            UnreadableError: the file cannot be read.
            CheckpointError: it ends before the buffer is full, or is not the one expected.
            TransientError: the storage failed for longer than is waited.
        """

    @abstractmethod
    def _named(self, path: str) -> str:
        """The address of a path below the place, for messages; of the place itself for "."."""

    def location(self, key: str) -> str:
        """The address of ``key``, for messages: without options.

        Raises:
            ValueError: the key is empty, absolute or leads out of the place.
        """
        if not is_key(key):
            raise ValueError(f"{key!r} is not a key: it must be a relative path that stays below the root")
        return self._named(os.path.normpath(key))

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
