"""What raymerge asks of a place that holds files: bytes by key, at offsets; and ranges of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

Buffer = bytes | bytearray | memoryview
"""C-contiguous bytes to write (an array's memory, not a copy of it)."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a store, as it is now."""

    key: str
    """Path relative to the store's root, with forward slashes."""
    nbytes: int
    version: str
    """Changes whenever the file is written again; two readings with equal versions saw one file."""


NO_FILES: Mapping[str, FileInfo] = MappingProxyType({})
"""Nothing that is expected of any file."""


def is_key(found: object) -> bool:
    """Whether something is a relative path that stays below the root."""
    if not isinstance(found, str) or not found or "\0" in found:
        return False
    return found[0] != "/" and ".." not in found.split("/")


class ReadStore(Protocol):
    """A place to read from. Every method may be called from many threads at once."""

    @property
    def is_far(self) -> bool:
        """Whether requests go to a server and take long to begin, so that several at once are quicker."""

    def location(self, key: str) -> str:
        """The full name of ``key``, for messages."""

    def files(self) -> tuple[FileInfo, ...]:
        """Every file, sorted by key; what lies in hidden directories is left out."""

    def info(self, key: str) -> FileInfo | None:
        """One file; None where there is none."""

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        """Several files, by as few requests as may be."""

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``; raises as ``read_into`` does."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole ``buffer`` from ``offset``.

        Raises:
            UnreadableError: the file cannot be read.
            CheckpointError: it ends before the buffer is full, or is not the one expected.
            TransientError: the storage failed for longer than is waited.
        """

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
        """Read bytes somewhere into a page-aligned buffer of at least ``room_for(nbytes)`` bytes.

        What the buffer holds besides them afterwards is not said.

        Args:
            again: whether they will be read once more, so that a store which can keep them at hand does.
            like: where in a file they will be written. If that costs nothing they begin in a page of memory
                where they will begin in a block of that file, and so can be written from where they lie.

        Returns:
            Position of the first byte in the buffer.

        Raises:
            CheckpointError: as ``read_into`` does.
            ValueError: the buffer is too small.
        """

    def check_expected(self) -> None:
        """See that the files which were read are still those that were expected, where reading did not.

        Raises:
            CheckpointError: one was written to meanwhile, or another took its place.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Sink(Protocol):
    """Where the finished bytes of shards go."""

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Write all of a large ``buffer`` at ``offset`` of a created file, at the speed of the storage."""

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """Have the file system copy or share bytes of another store without moving them through this process.

        Returns:
            ``nbytes`` when all of them are in the created file ``key``; else 0, and then nothing is promised
            of the range.
        """

    def sync(self, key: str) -> None:
        """Return once the file's bytes would survive a power cut."""


class WriteStore(ReadStore, Sink, Protocol):
    """A place that can also be written at offsets, in any order and by several writers."""

    def create(self, key: str, nbytes: int) -> None:
        """Make a file of ``nbytes`` bytes with its space reserved; bytes that are already there stay.

        Raises:
            RoomError: there is not enough room.
        """

    def write_at(self, key: str, offset: int, buffer: Buffer) -> None:
        """Write all of ``buffer`` at ``offset`` of a created file."""

    def share(self, key: str, offset: int, *, with_key: str, with_offset: int, nbytes: int) -> int:
        """Let two equal ranges share their storage where that can be; bytes that do so now."""

    def sync_directory(self, key: str = ".") -> None:
        """Return once the names in the directory ``key`` would survive a power cut."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another key, replacing what was there, in one step."""

    def remove(self, key: str) -> None:
        """Delete a file; one that is not there is fine."""

    def write_atomic(self, key: str, data: bytes) -> None:
        """Write a small file durably, so that a reader sees the old bytes or the new, never a part."""


@dataclass(frozen=True, slots=True)
class Range:
    """Some bytes of one file that are wanted."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes to read in one request, and the wanted ranges that lie in them."""

    offset: int
    """First byte."""
    nbytes: int
    members: tuple[int, ...]
    """Positions in the given sequence of the ranges it holds, by their offset."""


def coalesce(ranges: Sequence[Range], *, gap: int, limit: int) -> tuple[Extent, ...]:
    """Extents that hold every range once, in order of offset.

    Neighbours join when at most ``gap`` bytes lie between them and the extent stays within ``limit`` bytes;
    a range that lies wholly in an extent always joins it. A single range above ``limit`` stays whole.

    Raises:
        ValueError: a negative offset, size or gap, or a limit below one byte.
    """
    _check(ranges, gap, limit)
    extents: list[Extent] = []
    members: list[int] = []
    start = end = 0
    for position in sorted(range(len(ranges)), key=lambda at: (ranges[at].offset, ranges[at].end)):
        wanted = ranges[position]
        reach = max(end, wanted.end)
        near = wanted.offset - end <= gap and (reach == end or reach - start <= limit)
        if members and not near:
            extents.append(Extent(start, end - start, tuple(members)))
            members = []
        if not members:
            start, reach = wanted.offset, wanted.end
        members.append(position)
        end = reach
    return (*extents, Extent(start, end - start, tuple(members))) if members else ()


def _check(ranges: Sequence[Range], gap: int, limit: int) -> None:
    if gap < 0 or limit < 1:
        raise ValueError(f"gap must be 0 or more and limit 1 or more, not {gap} and {limit}")
    for wanted in ranges:
        if wanted.offset < 0 or wanted.nbytes < 0:
            raise ValueError(f"{wanted} has a negative offset or size")
