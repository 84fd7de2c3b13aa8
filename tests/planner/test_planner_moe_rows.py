"""Rows of experts whose columns are cut or lie side by side: they stay small, and say what they refuse."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, llama_shapes
from kits.plan_maker import Planned, header_checkpoint, planned_merge

from raymerge.dtypes import DType
from raymerge.errors import PlanError
from raymerge.merge_plan.memory import project

HIDDEN = 2048
WIDTH = 2 * HIDDEN
MATRIX_NBYTES = 4 * HIDDEN * WIDTH
RUN_NBYTES = 8 << 20
RUN_ELEMENTS = 1 << 20
LEAST = 80 << 20


def _parent(root: Path) -> Path:
    """Headers alone of a Llama of one layer, in float32."""
    config = {**llama_config(hidden=HIDDEN, layers=1), "torch_dtype": "float32"}
    specs = {name: (DType.F32, shape) for name, shape in llama_shapes(config).items()}
    return header_checkpoint(root, specs, config)


def _mixture(root: Path, **more: Any) -> dict[str, Any]:
    one, two = _parent(root / "one"), _parent(root / "two")
    experts = [{"source_model": one}, {"source_model": two}]
    return {"base_model": one, "gate_mode": "random", "experts": experts, **more}


def _shared(root: Path, *settings: dict[str, Any]) -> dict[str, Any]:
    data = _mixture(root, architecture="glm4_moe")
    models = [each["source_model"] for each in data["experts"]]
    data["shared_experts"] = [{"source_model": m, **s} for m, s in zip(models, settings, strict=True)]
    return data


def _covers(made: Planned, name: str) -> list[tuple[int, int]]:
    """First and last stored byte that each row of an output reads of its first input."""
    first = [made.inputs(row)[0] for row in made.rows(name)]
    return [(each["offset"], each["offset"] + each["nbytes"]) for each in first]


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_pieces_of_a_down_projection_are_read_a_few_rows_at_a_time(tmp_path: Path, layout: str) -> None:
    made = planned_merge(tmp_path, _mixture(tmp_path, granularity=4, layout=layout))
    made.plan.require()
    assert project(made.plan, 1).least_budget <= LEAST
    is_fused = layout == "fused"
    block = "model.layers.0.mlp" if is_fused else "model.layers.0.block_sparse_moe"
    name = f"{block}.experts.down_proj" if is_fused else f"{block}.experts.3.w2.weight"
    read = _covers(made, name)
    assert all(stop - start <= RUN_NBYTES for start, stop in read)
    assert len(read) == MATRIX_NBYTES // RUN_NBYTES * (8 if is_fused else 1)
    assert all(before[1] == after[0] for before, after in pairwise(read[:2]))
    elements = HIDDEN * WIDTH * 2 if is_fused else HIDDEN * WIDTH // 4
    assert sum(row["num_elements"] for row in made.rows(name)) == elements


def test_down_projections_of_several_shared_experts_are_made_in_runs(tmp_path: Path) -> None:
    made = planned_merge(tmp_path, _shared(tmp_path, {"residual_scale": 0.5}, {"residual_scale": 0.5}))
    made.plan.require()
    assert project(made.plan, 1).least_budget <= LEAST
    name = "model.layers.0.mlp.shared_experts.down_proj.weight"
    rows = made.rows(name)
    assert len(rows) == 2 * HIDDEN * WIDTH // RUN_ELEMENTS
    assert made.settings(name)["sources"] == [{"scale": 0.5}]
    for row in rows:
        one, two = made.inputs(row)
        assert {one["source"], two["source"]} == {0, 1}
        assert one["nbytes"] + two["nbytes"] == 4 * RUN_ELEMENTS
        assert [part["view_offset"] for part in made.parts(row)] == [0, WIDTH]
        assert {tuple(part["view_strides"]) for part in made.parts(row)} == {(2 * WIDTH, 1)}


def test_a_matrix_of_which_chance_is_drawn_is_one_row(tmp_path: Path) -> None:
    data = _mixture(tmp_path, granularity=2)
    data["experts"][0]["noise_scale"] = 0.1
    made = planned_merge(tmp_path, data)
    block = "model.layers.0.block_sparse_moe.experts"
    assert len(made.rows(f"{block}.0.w2.weight")) == 1
    assert len(made.rows(f"{block}.2.w2.weight")) > 1


@pytest.mark.parametrize(
    "settings",
    [
        ({}, {"residual_scale": 0.0}),
        ({"residual_scale": 0.5}, {"residual_scale": 0.25}),
        ({"reinit_fraction": 0.25}, {"reinit_fraction": 0.25}),
        ({}, {"noise_scale": 0.1}),
    ],
)
def test_shared_experts_of_settings_of_their_own_are_refused(
    tmp_path: Path, settings: tuple[dict[str, Any], ...]
) -> None:
    made = planned_merge(tmp_path, _shared(tmp_path, *settings))
    (problem,) = made.plan.problems
    assert str(problem).startswith("recipe: shared_experts: 2 shared experts are stored as one network")
    assert "same residual_scale" in problem.remedy
    with pytest.raises(PlanError):
        made.plan.require()


@pytest.mark.parametrize("settings", [({}, {}), ({"residual_scale": 1}, {}), ({"noise_scale": 0}, {})])
def test_shared_experts_of_equal_settings_are_not_refused(
    tmp_path: Path, settings: tuple[dict[str, Any], ...]
) -> None:
    planned_merge(tmp_path, _shared(tmp_path, *settings)).plan.require()
