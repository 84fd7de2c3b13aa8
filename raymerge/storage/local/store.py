"""A directory of a POSIX file system as a store; large extents go past the page cache."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Self, TypeVar

from raymerge.errors import CheckpointError, OptionError, Problem, TransientError
from raymerge.storage import retry
from raymerge.storage.local.buffers import (
    ALIGNMENT,
    BufferPool,
    buffer_nbytes,
    copy_bytes,
    lies_like,
    round_up,
)
from raymerge.storage.local.copying import RangeCopier, inner_blocks, share_extents
from raymerge.storage.local.mapping import MAP_LEAST, PageMaps
from raymerge.storage.store import NO_FILES, Buffer, FileInfo, ReadStore, as_bytes, location_below
from raymerge.units import format_size


class _Handle:
    """An open descriptor, closed once nobody uses it and it is kept no more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        # What was written is asked for by ``sync``, and not here.
        with suppress(OSError):
            os.close(self.descriptor)


class OpenFiles:
    """Keeps the most recently used descriptors open, at most ``limit`` of them beside those in use.

    A checkpoint has hundreds of files and thousands of reads of each: opening per read costs more than
    reading on network file systems, and keeping all open meets the limit of the process."""

    def __init__(
        self,
        limit: int,
        opened: Callable[[str, int], None] | None = None,
        opened_to_write: Callable[[], None] | None = None,
    ) -> None:
        """``opened`` gets the path and descriptor of each file opened to be read, ``opened_to_write`` is
        called for the others; both may raise."""
        self._limit = limit
        self._opened = opened
        self._opened_to_write = opened_to_write
        self._lock = threading.Lock()
        self._handles: OrderedDict[tuple[str, bool, bool], _Handle] = OrderedDict()
        self._drops = 0

    @contextmanager
    def borrow(self, path: str, *, writable: bool, direct: bool = False) -> Iterator[int]:
        """A descriptor of ``path`` that stays open until the block ends; ``direct`` goes past the page cache.
        Raises OSError: the file cannot be opened like that."""
        handle = self._acquire(path, writable, direct)
        try:
            yield handle.descriptor
        finally:
            del handle

    def forget(self, path: str) -> None:
        """Drop the descriptors of ``path``, which was renamed, replaced or removed."""
        with self._lock:
            self._drops += 1
            for writable, direct in product((False, True), repeat=2):
                self._handles.pop((path, writable, direct), None)

    def close(self) -> None:
        with self._lock:
            self._drops += 1
            self._handles.clear()

    def _acquire(self, path: str, writable: bool, direct: bool) -> _Handle:
        key = path, writable, direct
        with self._lock:
            kept, drops = self._kept(key), self._drops
        if kept is not None:
            return kept
        flags = (os.O_RDWR | os.O_NOFOLLOW if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        # Without the lock: a file server may take its time, for which nobody else is to wait.
        handle = _Handle(os.open(path, flags | os.O_CLOEXEC))
        if writable and self._opened_to_write is not None:
            self._opened_to_write()
        elif not writable and self._opened is not None:
            self._opened(path, handle.descriptor)
        with self._lock:
            # Another thread may have been faster, or the path may lead to another file by now.
            faster = self._kept(key)
            if faster is None and drops == self._drops:
                self._handles[key] = handle
                if len(self._handles) > self._limit:
                    self._handles.popitem(last=False)
        return faster or handle

    def _kept(self, key: tuple[str, bool, bool]) -> _Handle | None:
        handle = self._handles.get(key)
        if handle is not None:
            self._handles.move_to_end(key)
        return handle


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
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def read_direct(descriptor: int, offset: int, view: memoryview) -> int:
    """Fill an aligned view from an aligned offset; bytes read.

    It stops behind the first piece that ends within a block, which is the last of the file, since a direct
    request cannot go on from there."""
    done = 0
    while done < len(view) and not done % ALIGNMENT:
        got = os.preadv(descriptor, [view[done : done + _DIRECT_MOST]], offset + done)
        if not got:
            break
        done += got
    return done


def write_direct(descriptor: int, offset: int, view: memoryview) -> int:
    """Write an aligned view at an aligned offset; bytes written, in whole blocks.

    It stops where the system wrote a part of a block: the caller writes the rest in another way."""
    done = 0
    while done < len(view) and not done % ALIGNMENT:
        done += os.pwrite(descriptor, view[done : done + _DIRECT_MOST], offset + done)
    return done - done % ALIGNMENT


_SAMPLES = 4
_FAILED = ctypes.c_void_p(-1).value


class Residency:
    """Asks the system (mincore) about a few pages of an extent. Thread-safe.

    A read with RWF_NOWAIT would tell as well, but it brings the page in that it misses, and starts to read
    ahead where the reads before it were in sequence: asking would change the answer to the next question."""

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
        another user that may not be written, about which the system says nothing."""
        if self._mincore is None or nbytes <= 0:
            return True
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        # Never touched, so that a file that is cut off meanwhile is none of its business.
        address = self._map(None, length, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, start)
        if address == _FAILED:  # a file system without mappings
            return True
        try:
            is_resident = self._sampled(address, -(-length // mmap.PAGESIZE))
        finally:
            self._unmap(address, length)
        # What lies behind the end is in no cache.
        return is_resident or os.fstat(descriptor).st_size < offset + nbytes

    def _sampled(self, address: int, num_pages: int) -> bool:
        assert self._mincore is not None
        flags = ctypes.create_string_buffer(1)
        samples = min(_SAMPLES, num_pages)
        cached = 0
        for sample in range(samples):
            page = sample * (num_pages - 1) // max(1, samples - 1)
            if self._mincore(address + page * mmap.PAGESIZE, 1, flags):
                return True
            cached += flags.raw[0] & 1
        return 2 * cached >= samples


_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""How a file system says that it has no direct I/O: when the file is opened, or only when it is used."""
_DIRECT_MOST = 4 << 20
_DIRECT_READ_MIN = 512 << 10
_DIRECT_WRITE_MIN = 1 << 20
BOUNCE_COUNT = 4
BOUNCE_NBYTES = 1 << 20
BOUNCE_BYTES = BOUNCE_COUNT * BOUNCE_NBYTES
"""The most memory that a store takes to write besides the caller's, however many threads write."""


class Extents:
    """Moves extents past the page cache where that pays. Thread-safe, also for one file.

    A direct read costs a tenth of the processor time of one through the cache, and leaves the cache to what
    will be read again; but of cached bytes it would fetch every one from the disk once more. Direct writes
    reach the disk at twice the speed of writes through the cache and a sync, for a tenth of the processor
    time."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._bounces = BufferPool(BOUNCE_COUNT, BOUNCE_NBYTES)
        self._can_direct = dict.fromkeys((False, True), hasattr(os, "O_DIRECT"))
        """To read, and to write."""

    @cached_property
    def _residency(self) -> Residency:
        # Made when it is asked: what it takes is a tenth of a millisecond, and most stores move no extents.
        return Residency()

    def close(self) -> None:
        self._bounces.clear()

    def read(
        self, path: str, offset: int, nbytes: int, buffer: memoryview, *, again: bool, like: int | None
    ) -> tuple[int, int]:
        """Position of the first byte in the buffer, and bytes read: fewer only at the end of the file."""
        if buffer.nbytes < buffer_nbytes(nbytes):
            raise ValueError(f"{buffer.nbytes} bytes of buffer are too few for {nbytes} to read")
        done = 0
        if not again and self._is_for_disk(path, offset, nbytes, buffer):
            before = offset % ALIGNMENT
            blocks = buffer[: round_up(before + nbytes)]
            moved = self._directly(path, False, lambda file: read_direct(file, offset - before, blocks))
            done = min(nbytes, max(0, moved - before))
        begin = (offset if done or like is None else like) % ALIGNMENT
        if done < nbytes:
            with self._files.borrow(path, writable=False) as descriptor:
                done += read_fully(descriptor, offset + done, buffer[begin + done : begin + nbytes])
        return begin, done

    def map(self, path: str, offset: int, nbytes: int, buffer: memoryview, maps: PageMaps) -> bool:
        """Map an extent over the begin of a buffer; False where it is not cached, or better copied."""
        if nbytes < MAP_LEAST:
            return False
        with self._files.borrow(path, writable=False) as descriptor:
            # Of a file that ends within its last page the rest of the page would be zeros, without a signal.
            is_whole = os.fstat(descriptor).st_size >= offset + nbytes
            is_cached = is_whole and self._residency.is_cached(descriptor, offset, nbytes)
            return is_cached and maps.map(descriptor, offset, nbytes, buffer)

    def write_in_place(self, path: str, offset: int, view: memoryview) -> None:
        """Write a view: directly if it consists of whole blocks where it lies, else through the cache."""
        is_whole = not offset % ALIGNMENT and not len(view) % ALIGNMENT
        if is_whole and len(view) >= _DIRECT_WRITE_MIN and lies_like(offset, view):
            self.write(path, offset, view)
        else:
            self._write_cached(path, offset, view)

    def write(self, path: str, offset: int, view: memoryview) -> None:
        """Write a view, its whole blocks directly, from a copy where its memory lies differently.

        A block that two writers share is an edge of both: it goes through the cache, where the two halves
        meet, and never directly, where the later would undo the earlier."""
        lead = -offset % ALIGNMENT
        inner = max(0, len(view) - lead) // ALIGNMENT * ALIGNMENT
        if inner < _DIRECT_WRITE_MIN or not self._can_direct[True]:
            self._write_cached(path, offset, view)
            return
        blocks = view[lead : lead + inner]
        # What is missing may be written once more.
        moved = self._directly(path, True, lambda file: self._write_blocks(file, offset + lead, blocks))
        self._write_cached(path, offset, view[:lead])
        self._write_cached(path, offset + lead + moved, view[lead + moved :])

    def _is_for_disk(self, path: str, offset: int, nbytes: int, buffer: memoryview) -> bool:
        if not self._can_direct[False] or nbytes < _DIRECT_READ_MIN or not lies_like(0, buffer):
            return False
        with self._files.borrow(path, writable=False) as descriptor:
            return not self._residency.is_cached(descriptor, offset, nbytes)

    def _directly(self, path: str, writable: bool, move: Callable[[int], int]) -> int:
        """Bytes that ``move`` has moved; 0 where the file system has no direct I/O, which is remembered."""
        try:
            with self._files.borrow(path, writable=writable, direct=True) as descriptor:
                return move(descriptor)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._can_direct[writable] = False
            return 0

    def _write_cached(self, path: str, offset: int, view: memoryview) -> None:
        with self._files.borrow(path, writable=True) as descriptor:
            write_fully(descriptor, offset, view)

    def _write_blocks(self, descriptor: int, offset: int, view: memoryview) -> int:
        if lies_like(offset, view):
            return write_direct(descriptor, offset, view)
        with self._bounces.borrow() as bounce:
            for start in range(0, len(view), len(bounce)):
                piece = view[start : start + len(bounce)]
                copy_bytes(piece, bounce)
                done = write_direct(descriptor, offset + start, bounce[: len(piece)])
                if done < len(piece):
                    return start + done
        return len(view)


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


_MAX_OPEN_FILES = 64

_Result = TypeVar("_Result")


class LocalStore:
    """Files below ``root``. Thread-safe; pickles as its root alone, without open files.

    Reads and writes that are refused for a moment are tried again, on files that are opened anew."""

    def __init__(
        self,
        root: Path,
        *,
        retry_policy: retry.RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
        guard: Callable[[], None] | None = None,
    ) -> None:
        """``expected`` are files as they must be when they are opened to be read; ``guard`` is called after a
        file was opened to be written to, and may raise."""
        self.root = root
        self._top = str(root)
        self._paths: dict[str, str] = {}
        self._retry_policy = retry_policy or retry.RetryPolicy()
        self._expected = {self.location(key): info for key, info in expected.items()}
        self._compared: set[str] = set()
        self._lost: dict[str, OSError] = {}
        self._open_files = OpenFiles(_MAX_OPEN_FILES, self._compare_opened if expected else None, guard)
        self._extents = Extents(self._open_files)
        self._copier = RangeCopier()

    def __getstate__(self) -> Path:
        return self.root

    def __setstate__(self, root: Path) -> None:
        self.__init__(root)  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open_files.close()
        self._extents.close()

    @property
    def is_far(self) -> bool:
        """A file system answers at once, or has its own ways to hide that it does not."""
        return False

    def location(self, key: str) -> str:
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = location_below(self._top, key)
        return path

    # Reading

    def files(self) -> tuple[FileInfo, ...]:
        """Every regular file below the root, sorted by key.

        Links to files count as the files they lead to (the Hub's cache is made of them); links to directories
        are not entered, so that no loop can occur; hidden directories are skipped.

        Raises CheckpointError: a directory cannot be listed."""
        return tuple(sorted(self._walk(self.root, ""), key=lambda info: info.key))

    def info(self, key: str) -> FileInfo | None:
        path = self.location(key)
        try:
            status = self._tried(lambda: os.stat(path), path, "looking")
        except OSError:
            return None
        return self._info(key, status) if stat.S_ISREG(status.st_mode) else None

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        return {key: self.info(key) for key in keys}

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        path, view = self.location(key), as_bytes(buffer)

        def read() -> int:
            with self._open_files.borrow(path, writable=False) as descriptor:
                return read_fully(descriptor, offset, view)

        self._check_end(self._read(read, path, offset), path, offset, buffer.nbytes)

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,
        like: int | None = None,
    ) -> int:
        """As ``ReadStore.read_extent``; long extents that are not in the page cache are read past it."""
        path, view = self.location(key), as_bytes(buffer)

        def read() -> tuple[int, int]:
            return self._extents.read(path, offset, nbytes, view, again=again, like=like)

        begin, done = self._read(read, path, offset)
        self._check_end(done, path, offset, nbytes)
        return begin

    def map_extent(
        self, key: str, offset: int, nbytes: int, buffer: memoryview, maps: PageMaps
    ) -> int | None:
        path = self.location(key)

        def map_pages() -> bool:
            return self._extents.map(path, offset, nbytes, as_bytes(buffer), maps)

        return offset % ALIGNMENT if self._read(map_pages, path, offset) else None

    def check_expected(self) -> None:
        for path in tuple(self._compared):
            # What is gone was whole when it was read or mapped; whoever wants more of it will say so.
            with suppress(OSError):
                self._compare(path, os.stat(path))

    # Writing

    def create(self, key: str, nbytes: int) -> None:
        path = self.location(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        with self._open_files.borrow(path, writable=True) as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                resize(descriptor, size, nbytes)
            except OSError as error:
                os.ftruncate(descriptor, size)
                raise retry.disk_space_error(path, nbytes - size, error) from error

    def write_at(self, key: str, offset: int, buffer: Buffer) -> None:
        path, view = self.location(key), as_bytes(buffer)
        self._write(lambda: self._extents.write_in_place(path, offset, view), path, offset, len(view))

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Write past the page cache where that can be.

        Where the buffer begins at the same byte of a block of ALIGNMENT as the file's range does, its whole
        blocks go to the disk from where they lie; otherwise they are copied first, through BOUNCE_BYTES."""
        path, view = self.location(key), as_bytes(buffer)
        self._write(lambda: self._extents.write(path, offset, view), path, offset, len(view))

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """Share blocks where ranges lie alike within them, or let a server copy by itself.

        Elsewhere the kernel would move the bytes through the page cache, which takes longer than
        ``read_extent`` and ``write_extent``."""
        lead, inner = inner_blocks(source_offset, offset, nbytes)
        if not inner or not isinstance(source, LocalStore):
            return 0
        origin_path = source.location(source_key)
        with (
            self._open_files.borrow(self.location(key), writable=True) as target,
            retry.reading(origin_path, source_offset),
            source._open_files.borrow(origin_path, writable=False) as origin,
        ):
            if not self._copier.copy_blocks(origin, source_offset + lead, target, offset + lead, inner):
                return 0
        for begin, end in ((0, lead), (lead + inner, nbytes)):
            self.write_at(key, offset + begin, source.read(source_key, source_offset + begin, end - begin))
        return nbytes

    def share(self, key: str, offset: int, *, with_key: str, with_offset: int, nbytes: int) -> int:
        with (
            self._open_files.borrow(self.location(with_key), writable=True) as source,
            self._open_files.borrow(self.location(key), writable=True) as target,
        ):
            return share_extents(source, with_offset, target, offset, nbytes)

    def sync(self, key: str) -> None:
        """Tried once: a system that failed at it forgets which bytes it has not written, and says that all is
        well when asked once more. So what was written to the file through this store counts as lost from then
        on. Raises DiskSpaceError: the file system has no room for what was written; TransientError: the
        storage failed, now or before."""
        path = self.location(key)
        if (before := self._lost.get(path)) is not None:
            if before.errno not in retry.TRANSIENT:
                raise retry.disk_space_error(path, 0, before) from before
            raise TransientError(f"{path}: bytes of it were lost while they were made durable. {retry.KEPT}")
        try:
            with self._open_files.borrow(path, writable=True) as descriptor:
                sync_data(descriptor)
        except OSError as error:
            self._lost[path] = error
            if error.errno in retry.TRANSIENT:
                raise TransientError(
                    f"{path}: not made durable: {retry.describe_error(error)}. {retry.KEPT}"
                ) from error
            raise retry.disk_space_error(path, 0, error) from error

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a file and return when that is durable."""
        path, view = self.location(key), memoryview(data)
        with self._open_files.borrow(path, writable=True) as descriptor:
            end = os.fstat(descriptor).st_size

        def write() -> None:
            with self._open_files.borrow(path, writable=True) as descriptor:
                write_fully(descriptor, end, view)

        self._write(write, path, end, len(data))
        self.sync(key)

    def sync_directory(self, key: str = ".") -> None:
        descriptor = os.open(self.location(key), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        source, target = self.location(old), self.location(new)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(source, target)
        self._open_files.forget(source)
        self._open_files.forget(target)

    def remove(self, key: str) -> None:
        path = self.location(key)
        Path(path).unlink(missing_ok=True)
        self._open_files.forget(path)

    def write_atomic(self, key: str, data: bytes) -> None:
        parent, name = os.path.split(PurePosixPath(key))
        part = str(PurePosixPath(parent) / f".{name}.{uuid.uuid4().hex[:12]}.part")
        try:
            self.create(part, len(data))
            self.write_at(part, 0, data)
            self.sync(part)
            self.rename(part, key)
        finally:
            self.remove(part)
        self.sync_directory(parent or ".")

    # What both need

    def _read(self, attempt: Callable[[], _Result], path: str, offset: int) -> _Result:
        try:
            return attempt()
        except OSError as error:
            with retry.reading(path, offset):
                return self._again(error, attempt, path, "reading", offset)

    def _check_end(self, done: int, path: str, offset: int, nbytes: int) -> None:
        if done < nbytes:
            there = os.stat(path).st_size
            raise CheckpointError(retry.ends_before(path, offset, length=nbytes, nbytes=there))

    def _write(self, attempt: Callable[[], None], path: str, offset: int, nbytes: int) -> None:
        try:
            attempt()
        except OSError as error:
            with retry.writing(path, nbytes):
                self._again(error, attempt, path, "writing", offset)

    def _tried(self, attempt: Callable[[], _Result], path: str, doing: str) -> _Result:
        try:
            return attempt()
        except OSError as error:
            return self._again(error, attempt, path, doing)

    def _again(
        self, error: OSError, attempt: Callable[[], _Result], path: str, doing: str, offset: int = 0
    ) -> _Result:
        """The result of a later attempt, on files that are opened anew, where the failure may pass."""
        forget = partial(self._open_files.forget, path)
        return self._retry_policy.retry(error, attempt, path=path, doing=doing, offset=offset, again=forget)

    def _walk(self, directory: Path, prefix: str) -> Iterator[FileInfo]:
        try:
            entries = self._tried(lambda: list(os.scandir(directory)), str(directory), "listing")
        except OSError as error:
            what, remedy = "there is no such directory.", "Check the path."
            if not isinstance(error, FileNotFoundError):
                what = f"cannot be listed: {error.strerror}."
                remedy = "Give the directory of a model that may be read."
            raise CheckpointError(Problem(str(directory), what, remedy)) from error
        for entry in sorted(entries, key=lambda entry: entry.name):
            key = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith("."):
                    yield from self._walk(directory / entry.name, key + "/")
            elif (status := regular_file(entry)) is not None:
                yield self._info(key, status)

    def _info(self, key: str, status: os.stat_result) -> FileInfo:
        return FileInfo(key, status.st_size, str(status.st_mtime_ns))

    def _compare_opened(self, path: str, descriptor: int) -> None:
        self._compare(path, os.fstat(descriptor))
        self._compared.add(path)

    def _compare(self, path: str, status: os.stat_result) -> None:
        expected = self._expected.get(path)
        if expected is not None and self._info(expected.key, status) != expected:
            raise CheckpointError(retry.changed(path))


def check_disk_space(place: Path, nbytes: int, *, what: str = "the output", option: str = "-o") -> None:
    """Raises OptionError: the file system below ``place``, which need not exist, has fewer bytes free."""
    free = shutil.disk_usage(nearest(place)).free
    if free < nbytes:
        lack = f"{what} takes {format_size(nbytes)}, and {format_size(free)} are free there."
        raise OptionError(Problem(str(place), lack, f"Free some space or choose another {option}."))


def nearest(path: Path) -> Path:
    """The path, or the closest place above it that exists."""
    while not path.exists():
        path = path.parent
    return path
