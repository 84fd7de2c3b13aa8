"""Where the bytes of a shard go that will be an object: into a stream at once, or first into a local file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from raymerge.errors import TransientError
from raymerge.execute.output import UNFINISHED
from raymerge.publish.shard_order import ShardOrder
from raymerge.storage.local.store import LocalStore
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.own_directory import OwnDirectory
from raymerge.storage.retry import KEPT
from raymerge.storage.store import ReadStore, Sink

_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True)
class Checks:
    """What may end the making of a shard from outside; each raises IncompleteError."""

    guard: Callable[[], None]
    """Called just before the store is to have it for good: whether the place is still that of its run."""
    goes_on: Callable[[], None]
    """Called between pieces: whether the run goes on."""


class ShardSink(Sink, Protocol):
    """Takes one shard. Used as a context, whatever leaves the block before ``finish`` leaves nothing."""

    def __enter__(self) -> ShardSink: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def finish(self) -> None:
        """Have the shard in the store, all of whose bytes were written."""


class StreamSink:
    """Passes bytes on as they come, nearly in order."""

    def __init__(self, writer: ObjectWriter, order: ShardOrder, *, stamp: str, checks: Checks) -> None:
        """
        Args:
            writer: of the output place.
            order: of the shard.
            stamp: what the object bears.
            checks: what may end it.
        """
        self._writer = writer
        self._order = order
        self._stamp = stamp
        self._checks = checks
        self._stream = writer.stream(order.name, order.nbytes, stamp=stamp, guard=checks.guard)

    def __enter__(self) -> StreamSink:
        self._stream.write(0, self._order.header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.abort()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Pass bytes on; those of other shards are dropped."""
        if key == self._order.name + UNFINISHED:
            self._checks.goes_on()
            self._stream.write(offset, buffer)

    def copy_range(
        self,
        key: str,  # noqa: ARG002
        offset: int,  # noqa: ARG002
        *,
        source: ReadStore,  # noqa: ARG002
        source_key: str,  # noqa: ARG002
        source_offset: int,  # noqa: ARG002
        nbytes: int,  # noqa: ARG002
    ) -> int:
        """0: no file system has the bytes."""
        return 0

    def sync(self, key: str) -> None:
        """Nothing is durable before all is."""

    def finish(self) -> None:
        """Complete the upload; see ``ShardSink.finish``."""
        self._stream.finish()
        _check_there(self._writer, self._order, self._stamp)


class ScratchSink:
    """Writes a file into a local directory, which is uploaded when it is whole."""

    def __init__(
        self, writer: ObjectWriter, order: ShardOrder, *, stamp: str, checks: Checks, scratch: str
    ) -> None:
        """
        Args:
            writer: of the output place.
            order: of the shard.
            stamp: what the object bears.
            checks: what may end it.
            scratch: the directory; it is made where it is not there.
        """
        self._writer = writer
        self._order = order
        self._stamp = stamp
        self._checks = checks
        self._directory = OwnDirectory(scratch)
        self._store = LocalStore(self._directory.path)
        self._key = order.name + UNFINISHED

    def __enter__(self) -> ScratchSink:
        self._store.create(self._key, self._order.nbytes)
        self._store.write_at(self._key, 0, self._order.header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()
        self._directory.remove()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        """Write bytes of the shard; those of others are dropped."""
        if key == self._key:
            self._store.write_extent(key, offset, buffer)

    def copy_range(
        self, key: str, offset: int, *, source: ReadStore, source_key: str, source_offset: int, nbytes: int
    ) -> int:
        """As ``LocalStore.copy_range``; none of what is dropped."""
        if key != self._key:
            return 0
        return self._store.copy_range(
            key, offset, source=source, source_key=source_key, source_offset=source_offset, nbytes=nbytes
        )

    def sync(self, key: str) -> None:
        """Nothing is durable before it is uploaded."""

    def finish(self) -> None:
        """Upload the file; see ``ShardSink.finish``."""
        name, size = self._order.name, self._order.nbytes
        with self._writer.stream(name, size, stamp=self._stamp, guard=self._checks.guard) as stream:
            for offset in range(0, size, _AT_ONCE):
                self._checks.goes_on()
                stream.write(offset, self._store.read(self._key, offset, min(_AT_ONCE, size - offset)))
            stream.finish()
        _check_there(self._writer, self._order, self._stamp)


def _check_there(writer: ObjectWriter, order: ShardOrder, stamp: str) -> None:
    """See that a shard is there that was just written; raises TransientError where another is by now."""
    info = writer.info(order.name)
    if info is None or info.nbytes != order.nbytes or info.stamp != stamp:
        raise TransientError(
            f"{writer.location(order.name)}: it was written, and now "
            f"{'nothing' if info is None else 'something else'} is there. {KEPT}"
        )
