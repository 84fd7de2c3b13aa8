"""The shard files of a run: resumed, written, and given their final names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from raymerge.errors import IncompleteError, Problem, VerificationError
from raymerge.events import OnEvent, ShardDone
from raymerge.execute.output import UNFINISHED
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.plan import RunReader
from raymerge.merge_plan.tables import Plan
from raymerge.publish.ledger import Ledger
from raymerge.publish.segment_work import ShardOrder
from raymerge.storage.local.store import LocalStore
from raymerge.storage.objects.writer import ObjectWriter
from raymerge.storage.retry import KEPT
from raymerge.storage.store import Range, ReadStore, WriteStore


def share_duplicates(plan: Plan, store: WriteStore) -> int:
    """Share the extents of rows that repeat an earlier one, in shards written but not yet named; returns the
    bytes that share storage. Every name still reads as bytes of its own.
    """
    shards = plan["shards"].column("name").to_pylist()
    rows = plan["rows"].select(["shard", "offset", "nbytes", "copy_of"]).to_pylist()
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
    """Bytes of a shard that a receipt covers."""

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
        ledger, durably, before a file is made anew: a later run would believe them.
        """
        present = self._present()
        before = ledger.receipts()
        lost = {number for number in before if not 0 <= number < len(self._plan["segments"])}
        lost |= self._lost({n: receipt for n, receipt in before.items() if n not in lost}, present)
        kept = {number: receipt for number, receipt in before.items() if number not in lost}
        if lost:
            ledger.begin(kept)
        self._open(present, is_complete=len(kept) == len(self._plan["segments"]))
        return kept

    def parts(self, receipts: Mapping[int, Receipt]) -> list[int]:
        """Numbers of the segments to make, the costliest first."""
        costs = self._plan["segments"].column("cost").to_pylist()
        return sorted((s for s in range(len(costs)) if s not in receipts), key=lambda s: (-costs[s], s))

    def record(self, ledger: Ledger, batch: Sequence[Receipt]) -> tuple[Receipt, ...]:
        ledger.record(*batch)
        return tuple(batch)

    def complete(self, on_event: OnEvent) -> int | None:
        """Give every shard its final name, after duplicates share extents where the recipe asks for it.
        Returns the bytes that share storage; None where not asked for, or done by an earlier run.
        """
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

        A crash may have come between a file and its header, so headers are written again every time.
        """
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
        """Segments whose receipts do not match the bytes in the files."""
        strange = {number for number, receipt in receipts.items() if not receipt.is_by_rows}
        spans = self._spans({number: each for number, each in receipts.items() if number not in strange})
        with ThreadPoolExecutor(_READERS) as threads:
            found = threads.map(lambda shard: self._changed(present[shard], spans[shard]), spans)
            return strange.union(*found)

    def _spans(self, receipts: Mapping[int, Receipt]) -> dict[int, list[_Span]]:
        """By shard, the bytes of every row that receipts cover, at each place that it was written to."""
        rows = RunReader(
            self._plan["rows"],
            *("shard", "offset", "nbytes", "copy_of", "made_with", "also", "scales", "tensor_scale"),
        )
        segments = RunReader(self._plan["segments"], "first_row", "num_rows")
        found: dict[int, list[_Span]] = {}
        for number, receipt in receipts.items():
            first, count = segments.row(number)
            made = [(n, row) for n, row in enumerate(rows.read(first, count), first) if row[3] < 0 > row[4]]
            # With codes their scales are made, whatever shard these are in.
            made += [(other, rows.row(other)) for _, row in made for other in row[6:] if other >= 0]
            for index, (shard, offset, nbytes, _, _, also, *_) in made:
                digest = receipt.digests.get(str(index))
                for each, begin in [(shard, offset), *(rows.row(other)[:2] for other in also)]:
                    found.setdefault(each, []).append(_Span(Range(begin, nbytes), digest, number))
        return found

    def _changed(self, key: str | None, spans: Iterable[_Span]) -> set[int]:
        changed: set[int] = set()
        buffer = memoryview(bytearray(_CHUNK))
        for span in spans:
            if span.segment not in changed and (
                key is None or ranges_digest(self._store, key, [span.extent], buffer) != span.digest
            ):
                changed.add(span.segment)
        return changed


class RemoteShards:
    """Shards are written under their final names, each as one object."""

    def __init__(
        self, plan: Plan, orders: tuple[ShardOrder, ...], store: LocalStore, writer: ObjectWriter
    ) -> None:
        """Headers are written into ``store``, the control directory."""
        self._plan = plan
        self._orders = orders
        self._store = store
        self._writer = writer
        self._stamps: dict[str, str] = {}

    def take_up(self, ledger: Ledger) -> dict[int, Receipt]:
        """The earlier receipts whose shards the store says are unchanged; no byte is read."""
        before, said = ledger.receipts(), ledger.shards()
        there = self._writer.infos([order.name for order in self._orders if order.name in said])
        kept: dict[int, Receipt] = {}
        for order in self._orders:
            stamp = said.get(order.name, "")
            if order.is_in(there.get(order.name), stamp) and all(
                segment in before for segment in order.segments
            ):
                self._stamps[order.name] = stamp
                kept |= {segment: before[segment] for segment in order.segments}
        if kept.keys() != before.keys() or self._stamps.keys() != said.keys():
            ledger.begin({})
            for order in self._orders:
                if order.name in self._stamps:
                    own = [kept[segment] for segment in order.segments]
                    ledger.record_shard(order.name, self._stamps[order.name], own)
        return kept

    def parts(self, receipts: Mapping[int, Receipt]) -> list[int]:  # noqa: ARG002 - stamps say the same
        """Numbers of the shards to make, the largest first."""
        wanted = [n for n, order in enumerate(self._orders) if order.name not in self._stamps]
        return sorted(wanted, key=lambda n: (-self._orders[n].nbytes, n))

    def record(self, ledger: Ledger, batch: Iterable[Receipt]) -> tuple[Receipt, ...]:
        made: list[Receipt] = []
        for receipt in batch:
            order, stamp = self._orders[receipt.segment], str(receipt.report["stamp"])
            own = [Receipt.from_json(each) for each in receipt.report["receipts"]]
            if own and receipt.retries:
                own[-1] = Receipt.from_json({**own[-1].to_json(), "retries": receipt.retries})
            ledger.record_shard(order.name, stamp, own)
            self._stamps[order.name] = stamp
            made += own
        return tuple(made)

    def complete(self, on_event: OnEvent) -> int | None:
        """Check every shard, and put its header into the control directory as a file without data, for
        verification by headers. Returns 0 where sharing storage is asked for, else None.

        Raises IncompleteError if a shard is gone or was exchanged (the next run makes it again),
        VerificationError if one does not begin as planned.
        """
        self.check()
        for order in self._orders:
            header = self._writer.get_range(order.name, len(order.header))
            if header != order.header:
                where, what = self._writer.location(order.name), "the object does not begin as was planned."
                raise VerificationError(Problem(where, what, "Delete it, and give the same command again."))
            self._store.write_atomic(order.name, header)
            os.truncate(self._store.location(order.name), order.nbytes)
            on_event(ShardDone(order.name, order.nbytes))
        return 0 if self._plan.manifest["duplicates"] == "share" else None

    def check(self) -> None:
        """Raises as ``complete`` does."""
        there = self._writer.infos([order.name for order in self._orders])
        for order in self._orders:
            if not order.is_in(info := there[order.name], self._stamps[order.name]):
                what = "is gone" if info is None else "is not the object that was written"
                raise IncompleteError(f"{self._writer.location(order.name)}: {what}. {KEPT}")
