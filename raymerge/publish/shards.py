"""Segments written into the shards of a directory: by workers, and as the driver sees to them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import xxhash

from raymerge.checkpoints.dcp.store import ASSEMBLED, ChunkedStore
from raymerge.checkpoints.dcp.target import GrowingTensorFile
from raymerge.deferred import torch
from raymerge.device_numerics import return_free_memory
from raymerge.errors import RaymergeError
from raymerge.events import OnEvent, PartInHand, ShardDone
from raymerge.execute.receipts import UNFINISHED, JointReceipt, Receipt
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.merge_plan.jobs import Jobs
from raymerge.merge_plan.memory import LEAST_BLOCK, SMALLEST_LANE, Projection
from raymerge.merge_plan.plan import RunReader, planned_layout
from raymerge.merge_plan.tables import Plan
from raymerge.publish.chunks import growing_tensors
from raymerge.publish.record import RECORD, Ledger, check_begun
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo, Range, ReadStore, WriteStore

if TYPE_CHECKING:
    from raymerge.execute.segment import MakeOutputs, SegmentRunner


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """Everything that workers need to make segments, but their numbers."""

    plan: Plan
    roots: tuple[str, ...]
    """Place of each source, with its options."""
    staging: Path
    projection: Projection
    threads: int
    files: tuple[SourceFile, ...] = ()
    attempt_id: str = ""
    """Of the staging directory: workers write nothing to one with another mark. "" for any."""
    part: ClassVar[str] = "segment"

    @property
    def slots(self) -> int:
        """One more than the projection's lanes: it takes a lane as soon as one is free."""
        return self.projection.lanes + 1

    @property
    def place(self) -> Path:
        return self.staging

    @property
    def works(self) -> tuple[SegmentWork, ...]:
        return (self,)

    def reads(self) -> tuple[frozenset[int], ...]:
        return file_numbers(self.files, files_read(self.plan))

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of a lane's memory, for the segment alone."""
        shared = self.projection.shared
        had = self.projection.lane.budget + shared if budget is None else budget
        needs = (op.need.least_bytes for op in Jobs(self.plan).ops(number))
        least = max((SMALLEST_LANE, *needs)) + shared
        return max(least, had // 2) if had > least else None

    def open(self, device: torch.device, name: str) -> SegmentsRunner:
        return _opened([self], self.projection, device, name)

    def open_source(self, number: int, retry_policy: RetryPolicy) -> ReadStore:
        root, expected = self.roots[number], self.expected_files(number)
        store = open_store(root, retry_policy=retry_policy, expected=expected)
        if isinstance(store, ChunkedStore):
            store.prepare()
        return store

    def expected_files(self, source: int) -> dict[str, FileInfo]:
        mine = (each for each in self.files if each.source == source and each.version)
        return {each.key: FileInfo(each.key, each.nbytes, each.version) for each in mine}

    def open_staging(self, retry_policy: RetryPolicy) -> LocalStore | GrowingTensorFile:
        guard = partial(check_begun, self.staging / RECORD, self.attempt_id) if self.attempt_id else None
        store, layout = (
            LocalStore(self.staging, retry_policy=retry_policy, guard=guard),
            planned_layout(self.plan),
        )
        if layout is None:
            return store
        return growing_tensors(self.plan, store, self.open_source(layout.source, retry_policy))


@dataclass(frozen=True, slots=True)
class JointWork:
    """Segments of several plans whose outputs lie alike, each made for all of them with one read."""

    works: tuple[SegmentWork, ...]
    """One for each plan, which has its own staging directory."""
    todo: Mapping[int, tuple[int, ...]]
    """By segment, the numbers of the plans that it is to be made of."""
    projection: Projection
    part: ClassVar[str] = "segment"

    @property
    def slots(self) -> int:
        return self.projection.lanes + 1

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Of all sources, which are numbered by their places in order of first use."""
        numbers = list(_source_numbers(self.works))
        files = (
            replace(file, source=of_work[file.source])
            for work, of_work in zip(self.works, numbers, strict=True)
            for file in work.files
        )
        return tuple({(file.source, file.key): file for file in files}.values())

    @property
    def place(self) -> Path:
        return self.works[0].place

    @staticmethod
    def segments_of(part: int) -> tuple[int, ...]:
        """The segments that a part is made of."""
        return (part,)

    @staticmethod
    def receipts_of(receipt: JointReceipt) -> tuple[Receipt, ...]:
        """Of the segments of a part, the sums of all plans."""
        return (receipt,)

    def reads(self) -> tuple[frozenset[int], ...]:
        numbers = {(file.root, file.key): number for number, file in enumerate(self.files)}
        by_plan = [
            [{numbers[work.files[each].root, work.files[each].key] for each in part} for part in work.reads()]
            for work in self.works
        ]
        return tuple(frozenset().union(*parts) for parts in zip(*by_plan, strict=True))

    def lessened(self, number: int, budget: int | None) -> int | None:
        """Half of a lane's memory, or what the neediest plan needs with all buffers if that is more."""
        beside = len(self.works) * LEAST_BLOCK
        had = self.projection.lane.budget + self.projection.shared if budget is None else budget
        smaller = [self.works[plan].lessened(number, had - beside) for plan in self.todo[number]]
        if all(each is None for each in smaller):
            return None
        return beside + max(had - beside if each is None else each for each in smaller)

    def open(self, device: torch.device, name: str) -> SegmentsRunner:
        return _opened(self.works, self.projection, device, name, todo=self.todo)


def _source_numbers(works: Sequence[SegmentWork]) -> Iterator[list[int]]:
    """Of each plan, the numbers that its sources have among those of all, by their places in order of first
    use; of one plan alone they are their own."""
    known: dict[str, int] = {}
    for work in works:
        yield (
            [known.setdefault(root, len(known)) for root in work.roots]
            if len(works) > 1
            else list(range(len(work.roots)))
        )


def _opened(
    works: Sequence[SegmentWork],
    projection: Projection,
    device: torch.device,
    name: str,
    *,
    todo: Mapping[int, tuple[int, ...]] | None = None,
) -> SegmentsRunner:
    """What makes segments of these plans."""
    # The driver, which makes no segment, need not load what does.
    from raymerge.execute.segment import PlanOutput, SegmentRunner

    retry_policy = RetryPolicy()
    stores: dict[int, ReadStore] = {}
    for work, numbers in zip(works, _source_numbers(works), strict=True):
        for own, number in enumerate(numbers):
            if number not in stores:
                stores[number] = work.open_source(own, retry_policy)
    stagings = [work.open_staging(retry_policy) for work in works]
    outputs = [
        PlanOutput(work.plan, staging, numbers)
        for work, staging, numbers in zip(works, stagings, _source_numbers(works), strict=True)
    ]

    def runner(projection: Projection) -> SegmentRunner:
        return SegmentRunner(
            outputs,
            list(stores.values()),
            device=device,
            projection=projection,
            threads=works[0].threads,
            name=name,
        )

    return SegmentsRunner(runner, projection, list(stores.values()), stagings, retry_policy, todo)


def costliest_first(costs: Sequence[int], done: Container[int] = ()) -> list[int]:
    return sorted((part for part in range(len(costs)) if part not in done), key=lambda n: (-costs[n], n))


def file_numbers(
    files: Sequence[SourceFile], read: Iterable[Collection[tuple[int, str]]]
) -> tuple[frozenset[int], ...]:
    """Of each part, the positions in ``files`` of what it reads."""
    numbers = {(file.source, file.key): frozenset((number,)) for number, file in enumerate(files)}
    for source in {file.source for file in files}:
        own = frozenset(number for number, file in enumerate(files) if file.source == source)
        numbers[source, ASSEMBLED] = own
    nothing = frozenset[int]()
    return tuple(nothing.union(*(numbers.get(each, nothing) for each in part)) for part in read)


class SegmentsRunner:
    def __init__(
        self,
        runner: Callable[[Projection], SegmentRunner],
        projection: Projection,
        sources: Sequence[ReadStore],
        stagings: Sequence[LocalStore | GrowingTensorFile],
        retry_policy: RetryPolicy,
        todo: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """``todo``: by segment, the numbers of the plans that it is made of; None for one plan alone."""
        self._runner = runner
        self._projection = projection
        self._sources = sources
        self._stagings = stagings
        self._retry_policy = retry_policy
        self._todo = todo
        self._failures: dict[int, RaymergeError] = {}
        self._made_by = [runner(projection)]
        # Each lane computes on its own thread; torch's own threads would wait for each other at every step.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # Modules stay: the collector need not look through them again and again.
        self._has_frozen = gc.get_freeze_count() == 0
        if self._has_frozen:
            gc.freeze()

    def run(self, number: int, budget: int | None = None) -> Receipt:
        runner = self.fitting(budget)
        if self._todo is None:
            return self.settled(runner.run(number))
        make = partial(runner.staged, number)
        return self.settled(self.run_jointly(runner, number, self._todo[number], make))

    def run_jointly(
        self, runner: SegmentRunner, part: int, plans: Sequence[int], make: MakeOutputs
    ) -> JointReceipt:
        """A part of these plans; one that has failed in another part is left out. It is given up anyhow, and
        a part in which one fails is made again for the others."""
        before = {plan: self._failures[plan] for plan in plans if plan in self._failures}
        receipt = runner.run_jointly(part, [plan for plan in plans if plan not in before], make)
        self._failures.update(receipt.failures)
        return replace(receipt, failures={**receipt.failures, **before})

    def settled(self, receipt: Receipt) -> Receipt:
        """The result, with failures of storage; raises CheckpointError where it is useless."""
        # Of bytes that were read while a file was written to, there must be no receipt.
        for source in self._sources:
            source.check_expected()
        faults = self._retry_policy.take_faults()
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

    def in_hand(self) -> tuple[PartInHand, ...]:
        return tuple(each for runner in tuple(self._made_by) for each in runner.in_hand())

    def abort(self) -> None:
        """Let every segment in hand fail at its next tile."""
        self._retry_policy.end()
        for each in self._made_by:
            each.abort()

    def close(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
        torch.set_num_threads(self._torch_threads)
        for store in (*self._sources, *self._stagings):
            store.close()


def share_duplicates(plan: Plan, store: WriteStore) -> int:
    """Share the extents of ops that repeat an earlier one, in shards written but not yet named; returns the
    bytes that share storage. Every name still reads as bytes of its own."""
    shards = plan["shards"].column("name").to_pylist()
    rows = plan["ops"].select(["shard", "offset", "nbytes", "copy_of"]).to_pylist()
    shared = 0
    for row in rows:
        if row["copy_of"] < 0:
            continue
        first = rows[row["copy_of"]]
        shared += store.share(
            shards[row["shard"]] + UNFINISHED,
            row["offset"],
            with_key=shards[first["shard"]] + UNFINISHED,
            with_offset=first["offset"],
            nbytes=row["nbytes"],
        )
    return shared


def ranges_digest(store: ReadStore, key: str, ranges: Iterable[Range], buffer: memoryview) -> str:
    """xxh3-128 in hex of the concatenated ranges of a file."""
    hasher = xxhash.xxh3_128()
    for each in ranges:
        for offset in range(each.offset, each.end, len(buffer)):
            chunk = buffer[: min(len(buffer), each.end - offset)]
            store.read_into(key, offset, chunk)
            hasher.update(chunk)
    return hasher.hexdigest()


_CHUNK = 1 << 20
_READERS = 8


@dataclass(frozen=True, slots=True)
class _Span:
    extent: Range
    digest: str | None
    segment: int


class Shards:
    """Shards grow under their names with ``UNFINISHED`` until all segments are in."""

    def __init__(self, plan: Plan, store: WriteStore, reader: ReadStore | None = None) -> None:
        """``reader`` gives the shards' bytes; None for the store itself."""
        self._plan = plan
        self._shards = plan["shards"].to_pylist()
        self._store = store
        self._reader = store if reader is None else reader

    def take_up(self, ledger: Ledger) -> dict[int, Receipt]:
        """Make every file with its header; return the earlier receipts whose bytes are there.

        A power cut may have lost bytes that the storage acknowledged, and files may be gone: everything
        receipts cover is read once and compared with their digests. Receipts that fail are removed from the
        ledger, durably, before a file is made anew: a later run would believe them."""
        present = self._present()
        before = ledger.receipts()
        lost = {number for number in before if not 0 <= number < len(self._plan["segments"])}
        lost |= self._lost({n: receipt for n, receipt in before.items() if n not in lost}, present)
        valid = {number: receipt for number, receipt in before.items() if number not in lost}
        if lost:
            ledger.begin(valid)
        self._open(present, is_complete=len(valid) == len(self._plan["segments"]))
        return valid

    def parts(self, receipts: Mapping[int, Receipt]) -> list[int]:
        return costliest_first(self._plan["segments"].column("cost").to_pylist(), receipts)

    def record(self, ledger: Ledger, batch: Sequence[Receipt]) -> tuple[Receipt, ...]:
        ledger.record(*batch)
        return tuple(batch)

    def complete(self, on_event: OnEvent) -> int | None:
        """Give every shard its final name, after duplicates share extents where the recipe asks for it.
        Returns the bytes that share storage; None where not asked for, or done by an earlier run."""
        shared: int | None = None
        present = {file.key for file in self._store.files()}
        # Names are given after that, so where one is given already, an earlier run has shared.
        if self._plan.manifest["duplicates"] == "share" and not any(
            s["name"] in present for s in self._shards
        ):
            shared = share_duplicates(self._plan, self._store)
        for shard in self._shards:
            if shard["name"] not in present:
                self._store.sync(shard["name"] + UNFINISHED)
                self._store.rename(shard["name"] + UNFINISHED, shard["name"])
            on_event(ShardDone(shard["name"], shard["nbytes"]))
        self._store.sync_directory()
        return shared

    def _present(self) -> list[str | None]:
        """The key under which each shard is there in full length."""
        sizes = {file.key: file.nbytes for file in self._store.files()}
        keys = [(s["name"], s["name"] + UNFINISHED, s["nbytes"]) for s in self._shards]
        return [next((key for key in pair if sizes.get(key) == size), None) for *pair, size in keys]

    def _open(self, present: list[str | None], *, is_complete: bool) -> None:
        """Make files with headers ready for writing; incomplete ones have no final name.

        A crash may have come between a file and its header, so headers are written again every time."""
        for shard, key in zip(self._shards, present, strict=True):
            name, growing = shard["name"], shard["name"] + UNFINISHED
            if key == name and is_complete:
                continue
            if key == name:
                self._store.rename(name, growing)
            elif key is None:
                self._store.remove(name)
                self._store.create(growing, shard["nbytes"])
            self._store.write_at(growing, 0, shard["header"])
        self._store.sync_directory()

    def _lost(self, receipts: Mapping[int, Receipt], present: list[str | None]) -> set[int]:
        strange = {number for number, receipt in receipts.items() if not receipt.is_by_ops}
        spans = self._spans({number: each for number, each in receipts.items() if number not in strange})
        with ThreadPoolExecutor(_READERS) as threads:
            changed = threads.map(lambda shard: self._changed(present[shard], spans[shard]), spans)
            return strange.union(*changed)

    def _spans(self, receipts: Mapping[int, Receipt]) -> dict[int, list[_Span]]:
        """By shard, the bytes of every op that receipts cover, at each place that it was written to."""
        rows = RunReader(
            self._plan["ops"],
            *("shard", "offset", "nbytes", "copy_of", "made_with", "also", "scales", "tensor_scale"),
        )
        segments = RunReader(self._plan["segments"], "first_op", "num_ops")
        by_shard: dict[int, list[_Span]] = {}
        for number, receipt in receipts.items():
            first, count = segments.row(number)
            made = [(n, row) for n, row in enumerate(rows.read(first, count), first) if row[3] < 0 > row[4]]
            # With codes their scales are made, whatever shard these are in.
            made += [(other, rows.row(other)) for _, row in made for other in row[6:] if other >= 0]
            for index, (shard, offset, nbytes, _, _, also, *_) in made:
                digest = receipt.digests.get(str(index))
                for each, begin in [(shard, offset), *(rows.row(other)[:2] for other in also)]:
                    by_shard.setdefault(each, []).append(_Span(Range(begin, nbytes), digest, number))
        return by_shard

    def _changed(self, key: str | None, spans: Iterable[_Span]) -> set[int]:
        changed: set[int] = set()
        buffer = memoryview(bytearray(_CHUNK))
        for span in spans:
            if span.segment not in changed and (
                key is None or ranges_digest(self._reader, key, [span.extent], buffer) != span.digest
            ):
                changed.add(span.segment)
        return changed
