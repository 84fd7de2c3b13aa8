"""The finished bytes of a segment: gathered into blocks, checked, digested and written behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from raymerge.execute.finite import first_non_finite
from raymerge.execute.jobs import RowJob
from raymerge.execute.transfers import Arrival
from raymerge.planner.expressions import Read
from raymerge.storage.buffers import ALIGNMENT
from raymerge.storage.store import ReadStore, WriteStore

UNFINISHED = ".part"
"""Ending of a shard's name until all of its segments are in."""

Fill: TypeAlias = Callable[[int, torch.Tensor], Arrival | None]
"""Writes some bytes of a row, from an offset on, into uint8 ``[n]``, and says when they are there."""


class NotFinite(Exception):  # noqa: N818 - no error of the user's yet; who catches it finds the cause
    """A finished row holds NaN or infinity."""

    def __init__(self, row: RowJob) -> None:
        super().__init__(row.tensor)
        self.row = row


@dataclass(frozen=True, slots=True)
class _Share:
    """Bytes of one row in a block."""

    row: RowJob
    begin: int
    nbytes: int
    skipped: int
    """Bytes of the row before these."""
    is_there: bool
    """Whether they are in their places already."""

    @property
    def ends_row(self) -> bool:
        return self.skipped + self.nbytes == self.row.expression.cast.nbytes(self.row.num_elements)


@dataclass(slots=True)
class _Block:
    """A buffer of finished bytes; each lies as in its file within a block of the storage."""

    memory: torch.Tensor
    used: int = 0
    shares: list[_Share] = field(default_factory=list)
    arrival: Arrival | None = None
    """When the last bytes are in; None: all are."""


class Output:
    """Takes a segment's finished bytes in order; a writing thread does the rest.

    Two blocks take turns: one is filled while the other is checked, digested and written.
    """

    def __init__(self, staging: WriteStore, writing: ThreadPoolExecutor, blocks: list[torch.Tensor]) -> None:
        """
        Args:
            staging: where shards grow, under their names with ``UNFINISHED``.
            writing: one thread.
            blocks: two uint8 tensors of one length, page-aligned.
        """
        self.written_bytes = 0
        """Bytes written, every copy of a row counted."""
        self.digests: dict[str, str] = {}
        """xxh3_128 hex of the rows written, by row number."""
        self.shards: set[str] = set()
        """Names of the shards written to."""
        self._staging = staging
        self._writing = writing
        self._free = blocks
        self._block_bytes = blocks[0].numel()
        self._block: _Block | None = None
        self._pending: Future[torch.Tensor] | None = None
        self._hasher = xxhash.xxh3_128()

    def take(
        self, row: RowJob, skipped: int, nbytes: int, fill: Fill, *, unit: int = 0, is_there: bool = False
    ) -> None:
        """Take bytes of a row.

        Args:
            row: whose they are; its bytes come in order, and so do rows.
            skipped: bytes of it before these.
            nbytes: how many come.
            fill: writes them, in one call or several.
            unit: bytes that ``fill`` is given no part of, at most ``most_together``; 0 for one element.
            is_there: whether they are in their places already, and only to be checked and digested.
        """
        done, unit = 0, unit or max(1, row.expression.cast.bits // 8)
        while done < nbytes:
            block, place = self._room(row, skipped + done, unit)
            count = min(nbytes - done, (block.memory.numel() - place) // unit * unit)
            block.arrival = fill(done, block.memory[place : place + count]) or block.arrival
            block.shares.append(_Share(row, place, count, skipped + done, is_there))
            block.used = place + count
            done += count
        if not nbytes and not skipped:
            self.digests[str(row.index)] = xxhash.xxh3_128().hexdigest()

    @property
    def most_together(self) -> int:
        """Bytes that surely fit into a block, wherever they go."""
        return self._block_bytes - ALIGNMENT

    def copy_from(self, source: ReadStore, read: Read, row: RowJob, span: tuple[int, int]) -> bool:
        """Have the storage itself copy bytes of a row to all of its places; whether it has.

        Args:
            source: holds the file that they are in.
            read: the row's one input.
            row: whose they are.
            span: first byte in the file, and how many.
        """
        offset, nbytes = span
        skipped = offset - read.offset
        for shard, begin in row.places:
            done = self._staging.copy_range(
                shard + UNFINISHED,
                begin + skipped,
                source=source,
                source_key=read.key,
                source_offset=offset,
                nbytes=nbytes,
            )
            if done < nbytes:
                return False
        self.shards.update(shard for shard, _ in row.places)
        self.written_bytes += nbytes * len(row.places)
        return True

    def flush(self) -> None:
        """Have all that was taken written; returns when it is, durable or not."""
        self._send()
        self._settle()

    def _room(self, row: RowJob, skipped: int, unit: int) -> tuple[_Block, int]:
        """A block with room for an element, and the place for the row's next byte in it: at the same byte of
        a page as it has within a block of the storage."""
        shift = (row.places[0][1] + skipped) % ALIGNMENT
        if self._block is not None:
            place = self._block.used + (shift - self._block.used) % ALIGNMENT
            if place + unit <= self._block.memory.numel():
                return self._block, place
            self._send()
        if not self._free:
            self._settle()
        self._block = _Block(self._free.pop())
        return self._block, shift

    def _send(self) -> None:
        """Hand the block to the writing thread, after the one before is done with."""
        if self._block is None:
            return
        self._settle()
        self._pending = self._writing.submit(self._write, self._block)
        self._block = None

    def _settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._free.append(pending.result())

    def _write(self, block: _Block) -> torch.Tensor:
        """On the writing thread: see that a block is finite, digest it and write it to all of its places."""
        if block.arrival is not None:
            block.arrival.synchronize()
        for share in block.shares:
            data: npt.NDArray[np.uint8] = block.memory[share.begin : share.begin + share.nbytes].numpy()
            if share.row.check_finite and first_non_finite(data, share.row.expression.cast) is not None:
                raise NotFinite(share.row)
            self._hasher.update(data.data)
            if share.ends_row:
                self.digests[str(share.row.index)] = self._hasher.hexdigest()
                self._hasher.reset()
        view = block.memory.numpy().data
        for shard, offset, begin, nbytes in _runs([each for each in block.shares if not each.is_there]):
            self._staging.write_extent(shard + UNFINISHED, offset, view[begin : begin + nbytes])
            self.shards.add(shard)
            self.written_bytes += nbytes
        return block.memory


def _runs(shares: list[_Share]) -> Iterator[tuple[str, int, int, int]]:
    """Shard, offset, first byte in the block and length of every write; what follows on itself is one."""
    by_number: dict[int, list[tuple[str, int, int, int]]] = {}
    for share in shares:
        for number, (shard, offset) in enumerate(share.row.places):
            runs = by_number.setdefault(number, [])
            begin = offset + share.skipped
            if runs:
                last_shard, last_offset, first, nbytes = runs[-1]
                if (last_shard, last_offset + nbytes, first + nbytes) == (shard, begin, share.begin):
                    runs[-1] = (shard, last_offset, first, nbytes + share.nbytes)
                    continue
            runs.append((shard, begin, share.begin, share.nbytes))
    for runs in by_number.values():
        yield from runs
