"""Reading ahead: as far as memory goes and no further, in the right order, and never over what is in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.execute.assembled import Raw
from raymerge.execute.loading import NOTHING, Loader
from raymerge.execute.reading import LoadReader
from raymerge.execute.tiles import Load
from raymerge.execute.transfers import Arrival, HostTransfers

USUAL, LIMIT = 100, 1000


class _Memory(HostTransfers):
    """Gives buffers, and knows how many bytes of them are alive."""

    def __init__(self) -> None:
        self.live = self.given = 0
        self.work = 0
        """Bytes that computing takes meanwhile."""
        self.most = 0
        self.arrived: list[Arrival | None] = []

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


class _Reader(LoadReader):
    """Fills a buffer with a load's number, and fails where it is told to."""

    def __init__(self, *, broken: int = -1) -> None:
        super().__init__(())
        self.asked: list[int] = []
        self.threads: set[int] = set()
        self._broken = broken

    def read(self, load: Load, buffer: torch.Tensor) -> tuple[Raw, ...]:
        number = load.is_read_again  # A stand-in has no tiles to tell loads apart by.
        assert buffer.numel() >= load.nbytes
        self.asked.append(number)
        self.threads.add(threading.get_ident())
        if number == self._broken:
            raise OSError("broken")
        return ([buffer[: load.nbytes].fill_(number % 251)],)


def _loads(sizes: Sequence[tuple[int, int]]) -> list[Load]:
    return [Load((), nbytes, work, number) for number, (nbytes, work) in enumerate(sizes)]  # type: ignore[arg-type]


@contextmanager
def _loader(
    reader: _Reader, memory: HostTransfers, *, limit: int = LIMIT, buffers: list[torch.Tensor] | None = None
) -> Iterator[Loader]:
    held = [NOTHING, NOTHING] if buffers is None else buffers
    with ThreadPoolExecutor(1) as reading:
        yield Loader(reader, reading, memory, held, usual_bytes=USUAL, limit=limit)


@st.composite
def _sizes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Bytes and work of some loads, each of which fits alone."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        nbytes = draw(st.one_of(st.integers(0, USUAL), st.integers(0, LIMIT)))
        found.append((nbytes, draw(st.integers(0, LIMIT - max(USUAL, nbytes)))))
    return found


def _take_all(memory: _Memory, buffers: list[torch.Tensor], sizes: Sequence[tuple[int, int]]) -> None:
    loads = _loads(sizes)
    with _loader(_Reader(), memory, buffers=buffers) as loader:
        for load, after in zip(loads, [*loads[1:], None], strict=True):
            memory.work = load.work_bytes
            loader.take(load, after)
            memory.look()
    memory.work = 0


@given(segments=st.lists(_sizes(), max_size=3))
@settings(deadline=None, max_examples=200)
def test_buffers_and_work_together_never_pass_the_limit(segments: list[list[tuple[int, int]]]) -> None:
    """In one segment after the other, that take over each other's buffers."""
    memory, buffers = _Memory(), [NOTHING, NOTHING]
    for sizes in segments:
        _take_all(memory, buffers, sizes)
    assert memory.most <= LIMIT


@given(sizes=_sizes())
@settings(deadline=None, max_examples=200)
def test_results_are_right_and_the_next_load_is_read_just_where_it_fits(sizes: list[tuple[int, int]]) -> None:
    reader, memory = _Reader(), _Memory()
    loads = _loads(sizes)
    with _loader(reader, memory) as loader:
        for number, (load, after) in enumerate(zip(loads, [*loads[1:], None], strict=True)):
            (raw,) = loader.take(load, after)
            (data,) = raw
            assert isinstance(data, torch.Tensor)
            mine = data.untyped_storage().nbytes()
            ahead = loader._ahead
            if after is not None:
                fits = max(USUAL, after.nbytes) + mine + load.work_bytes <= LIMIT
                assert (ahead is not None) is fits
            if ahead is not None:
                ahead.raws.result()
            # The next one is there by now, and has not gone over this one.
            assert reader.asked == list(range(number + 1 + (ahead is not None)))
            assert data.numel() == load.nbytes
            assert bool((data == number % 251).all())
            del raw, data
    assert len(reader.threads) <= 1


def test_loads_of_the_usual_size_take_turns_with_two_buffers() -> None:
    reader, memory = _Reader(), _Memory()
    loads = _loads([(90, 10), (100, 300), (1, 5), (0, 0)] * 5)
    with _loader(reader, memory) as loader:
        for load, after in zip(loads, [*loads[1:], None], strict=True):
            loader.take(load, after)
    assert (memory.given, memory.live) == (2, 2 * USUAL)


def test_a_large_buffer_makes_way_for_work_that_needs_its_room() -> None:
    """What is read ahead into a large old buffer must leave room for what computing it takes."""
    memory = _Memory()
    _take_all(memory, [NOTHING, NOTHING], [(600, 0), (100, 100), (100, 800), (100, 800)])
    assert memory.most <= LIMIT


def test_the_next_segment_has_the_buffers_of_the_one_before() -> None:
    memory, buffers = _Memory(), [NOTHING, NOTHING]
    for _ in range(3):
        _take_all(memory, buffers, [(90, 10), (400, 0), (300, 100)])
    assert memory.given == 3
    assert memory.live == sum(each.numel() for each in buffers) <= LIMIT


def test_the_same_load_may_be_taken_again() -> None:
    reader, memory = _Reader(), _Memory()
    one, two = _loads([(50, 0), (60, 0)])
    with _loader(reader, memory) as loader:
        for load, after in ((one, two), (two, one), (one, two), (two, None)):
            ((data,),) = loader.take(load, after)
            assert isinstance(data, torch.Tensor)
            assert data.tolist() == [load.is_read_again] * load.nbytes
    assert reader.asked == [0, 1, 0, 1]


def test_what_was_read_in_vain_is_read_over() -> None:
    reader, memory = _Reader(), _Memory()
    one, two, three = _loads([(50, 0), (60, 0), (70, 0)])
    with _loader(reader, memory) as loader:
        loader.take(one, two)
        ((data,),) = loader.take(three, None)
        assert isinstance(data, torch.Tensor)
        assert data.tolist() == [2] * 70
    assert reader.asked == [0, 1, 2]
    assert memory.live <= 2 * USUAL


@pytest.mark.parametrize("limit", [LIMIT, USUAL])
def test_a_reader_s_error_comes_out_where_its_load_is_taken(limit: int) -> None:
    reader, memory = _Reader(broken=1), _Memory()
    one, two, three = _loads([(50, 0), (60, 0), (70, 0)])
    with _loader(reader, memory, limit=limit) as loader:
        loader.take(one, two)
        with pytest.raises(OSError, match="broken"):
            loader.take(two, three)
    assert reader.asked == [0, 1]


class _Slow(_Memory):
    """Transfers whose copies leave a buffer only when they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def upload(  # type: ignore[override]
        self, load: Load, raws: Sequence[Raw]
    ) -> tuple[tuple[Raw, ...], Arrival]:
        self.events.append(f"up {load.is_read_again:d}")
        return tuple(raws), _Left(self.events, load.is_read_again)

    def arrive(self, raws: Sequence[Raw], arrival: Arrival | None) -> None:
        assert isinstance(arrival, _Left)
        self.events.append(f"arrive {arrival.number:d}")


class _Left:
    def __init__(self, events: list[str], number: int) -> None:
        self.number = number
        self._events = events

    def synchronize(self) -> None:
        self._events.append(f"left {self.number:d}")


def test_a_buffer_is_filled_again_only_when_its_bytes_have_left() -> None:
    reader, memory = _Reader(), _Slow()
    loads = _loads([(50, 0)] * 4)
    with _loader(reader, memory) as loader:
        for load, after in zip(loads, [*loads[1:], None], strict=True):
            loader.take(load, after)
            if loader._ahead is not None:
                loader._ahead.raws.result()
    assert memory.events == [
        *("up 0", "arrive 0", "up 1", "arrive 1"),
        *("left 0", "up 2", "arrive 2", "left 1", "up 3", "arrive 3"),
    ]
