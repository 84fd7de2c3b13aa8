"""Reading a load: few requests, every byte where it belongs, and never more of the buffer than was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.assembly_maker import expression, row_of

from raymerge.dtypes import DType
from raymerge.execute.ops import RowJob
from raymerge.execute.reading import LoadReader
from raymerge.execute.tiles import Load, TileJob
from raymerge.merge_plan.expressions import Read, copy_expression
from raymerge.merge_plan.memory import READ_ROOM
from raymerge.methods import SAMPLE_LENGTH, SAMPLE_RUNS, sample_runs
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, room_for

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
"""What every file of the stand-in store holds."""


@dataclass
class _Store:
    """Files of known bytes; notes what is asked of it, and spoils all of the buffer that it may use."""

    asked: list[tuple[str, int, int, bool]] = field(default_factory=list)
    into: list[int] = field(default_factory=list)
    like: list[int | None] = field(default_factory=list)
    is_far: bool = False

    def read_extent(
        self,
        key: str,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        *,
        again: bool = False,
        like: int | None = None,
    ) -> int:
        assert buffer.nbytes >= room_for(nbytes)
        assert np.frombuffer(buffer, dtype=np.uint8).ctypes.data % ALIGNMENT == 0
        self.asked.append((key, offset, nbytes, again))
        self.like.append(like)
        buffer[:] = b"\xff" * buffer.nbytes
        shift = (offset if like is None else like) % ALIGNMENT
        buffer[shift : shift + nbytes] = BYTES[offset : offset + nbytes]
        return shift

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        del key
        self.into.append(buffer.nbytes)
        buffer[:] = BYTES[offset : offset + buffer.nbytes]


def _reader(*stores: _Store) -> LoadReader:
    given_stores: Any = stores
    return LoadReader(given_stores)


def _row(reads: Sequence[tuple[int, int]], index: int = 0, *, source: int = 0, key: str = "f") -> RowJob:
    """A row whose inputs are these offsets and lengths."""
    inputs = [Read(0, source, key, offset, nbytes, DType.U8, None) for offset, nbytes in reads]
    return row_of(copy_expression(DType.U8), inputs, (reads[0][1],), index=index)


def _whole(row: RowJob) -> TileJob:
    return TileJob(row, 0, row.num_elements, 0)


def _load(rows: Sequence[RowJob]) -> Load:
    """What the executor makes of rows that are read together."""
    nbytes = sum(row.need.load_bytes(row.num_elements) for row in rows)
    return Load(tuple(map(_whole, rows)), nbytes, 0)


def _read(reader: LoadReader, load: Load, *, again: bool = False) -> list[list[bytes]]:
    """The bytes of all inputs, read into a buffer that is no longer than was said."""
    buffer = torch.frombuffer(aligned_buffer(load.nbytes), dtype=torch.uint8)[: load.nbytes]
    found = reader.read(load, buffer, again=again)
    return [[each.numpy().tobytes() for each in raw if isinstance(each, torch.Tensor)] for raw in found]


def _stored(rows: Sequence[RowJob]) -> list[list[bytes]]:
    return [
        [BYTES[read.offset : read.offset + read.nbytes] for read in row.inputs if isinstance(read, Read)]
        for row in rows
    ]


def test_a_hundred_neighbours_are_one_request_of_each_file() -> None:
    stores = _Store(), _Store()
    rows = []
    for index in range(100):
        reads = [Read(0, source, "f", 500 + 64 * index, 64, DType.U8, None) for source in (0, 1)]
        rows.append(row_of(expression("linear", sources=2), reads, (64,), index=index))
    reader = _reader(*stores)
    assert _read(reader, _load(rows)) == _stored(rows)
    assert [store.asked for store in stores] == [[("f", 500, 6400, False)]] * 2
    assert reader.read_bytes == 2 * 6400


def test_each_file_of_a_source_is_read_by_itself() -> None:
    store = _Store()
    rows = [_row([(64 * index, 64)], index, key=f"file{index % 3}") for index in range(9)]
    assert _read(_reader(store), _load(rows)) == _stored(rows)
    assert [key for key, _, _, _ in store.asked] == ["file0", "file1", "file2"]


@pytest.mark.parametrize(("hole", "requests"), [(0, 1), (READ_ROOM, 1), (READ_ROOM + 1, 10)])
def test_small_holes_are_read_along_and_not_counted(hole: int, requests: int) -> None:
    store = _Store()
    rows = [_row([(7 + (100 + hole) * index, 100)], index) for index in range(10)]
    reader = _reader(store)
    assert _read(reader, _load(rows)) == _stored(rows)
    assert len(store.asked) == requests
    assert reader.read_bytes == 1000


@pytest.mark.parametrize(("method", "place"), [("copy", 9000), ("linear", None)])
def test_what_is_copied_is_wanted_where_it_will_be_written_from(method: str, place: int | None) -> None:
    """From the first of its rows on; what is computed lies as in its file, as elements must."""
    store = _Store()
    how = copy_expression(DType.U8) if method == "copy" else expression(method, sources=1)
    rows = [
        row_of(
            how, [Read(0, 0, "f", 500 + 64 * at, 64, DType.U8, None)], (64,), index=at, places=(("a", put),)
        )
        for at, put in enumerate((9000, 9064))
    ]
    assert _read(_reader(store), _load(rows)) == _stored(rows)
    assert store.like == [place]
    tile = TileJob(rows[0], 16, 48, 0)
    _read(_reader(store), Load((tile,), _load(rows).nbytes, 0))
    assert store.like == [place, place and place + 16]


def test_bytes_that_are_wanted_twice_are_read_once() -> None:
    store = _Store()
    rows = [_row([(1000, 300), (1000, 300)]), _row([(1000, 300)], 1), _row([(1100, 100)], 2)]
    assert _read(_reader(store), _load(rows)) == _stored(rows)
    assert store.asked == [("f", 1000, 300, False)]


_extents = st.tuples(st.integers(0, 300_000), st.integers(0, 20_000))
_near = st.tuples(st.integers(0, 5 * ALIGNMENT), st.integers(0, 3 * ALIGNMENT))
_aligned = st.tuples(st.integers(0, 40).map(lambda n: 4096 * n - 1).filter(lambda n: n >= 0), st.just(1))


@given(
    reads=st.lists(
        st.lists(st.one_of(_extents, _near, _aligned), min_size=1, max_size=4), min_size=1, max_size=12
    )
)
@settings(deadline=None, max_examples=300)
def test_wherever_bytes_lie_they_fit_the_buffer_and_come_out_right(
    reads: list[list[tuple[int, int]]],
) -> None:
    rows = [
        row_of(
            expression("linear", sources=len(own)),
            [Read(0, 0, "f", offset, nbytes, DType.U8, None) for offset, nbytes in own],
            (max(nbytes for _, nbytes in own),),
            index=index,
        )
        for index, own in enumerate(reads)
    ]
    store = _Store()
    reader = _reader(store)
    assert _read(reader, _load(rows)) == _stored(rows)
    assert reader.read_bytes == sum(nbytes for own in reads for _, nbytes in own)
    assert len(store.asked) <= sum(len(own) for own in reads)


@given(offset=st.integers(0, 9000), cut=st.integers(1, 100))
@settings(deadline=None, max_examples=50)
def test_a_tile_takes_its_own_bytes_only(offset: int, cut: int) -> None:
    reads = [
        Read(0, 0, "f", offset, 800, DType.BF16, None),
        Read(0, 0, "f", offset + 801, 1600, DType.F32, None),
    ]
    row = row_of(expression("linear", sources=2), reads, (400,))
    tiles = [TileJob(row, start, min(cut, 400 - start), 0) for start in range(0, 400, cut)]
    found: list[list[bytes]] = []
    for tile in tiles:
        (raw,) = _read(_reader(_Store()), Load((tile,), row.need.load_bytes(tile.count), 0))
        found.append(raw)
    assert b"".join(raw[0] for raw in found) == BYTES[offset : offset + 800]
    assert b"".join(raw[1] for raw in found) == BYTES[offset + 801 : offset + 2401]


# Samples


def test_a_sample_is_its_runs_of_every_input() -> None:
    count = SAMPLE_RUNS * SAMPLE_LENGTH + 1001
    length = sample_runs(count)[0][1]
    reads = [Read(0, 0, "f", offset, 2 * count, DType.BF16, None) for offset in (3, 1000)]
    row = row_of(expression("linear", sources=2), reads, (count,))
    reader = _reader(_Store())
    for data, read in zip(reader.sample(_whole(row)), reads, strict=True):
        runs = [(read.offset + 2 * first, 2 * length) for first, length in sample_runs(count)]
        assert data.numpy().tobytes() == b"".join(BYTES[first : first + n] for first, n in runs)
    assert reader.read_bytes == 2 * 2 * SAMPLE_RUNS * length


# Rows
