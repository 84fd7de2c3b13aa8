"""The memory contract: tiles fit the budget, and what is said beforehand covers all that is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.assembly_maker import expression
from kits.merge_cases import Family, make_family, recipes

from raymerge.api import plan
from raymerge.dtypes import DType
from raymerge.methods import BLOCK, ROW_GROUP, Access, BaseUse, find_method, methods
from raymerge.planner.expressions import Expression, copy_expression
from raymerge.planner.memory import (
    SLOTS,
    SMALLEST_BUDGET,
    TILE_MOST,
    InputNeed,
    Need,
    RowSize,
    expression_passes,
    project,
    row_need,
    tiling,
)

needs = st.builds(
    Need,
    bytes_per_element=st.floats(60, 200),
    scratch_per_element=st.floats(0, 60),
    fixed_bytes=st.integers(0, 2 << 20),
    resident_per_element=st.floats(0, 20),
    least_elements=st.just(BLOCK),
)


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


@given(
    need=needs,
    num_elements=st.integers(0, 1 << 24),
    above=st.integers(0, 1 << 32),
    unit=st.sampled_from([BLOCK, ROW_GROUP * 77, 3 << 20]),
)
@settings(deadline=None, max_examples=200)
def test_a_tile_fits_its_slot(need: Need, num_elements: int, above: int, unit: int) -> None:
    need = replace(need, least_elements=min(max(1, num_elements), unit), unit=unit)
    budget = need.least_bytes * SLOTS + above
    for passes in (0, 2):
        cut = tiling(need, num_elements, budget, passes=passes)
        assert cut.peak <= budget / SLOTS
        assert 1 <= cut.elements <= max(1, min(max(TILE_MOST, unit), num_elements))
        assert cut.elements % unit == 0 or cut.elements == max(1, num_elements)
        assert not (cut.resident and passes == 0)


@given(need=needs, nbytes=st.integers(0, 1 << 27))
@settings(deadline=None, max_examples=100)
def test_the_largest_tile_within_some_bytes_fits_and_one_more_does_not(need: Need, nbytes: int) -> None:
    need = replace(need, fixed_bytes=0)
    elements = need.elements_within(nbytes)
    assert elements < 1 or need.tile_bytes(elements) <= nbytes + 1
    assert need.tile_bytes(max(0, elements) + 2) > nbytes


@given(num_elements=st.integers(1, 1 << 24))
@settings(deadline=None, max_examples=50)
def test_more_memory_never_gives_smaller_tiles(num_elements: int) -> None:
    need = _need("task_arithmetic", num_elements)
    sizes = [tiling(need, num_elements, budget << 20, passes=0).elements for budget in (16, 64, 256, 1024)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("name", list(methods()))
def test_a_need_covers_inputs_results_scratch_and_statistics(name: str) -> None:
    method = find_method(name)
    assert method is not None
    need = _need(name, 10 * BLOCK, columns=100)
    scratch = 4 * (method.scratch + 4 * method.scratch_per_source)
    assert need.scratch_per_element == scratch
    assert need.bytes_per_element == pytest.approx(2 * 8 + 4 * 4 + scratch + 8 + 2 * 2)
    assert need.fixed_bytes == 4 * (method.state_bytes + 100 * method.state_bytes_per_column)


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


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (RowSize(1, 1, 1, 0, is_flat=True), ()),
        (RowSize(6, 1, 6, 1, is_flat=True), (6,)),
        (RowSize(6, 1, 3, 2, is_flat=True), (2, 3)),
        (RowSize(24, 1, 3, 4, is_flat=True), (1, 1, 8, 3)),
        (RowSize(0, 1, 3, 2, is_flat=True), (0, 3)),
    ],
)
def test_a_size_stands_for_a_shape(size: RowSize, shape: tuple[int, ...]) -> None:
    assert size.shape == shape


def test_a_small_row_still_pays_for_a_block_of_scratch() -> None:
    need = _need("ties", 10)
    assert need.tile_bytes(10) >= need.fixed_bytes + need.scratch_per_element * BLOCK
    assert need.least_elements == 10


def test_a_row_that_may_not_be_cut_is_needed_whole() -> None:
    need = _need("linear", 5 * BLOCK, is_flat=False)
    assert need.least_elements == 5 * BLOCK
    assert need.bytes_per_element == _need("linear", 5 * BLOCK).bytes_per_element + DType.BF16.bits / 8
    assert need.unit == 5 * BLOCK


def test_a_region_larger_than_the_row_is_counted_in_full() -> None:
    """One projection read out of an interleaved pair brings the other projection's bytes along."""
    reads = [InputNeed(DType.BF16, 4 * BLOCK)]
    need = row_need(_expression("linear"), reads, RowSize(BLOCK, 1, BLOCK, 1, is_flat=False))
    assert need.resident_per_element == 4


def test_a_copy_holds_three_tiles_of_raw_bytes() -> None:
    reads = [InputNeed(DType.F8_E4M3, 10 * BLOCK)]
    size = RowSize(10 * BLOCK, 1, 10 * BLOCK, 1, is_flat=True)
    need = row_need(copy_expression(DType.F8_E4M3), reads, size)
    assert need.tile_bytes(BLOCK) == 3 * BLOCK
    assert expression_passes(copy_expression(DType.F8_E4M3)) == 0


@pytest.mark.parametrize(("name", "passes"), [("linear", 0), ("slerp", 1), ("ties", 2), ("dare_ties", 0)])
def test_passes_are_those_of_the_method(name: str, passes: int) -> None:
    assert expression_passes(_expression(name)) == passes


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("memory"), hidden=256)


@pytest.mark.parametrize("name", ["linear", "passthrough", "slerp", "ties", "dare_ties"])
def test_a_projection_names_the_tensor_that_sets_it(name: str, family: Family) -> None:
    made = plan(recipes(family)[name]).require()
    names = made["tensors"].column("name").to_pylist()
    for budget in (SMALLEST_BUDGET, 1 << 30):
        projection = project(made, budget)
        assert projection.tensor in names
        assert projection.least_tensor in names
        assert 0 < projection.peak <= budget == projection.budget
        assert projection.least_budget == SMALLEST_BUDGET


def test_a_plan_keeps_the_least_budget_that_works(family: Family, tmp_path: Path) -> None:
    """A tensor that may not be cut sets it; here none may, since a block is made larger than all."""
    made = plan(recipes(family)["linear"]).require()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.planner.memory.BLOCK", 1 << 20)
        patch.setattr("raymerge.planner.memory.SMALLEST_BUDGET", 1)
        projection = project(made, 1)
        assert project(made, projection.least_budget).peak <= projection.least_budget
