"""Bytes that a plan consists of itself: every kind of damage to them is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.plan_damage import tampered
from kits.plan_maker import good, header_checkpoint, llama_specs

from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.plan import Plan, digest
from raymerge.merge_plan.tables import load_plan, save_plan

SHAPE = "model.layers.1.mlp.up_proj.weight_shape"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Packed integers, which have their shapes beside them."""
    config = llama_config(layers=2, hidden=32) | {"torch_dtype": "bfloat16"}
    root = header_checkpoint(tmp_path_factory.mktemp("a") / "model", llama_specs(2), config)
    models = [{"model": str(root), "parameters": {"weight": 1}}] * 2
    return good({"merge_method": "linear", "models": models, "out_format": "int4"}).plan


def _row(plan: Plan) -> dict[str, Any]:
    names = plan["tensors"].column("name").to_pylist()
    found: dict[str, Any] = next(r for r in plan["rows"].to_pylist() if r["tensor"] == names.index(SHAPE))
    return found


def test_a_sound_plan_is_found_sound_saved_and_loaded(plan: Plan, tmp_path: Path) -> None:
    assert check_plan(plan) == ()
    row = _row(plan)
    assert (row["num_inputs"], row["num_elements"], row["nbytes"]) == (0, 2, 16)
    expression = plan.expressions[row["expression"]]
    assert [int.from_bytes(expression.content[at : at + 8], "little") for at in (0, 8)] == [64, 32]
    save_plan(plan, tmp_path)
    assert load_plan(tmp_path).digest == plan.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"settings": '{"sources":[],"values":{}}'},
        {"settings": '{"sources":[],"values":{"bytes":"4000000000000000"}}'},
        {"settings": json.dumps({"sources": [], "values": {"bytes": "no" * 16}})},
        {"settings": json.dumps({"sources": [], "values": {"bytes": "40" * 16, "weight": 1}})},
        {"settings": json.dumps({"sources": [{}], "values": {"bytes": "40" * 16}})},
        {"cast": "I32"},
        {"has_base": True},
        {"encode": {"format": "int4", "block": [1, 32], "scale_dtype": "BF16", "power_of_two": False}},
        {"method": "copy"},
        {"method": "scales"},
        {"method": "linear"},
    ],
)
def test_other_constants_are_noticed(plan: Plan, changed: dict[str, Any]) -> None:
    number, expressions = _row(plan)["expression"], plan.manifest["expressions"]
    each = [*expressions[:number], {**expressions[number], **changed}, *expressions[number + 1 :]]
    manifest = {**plan.manifest, "expressions": each}
    assert check_plan(replace(plan, manifest=manifest, digest=digest(manifest, plan.tables)))


def test_a_row_that_is_no_constant_or_a_constant_that_reads_is_noticed(plan: Plan) -> None:
    rows, row = plan["rows"].to_pylist(), _row(plan)
    merged = next(index for index, each in enumerate(rows) if each["num_inputs"])
    scales = next(index for index, each in enumerate(rows) if each["made_with"] >= 0)
    for other in (merged, scales):
        assert check_plan(tampered(plan, "rows", "expression", {other: row["expression"]}))
    assert check_plan(tampered(plan, "rows", "num_inputs", {rows.index(row): 1}))
