"""Whole transfers between open files and memory out of the partial ones that the system makes."""

from __future__ import annotations

import errno
import os

from raymerge.storage.local.buffers import ALIGNMENT
from raymerge.storage.store import Buffer

REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""How a file system says that it has no direct I/O: when the file is opened, or only when it is used."""
_DIRECT_MOST = 4 << 20


def read_fully(descriptor: int, offset: int, view: memoryview) -> int:
    """Fill ``view``; bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if not got:
            break
        done += got
    return done


def write_fully(descriptor: int, offset: int, view: memoryview) -> None:
    """Write all of ``view``."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def read_direct(descriptor: int, offset: int, view: memoryview) -> int:
    """Fill an aligned view from an aligned offset; bytes read.

    It stops behind the first piece that ends within a block, which is the last of the file, since a direct
    request cannot go on from there.
    """
    done = 0
    while done < len(view) and not done % ALIGNMENT:
        got = os.preadv(descriptor, [view[done : done + _DIRECT_MOST]], offset + done)
        if not got:
            break
        done += got
    return done


def write_direct(descriptor: int, offset: int, view: memoryview) -> int:
    """Write an aligned view at an aligned offset; bytes written, in whole blocks.

    It stops where the system wrote a part of a block: the caller writes the rest in another way.
    """
    done = 0
    while done < len(view) and not done % ALIGNMENT:
        done += os.pwrite(descriptor, view[done : done + _DIRECT_MOST], offset + done)
    return done - done % ALIGNMENT


def as_bytes(buffer: Buffer) -> memoryview:
    """The buffer as a flat view of its bytes."""
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
