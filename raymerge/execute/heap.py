"""Keeps the C allocator from holding on to much more than what lives.

Several lanes get and free memory of all sizes side by side. What they free stays with the allocator, in
pieces that the next tile often does not fit into: without a word it comes to two or three times of what is in
use at once.
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
        resident: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            limit: bytes that the process may grow by, beyond what it has now.
            measure: bytes of memory that the process has; None asks the system.
            release: gives free memory back; None asks the C library, where it can do that (glibc).
            resident: bytes of the process in memory, now and at most so far; None asks the system.
        """
        self._limit = limit
        self._measure = measure or _own_bytes
        self._release = release or return_free_memory
        self._resident = resident or _resident_bytes
        self._idle = self._base = self._measure()
        self._at_first = self._resident()
        self._most = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the process has grown by.

        Between two looks at it the system itself keeps its peak: of use when it is higher than any that there
        was before this watch.
        """
        now, earlier = self._at_first
        most = self._resident()[1]
        return max(self._most, most - now if most > earlier else 0)

    def check(self) -> None:
        """Look, and give free memory back if it is time; cheap enough for every load."""
        found = self._measure()
        self._most = max(self._most, found - self._idle)
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


def _resident_bytes() -> tuple[int, int]:
    """All that is in memory of this process, and the most that was."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            lines = dict(line.split(b":", 1) for line in file.read(1 << 14).splitlines())
        now, most = (int(lines[name].split()[0]) << 10 for name in (b"VmRSS", b"VmHWM"))
    except (OSError, KeyError):  # not Linux
        return 0, 0
    return now, most
