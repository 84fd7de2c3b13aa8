"""Lanes: tiles on their way between storage, processor and device."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.gather_maker import expression, made, make_stock, plan_of, row_of, whole
from kits.memory_meter import AllocationMeter
from kits.merge_cases import LEAST_MEMORY, Family, make_family, recipes
from kits.method_kit import threads
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge import devices
from raymerge.device_numerics import torch_threads
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, IncompleteError, TransientError
from raymerge.execute import segment as segment_module
from raymerge.execute import transfers as module
from raymerge.execute.compute import PartComputation
from raymerge.execute.output import ComputePermit
from raymerge.execute.reading import Load, Raw, RawRows, TileJob
from raymerge.execute.transfers import GpuTransfers, HostTransfers
from raymerge.merge_plan import segments
from raymerge.merge_plan.expressions import Expression, Op, Output, Part, Read, copy_expression, gathered
from raymerge.merge_plan.jobs import GatheredInput, Jobs
from raymerge.storage.local.mapping import PageMaps
from raymerge.storage.local.store import LocalStore

CONFIG = {"architectures": ["OddForCausalLM"], "model_type": "odd"}
LONG, WIDTH = 1 << 10, 1 << 10
"""Of a matrix that a small lane reads in several loads, and samples before."""


class _Gate:
    """Holds back the first thread at one of its calls, until it is let on."""

    def __init__(self, call: str, number: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.thread = 0
        self._call, self._left = call, number

    def pass_by(self, call: str) -> None:
        """Go through, or wait."""
        self.thread = self.thread or threading.get_ident()
        if threading.get_ident() != self.thread or call != self._call:
            return
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.open.wait(30)


class _Gated:
    """A store that goes through a gate for every request."""

    def __init__(self, store: LocalStore, gate: _Gate) -> None:
        self._store, self._gate = store, gate

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._store, name)
        if name not in ("read_extent", "read_into", "write_extent"):
            return found

        def called(*args: Any, **more: Any) -> Any:
            self._gate.pass_by(name)
            return found(*args, **more)

        return called


def _matrices(root: Path, shapes: Mapping[str, tuple[int, ...]]) -> Family:
    made = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        made.append(write_checkpoint(root / str(seed), tensors, CONFIG))
    return Family(made[0], tuple(made[1:]))


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans have two segments, so that two long matrices are one."""
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 2)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Family:
    shapes = {f"m{number}.weight": (LONG, WIDTH) for number in range(4)}
    return _matrices(tmp_path_factory.mktemp("long"), shapes)


def _gated(recipe: Mapping[str, Any], root: Path, gate: _Gate) -> Bench:
    bench = make_bench(recipe, root, budget=LEAST_MEMORY, wrap=lambda store: _Gated(store, gate))
    bench.runner._sources = [_Gated(each, gate) for each in bench.runner._sources]  # type: ignore
    # So little memory is for one.
    bench.runner._lanes = threading.Semaphore(2)
    return bench


def _free_turns(bench: Bench) -> int:
    """Turns that could be taken now; of one that there is."""
    turns = bench.runner._turns
    found = turns.acquire(blocking=False)
    if found:
        turns.release()
    return int(found)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("method", "call", "number"),
    [("linear", "write_extent", 1), ("ties", "read_into", 1124), ("ties", "read_extent", 200)],
)
def test_while_a_lane_reads_samples_or_writes_another_makes_its_segment(
    method: str, call: str, number: int, long: Family, tmp_path: Path
) -> None:
    """Though only one may compute at a time: the one that waits for storage must not have the turn.

    The second of a segment's matrices is sampled after the first one was computed.
    """
    recipe = recipes(long)[method]
    expected = make_bench(recipe, tmp_path / "alone", budget=LEAST_MEMORY)
    for segment in expected.segments:
        expected.runner.run(segment)
    gate = _Gate(call, number)
    bench = _gated(recipe, tmp_path / "gated", gate)
    with ThreadPoolExecutor(2) as lanes:
        first = lanes.submit(bench.runner.run, 0)
        try:
            assert gate.reached.wait(30)
            for segment in bench.segments[1:]:
                lanes.submit(bench.runner.run, segment).result(30)
            assert not first.done()
        finally:
            gate.open.set()
        first.result()
    assert dict(bench.written()) == dict(expected.written())
    assert _free_turns(bench) == 1


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("method", ["linear", "ties", "ram"])
def test_whoever_computes_has_a_turn(
    method: str, long: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a computation begins with, a sample, statistics and results."""
    bench = make_bench({**recipes(long)[method], "dtype": "bfloat16"}, tmp_path, budget=LEAST_MEMORY)
    called: set[str] = set()

    def watched(name: str) -> Callable[..., Any]:
        made = getattr(PartComputation, name)

        def call(*args: Any, **more: Any) -> Any:
            # There is one lane at a time, so that the turn is its own.
            called.add(name)
            assert _free_turns(bench) == 0
            return made(*args, **more)

        return call

    for name in ("sample", "apply", "apply_stored", "tiles"):
        monkeypatch.setattr(PartComputation, name, watched(name))
    for segment in bench.segments:
        bench.runner.run(segment)
        assert _free_turns(bench) == 1
    assert {"linear": "apply_stored", "ties": "sample", "ram": "apply"}[method] in called


def _others_are_made(bench: Bench, first: int = 1) -> None:
    """Whether the segments from one on can be made: they could not without a turn."""
    with ThreadPoolExecutor(1) as lane:
        for segment in bench.segments[first:]:
            assert lane.submit(bench.runner.run, segment).result(30).written_bytes


class _Broken(LocalStore):
    """Fails at one of its calls, once."""

    fails_at = ""

    def _fail(self, call: str) -> None:
        if call == self.fails_at:
            self.fails_at = ""
            raise OSError(errno.EIO, "broken")

    def read_extent(self, *args: Any, **more: Any) -> int:
        self._fail("read")
        return super().read_extent(*args, **more)

    def read_into(self, *args: Any, **more: Any) -> None:
        self._fail("sample")
        super().read_into(*args, **more)

    def write_extent(self, *args: Any, **more: Any) -> None:
        self._fail("write")
        super().write_extent(*args, **more)

    def sync(self, key: str) -> None:
        self._fail("sync")
        super().sync(key)


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["read", "sample", "write", "sync"])
def test_storage_that_fails_leaves_no_turn_held_and_no_thread(
    place: str, long: Family, tmp_path: Path
) -> None:
    store = _Broken(tmp_path)
    before = set(threading.enumerate())
    bench = make_bench(recipes(long)["ties"], tmp_path, budget=LEAST_MEMORY, wrap=lambda _: store)
    source = _Broken(long.base)
    bench.runner._sources = [source, *bench.runner._sources[1:]]
    store.fails_at = source.fails_at = place
    with pytest.raises(OSError, match="broken"):
        bench.runner.run(0)
    assert _free_turns(bench) == 1
    assert set(threading.enumerate()) == before
    _others_are_made(bench)


def test_an_error_in_computing_leaves_no_turn_held(
    long: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(recipes(long)["ties"], tmp_path, budget=LEAST_MEMORY)

    def broken(*_: object) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(PartComputation, "apply_stored", broken)
        with pytest.raises(ValueError, match="broken"):
            bench.runner.run(0)
    assert _free_turns(bench) == 1
    _others_are_made(bench, 0)


@pytest.mark.parametrize(
    ("method", "call", "activity"),
    [("linear", "write_extent", "writing"), ("ties", "read_extent", "reading")],
)
def test_what_a_lane_does_can_be_seen(
    method: str, call: str, activity: str, long: Family, tmp_path: Path
) -> None:
    """A pass for statistics, with which TIES begins, brings the end no nearer."""
    gate = _Gate(call, 1 if activity == "writing" else 5)
    bench = _gated(recipes(long)[method], tmp_path, gate)
    cost, names = bench.plan["segments"].column("cost").to_pylist()[0], _names_of(bench, 0)
    with ThreadPoolExecutor(1) as lane:
        made = lane.submit(bench.runner.run, 0)
        assert gate.reached.wait(30)
        (seen,) = bench.runner.in_hand()
        gate.open.set()
        receipt = made.result(30)
    assert (seen.part, seen.activity, seen.total_bytes) == (0, activity, cost)
    assert (seen.done_bytes > 0) is (activity == "writing")
    assert seen.done_bytes < cost
    assert seen.tensor in names
    assert receipt.written_bytes
    assert bench.runner.in_hand() == ()


def _names_of(bench: Bench, segment: int) -> set[str]:
    return {op.tensor for op in Jobs(bench.plan).ops(segment)}


def test_a_lane_that_is_given_up_leaves_no_turn_held(long: Family, tmp_path: Path) -> None:
    gate = _Gate("read_extent", 30)
    bench = _gated(recipes(long)["ties"], tmp_path, gate)
    with ThreadPoolExecutor(1) as held_back:
        lane = held_back.submit(bench.runner.run, 0)
        assert gate.reached.wait(30)
        bench.runner.abort()
        gate.open.set()
        with pytest.raises(IncompleteError, match="given up"):
            lane.result(30)
    assert _free_turns(bench) == 1


class _Lagging(HostTransfers):
    """Takes the inputs to a device that has them only when somebody waits for it."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def upload(  # type: ignore[override]
        self, load: Load, raws: Sequence[Raw]
    ) -> tuple[tuple[Raw, ...], _Lagging]:
        self._notes.append("up")
        return super().upload(load, raws)[0], self

    def synchronize(self) -> None:
        """The inputs have left the host's memory."""
        self._notes.append("left")


def test_a_load_is_read_only_when_the_one_before_has_left_the_buffer(
    long: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(segment_module, "transfers_for", lambda _: _Lagging(notes))
    bench = make_bench(recipes(long)["ties"], tmp_path, budget=LEAST_MEMORY)
    for each in bench.segments[:2]:
        bench.runner.run(each)
    assert len(notes) > 20
    # Also from one segment to the next, which has the buffer of the one before.
    assert notes == ["up", "left"] * (len(notes) // 2) + ["up"]


def test_a_lane_has_two_buffers_for_all_of_its_segments(tmp_path: Path) -> None:
    family = make_family(tmp_path / "models", hidden=256)
    bench = make_bench(recipes(family)["linear"], tmp_path / "out")
    assert len(bench.segments) > 5
    with counted_buffers() as buffers:
        for segment in bench.segments:
            bench.runner.run(segment)
    lane = bench.projection.lane
    assert (buffers.made, buffers.most) == (2, lane.load_bytes + lane.write_bytes)
    (equipment,) = bench.runner._idle
    # What a load and its work may take is what the block leaves of the peak.
    assert equipment.buffer._limit + equipment.blocks[0].numel() == bench.projection.peak


def test_loads_of_all_sizes_come_and_go_within_the_projection(tmp_path: Path) -> None:
    """Tensors that are kept over several passes: each is a load of its own size, and no two fit the lane."""
    rows = [300, 500, 800, 600, 300, 790, 10, 800]
    family = _matrices(tmp_path, {f"m{number}.weight": (each, WIDTH) for number, each in enumerate(rows)})
    budget = 6 << 20
    bench = make_bench(recipes(family)["slerp"], tmp_path / "out", budget=budget)
    largest = 2 * 2 * 800 * WIDTH
    with counted_buffers() as buffers, AllocationMeter() as meter:
        receipts = [bench.runner.run(segment) for segment in bench.segments]
    # Read once: each was one load, and only the buffers that had to be were made anew.
    assert sum(each.read_bytes for each in receipts) == 2 * 2 * sum(rows) * WIDTH
    assert largest < buffers.most < 2 * largest
    assert buffers.made <= 1 + len(rows)
    assert 0 < meter.peak_bytes + buffers.most <= bench.projection.peak <= budget


def test_only_passes_that_are_not_the_last_leave_what_they_read_in_the_cache(
    long: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a merge is through with would only push out what will be read again."""
    asked: list[tuple[str, int, bool]] = []
    real = LocalStore.read_extent

    def noted(self: LocalStore, key: str, offset: int, *args: Any, again: bool = False, **more: Any) -> int:
        asked.append((self.location(key), offset, again))
        return real(self, key, offset, *args, again=again, **more)

    monkeypatch.setattr(LocalStore, "read_extent", noted)
    for method, passes in (("ties", 1), ("linear", 0)):
        bench = make_bench(recipes(long)[method], tmp_path / method, budget=LEAST_MEMORY)
        for segment in bench.segments:
            asked.clear()
            bench.runner.run(segment)
            kept = [each[:2] for each in asked if each[2]]
            last = [each[:2] for each in asked if not each[2]]
            # Short tensors are read once for all passes; of the others every pass reads the same.
            assert set(kept) <= set(last)
            assert len(kept) % max(1, len(set(kept))) == 0
            assert len(last) == len(set(last))
        assert bool(kept) is (passes > 0)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _load(*expressions: Expression) -> Load:
    """A tile of each of some expressions over one input."""
    read = Read(0, 0, "f", 0, 8, DType.F32, None)
    ops = [row_of(each, [read], (2,), index=index) for index, each in enumerate(expressions)]
    return Load(tuple(TileJob(op, 0, 2, 0) for op in ops), 0, 0)


class _Stream:
    """Stands in for a stream: notes what happens on it."""

    names: Iterator[str] = iter(())
    log: list[str]

    def __init__(self, _: torch.device) -> None:
        self.name = next(type(self).names)

    def wait_event(self, event: _Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for all on {other.name}")


class _Event:
    log: list[str]

    def __init__(self, stream: _Stream) -> None:
        self.name = f"the event on {stream.name}"
        self.log.append(f"record on {stream.name}")


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and notes who uses it."""

    notes: list[str] = []

    def to(self, *args: Any, **how: Any) -> torch.Tensor:
        if isinstance(args[0], torch.dtype):
            return super().to(*args, **how)
        self.notes.append(f"to the GPU, waiting: {not how.get('non_blocking')}")
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def record_stream(self, stream: _Stream) -> None:  # type: ignore[override]
        self.notes.append(f"in use on {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams, events and tensors note, with those of torch replaced."""
    notes: list[str] = []

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        notes.append(f"on {stream.name}:")
        yield
        notes.append("end")

    for kind, name in ((_Stream, "log"), (_Event, "log"), (_OnGpu, "notes")):
        monkeypatch.setattr(kind, name, notes, raising=False)
    monkeypatch.setattr(_Stream, "names", iter(("up", "compute", "down")))
    for name, stand_in in (("make_stream", _Stream), ("record_event", _Event), ("on_stream", on)):
        monkeypatch.setattr(devices, name, stand_in)
    return notes


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(_OnGpu)


def test_inputs_are_copied_on_their_own_stream_and_waited_for(log: list[str]) -> None:
    transfers = GpuTransfers(torch.device("cuda"))
    load = _load(expression("linear", sources=1), copy_expression(DType.F32))
    raws = [[_on_gpu(torch.zeros(8, dtype=torch.uint8))], [_on_gpu(torch.ones(8, dtype=torch.uint8))]]
    moved, arrival = transfers.upload(load, raws)
    # What is only copied stays on the host.
    assert log == ["on up:", "to the GPU, waiting: False", "record on up", "end"]
    assert moved[1] is raws[1]
    log.clear()
    transfers.arrive(moved[:1], arrival)
    assert log == ["compute waits for the event on up", "in use on compute"]
    log.clear()
    with transfers.computing():
        assert log == ["on compute:"]


def test_rows_to_assemble_stay_on_the_host_until_they_are_used(log: list[str]) -> None:
    transfers = GpuTransfers(torch.device("cuda"))
    rows = RawRows(cast(GatheredInput, None), 0, 0, 0, 0, (), (), ())
    moved, arrival = transfers.upload(_load(expression("linear", sources=1)), [[rows]])
    assert moved[0][0] is rows
    transfers.arrive(moved, arrival)
    assert "in use on compute" not in log


def test_results_leave_when_they_are_computed_and_their_memory_is_kept_so_long(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = GpuTransfers(torch.device("cuda"))
    monkeypatch.setattr(module, "rounded", lambda *_: _on_gpu(torch.arange(4, dtype=torch.uint8)))
    target = torch.zeros(4, dtype=torch.uint8)
    transfers.download(torch.zeros(2), DType.BF16, target)
    assert target.tolist() == [0, 1, 2, 3]
    assert log == [
        *("down waits for all on compute", "on down:"),
        *("in use on down", "record on down", "end"),
    ]


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_what_is_on_its_way_is_not_where_the_next_piece_is_put(
    dtype: DType, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 result may lie in the memory of its piece, which the next piece will overwrite."""
    del log
    sent: list[Any] = []
    monkeypatch.setattr(_OnGpu, "copy_", lambda _, data, **__: sent.append(data), raising=False)
    transfers = GpuTransfers(torch.device("cuda"))
    result = _on_gpu(torch.ones(2))
    transfers.download(result, dtype, _on_gpu(torch.zeros(dtype.nbytes(2), dtype=torch.uint8)))
    (data,) = sent
    assert data.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()


@needs_cuda
@pytest.mark.parametrize("name", ["linear", "ties", "slerp", "dare_linear", "passthrough"])
@pytest.mark.parametrize("budget", [16 << 20, 1 << 30])
def test_a_gpu_gives_the_bytes_that_the_processor_gives(name: str, budget: int, tmp_path: Path) -> None:
    recipe = recipes(make_family(tmp_path / "models", hidden=640, layers=2))[name]
    found = []
    for device in ("cpu", "cuda"):
        bench = make_bench(recipe, tmp_path / device, budget=budget, device=device)
        receipts = [bench.runner.run(number) for number in bench.segments]
        assert not any(receipt.note for receipt in receipts)
        found.append(dict(bench.written()))
    assert found[0] == found[1]


@needs_cuda
def test_a_gpu_assembles_the_rows_that_the_processor_assembles(tmp_path: Path) -> None:
    stock = make_stock(tmp_path / "s", {"a": torch.randn(3000, 640)}, {"a": torch.randn(3000, 640)})
    reads = tuple(gathered(0, whole(stock.term("a", source), 640)) for source in (0, 1))
    made_of = expression("linear", sources=2, weight=0.5)
    op = Op(3000 * 640, made_of, (Part("out", (3000, 640), None),), reads)
    plan = plan_of(stock, [Output("out", DType.F32, (3000, 640), (op,), True)])
    found = [made(stock, plan, tmp_path / device, device=device) for device in ("cpu", "cuda")]
    assert found[0] == found[1]


def _free(turns: threading.Semaphore) -> int:
    count = 0
    while turns.acquire(blocking=False):
        count += 1
    for _ in range(count):
        turns.release()
    return count


@pytest.mark.parametrize("threads", [1, 3])
def test_only_so_many_compute_at_once_and_all_of_them_get_there(threads: int) -> None:
    turns = threading.Semaphore(threads)
    lock, computing, most = threading.Lock(), 0, 0
    # As many as may compute meet there, so that one turn too few would stop them all.
    meeting = threading.Barrier(threads)

    def step(change: int) -> None:
        nonlocal computing, most
        with lock:
            computing += change
            most = max(most, computing)

    def lane(_: int) -> None:
        turn = ComputePermit(turns)
        for _ in range(20):
            turn.take()
            step(1)
            meeting.wait(10)
            step(-1)
            with turn.away():
                pass
            turn.rest()

    lanes = 2 * threads
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(lane, range(lanes)))
    assert most == threads
    assert _free(turns) == threads


def test_away_takes_a_turn_again_only_when_there_is_one() -> None:
    turns = threading.Semaphore(1)
    mine, other, back = ComputePermit(turns), ComputePermit(turns), threading.Event()

    def lane() -> None:
        mine.take()
        with mine.away():
            other.take()
        back.set()

    thread = threading.Thread(target=lane)
    thread.start()
    assert not back.wait(0.1)
    other.rest()
    assert back.wait(10)
    thread.join()
    assert _free(turns) == 0


def test_the_number_of_threads_comes_back_after_a_failure() -> None:
    with threads(2):
        with pytest.raises(ValueError, match="seen: 1"), torch_threads(1):
            raise ValueError(f"seen: {torch.get_num_threads()}")
        assert torch.get_num_threads() == 2


# Mapped inputs


class _Mapped(LocalStore):
    """Notes what is mapped, and may do something just after."""

    mapped = 0

    def map_extent(self, *args: Any, **more: Any) -> int | None:
        begin = super().map_extent(*args, **more)
        if begin is not None:
            type(self).mapped += 1
            self.after()
        return begin

    def after(self) -> None: ...


@pytest.fixture
def maps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cached extent is mapped, however short, whatever file system tests run on."""
    monkeypatch.setattr("raymerge.storage.local.store.MAP_LEAST", 1)
    monkeypatch.setattr(PageMaps, "_maps_fast", lambda *_: True)
    monkeypatch.setattr(_Mapped, "mapped", 0)


def _sources(bench: Bench, store: type[LocalStore]) -> None:
    stores = [cast(LocalStore, each) for each in bench.runner._sources]
    expected = [{each.location(info.key): info for info in each.files()} for each in stores]
    bench.runner._sources = [store(each.root) for each in stores]
    for each, infos in zip(bench.runner._sources, expected, strict=True):
        cast(Any, each)._expected = infos
        cast(Any, each)._open_files._opened = cast(Any, each)._compare_opened


@pytest.mark.sample(1)
@pytest.mark.usefixtures("maps_all")
@pytest.mark.parametrize("name", ["linear", "ties", "passthrough"])
def test_mapped_inputs_give_the_bytes_of_copied_ones(name: str, long: Family, tmp_path: Path) -> None:
    """Copies are not mapped: they are written from where they are read to."""
    copied = {"merge_method": "passthrough", "models": [{"model": str(long.base)}], "dtype": "bfloat16"}
    receipts = []
    for store in (LocalStore, _Mapped):
        bench = make_bench(
            {**recipes(long), "passthrough": copied}[name], tmp_path / store.__name__, budget=LEAST_MEMORY
        )
        _sources(bench, store)
        if store is LocalStore:
            cast(Any, bench.runner)._maps._maps_fast = lambda _: False
        receipts.append([bench.runner.run(segment).digests for segment in bench.segments])
    assert receipts[0] == receipts[1]
    assert (_Mapped.mapped > 0) is (name != "passthrough")


@pytest.mark.usefixtures("maps_all")
def test_mapped_inputs_count_as_memory_of_a_worker(long: Family, tmp_path: Path) -> None:
    bench = make_bench(recipes(long)["linear"], tmp_path / "out")
    _sources(bench, _Mapped)
    bench.runner.run(0)
    heap, maps = bench.runner._heap, bench.runner._maps
    assert maps.mapped_bytes > 256 << 10
    uncounted = heap.resident().own - segment_module._resident_bytes().own
    assert uncounted == pytest.approx(maps.mapped_bytes, abs=128 << 10)


@pytest.mark.usefixtures("maps_all")
def test_a_source_that_is_cut_short_while_it_is_mapped_is_named(long: Family, tmp_path: Path) -> None:
    class Cut(_Mapped):
        def after(self) -> None:
            for file in self.files():
                os.truncate(self.location(file.key), 1)

    copies = [shutil.copytree(each, tmp_path / each.name) for each in (long.base, *long.tunes)]
    bench = make_bench(recipes(Family(copies[0], tuple(copies[1:])))["linear"], tmp_path / "out")
    _sources(bench, Cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        bench.runner.run(0)
    assert Cut.mapped


@pytest.mark.usefixtures("maps_all")
def test_a_page_that_cannot_be_read_any_more_leaves_no_receipt(long: Family, tmp_path: Path) -> None:
    bench = make_bench(recipes(long)["linear"], tmp_path / "out")

    class Failing(_Mapped):
        def after(self) -> None:
            cast(Any, bench.runner)._maps.lost_pages += 1

    _sources(bench, Failing)
    with pytest.raises(TransientError, match="could not be read any more"):
        bench.runner.run(0)
