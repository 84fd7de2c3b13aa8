"""Whether bytes of a file lie in the system's page cache."""

from __future__ import annotations

import ctypes
import mmap

from raymerge.storage.buffers import address_of

_SAMPLES = 4


class Residency:
    """Asks the system (mincore) about a few pages of an extent. Thread-safe.

    A read with RWF_NOWAIT would tell as well, but it brings the page in that it misses, and starts to read
    ahead where the reads before it were in sequence: asking would change the answer to the next question.
    """

    def __init__(self) -> None:
        # Keeping the interpreter's lock: the answer takes less time than getting the lock again.
        self._mincore = getattr(ctypes.PyDLL(None), "mincore", None)
        if self._mincore is not None:
            self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

    def is_cached(self, descriptor: int, offset: int, nbytes: int) -> bool:
        """Whether at least half of the pages looked at are in the cache.

        True also where that cannot be known: reading through the cache is always right. So it is for files of
        another user that may not be written, about which the system says nothing.
        """
        if self._mincore is None or nbytes <= 0:
            return True
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        try:
            # Private and never touched: writable only because an address is given of nothing else.
            mapping = mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, offset=start)
        except (OSError, ValueError):  # a file system without mappings; an extent that the file does not have
            return True
        with mapping:
            return self._sampled(address_of(memoryview(mapping)), -(-length // mmap.PAGESIZE))

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
