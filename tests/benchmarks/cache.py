"""What of a file lies in the page cache: brought in, thrown out, looked at. Needs no privileges."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_BLOCK_NBYTES = 4 << 20


def warm(files: Iterable[Path]) -> None:
    buffer = bytearray(_BLOCK_NBYTES)
    for path in files:
        with open(path, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def evict(files: Iterable[Path]) -> None:
    """Throw the files out of the page cache of this machine; a virtual machine's host may still have them."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            # Only clean pages are thrown out.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident(file: Path) -> float:
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        # A private mapping that was never touched: what is resident of it is what the page cache has.
        anchor = ctypes.c_char.from_buffer(pages)
        found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = libc.mincore(start, ctypes.c_size_t(len(pages)), found)
        del anchor
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(file))
    return sum(value & 1 for value in bytes(found)) / len(found)
