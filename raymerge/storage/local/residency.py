"""Whether bytes of a file lie in the system's page cache."""

from __future__ import annotations

import ctypes
import mmap
import os

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
