"""Writes extents of files past the page cache, whatever their alignment."""

from __future__ import annotations

import os

from raymerge.storage.local.buffers import ALIGNMENT, BufferPool, copy_bytes, lies_like
from raymerge.storage.local.open_files import OpenFiles
from raymerge.storage.local.transfers import REFUSALS, write_direct, write_fully

BOUNCE_COUNT = 4
BOUNCE_NBYTES = 1 << 20
BOUNCE_BYTES = BOUNCE_COUNT * BOUNCE_NBYTES
"""The most memory that a store takes to write besides the caller's, however many threads write."""
_DIRECT_LEAST = 1 << 20


class ExtentWriter:
    """Writes whole blocks directly and the edges through the cache. Thread-safe, also for one file.

    Direct writes reach the disk at twice the speed of writes through the cache and a sync, for a tenth of the
    processor time. A block that two writers share is an edge of both: it goes through the cache, where the
    two halves meet, and never directly, where the later would undo the earlier.
    """

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._bounces = BufferPool(BOUNCE_COUNT, BOUNCE_NBYTES)
        self._can_direct = hasattr(os, "O_DIRECT")

    def close(self) -> None:
        """Give back the memory that is held; the writer may be used again afterwards."""
        self._bounces.clear()

    def write_in_place(self, path: str, offset: int, view: memoryview) -> None:
        """Write a view: directly if it consists of whole blocks where it lies, else through the cache.

        Raises:
            OSError: the file cannot be written.
        """
        is_whole = not offset % ALIGNMENT and not len(view) % ALIGNMENT
        if is_whole and len(view) >= _DIRECT_LEAST and lies_like(offset, view):
            self.write(path, offset, view)
        else:
            self._write_cached(path, offset, view)

    def write(self, path: str, offset: int, view: memoryview) -> None:
        """Write a view, its whole blocks directly, from a copy where its memory lies differently.

        Raises:
            OSError: the file cannot be written.
        """
        lead = -offset % ALIGNMENT
        inner = max(0, len(view) - lead) // ALIGNMENT * ALIGNMENT
        if inner < _DIRECT_LEAST or not self._can_direct:
            self._write_cached(path, offset, view)
            return
        done = lead + self._write_inner(path, offset + lead, view[lead : lead + inner])
        self._write_cached(path, offset, view[:lead])
        self._write_cached(path, offset + done, view[done:])

    def _write_cached(self, path: str, offset: int, view: memoryview) -> None:
        with self._files.borrow(path, writable=True) as descriptor:
            write_fully(descriptor, offset, view)

    def _write_inner(self, path: str, offset: int, view: memoryview) -> int:
        """Bytes written directly; what is missing may be written once more."""
        try:
            with self._files.borrow(path, writable=True, direct=True) as descriptor:
                if lies_like(offset, view):
                    return write_direct(descriptor, offset, view)
                return self._write_copied(descriptor, offset, view)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._can_direct = False
            return 0

    def _write_copied(self, descriptor: int, offset: int, view: memoryview) -> int:
        with self._bounces.borrow() as bounce:
            for start in range(0, len(view), len(bounce)):
                piece = view[start : start + len(bounce)]
                copy_bytes(piece, bounce)
                done = write_direct(descriptor, offset + start, bounce[: len(piece)])
                if done < len(piece):
                    return start + done
        return len(view)
