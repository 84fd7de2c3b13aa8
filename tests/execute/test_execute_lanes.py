"""Lanes side by side: while one reads or writes others compute, and none that ends badly keeps a turn."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.memory_meter import AllocationMeter
from kits.merge_cases import LEAST_MEMORY, Family, make_family, recipes
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge.errors import IncompleteError
from raymerge.execute import segment as segment_module
from raymerge.execute.compute import PartComputation
from raymerge.execute.ops import Raw
from raymerge.execute.tiles import Load
from raymerge.execute.transfers import HostTransfers
from raymerge.merge_plan import segments
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
    """A base and three others with such tensors."""
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
    """Four long matrices."""
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


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("method", "call", "number"),
    [
        ("linear", "read_extent", 2),
        ("linear", "write_extent", 1),
        ("ties", "read_into", 100),
        ("ties", "read_into", 1124),
        ("ties", "read_extent", 200),
        ("ties", "write_extent", 2),
    ],
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
@pytest.mark.parametrize("method", ["linear", "ties", "arcee_fusion"])
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
    assert {"linear": "apply_stored", "ties": "sample", "arcee_fusion": "apply"}[method] in called


# Ends


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


# Memory


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
    assert equipment.buffer._limit + equipment.block.numel() == bench.projection.peak


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
