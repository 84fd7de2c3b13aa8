"""Tiles as each access asks for them, and one thread for what libraries would sum in another order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kits.assembly_maker import Stock, expression, made, make_stock, plan_of
from kits.method_kit import threads
from kits.segment_bench import tiles_of

from raymerge.dtypes import DType
from raymerge.execute.ops import Jobs
from raymerge.execute.threads import one_thread
from raymerge.execute.tiles import TileJob
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.expressions import Output, Part, Row
from raymerge.merge_plan.memory import Lane, Need, Tiling
from raymerge.merge_plan.plan import Plan
from raymerge.methods import BLOCK, ROW_GROUP, find_method

ROWS, COLUMNS = 150, 1000


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    tensors = [
        {"a": torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))} for seed in range(3)
    ]
    return make_stock(tmp_path_factory.mktemp("stock"), *tensors)


def _plan(stock: Stock, method: str, **values: float) -> Plan:
    """The merge of three matrices, the first of them the base where there is one."""
    found = find_method(method)
    assert found is not None
    has_base = found.base.value == "required"
    numbers = {"weight": 0.5, "density": 0.5, "t": 0.3, **values}
    made_of = expression(found, sources=3 - has_base, has_base=has_base, cast=DType.F32, **numbers)
    reads = tuple(stock.read("a", source) for source in range(3))
    row = Row(ROWS * COLUMNS, made_of, (Part("a", (ROWS, COLUMNS), None),), reads)
    plan = plan_of(stock, [Output("a", DType.F32, (ROWS, COLUMNS), (row,), True)])
    assert check_plan(plan) == ()
    return plan


def _smallest(patch: pytest.MonkeyPatch) -> None:
    """Make tiles as small as they may be."""
    patch.setattr("raymerge.merge_plan.memory.LOAD_MOST", 1)
    patch.setattr("raymerge.merge_plan.memory.Tiling.is_whole", lambda *_: False)
    patch.setattr("raymerge.execute.tiles.tiling", _least)


def _least(need: Need, num_elements: int, lane: Lane, *, passes: int) -> Tiling:
    del passes
    return Tiling(need.least_elements, lane.peak(need, need.least_elements))


def _tiles(plan: Plan) -> list[TileJob]:
    """Tiles as small as they may be."""
    with pytest.MonkeyPatch.context() as patch:
        _smallest(patch)
        return tiles_of(Jobs(plan).rows(0), 1 << 30)


def _bytes(stock: Stock, plan: Plan, root: Path) -> Iterator[dict[str, bytes]]:
    """The output in large tiles, and in the smallest."""
    yield made(stock, plan, root / "large")
    with pytest.MonkeyPatch.context() as patch:
        _smallest(patch)
        yield made(stock, plan, root / "small")


@pytest.mark.parametrize(
    ("method", "values", "unit"),
    [
        ("linear", {}, BLOCK),
        ("model_stock", {"filter_wise": False}, BLOCK),
        ("model_stock", {"filter_wise": True}, ROW_GROUP * COLUMNS),
        ("ties", {}, BLOCK),
        ("iso_c", {}, ROWS * COLUMNS),
    ],
)
def test_tiles_are_cut_as_access_says_and_change_no_byte(
    method: str, values: dict[str, float], unit: int, stock: Stock, tmp_path: Path
) -> None:
    plan = _plan(stock, method, **values)
    found = _tiles(plan)
    assert all(tile.start % unit == 0 for tile in found)
    assert {tile.count for tile in found[:-1]} <= {unit}
    large, small = _bytes(stock, plan, tmp_path)
    assert large == small


def test_the_number_of_threads_comes_back_after_a_failure() -> None:
    with threads(2):
        with pytest.raises(ValueError, match="seen: 1"), one_thread():
            raise ValueError(f"seen: {torch.get_num_threads()}")
        assert torch.get_num_threads() == 2
