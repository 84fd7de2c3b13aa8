"""Tiles as each access asks for them, and one thread for what libraries would sum in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.assembly_maker import Stock, expression, made, make_stock, plan_of
from kits.method_kit import threads

from raymerge.dtypes import DType
from raymerge.execute import compute
from raymerge.execute.jobs import Jobs
from raymerge.execute.steps import Step, steps
from raymerge.execute.threads import one_thread
from raymerge.methods import BLOCK, ROW_GROUP, Access, Method, Settings, Tile, find_method
from raymerge.planner.check import check_plan
from raymerge.planner.expressions import Output, Part, Row
from raymerge.planner.plan import Plan

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


def _steps(plan: Plan) -> list[Step]:
    """Tiles under a generous budget and a cap that makes them as small as they may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.planner.memory.TILE_MOST", 1)
        return list(steps(Jobs(plan).rows(0), 1 << 30))


def _bytes(stock: Stock, plan: Plan, root: Path) -> Iterator[dict[str, bytes]]:
    """The output with one thread, with two, and in the smallest tiles."""
    for count in (1, 2):
        with threads(count):
            yield made(stock, plan, root / str(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raymerge.planner.memory.TILE_MOST", 1)
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
    found = _steps(plan)
    assert all(step.start % unit == 0 for step in found)
    assert {step.count for step in found if not step.ends_pass} <= {unit}
    one, two, small = _bytes(stock, plan, tmp_path)
    assert one == two == small


class _Watching:
    """A kernel that notes how many threads it may use."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def passes(self, settings: Settings) -> int:
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> None:
        return None

    def observe(self, state: None, tile: Tile, settings: Settings, pass_index: int) -> None:
        self.threads.append(torch.get_num_threads())

    def conclude(self, state: None, settings: Settings, pass_index: int) -> None:
        return None

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return tile.sources[0]


@pytest.mark.parametrize(("access", "expected"), [(Access.MATRIX, [1, 1]), (Access.TENSOR, [2, 2])])
def test_a_matrix_is_computed_with_one_thread(
    access: Access,
    expected: list[int],
    stock: Stock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = _plan(stock, "iso_c")
    known = find_method("iso_c")
    assert known is not None
    kernel = _Watching()
    toy = replace(known, access=access, kernel=kernel)

    def find(name: str) -> Method:
        return toy

    monkeypatch.setattr(compute, "find_method", find)
    monkeypatch.setattr("raymerge.planner.memory.find_method", find)
    with threads(2):
        made(stock, plan, tmp_path)
        assert torch.get_num_threads() == 2
    assert sorted(set(kernel.threads)) == sorted(set(expected))


def test_the_number_of_threads_comes_back_after_a_failure() -> None:
    with threads(2):
        with pytest.raises(ValueError, match="seen: 1"), one_thread():
            raise ValueError(f"seen: {torch.get_num_threads()}")
        assert torch.get_num_threads() == 2
