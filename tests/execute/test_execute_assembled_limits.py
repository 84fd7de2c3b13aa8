"""Inputs made of rows: what is read of them, bad values in them, and the memory that they take."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.assembled_cases import (
    COLUMNS,
    METHODS,
    RANK,
    ROWS,
    output_of,
    random_tensor,
    sound_plan,
    stock_tensors,
    values_of,
)
from kits.assembly_maker import Stock, bench_of, expression, made, make_stock, whole
from kits.memory_meter import AllocationMeter
from kits.method_kit import same_bits
from kits.segment_bench import Bench, counted_buffers, tiles_of

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError
from raymerge.execute.ops import AssembledInput, Jobs
from raymerge.merge_plan import segments
from raymerge.merge_plan.expressions import Assembly, Output, Part, Read, Row, Term, assembled
from raymerge.merge_plan.plan import Plan
from raymerge.methods import BLOCK


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return make_stock(tmp_path_factory.mktemp("stock"), stock_tensors(0), stock_tensors(100))


# Windows


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int, int]]]:
    """An assembly's rows and runs: for each term a few, apart from each other."""
    num_rows = draw(st.integers(1, 40))
    runs = []
    for term in range(draw(st.integers(1, 3))):
        to = 0
        while (to := to + draw(st.integers(0, 9))) < num_rows:
            count = draw(st.integers(1, num_rows - to))
            runs.append((to, draw(st.integers(0, 50)), count, term))
            to += count
    return num_rows, sorted(runs, key=lambda run: (run[0], run[3]))


def _input(runs: list[tuple[int, int, int, int]], num_rows: int) -> AssembledInput:
    read = Read(0, 0, "f", 0, 0, DType.F32, None)
    table = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    need = Jobs.__new__(Jobs)  # Not looked at by windows.
    return AssembledInput(num_rows, 1, num_rows, (Term(read, 100),) * 3, table, need)  # type: ignore[arg-type]


@given(case=_cases(), data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_window_takes_just_the_rows_that_lie_in_it(
    case: tuple[int, list[tuple[int, int, int, int]]], data: st.DataObject
) -> None:
    num_rows, runs = case
    source = _input(runs, num_rows)
    first = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(first, num_rows))
    expected: list[dict[int, int]] = [{}, {}, {}]
    for to, start, count, term in runs:
        for step in range(count):
            if first <= to + step < stop:
                expected[term][to + step - first] = start + step
    taken = source.taken(first, stop)
    for each, wanted in zip(taken, expected, strict=True):
        stored = [row for a, b in each.ranges.tolist() for row in range(a, b)]
        assert stored == sorted(set(wanted.values()))
        assert each.num_rows == len(stored)
        assert [each.stored_row(place) for place in range(len(stored))] == stored
        found = {to + i: stored[place + i] for to, place, n in each.moves.tolist() for i in range(n)}
        assert found == wanted
    counts = [sum(row in wanted for wanted in expected) for row in range(stop - first)]
    covers = list(source.covers(taken, stop - first))
    assert [n for a, b, n in covers for _ in range(a, b)] == counts
    assert all(left[2] != right[2] for left, right in pairwise(covers))


# Reading


def _scattered(stock: Stock, gap: int) -> Plan:
    runs = tuple((to, to * (gap + 1), 1, 0) for to in range(ROWS // (gap + 1)))
    rows = len(runs)
    read = assembled(0, Assembly(rows, COLUMNS, (stock.term("a"),), runs, rows))
    return sound_plan(stock, output_of((read,), (rows, COLUMNS)))


def test_neighbouring_rows_are_read_together(stock: Stock, tmp_path: Path) -> None:
    calls: list[int] = []

    class Counting:
        def __init__(self, store: object) -> None:
            self.store = store

        def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
            calls.append(len(buffer))
            self.store.read_into(key, offset, buffer)  # type: ignore[attr-defined]

    plan = _scattered(stock, 1)
    bench = bench_of(stock, plan, tmp_path)
    bench.runner._sources = [Counting(each) for each in bench.runner._sources]  # type: ignore[misc]
    (receipt,) = (bench.runner.run(number) for number in bench.segments)
    row = 4 * COLUMNS
    assert len(calls) == 1
    assert receipt.read_bytes == calls[0] == (2 * (ROWS // 2) - 1) * row
    found = values_of(dict(bench.written())["out"], (ROWS // 2, COLUMNS))
    assert same_bits(found, stock_tensors(0)["a"][::2] * 0.5 / 0.5)


def test_factors_are_read_once_for_all_passes(stock: Stock, tmp_path: Path) -> None:
    term = stock.term("a", product=stock.product("lora", RANK))
    reads = (stock.read("a", 1), assembled(0, whole(term, COLUMNS)))
    plan = sound_plan(stock, output_of(reads, method="slerp"))
    bench = bench_of(stock, plan, tmp_path)
    (receipt,) = (bench.runner.run(number) for number in bench.segments)
    matrix, factors = 4 * ROWS * COLUMNS, 4 * RANK * (ROWS + COLUMNS)
    assert receipt.read_bytes == 2 * matrix + factors
    (cost,) = plan["segments"].column("cost").to_pylist()
    assert cost == 2 * matrix + factors // ROWS * ROWS + matrix


# Values that are no numbers


@pytest.mark.parametrize(
    ("name", "place"),
    [("a", (140, 7)), ("lora.up", (3, 2)), ("lora.down", (1, 999)), ("lora.magnitude", (149,))],
)
def test_a_bad_value_is_named_with_source_and_byte(name: str, place: tuple[int, ...], tmp_path: Path) -> None:
    tensors = stock_tensors(0)
    tensors[name][place] = float("nan")
    bad = make_stock(tmp_path / "bad", tensors)
    term = bad.term("a", product=bad.product("lora", RANK, magnitude=True))
    runs = ((0, 140, 10, 0), (10, 0, 20, 0))
    read = assembled(0, Assembly(30, COLUMNS, (term,), runs, 30))
    plan = sound_plan(bad, output_of((read,), (30, COLUMNS)))
    with pytest.raises(NonFiniteError) as caught:
        made(bad, plan, tmp_path / "out")
    (problem,) = caught.value.problems
    stored = bad.sources[0].tensors[name]
    index = int(np.ravel_multi_index(place, stored.shape))
    assert problem.where == f"{tmp_path / 'bad' / '0'}: out"
    assert f"byte {stored.offset + 4 * index} of model.safetensors" in problem.what


def test_a_bad_value_in_a_fused_tensor_is_named_by_its_byte(tmp_path: Path) -> None:
    fused = torch.ones(6, 8)
    fused[5, 6] = float("inf")
    bad = make_stock(tmp_path / "bad", {"fused": fused})
    view = View(0, (4, 6), (2, 8))
    reads = (assembled(0, whole(bad.term("fused", view=view), 6)),)
    row = Row(24, expression("linear", sources=1, weight=1.0), (Part("p", (4, 6), None),), reads)
    plan = sound_plan(bad, Output("out", DType.F32, (4, 6), (row,), True))
    with pytest.raises(NonFiniteError, match=str(bad.sources[0].tensors["fused"].offset + 4 * 46)):
        made(bad, plan, tmp_path / "out")


def test_sums_that_overflow_blame_no_source(tmp_path: Path) -> None:
    huge = make_stock(tmp_path / "s", {"a": torch.full((2, 2), 3e38)})
    term = huge.term("a")
    both = Assembly(2, 2, (term, term), ((0, 0, 2, 0), (0, 0, 2, 1)), 2)
    with pytest.raises(NonFiniteError, match="the sources are finite"):
        made(huge, sound_plan(huge, output_of((assembled(0, both),), (2, 2))), tmp_path / "out")


# Memory


def _peak(bench: Bench) -> int:
    """Bytes in use at most: tensors, and the buffers of what is read and written."""
    with counted_buffers() as buffers, AllocationMeter() as meter:
        for number in bench.segments:
            bench.runner.run(number)
    return meter.peak_bytes + buffers.most


@pytest.mark.parametrize("method", METHODS)
def test_measured_memory_stays_within_the_projection(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENTS_WANTED", 1)
    rows, columns, rank = 300, 1024, 8
    tensors = {
        "a": random_tensor(rows, columns, seed=1, dtype=torch.bfloat16),
        "b": random_tensor(rows, columns, seed=2),
        "lora.up": random_tensor(rows, rank, seed=3),
        "lora.down": random_tensor(rank, columns, seed=4),
        "lora.magnitude": random_tensor(rows, seed=5).abs(),
    }
    large = make_stock(tmp_path / "s", tensors)
    product = large.product("lora", rank, magnitude=True)
    terms = (large.term("a", product=product), large.term("b"))
    order = np.random.default_rng(0).permutation(rows // 5).tolist()
    moved = [(5 * to, 5 * start, 5, 0) for to, start in enumerate(order)]
    runs = sorted([*moved, (5, 3, 200, 1)], key=_by_row)
    first = assembled(0, Assembly(rows + 10, columns, terms, tuple(runs), rows))
    second = assembled(0, Assembly(rows + 10, columns, terms[::-1], ((0, 0, rows, 0),), rows))
    reads = (first, second) if method == "slerp" else (first, second, first)
    plan = sound_plan(large, output_of(reads, (rows + 10, columns), method))
    budget = Jobs(plan).rows(0)[0].need.least_bytes
    bench = bench_of(large, plan, tmp_path / "out", budget=budget)
    assert len({tile.start for tile in tiles_of(bench.runner._jobs.rows(0), budget)}) > 2
    assert 0 < _peak(bench) <= bench.projection.peak <= budget


@pytest.mark.parametrize(("method", "resident"), [("slerp", True), ("ties", True), ("slerp", False)])
def test_memory_of_long_rows_that_tiles_cut_stays_within_the_projection(
    method: str, resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tile holds the rows at its ends whole; kept over several passes these add up."""
    monkeypatch.setattr("raymerge.merge_plan.memory.TILE_MOST", BLOCK)
    rows, columns = 12, 50_000
    large = make_stock(tmp_path / "s", {"a": random_tensor(rows, columns, seed=1)})
    read = assembled(0, whole(large.term("a"), columns))
    plan = sound_plan(large, output_of((read, read), (rows, columns), method))
    budget = (128 if resident else 24) << 20
    bench = bench_of(large, plan, tmp_path / "out", budget=budget)
    starts = {tile.start for tile in tiles_of(bench.runner._jobs.rows(0), budget)}
    assert (len(starts) == 1) is resident
    assert 0 < _peak(bench) <= bench.projection.peak <= budget


def _by_row(run: tuple[int, int, int, int]) -> tuple[int, int]:
    return run[0], run[3]


def test_memory_of_small_rows_stays_within_the_projection(stock: Stock, tmp_path: Path) -> None:
    vector = Assembly(ROWS, 1, (stock.term("vector"),) * 2, ((0, 0, ROWS, 0), (3, 9, 50, 1)), ROWS - 1)
    vector = replace(vector, runs=((0, 0, ROWS - 1, 0), (3, 9, 50, 1)))
    plan = sound_plan(stock, output_of((assembled(0, vector),) * 3, (ROWS,), "ties"))
    bench = bench_of(stock, plan, tmp_path)
    assert BLOCK < _peak(bench) <= bench.projection.peak
