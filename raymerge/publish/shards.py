"""Segments written into the shards of a directory: by workers, and as the driver sees to them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import xxhash

from raymerge.deferred import torch
from raymerge.device_numerics import return_free_memory
from raymerge.events import OnEvent, PartInHand, ShardDone
from raymerge.execute.receipts import UNFINISHED, Receipt
from raymerge.merge_plan.files_read import SourceFile, files_read
from raymerge.merge_plan.jobs import Jobs
from raymerge.merge_plan.memory import SMALLEST_LANE, Projection
from raymerge.merge_plan.plan import RunReader
from raymerge.merge_plan.tables import Plan
from raymerge.publish.record import RECORD, Ledger, check_begun
from raymerge.storage.local.store import LocalStore
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import FileInfo, Range, ReadStore, WriteStore

if TYPE_CHECKING:
    from raymerge.execute.segment import SegmentRunner


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
        # The driver, which makes no segment, need not load what does.
        from raymerge.execute.segment import SegmentRunner

        retry_policy = RetryPolicy()
        sources, staging = self.open_sources(retry_policy), self.open_staging(retry_policy)

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

        return SegmentsRunner(runner, self.projection, sources, staging, retry_policy)

    def open_sources(self, retry_policy: RetryPolicy) -> Sequence[ReadStore]:
        return [
            open_store(root, retry_policy=retry_policy, expected=self.expected_files(number))
            for number, root in enumerate(self.roots)
        ]

    def open_staging(self, retry_policy: RetryPolicy) -> LocalStore:
        guard = partial(check_begun, self.staging / RECORD, self.attempt_id) if self.attempt_id else None
        return LocalStore(self.staging, retry_policy=retry_policy, guard=guard)

    def expected_files(self, source: int) -> dict[str, FileInfo]:
        mine = (each for each in self.files if each.source == source and each.version)
        return {each.key: FileInfo(each.key, each.nbytes, each.version) for each in mine}


def costliest_first(costs: Sequence[int], done: Container[int] = ()) -> list[int]:
    return sorted((part for part in range(len(costs)) if part not in done), key=lambda n: (-costs[n], n))


def file_numbers(
    files: Sequence[SourceFile], read: Iterable[Collection[tuple[int, str]]]
) -> tuple[frozenset[int], ...]:
    """Of each part, the positions in ``files`` of what it reads."""
    numbers = {(file.source, file.key): number for number, file in enumerate(files)}
    return tuple(frozenset(numbers[each] for each in part if each in numbers) for part in read)


class SegmentsRunner:
    def __init__(
        self,
        runner: Callable[[Projection], SegmentRunner],
        projection: Projection,
        sources: Sequence[ReadStore],
        staging: LocalStore,
        retry_policy: RetryPolicy,
    ) -> None:
        self._runner = runner
        self._projection = projection
        self._sources = sources
        self._staging = staging
        self._retry_policy = retry_policy
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
        gc.unfreeze()
        torch.set_num_threads(self._torch_threads)
        for store in (*self._sources, self._staging):
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

    def __init__(self, plan: Plan, store: WriteStore) -> None:
        self._plan = plan
        self._shards = plan["shards"].to_pylist()
        self._store = store

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
                key is None or ranges_digest(self._store, key, [span.extent], buffer) != span.digest
            ):
                changed.add(span.segment)
        return changed
