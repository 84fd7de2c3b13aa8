"""Extents of files read and written past the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os

from raymerge.storage.local.buffers import ALIGNMENT, BufferPool, copy_bytes, lies_like, room_for, round_up
from raymerge.storage.local.open_files import OpenFiles
from raymerge.storage.local.transfers import REFUSALS, read_direct, read_fully, write_direct, write_fully
from raymerge.storage.ranges import Range

_SAMPLES = 4
_FAILED = ctypes.c_void_p(-1).value


class Residency:
    """Asks the system (mincore) about a few pages of an extent. Thread-safe.

    A read with RWF_NOWAIT would tell as well, but it brings the page in that it misses, and starts to read
    ahead where the reads before it were in sequence: asking would change the answer to the next question.
    """

    def __init__(self) -> None:
        # Keeping the interpreter's lock: the answer takes less time than getting the lock again. And asking
        # the C library itself, as Python's own mappings open the file once more.
        library = ctypes.PyDLL(None)
        self._mincore = getattr(library, "mincore", None)
        if self._mincore is not None:
            address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
            self._mincore.argtypes = [address, size, ctypes.c_char_p]
            self._map, self._unmap = library.mmap, library.munmap
            self._map.restype = address
            self._map.argtypes = [address, size, number, number, number, ctypes.c_long]
            self._unmap.argtypes = [address, size]

    def is_cached(self, descriptor: int, offset: int, nbytes: int) -> bool:
        """Whether at least half of the pages looked at are in the cache.

        True also where that cannot be known: reading through the cache is always right. So it is for files of
        another user that may not be written, about which the system says nothing.
        """
        if self._mincore is None or nbytes <= 0:
            return True
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        # Never touched, so that a file that is cut off meanwhile is none of its business.
        address = self._map(None, length, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, start)
        if address == _FAILED:  # a file system without mappings
            return True
        try:
            found = self._sampled(address, -(-length // mmap.PAGESIZE))
        finally:
            self._unmap(address, length)
        # What lies behind the end is in no cache.
        return found or os.fstat(descriptor).st_size < offset + nbytes

    def _sampled(self, address: int, num_pages: int) -> bool:
        assert self._mincore is not None
        found = ctypes.create_string_buffer(1)
        samples = min(_SAMPLES, num_pages)
        cached = 0
        for sample in range(samples):
            page = sample * (num_pages - 1) // max(1, samples - 1)
            if self._mincore(address + page * mmap.PAGESIZE, 1, found):
                return True
            cached += found.raw[0] & 1
        return 2 * cached >= samples


_DIRECT_READ_MIN = 512 << 10


class ExtentReader:
    """Chooses for each extent: from the cache what is there, past it what is not. Thread-safe.

    A direct read costs a tenth of the processor time of a read through the cache, and leaves the cache to
    what will be read again; but of bytes that are cached it would fetch every one from the disk once more.
    """

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._residency = Residency()
        self._can_direct = hasattr(os, "O_DIRECT")

    def read(
        self, path: str, wanted: Range, buffer: memoryview, *, again: bool, like: int | None
    ) -> tuple[int, int]:
        """Read bytes of a file into a buffer.

        Args:
            buffer: at least ``room_for(wanted.nbytes)`` bytes; not aligned, it is filled through the cache.
            again: the bytes will be read once more, and so should be in the cache afterwards.
            like: through the cache they come to ``like % ALIGNMENT`` in the buffer; past it, or where None is
                given, to ``wanted.offset % ALIGNMENT``.

        Returns:
            Position of the first byte in the buffer, and bytes read: fewer than wanted only at the end of the
            file.
        """
        if buffer.nbytes < room_for(wanted.nbytes):
            raise ValueError(f"{buffer.nbytes} bytes of buffer are too few for {wanted.nbytes} to read")
        done = 0
        if not again and self._is_for_disk(path, wanted, buffer):
            done = self._read_direct(path, wanted, buffer)
        begin = (wanted.offset if done or like is None else like) % ALIGNMENT
        if done < wanted.nbytes:
            with self._files.borrow(path, writable=False) as descriptor:
                rest = buffer[begin + done : begin + wanted.nbytes]
                done += read_fully(descriptor, wanted.offset + done, rest)
        return begin, done

    def _is_for_disk(self, path: str, wanted: Range, buffer: memoryview) -> bool:
        if not self._can_direct or wanted.nbytes < _DIRECT_READ_MIN or not lies_like(0, buffer):
            return False
        with self._files.borrow(path, writable=False) as descriptor:
            return not self._residency.is_cached(descriptor, wanted.offset, wanted.nbytes)

    def _read_direct(self, path: str, wanted: Range, buffer: memoryview) -> int:
        shift = wanted.offset % ALIGNMENT
        blocks = buffer[: round_up(shift + wanted.nbytes)]
        try:
            with self._files.borrow(path, writable=False, direct=True) as descriptor:
                done = read_direct(descriptor, wanted.offset - shift, blocks)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._can_direct = False
            return 0
        return min(wanted.nbytes, max(0, done - shift))


BOUNCE_COUNT = 4
BOUNCE_NBYTES = 1 << 20
BOUNCE_BYTES = BOUNCE_COUNT * BOUNCE_NBYTES
"""The most memory that a store takes to write besides the caller's, however many threads write."""
_DIRECT_WRITE_MIN = 1 << 20


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
        self._bounces.clear()

    def write_in_place(self, path: str, offset: int, view: memoryview) -> None:
        """Write a view: directly if it consists of whole blocks where it lies, else through the cache."""
        is_whole = not offset % ALIGNMENT and not len(view) % ALIGNMENT
        if is_whole and len(view) >= _DIRECT_WRITE_MIN and lies_like(offset, view):
            self.write(path, offset, view)
        else:
            self._write_cached(path, offset, view)

    def write(self, path: str, offset: int, view: memoryview) -> None:
        """Write a view, its whole blocks directly, from a copy where its memory lies differently."""
        lead = -offset % ALIGNMENT
        inner = max(0, len(view) - lead) // ALIGNMENT * ALIGNMENT
        if inner < _DIRECT_WRITE_MIN or not self._can_direct:
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
