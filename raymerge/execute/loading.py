"""The memory that loads are read into."""

from __future__ import annotations

import torch

from raymerge.execute.tiles import Load
from raymerge.execute.transfers import Arrival, Transfers

NOTHING = torch.empty(0, dtype=torch.uint8)
"""No buffer yet."""


class LoadBuffer:
    """One lane's buffer for loads, one load after the other.

    It is kept, as memory that was used before is many times faster than fresh memory. One that is larger than
    usual makes way as soon as its bytes are wanted for something else.
    """

    def __init__(self, transfers: Transfers, *, usual_bytes: int, limit: int) -> None:
        """
        Args:
            transfers: gives memory.
            usual_bytes: length of the buffer, unless a load needs more.
            limit: bytes that the buffer and the computing may have together.
        """
        self._transfers = transfers
        self._usual_bytes = usual_bytes
        self._limit = limit
        self._held = NOTHING
        self._leaving: Arrival | None = None

    def room(self, load: Load) -> torch.Tensor:
        """uint8 of at least ``load.nbytes``, page-aligned; what was in it before is gone."""
        if self._leaving is not None:
            self._leaving.synchronize()
            self._leaving = None
        held = self._held.numel()
        if held < load.nbytes or (held > self._usual_bytes and held + load.work_bytes > self._limit):
            # The old one goes first, as both at once may be too much.
            self._held = NOTHING
            self._held = self._transfers.buffer(max(self._usual_bytes, load.nbytes))
        return self._held

    def leave(self, arrival: Arrival | None) -> None:
        """Say when what was read has left the buffer; None: when the next load is asked for."""
        self._leaving = arrival
