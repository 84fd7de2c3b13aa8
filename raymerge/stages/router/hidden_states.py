"""The hidden states of all runs between one layer and the next, in memory or in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from raymerge.storage.local.store import LocalStore

_FILE = "hidden_states.bin"


class HiddenStates(Protocol):
    """Hidden states by run: float32 ``[T, hidden]`` on the CPU."""

    def put(self, run: int, hidden: torch.Tensor) -> None:
        """Keep the states of a run in place of those that it had."""

    def get(self, run: int) -> torch.Tensor:
        """What was put last for a run."""


def kept_nbytes(lengths: Sequence[int], width: int) -> int:
    """Bytes of the states of all runs."""
    return sum(lengths) * width * torch.float32.itemsize


@contextmanager
def keep_states(lengths: Sequence[int], width: int, *, spill: Path | None) -> Iterator[HiddenStates]:
    """Keep states in memory, or in a file below ``spill`` that is gone afterwards.

    Raises:
        OptionError: the file system has no room for the file.
    """
    if spill is None:
        yield _InMemory(len(lengths))
        return
    store = LocalStore(spill)
    try:
        with store:
            store.create(_FILE, kept_nbytes(lengths, width))
            yield _InFile(store, lengths, width)
    finally:
        store.remove(_FILE)


class _InMemory:
    def __init__(self, num_runs: int) -> None:
        self._states = [torch.empty(0)] * num_runs

    def put(self, run: int, hidden: torch.Tensor) -> None:
        self._states[run] = hidden.cpu()

    def get(self, run: int) -> torch.Tensor:
        return self._states[run]


class _InFile:
    """Read and written, not mapped: mapped pages would count as the worker's memory."""

    def __init__(self, store: LocalStore, lengths: Sequence[int], width: int) -> None:
        self._store = store
        self._shapes = [(length, width) for length in lengths]
        self._offsets = [0, *accumulate(length * width * torch.float32.itemsize for length in lengths)]

    def put(self, run: int, hidden: torch.Tensor) -> None:
        self._store.write_at(_FILE, self._offsets[run], hidden.contiguous().cpu().numpy().data)

    def get(self, run: int) -> torch.Tensor:
        found = torch.empty(self._shapes[run])
        # A flat view of bytes, which is what stores fill.
        self._store.read_into(_FILE, self._offsets[run], found.view(torch.uint8).view(-1).numpy().data)
        return found
