"""The shard files of a run: taken up from an earlier one, grown, and named for good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from raymerge.events import OnEvent, ShardDone
from raymerge.execute.output import UNFINISHED
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.plan import RunReader
from raymerge.merge_plan.tables import Plan
from raymerge.publish.ledger import Ledger
from raymerge.storage.store import WriteStore


def share_duplicates(plan: Plan, store: WriteStore) -> int:
    """Share the extents of rows that repeat an earlier one, in shards that are written and not yet named.

    Returns:
        Bytes that share storage. Each name keeps bytes of its own for every reader.
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


_CHUNK = 1 << 20
_READERS = 8


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a shard that a receipt speaks of."""

    offset: int
    nbytes: int
    digest: str | None
    segment: int


class Shards:
    """Shards grow under their names with ``UNFINISHED`` until all segments are in."""

    def __init__(self, plan: Plan, store: WriteStore) -> None:
        """
        Args:
            plan: what is made.
            store: the staging directory.
        """
        self._plan = plan
        self._shards = plan["shards"].to_pylist()
        self._store = store

    def take_up(self, ledger: Ledger) -> dict[int, Receipt]:
        """Have every file there with its header; the receipts of earlier runs whose bytes are there too.

        A power cut may have taken bytes that a storage had promised to keep, and a file may be gone. So all
        that earlier receipts speak of is read once and compared with their digests. The receipts that fail
        are out of the ledger, durably, before a file is made anew: otherwise a later run would believe them.
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
        """Numbers of the segments to make, those that cost most first."""
        costs = self._plan["segments"].column("cost").to_pylist()
        return sorted((s for s in range(len(costs)) if s not in receipts), key=lambda s: (-costs[s], s))

    def record(self, ledger: Ledger, batch: Sequence[Receipt]) -> tuple[Receipt, ...]:
        """Have it durable that segments are made; their receipts."""
        ledger.record(*batch)
        return tuple(batch)

    def complete(self, on_event: OnEvent) -> int | None:
        """Give every shard its final name, after duplicates share extents where the recipe says so.

        Returns:
            Bytes that share storage; None where that is not asked for, or an earlier run saw to it.
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
        """Make files ready to be written to: those that lack anything have no final name, and a header.

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
        """Segments whose receipts do not agree with what is in the files."""
        strange = {number for number, receipt in receipts.items() if not receipt.is_by_rows}
        spans = self._spans({number: each for number, each in receipts.items() if number not in strange})
        with ThreadPoolExecutor(_READERS) as threads:
            found = threads.map(lambda shard: self._changed(present[shard], spans[shard]), spans)
            return strange.union(*found)

    def _spans(self, receipts: Mapping[int, Receipt]) -> dict[int, list[_Span]]:
        """By shard, the bytes of every row that the receipts speak of, in each place that it was written."""
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
                    found.setdefault(each, []).append(_Span(begin, nbytes, digest, number))
        return found

    def _changed(self, key: str | None, spans: Iterable[_Span]) -> set[int]:
        """Segments of which a span of one shard is not what its receipt says."""
        changed: set[int] = set()
        buffer = memoryview(bytearray(_CHUNK))
        for span in spans:
            if span.segment not in changed and (
                key is None or self._digest(key, span, buffer) != span.digest
            ):
                changed.add(span.segment)
        return changed

    def _digest(self, key: str, span: _Span, buffer: memoryview) -> str:
        hasher = xxhash.xxh3_128()
        for start in range(0, span.nbytes, len(buffer)):
            chunk = buffer[: min(len(buffer), span.nbytes - start)]
            self._store.read_into(key, span.offset + start, chunk)
            hasher.update(chunk)
        return hasher.hexdigest()
