"""Page-aligned memory: what direct I/O takes and gives, reused instead of faulted in anew."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ALIGNMENT = 4096
"""Direct requests begin and end at multiples of this, in the file and in memory: every disk's block fits."""
_HUGE_PAGE = 2 << 20


def aligned_buffer(nbytes: int) -> memoryview:
    """Writable memory of zeros that begins on a page; unmapped when the last view of it goes.

    From 2 MiB on it consists of huge pages where the system has them, which make direct I/O up to three times
    faster: a disk takes requests of so many pieces, and a piece is as long as the memory is contiguous.

    ``nbytes``: what it must hold at least; the length is the next multiple of ALIGNMENT, and not 0."""
    length = max(ALIGNMENT, round_up(nbytes))
    is_huge = length >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    # Private: what is shared with children, the default, is a file to the system.
    mapping = mmap.mmap(-1, length + is_huge * _HUGE_PAGE, flags=mmap.MAP_PRIVATE)
    if not is_huge:
        return memoryview(mapping)
    start = -address_of(memoryview(mapping)) % _HUGE_PAGE
    with suppress(OSError):  # a kernel without huge pages
        # Whole ones only, so that nothing beyond the end ever takes memory.
        mapping.madvise(mmap.MADV_HUGEPAGE, start, length // _HUGE_PAGE * _HUGE_PAGE)
    return memoryview(mapping)[start : start + length]


def buffer_nbytes(nbytes: int) -> int:
    """Bytes of an aligned buffer that reading ``nbytes`` from any offset takes."""
    return round_up(nbytes + 2 * ALIGNMENT)


def round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def address_of(buffer: memoryview) -> int:
    """Where the buffer's first byte lies in memory. Raises TypeError: the buffer is read-only; ValueError:
    the buffer is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def lies_like(offset: int, buffer: memoryview) -> bool:
    """Whether the buffer begins within a block of memory where ``offset`` lies within a block of a file."""
    return not buffer.readonly and address_of(buffer) % ALIGNMENT == offset % ALIGNMENT


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy all of ``source`` to the begin of ``target``, other threads running meanwhile where they can."""
    if source.readonly or not source.nbytes:
        target[: source.nbytes] = source
    else:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


class BufferPool:
    """At most ``count`` aligned buffers that threads take turns with; made when first needed."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._turns = threading.BoundedSemaphore(count)
        self._idle: list[memoryview] = []

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """A buffer for this thread alone until the block ends; waits while all are in use."""
        with self._turns:
            try:
                buffer = self._idle.pop()
            except IndexError:
                buffer = aligned_buffer(self._nbytes)
            try:
                yield buffer
            finally:
                self._idle.append(buffer)

    def clear(self) -> None:
        self._idle.clear()
