"""Extents of open files, whole and in pieces, read and written past the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

from raymerge.storage.local.buffers import ALIGNMENT, BufferPool, copy_bytes, lies_like, room_for, round_up
from raymerge.storage.store import Buffer, Range


@dataclass(slots=True)
class _Handle:
    descriptor: int
    users: int = 0
    retired: bool = False


class OpenFiles:
    """Keeps the most recently used descriptors open, at most ``limit`` of them while idle.

    A checkpoint has hundreds of files and thousands of reads of each: opening per read costs more than
    reading on network file systems, and keeping all open meets the limit of the process.
    """

    def __init__(
        self,
        limit: int,
        opened: Callable[[str, int], None] | None = None,
        opened_to_write: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            opened: given the path and the descriptor of a file that was opened to be read; may raise.
            opened_to_write: called after a file was opened to be written to; may raise.
        """
        self._limit = limit
        self._opened = opened
        self._opened_to_write = opened_to_write
        self._lock = threading.Lock()
        self._handles: OrderedDict[tuple[str, bool, bool], _Handle] = OrderedDict()
        self._drops = 0

    @contextmanager
    def borrow(self, path: str, *, writable: bool, direct: bool = False) -> Iterator[int]:
        """A descriptor of ``path`` that stays open until the block ends; ``direct`` goes past the page cache.

        Raises:
            OSError: the file cannot be opened like that.
        """
        handle = self._acquire(path, writable, direct)
        try:
            yield handle.descriptor
        finally:
            self._release(handle)

    def forget(self, path: str) -> None:
        """Drop the descriptors of ``path``, which was renamed, replaced or removed."""
        with self._lock:
            self._drops += 1
            for writable, direct in product((False, True), repeat=2):
                handle = self._handles.pop((path, writable, direct), None)
                if handle is not None:
                    _retire(handle)

    def close(self) -> None:
        """Drop every descriptor; those in use are closed by their last user."""
        with self._lock:
            self._drops += 1
            for handle in self._handles.values():
                _retire(handle)
            self._handles.clear()

    def _acquire(self, path: str, writable: bool, direct: bool) -> _Handle:
        key = path, writable, direct
        with self._lock:
            handle, drops = self._taken(key), self._drops
        if handle is not None:
            return handle
        flags = (os.O_RDWR | os.O_NOFOLLOW if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        # Without the lock: a file server may take its time, for which nobody else is to wait.
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            if writable and self._opened_to_write is not None:
                self._opened_to_write()
            elif not writable and self._opened is not None:
                self._opened(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            handle = self._taken(key)
            if handle is None:
                return self._added(key, descriptor, is_kept=drops == self._drops)
        # Another thread was faster.
        os.close(descriptor)
        return handle

    def _taken(self, key: tuple[str, bool, bool]) -> _Handle | None:
        handle = self._handles.get(key)
        if handle is not None:
            self._handles.move_to_end(key)
            handle.users += 1
            self._evict()
        return handle

    def _added(self, key: tuple[str, bool, bool], descriptor: int, *, is_kept: bool) -> _Handle:
        """A handle with its first user; not kept where the path may meanwhile lead to another file."""
        handle = _Handle(descriptor, users=1, retired=not is_kept)
        if is_kept:
            self._handles[key] = handle
            self._evict()
        return handle

    def _release(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.retired and not handle.users:
                os.close(handle.descriptor)

    def _evict(self) -> None:
        excess = len(self._handles) - self._limit
        idle = [key for key, handle in self._handles.items() if not handle.users] if excess > 0 else []
        for key in idle[:excess]:
            _retire(self._handles.pop(key))


def _retire(handle: _Handle) -> None:
    handle.retired = True
    if not handle.users:
        os.close(handle.descriptor)


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
