"""What a segment reads: jobs, tiles and how they are loaded."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_config
from kits.gather_maker import expression, make_stock, plan_of, row_of, whole
from kits.plan_maker import good, header_checkpoint, llama_specs
from kits.recipe_maker import linear

from raymerge.dtypes import DType
from raymerge.execute.lane import LoadBuffer
from raymerge.execute.reading import Load, LoadReader, RawRows, ReadPlan, TileJob, read_plans
from raymerge.execute.transfers import HostTransfers
from raymerge.merge_plan import segments
from raymerge.merge_plan.expressions import (
    Expression,
    Gather,
    Op,
    Output,
    Part,
    Read,
    copy_expression,
    gathered,
)
from raymerge.merge_plan.jobs import Jobs, OpJob
from raymerge.merge_plan.memory import READ_MARGIN, Lane
from raymerge.merge_plan.plan import Plan
from raymerge.methods import BLOCK, ROW_GROUP, SAMPLE_LENGTH, SAMPLE_RUNS, sample_runs
from raymerge.storage.local.buffers import ALIGNMENT, aligned_buffer, buffer_nbytes
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.local.store import LocalStore

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
        assert buffer.nbytes >= buffer_nbytes(nbytes)
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


def _row(reads: Sequence[tuple[int, int]], index: int = 0, *, source: int = 0, key: str = "f") -> OpJob:
    """A row whose inputs are these offsets and lengths."""
    inputs = [Read(0, source, key, offset, nbytes, DType.U8, None) for offset, nbytes in reads]
    return row_of(copy_expression(DType.U8), inputs, (reads[0][1],), index=index)


def _whole(op: OpJob) -> TileJob:
    return TileJob(op, 0, op.num_elements, 0)


def _load(ops: Sequence[OpJob]) -> Load:
    """What the executor makes of ops that are read together."""
    nbytes = sum(op.need.load_bytes(op.num_elements) for op in ops)
    return Load(tuple(map(_whole, ops)), nbytes, 0)


def _read(reader: LoadReader, load: Load, *, again: bool = False) -> list[list[bytes]]:
    buffer = torch.frombuffer(aligned_buffer(load.nbytes), dtype=torch.uint8)[: load.nbytes]
    found = reader.read(load, buffer, again=again)
    return [[each.numpy().tobytes() for each in raw if isinstance(each, torch.Tensor)] for raw in found]


def _stored(ops: Sequence[OpJob]) -> list[list[bytes]]:
    return [
        [BYTES[read.offset : read.offset + read.nbytes] for read in op.inputs if isinstance(read, Read)]
        for op in ops
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
    ops = [_row([(64 * index, 64)], index, key=f"file{index % 3}") for index in range(9)]
    assert _read(_reader(store), _load(ops)) == _stored(ops)
    assert [key for key, _, _, _ in store.asked] == ["file0", "file1", "file2"]


@pytest.mark.parametrize(("hole", "requests"), [(0, 1), (READ_MARGIN, 1), (READ_MARGIN + 1, 10)])
def test_small_holes_are_read_along_and_not_counted(hole: int, requests: int) -> None:
    store = _Store()
    ops = [_row([(7 + (100 + hole) * index, 100)], index) for index in range(10)]
    reader = _reader(store)
    assert _read(reader, _load(ops)) == _stored(ops)
    assert len(store.asked) == requests
    assert reader.read_bytes == 1000


@pytest.mark.parametrize(("method", "place"), [("copy", 9000), ("linear", None)])
def test_what_is_copied_is_wanted_where_it_will_be_written_from(method: str, place: int | None) -> None:
    """From the first of its ops on; what is computed lies as in its file, as elements must."""
    store = _Store()
    how = copy_expression(DType.U8) if method == "copy" else expression(method, sources=1)
    ops = [
        row_of(
            how, [Read(0, 0, "f", 500 + 64 * at, 64, DType.U8, None)], (64,), index=at, places=(("a", put),)
        )
        for at, put in enumerate((9000, 9064))
    ]
    assert _read(_reader(store), _load(ops)) == _stored(ops)
    assert store.like == [place]
    tile = TileJob(ops[0], 16, 48, 0)
    _read(_reader(store), Load((tile,), _load(ops).nbytes, 0))
    assert store.like == [place, place and place + 16]


def test_bytes_that_are_wanted_twice_are_read_once() -> None:
    store = _Store()
    ops = [_row([(1000, 300), (1000, 300)]), _row([(1000, 300)], 1), _row([(1100, 100)], 2)]
    assert _read(_reader(store), _load(ops)) == _stored(ops)
    assert store.asked == [("f", 1000, 300, False)]


_extents = st.tuples(st.integers(0, 300_000), st.integers(0, 20_000))
_near = st.tuples(st.integers(0, 5 * ALIGNMENT), st.integers(0, 3 * ALIGNMENT))
_aligned = st.tuples(st.integers(0, 40).map(lambda n: 4096 * n - 1).filter(lambda n: n >= 0), st.just(1))


@given(
    reads=st.lists(
        st.lists(st.one_of(_extents, _near, _aligned), min_size=1, max_size=4), min_size=1, max_size=12
    )
)
@settings(deadline=None, max_examples=60)
def test_wherever_bytes_lie_they_fit_the_buffer_and_come_out_right(
    reads: list[list[tuple[int, int]]],
) -> None:
    ops = [
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
    assert _read(reader, _load(ops)) == _stored(ops)
    assert reader.read_bytes == sum(nbytes for own in reads for _, nbytes in own)
    assert len(store.asked) <= sum(len(own) for own in reads)


@given(offset=st.integers(0, 9000), cut=st.integers(1, 100))
@settings(deadline=None, max_examples=25)
def test_a_tile_takes_its_own_bytes_only(offset: int, cut: int) -> None:
    reads = [
        Read(0, 0, "f", offset, 800, DType.BF16, None),
        Read(0, 0, "f", offset + 801, 1600, DType.F32, None),
    ]
    op = row_of(expression("linear", sources=2), reads, (400,))
    tiles = [TileJob(op, start, min(cut, 400 - start), 0) for start in range(0, 400, cut)]
    found: list[list[bytes]] = []
    for tile in tiles:
        (raw,) = _read(_reader(_Store()), Load((tile,), op.need.load_bytes(tile.count), 0))
        found.append(raw)
    assert b"".join(raw[0] for raw in found) == BYTES[offset : offset + 800]
    assert b"".join(raw[1] for raw in found) == BYTES[offset + 801 : offset + 2401]


def test_a_sample_is_its_runs_of_every_input() -> None:
    count = SAMPLE_RUNS * SAMPLE_LENGTH + 1001
    length = sample_runs(count)[0][1]
    reads = [Read(0, 0, "f", offset, 2 * count, DType.BF16, None) for offset in (3, 1000)]
    op = row_of(expression("linear", sources=2), reads, (count,))
    reader = _reader(_Store())
    for data, read in zip(reader.sample(_whole(op)), reads, strict=True):
        runs = [(read.offset + 2 * first, 2 * length) for first, length in sample_runs(count)]
        assert data.numpy().tobytes() == b"".join(BYTES[first : first + n] for first, n in runs)
    assert reader.read_bytes == 2 * 2 * SAMPLE_RUNS * length


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


def _load_all(nbytes: int, work: int = 0) -> Load:
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
        assert buffer.buffer(_load_all(nbytes, work)).numel() >= nbytes
        memory.work = work
        memory.look()
        memory.work = 0
        buffer.leave(None)
    return buffer


@given(sizes=_sizes())
@settings(deadline=None, max_examples=50)
def test_the_buffer_and_the_work_together_never_pass_the_limit(sizes: list[tuple[int, int]]) -> None:
    memory = _Memory()
    buffer = _filled(memory, sizes)
    assert memory.most <= LIMIT
    assert memory.live == buffer.buffer(_load_all(0)).numel()


@given(sizes=_sizes())
@settings(deadline=None, max_examples=50)
def test_there_is_one_buffer_at_a_time(sizes: list[tuple[int, int]]) -> None:
    """The old one is gone before a new one is asked for, whether or not both would fit."""
    memory = _Memory()
    buffer = _buffer(memory)
    for nbytes, work in sizes:
        before, given_before = memory.live, memory.given
        found = buffer.buffer(_load_all(nbytes, work)).numel()
        assert memory.live == found
        assert found in (before, max(USUAL, nbytes))
        # A new one only where the old one was too short, or too long for the work.
        if memory.given > given_before:
            assert before < nbytes or (before > USUAL and before + work > LIMIT)


def test_a_large_buffer_is_kept_while_there_is_room_for_it() -> None:
    memory = _Memory()
    buffer = _filled(memory, [(600, 400), (100, 400), (599, 0), (600, 1)])
    assert memory.given == 1
    assert memory.live == buffer.buffer(_load_all(1)).numel() == 600


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
        buffer.buffer(_load_all(50))
        notes.append(f"read {number}")
        buffer.leave(_Left(notes, f"left {number}"))
    buffer.buffer(_load_all(50))
    buffer.buffer(_load_all(50))
    assert notes == ["buffer 100", "read 0", "left 0", "read 1", "left 1", "read 2", "left 2"]


def test_what_leaves_is_waited_for_before_the_buffer_goes() -> None:
    """Memory that the device still reads must not go to anybody else."""
    notes: list[str] = []
    buffer = _buffer(_Noting(notes))
    buffer.buffer(_load_all(50))
    buffer.leave(_Left(notes, "left"))
    buffer.buffer(_load_all(500))
    assert notes == ["buffer 100", "left", "buffer 500"]


CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20

EXPRESSIONS = {
    "copy": copy_expression(DType.BF16),
    "linear": expression("linear", sources=3, weight=1.0, cast=DType.BF16),
    "ties": expression("ties", sources=2, has_base=True, weight=1.0, density=0.5),
    "arcee_fusion": expression("arcee_fusion", sources=1, has_base=True),
    "iso_c": expression("iso_c", sources=2, has_base=True, weight=1.0),
}


def _tile_row(name: str, shape: tuple[int, ...], index: int = 0, *, is_flat: bool = True) -> OpJob:
    made_of = EXPRESSIONS[name]
    count = int(torch.Size(shape).numel())
    inputs = [Read(0, source, "f", 0, 2 * count, DType.BF16, None) for source in range(_inputs(made_of))]
    return row_of(made_of, inputs, shape, index=index, is_flat=is_flat)


def _inputs(made_of: Expression) -> int:
    return max(1, len(made_of.bind(keys=(), shape=()).sources) + made_of.has_base)


def _cut(ops: list[OpJob], budget: int, device: torch.device = CPU) -> list[ReadPlan]:
    return list(read_plans(ops, Lane(budget), device))


@st.composite
def _rows(draw: st.DrawFn) -> list[OpJob]:
    found = []
    for index in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from(list(EXPRESSIONS)))
        most = 40 if name == "iso_c" else 1 << draw(st.integers(1, 14))
        shape = (draw(st.integers(0, most)), draw(st.integers(1, 700)))
        found.append(_tile_row(name, shape, index, is_flat=name == "copy" or draw(st.integers(0, 9)) > 0))
    return found


def _least(ops: list[OpJob]) -> int:
    return max(op.need.least_bytes for op in ops)


@given(ops=_rows(), above=st.integers(0, 1 << 28), device=st.sampled_from([CPU, GPU]))
@settings(deadline=None, max_examples=50)
def test_every_element_is_taken_once_and_in_order(ops: list[OpJob], above: int, device: torch.device) -> None:
    found: dict[int, int] = {}
    for read_plan in _cut(ops, _least(ops) + above, device):
        for load in read_plan.loads:
            for tile in load.tiles:
                assert tile.start == found.setdefault(tile.op.index, 0)
                found[tile.op.index] += tile.count
                unit = tile.op.need.unit
                assert tile.start % unit == 0
                assert tile.count % unit == 0 or tile.start + tile.count == tile.op.num_elements
    assert list(found) == [op.index for op in ops]
    assert list(found.values()) == [op.num_elements for op in ops]


@given(ops=_rows(), above=st.integers(0, 1 << 28))
@settings(deadline=None, max_examples=50)
def test_every_load_fits_its_lane_with_the_block_and_the_work(ops: list[OpJob], above: int) -> None:
    lane = Lane(_least(ops) + above)
    for read_plan in read_plans(ops, lane, CPU):
        for load in read_plan.loads:
            assert max(load.nbytes, lane.load_bytes) + load.work_bytes + lane.write_bytes <= lane.budget
            assert load.nbytes >= sum(tile.op.need.load_bytes(tile.count) for tile in load.tiles)
            for tile in load.tiles:
                assert load.work_bytes >= tile.op.need.work_bytes(tile.op.need.piece_of(tile.count))


@given(ops=_rows(), above=st.integers(0, 1 << 28))
@settings(deadline=None, max_examples=50)
def test_several_rows_are_read_together_as_long_as_they_fit_a_buffer(ops: list[OpJob], above: int) -> None:
    lane = Lane(_least(ops) + above)
    cut = list(read_plans(ops, lane, CPU))
    for read_plan in cut:
        assert len(read_plan.loads) == 1 or all(len(load.tiles) == 1 for load in read_plan.loads)
        for load in read_plan.loads:
            assert len(load.tiles) == 1 or load.nbytes <= lane.load_bytes
    for left, right in pairwise(cut):
        first, last = right.loads[0].tiles[0].op, left.loads[0].tiles[-1].op
        # What is made in place of what was read has its bytes for itself.
        is_shared = not (first.need.in_place or last.need.in_place)
        if is_shared and len(left.loads) == len(right.loads) == 1:
            assert left.loads[0].nbytes + first.need.load_bytes(first.num_elements) > lane.load_bytes


@pytest.mark.parametrize(
    ("name", "unit"), [("copy", BLOCK), ("linear", BLOCK), ("ties", BLOCK), ("arcee_fusion", ROW_GROUP * 700)]
)
def test_a_long_row_is_cut_at_its_unit_and_goes_in_tiles_of_a_buffer(name: str, unit: int) -> None:
    op = _tile_row(name, (200_000, 700))
    lane = Lane(128 * MIB)
    (read_plan,) = _cut([op], lane.budget)
    counts = [load.tiles[0].count for load in read_plan.loads]
    assert len(counts) > 2
    assert all(count % unit == 0 for count in counts[:-1])
    largest = op.need.load_bytes(counts[0])
    assert lane.load_bytes - op.need.load_bytes(unit) < largest <= lane.load_bytes + op.need.read_margin


@pytest.mark.parametrize("budget", [32 * MIB, 256 * MIB])
def test_pieces_stay_small_on_a_processor_and_grow_on_a_gpu(budget: int) -> None:
    """Whatever the host's memory, of which they take none; tiles of both have the same length."""
    op = _tile_row("ties", (10_000, 700))
    (on_cpu,), (on_gpu,) = _cut([op], budget), _cut([op], budget, GPU)
    assert {load.tiles[0].piece for load in on_cpu.loads} == {BLOCK}
    (piece,) = {load.tiles[0].piece for load in on_gpu.loads}
    assert 3 << 20 < piece <= 1 << 22
    assert piece * op.need.on_gpu.work_per_element <= 256 * MIB
    assert [load.nbytes for load in on_gpu.loads] == [load.nbytes for load in on_cpu.loads]


@given(ops=_rows(), above=st.integers(0, 1 << 28))
@settings(deadline=None, max_examples=50)
def test_on_a_gpu_nothing_is_larger_on_the_host(ops: list[OpJob], above: int) -> None:
    lane = Lane(_least(ops) + above)
    most = max(load.nbytes for read_plan in read_plans(ops, lane, CPU) for load in read_plan.loads)
    for read_plan in read_plans(ops, lane, GPU):
        for load in read_plan.loads:
            assert load.nbytes <= max(most, lane.load_bytes)


def test_on_a_gpu_computing_takes_none_of_the_host_s_memory() -> None:
    op = _tile_row("linear", (10_000, 700))
    (on_cpu,), (on_gpu,) = _cut([op], 256 * MIB), _cut([op], 256 * MIB, GPU)
    assert all(load.work_bytes > 0 for load in on_cpu.loads)
    assert all(load.work_bytes == 0 for load in on_gpu.loads)


@pytest.mark.parametrize(("method", "loads"), [("linear", 1), ("slerp", 1), ("linear", 3), ("slerp", 3)])
def test_padding_comes_in_whole_groups(method: str, loads: int, tmp_path: Path) -> None:
    """The mean of the rows that are there is taken beforehand, also where all fit one load."""
    num_rows, columns, real = (40, 300, 33) if loads == 1 else (4000, 300, 3500)
    stock = make_stock(tmp_path, {"a": torch.zeros(num_rows, columns)})
    gather = Gather(num_rows, columns, (stock.term("a"),), ((0, 0, real, 0),), real)
    has_base = method == "slerp"
    made_of = expression(method, sources=1, has_base=has_base, weight=1.0, t=0.5)
    reads = (gathered(0, gather),) * (1 + has_base)
    part = Part("out", (num_rows, columns), None)
    op = Op(num_rows * columns, made_of, (part,), reads)
    plan = plan_of(stock, [Output("out", DType.F32, (num_rows, columns), (op,), True)])
    (read_plan,) = _cut(list(Jobs(plan).ops(0)), 40 * MIB)
    assert (len(read_plan.loads) > 1) is (loads > 1)
    tiles = [load.tiles[0] for load in read_plan.padding]
    assert all(tile.is_padding for tile in tiles)
    assert [tile.start for tile in tiles] == [0, *accumulate(tile.count for tile in tiles)][:-1]
    assert sum(tile.count for tile in tiles) == real * columns
    assert all(tile.start % (ROW_GROUP * columns) == 0 for tile in tiles)
    assert not any(load.tiles[0].is_padding for load in read_plan.loads)
    assert sum(load.tiles[0].count for load in read_plan.loads) == num_rows * columns


def _decoded(plan: Plan) -> list[OpJob]:
    jobs = Jobs(plan)
    return [op for segment in range(plan["segments"].num_rows) for op in jobs.ops(segment)]


def test_gathered_rows_are_not_read_over_pages_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was cut short since would have reading another one fail."""
    monkeypatch.setattr(PageMaps, "_maps_fast", lambda *_: True)
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 1)
    shape = (1024, 128)
    one, other = torch.randn(shape), torch.randn(shape)
    stock = make_stock(tmp_path, {"one": one}, {"other": other})
    made_of = expression("linear", sources=1)
    inputs = {"one": stock.read("one"), "other": gathered(0, whole(stock.term("other", 1), shape[1]))}
    outputs = [
        Output(name, DType.F32, shape, (Op(one.numel(), made_of, (Part(name, shape, None),), (each,)),), True)
        for name, each in inputs.items()
    ]
    plan = plan_of(stock, outputs)
    ops = sorted(_decoded(plan), key=lambda op: op.tensor)
    first, second = (next(read_plans([op], Lane(64 << 20), CPU)).loads[0] for op in ops)
    maps, buffer = PageMaps(), torch.frombuffer(aligned_buffer(first.nbytes), dtype=torch.uint8)
    maps.watch(buffer.numpy().data, buffer)
    reader = LoadReader([LocalStore(each.root) for each in stock.sources], maps)
    reader.read(first, buffer)
    assert maps.mapped_bytes
    os.truncate(Path(stock.sources[0].root) / "model.safetensors", 1)
    ((rows,),) = reader.read(second, buffer)
    assert isinstance(rows, RawRows)
    assert torch.equal(torch.cat(rows.stored).view(torch.float32).view(shape), other)
    assert (maps.mapped_bytes, maps.lost_pages) == (0, 0)


def test_tables_may_be_cut_by_arrow(tmp_path: Path) -> None:
    """Of a plan of several segments and shards, with a long tensor that is cut."""
    specs = {**llama_specs(2), "model.big.weight": (DType.BF16, (3_000_000,))}
    roots = [header_checkpoint(tmp_path / name, specs, llama_config(layers=2)) for name in "ab"]
    recipe = linear(*roots)
    plan = good({**recipe, "shard_size": 4_000_000}).plan
    cut = {name: pa.concat_tables([table.slice(0, 1), table.slice(1)]) for name, table in plan.tables.items()}
    ops = _decoded(plan)
    assert [op.index for op in ops] == list(range(plan["ops"].num_rows))
    assert sum(op.tensor == "model.big.weight" for op in ops) > 1
    assert _decoded(replace(plan, tables=cut)) == ops
