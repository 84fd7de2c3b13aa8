"""A directory of a POSIX file system as a store."""

from __future__ import annotations

import errno
import fcntl
import os
import posixpath
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType

from raymerge.errors import CheckpointError, OptionError, Problem
from raymerge.storage.copying import RangeCopier, inner_blocks
from raymerge.storage.extents import share_extents
from raymerge.storage.open_files import OpenFiles
from raymerge.storage.ranges import Range
from raymerge.storage.reading import ExtentReader
from raymerge.storage.store import Buffer, FileInfo, ReadStore
from raymerge.storage.transfers import read_fully, write_fully
from raymerge.storage.writing import ExtentWriter
from raymerge.units import format_size

_MAX_OPEN_FILES = 64
_OUT_OF_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV})


class LocalStore:
    """Files below ``root``. Thread-safe; pickles as its root alone, without open files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._top = str(root)
        self._open_files = OpenFiles(_MAX_OPEN_FILES)
        self._reader = ExtentReader(self._open_files)
        self._writer = ExtentWriter(self._open_files)
        self._copier = RangeCopier()

    def __getstate__(self) -> Path:
        return self.root

    def __setstate__(self, root: Path) -> None:
        self.__init__(root)  # type: ignore[misc]

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open; the store may be used again afterwards."""
        self._open_files.close()
        self._writer.close()

    def location(self, key: str) -> str:
        """The path of ``key``.

        Raises:
            ValueError: the key is empty, absolute or leads out of the root.
        """
        # As text: pathlib takes longer than the system takes to read a page.
        if not key or "\0" in key or key[0] == "/" or ".." in key.split("/"):
            raise ValueError(f"{key!r} is not a key: it must be a relative path that stays below the root")
        path = posixpath.normpath(key)
        # Never the root: what ".." leads to there, behind a link, is the system's to say.
        return self._top if path == "." else f"{self._top}{os.sep}{path}"

    # Reading

    def files(self) -> tuple[FileInfo, ...]:
        """Every regular file below the root, sorted by key.

        Links to files count as the files they lead to (the Hub's cache is made of them); links to
        directories are not entered, so that no loop can occur; hidden directories are skipped.

        Raises:
            CheckpointError: a directory cannot be listed.
        """
        return tuple(sorted(_walk(self.root, ""), key=lambda info: info.key))

    def info(self, key: str) -> FileInfo | None:
        """One file as it is now, without a look at the others; None where there is none."""
        try:
            status = os.stat(self.location(key))
        except OSError:
            return None
        regular = stat.S_ISREG(status.st_mode)
        return FileInfo(key, status.st_size, str(status.st_mtime_ns)) if regular else None

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``; raises as ``read_into`` does."""
        data = bytearray(nbytes)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole ``buffer`` from ``offset``.

        Raises:
            CheckpointError: the file cannot be read, or ends before the buffer is full.
        """
        path = self.location(key)
        with _reading(path, offset), self._open_files.borrow(path, writable=False) as descriptor:
            done = read_fully(descriptor, offset, _as_bytes(buffer))
        if done < buffer.nbytes:
            raise CheckpointError(_ends_early(path, offset, wanted=buffer.nbytes))

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
        """Read bytes into a page-aligned buffer of at least ``room_for(nbytes)`` bytes.

        Long extents that are not in the page cache are read past it, unless they are wanted ``again``.

        Returns:
            Position of the first byte in the buffer: ``like % ALIGNMENT`` where they came through the cache
            and it was given, else ``offset % ALIGNMENT``.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
            ValueError: the buffer is too small.
        """
        path = self.location(key)
        with _reading(path, offset):
            wanted, view = Range(offset, nbytes), _as_bytes(buffer)
            begin, done = self._reader.read(path, wanted, view, again=again, like=like)
        if done < nbytes:
            raise CheckpointError(_ends_early(path, offset, wanted=nbytes))
        return begin

    # Writing

    def create(self, key: str, nbytes: int) -> None:
        """Make a file of exactly ``nbytes`` bytes with its space reserved; bytes already there stay.

        Raises:
            OptionError: the file system has no room for it.
        """
        path = self.location(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        with self._open_files.borrow(path, writable=True) as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                _resize(descriptor, size, nbytes)
            except OSError as error:
                os.ftruncate(descriptor, size)
                raise _room_error(path, nbytes - size, error) from error

    def write_at(self, key: str, offset: int, buffer: Buffer) -> None:
        """Write all of ``buffer`` at ``offset`` of a created file.

        Raises:
            OptionError: the file system has no room for it.
        """
        path, view = self.location(key), _as_bytes(buffer)
        with _writing(path, len(view)):
            self._writer.write_in_place(path, offset, view)

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Write all of a large ``buffer`` at ``offset`` of a created file, past the page cache where it can.

        Where the buffer begins at the same byte of a block of ALIGNMENT as the file's range does, its whole
        blocks go to the disk from where they lie; otherwise they are copied first, through BOUNCE_BYTES.

        Raises:
            OptionError: the file system has no room for it.
        """
        path, view = self.location(key), _as_bytes(buffer)
        with _writing(path, len(view)):
            self._writer.write(path, offset, view)

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """Have the file system share or copy bytes of another store without moving them through this process.

        That happens on file systems whose files share blocks, for ranges that lie alike within blocks, and on
        servers that copy by themselves. Elsewhere the kernel would move the bytes through the page cache,
        which takes longer than ``read_extent`` and ``write_extent``.

        Returns:
            ``nbytes`` when all of them are in the created file ``key``; else 0, and then nothing is promised
            of the range.

        Raises:
            CheckpointError: the source cannot be read.
            OptionError: the file system has no room for it.
        """
        lead, inner = inner_blocks(source_offset, offset, nbytes)
        if not inner or not isinstance(source, LocalStore):
            return 0
        origin_path = source.location(source_key)
        with (
            self._open_files.borrow(self.location(key), writable=True) as target,
            _reading(origin_path, source_offset),
            source._open_files.borrow(origin_path, writable=False) as origin,
        ):
            if not self._copier.copy_blocks(origin, source_offset + lead, target, offset + lead, inner):
                return 0
        for begin, end in ((0, lead), (lead + inner, nbytes)):
            self.write_at(key, offset + begin, source.read(source_key, source_offset + begin, end - begin))
        return nbytes

    def share(self, key: str, offset: int, *, with_key: str, with_offset: int, nbytes: int) -> int:
        """Let a range of a created file share its storage with an equal range of another, where that can be.

        Returns:
            Bytes that share storage now; 0 where the filesystem cannot. What a reader sees never changes.
        """
        with (
            self._open_files.borrow(self.location(with_key), writable=True) as source,
            self._open_files.borrow(self.location(key), writable=True) as target,
        ):
            return share_extents(source, with_offset, target, offset, nbytes)

    def sync(self, key: str) -> None:
        """Return once the file's bytes would survive a power cut.

        Raises:
            OptionError: the file system has no room for what was written.
        """
        path = self.location(key)
        with _writing(path, 0), self._open_files.borrow(path, writable=True) as descriptor:
            _sync_data(descriptor)

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a file and return when that is durable.

        Raises:
            OptionError: the file system has no room for it.
        """
        path = self.location(key)
        with _writing(path, len(data)), self._open_files.borrow(path, writable=True) as descriptor:
            write_fully(descriptor, os.fstat(descriptor).st_size, memoryview(data))
            _sync_data(descriptor)

    def sync_directory(self, key: str = ".") -> None:
        """Return once the names in the directory ``key`` would survive a power cut."""
        descriptor = os.open(self.location(key), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file another key, replacing what was there, in one step."""
        source, target = self.location(old), self.location(new)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(source, target)
        self._open_files.forget(source)
        self._open_files.forget(target)

    def remove(self, key: str) -> None:
        """Delete a file; one that is not there is fine."""
        path = self.location(key)
        Path(path).unlink(missing_ok=True)
        self._open_files.forget(path)

    def write_atomic(self, key: str, data: bytes) -> None:
        """Write a small file durably: readers see the old bytes or the new, never a part.

        Raises:
            OptionError: the file system has no room for it.
        """
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


def _walk(directory: Path, prefix: str) -> Iterator[FileInfo]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        raise CheckpointError(_unlistable(directory, error)) from error
    for entry in entries:
        key = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith("."):
                yield from _walk(directory / entry.name, key + "/")
        elif (status := _regular_file(entry)) is not None:
            yield FileInfo(key, status.st_size, str(status.st_mtime_ns))


def _regular_file(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        status = entry.stat()
    except OSError:  # a link that leads nowhere; an index that names it says so better than we could
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _resize(descriptor: int, size: int, nbytes: int) -> None:
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


def _sync_data(descriptor: int) -> None:
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


def _room_error(path: str, wanted: int, error: OSError) -> OSError | OptionError:
    if error.errno not in _OUT_OF_ROOM:
        return error
    status = os.statvfs(os.path.dirname(path))
    free = status.f_bavail * status.f_frsize
    missing = max(0, wanted - free)
    lack = f"{missing} bytes ({format_size(missing)}) are missing" if missing else os.strerror(error.errno)
    what = f"cannot take {wanted} more bytes: the file system has {free} free, {lack}."
    return OptionError(Problem(path, what, "Free space there, or choose another output directory."))


@contextmanager
def _reading(path: str, offset: int) -> Iterator[None]:
    """Says of a failure which file could not be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(_unreadable(path, offset, error)) from error


@contextmanager
def _writing(path: str, nbytes: int) -> Iterator[None]:
    """Says of a full file system how much it lacks."""
    try:
        yield
    except OSError as error:
        raise _room_error(path, nbytes, error) from error


def _unreadable(path: str, offset: int, error: OSError) -> Problem:
    what = f"cannot be read at byte {offset}: {error.strerror}."
    return Problem(path, what, "Check that the file is there, whole and readable, then run again.")


def _ends_early(path: str, offset: int, *, wanted: int) -> Problem:
    what = f"ends at byte {os.stat(path).st_size}, but bytes {offset} to {offset + wanted} were wanted."
    return Problem(path, what, "The file is cut off or was changed meanwhile: download or copy it again.")


def _unlistable(directory: Path, error: OSError) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(str(directory), "there is no such directory.", "Check the path.")
    what = f"cannot be listed: {error.strerror}."
    return Problem(str(directory), what, "Give the directory of a model that may be read.")
