"""Bytes of one file that become bytes of another without a way through this process."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

BLOCK_NBYTES = 4096
"""Extents are shared in whole blocks that lie at multiples of this."""

# FIDEDUPERANGE of linux/fs.h. The kernel compares the two ranges itself and shares them only if equal.
_REQUEST = 0xC0189436
_RANGE = struct.Struct("=QQHHI")
_TARGET = struct.Struct("=qQQiI")
_MOST_NBYTES = 16 << 20


def share_extents(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> int:
    """Let two equal byte ranges of open files share their storage. Returns bytes that share storage now: 0
    where the filesystem cannot, where the ranges lie differently within blocks, or where they are not equal.
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


# FICLONERANGE of linux/fs.h: the source's extents become the target's too, until one of them is written.
_CLONE = 0x4020940D
_CLONE_RANGE = struct.Struct("=qQQQ")
_NEVER = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.ENOSYS})
_COPIED_BY_SERVER: Mapping[str, str] = MappingProxyType(
    {"nfs4": "vers=4.2", "ceph": "copyfrom", "cifs": "", "smb3": ""}
)
"""File systems whose servers may copy, and the mount option without which they are not asked to."""
_MOUNTS = Path("/proc/self/mountinfo")


class RangeCopier:
    """Remembers for each pair of devices how bytes get from one to the other. Thread-safe.

    Two ways are worth taking. XFS, btrfs and their like let files share blocks, so nothing is copied. Some
    file servers copy on their own side where the mount allows it, so that nothing crosses the network; one
    that turns out not to is the kernel's to know, which then copies through this machine. Everywhere else
    the kernel would always do that, through the page cache, which takes longer than reading and writing
    directly from here."""

    def __init__(self) -> None:
        self._is_served: dict[tuple[int, int], bool] = {}
        """Of pairs without clones, whether a server copies."""

    def copy_blocks(self, source: int, source_offset: int, target: int, offset: int, nbytes: int) -> bool:
        """Copy whole blocks between open files; False where that cannot be, and then nothing is promised."""
        pair = os.fstat(source).st_dev, os.fstat(target).st_dev
        if pair not in self._is_served:
            refusal = _clone(source, source_offset, target, offset, nbytes)
            if refusal not in _NEVER:
                return refusal == 0
            self._is_served[pair] = pair[0] == pair[1] and _is_served(pair[0])
        return self._is_served[pair] and _copy_by_server(source, source_offset, target, offset, nbytes)


def inner_blocks(source_offset: int, offset: int, nbytes: int) -> tuple[int, int]:
    """Bytes before the first whole block of a range and bytes of whole blocks behind them.

    There are no whole blocks where the two files' blocks do not begin at the same bytes of the range."""
    lead = -offset % BLOCK_NBYTES
    if source_offset % BLOCK_NBYTES != offset % BLOCK_NBYTES or nbytes < lead:
        return 0, 0
    return lead, (nbytes - lead) // BLOCK_NBYTES * BLOCK_NBYTES


def _clone(source: int, source_offset: int, target: int, offset: int, nbytes: int) -> int:
    """Error number of the refusal, 0 for none."""
    try:
        fcntl.ioctl(target, _CLONE, _CLONE_RANGE.pack(source, source_offset, nbytes, offset))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _is_served(device: int) -> bool:
    kind, options = mount_of(device)
    option = _COPIED_BY_SERVER.get(kind)
    return option is not None and (not option or option in options)


def mount_of(device: int) -> tuple[str, tuple[str, ...]]:
    """The kind of file system mounted from a device (``st_dev``) and its own options, as the mount table has
    them; nothing where that does not know the device."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return "", ()
    for line in lines:
        before, _, behind = line.partition(" - ")
        if before.split()[2] == number:
            kind, _, options = behind.split(" ")[:3]
            return kind, tuple(options.split(","))
    return "", ()


def _copy_by_server(source: int, source_offset: int, target: int, offset: int, nbytes: int) -> bool:
    done = 0
    try:
        while done < nbytes:
            got = os.copy_file_range(source, target, nbytes - done, source_offset + done, offset + done)
            if not got:
                return False
            done += got
    except OSError:
        return False
    return True
