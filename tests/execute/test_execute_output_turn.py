"""Finished bytes and the leave to compute: a lane keeps none while it waits for a device or for storage."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kits.assembly_maker import row_of

from raymerge.dtypes import DType
from raymerge.execute.ops import RowJob
from raymerge.execute.output import Output
from raymerge.execute.threads import ComputePermit
from raymerge.execute.transfers import Arrival
from raymerge.merge_plan.expressions import Read, copy_expression
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer


def _row(nbytes: int) -> RowJob:
    read = Read(0, 0, "f", 0, nbytes, DType.F32, None)
    return row_of(copy_expression(DType.F32), [read], (nbytes // 4,), places=(("a", 0),), check_finite=True)


def _output(store: Any, turn: ComputePermit) -> Output:
    return Output(store, torch.frombuffer(aligned_buffer(3 * ALIGNMENT), dtype=torch.uint8), turn)


class _Store:
    """Notes whether others may compute while it is written to; fails where it is told to."""

    def __init__(self, turns: threading.Semaphore, notes: list[str], error: OSError | None = None) -> None:
        self._turns, self._notes, self._error = turns, notes, error

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        del key, offset, buffer
        self._notes.append(f"write {_may_compute(self._turns)}")
        if self._error is not None:
            raise self._error


def _may_compute(turns: threading.Semaphore) -> bool:
    """Whether there is a turn for another lane."""
    found = turns.acquire(blocking=False)
    if found:
        turns.release()
    return found


class _Late:
    """Bytes that arrive later than the block is full."""

    def __init__(self, turns: threading.Semaphore, notes: list[str]) -> None:
        self._turns, self._notes = turns, notes

    def synchronize(self) -> None:
        self._notes.append(f"arrive {_may_compute(self._turns)}")


@pytest.mark.parametrize("is_held", [True, False])
def test_others_may_compute_while_a_block_arrives_and_is_written(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while it is checked and digested, which is computing."""
    turns, notes = threading.Semaphore(1), list[str]()
    turn, row = ComputePermit(turns), _row(5 * ALIGNMENT)

    def check(*_: object) -> None:
        notes.append(f"check {_may_compute(turns)}")

    def fill(done: int, target: torch.Tensor) -> Arrival:
        notes.append(f"fill {_may_compute(turns)}")
        target.fill_(done % 251)
        return _Late(turns, notes)

    monkeypatch.setattr("raymerge.execute.output.first_non_finite", check)
    if is_held:
        turn.take()
    output = _output(_Store(turns, notes), turn)
    output.take(row, 0, 5 * ALIGNMENT, fill)
    output.flush()
    computing = not is_held
    block = [f"fill {computing}", "arrive True", f"check {computing}", "write True"]
    assert notes == 2 * block
    # It has its turn again where it had one.
    assert _may_compute(turns) is computing
