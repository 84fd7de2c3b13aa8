"""Protocols of places that hold files: bytes by key, at offsets; and ranges of them."""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, Self, TypeVar

from raymerge.storage.local.buffers import ALIGNMENT, buffer_nbytes
from raymerge.storage.local.mapping import PageMaps

Buffer = bytes | bytearray | memoryview
"""C-contiguous bytes to write (an array's memory, not a copy of it)."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    key: str
    nbytes: int
    version: str
    """Changes whenever the file is written again."""


NO_FILES: Mapping[str, FileInfo] = MappingProxyType({})


def is_key(key: object) -> bool:
    """Whether a value is a relative path that stays below the root."""
    if not isinstance(key, str) or not key or "\0" in key:
        return False
    return key[0] != "/" and ".." not in key.split("/")


def is_listed(key: str) -> bool:
    """Whether listings have a file of this path: none in hidden directories."""
    return is_key(key) and not any(part.startswith(".") for part in key.split("/")[:-1])


def location_below(top: str, key: str) -> str:
    """The full name of a key below the place ``top``. Raises ValueError: the key is empty, absolute or leads
    out of the place."""
    if not is_key(key):
        raise ValueError(f"{key!r} is not a key: it must be a relative path that stays below the root")
    # As text: pathlib takes longer than the system takes to read a page.
    path = posixpath.normpath(key)
    return top if path == "." else f"{top}/{path}"


class ReadStore(Protocol):
    """A place to read from. Every method is thread-safe."""

    @property
    def is_far(self) -> bool:
        """Whether requests go to a server: high latency, so several at once are faster."""

    def location(self, key: str) -> str:
        """The full name of ``key`` for messages."""

    def files(self) -> tuple[FileInfo, ...]:
        """Every file, sorted by key, without those in hidden directories."""

    def info(self, key: str) -> FileInfo | None:
        """None if there is no such file."""

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        """Several files in as few requests as possible."""

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """As ``read_into``."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole ``buffer`` from ``offset``. Raises UnreadableError: the file cannot be read;
        CheckpointError: it ends before the buffer is full, or is not the one expected; TransientError: the
        storage failed for longer than is waited."""

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
        """Read bytes into a page-aligned buffer of at least ``room_for(nbytes)`` bytes; its other bytes are
        undefined. ``again``: they will be read once more: cache them if possible. ``like``: offset in a file
        where they will be written. If it costs nothing, their position in a page equals that in a block of
        that file, so that they can be written without a copy. Returns position of the first byte in the
        buffer. Raises CheckpointError: as ``read_into`` does; ValueError: the buffer is too small."""

    def map_extent(
        self, key: str, offset: int, nbytes: int, buffer: memoryview, maps: PageMaps
    ) -> int | None:
        """``read_extent`` without a copy, into a buffer that ``maps`` watches and nobody writes to: cached
        pages of the file take the place of the buffer's. None where it is better read."""

    def check_expected(self) -> None:
        """Check that files read so far still have the expected versions, where reading does not check it.
        Raises CheckpointError: one was changed or replaced."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class UnmappedStore(ABC):
    """What ``ReadStore`` has beside ``read_into`` and ``close``, where files are never mapped."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.read_into(key, offset, memoryview(data))
        return bytes(data)

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,  # noqa: ARG002 - nothing is cached
        like: int | None = None,
    ) -> int:
        view = as_bytes(buffer)
        if view.nbytes < buffer_nbytes(nbytes):
            raise ValueError(f"{view.nbytes} bytes of buffer are too few for {nbytes} to read")
        begin = (offset if like is None else like) % ALIGNMENT
        self.read_into(key, offset, view[begin : begin + nbytes])
        return begin

    def map_extent(
        self,
        key: str,  # noqa: ARG002
        offset: int,  # noqa: ARG002
        nbytes: int,  # noqa: ARG002
        buffer: memoryview,  # noqa: ARG002
        maps: PageMaps,  # noqa: ARG002
    ) -> int | None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


class Sink(Protocol):
    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Write a large ``buffer`` at ``offset`` of a created file, at the speed of the storage."""

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """Let the filesystem copy or share bytes of another store, without moving them through this process.
        Returns ``nbytes`` if all are in the created file ``key``; else 0, and the range is undefined."""

    def sync(self, key: str) -> None:
        """Return once the file's bytes would survive a power cut."""


class WriteStore(ReadStore, Sink, Protocol):
    """A place that is also written at offsets, in any order and by several writers."""

    def create(self, key: str, nbytes: int) -> None:
        """Create a file of ``nbytes`` bytes with its space reserved; keep bytes that are already there.
        Raises DiskSpaceError: not enough room."""

    def write_at(self, key: str, offset: int, buffer: Buffer) -> None:
        """Write all of ``buffer``."""

    def share(self, key: str, offset: int, *, with_key: str, with_offset: int, nbytes: int) -> int:
        """Let two equal ranges share their storage if possible; the number of bytes that now do."""

    def sync_directory(self, key: str = ".") -> None:
        """Return once the names in the directory ``key`` would survive a power cut."""

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, replacing ``new``."""

    def remove(self, key: str) -> None:
        """Delete a file; a missing one is fine."""

    def write_atomic(self, key: str, data: bytes) -> None:
        """Write a small file durably; readers see the old bytes or the new, never a part."""


@dataclass(frozen=True, slots=True)
class Range:
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    offset: int
    nbytes: int
    members: tuple[int, ...]
    """Indices of its ranges in the given sequence, by offset."""


def coalesce(ranges: Sequence[Range], *, gap: int, limit: int) -> tuple[Extent, ...]:
    """Extents that hold every range once, in order of offset.

    Neighbours join when at most ``gap`` bytes lie between them and the extent stays within ``limit`` bytes; a
    range inside an extent always joins it. A single range above ``limit`` stays whole."""
    extents: list[Extent] = []
    members: list[int] = []
    start = end = 0
    for position in sorted(range(len(ranges)), key=lambda at: (ranges[at].offset, ranges[at].end)):
        piece = ranges[position]
        reach = max(end, piece.end)
        near = piece.offset - end <= gap and (reach == end or reach - start <= limit)
        if members and not near:
            extents.append(Extent(start, end - start, tuple(members)))
            members = []
        if not members:
            start, reach = piece.offset, piece.end
        members.append(position)
        end = reach
    return (*extents, Extent(start, end - start, tuple(members))) if members else ()


class InFile(Protocol):
    """Something small that lies in a file."""

    @property
    def key(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


_InFile = TypeVar("_InFile", bound=InFile)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_GAP, _SMALL = 64 << 10, 1 << 20
"""Bytes between what is one request, and of all that is, usually."""


def num_readers(store: ReadStore) -> int:
    """Requests to make at a time."""
    return 16 if store.is_far else 8


def map_reads(store: ReadStore, read: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """``read`` of each item; several at a time where the store is far."""
    if not store.is_far or len(items) < 2:
        return [read(item) for item in items]
    with ThreadPoolExecutor(min(num_readers(store), len(items))) as pool:
        return list(pool.map(read, items))


def read_together(
    store: ReadStore, stored: Sequence[_InFile], *, readers: int, limit: int = _SMALL, most: int | None = None
) -> Iterator[tuple[_InFile, memoryview]]:
    """Each with its bytes, file by file. What lies near each other is one request of at most ``limit`` bytes;
    ``readers`` are made at a time, and at most ``most`` in all."""
    by_key: dict[str, list[_InFile]] = {}
    for each in stored:
        by_key.setdefault(each.key, []).append(each)
    requests = [
        (extent, [own[member] for member in extent.members])
        for own in by_key.values()
        for extent in coalesce([Range(each.offset, each.nbytes) for each in own], gap=_GAP, limit=limit)
    ][:most]

    def read(request: tuple[Extent, Sequence[_InFile]]) -> memoryview:
        extent, members = request
        return memoryview(store.read(members[0].key, extent.offset, extent.nbytes))

    with ThreadPoolExecutor(readers) as pool:
        for first in range(0, len(requests), readers):
            some = requests[first : first + readers]
            for (extent, members), data in zip(some, pool.map(read, some), strict=True):
                for each in members:
                    begin = each.offset - extent.offset
                    yield each, data[begin : begin + each.nbytes]
