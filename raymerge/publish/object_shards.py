"""Shards of an object store, each made by one worker from begin to end, and committed as one object."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from raymerge.deferred import torch
from raymerge.errors import IncompleteError, OptionError, Problem, TransientError, VerificationError
from raymerge.events import OnEvent, PartInHand, ShardDone
from raymerge.execute.receipts import UNFINISHED, JointReceipt, Receipt
from raymerge.merge_plan.files_read import SourceFile
from raymerge.merge_plan.jobs import Making
from raymerge.merge_plan.joint import joint_costs
from raymerge.merge_plan.memory import Projection
from raymerge.merge_plan.plan import ints, makers
from raymerge.merge_plan.tables import Plan
from raymerge.publish.record import ATTEMPT, RECORD, Ledger
from raymerge.publish.shards import JointWork, SegmentsRunner, SegmentWork
from raymerge.storage.local.store import LocalStore, check_disk_space
from raymerge.storage.objects.writer import ObjectInfo, ObjectStream, ObjectWriter, stream_bytes
from raymerge.storage.retry import KEPT, RetryPolicy
from raymerge.storage.temporary import OwnDirectory

if TYPE_CHECKING:
    from raymerge.execute.segment import SegmentRunner

MOST_EARLY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ShardOrder:
    name: str
    nbytes: int
    header: bytes
    steps: tuple[tuple[int, tuple[Making, ...]], ...]
    """Numbers of segments in order, each with some of its ops, none of them twice."""
    early_bytes: int
    """Most bytes kept until their place is reached."""

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(segment for segment, _ in self.steps))

    def is_in(self, info: ObjectInfo | None, stamp: str) -> bool:
        """Whether an object is the finished shard, by its stamp: some stores change tags for equal bytes."""
        return info is not None and (info.nbytes, info.stamp) == (self.nbytes, stamp)


def shard_orders(plan: Plan, *, most_early: int = MOST_EARLY_BYTES) -> tuple[ShardOrder, ...]:
    """How each shard is made, in the plan's order; ``most_early`` bytes may wait for their place."""
    table = plan["ops"]
    made_by = makers(plan).tolist()
    offsets, sizes = ints(table, "offset").tolist(), ints(table, "nbytes").tolist()
    by_shard: dict[int, list[tuple[int, int, int]]] = {}
    spans = (ints(plan["segments"], name).tolist() for name in ("first_op", "num_ops", "shard"))
    for segment, (begin, count, shard) in enumerate(zip(*spans, strict=True)):
        by_shard.setdefault(shard, []).append((segment, begin, count))
    orders = []
    for number, shard in enumerate(plan["shards"].to_pylist()):
        queue = _Queue(offsets, sizes, made_by, by_shard.get(number, ()), most_early)
        steps = tuple(queue.steps())
        orders.append(ShardOrder(shard["name"], shard["nbytes"], shard["header"], steps, queue.most_kept))
    return tuple(orders)


def upload_bytes(orders: Sequence[ShardOrder], scratch: str | None) -> int:
    """Bytes of memory that a lane takes beside its result to upload any of these shards."""
    early = 0 if scratch is not None else 1
    return max((early * each.early_bytes + stream_bytes(each.nbytes) for each in orders), default=0)


def segments_read(plan: Plan, orders: Sequence[ShardOrder]) -> Iterator[list[int]]:
    """Of each shard, the segments whose files it is made of."""
    firsts = ints(plan["segments"], "first_op")
    for order in orders:
        ops = np.asarray([op for _, makings in order.steps for op, _ in makings], dtype=np.int64)
        # Of an op that belongs to another shard, all files of its segment: that is where it is made.
        yield np.unique(np.searchsorted(firsts, ops, side="right") - 1).tolist()


class _Queue:
    def __init__(
        self,
        offsets: list[int],
        sizes: list[int],
        makers: list[int],
        own: Sequence[tuple[int, int, int]],
        most: int,
    ) -> None:
        self._offsets, self._sizes, self._makers = offsets, sizes, makers
        self._own = own
        self._most = most
        self._with: dict[int, list[int]] = {}
        for _, first, count in own:
            for op in range(first, first + count):
                self._with.setdefault(makers[op], []).append(op)
        self._done: set[int] = set()
        self._kept: dict[int, int] = {}
        self._kept_bytes = 0
        self.most_kept = 0

    def steps(self) -> Iterator[tuple[int, tuple[Making, ...]]]:
        """The ops by segment; a new step begins where an op comes again."""
        for segment, first, count in self._own:
            makings: dict[int, Making] = {}
            is_first = True
            for op in range(first, first + count):
                if op in self._done:
                    continue
                maker = self._makers[op]
                if maker in makings:
                    yield segment, tuple(makings.values())
                    makings, is_first = {}, False
                makings[maker] = (maker, self._made(op))
            if makings or is_first:
                yield segment, tuple(makings.values())

    def _made(self, op: int) -> tuple[int, ...]:
        """An op whose place is reached, and what is made with it and kept."""
        offsets, sizes = self._offsets, self._sizes
        chosen = [op]
        for other in self._with[self._makers[op]]:
            is_open = other != op and other not in self._done
            if is_open and self._kept_bytes + sizes[other] <= self._most:
                chosen.append(other)
                self._keep(offsets[other], sizes[other])
        self._done.update(chosen)
        at = offsets[op] + sizes[op]
        while (nbytes := self._kept.pop(at, 0)) > 0:
            at, self._kept_bytes = at + nbytes, self._kept_bytes - nbytes
        return tuple(chosen)

    def _keep(self, offset: int, nbytes: int) -> None:
        if nbytes:
            self._kept[offset] = nbytes
            self._kept_bytes += nbytes
            self.most_kept = max(self.most_kept, self._kept_bytes)


_AT_ONCE = 4 << 20


class ShardSink:
    """Streams the bytes of one shard, nearly in order, and drops those of other shards.

    Used as a context: leaving the block before ``finish`` leaves nothing behind. ``guard`` is called just
    before the store commits it, ``goes_on`` between pieces; each raises IncompleteError where the shard is to
    be given up: the place is no longer that of its run, or the run ends."""

    def __init__(
        self,
        writer: ObjectWriter,
        order: ShardOrder,
        *,
        stamp: str,
        guard: Callable[[], None],
        goes_on: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._order = order
        self._stamp = stamp
        self._guard = guard
        self._goes_on = goes_on
        self._key = order.name + UNFINISHED
        self._stream: ObjectStream | None = None

    def __enter__(self) -> Self:
        self._begun().write(0, self._order.header)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.abort()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        if key == self._key:
            self._goes_on()
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
            self._stream = self._writer.stream(name, nbytes, stamp=self._stamp, guard=self._guard)
        return self._stream


class ScratchSink(ShardSink):
    """Writes the shard into a local file, which is uploaded when it is whole."""

    def __init__(self, writer: ObjectWriter, order: ShardOrder, *, scratch: str, **settings: Any) -> None:
        super().__init__(writer, order, **settings)
        self._directory = OwnDirectory(scratch)
        self._store = LocalStore(self._directory.path)

    def __enter__(self) -> Self:
        self._store.create(self._key, self._order.nbytes)
        self._store.write_at(self._key, 0, self._order.header)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
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
            self._goes_on()
            self._begun().write(offset, self._store.read(self._key, offset, min(_AT_ONCE, size - offset)))
        super().finish()


_ATTEMPT = f"{RECORD}/{ATTEMPT}"


@dataclass(frozen=True, slots=True)
class ShardWork:
    """Shards of one plan, or of several whose outputs lie alike, each made for all of them with one read."""

    segments: SegmentWork | JointWork
    """Their staging directories are the driver's own."""
    outputs: tuple[str, ...]
    """The place of each plan's shards."""
    orders: tuple[tuple[ShardOrder, ...], ...]
    """Of each plan; they differ in headers alone."""
    scratch: str | None
    todo: Mapping[int, tuple[int, ...]] | None = None
    """By shard, the numbers of the plans that it is to be made of; None for one plan alone."""
    part: ClassVar[str] = "shard"

    @property
    def slots(self) -> int:
        """One per lane: a shard is made from begin to end."""
        return self.segments.projection.lanes

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return self.segments.files

    @property
    def place(self) -> Path | None:
        """None: a worker finds out whether it reaches the output place when it takes up the work."""
        return None

    def segments_of(self, part: int) -> tuple[int, ...]:
        return self.orders[0][part].segments

    @staticmethod
    def receipts_of(receipt: JointReceipt) -> tuple[Receipt, ...]:
        made: dict[int, Receipt] = {}
        for whole in receipt.by_output.values():
            for own in segment_receipts(whole):
                before = made.get(own.segment)
                both = own if before is None else joined(before, own)
                made[own.segment] = replace(both, seconds=own.seconds, retries=own.retries)
        return tuple(made.values())

    def reads(self) -> tuple[frozenset[int], ...]:
        by_segment, nothing = self.segments.reads(), frozenset[int]()
        own = segments_read(self.segments.works[0].plan, self.orders[0])
        return tuple(nothing.union(*(by_segment[segment] for segment in each)) for each in own)

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of a lane's memory, or what the shard's segments need if that is more."""
        own = self.segments_of(number)
        budgets = [self.segments.lessened(segment, budget) for segment in own]
        smaller = [each for each in budgets if each is not None]
        return max(smaller) if len(smaller) == len(budgets) > 0 else None

    def open(self, device: torch.device, name: str) -> ShardsRunner:
        retry_policy, works = RetryPolicy(), self.segments.works
        if self.scratch is not None:
            self._check_scratch(Path(self.scratch))
        targets = [self._target(number, work.attempt_id, retry_policy) for number, work in enumerate(works)]
        by_segment = joint_costs([work.plan for work in works])
        orders = self.orders[0]
        costs = tuple(sum(by_segment[segment] for segment in order.segments) for order in orders)
        return ShardsRunner(self.segments.open(device, name), targets, costs, retry_policy, self.todo)

    def _target(self, number: int, attempt_id: str, retry_policy: RetryPolicy) -> ShardTarget:
        writer = ObjectWriter(self.outputs[number], retry_policy=retry_policy)
        guard = partial(check_attempt, writer, attempt_id)
        guard()
        into: Callable[..., ShardSink] = partial(ShardSink, writer)
        if self.scratch is not None:
            into = partial(ScratchSink, writer, scratch=self.scratch)
        return ShardTarget(self.orders[number], partial(into, guard=guard), attempt_id)

    def _check_scratch(self, scratch: Path) -> None:
        """Raises unless this machine takes files there, for as many shards as it makes at once."""
        try:
            OwnDirectory(str(scratch)).remove()
        except OSError as error:
            what = f"nothing can be written there: {error.strerror}."
            raise OptionError(Problem(str(scratch), what, "Choose another --scratch.")) from error
        largest = sorted((order.nbytes for order in self.orders[0]), reverse=True)[: self.slots]
        count = len(largest) * len(self.outputs)
        what = f"what one worker keeps until it is uploaded ({count} at a time)"
        check_disk_space(scratch, sum(largest) * len(self.outputs), what=what, option="--scratch")


def joint_work(
    works: Sequence[SegmentWork | ShardWork], todo: Mapping[int, tuple[int, ...]], projection: Projection
) -> JointWork | ShardWork:
    """The works of plans that lie alike as one; ``todo``: by part, the numbers of the plans that lack it."""
    shards = [each for each in works if isinstance(each, ShardWork)]
    if not shards:
        segments = tuple(each for each in works if isinstance(each, SegmentWork))
        return JointWork(segments, todo, projection)
    by_segment: dict[int, tuple[int, ...]] = {}
    for part, numbers in todo.items():
        for segment in shards[0].segments_of(part):
            by_segment[segment] = tuple(sorted({*by_segment.get(segment, ()), *numbers}))
    own = JointWork(tuple(work for each in shards for work in each.segments.works), by_segment, projection)
    outputs = tuple(place for each in shards for place in each.outputs)
    orders = tuple(own_orders for each in shards for own_orders in each.orders)
    return ShardWork(own, outputs, orders, shards[0].scratch, todo)


@dataclass(frozen=True, slots=True, eq=False)
class ShardTarget:
    """Where the shards of one plan go."""

    orders: tuple[ShardOrder, ...]
    sink: Callable[..., ShardSink]
    attempt_id: str


@dataclass(frozen=True, slots=True, eq=False)
class ShardsRunner:
    segments: SegmentsRunner
    targets: Sequence[ShardTarget]
    """Of each plan."""
    costs: tuple[int, ...]
    """Of each shard, the bytes that its segments read and write for all plans."""
    retry_policy: RetryPolicy
    todo: Mapping[int, tuple[int, ...]] | None = None
    aborted: threading.Event = field(default_factory=threading.Event)
    done_bytes: dict[int, int] = field(default_factory=dict)
    """Of each shard in hand, those of its finished steps."""

    def run(self, number: int, budget: int | None = None) -> Receipt:
        """Make one shard; its receipt has only those of its segments, and the object's stamp; of several
        plans there is one of each.

        Raises TransientError for a passing failure of the store. An upload cannot go back: the pool has the
        shard made again, perhaps elsewhere, and for the others where one plan fails it is made again, too."""
        runner = self.segments.fitting(budget)
        make = partial(self._made, runner, number)
        try:
            if self.todo is None:
                return runner.on_device(partial(make, (0,)))[0]
            return self.segments.run_jointly(runner, number, self.todo[number], make)
        finally:
            self.done_bytes.pop(number, None)

    def in_hand(self) -> tuple[PartInHand, ...]:
        segments = {each.part: each for each in self.segments.in_hand()}
        return tuple(self._shard_in_hand(number, segments) for number in tuple(self.done_bytes))

    def _shard_in_hand(self, number: int, segments: Mapping[int, PartInHand]) -> PartInHand:
        order = self.targets[0].orders[number]
        step = next((segments[each] for each in order.segments if each in segments), None)
        done = self.done_bytes.get(number, 0) + (step.done_bytes if step is not None else 0)
        activity, tensor = (step.activity, step.tensor) if step is not None else ("writing", order.name)
        return PartInHand(number, activity, tensor, min(done, self.costs[number]), self.costs[number])

    def abort(self) -> None:
        """Let every shard in hand fail at its next load, or at its next piece."""
        self.aborted.set()
        self.retry_policy.end()
        self.segments.abort()

    def close(self) -> None:
        self.segments.close()

    def _made(
        self, runner: SegmentRunner, number: int, plans: Sequence[int], device: torch.device, note: str
    ) -> dict[int, Receipt]:
        targets = {plan: self.targets[plan] for plan in plans}
        stamps = {plan: stamp_of(target.attempt_id, device.type) for plan, target in targets.items()}
        made: dict[int, dict[int, Receipt]] = {plan: {} for plan in plans}
        self.done_bytes[number] = 0
        with ExitStack() as opened:
            sinks = {
                plan: opened.enter_context(
                    target.sink(target.orders[number], stamp=stamps[plan], goes_on=self._check_going)
                )
                for plan, target in targets.items()
            }
            for segment, makings in self.targets[0].orders[number].steps:
                receipts = runner.made(segment, device, note, sinks=sinks, makings=makings)
                for plan, receipt in receipts.items():
                    own = made[plan]
                    own[segment] = joined(own[segment], receipt) if segment in own else receipt
                    self.done_bytes[number] += receipt.read_bytes + receipt.written_bytes
            # Before anybody can see it: a source may have been changed meanwhile.
            whole = self.segments.settled(Receipt(number, 0, 0, 0.0, "", {}, note=note))
            for sink in sinks.values():
                sink.finish()
        return {
            plan: replace(
                whole, report={"receipts": [each.to_json() for each in own.values()], "stamp": stamps[plan]}
            )
            for plan, own in made.items()
        }

    def _check_going(self) -> None:
        if self.aborted.is_set():
            raise IncompleteError("the shard was given up, since the run ends.")


def segment_receipts(receipt: Receipt) -> list[Receipt]:
    """Of a shard of one plan, those of its segments."""
    own = [Receipt.from_json(each) for each in receipt.report["receipts"]]
    if own and receipt.retries:
        own[-1] = replace(own[-1], retries=receipt.retries)
    return own


def stamp_of(attempt_id: str, device: str) -> str:
    """A shard's stamp: equal for all that make the same bytes, under one mark on one kind of device. Where a
    GPU fails the device is the processor, which rounds otherwise."""
    return f"{attempt_id}-{device}"


def check_attempt(writer: ObjectWriter, attempt_id: str) -> None:
    """Raises IncompleteError if the run that began with ``attempt_id`` was replaced or published, TargetError
    if the place cannot be read; as ``check_begun`` for a directory."""
    if not attempt_id or writer.content(_ATTEMPT).decode("ascii", "replace") != attempt_id:
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
        exactness={**one.exactness, **other.exactness},
        peak_rss=max(one.peak_rss, other.peak_rss),
        peak_device=max(one.peak_device, other.peak_device),
    )


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """Shards are written under their final names, each as one object."""

    plan: Plan
    orders: tuple[ShardOrder, ...]
    store: LocalStore
    writer: ObjectWriter
    stamps: dict[str, str] = field(default_factory=dict)

    def take_up(self, ledger: Ledger) -> dict[int, Receipt]:
        """The earlier receipts whose shards the store says are unchanged; no byte is read."""
        before, stamps = ledger.receipts(), ledger.shards()
        there = self.writer.infos([order.name for order in self.orders if order.name in stamps])
        valid: dict[int, Receipt] = {}
        for order in self.orders:
            stamp = stamps.get(order.name, "")
            if order.is_in(there.get(order.name), stamp) and all(
                segment in before for segment in order.segments
            ):
                self.stamps[order.name] = stamp
                valid |= {segment: before[segment] for segment in order.segments}
        if valid.keys() != before.keys() or self.stamps.keys() != stamps.keys():
            ledger.begin({})
            for order in self.orders:
                if order.name in self.stamps:
                    own = [valid[segment] for segment in order.segments]
                    ledger.record_shard(order.name, self.stamps[order.name], own)
        return valid

    def parts(self, receipts: Mapping[int, Receipt]) -> list[int]:  # noqa: ARG002 - stamps say the same
        missing = [n for n, order in enumerate(self.orders) if order.name not in self.stamps]
        return sorted(missing, key=lambda n: (-self.orders[n].nbytes, n))

    def record(self, ledger: Ledger, batch: Iterable[Receipt]) -> tuple[Receipt, ...]:
        made: list[Receipt] = []
        for receipt in batch:
            order, stamp = self.orders[receipt.segment], str(receipt.report["stamp"])
            own = segment_receipts(receipt)
            ledger.record_shard(order.name, stamp, own)
            self.stamps[order.name] = stamp
            made += own
        return tuple(made)

    def complete(self, on_event: OnEvent) -> int | None:
        """Check every shard, and put its header into the control directory as a file without data, for
        verification by headers. Returns 0 where sharing storage is asked for, else None.

        Raises IncompleteError if a shard is gone or was exchanged (the next run makes it again),
        VerificationError if one does not begin as planned."""
        self.check()
        for order in self.orders:
            header = self.writer.get_range(order.name, len(order.header))
            if header != order.header:
                where, what = self.writer.location(order.name), "the object does not begin as was planned."
                raise VerificationError(Problem(where, what, "Delete it, and give the same command again."))
            self.store.write_atomic(order.name, header)
            os.truncate(self.store.location(order.name), order.nbytes)
            on_event(ShardDone(order.name, order.nbytes))
        return 0 if self.plan.manifest["duplicates"] == "share" else None

    def check(self) -> None:
        there = self.writer.infos([order.name for order in self.orders])
        for order in self.orders:
            if not order.is_in(info := there[order.name], self.stamps[order.name]):
                what = "is gone" if info is None else "is not the object that was written"
                raise IncompleteError(f"{self.writer.location(order.name)}: {what}. {KEPT}")
