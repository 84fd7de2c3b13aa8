"""The memory contract: tiles fit their lane, and what is said beforehand covers all that is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.assembly_maker import expression
from kits.merge_cases import Family, make_family, recipes

from raymerge.api import plan
from raymerge.dtypes import DType
from raymerge.merge_plan.expressions import Expression, copy_expression
from raymerge.merge_plan.memory import (
    READ_ROOM,
    SMALLEST_BUDGET,
    TILE_MOST,
    InputNeed,
    Lane,
    Need,
    RowSize,
    expression_passes,
    project,
    row_need,
    tiling,
)
from raymerge.methods import BLOCK, ROW_GROUP, Access, BaseUse, find_method, methods
from raymerge.storage.local.buffers import ALIGNMENT

MIB = 1 << 20
_ROUNDING = 4 * ALIGNMENT
"""Bytes by which shares of a lane are rounded, with some to spare."""


@st.composite
def _needs(draw: st.DrawFn) -> tuple[Need, int]:
    """A need as rows have it, and the row's elements."""
    num_elements = draw(st.integers(0, 1 << 24))
    unit = draw(st.sampled_from([BLOCK, ROW_GROUP * 77, 3 << 20]))
    scratch = draw(st.floats(0, 60))
    need = Need(
        stored_per_element=draw(st.floats(0, 20)),
        work_per_element=scratch + draw(st.floats(0, 60)),
        scratch_per_element=scratch,
        read_room=READ_ROOM * draw(st.integers(1, 9)),
        fixed_bytes=draw(st.integers(0, 64 * MIB)),
        least_elements=min(num_elements, unit),
        unit=unit,
        piece=draw(st.sampled_from([0, max(1, BLOCK // unit) * unit])),
    )
    return need, num_elements


passes = st.sampled_from([0, 2])


def _expression(name: str) -> Expression:
    """A method with three sources and everything thinned."""
    method = find_method(name)
    assert method is not None
    sources = min(3, method.max_sources or 3)
    has_base = method.base is BaseUse.REQUIRED
    numbers = {"weight": 1.0, "density": 0.5, "t": 0.5}
    return expression(method, sources=sources, has_base=has_base, cast=DType.BF16, **numbers)


def _need(name: str, num_elements: int, *, inputs: int = 4, columns: int = 1, is_flat: bool = True) -> Need:
    reads = [InputNeed(DType.BF16, 2 * num_elements)] * inputs
    return row_need(_expression(name), reads, RowSize(num_elements, 1, columns, 2, is_flat))


# Lanes


@given(case=_needs(), above=st.one_of(st.integers(0, 64 * MIB), st.integers(0, 1 << 32)), passes=passes)
@settings(deadline=None, max_examples=300)
def test_a_tiling_fits_its_lane(case: tuple[Need, int], above: int, passes: int) -> None:
    need, num_elements = case
    lane = Lane(need.least_bytes + above)
    cut = tiling(need, num_elements, lane, passes=passes)
    assert 0 < cut.peak <= lane.budget
    assert 1 <= cut.elements <= max(1, num_elements)
    assert cut.elements % need.unit == 0 or cut.is_whole(num_elements)
    if not passes and not need.piece:
        assert cut.elements <= max(TILE_MOST, need.unit)


@given(case=_needs(), passes=passes)
@settings(deadline=None, max_examples=300)
def test_a_lane_below_the_least_does_not_hold_the_least_tile(case: tuple[Need, int], passes: int) -> None:
    need, num_elements = case
    load, work = need.load_bytes(need.least_elements), need.work_bytes(need.piece_of(need.least_elements))
    for budget, fits in ((need.least_bytes, True), (need.least_bytes - _ROUNDING, False)):
        lane = Lane(budget)
        assert (max(load, lane.load_bytes) + work + lane.write_bytes <= budget) is fits
    assert tiling(need, num_elements, Lane(need.least_bytes), passes=passes).elements >= need.least_elements


@given(case=_needs(), above=st.integers(0, 1 << 30), more=st.integers(16 * _ROUNDING, 1 << 30), passes=passes)
@settings(deadline=None, max_examples=300)
def test_more_memory_never_gives_more_tiles(
    case: tuple[Need, int], above: int, more: int, passes: int
) -> None:
    need, num_elements = case
    budget = need.least_bytes + above
    small, large = (tiling(need, num_elements, Lane(each), passes=passes) for each in (budget, budget + more))
    assert large.elements >= small.elements
    assert large.is_whole(num_elements) or not small.is_whole(num_elements)


# Needs


@pytest.mark.parametrize("name", list(methods()))
def test_tiles_are_cut_as_the_method_can_be(name: str) -> None:
    made, method = _expression(name), find_method(name)
    assert method is not None
    shape = (BLOCK // 10, 100)
    access = method.access_with(made.bind(keys=(), shape=shape))
    need = _need(name, BLOCK // 10 * 100, columns=100)
    units = {Access.ROW: ROW_GROUP * 100, Access.MATRIX: BLOCK // 10 * 100}
    assert need.unit == need.least_elements == units.get(access, BLOCK)


def test_access_that_hangs_on_the_settings_sets_the_unit() -> None:
    plain = _expression("model_stock")
    wise = replace(plain, settings=plain.settings.replace("false", "true"))
    reads = [InputNeed(DType.F32, 400 * BLOCK)] * 4
    matrix = RowSize(100 * BLOCK, 1, 100, 2, is_flat=True)
    assert row_need(plain, reads, matrix).unit == BLOCK
    assert row_need(wise, reads, matrix).unit == ROW_GROUP * 100
    assert (expression_passes(plain, matrix.shape), expression_passes(wise, matrix.shape)) == (1, 0)
    vector = RowSize(100 * BLOCK, 1, 100 * BLOCK, 1, is_flat=True)
    assert row_need(wise, reads, vector).unit == BLOCK
    assert expression_passes(wise, vector.shape) == 1


@pytest.mark.parametrize("name", list(methods()))
def test_pieces_are_blocks_or_whole_groups_of_rows(name: str) -> None:
    """However large a tile is, what computing takes does not grow with it."""
    need = _need(name, 1 << 24, columns=1 << 9)
    method = find_method(name)
    assert method is not None
    is_matrix = method.access_with(_expression(name).bind(keys=(), shape=(1 << 15, 1 << 9))) is Access.MATRIX
    assert need.piece == (1 << 24 if is_matrix else BLOCK)
    assert need.piece_of(1 << 24) == need.piece
    assert need.piece_of(100) == 100
    assert _need(name, 1 << 24, is_flat=False).piece == 0


def test_a_region_larger_than_the_row_is_counted_in_full() -> None:
    """One projection read out of an interleaved pair brings the other projection's bytes along."""
    reads = [InputNeed(DType.BF16, 4 * BLOCK)]
    need = row_need(_expression("linear"), reads, RowSize(BLOCK, 1, BLOCK, 1, is_flat=False))
    assert need.stored_per_element == 4


def test_a_copy_takes_its_buffers_only() -> None:
    reads = [InputNeed(DType.F8_E4M3, 10 * BLOCK)]
    size = RowSize(10 * BLOCK, 1, 10 * BLOCK, 1, is_flat=True)
    need = row_need(copy_expression(DType.F8_E4M3), reads, size)
    assert need.work_bytes(BLOCK) == 0
    assert need.load_bytes(BLOCK) == BLOCK + READ_ROOM
    assert tiling(need, 10 * BLOCK, Lane(SMALLEST_BUDGET), passes=0).peak == 3 * MIB
    assert expression_passes(copy_expression(DType.F8_E4M3)) == 0


# Projections


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("memory"), hidden=256)


NAMED = ["linear", "passthrough", "slerp", "ties", "dare_ties", "arcee_fusion", "iso_c"]


@pytest.mark.parametrize("name", NAMED)
def test_lanes_make_way_before_a_plan_is_refused(name: str, family: Family) -> None:
    made = plan(recipes(family)[name]).require()
    least = project(made, SMALLEST_BUDGET).least_budget
    found = [project(made, budget, lanes=5) for budget in (least, 2 * least, 1 << 31)]
    assert [each.least_budget for each in found] == [least] * 3
    lanes = [each.lanes for each in found]
    assert lanes == sorted(lanes)
    assert lanes[0] >= 1
    assert lanes[-1] == 5
    assert all(each.lanes * each.lane.budget <= each.budget for each in found)
    assert all(0 < each.peak <= each.budget for each in found)


@given(above=st.integers(0, 1 << 30), lanes=st.integers(1, 40), index=st.integers(0, len(NAMED) - 1))
@settings(deadline=None, max_examples=60)
def test_every_budget_from_the_least_on_holds_the_peak(
    above: int, lanes: int, index: int, family: Family
) -> None:
    made = plan(recipes(family)[NAMED[index]]).require()
    budget = project(made, SMALLEST_BUDGET).least_budget + above
    projection = project(made, budget, lanes=lanes)
    assert 1 <= projection.lanes <= lanes
    assert 0 < projection.peak <= budget
    fewer = project(made, budget, lanes=1)
    assert projection.lane.budget <= fewer.lane.budget
