"""Sees to an output in the files and chunks of a training checkpoint: workers write the elements of its
tensors where they belong, and the driver copies everything else."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from raymerge.checkpoints.dcp.blobs import Checked
from raymerge.checkpoints.dcp.target import ranges_beside
from raymerge.events import OnEvent, ShardDone
from raymerge.execute.receipts import UNFINISHED
from raymerge.merge_plan.plan import weight_files
from raymerge.merge_plan.tables import Plan
from raymerge.publish.chunks import growing_tensors, target_layout
from raymerge.publish.shards import Shards
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import Range, ReadStore

_BLOCK_NBYTES = 8 << 20
_THREADS = 4


class ChunkedShards(Shards):
    """The files grow under their names with ``UNFINISHED`` until everything is in."""

    def __init__(self, plan: Plan, store: LocalStore, source: ReadStore) -> None:
        """``source`` is the checkpoint whose layout the output has."""
        self._files = weight_files(plan)
        self._source = source
        self._target = target_layout(plan, source)
        self._finished: set[str] = set()
        super().__init__(plan, store, growing_tensors(plan, store, source, self._name_of))

    def complete(self, on_event: OnEvent) -> None:
        """Copy what is not of the tensors, bring checksums up to date, and give every file its final name."""
        elements, todo = self._target.elements(), [key for key in self._files if key not in self._finished]
        for key in self._finished:
            on_event(ShardDone(key, self._files[key]))
        with ThreadPoolExecutor(_THREADS) as pool:
            for key in pool.map(lambda each: self._completed(each, elements.get(each, ())), todo):
                self._finished.add(key)
                on_event(ShardDone(key, self._files[key]))
        for directory in {str(parent) for key in self._files for parent in PurePosixPath(key).parents}:
            self._store.sync_directory(directory)

    def _name_of(self, key: str) -> str:
        return key if key in self._finished else key + UNFINISHED

    def _present(self) -> list[str | None]:
        sizes = {file.key: file.nbytes for file in self._store.files()}
        self._finished = {key for key, nbytes in self._files.items() if sizes.get(key) == nbytes}
        whole = all(sizes.get(self._name_of(key)) == nbytes for key, nbytes in self._files.items())
        (shard,) = self._shards
        return [shard["name"] if whole else None]

    def _open(self, present: list[str | None], *, is_complete: bool) -> None:
        if is_complete and None not in present:
            return
        for key, nbytes in self._files.items():
            if key in self._finished:
                self._store.rename(key, key + UNFINISHED)
            self._store.create(key + UNFINISHED, nbytes)
        self._finished.clear()
        self._store.sync_directory()

    def _completed(self, key: str, chunks: Sequence[tuple[Range, Checked | None]]) -> str:
        growing = key + UNFINISHED
        for part in self._copied(key, [elements for elements, _ in chunks]):
            self._store.write_at(growing, *part)
        for _, checked in chunks:
            if checked is not None:
                self._checksum(growing, checked)
        self._store.sync(growing)
        self._store.rename(growing, key)
        return key

    def _copied(self, key: str, elements: Sequence[Range]) -> Iterator[tuple[int, bytes]]:
        """All bytes of a file but those of elements, from the source, with their places."""
        for to, origin in self._target.copies(key, self._files[key]):
            for each in ranges_beside(elements, Range(to, origin.nbytes)):
                at = origin.offset + each.offset - to
                yield each.offset, self._source.read(key, at, each.nbytes)

    def _checksum(self, key: str, checked: Checked) -> None:
        checksum, end = 0, checked.offset + checked.nbytes
        for offset in range(checked.offset, end, _BLOCK_NBYTES):
            checksum = zlib.crc32(self._store.read(key, offset, min(_BLOCK_NBYTES, end - offset)), checksum)
        for at in checked.places:
            self._store.write_at(key, at, checksum.to_bytes(4, "little"))
