"""The work of a merge whose output is in an object store: whole shards of one plan.

How one shard is made by itself, from its first byte to its last, for a place that takes no other order.

In a plan, bytes that are equal are made once and written to all of their places, and codes are made together
with their scales. Here every shard has all of its bytes made for itself, and what would have to wait for too
long until its place is reached is made again when it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from raymerge.errors import IncompleteError, OptionError, Problem, TransientError
from raymerge.execute.ops import Making
from raymerge.execute.output import UNFINISHED
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.merge_plan.plan import Ints, ints
from raymerge.merge_plan.tables import Plan
from raymerge.publish.attempt import MARK, RECORD
from raymerge.publish.segment_work import SegmentsRunner, SegmentWork
from raymerge.storage.local.store import LocalStore, check_room
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.retry import KEPT, RetryPolicy
from raymerge.storage.store import ReadStore, Sink
from raymerge.storage.temporary import OwnDirectory

MOST_EARLY_BYTES = 32 << 20
"""Bytes of a shard that are kept at most until their place in it is reached."""


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """The making of one shard."""

    name: str
    """Its file name."""
    nbytes: int
    """Its size."""
    header: bytes
    """What it begins with."""
    steps: tuple[tuple[int, tuple[Making, ...]], ...]
    """What is made, in order: numbers of segments, each with some of its rows, none of them twice."""
    early_bytes: int
    """The most bytes that are kept until their place is reached."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of its segments."""
        return tuple(dict.fromkeys(segment for segment, _ in self.steps))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is wanted of a plan's rows."""

    offset: list[int]
    nbytes: list[int]
    maker: list[int]
    """The row that writes each."""


def shard_orders(plan: Plan, *, most_early: int = MOST_EARLY_BYTES) -> tuple[ShardOrder, ...]:
    """How each shard is made, in the plan's order.

    Args:
        plan: what is made.
        most_early: bytes that may be kept until their place is reached.
    """
    table = plan["rows"]
    rows = _Rows(ints(table, "offset").tolist(), ints(table, "nbytes").tolist(), _makers(plan).tolist())
    by_shard: dict[int, list[tuple[int, int, int]]] = {}
    spans = (ints(plan["segments"], name).tolist() for name in ("first_row", "num_rows", "shard"))
    for segment, (first, count, shard) in enumerate(zip(*spans, strict=True)):
        by_shard.setdefault(shard, []).append((segment, first, count))
    found = []
    for number, shard in enumerate(plan["shards"].to_pylist()):
        queue = _Queue(rows, by_shard.get(number, ()), most_early)
        steps = tuple(queue.steps())
        found.append(ShardOrder(shard["name"], shard["nbytes"], shard["header"], steps, queue.most_kept))
    return tuple(found)


def shard_reads(plan: Plan, orders: Sequence[ShardOrder]) -> tuple[frozenset[tuple[int, str]], ...]:
    """Of each shard the files that it is made of, by the source's index and the key."""
    read = files_read(plan)
    firsts = ints(plan["segments"], "first_row")
    found = []
    for order in orders:
        rows = np.asarray([row for _, makings in order.steps for row, _ in makings], dtype=np.int64)
        # Of a row that belongs to another shard, all files of its segment: that is where it is made.
        makers = np.unique(np.searchsorted(firsts, rows, side="right") - 1).tolist()
        found.append(frozenset[tuple[int, str]]().union(*(read[segment] for segment in makers)))
    return tuple(found)


def _makers(plan: Plan) -> Ints:
    """The row that writes each row."""
    copy_of, made_with = ints(plan["rows"], "copy_of"), ints(plan["rows"], "made_with")
    first = np.where(copy_of >= 0, copy_of, np.arange(len(copy_of)))
    return np.where(made_with[first] >= 0, made_with[first], first)


class _Queue:
    """The rows of one shard on their way into it."""

    def __init__(self, rows: _Rows, own: Sequence[tuple[int, int, int]], most: int) -> None:
        self._rows = rows
        self._own = own
        self._most = most
        self._with: dict[int, list[int]] = {}
        for _, first, count in own:
            for row in range(first, first + count):
                self._with.setdefault(rows.maker[row], []).append(row)
        self._done: set[int] = set()
        self._kept: dict[int, int] = {}
        self._kept_bytes = 0
        self.most_kept = 0
        """The most bytes that were kept so far."""

    def steps(self) -> Iterator[tuple[int, tuple[Making, ...]]]:
        """What is made, segment by segment; where a row comes again, another step begins."""
        for segment, first, count in self._own:
            makings: dict[int, Making] = {}
            is_first = True
            for row in range(first, first + count):
                if row in self._done:
                    continue
                maker = self._rows.maker[row]
                if maker in makings:
                    yield segment, tuple(makings.values())
                    makings, is_first = {}, False
                makings[maker] = (maker, self._made(row))
            if makings or is_first:
                yield segment, tuple(makings.values())

    def _made(self, row: int) -> tuple[int, ...]:
        """A row whose place is reached, and what is made with it and kept."""
        offsets, sizes = self._rows.offset, self._rows.nbytes
        chosen = [row]
        for other in self._with[self._rows.maker[row]]:
            is_open = other != row and other not in self._done
            if is_open and self._kept_bytes + sizes[other] <= self._most:
                chosen.append(other)
                self._keep(offsets[other], sizes[other])
        self._done.update(chosen)
        at = offsets[row] + sizes[row]
        while (nbytes := self._kept.pop(at, 0)) > 0:
            at, self._kept_bytes = at + nbytes, self._kept_bytes - nbytes
        return tuple(chosen)

    def _keep(self, offset: int, nbytes: int) -> None:
        if nbytes:
            self._kept[offset] = nbytes
            self._kept_bytes += nbytes
            self.most_kept = max(self.most_kept, self._kept_bytes)


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


_MARK = f"{RECORD}/{MARK}"


class MakeSink(Protocol):
    """Gives what takes one shard."""

    def __call__(self, order: ShardOrder, *, stamp: str, checks: Checks) -> ShardSink:
        """A sink for the shard of ``order``, whose object bears ``stamp``."""


@dataclass(frozen=True, slots=True)
class ShardWork:
    """Everything that workers need to make shards, but their numbers."""

    segments: SegmentWork
    """How segments are made; its staging directory is the driver's own."""
    output: str
    """The output place, with its options."""
    scratch: str | None
    """Directory where a shard is until it is uploaded; None: nowhere."""
    orders: tuple[ShardOrder, ...]
    """How each shard is made."""

    @property
    def slots(self) -> int:
        """One for each lane: a shard is made from its begin to its end."""
        return self.segments.projection.lanes

    @property
    def part(self) -> str:
        """A shard."""
        return "shard"

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The sources' files."""
        return self.segments.files

    @property
    def place(self) -> Path | None:
        """None: whether a worker reaches the output place, it finds out when it takes up the work."""
        return None

    def reads(self) -> tuple[frozenset[int], ...]:
        """Of every shard, the files that it is made of."""
        numbers = {(file.source, file.key): number for number, file in enumerate(self.files)}
        read = shard_reads(self.segments.plan, self.orders)
        return tuple(frozenset(numbers[file] for file in files) for files in read)

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of what a lane had, or what the shard's segments need if that is more."""
        own = self.orders[number].segments
        found = [self.segments.lessened(segment, budget) for segment in own]
        wanted = [each for each in found if each is not None]
        return max(wanted) if len(wanted) == len(found) > 0 else None

    def open(self, device: torch.device, name: str) -> ShardsRunner:
        """A runner over the sources and the output place, which it must reach."""
        patience = RetryPolicy()
        writer, mark = ObjectWriter(self.output, patience=patience), self.segments.mark
        guard = partial(check_mark, writer, mark)
        guard()
        into: MakeSink = partial(StreamSink, writer)
        if self.scratch is not None:
            self._check_scratch(Path(self.scratch))
            into = partial(ScratchSink, writer, scratch=self.scratch)
        segments = self.segments.open(device, name)
        return ShardsRunner(segments, self.orders, into, guard, mark, patience)

    def _check_scratch(self, scratch: Path) -> None:
        """See that this machine takes files there, and as many shards as it makes at the same time."""
        try:
            OwnDirectory(str(scratch)).remove()
        except OSError as error:
            what = f"nothing can be written there: {error.strerror}."
            raise OptionError(Problem(str(scratch), what, "Choose another --scratch.")) from error
        largest = sorted((order.nbytes for order in self.orders), reverse=True)[: self.slots]
        what = f"what one worker keeps until it is uploaded ({len(largest)} at a time)"
        check_room(scratch, sum(largest), what=what, option="--scratch")


class ShardsRunner:
    """Makes shards, each from its begin to its end."""

    def __init__(
        self,
        segments: SegmentsRunner,
        orders: tuple[ShardOrder, ...],
        sink: MakeSink,
        guard: Callable[[], None],
        mark: str,
        patience: RetryPolicy,
    ) -> None:
        """
        Args:
            segments: makes segments.
            orders: how each shard is made.
            sink: where one goes.
            guard: raises where nothing more is to be written.
            mark: of the run's beginning.
            patience: with the output place.
        """
        self._segments = segments
        self._orders = orders
        self._sink = sink
        self._checks = Checks(guard, self._check_going)
        self._mark = mark
        self._patience = patience
        self._aborted = threading.Event()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Make one shard; its receipt has those of its segments, and what the object bears.

        Raises:
            TransientError: the store failed for a while. An upload cannot go back: the pool has the shard
                made once more, as any part, perhaps elsewhere.
        """
        runner = self._segments.fitting(budget)
        return runner.on_device(partial(self._made, runner, number))

    def abort(self) -> None:
        """Have every shard in hand fail at its next load, or at the next piece that it passes on."""
        self._aborted.set()
        self._patience.end()
        self._segments.abort()

    def close(self) -> None:
        """Close the files."""
        self._segments.close()

    def _made(self, runner: SegmentRunner, number: int, device: torch.device, note: str) -> Receipt:
        order = self._orders[number]
        stamp = stamp_of(self._mark, device.type)
        made: dict[int, Receipt] = {}
        with self._sink(order, stamp=stamp, checks=self._checks) as sink:
            for segment, makings in order.steps:
                receipt = runner.made(segment, device, note, sink=sink, makings=makings)
                made[segment] = joined(made[segment], receipt) if segment in made else receipt
            # Before anybody can see it: a source may have been changed meanwhile.
            whole = self._segments.settled(_whole(number, made.values()))
            sink.finish()
        report = {"receipts": [each.to_json() for each in made.values()], "stamp": stamp}
        return replace(whole, report=report)

    def _check_going(self) -> None:
        if self._aborted.is_set():
            raise IncompleteError("the shard was given up, since the run ends.")


def stamp_of(mark: str, device: str) -> str:
    """What a shard bears: all that made it under one mark on one kind of device made the same bytes.

    Args:
        mark: of the run's beginning.
        device: kind of device that it was made on. Where a GPU fails that is the processor, which rounds
            otherwise.
    """
    return f"{mark}-{device}"


def check_mark(writer: ObjectWriter, mark: str) -> None:
    """See that a run is still the one that was begun with ``mark``; as ``check_begun`` for a directory.

    Raises:
        IncompleteError: another began, or it is published.
        TargetError: the place cannot be looked at.
    """
    found = writer.get(_MARK)
    if found is None or found[0].decode("ascii", "replace") != mark:
        raise IncompleteError(
            f"{writer.location('')}: this is no longer the run that the worker writes for; another began "
            "there, or it is published. The worker gives up."
        )


def joined(one: Receipt, other: Receipt) -> Receipt:
    """The receipt of a segment that was made in two steps."""
    return replace(
        one,
        read_bytes=one.read_bytes + other.read_bytes,
        written_bytes=one.written_bytes + other.written_bytes,
        seconds=round(one.seconds + other.seconds, 6),
        digests={**one.digests, **other.digests},
        encoding_errors={**one.encoding_errors, **other.encoding_errors},
        peak_rss=max(one.peak_rss, other.peak_rss),
        peak_device=max(one.peak_device, other.peak_device),
    )


def _whole(number: int, receipts: Iterable[Receipt]) -> Receipt:
    """One receipt for a shard, without what those of its segments say of rows."""
    found = list(receipts)
    last = found[-1] if found else Receipt(number, 0, 0, 0.0, "", {})
    sums: dict[str, Any] = {
        name: sum(asdict(each)[name] for each in found) for name in ("read_bytes", "written_bytes", "seconds")
    }
    return replace(last, segment=number, digests={}, encoding_errors={}, **sums)
