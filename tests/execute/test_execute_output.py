"""What a segment writes: output files, and finite numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.assembly_maker import row_of

from raymerge.checkpoints.quantisation.codec import ErrorSums
from raymerge.dtypes import DType
from raymerge.execute.non_finite import first_non_finite
from raymerge.execute.ops import RowJob
from raymerge.execute.output import UNFINISHED, ComputePermit, NotFinite, Output
from raymerge.execute.transfers import Arrival
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.expressions import Read, copy_expression
from raymerge.storage.local.buffers import ALIGNMENT, address_of, aligned_buffer
from raymerge.storage.local.store import LocalStore

Places = tuple[tuple[str, int], ...]


class _Store:
    """Files that grow as they are written to; notes where each write lies, in the file and in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.writes: list[tuple[str, int, int]] = []
        self.shifts: list[tuple[int, int]] = []
        self.error: OSError | None = None

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        if self.error is not None:
            raise self.error
        self.writes.append((key, offset, buffer.nbytes))
        self.shifts.append((offset % ALIGNMENT, address_of(buffer) % ALIGNMENT))
        file = self.files.setdefault(key, bytearray())
        file.extend(b"\x55" * (offset + buffer.nbytes - len(file)))
        file[offset : offset + buffer.nbytes] = buffer

    def copy_range(self, key: str, offset: int, **_: Any) -> int:
        del key, offset
        return 0


def _row(
    nbytes: int, places: Places, index: int = 0, *, dtype: DType = DType.U8, check_finite: bool = False
) -> RowJob:
    read = Read(0, 0, "f", 0, nbytes, dtype, None)
    count = nbytes * 8 // dtype.bits
    return row_of(
        copy_expression(dtype), [read], (count,), index=index, places=places, check_finite=check_finite
    )


def _output(
    store: Any, *, block: int = 3 * ALIGNMENT, turn: ComputePermit | None = None, in_order: bool = False
) -> Output:
    memory = torch.frombuffer(aligned_buffer(block), dtype=torch.uint8)
    return Output(store, memory, turn or ComputePermit(threading.Semaphore(1)), in_order=in_order)


def _giving(data: bytes) -> Callable[[int, torch.Tensor], Arrival | None]:
    def fill(done: int, target: torch.Tensor) -> Arrival | None:
        source = np.frombuffer(data[done : done + target.numel()], dtype=np.uint8)
        target.numpy()[:] = source
        return None

    return fill


def _memory(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def _take(output: Output, row: RowJob, data: bytes, cuts: Sequence[int] = ()) -> None:
    """Hand over a row's bytes in pieces."""
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    if not data:
        output.take(row, 0, 0, _giving(b""))
    for begin, end in pairwise(bounds):
        output.take(row, begin, end - begin, _giving(data[begin:end]))


@st.composite
def _segments(draw: st.DrawFn) -> list[tuple[RowJob, bytes]]:
    """Rows one behind the other, some with gaps before them or other places as well."""
    found, ends = [], {"a": draw(st.integers(0, 9000)), "b": draw(st.integers(0, 9000))}
    for index in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from([DType.U8, DType.BF16, DType.F32, DType.F64]))
        nbytes = draw(st.integers(0, 9000)) // 8 * 8
        places = []
        for name in ("a", "b", "a")[: draw(st.integers(1, 3))]:
            begin = ends[name] + draw(st.sampled_from([0, 0, 1, 8, 4096, 5000]))
            ends[name] = begin + nbytes
            places.append((name, begin))
        row = _row(nbytes, tuple(places), index, dtype=dtype)
        found.append((row, _bytes(nbytes, index)))
    return found


@given(
    segment=_segments(), cuts=st.lists(st.integers(1, 1000).map(lambda n: 8 * n)), blocks=st.integers(2, 5)
)
@settings(deadline=None, max_examples=200)
def test_bytes_go_to_all_of_their_places_and_are_digested(
    segment: list[tuple[RowJob, bytes]], cuts: list[int], blocks: int
) -> None:
    store = _Store()
    output = _output(store, block=blocks * ALIGNMENT)
    for row, data in segment:
        _take(output, row, data, cuts)
    output.flush()
    for row, data in segment:
        assert output.digests[str(row.index)] == xxhash.xxh3_128(data).hexdigest()
        for shard, begin in row.places if data else ():
            assert store.files[shard + UNFINISHED][begin : begin + len(data)] == data
    assert len(output.digests) == len(segment)
    written = sum(len(data) * len(row.places) for row, data in segment)
    assert output.written_bytes == written == sum(nbytes for _, _, nbytes in store.writes)
    assert output.shards == {shard for row, data in segment if data for shard, _ in row.places}


@given(segment=_segments())
@settings(deadline=None, max_examples=100)
def test_bytes_lie_in_memory_as_they_do_in_their_first_place(segment: list[tuple[RowJob, bytes]]) -> None:
    """What is written direct has to; only what goes to further places may lie otherwise."""
    store = _Store()
    output = _output(store)
    for row, data in segment:
        _take(output, _first_place_only(row), data)
    output.flush()
    assert all(in_file == in_memory for in_file, in_memory in store.shifts)


def _first_place_only(row: RowJob) -> RowJob:
    nbytes = row.expression.cast.nbytes(row.num_elements)
    return _row(nbytes, row.places[:1], row.index, dtype=row.expression.cast)


def test_neighbours_are_one_write() -> None:
    store = _Store()
    rows = [_row(60, (("a", 100 + 60 * index), ("b", 7 + 60 * index)), index) for index in range(100)]
    output = _output(store)
    for row in rows:
        _take(output, row, _bytes(60))
    output.flush()
    assert store.writes == [("a.part", 100, 6000), ("b.part", 7, 6000)]


def test_bytes_written_from_where_they_lie_come_after_those_before_them() -> None:
    """A store of parts takes bytes in the order of their places."""
    store, nbytes = _Store(), 1 << 20
    memory = torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(_bytes(nbytes, 1), np.uint8)
    output = _output(store, in_order=True)
    _take(output, _row(ALIGNMENT, (("a", 0),)), _bytes(ALIGNMENT))
    output.take_stored(_row(nbytes, (("a", ALIGNMENT),), 1), 0, memory, is_there=False)
    output.flush()
    assert store.writes == [("a.part", 0, ALIGNMENT), ("a.part", ALIGNMENT, nbytes)]
    assert store.files["a.part"] == _bytes(ALIGNMENT) + _bytes(nbytes, 1)


def test_a_gap_between_rows_ends_a_write_and_leaves_the_gap_alone() -> None:
    store = _Store()
    output = _output(store)
    _take(output, _row(50, (("a", 0),)), _bytes(50))
    _take(output, _row(50, (("a", 60),), 1), _bytes(50))
    output.flush()
    assert store.writes == [("a.part", 0, 50), ("a.part", 60, 50)]
    assert store.files["a.part"][50:60] == b"\x55" * 10


def test_a_row_longer_than_the_block_fills_it_several_times() -> None:
    store = _Store()
    data = _bytes(10 * ALIGNMENT + 5)
    filled: list[int] = []

    def fill(done: int, target: torch.Tensor) -> None:
        filled.append(target.numel())
        _giving(data)(done, target)

    output = _output(store, block=2 * ALIGNMENT)
    output.take(_row(len(data), (("a", 1),)), 0, len(data), fill)
    # All but the last bytes are written by now, as the block was wanted for what came after.
    assert output.written_bytes == len(data) - 6
    output.flush()
    assert filled == [2 * ALIGNMENT - 1, *[2 * ALIGNMENT] * 4, 6]
    assert store.files["a.part"][1:] == data


def test_what_was_written_is_not_written_again() -> None:
    store = _Store()
    output = _output(store)
    _take(output, _row(60, (("a", 0),)), _bytes(60))
    output.flush()
    output.flush()
    _take(output, _row(60, (("a", 60),), 1), _bytes(60, 1))
    output.flush()
    assert store.writes == [("a.part", 0, 60), ("a.part", 60, 60)]
    assert store.files["a.part"] == _bytes(60) + _bytes(60, 1)


def test_elements_are_never_cut_by_the_end_of_a_block() -> None:
    """A float32 that begins two bytes before it goes to the next block."""
    store = _Store()
    data = _bytes(4 * ALIGNMENT)
    filled: list[int] = []

    def fill(done: int, target: torch.Tensor) -> None:
        filled.append(target.numel())
        _giving(data)(done, target)

    output = _output(store, block=2 * ALIGNMENT)
    output.take(_row(len(data), (("a", 2),), dtype=DType.F32), 0, len(data), fill)
    output.flush()
    assert all(count % 4 == 0 for count in filled)
    assert store.files["a.part"][2:] == data


def test_what_is_there_is_digested_and_checked_but_not_written() -> None:
    store = _Store()
    there, absent = _row(64, (("a", 0),)), _row(64, (("a", 64),), 1)
    output = _output(store)
    output.take_stored(there, 0, _memory(_bytes(64)), is_there=True)
    _take(output, absent, _bytes(64, 1))
    output.flush()
    assert store.writes == [("a.part", 64, 64)]
    assert output.digests["0"] == xxhash.xxh3_128(_bytes(64)).hexdigest()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_row_that_is_not_finite_is_named_and_its_block_not_written(bad: float, is_there: bool) -> None:
    store = _Store()
    values = np.ones(5000, dtype=np.float32)
    values[4000] = bad
    row = _row(20_000, (("a", 0),), 3, dtype=DType.F32, check_finite=True)
    output = _output(store, block=8 * ALIGNMENT)
    with pytest.raises(NotFinite) as caught:
        output.take_stored(row, 0, _memory(values.tobytes()), is_there=is_there)
    assert caught.value.row is row
    assert store.writes == []
    assert output.digests == {}


def test_what_need_not_be_finite_may_be_anything() -> None:
    store = _Store()
    row = _row(8, (("a", 0),), dtype=DType.F32)
    output = _output(store)
    _take(output, row, np.array([np.nan, np.inf], dtype=np.float32).tobytes())
    output.flush()
    assert store.writes == [("a.part", 0, 8)]


# Copies


@pytest.mark.parametrize("lies_well", [True, False])
def test_long_bytes_are_written_from_where_they_lie_if_they_lie_as_in_their_file(lies_well: bool) -> None:
    """The others, and short ones, come into the block first."""
    store = _Store()
    nbytes, begin = 3 << 19, 5 * ALIGNMENT + 100
    memory = torch.frombuffer(aligned_buffer(nbytes + 2 * ALIGNMENT), dtype=torch.uint8)
    data = memory[100 if lies_well else 101 :][:nbytes]
    data.copy_(_memory(_bytes(nbytes)))
    row = _row(nbytes + 500, (("a", begin - 500), ("b", 7)))
    output = _output(store, block=512 * ALIGNMENT)
    output.take_stored(row, 0, _memory(_bytes(500, 1)), is_there=False)
    output.take_stored(row, 500, data, is_there=False)
    assert store.writes == ([("a.part", begin, nbytes), ("b.part", 507, nbytes)] if lies_well else [])
    # The memory is free, whatever became of the bytes.
    data.zero_()
    output.flush()
    for name, first in (("a.part", begin - 500), ("b.part", 7)):
        assert store.files[name][first:] == _bytes(500, 1) + _bytes(nbytes)
    assert output.digests["0"] == xxhash.xxh3_128(_bytes(500, 1) + _bytes(nbytes)).hexdigest()
    assert output.written_bytes == 2 * (nbytes + 500)


def test_stored_bytes_are_digested_behind_those_that_are_still_to_arrive() -> None:
    store = _Store()
    nbytes = 1 << 20
    first, second = _bytes(100), _bytes(nbytes, 1)

    def fill(done: int, target: torch.Tensor) -> Arrival:
        class Late:
            def synchronize(self) -> None:
                _giving(first)(done, target)

        return Late()

    row = _row(100 + nbytes, (("a", ALIGNMENT - 100),))
    output = _output(store)
    output.take(row, 0, 100, fill)
    memory = torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)
    memory.copy_(_memory(second))
    output.take_stored(row, 100, memory, is_there=False)
    output.flush()
    assert store.files["a.part"][ALIGNMENT - 100 :] == first + second
    assert output.digests["0"] == xxhash.xxh3_128(first + second).hexdigest()


class _Copying(_Store):
    """A store whose file system copies by itself, the first so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.copies: list[tuple[str, int, str, int, int]] = []

    def copy_range(self, key: str, offset: int, **how: Any) -> int:
        self.times -= 1
        if self.times < 0:
            return 0
        self.copies.append((key, offset, how["source_key"], how["source_offset"], how["nbytes"]))
        return int(how["nbytes"])


def test_the_file_system_copies_to_every_place(tmp_path: Path) -> None:
    store, source = _Copying(9), LocalStore(tmp_path)
    row = _row(400, (("a", 1000), ("b", 50)))
    output = _output(store)
    (read,) = row.inputs
    assert isinstance(read, Read)
    assert output.copy_from(source, read, row, (100, 300))
    output.flush()
    assert store.copies == [("a.part", 1100, "f", 100, 300), ("b.part", 150, "f", 100, 300)]
    assert (output.written_bytes, output.shards, store.writes) == (600, {"a", "b"}, [])


def test_where_one_place_cannot_be_copied_to_nothing_counts_as_copied(tmp_path: Path) -> None:
    store, source = _Copying(1), LocalStore(tmp_path)
    row = _row(400, (("a", 1000), ("b", 50)))
    output = _output(store)
    (read,) = row.inputs
    assert isinstance(read, Read)
    assert not output.copy_from(source, read, row, (0, 400))
    assert (output.written_bytes, output.shards) == (0, set())


def test_what_encoding_changed_in_tiles_is_added_up_row_by_row() -> None:
    output, rows = _output(_Store()), [_row(8, (("a", 8 * index),), index) for index in (3, 5)]
    for row, errors, values in ((rows[0], 0.5, 4.0), (rows[1], 2.0, 1.0), (rows[0], 0.25, 8.0)):
        sums = ErrorSums(*(torch.tensor(each, dtype=torch.float64) for each in (errors, values)))
        output.add_errors(row, sums)
    assert output.encoding_errors == {"3": (0.75, 12.0), "5": (2.0, 1.0)}


def test_scales_do_not_come_between_their_codes() -> None:
    """Both take turns, and each is written in as few writes as if it came alone."""
    store, codes, scales = _Store(), _bytes(10 * ALIGNMENT), _bytes(500, 1)
    output = _output(store, block=64 * ALIGNMENT)
    row, beside = _row(len(codes), (("a", 0),), 0), _row(len(scales), (("a", len(codes)),), 1)
    for number in range(10):
        part = codes[number * ALIGNMENT : (number + 1) * ALIGNMENT]
        output.take(row, number * ALIGNMENT, ALIGNMENT, _giving(part))
        output.take(beside, number * 50, 50, _giving(scales[number * 50 : (number + 1) * 50]), aside=True)
    output.flush()
    assert store.writes == [("a" + UNFINISHED, 0, len(codes)), ("a" + UNFINISHED, len(codes), len(scales))]
    assert bytes(store.files["a" + UNFINISHED]) == codes + scales
    assert output.digests == {
        "0": xxhash.xxh3_128(codes).hexdigest(),
        "1": xxhash.xxh3_128(scales).hexdigest(),
    }


@given(
    turns=st.lists(st.tuples(st.integers(1, 6000), st.integers(1, 900)), min_size=1, max_size=12),
    blocks=st.integers(2, 20),
)
@settings(deadline=None, max_examples=200)
def test_codes_and_scales_that_take_turns_go_to_their_places(
    turns: list[tuple[int, int]], blocks: int
) -> None:
    store = _Store()
    output = _output(store, block=blocks * ALIGNMENT)
    codes, scales = _bytes(sum(a for a, _ in turns)), _bytes(sum(b for _, b in turns), 1)
    row, beside = _row(len(codes), (("a", 7),), 0), _row(len(scales), (("a", 7 + len(codes)),), 1)
    done = made = 0
    for of_codes, of_scales in turns:
        output.take(row, done, of_codes, _giving(codes[done : done + of_codes]))
        output.take(beside, made, of_scales, _giving(scales[made : made + of_scales]), aside=True)
        done, made = done + of_codes, made + of_scales
    output.flush()
    assert bytes(store.files["a" + UNFINISHED][7:]) == codes + scales
    assert output.digests == {
        "0": xxhash.xxh3_128(codes).hexdigest(),
        "1": xxhash.xxh3_128(scales).hexdigest(),
    }


class _Watching(_Store):
    """Notes whether others may compute while it is written to."""

    def __init__(self, turns: threading.Semaphore, notes: list[str]) -> None:
        super().__init__()
        self._turns, self._notes = turns, notes

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        self._notes.append(f"write {_may_compute(self._turns)}")
        super().write_extent(key, offset, buffer)


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
    turn = ComputePermit(turns)
    row = _row(5 * ALIGNMENT, (("a", 0),), dtype=DType.F32, check_finite=True)

    def check(*_: object) -> None:
        notes.append(f"check {_may_compute(turns)}")

    def fill(done: int, target: torch.Tensor) -> Arrival:
        notes.append(f"fill {_may_compute(turns)}")
        target.fill_(done % 251)
        return _Late(turns, notes)

    monkeypatch.setattr("raymerge.execute.output.first_non_finite", check)
    if is_held:
        turn.take()
    output = _output(_Watching(turns, notes), turn=turn)
    output.take(row, 0, 5 * ALIGNMENT, fill)
    output.flush()
    computing = not is_held
    block = [f"fill {computing}", "arrive True", f"check {computing}", "write True"]
    assert notes == 2 * block
    # It has its turn again where it had one.
    assert _may_compute(turns) is computing


FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def _finite_bytes(values: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = values.contiguous().view(torch.uint8).numpy()
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 32_767, 32_768, 70_000])
def test_the_first_bad_element_is_named(dtype: DType, bad: float, place: int) -> None:
    values = torch.ones(70_001, dtype=torch_dtype(dtype))
    values[place] = bad
    values[-1] = bad
    assert first_non_finite(_finite_bytes(values), dtype) == place


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_are_finite(dtype: DType) -> None:
    limits = torch.finfo(torch_dtype(dtype))
    values = torch.tensor(
        [limits.max, limits.min, limits.tiny, limits.smallest_normal, 0.0], dtype=torch_dtype(dtype)
    )
    assert first_non_finite(_finite_bytes(values), dtype) is None


@given(patterns=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_bit_pattern_is_judged_as_torch_does(dtype: DType, patterns: list[int]) -> None:
    data = np.array(patterns, np.uint16)
    bad = ~torch.from_numpy(data.view(np.int16)).view(torch_dtype(dtype)).isfinite()
    expected = int(bad.int().argmax()) if bool(bad.any()) else None
    assert first_non_finite(data.view(np.uint8), dtype) == expected
