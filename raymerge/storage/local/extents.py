"""Sharing equal extents of files, where the filesystem can (XFS, btrfs); no byte that is read changes."""

from __future__ import annotations

import fcntl
import struct

BLOCK_NBYTES = 4096
"""Extents are shared in whole blocks that lie at multiples of this."""

# FIDEDUPERANGE of linux/fs.h. The kernel compares the two ranges itself and shares them only if equal.
_REQUEST = 0xC0189436
_RANGE = struct.Struct("=QQHHI")
_TARGET = struct.Struct("=qQQiI")
_MOST_NBYTES = 16 << 20


def share_extents(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> int:
    """Let two equal byte ranges of open files share their storage.

    Args:
        source: descriptor open for reading.
        offset: first byte there.
        target: descriptor open for writing.
        target_offset: first byte there.
        nbytes: length of both.

    Returns:
        Bytes that share storage now: 0 where the filesystem cannot, where the ranges lie differently within
        blocks, or where they are not equal.
    """
    if offset % BLOCK_NBYTES != target_offset % BLOCK_NBYTES:
        return 0
    lead = -offset % BLOCK_NBYTES
    shared = 0
    for start in range(lead, nbytes - (nbytes - lead) % BLOCK_NBYTES, _MOST_NBYTES):
        length = min(_MOST_NBYTES, (nbytes - start) // BLOCK_NBYTES * BLOCK_NBYTES)
        done = _share_once(source, offset + start, target, target_offset + start, length)
        if not done:
            break
        shared += done
    return shared


def _share_once(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> int:
    request = bytearray(_RANGE.pack(offset, nbytes, 1, 0, 0) + _TARGET.pack(target, target_offset, 0, 0, 0))
    try:
        fcntl.ioctl(source, _REQUEST, request)
    except OSError:
        return 0
    _, _, done, status, _ = _TARGET.unpack_from(request, _RANGE.size)
    return int(done) if status == 0 else 0
