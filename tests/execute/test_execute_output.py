"""What a segment writes: output files, finite numbers, and segments as a whole."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, write_checkpoint, write_json
from kits.gather_maker import row_of
from kits.memory_meter import AllocationMeter
from kits.merge_cases import LEAST_MEMORY, Family, make_family, recipes
from kits.recipe_maker import one, stack
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge.api import plan
from raymerge.checkpoints.header import TensorSpec, lay_out
from raymerge.checkpoints.quantisation.block_codec import ErrorSums
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, DiskSpaceError, NonFiniteError
from raymerge.execute import lane as lane_module
from raymerge.execute.non_finite import first_non_finite
from raymerge.execute.output import UNFINISHED, ComputePermit, NotFinite, Output
from raymerge.execute.transfers import Arrival
from raymerge.merge_plan.elements import torch_dtype
from raymerge.merge_plan.expressions import Read, copy_expression
from raymerge.merge_plan.jobs import Jobs, OpJob
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
) -> OpJob:
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


def _giving(data: bytes, filled: list[int] | None = None) -> Callable[[int, torch.Tensor], Arrival | None]:
    """Gives the bytes, and notes how many were asked for."""

    def fill(done: int, target: torch.Tensor) -> Arrival | None:
        if filled is not None:
            filled.append(target.numel())
        source = np.frombuffer(data[done : done + target.numel()], dtype=np.uint8)
        target.numpy()[:] = source
        return None

    return fill


def _memory(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def _take(output: Output, op: OpJob, data: bytes, cuts: Sequence[int] = ()) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    if not data:
        output.take(op, 0, 0, _giving(b""))
    for begin, end in pairwise(bounds):
        output.take(op, begin, end - begin, _giving(data[begin:end]))


@st.composite
def _segments(draw: st.DrawFn) -> list[tuple[OpJob, bytes]]:
    """Ops one behind the other, some with gaps before them or other places as well."""
    found, ends = [], {"a": draw(st.integers(0, 9000)), "b": draw(st.integers(0, 9000))}
    for index in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from([DType.U8, DType.BF16, DType.F32, DType.F64]))
        nbytes = draw(st.integers(0, 9000)) // 8 * 8
        places = []
        for name in ("a", "b", "a")[: draw(st.integers(1, 3))]:
            begin = ends[name] + draw(st.sampled_from([0, 0, 1, 8, 4096, 5000]))
            ends[name] = begin + nbytes
            places.append((name, begin))
        op = _row(nbytes, tuple(places), index, dtype=dtype)
        found.append((op, _bytes(nbytes, index)))
    return found


@given(
    segment=_segments(), cuts=st.lists(st.integers(1, 1000).map(lambda n: 8 * n)), blocks=st.integers(2, 5)
)
@settings(deadline=None, max_examples=50)
def test_bytes_go_to_all_of_their_places_and_are_digested(
    segment: list[tuple[OpJob, bytes]], cuts: list[int], blocks: int
) -> None:
    store = _Store()
    output = _output(store, block=blocks * ALIGNMENT)
    for op, data in segment:
        _take(output, op, data, cuts)
    for _ in range(2):
        output.flush()
    for op, data in segment:
        assert output.digests[str(op.index)] == xxhash.xxh3_128(data).hexdigest()
        for shard, begin in op.places if data else ():
            assert store.files[shard + UNFINISHED][begin : begin + len(data)] == data
    assert len(output.digests) == len(segment)
    written = sum(len(data) * len(op.places) for op, data in segment)
    assert output.written_bytes == written == sum(nbytes for _, _, nbytes in store.writes)
    assert output.shards == {shard for op, data in segment if data for shard, _ in op.places}
    # What is written direct lies in memory as in its file; only what goes to further places may not.
    if all(len(op.places) == 1 for op, _ in segment):
        assert all(in_file == in_memory for in_file, in_memory in store.shifts)


def test_neighbours_are_one_write() -> None:
    store = _Store()
    ops = [_row(60, (("a", 100 + 60 * index), ("b", 7 + 60 * index)), index) for index in range(100)]
    output = _output(store)
    for op in ops:
        _take(output, op, _bytes(60))
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


def test_elements_are_never_cut_by_the_end_of_a_block() -> None:
    """A float32 that begins two bytes before it goes to the next block."""
    store = _Store()
    data, filled = _bytes(4 * ALIGNMENT), list[int]()
    output = _output(store, block=2 * ALIGNMENT)
    output.take(_row(len(data), (("a", 2),), dtype=DType.F32), 0, len(data), _giving(data, filled))
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
    op = _row(20_000, (("a", 0),), 3, dtype=DType.F32, check_finite=True)
    output = _output(store, block=8 * ALIGNMENT)
    with pytest.raises(NotFinite) as caught:
        output.take_stored(op, 0, _memory(values.tobytes()), is_there=is_there)
    assert caught.value.op is op
    assert store.writes == []
    assert output.digests == {}


def test_what_need_not_be_finite_may_be_anything() -> None:
    store = _Store()
    op = _row(8, (("a", 0),), dtype=DType.F32)
    output = _output(store)
    _take(output, op, np.array([np.nan, np.inf], dtype=np.float32).tobytes())
    output.flush()
    assert store.writes == [("a.part", 0, 8)]


@pytest.mark.parametrize("lies_well", [True, False])
def test_long_bytes_are_written_from_where_they_lie_if_they_lie_as_in_their_file(lies_well: bool) -> None:
    """The others, and short ones, come into the block first."""
    store = _Store()
    nbytes, begin = 3 << 19, 5 * ALIGNMENT + 100
    memory = torch.frombuffer(aligned_buffer(nbytes + 2 * ALIGNMENT), dtype=torch.uint8)
    data = memory[100 if lies_well else 101 :][:nbytes]
    data.copy_(_memory(_bytes(nbytes)))
    op = _row(nbytes + 500, (("a", begin - 500), ("b", 7)))
    output = _output(store, block=512 * ALIGNMENT)
    output.take_stored(op, 0, _memory(_bytes(500, 1)), is_there=False)
    output.take_stored(op, 500, data, is_there=False)
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

    op = _row(100 + nbytes, (("a", ALIGNMENT - 100),))
    output = _output(store)
    output.take(op, 0, 100, fill)
    memory = torch.frombuffer(aligned_buffer(nbytes), dtype=torch.uint8)
    memory.copy_(_memory(second))
    output.take_stored(op, 100, memory, is_there=False)
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


@pytest.mark.parametrize(("times", "is_copied"), [(9, True), (1, False)])
def test_the_file_system_copies_to_every_place_or_to_none(
    times: int, is_copied: bool, tmp_path: Path
) -> None:
    store, op = _Copying(times), _row(400, (("a", 1000), ("b", 50)))
    output = _output(store)
    (read,) = op.inputs
    assert isinstance(read, Read)
    assert output.copy_from(LocalStore(tmp_path), read, op, (100, 300)) is is_copied
    output.flush()
    copies = [("a.part", 1100, "f", 100, 300), ("b.part", 150, "f", 100, 300)]
    assert store.copies == (copies if is_copied else copies[:1])
    assert (output.written_bytes, output.shards) == ((600, {"a", "b"}) if is_copied else (0, set()))
    assert store.writes == []


def test_what_encoding_changed_in_tiles_is_added_up_row_by_row() -> None:
    output, ops = _output(_Store()), [_row(8, (("a", 8 * index),), index) for index in (3, 5)]
    for op, errors, values in ((ops[0], 0.5, 4.0), (ops[1], 2.0, 1.0), (ops[0], 0.25, 8.0)):
        sums = ErrorSums(*(torch.tensor(each, dtype=torch.float64) for each in (errors, values)))
        output.add_errors(op, sums)
    assert output.encoding_errors == {"3": (0.75, 12.0), "5": (2.0, 1.0)}


def test_scales_do_not_come_between_their_codes() -> None:
    """Both take turns, and each is written in as few writes as if it came alone."""
    store, codes, scales = _Store(), _bytes(10 * ALIGNMENT), _bytes(500, 1)
    output = _output(store, block=64 * ALIGNMENT)
    op, beside = _row(len(codes), (("a", 0),), 0), _row(len(scales), (("a", len(codes)),), 1)
    for number in range(10):
        part = codes[number * ALIGNMENT : (number + 1) * ALIGNMENT]
        output.take(op, number * ALIGNMENT, ALIGNMENT, _giving(part))
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
@settings(deadline=None, max_examples=50)
def test_codes_and_scales_that_take_turns_go_to_their_places(
    turns: list[tuple[int, int]], blocks: int
) -> None:
    store = _Store()
    output = _output(store, block=blocks * ALIGNMENT)
    codes, scales = _bytes(sum(a for a, _ in turns)), _bytes(sum(b for _, b in turns), 1)
    op, beside = _row(len(codes), (("a", 7),), 0), _row(len(scales), (("a", 7 + len(codes)),), 1)
    done = made = 0
    for of_codes, of_scales in turns:
        output.take(op, done, of_codes, _giving(codes[done : done + of_codes]))
        output.take(beside, made, of_scales, _giving(scales[made : made + of_scales]), aside=True)
        done, made = done + of_codes, made + of_scales
    output.flush()
    assert bytes(store.files["a" + UNFINISHED][7:]) == codes + scales
    assert output.digests == {
        "0": xxhash.xxh3_128(codes).hexdigest(),
        "1": xxhash.xxh3_128(scales).hexdigest(),
    }


class _Watching(_Store):
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
    op = _row(5 * ALIGNMENT, (("a", 0),), dtype=DType.F32, check_finite=True)

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
    output.take(op, 0, 5 * ALIGNMENT, fill)
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


@pytest.mark.parametrize("begin", [0, 1, 2, 6, 7])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_bad_element_is_named_wherever_its_memory_lies(begin: int, place: int) -> None:
    """Words of eight bytes are looked at together; what lies before and behind them, alone."""
    words = np.zeros(4, np.uint64).view(np.uint8)
    data = words[begin : begin + 24]
    data[2 * place : 2 * place + 2] = np.array([0x7F80], np.uint16).view(np.uint8)
    assert first_non_finite(data, DType.BF16) == place


@given(patterns=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40))
@settings(deadline=None, max_examples=25)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_every_bit_pattern_is_judged_as_torch_does(dtype: DType, patterns: list[int]) -> None:
    data = np.array(patterns, np.uint16)
    bad = ~torch.from_numpy(data.view(np.int16)).view(torch_dtype(dtype)).isfinite()
    expected = int(bad.int().argmax()) if bool(bad.any()) else None
    assert first_non_finite(data.view(np.uint8), dtype) == expected


CONFIG = {"architectures": ["OddForCausalLM"], "model_type": "odd"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("large"), hidden=640, layers=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("small"))


def _run_all(bench: Bench) -> list[Any]:
    return [bench.runner.run(number) for number in bench.segments]


@pytest.mark.slow
def test_inputs_that_fit_are_read_once_for_all_passes(large: Family, tmp_path: Path) -> None:
    recipe = recipes(large)["ties"]
    once = sum(r.read_bytes for r in _run_all(make_bench(recipe, tmp_path / "a", budget=1 << 30)))
    again = sum(r.read_bytes for r in _run_all(make_bench(recipe, tmp_path / "b", budget=LEAST_MEMORY)))
    stored = sum(file.stat().st_size for file in large.base.glob("*.safetensors"))
    assert once <= 4 * stored
    assert again > 2 * once


def _shifted(root: Path, shift: int, seed: int) -> Path:
    """A checkpoint of one matrix whose elements begin so many bytes behind a multiple of eight."""
    values = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(seed)).bfloat16()
    entry = {"dtype": "BF16", "shape": [2048, 2048], "data_offsets": [0, 8 << 20]}
    header = json.dumps({"a.weight": entry}).encode()
    header += b" " * (-len(header) % 8 + shift)
    root.mkdir(parents=True)
    data = values.view(torch.uint8).numpy().tobytes()
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    write_json(root / "config.json", CONFIG)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("method", ["linear", "ties", "arcee_fusion"])
def test_elements_at_odd_bytes_take_no_more_memory_and_give_the_same_bytes(
    method: str, tmp_path: Path
) -> None:
    """Old files have headers of any length. All of the tensor is one load, which no copy of fits beside."""
    found = []
    for shift in (0, 1):
        base, *tunes = (_shifted(tmp_path / f"{shift}-{seed}", shift, seed) for seed in range(4))
        tunes = tunes[:1] if method == "arcee_fusion" else tunes
        recipe = recipes(Family(base, (tunes[0], tunes[-1], tunes[-1])))[method]
        need = Jobs(plan(recipe).require()).ops(0)[0].need
        lane = (need.load_bytes(1 << 22) + need.work_bytes(need.piece)) * 7 // 5
        bench = make_bench(recipe, tmp_path / f"{shift}", budget=lane)
        with counted_buffers() as buffers, AllocationMeter() as meter:
            _run_all(bench)
        assert 0 < meter.peak_bytes + buffers.most <= bench.projection.peak
        found.append(dict(bench.written()))
    assert found[0] == found[1]


def _pattern(spec: TensorSpec, seed: int) -> bytes:
    """Bytes that look like NaN in most formats; floats that raymerge checks get finite ones."""
    if spec.dtype.is_mergeable:
        return bytes((seed + i) % 0x38 for i in range(spec.nbytes))
    return bytes(0xFF - (seed + i) % 7 for i in range(spec.nbytes))


def _odd_checkpoint(root: Path) -> dict[str, bytes]:
    """One tensor of every dtype, codes with their scale, a 0-d one and an empty one; returns their bytes."""
    specs = [TensorSpec(f"odd.{dtype.value.lower()}.weight", dtype, (4, 6)) for dtype in DType]
    specs.append(TensorSpec("odd.f8_e4m3.weight_scale_inv", DType.F32, (1, 1)))
    specs += [TensorSpec("odd.scalar", DType.F32, ()), TensorSpec("odd.empty", DType.BF16, (0, 6))]
    layout = lay_out(specs)
    data = {spec.name: _pattern(spec, seed) for seed, spec in enumerate(specs)}
    root.mkdir()
    body = b"".join(data[tensor.name] for tensor in layout.tensors)
    (root / "model.safetensors").write_bytes(layout.header + body)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_json(root / "config.json", {**CONFIG, "quantization_config": said})
    return data


def test_verbatim_bytes_of_every_dtype_never_meet_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a copied tensor was computed with")

    for name in ("PartComputation", "scatter"):
        monkeypatch.setattr(lane_module, name, forbidden)
    data = _odd_checkpoint(tmp_path / "odd")
    recipe = one(str(tmp_path / "odd"))
    bench = make_bench(recipe, tmp_path / "staging")
    _run_all(bench)
    assert dict(bench.written()) == data


def _pair(
    tmp_path: Path, tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> dict[str, Any]:
    for name, each in (("one", tensors), ("two", others)):
        write_checkpoint(tmp_path / name, each, CONFIG)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in ("one", "two")]
    return {"merge_method": "linear", "models": models}


def test_empty_scalar_and_float64_tensors_merge(tmp_path: Path) -> None:
    one = {
        "a.weight": torch.tensor([1.0, 2.0, 1 / 3], dtype=torch.float64),
        "b.weight": torch.tensor(4.0),
        "c.weight": torch.empty(0, 3),
    }
    recipe = _pair(tmp_path, one, {name: 3 * tensor for name, tensor in one.items()})
    bench = make_bench(recipe, tmp_path / "staging")
    _run_all(bench)
    written = dict(bench.written())
    wide = torch.frombuffer(bytearray(written["a.weight"]), dtype=torch.float64)
    expected = one["a.weight"].float() * 0.5 + (3 * one["a.weight"]).float() * 0.5
    torch.testing.assert_close(wide, expected.double(), rtol=2e-7, atol=0)
    assert torch.frombuffer(bytearray(written["b.weight"]), dtype=torch.float32).tolist() == [8.0]
    assert written["c.weight"] == b""


def test_a_receipt_counts_bytes_and_digests_rows(small: Family, tmp_path: Path) -> None:
    bench = make_bench(recipes(small)["task_arithmetic"], tmp_path)
    receipts = _run_all(bench)
    rows = bench.plan["ops"].to_pylist()
    shards = bench.plan["shards"].column("name").to_pylist()
    digests = {key: digest for receipt in receipts for key, digest in receipt.digests.items()}
    assert set(digests) == {str(i) for i, row in enumerate(rows) if row["copy_of"] < 0}
    for number, digest in digests.items():
        row = rows[int(number)]
        data = bench.staging.read(shards[row["shard"]] + UNFINISHED, row["offset"], row["nbytes"])
        assert digest == xxhash.xxh3_128(data).hexdigest()
    costs = bench.plan["segments"].column("cost").to_pylist()
    assert [receipt.read_bytes + receipt.written_bytes for receipt in receipts] == costs


def test_a_row_that_repeats_another_is_computed_once_and_written_twice(small: Family, tmp_path: Path) -> None:
    span = {"model": str(small.base), "layer_range": [0, 1], "parameters": {"scale": 0.5}}
    recipe = stack({"sources": [span]}, {"sources": [span]})
    bench = make_bench(recipe, tmp_path)
    receipts = _run_all(bench)
    written = dict(bench.written())
    name = "self_attn.q_proj.weight"
    assert written[f"model.layers.0.{name}"] == written[f"model.layers.1.{name}"]
    expected = read_tensors(small.base)[f"model.layers.0.{name}"].float() * 0.5
    assert written[f"model.layers.0.{name}"] == bytes(
        expected.bfloat16().view(torch.uint8).flatten().tolist()
    )
    assert sum(r.read_bytes for r in receipts) < sum(r.written_bytes for r in receipts)


def _bad(tmp_path: Path, bad: float, dtype: torch.dtype = torch.float32) -> tuple[Bench, int]:
    """The mean of two checkpoints of which the second holds ``bad``, and the byte it lies at."""
    one = {"a.weight": torch.ones(70_000, dtype=dtype), "b.weight": torch.ones(8, dtype=dtype)}
    two = {name: tensor.clone() for name, tensor in one.items()}
    two["a.weight"][66_000] = bad
    recipe = _pair(tmp_path, one, two)
    start = lay_out_start(tmp_path / "two" / "model.safetensors")
    return make_bench(recipe, tmp_path / "staging"), start + 66_000 * one["a.weight"].element_size()


def lay_out_start(path: Path) -> int:
    """First byte of a safetensors file's data."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_source_with_a_bad_value_is_named_with_tensor_and_byte(bad: float, tmp_path: Path) -> None:
    bench, place = _bad(tmp_path, bad)
    with pytest.raises(NonFiniteError) as caught:
        _run_all(bench)
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path / 'two'}: a.weight"
    assert f"byte {place} of model.safetensors" in problem.what


def test_a_sum_that_overflows_float16_is_named(tmp_path: Path) -> None:
    huge = {"a.weight": torch.full((4,), 60_000.0, dtype=torch.float16)}
    recipe = {**_pair(tmp_path, huge, huge), "parameters": {"normalize": False}}
    for model in recipe["models"]:
        model["parameters"]["weight"] = 1.0
    with pytest.raises(
        NonFiniteError, match=r"a\.weight: the sources are finite.* F16.* Use a wider out_dtype"
    ):
        _run_all(make_bench(recipe, tmp_path / "staging"))


def test_a_weight_of_zero_does_not_hide_a_bad_value(tmp_path: Path) -> None:
    recipe = _pair(tmp_path, {"a.weight": torch.ones(4)}, {"a.weight": torch.full((4,), float("inf"))})
    recipe["models"][1]["parameters"]["weight"] = 0.0
    with pytest.raises(NonFiniteError, match=r"two: a\.weight"):
        _run_all(make_bench(recipe, tmp_path / "staging"))


def test_a_source_that_shrank_is_named(small: Family, tmp_path: Path) -> None:
    recipe = _pair(tmp_path, read_tensors(small.base), read_tensors(small.tunes[0]))
    bench = make_bench(recipe, tmp_path / "staging")
    file = tmp_path / "two" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"two/model\.safetensors: ends at byte"):
        _run_all(bench)


def test_a_full_disk_is_an_error_with_a_remedy(
    small: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(recipes(small)["linear"], tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskSpaceError, match="Free space there"):
        _run_all(bench)


class _Recording:
    """A store that notes what is asked of it, and fails where it is told to."""

    def __init__(self, store: LocalStore, calls: list[str], *, fails: bool) -> None:
        self._store, self._calls, self._fails = store, calls, fails

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        self._calls.append("write")
        if self._fails:
            raise OSError(errno.EIO, "broken")
        self._store.write_extent(key, offset, buffer)

    def sync(self, key: str) -> None:
        self._calls.append(f"sync {key}")
        self._store.sync(key)


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_complete_segment_is_synced_and_receipted(fails: bool, small: Family, tmp_path: Path) -> None:
    calls: list[str] = []
    bench = make_bench(
        recipes(small)["linear"], tmp_path, wrap=lambda store: _Recording(store, calls, fails=fails)
    )
    if not fails:
        bench.runner.run(0)
        assert calls[-1] == f"sync model.safetensors{UNFINISHED}"
        assert sum(call.startswith("sync") for call in calls) == 1
        return
    with pytest.raises(OSError, match="broken"):
        bench.runner.run(0)
    assert calls == ["write"]


class _SlowToSync:
    """A store whose first sync waits until another segment was written."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._syncing, self._written = threading.Event(), threading.Event()

    def write_extent(self, key: str, offset: int, buffer: memoryview) -> None:
        self._store.write_extent(key, offset, buffer)
        if self._syncing.is_set():
            self._written.set()

    def sync(self, key: str) -> None:
        if not self._syncing.is_set():
            self._syncing.set()
            assert self._written.wait(30)
        self._store.sync(key)


def test_while_bytes_become_durable_another_segment_has_the_lane(large: Family, tmp_path: Path) -> None:
    """There is one lane, whose memory is used again."""
    recipe = recipes(large)["linear"]
    bench = make_bench(recipe, tmp_path / "a", budget=LEAST_MEMORY, wrap=_SlowToSync)
    assert bench.projection.lanes == 1
    with counted_buffers() as buffers, ThreadPoolExecutor(2) as threads:
        list(threads.map(bench.runner.run, bench.segments))
    assert 0 < buffers.most <= bench.projection.peak
    alone = make_bench(recipe, tmp_path / "b", budget=LEAST_MEMORY)
    _run_all(alone)
    assert dict(alone.written()) == dict(bench.written())


def test_a_bad_value_in_a_verbatim_copy_is_found_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", {"a.weight": torch.tensor([1.0, float("nan")])}, CONFIG)
    recipe = one(str(tmp_path / "one"))
    with pytest.raises(NonFiniteError, match=r"one: a\.weight: the source holds NaN"):
        _run_all(make_bench(recipe, tmp_path / "staging"))
