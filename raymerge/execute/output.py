"""The finished bytes of a segment: gathered into a block, checked, digested and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from raymerge.checkpoints.quantisation.block_codec import ErrorSums, Exactness
from raymerge.deferred import torch
from raymerge.errors import DiskSpaceError
from raymerge.events import Activity
from raymerge.execute.non_finite import first_non_finite
from raymerge.execute.receipts import UNFINISHED
from raymerge.execute.transfers import Arrival
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import OpJob
from raymerge.storage.local.buffers import ALIGNMENT, lies_like
from raymerge.storage.store import ReadStore, Sink

_LEAST_STORED = 1 << 20
"""Bytes that are worth a write of their own; fewer are written together with their neighbours."""
_ASIDE_SHARE = 8
"""The part of the memory that scales have: codes are at least eight times as many bytes."""

Fill: TypeAlias = "Callable[[int, torch.Tensor], Arrival | None]"
"""Writes some bytes of an op, from an offset on, into uint8 ``[n]``, and says when they are there."""


class ComputePermit:
    """One lane's leave to compute; while it reads and writes, others have theirs."""

    def __init__(self, turns: threading.Semaphore) -> None:
        self._turns = turns
        self._is_held = False
        self.activity: Activity = "reading"
        """What the lane does, for whoever watches."""

    def take(self) -> None:
        if not self._is_held:
            self.activity = "waiting"
            self._turns.acquire()
            self._is_held = True
        self.activity = "computing"

    def rest(self) -> None:
        self.activity = "reading"
        if self._is_held:
            self._is_held = False
            self._turns.release()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let others compute meanwhile; afterwards it may again where it might before."""
        was_held = self._is_held
        self.rest()
        self.activity = "writing"
        try:
            yield
        finally:
            if was_held:
                self.take()


class NotFinite(Exception):  # noqa: N818 - no error of the user's yet; who catches it finds the cause
    """A finished op holds NaN or infinity, or a scale of its inputs is negative."""

    def __init__(self, op: OpJob) -> None:
        super().__init__(op.tensor)
        self.op = op


@dataclass(frozen=True, slots=True)
class _Share:
    op: OpJob
    begin: int
    nbytes: int
    skipped: int
    is_aside: bool


@dataclass(slots=True)
class _Block:
    """What is in the memory for finished bytes; each lies as in its file within a block of the storage."""

    used: int = 0
    used_aside: int = 0
    """Where those end that are; 0 without any."""
    shares: list[_Share] = field(default_factory=list)
    checked: int = 0
    arrival: Arrival | None = None
    """When the last bytes are in; None: all are."""


class Output:
    """Takes a segment's finished bytes in order, and writes them whenever its memory is full."""

    def __init__(
        self, staging: Sink, memory: torch.Tensor, turn: ComputePermit, *, in_order: bool = False
    ) -> None:
        """Shards grow in ``staging`` under names with ``UNFINISHED``; the memory is uint8, page-aligned;
        ``turn`` is given up while it writes. ``in_order``: bytes are written in the order of their places, as
        far as they come in it. Raises ValueError where the memory is too short for an element."""
        if memory.numel() < 2 * ALIGNMENT:
            raise ValueError(
                f"{memory.numel()} bytes are too few for finished bytes: {2 * ALIGNMENT} are wanted"
            )
        self.written_bytes = 0
        """Bytes written, every copy of an op counted."""
        self.digests: dict[str, str] = {}
        """xxh3_128 hex of the ops written, by op number."""
        self.encoding_errors: dict[str, tuple[float, float]] = {}
        """What encoding changed: sums of squared errors and of squared values, by op number of codes."""
        self.exactness: dict[str, Exactness] = {}
        """Of what was converted, by op number of codes."""
        self.shards: set[str] = set()
        self.has_failed = False
        """Whether its storage has no room for it."""
        self._staging = staging
        self._memory = memory
        self._turn = turn
        self._in_order = in_order
        for_scales = max(memory.numel() // _ASIDE_SHARE, 2 * ALIGNMENT)
        self._aside = (memory.numel() - for_scales) // ALIGNMENT * ALIGNMENT
        self._block = _Block()
        self._hashers: dict[int, xxhash.xxh3_128] = {}

    def take(
        self, op: OpJob, skipped: int, nbytes: int, fill: Fill, *, unit: int = 0, aside: bool = False
    ) -> None:
        """Take bytes of an op, those that follow on the ``skipped`` ones.

        ``fill`` writes them, in one call or several; of ``unit`` bytes (at most ``most_together``; 0: an
        element's) it is given no part. ``aside``: they take turns with the bytes of another op, and are not
        to come between them, as what lies side by side is one write.

        Raises NotFinite: an op holds NaN or infinity, this one or one before it."""
        done, unit = 0, unit or max(1, op.expression.cast.bits // 8)
        while done < nbytes:
            place, end = self._free_space(op, skipped + done, unit, aside=aside)
            block = self._block
            count = min(nbytes - done, (end - place) // unit * unit)
            block.arrival = fill(done, self._memory[place : place + count]) or block.arrival
            block.shares.append(_Share(op, place, count, skipped + done, aside))
            if aside:
                block.used_aside = place + count
            else:
                block.used = place + count
            done += count
            if block.arrival is None:
                # While the processor's cache has the bytes.
                self._check_block(block)
        if not nbytes and not skipped:
            self.digests[str(op.index)] = xxhash.xxh3_128().hexdigest()

    def take_stored(self, op: OpJob, skipped: int, data: torch.Tensor, *, is_there: bool) -> None:
        """Take bytes of an op (uint8, free for others afterwards) as they are, and write them from where they
        lie if that does as well; only check and digest them if they are in their places already. See
        ``take``."""
        nbytes = data.numel()
        lies_well = nbytes >= _LEAST_STORED and lies_like(op.places[0][1] + skipped, data.numpy().data)
        if not is_there and not lies_well:
            self.take(op, skipped, nbytes, lambda done, part: _copy(data[done : done + part.numel()], part))
            return
        if self._block.arrival is not None or (self._in_order and not is_there):
            # Digests are made in order.
            self.flush()
        self._check(op, skipped, data)
        if not is_there:
            view = data.numpy().data
            self._write([(shard, begin + skipped, view) for shard, begin in op.places])

    def add_errors(self, op: OpJob, sums: ErrorSums, exactness: Exactness | None = None) -> None:
        key = str(op.index)
        errors, values = self.encoding_errors.get(key, (0.0, 0.0))
        self.encoding_errors[key] = (errors + sums.squared_errors, values + sums.squared_values)
        if exactness is not None:
            self.exactness[key] = exactness.plus(self.exactness.get(key, Exactness(0, 0, 0.0)))

    @property
    def most_together(self) -> int:
        """Bytes that surely fit into the memory, wherever they go."""
        return self._memory.numel() - ALIGNMENT

    def copy_from(self, source: ReadStore, read: Read, op: OpJob, span: tuple[int, int]) -> bool:
        """Have the storage itself copy bytes of an op to all of its places; whether it has."""
        offset, nbytes = span
        skipped = offset - read.offset
        for shard, begin in op.places:
            with self._writing():
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
        self.shards.update(shard for shard, _ in op.places)
        self.written_bytes += nbytes * len(op.places)
        return True

    def flush(self) -> None:
        """Check, digest and write all that was taken and is not written yet, durable or not."""
        block, self._block = self._block, _Block()
        if block.arrival is not None:
            with self._turn.away():
                block.arrival.synchronize()
        self._check_block(block)
        view = self._memory.numpy().data
        runs = sorted(_runs(block.shares)) if self._in_order else _runs(block.shares)
        self._write((shard, offset, view[begin : begin + nbytes]) for shard, offset, begin, nbytes in runs)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._turn.away():
            try:
                yield
            except DiskSpaceError:
                self.has_failed = True
                raise

    def _write(self, pieces: Iterable[tuple[str, int, memoryview]]) -> None:
        with self._writing():
            for shard, offset, view in pieces:
                self._staging.write_extent(shard + UNFINISHED, offset, view)
                self.shards.add(shard)
                self.written_bytes += len(view)

    def _free_space(self, op: OpJob, skipped: int, unit: int, *, aside: bool) -> tuple[int, int]:
        """The place for an op's next byte, where an element fits, and where the room for more ends.

        It is at the same byte of a page as it has within a block of the storage."""
        shift = (op.places[0][1] + skipped) % ALIGNMENT
        for is_second in (False, True):
            block = self._block
            used = (block.used_aside or self._aside) if aside else block.used
            end = self._aside if block.used_aside and not aside else self._memory.numel()
            place = used + (shift - used) % ALIGNMENT
            if place + unit <= end and not (aside and block.used > self._aside):
                return place, end
            if not is_second:
                self.flush()
        raise ValueError(f"{unit} bytes do not fit into the memory for finished bytes")

    def _check_block(self, block: _Block) -> None:
        for share in block.shares[block.checked :]:
            self._check(share.op, share.skipped, self._memory[share.begin : share.begin + share.nbytes])
            block.checked += 1

    def _check(self, op: OpJob, skipped: int, finished: torch.Tensor) -> None:
        data: npt.NDArray[np.uint8] = finished.numpy()
        cast = op.expression.cast
        if op.check_finite and first_non_finite(data, cast) is not None:
            raise NotFinite(op)
        # Scales take turns with their codes, so that two ops may be under way.
        hasher = self._hashers.setdefault(op.index, xxhash.xxh3_128())
        hasher.update(data.data)
        if skipped + data.size == cast.nbytes(op.num_elements):
            self.digests[str(op.index)] = self._hashers.pop(op.index).hexdigest()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _runs(shares: list[_Share]) -> Iterator[tuple[str, int, int, int]]:
    """Shard, offset, first byte in the block and length of every write; what follows on itself is one."""
    by_number: dict[tuple[int, bool], list[tuple[str, int, int, int]]] = {}
    for share in shares:
        for number, (shard, offset) in enumerate(share.op.places):
            runs = by_number.setdefault((number, share.is_aside), [])
            begin = offset + share.skipped
            if runs:
                last_shard, last_offset, first, nbytes = runs[-1]
                if (last_shard, last_offset + nbytes, first + nbytes) == (shard, begin, share.begin):
                    runs[-1] = (shard, last_offset, first, nbytes + share.nbytes)
                    continue
            runs.append((shard, begin, share.begin, share.nbytes))
    for runs in by_number.values():
        yield from runs
