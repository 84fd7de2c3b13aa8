"""Keeps the C allocator from holding on to much more than what lives.

Several lanes get and free memory of all sizes side by side. What they free stays with the allocator, in
pieces that the next tile often does not fit into: without a word it comes to two or three times of what is in
use at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import psutil

from raymerge.allocator import return_free_memory


class Resident(NamedTuple):
    """Bytes of a process that are in memory."""

    now: int
    """All of them."""
    most: int
    """The most that there were so far."""
    shared: int
    """Those now that are of files, or shared with others."""


class HeapWatch:
    """Has the allocator give back what is free whenever the process has grown by more than it may."""

    def __init__(
        self,
        limit: int,
        *,
        measure: Callable[[], int] | None = None,
        release: Callable[[], None] | None = None,
        resident: Callable[[], Resident] | None = None,
    ) -> None:
        """
        Args:
            limit: bytes that the process may grow by, beyond what it has now.
            measure: bytes of memory that the process has; None asks the system.
            release: gives free memory back; None asks the C library, where it can do that (glibc).
            resident: what of the process is in memory; None asks the system.
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
        was before this watch. What has come into memory of files, libraries above all, is no growth.
        """
        first, found = self._at_first, self._resident()
        if found.most <= first.most:
            return self._most
        return max(self._most, found.most - first.now - max(0, found.shared - first.shared))

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


def _resident_bytes() -> Resident:
    """Of this process."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            lines = dict(line.split(b":", 1) for line in file.read(1 << 14).splitlines())
        names = (b"VmRSS", b"VmHWM", b"RssFile", b"RssShmem")
        now, most, of_files, shared = (int(lines[name].split()[0]) << 10 for name in names)
    except (OSError, KeyError):  # not Linux
        return Resident(0, 0, 0)
    return Resident(now, most, of_files + shared)
