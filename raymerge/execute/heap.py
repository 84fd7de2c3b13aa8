"""Keeps the C allocator from holding on to much more than what lives.

Tiles are read by one thread, computed by a second and written by a third. What they free stays with the
allocator, in pieces that the next tile often does not fit into: without a word it comes to two or three times
of what is in use at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import psutil

from raymerge.allocator import return_free_memory


class HeapWatch:
    """Has the allocator give back what is free whenever the process has grown by more than it may."""

    def __init__(
        self,
        limit: int,
        *,
        measure: Callable[[], int] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            limit: bytes that the process may grow by, beyond what it has now.
            measure: bytes of memory that the process has; None asks the system.
            release: gives free memory back; None asks the C library, where it can do that (glibc).
        """
        self._limit = limit
        self._measure = measure or _own_bytes
        self._release = release or return_free_memory
        self._idle = self._base = self._measure()
        self.peak_bytes = 0
        """Most bytes that the process was found to have grown by."""

    def check(self) -> None:
        """Look, and give free memory back if it is time; cheap enough for every load."""
        found = self._measure()
        self.peak_bytes = max(self.peak_bytes, found - self._idle)
        if found - self._base <= self._limit:
            return
        self._release()
        # What stays is in use, and more than loads are: something else grew. Without this every load would
        # ask again, in vain.
        self._base = max(self._base, self._measure() - self._limit // 2)


def _own_bytes() -> int:
    """Memory that is this process's own: what it has of files (libraries, say) is not."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            resident, shared = file.read(128).split()[1:3]
    except OSError:  # not Linux
        found = psutil.Process().memory_info()
        return int(found.rss) - int(getattr(found, "shared", 0))
    return (int(resident) - int(shared)) * mmap.PAGESIZE
