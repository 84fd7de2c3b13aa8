"""Matrices with one scale: what a plan makes of them, and that damage to it is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.packed_headers import NV, compressed
from kits.plan_damage import changes, tampered
from kits.plan_maker import Specs, good, header_checkpoint, planned, refusals

from raymerge.dtypes import DType
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.check_inputs import Contradictions, check_scales
from raymerge.merge_plan.memory import expression_passes, project
from raymerge.merge_plan.plan import SCHEMAS, Plan

HIDDEN, ROWS = 512, 2048
_BLOCK = "model.layers.0.mlp"


def _nvfp4(root: Path) -> Path:
    """Two matrices of one shape, large enough to be cut if they were block by block."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.BF16, (64, HIDDEN)),
        "model.norm.weight": (DType.BF16, (HIDDEN,)),
        "lm_head.weight": (DType.BF16, (64, HIDDEN)),
    }
    for name in ("up_proj", "gate_proj"):
        module = f"{_BLOCK}.{name}"
        specs[f"{module}.weight_packed"] = (DType.U8, (ROWS, HIDDEN // 2))
        specs[f"{module}.weight_scale"] = (DType.F8_E4M3, (ROWS, HIDDEN // 16))
        specs[f"{module}.weight_global_scale"] = (DType.F32, (1,))
        specs[f"{module}.input_global_scale"] = (DType.F32, (1,))
    config = {**llama_config(layers=1, hidden=HIDDEN), "quantization_config": compressed(NV)}
    return header_checkpoint(root, specs, config)


def _twice(a: Path, b: Path) -> Mapping[str, Any]:
    """The layer of both, two times, so that rows are copies of others."""
    piece = {"sources": [{"model": model, "layer_range": [0, 1]} for model in (a, b)]}
    return {"merge_method": "linear", "slices": [piece, piece], "parameters": {"weight": 1}}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    root = tmp_path_factory.mktemp("nvfp4")
    return good({**_twice(_nvfp4(root / "a"), _nvfp4(root / "b")), "shard_size": 1_500_000}).plan


def test_a_matrix_is_one_row_with_two_of_scales(plan: Plan) -> None:
    rows, tensors = plan["rows"].to_pylist(), plan["tensors"].column("name").to_pylist()
    made = [row for row in rows if row["tensor_scale"] >= 0]
    assert [row["num_elements"] for row in made] == [ROWS * HIDDEN] * 2
    for number, row in ((rows.index(row), row) for row in made):
        scales, one = rows[row["scales"]], rows[row["tensor_scale"]]
        assert (scales["made_with"], one["made_with"], one["num_elements"]) == (number, number, 1)
        assert tensors[one["tensor"]].endswith(".weight_global_scale")
        copies = (row["also"], scales["also"], one["also"])
        assert [len(each) for each in copies] == [1, 1, 1]
    assert len(plan["shards"]) == 2
    read = [each for each in plan["scales"].to_pylist() if each["tensor_key"]]
    assert len(read) == len(plan["scales"]) == 2


def test_the_scale_takes_a_pass_more(plan: Plan) -> None:
    expressions = [each for each in plan.expressions if each.encode is not None]
    assert [expression_passes(each, (ROWS, HIDDEN)) for each in expressions] == [1]


def test_its_memory_is_that_of_tiles(plan: Plan) -> None:
    small, large = (project(plan, budget) for budget in (16 << 20, 1 << 30))
    assert small.peak <= 16 << 20 < large.peak


COLUMNS = [
    *(("rows", name) for name in ("made_with", "scales", "tensor_scale", "copy_of", "expression")),
    *(("scales", name) for name in ("encoding", "nbytes", "tensor_key", "columns")),
]


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_a_changed_value_is_noticed(plan: Plan, table: str, column: str) -> None:
    assert check_plan(plan) == ()
    values, kind = plan[table].column(column).to_pylist(), SCHEMAS[table].field(column).type
    for row in range(0, len(values), 1 + len(values) // 12):
        for value in changes(values[row], kind)[:2]:
            assert check_plan(tampered(plan, table, column, {row: value})), (row, value)


def test_a_scale_outside_its_file_is_noticed(plan: Plan) -> None:
    for value in (-1, 2**40):
        assert check_plan(tampered(plan, "scales", "tensor_offset", {1: value}))


@pytest.mark.parametrize("column", ["scales", "tensor_scale"])
def test_scales_that_two_matrices_trade_are_noticed(plan: Plan, column: str) -> None:
    rows = plan["rows"].to_pylist()
    (one, first), (other, second) = ((i, row[column]) for i, row in enumerate(rows) if row[column] >= 0)
    traded = tampered(plan, "rows", column, {one: second, other: first})
    problems = check_plan(tampered(traded, "rows", "made_with", {second: one, first: other}))
    assert any("the scales of another matrix than its codes are" in each.what for each in problems)


def test_kinds_of_scales_that_are_traded_are_noticed(plan: Plan) -> None:
    """The scales of blocks named as the one of the matrix, and the other way about."""
    rows = plan["rows"].to_pylist()
    number, row = next((i, row) for i, row in enumerate(rows) if row["tensor_scale"] >= 0)
    traded = tampered(plan, "rows", "scales", {number: row["tensor_scale"]})
    assert check_plan(tampered(traded, "rows", "tensor_scale", {number: row["scales"]}))


def test_a_tensor_of_several_matrices_in_one_row_is_noticed(plan: Plan) -> None:
    """As many codes, as a stack of two matrices: they would share one scale."""
    tensors = plan["tensors"].to_pylist()
    number = next(i for i, each in enumerate(tensors) if each["name"].endswith("up_proj.weight_packed"))
    changed = tampered(plan, "tensors", "shape", {number: [2, ROWS // 2, HIDDEN // 2]})
    found = Contradictions()
    check_scales(changed, found)
    assert "it is not one matrix, as what shares one scale must be" in str(found.problems())


def test_a_stack_in_an_unknown_order_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    specs: Specs = {
        "model.embed_tokens.weight": (DType.BF16, (8, 4)),
        name: (DType.F8_E4M3, (2, 6, 6)),
        f"{name}_scale": (DType.F32, (2,)),
    }
    table = {"quant_method": "fp8", "weight_block_size": None}
    config = {"model_type": "nobody_knows", "num_hidden_layers": 1, "quantization_config": table}
    a, b = (header_checkpoint(tmp_path / each, specs, config) for each in "ab")
    recipe = {"merge_method": "linear", "models": [{"model": a}, {"model": b}], "parameters": {"weight": 1}}
    for more in ({}, {"dtype": "bfloat16"}):
        problems = refusals({**recipe, **more})
        assert any("1 tensors are several matrices with one scale each" in each for each in problems)
        assert all(f"{name} [2, 6, 6]" in each for each in problems)
    assert planned({"merge_method": "passthrough", "models": [{"model": a}]}).plan.problems == ()
