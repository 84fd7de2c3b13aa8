"""Reading ahead: the next load is read while the one in hand is computed, as far as memory goes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from raymerge.execute.assembled import Raw
from raymerge.execute.reading import LoadReader
from raymerge.execute.tiles import Load
from raymerge.execute.transfers import Arrival, Transfers

NOTHING = torch.empty(0, dtype=torch.uint8)
"""No buffer yet."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    load: Load
    buffer: int
    raws: Future[tuple[tuple[Raw, ...], Arrival | None]]


class Loader:
    """Reads loads into two buffers that take turns.

    Both are kept, as memory that was used before is many times faster than fresh memory. One that is larger
    than usual makes way as soon as its bytes are wanted for something else.
    """

    def __init__(
        self,
        reader: LoadReader,
        reading: ThreadPoolExecutor,
        transfers: Transfers,
        buffers: list[torch.Tensor],
        *,
        usual_bytes: int,
        limit: int,
    ) -> None:
        """
        Args:
            reader: reads.
            reading: one thread.
            transfers: gives new buffers, and takes what is in them to the device.
            buffers: two uint8 tensors, page-aligned, that may be of no length; replaced in their places.
            usual_bytes: length of a buffer, unless a load needs more.
            limit: bytes that both buffers and the computing may have together.
        """
        self._reader = reader
        self._reading = reading
        self._transfers = transfers
        self._usual_bytes = usual_bytes
        self._limit = limit
        self._buffers = buffers
        self._leaving: list[Arrival | None] = [None, None]
        self._current = 0
        self._ahead: _Ahead | None = None

    def take(self, load: Load, after: Load | None) -> tuple[Raw, ...]:
        """The bytes of a load's tiles; those of the load before are gone.

        Args:
            load: what is wanted now.
            after: what will be wanted next.
        """
        ahead = self._ahead if self._ahead is not None and self._ahead.load is load else None
        if ahead is None:
            ahead = self._now(load)
        self._ahead = None
        raws, self._leaving[ahead.buffer] = ahead.raws.result()
        self._transfers.arrive(raws, self._leaving[ahead.buffer])
        self._current = ahead.buffer
        other = 1 - self._current
        beside = self._buffers[self._current].numel() + load.work_bytes
        if self._buffers[other].numel() + beside > self._limit:
            self._buffers[other] = NOTHING
        if after is not None and self._prepare(other, after, beside):
            self._ahead = self._start(after, other)
        return raws

    def _now(self, load: Load) -> _Ahead:
        """Read what was not read ahead; both buffers are done with."""
        if self._ahead is not None:
            self._ahead.raws.exception()
        other = 1 - self._current
        if self._prepare(other, load, self._buffers[self._current].numel() + load.work_bytes):
            return self._start(load, other)
        # There is no room for two.
        self._buffers[other] = NOTHING
        held = self._buffers[self._current].numel()
        if held < load.nbytes or held + load.work_bytes > self._limit:
            self._renew(self._current, load)
        return self._start(load, self._current)

    def _start(self, load: Load, buffer: int) -> _Ahead:
        return _Ahead(load, buffer, self._reading.submit(self._read, load, buffer))

    def _read(self, load: Load, buffer: int) -> tuple[tuple[Raw, ...], Arrival | None]:
        """On the reading thread."""
        leaving = self._leaving[buffer]
        if leaving is not None:
            leaving.synchronize()
        return self._transfers.upload(load, self._reader.read(load, self._buffers[buffer]))

    def _prepare(self, buffer: int, load: Load, beside: int) -> bool:
        """Whether a buffer can take a load while so many other bytes are in use; it has the length then."""
        held, wanted = self._buffers[buffer].numel(), max(self._usual_bytes, load.nbytes)
        # An old one that is longer than wanted must leave room for computing what is read into it, too.
        if held >= wanted and held + max(beside, load.work_bytes) <= self._limit:
            return True
        if wanted + beside > self._limit:
            return False
        self._renew(buffer, load)
        return True

    def _renew(self, buffer: int, load: Load) -> None:
        """Have a buffer for a load; the old one goes first, as both at once may be too much."""
        self._buffers[buffer] = NOTHING
        self._buffers[buffer] = self._transfers.buffer(max(self._usual_bytes, load.nbytes))
