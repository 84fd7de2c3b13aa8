"""The work of a merge: segments of one plan."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from raymerge.device_numerics import return_free_memory
from raymerge.errors import IncompleteError, OptionError, Problem, TransientError
from raymerge.execute.ops import Jobs, Making
from raymerge.execute.output import UNFINISHED
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.merge_plan.memory import SMALLEST_LANE, Projection
from raymerge.merge_plan.plan import Ints, ints
from raymerge.merge_plan.tables import Plan
from raymerge.publish.attempt import MARK, RECORD, check_begun
from raymerge.storage.local.store import LocalStore, check_room
from raymerge.storage.objects.writer import ObjectInfo, ObjectStream, ObjectWriter
from raymerge.storage.open import open_store
from raymerge.storage.retry import KEPT, RetryPolicy
from raymerge.storage.store import FileInfo, ReadStore
from raymerge.storage.temporary import OwnDirectory


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """Everything that workers need to make segments, but their numbers."""

    plan: Plan
    roots: tuple[str, ...]
    """Place of each source, with its options."""
    staging: Path
    """Reachable from every worker."""
    projection: Projection
    threads: int
    """Segments that a worker computes at once."""
    files: tuple[SourceFile, ...] = ()
    mark: str = ""
    """Of the staging directory: workers write nothing to one with another mark. "" for any."""

    @property
    def slots(self) -> int:
        """One more than the projection's lanes: it takes a lane as soon as one is free."""
        return self.projection.lanes + 1

    @property
    def part(self) -> str:
        return "segment"

    @property
    def place(self) -> Path:
        return self.staging

    def reads(self) -> tuple[frozenset[int], ...]:
        return file_numbers(self.files, files_read(self.plan))

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of a lane's memory, for the segment alone."""
        shared = self.projection.shared
        had = self.projection.lane.budget + shared if budget is None else budget
        needs = (row.need.least_bytes for row in Jobs(self.plan).rows(number))
        least = max((SMALLEST_LANE, *needs)) + shared
        return max(least, had // 2) if had > least else None

    def open(self, device: torch.device, name: str) -> SegmentsRunner:
        patience = RetryPolicy()
        sources = [
            open_store(root, patience=patience, expected=self._expected(number))
            for number, root in enumerate(self.roots)
        ]
        guard = partial(check_begun, self.staging / RECORD, self.mark) if self.mark else None
        staging = LocalStore(self.staging, patience=patience, guard=guard)

        def runner(projection: Projection) -> SegmentRunner:
            return SegmentRunner(
                self.plan,
                sources,
                staging,
                device=device,
                projection=projection,
                threads=self.threads,
                name=name,
            )

        return SegmentsRunner(runner, self.projection, sources, staging, patience)

    def _expected(self, source: int) -> dict[str, FileInfo]:
        mine = (each for each in self.files if each.source == source and each.version)
        return {each.key: FileInfo(each.key, each.nbytes, each.version) for each in mine}


def file_numbers(
    files: Sequence[SourceFile], read: Iterable[Collection[tuple[int, str]]]
) -> tuple[frozenset[int], ...]:
    """Of each part, the positions in ``files`` of what it reads."""
    numbers = {(file.source, file.key): number for number, file in enumerate(files)}
    return tuple(frozenset(numbers[each] for each in part if each in numbers) for part in read)


class SegmentsRunner:
    """Makes segments, and holds their open stores."""

    def __init__(
        self,
        runner: Callable[[Projection], SegmentRunner],
        projection: Projection,
        sources: Sequence[ReadStore],
        staging: LocalStore,
        patience: RetryPolicy,
    ) -> None:
        """``runner`` gives what makes segments with so much memory; ``patience`` is for all stores."""
        self._runner = runner
        self._projection = projection
        self._sources = sources
        self._staging = staging
        self._patience = patience
        self._made_by = [runner(projection)]
        # Each lane computes on its own thread; torch's own threads would wait for each other at every step.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # Modules and the plan stay: the collector need not look through them again and again.
        gc.freeze()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        return self.settled(self.fitting(budget).run(number))

    def settled(self, receipt: Receipt) -> Receipt:
        """The result, with failures of storage; raises CheckpointError where it is useless."""
        # Of bytes that were read while a file was written to, there must be no receipt.
        for source in self._sources:
            source.check_expected()
        faults = self._patience.take_faults()
        return replace(receipt, retries=faults) if faults else receipt

    def fitting(self, budget: int | None) -> SegmentRunner:
        """What makes segments with so much memory, in this thread; None for the projection's."""
        # Libraries of linear algebra go by the number of the thread that calls them, and round by it.
        torch.set_num_threads(1)
        usual = self._made_by[0]
        if budget is None:
            return usual
        usual.rest()
        return_free_memory()
        self._made_by[1:] = [self._runner(replace(self._projection, budget=budget, lanes=1, peak=budget))]
        return self._made_by[1]

    def abort(self) -> None:
        """Let every segment in hand fail at its next tile."""
        self._patience.end()
        for each in self._made_by:
            each.abort()

    def close(self) -> None:
        gc.unfreeze()
        torch.set_num_threads(self._torch_threads)
        for store in (*self._sources, self._staging):
            store.close()


MOST_EARLY_BYTES = 32 << 20
"""Bytes of a shard that are kept at most until their place in it is reached."""


@dataclass(frozen=True, slots=True)
class ShardOrder:
    name: str
    nbytes: int
    header: bytes
    steps: tuple[tuple[int, tuple[Making, ...]], ...]
    """Numbers of segments in order, each with some of its rows, none of them twice."""
    early_bytes: int
    """Most bytes kept until their place is reached."""

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(segment for segment, _ in self.steps))

    def is_in(self, info: ObjectInfo | None, stamp: str) -> bool:
        """Whether an object is the finished shard, by its stamp: some stores change tags for equal bytes."""
        return info is not None and (info.nbytes, info.stamp) == (self.nbytes, stamp)


@dataclass(frozen=True, slots=True)
class _Rows:
    offset: list[int]
    nbytes: list[int]
    maker: list[int]
    """The row that writes each."""


def shard_orders(plan: Plan, *, most_early: int = MOST_EARLY_BYTES) -> tuple[ShardOrder, ...]:
    """How each shard is made, in the plan's order; ``most_early`` bytes may wait for their place."""
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
    """Of each shard, the files it is made of, by source index and key."""
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
        """The rows by segment; a new step begins where a row comes again."""
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
    """Checks that may end the making of a shard; each raises IncompleteError."""

    guard: Callable[[], None]
    """Called just before the store commits it: whether the place is still that of its run."""
    goes_on: Callable[[], None]
    """Called between pieces: whether the run goes on."""


class ShardSink:
    """Streams the bytes of one shard, nearly in order, and drops those of other shards.

    Used as a context: leaving the block before ``finish`` leaves nothing behind.
    """

    def __init__(self, writer: ObjectWriter, order: ShardOrder, *, stamp: str, checks: Checks) -> None:
        self._writer = writer
        self._order = order
        self._stamp = stamp
        self._checks = checks
        self._key = order.name + UNFINISHED
        self._stream: ObjectStream | None = None

    def __enter__(self) -> Self:
        self._begun().write(0, self._order.header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.abort()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        if key == self._key:
            self._checks.goes_on()
            self._begun().write(offset, buffer)

    def copy_range(self, key: str, offset: int, **_: Any) -> int:  # noqa: ARG002 - no file system has them
        return 0

    def sync(self, key: str) -> None:
        """Nothing is durable before ``finish``."""

    def finish(self) -> None:
        """Commit the shard, once it is whole; raises TransientError if another is there by now."""
        self._begun().finish()
        info = self._writer.info(self._order.name)
        if not self._order.is_in(info, self._stamp):
            raise TransientError(
                f"{self._writer.location(self._order.name)}: it was written, and now "
                f"{'nothing' if info is None else 'something else'} is there. {KEPT}"
            )

    def _begun(self) -> ObjectStream:
        if self._stream is None:
            name, nbytes = self._order.name, self._order.nbytes
            self._stream = self._writer.stream(name, nbytes, stamp=self._stamp, guard=self._checks.guard)
        return self._stream


class ScratchSink(ShardSink):
    """Writes the shard into a local file, which is uploaded when it is whole."""

    def __init__(
        self, writer: ObjectWriter, order: ShardOrder, *, stamp: str, checks: Checks, scratch: str
    ) -> None:
        super().__init__(writer, order, stamp=stamp, checks=checks)
        self._directory = OwnDirectory(scratch)
        self._store = LocalStore(self._directory.path)

    def __enter__(self) -> Self:
        self._store.create(self._key, self._order.nbytes)
        self._store.write_at(self._key, 0, self._order.header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._store.close()
            self._directory.remove()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        if key == self._key:
            self._store.write_extent(key, offset, buffer)

    def copy_range(self, key: str, offset: int, **from_source: Any) -> int:
        return self._store.copy_range(key, offset, **from_source) if key == self._key else 0

    def finish(self) -> None:
        size = self._order.nbytes
        for offset in range(0, size, _AT_ONCE):
            self._checks.goes_on()
            self._begun().write(offset, self._store.read(self._key, offset, min(_AT_ONCE, size - offset)))
        super().finish()


_MARK = f"{RECORD}/{MARK}"


@dataclass(frozen=True, slots=True)
class ShardWork:
    """Everything that workers need to make shards, but their numbers."""

    segments: SegmentWork
    """Its staging directory is the driver's own."""
    output: str
    """The output place, with its options."""
    scratch: str | None
    """Directory for a shard until it is uploaded; None for none."""
    orders: tuple[ShardOrder, ...]

    @property
    def slots(self) -> int:
        """One per lane: a shard is made from begin to end."""
        return self.segments.projection.lanes

    @property
    def part(self) -> str:
        return "shard"

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return self.segments.files

    @property
    def place(self) -> Path | None:
        """None: a worker finds out whether it reaches the output place when it takes up the work."""
        return None

    def reads(self) -> tuple[frozenset[int], ...]:
        return file_numbers(self.files, shard_reads(self.segments.plan, self.orders))

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of a lane's memory, or what the shard's segments need if that is more."""
        own = self.orders[number].segments
        found = [self.segments.lessened(segment, budget) for segment in own]
        wanted = [each for each in found if each is not None]
        return max(wanted) if len(wanted) == len(found) > 0 else None

    def open(self, device: torch.device, name: str) -> ShardsRunner:
        patience = RetryPolicy()
        writer, mark = ObjectWriter(self.output, patience=patience), self.segments.mark
        guard = partial(check_mark, writer, mark)
        guard()
        into: Callable[..., ShardSink] = partial(ShardSink, writer)
        if self.scratch is not None:
            self._check_scratch(Path(self.scratch))
            into = partial(ScratchSink, writer, scratch=self.scratch)
        segments = self.segments.open(device, name)
        return ShardsRunner(segments, self.orders, into, guard, mark, patience)

    def _check_scratch(self, scratch: Path) -> None:
        """Raises unless this machine takes files there, for as many shards as it makes at once."""
        try:
            OwnDirectory(str(scratch)).remove()
        except OSError as error:
            what = f"nothing can be written there: {error.strerror}."
            raise OptionError(Problem(str(scratch), what, "Choose another --scratch.")) from error
        largest = sorted((order.nbytes for order in self.orders), reverse=True)[: self.slots]
        what = f"what one worker keeps until it is uploaded ({len(largest)} at a time)"
        check_room(scratch, sum(largest), what=what, option="--scratch")


class ShardsRunner:
    """Makes shards, each from begin to end."""

    def __init__(
        self,
        segments: SegmentsRunner,
        orders: tuple[ShardOrder, ...],
        sink: Callable[..., ShardSink],
        guard: Callable[[], None],
        mark: str,
        patience: RetryPolicy,
    ) -> None:
        """``sink`` gives where a shard goes; ``guard`` raises where nothing may be written any more; ``mark``
        is that of the run's beginning; ``patience`` that with the output place.
        """
        self._segments = segments
        self._orders = orders
        self._sink = sink
        self._checks = Checks(guard, self._check_going)
        self._mark = mark
        self._patience = patience
        self._aborted = threading.Event()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Make one shard; its receipt has those of its segments, and the object's stamp.

        Raises TransientError for a passing failure of the store. An upload cannot go back: the pool has the
        shard made again, perhaps elsewhere.
        """
        runner = self._segments.fitting(budget)
        return runner.on_device(partial(self._made, runner, number))

    def abort(self) -> None:
        """Let every shard in hand fail at its next load, or at its next piece."""
        self._aborted.set()
        self._patience.end()
        self._segments.abort()

    def close(self) -> None:
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
    """A shard's stamp: equal for all that make the same bytes, under one mark on one kind of device. Where a
    GPU fails the device is the processor, which rounds otherwise.
    """
    return f"{mark}-{device}"


def check_mark(writer: ObjectWriter, mark: str) -> None:
    """Raises IncompleteError if the run that began with ``mark`` was replaced or published, TargetError if
    the place cannot be read; as ``check_begun`` for a directory.
    """
    found = writer.get(_MARK)
    if found is None or found[0].decode("ascii", "replace") != mark:
        raise IncompleteError(
            f"{writer.location('')}: this is no longer the run that the worker writes for; another began "
            "there, or it is published. The worker gives up."
        )


def joined(one: Receipt, other: Receipt) -> Receipt:
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
    """One receipt for a shard, without its segments' notes on rows."""
    found = list(receipts)
    last = found[-1] if found else Receipt(number, 0, 0, 0.0, "", {})
    sums: dict[str, Any] = {
        name: sum(asdict(each)[name] for each in found) for name in ("read_bytes", "written_bytes", "seconds")
    }
    return replace(last, segment=number, digests={}, encoding_errors={}, **sums)
