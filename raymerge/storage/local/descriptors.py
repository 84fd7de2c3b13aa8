"""What is done to a file beside reading and writing it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress

_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


def regular_file(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What the system says of a directory's entry, and of what it links to; None for what is no file."""
    try:
        status = entry.stat()
    except OSError:  # a link that leads nowhere; an index that names it says so better than we could
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def resize(descriptor: int, size: int, nbytes: int) -> None:
    """Give a file of ``size`` bytes ``nbytes``, with their space reserved where that can be."""
    if nbytes > size and _reserve(descriptor, size, nbytes - size):
        return
    if nbytes != size:
        os.ftruncate(descriptor, nbytes)


def _reserve(descriptor: int, offset: int, nbytes: int) -> bool:
    """Reserve space, so that a full disk shows now; False where the file system cannot."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno in _CANNOT_RESERVE:
            return False
        raise
    return True


def sync_data(descriptor: int) -> None:
    """Return once a file's bytes would survive a power cut."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        # macOS: fsync leaves bytes in the memory of the disk, which a power cut empties.
        with suppress(OSError):  # a file server, most likely, that has only fsync
            fcntl.fcntl(descriptor, full)
            return
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)
