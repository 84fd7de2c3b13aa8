"""A directory of a POSIX file system as a store."""

from __future__ import annotations

import errno
import fcntl
import os
import posixpath
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self, TypeVar

from raymerge.errors import CheckpointError, OptionError, Problem, TransientError
from raymerge.storage.local.copying import RangeCopier, inner_blocks, share_extents
from raymerge.storage.local.direct_io import (
    ExtentReader,
    ExtentWriter,
    OpenFiles,
    as_bytes,
    read_fully,
    write_fully,
)
from raymerge.storage.retry import (
    KEPT,
    TRANSIENT,
    RetryPolicy,
    changed,
    ends_early,
    reading,
    room_error,
    said,
    unlistable,
    writing,
)
from raymerge.storage.store import NO_FILES, Buffer, FileInfo, Range, ReadStore, is_key
from raymerge.units import format_size

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

    Reads and writes that are refused for a moment are tried again, on files that are opened anew.
    """

    def __init__(
        self,
        root: Path,
        *,
        patience: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
        guard: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            expected: files as they must be when they are opened to be read; others may be as they like.
            guard: called after a file was opened to be written to; may raise.
        """
        self.root = root
        self._top = str(root)
        self._patience = patience or RetryPolicy()
        self._expected = {self.location(key): info for key, info in expected.items()}
        self._met: set[str] = set()
        self._lost: set[str] = set()
        self._open_files = OpenFiles(_MAX_OPEN_FILES, self._look_at if expected else None, guard)
        self._reader = ExtentReader(self._open_files)
        self._writer = ExtentWriter(self._open_files)
        self._copier = RangeCopier()

    def __getstate__(self) -> Path:
        return self.root

    def __setstate__(self, root: Path) -> None:
        self.__init__(root)  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._open_files.close()
        self._writer.close()

    @property
    def is_far(self) -> bool:
        """A file system answers at once, or has its own ways to hide that it does not."""
        return False

    def location(self, key: str) -> str:
        """The path of ``key``.

        Raises:
            ValueError: the key is empty, absolute or leads out of the root.
        """
        # As text: pathlib takes longer than the system takes to read a page.
        if not is_key(key):
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

        with reading(path, offset):
            done = self._tried(read, path, "reading", offset)
        if done < buffer.nbytes:
            raise CheckpointError(ends_early(path, offset, wanted=buffer.nbytes))

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
            CheckpointError: as ``read_into`` does.
            TransientError: as ``read_into`` does.
            ValueError: the buffer is too small.
        """
        path, wanted, view = self.location(key), Range(offset, nbytes), as_bytes(buffer)

        def read() -> tuple[int, int]:
            return self._reader.read(path, wanted, view, again=again, like=like)

        with reading(path, offset):
            begin, done = self._tried(read, path, "reading", offset)
        if done < nbytes:
            raise CheckpointError(ends_early(path, offset, wanted=nbytes))
        return begin

    def check_expected(self) -> None:
        for path in tuple(self._met):
            # What is gone was read whole all the same; whoever wants more of it will say so.
            with suppress(OSError):
                self._compare(path, os.stat(path))

    # Writing

    def create(self, key: str, nbytes: int) -> None:
        """Make a file of exactly ``nbytes`` bytes with its space reserved; bytes already there stay."""
        path = self.location(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        with self._open_files.borrow(path, writable=True) as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                resize(descriptor, size, nbytes)
            except OSError as error:
                os.ftruncate(descriptor, size)
                raise room_error(path, nbytes - size, error) from error

    def write_at(self, key: str, offset: int, buffer: Buffer) -> None:
        """Write all of ``buffer`` at ``offset`` of a created file."""
        path, view = self.location(key), as_bytes(buffer)
        with writing(path, len(view)):
            self._tried(lambda: self._writer.write_in_place(path, offset, view), path, "writing", offset)

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Write all of a large ``buffer`` at ``offset`` of a created file, past the page cache where it can.

        Where the buffer begins at the same byte of a block of ALIGNMENT as the file's range does, its whole
        blocks go to the disk from where they lie; otherwise they are copied first, through BOUNCE_BYTES.

        Raises:
            RoomError: the file system has no room for it.
            TransientError: the storage failed for longer than is waited.
        """
        path, view = self.location(key), as_bytes(buffer)
        with writing(path, len(view)):
            self._tried(lambda: self._writer.write(path, offset, view), path, "writing", offset)

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
            RoomError: the file system has no room for it.
        """
        lead, inner = inner_blocks(source_offset, offset, nbytes)
        if not inner or not isinstance(source, LocalStore):
            return 0
        origin_path = source.location(source_key)
        with (
            self._open_files.borrow(self.location(key), writable=True) as target,
            reading(origin_path, source_offset),
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

        It is not tried again: a system that failed at it forgets which bytes it has not written, and says
        that all is well when asked once more. So what was written to the file through this store counts as
        lost from then on.

        Raises:
            RoomError: the file system has no room for what was written.
            TransientError: the storage failed, now or before.
        """
        path = self.location(key)
        if path in self._lost:
            raise TransientError(f"{path}: bytes of it were lost while they were made durable. {KEPT}")
        try:
            with writing(path, 0), self._open_files.borrow(path, writable=True) as descriptor:
                sync_data(descriptor)
        except Exception as error:
            self._lost.add(path)
            if isinstance(error, OSError) and error.errno in TRANSIENT:
                raise TransientError(f"{path}: not made durable: {said(error)}. {KEPT}") from error
            raise

    def append(self, key: str, data: bytes) -> None:
        """Add to the end of a file and return when that is durable.

        Raises:
            RoomError: the file system has no room for it.
            TransientError: the storage failed for longer than is waited.
        """
        path, view = self.location(key), memoryview(data)
        with self._open_files.borrow(path, writable=True) as descriptor:
            end = os.fstat(descriptor).st_size

        def write() -> None:
            with self._open_files.borrow(path, writable=True) as descriptor:
                write_fully(descriptor, end, view)

        with writing(path, len(data)):
            self._tried(write, path, "writing", end)
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
        """Write a small file durably: readers see the old bytes or the new, never a part."""
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

    def _tried(self, attempt: Callable[[], _Result], path: str, doing: str, offset: int = 0) -> _Result:
        """The result of an attempt, or of a later one where the storage fails for a moment."""
        forget = self._open_files.forget
        return self._patience.have(attempt, path=path, doing=doing, offset=offset, again=forget)

    def _walk(self, directory: Path, prefix: str) -> Iterator[FileInfo]:
        try:
            entries = self._tried(lambda: list(os.scandir(directory)), str(directory), "listing")
        except OSError as error:
            raise CheckpointError(unlistable(directory, error)) from error
        for entry in sorted(entries, key=lambda entry: entry.name):
            key = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith("."):
                    yield from self._walk(directory / entry.name, key + "/")
            elif (status := regular_file(entry)) is not None:
                yield self._info(key, status)

    def _info(self, key: str, status: os.stat_result) -> FileInfo:
        return FileInfo(key, status.st_size, str(status.st_mtime_ns))

    def _look_at(self, path: str, descriptor: int) -> None:
        """See that a file which was opened is the one expected."""
        self._compare(path, os.fstat(descriptor))
        self._met.add(path)

    def _compare(self, path: str, status: os.stat_result) -> None:
        wanted = self._expected.get(path)
        if wanted is not None and self._info(wanted.key, status) != wanted:
            raise CheckpointError(changed(path))


def check_room(place: Path, wanted: int, *, what: str = "the output", option: str = "-o") -> None:
    """See that the file system below ``place`` takes so many bytes.

    Args:
        place: need not exist.

    Raises:
        OptionError: it has less room.
    """
    free = shutil.disk_usage(nearest(place)).free
    if free < wanted:
        raise OptionError(
            Problem(
                str(place),
                f"{what} takes {format_size(wanted)}, and {format_size(free)} are free there.",
                f"Free some space or choose another {option}.",
            )
        )


def nearest(path: Path) -> Path:
    """The path, or the closest place above it that exists."""
    while not path.exists():
        path = path.parent
    return path
