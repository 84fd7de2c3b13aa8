"""The work of a merge whose output is in an object store: whole shards of one plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from raymerge.errors import IncompleteError, OptionError, Problem
from raymerge.execute.receipts import Receipt
from raymerge.execute.segment import SegmentRunner
from raymerge.merge_plan.elements import computed_rows
from raymerge.merge_plan.files_read import SourceFile
from raymerge.publish.attempt import MARK, RECORD
from raymerge.publish.segment_work import SegmentsRunner, SegmentWork
from raymerge.publish.shard_order import ShardOrder, shard_reads
from raymerge.publish.shard_sinks import Checks, ScratchSink, ShardSink, StreamSink
from raymerge.storage.local.disk_space import check_room
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.own_directory import OwnDirectory
from raymerge.storage.retry import Patience

_MARK = f"{RECORD}/{MARK}"
_ANY = "any"
"""The kind of device where it does not matter."""


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

    def copies(self) -> frozenset[int]:
        """Shards in which nothing is computed, of whatever segments."""
        is_computed = computed_rows(self.segments.plan)
        rows = ([row for _, makings in order.steps for row, _ in makings] for order in self.orders)
        return frozenset(number for number, made in enumerate(rows) if not is_computed[made].any())

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of what a lane had, or what the shard's segments need if that is more."""
        own = self.orders[number].segments
        found = [self.segments.lessened(segment, budget) for segment in own]
        wanted = [each for each in found if each is not None]
        return max(wanted) if len(wanted) == len(found) > 0 else None

    def open(self, device: torch.device, name: str) -> ShardsRunner:
        """A runner over the sources and the output place, which it must reach."""
        patience = Patience()
        writer, mark = ObjectWriter(self.output, patience=patience), self.segments.mark
        guard = partial(check_mark, writer, mark)
        guard()
        into: MakeSink = partial(StreamSink, writer)
        if self.scratch is not None:
            self._check_scratch(Path(self.scratch))
            into = partial(ScratchSink, writer, scratch=self.scratch)
        segments = self.segments.open(device, name)
        return ShardsRunner(segments, self.orders, into, guard, mark, patience, copies=self.copies())

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
        patience: Patience,
        *,
        copies: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            segments: makes segments.
            orders: how each shard is made.
            sink: where one goes.
            guard: raises where nothing more is to be written.
            mark: of the run's beginning.
            patience: with the output place.
            copies: shards in which nothing is computed.
        """
        self._segments = segments
        self._orders = orders
        self._sink = sink
        self._checks = Checks(guard, self._check_going)
        self._mark = mark
        self._patience = patience
        self._copies = copies
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
        stamp = stamp_of(self._mark, _ANY if number in self._copies else device.type)
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
            otherwise; "any" where nothing is computed.
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
