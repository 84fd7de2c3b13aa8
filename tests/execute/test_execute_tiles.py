"""How a segment's rows are cut: short ones read together, long ones tile by tile, every element once."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.assembly_maker import expression, make_stock, plan_of, row_of

from raymerge.dtypes import DType
from raymerge.execute.ops import Jobs, RowJob
from raymerge.execute.tiles import ReadPlan, read_plans
from raymerge.merge_plan.expressions import (
    Assembly,
    Expression,
    Output,
    Part,
    Read,
    Row,
    assembled,
    copy_expression,
)
from raymerge.merge_plan.memory import Lane
from raymerge.methods import BLOCK, ROW_GROUP

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20

EXPRESSIONS = {
    "copy": copy_expression(DType.BF16),
    "linear": expression("linear", sources=3, weight=1.0, cast=DType.BF16),
    "ties": expression("ties", sources=2, has_base=True, weight=1.0, density=0.5),
    "arcee_fusion": expression("arcee_fusion", sources=1, has_base=True),
    "iso_c": expression("iso_c", sources=2, has_base=True, weight=1.0),
}


def _row(name: str, shape: tuple[int, ...], index: int = 0, *, is_flat: bool = True) -> RowJob:
    made_of = EXPRESSIONS[name]
    count = int(torch.Size(shape).numel())
    inputs = [Read(0, source, "f", 0, 2 * count, DType.BF16, None) for source in range(_inputs(made_of))]
    return row_of(made_of, inputs, shape, index=index, is_flat=is_flat)


def _inputs(made_of: Expression) -> int:
    return max(1, len(made_of.bind(keys=(), shape=()).sources) + made_of.has_base)


def _cut(rows: list[RowJob], budget: int, device: torch.device = CPU) -> list[ReadPlan]:
    return list(read_plans(rows, Lane(budget), device))


@st.composite
def _rows(draw: st.DrawFn) -> list[RowJob]:
    """Rows of all kinds and sizes."""
    found = []
    for index in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from(list(EXPRESSIONS)))
        most = 40 if name == "iso_c" else 1 << draw(st.integers(1, 14))
        shape = (draw(st.integers(0, most)), draw(st.integers(1, 700)))
        found.append(_row(name, shape, index, is_flat=name == "copy" or draw(st.integers(0, 9)) > 0))
    return found


def _least(rows: list[RowJob]) -> int:
    return max(row.need.least_bytes for row in rows)


@given(rows=_rows(), above=st.integers(0, 1 << 28), device=st.sampled_from([CPU, GPU]))
@settings(deadline=None, max_examples=150)
def test_every_element_is_taken_once_and_in_order(
    rows: list[RowJob], above: int, device: torch.device
) -> None:
    found: dict[int, int] = {}
    for read_plan in _cut(rows, _least(rows) + above, device):
        for load in read_plan.loads:
            for tile in load.tiles:
                assert tile.start == found.setdefault(tile.row.index, 0)
                found[tile.row.index] += tile.count
                unit = tile.row.need.unit
                assert tile.start % unit == 0
                assert tile.count % unit == 0 or tile.start + tile.count == tile.row.num_elements
    assert list(found) == [row.index for row in rows]
    assert list(found.values()) == [row.num_elements for row in rows]


@given(rows=_rows(), above=st.integers(0, 1 << 28))
@settings(deadline=None, max_examples=150)
def test_every_load_fits_its_lane_with_the_block_and_the_work(rows: list[RowJob], above: int) -> None:
    lane = Lane(_least(rows) + above)
    for read_plan in read_plans(rows, lane, CPU):
        for load in read_plan.loads:
            assert max(load.nbytes, lane.load_bytes) + load.work_bytes + lane.write_bytes <= lane.budget
            assert load.nbytes >= sum(tile.row.need.load_bytes(tile.count) for tile in load.tiles)
            for tile in load.tiles:
                assert load.work_bytes >= tile.row.need.work_bytes(tile.row.need.piece_of(tile.count))


@given(rows=_rows(), above=st.integers(0, 1 << 28))
@settings(deadline=None, max_examples=100)
def test_several_rows_are_read_together_as_long_as_they_fit_a_buffer(rows: list[RowJob], above: int) -> None:
    lane = Lane(_least(rows) + above)
    cut = list(read_plans(rows, lane, CPU))
    for read_plan in cut:
        assert len(read_plan.loads) == 1 or all(len(load.tiles) == 1 for load in read_plan.loads)
        for load in read_plan.loads:
            assert len(load.tiles) == 1 or load.nbytes <= lane.load_bytes
    for left, right in pairwise(cut):
        first, last = right.loads[0].tiles[0].row, left.loads[0].tiles[-1].row
        # What is made in place of what was read has its bytes for itself.
        is_shared = not (first.need.in_place or last.need.in_place)
        if is_shared and len(left.loads) == len(right.loads) == 1:
            assert left.loads[0].nbytes + first.need.load_bytes(first.num_elements) > lane.load_bytes


@pytest.mark.parametrize(
    ("name", "unit"), [("copy", BLOCK), ("linear", BLOCK), ("ties", BLOCK), ("arcee_fusion", ROW_GROUP * 700)]
)
def test_a_long_row_is_cut_at_its_unit_and_goes_in_tiles_of_a_buffer(name: str, unit: int) -> None:
    row = _row(name, (200_000, 700))
    lane = Lane(128 * MIB)
    (read_plan,) = _cut([row], lane.budget)
    counts = [load.tiles[0].count for load in read_plan.loads]
    assert len(counts) > 2
    assert all(count % unit == 0 for count in counts[:-1])
    largest = row.need.load_bytes(counts[0])
    assert lane.load_bytes - row.need.load_bytes(unit) < largest <= lane.load_bytes + row.need.read_room


def test_pieces_stay_small_on_a_processor_and_grow_on_a_gpu() -> None:
    row = _row("linear", (10_000, 700))
    (on_cpu,), (on_gpu,) = _cut([row], 256 * MIB), _cut([row], 256 * MIB, GPU)
    assert {load.tiles[0].piece for load in on_cpu.loads} == {BLOCK}
    piece = on_gpu.loads[0].tiles[0].piece
    assert BLOCK < piece <= 1 << 22
    assert piece % BLOCK == 0


@given(rows=_rows(), above=st.integers(0, 1 << 28))
@settings(deadline=None, max_examples=100)
def test_on_a_gpu_nothing_is_larger_on_the_host(rows: list[RowJob], above: int) -> None:
    lane = Lane(_least(rows) + above)
    most = max(load.nbytes for read_plan in read_plans(rows, lane, CPU) for load in read_plan.loads)
    for read_plan in read_plans(rows, lane, GPU):
        for load in read_plan.loads:
            assert load.nbytes <= max(most, lane.load_bytes)


def test_on_a_gpu_computing_takes_none_of_the_host_s_memory() -> None:
    row = _row("linear", (10_000, 700))
    (on_cpu,), (on_gpu,) = _cut([row], 256 * MIB), _cut([row], 256 * MIB, GPU)
    assert all(load.work_bytes > 0 for load in on_cpu.loads)
    assert all(load.work_bytes == 0 for load in on_gpu.loads)


# Padding


@pytest.mark.parametrize(("method", "loads"), [("linear", 1), ("slerp", 1), ("linear", 3), ("slerp", 3)])
def test_padding_comes_in_whole_groups(method: str, loads: int, tmp_path: Path) -> None:
    """The mean of the rows that are there is taken beforehand, also where all fit one load."""
    num_rows, columns, real = (40, 300, 33) if loads == 1 else (4000, 300, 3500)
    stock = make_stock(tmp_path, {"a": torch.zeros(num_rows, columns)})
    assembly = Assembly(num_rows, columns, (stock.term("a"),), ((0, 0, real, 0),), real)
    has_base = method == "slerp"
    made_of = expression(method, sources=1, has_base=has_base, weight=1.0, t=0.5)
    reads = (assembled(0, assembly),) * (1 + has_base)
    part = Part("out", (num_rows, columns), None)
    row = Row(num_rows * columns, made_of, (part,), reads)
    plan = plan_of(stock, [Output("out", DType.F32, (num_rows, columns), (row,), True)])
    (read_plan,) = _cut(list(Jobs(plan).rows(0)), 40 * MIB)
    assert (len(read_plan.loads) > 1) is (loads > 1)
    tiles = [load.tiles[0] for load in read_plan.padding]
    assert all(tile.is_padding for tile in tiles)
    assert [tile.start for tile in tiles] == [0, *accumulate(tile.count for tile in tiles)][:-1]
    assert sum(tile.count for tile in tiles) == real * columns
    assert all(tile.start % (ROW_GROUP * columns) == 0 for tile in tiles)
    assert not any(load.tiles[0].is_padding for load in read_plan.loads)
    assert sum(load.tiles[0].count for load in read_plan.loads) == num_rows * columns
