"""The buffer for loads: never more than may be, kept where it can be, not filled over what is in use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.execute.lane import LoadBuffer
from raymerge.execute.tiles import Load
from raymerge.execute.transfers import HostTransfers

USUAL, LIMIT = 100, 1000


class _Memory(HostTransfers):
    """Gives buffers, and knows how many bytes of them are alive."""

    def __init__(self) -> None:
        self.live = self.given = 0
        self.work = 0
        """Bytes that computing takes meanwhile."""
        self.most = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        memory = np.zeros(nbytes, dtype=np.uint8)
        self.live += nbytes
        self.given += 1
        self.look()
        weakref.finalize(memory, self._gone, nbytes)
        return torch.from_numpy(memory)

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes

    def look(self) -> None:
        """Note how much is in use."""
        self.most = max(self.most, self.live + self.work)


def _load(nbytes: int, work: int = 0) -> Load:
    return Load((), nbytes, work)


def _buffer(memory: HostTransfers, *, limit: int = LIMIT) -> LoadBuffer:
    return LoadBuffer(memory, usual_bytes=USUAL, limit=limit)


@st.composite
def _sizes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Bytes and work of some loads, each of which fits alone."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        nbytes = draw(st.one_of(st.integers(0, USUAL), st.integers(0, LIMIT)))
        found.append((nbytes, draw(st.integers(0, LIMIT - max(USUAL, nbytes)))))
    return found


def _filled(memory: _Memory, sizes: Sequence[tuple[int, int]]) -> LoadBuffer:
    """A buffer that these loads were read into, one after the other."""
    buffer = _buffer(memory)
    for nbytes, work in sizes:
        assert buffer.room(_load(nbytes, work)).numel() >= nbytes
        memory.work = work
        memory.look()
        memory.work = 0
        buffer.leave(None)
    return buffer


@given(sizes=_sizes())
@settings(deadline=None, max_examples=300)
def test_the_buffer_and_the_work_together_never_pass_the_limit(sizes: list[tuple[int, int]]) -> None:
    memory = _Memory()
    buffer = _filled(memory, sizes)
    assert memory.most <= LIMIT
    assert memory.live == buffer.room(_load(0)).numel()


@given(sizes=_sizes())
@settings(deadline=None, max_examples=200)
def test_there_is_one_buffer_at_a_time(sizes: list[tuple[int, int]]) -> None:
    """The old one is gone before a new one is asked for, whether or not both would fit."""
    memory = _Memory()
    buffer = _buffer(memory)
    for nbytes, work in sizes:
        before, given_before = memory.live, memory.given
        found = buffer.room(_load(nbytes, work)).numel()
        assert memory.live == found
        assert found in (before, max(USUAL, nbytes))
        # A new one only where the old one was too short, or too long for the work.
        if memory.given > given_before:
            assert before < nbytes or (before > USUAL and before + work > LIMIT)


def test_a_large_buffer_is_kept_while_there_is_room_for_it() -> None:
    memory = _Memory()
    buffer = _filled(memory, [(600, 400), (100, 400), (599, 0), (600, 1)])
    assert memory.given == 1
    assert memory.live == buffer.room(_load(1)).numel() == 600


# What is on its way out of the buffer


class _Left:
    """A copy out of the buffer that is under way until somebody waits for it."""

    def __init__(self, waits: list[str], name: str, error: Exception | None = None) -> None:
        self._waits, self._name, self._error = waits, name, error

    def synchronize(self) -> None:
        self._waits.append(self._name)
        if self._error is not None:
            raise self._error


class _Noting(_Memory):
    """Notes when it is asked for memory."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self._notes = notes

    def buffer(self, nbytes: int) -> torch.Tensor:
        self._notes.append(f"buffer {nbytes}")
        return super().buffer(nbytes)


def test_what_leaves_is_waited_for_before_the_buffer_is_filled_again_and_once() -> None:
    notes: list[str] = []
    buffer = _buffer(_Noting(notes))
    for number in range(3):
        buffer.room(_load(50))
        notes.append(f"read {number}")
        buffer.leave(_Left(notes, f"left {number}"))
    buffer.room(_load(50))
    buffer.room(_load(50))
    assert notes == ["buffer 100", "read 0", "left 0", "read 1", "left 1", "read 2", "left 2"]


def test_what_leaves_is_waited_for_before_the_buffer_goes() -> None:
    """Memory that the device still reads must not go to anybody else."""
    notes: list[str] = []
    buffer = _buffer(_Noting(notes))
    buffer.room(_load(50))
    buffer.leave(_Left(notes, "left"))
    buffer.room(_load(500))
    assert notes == ["buffer 100", "left", "buffer 500"]
