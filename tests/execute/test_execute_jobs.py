"""Rows decoded a segment at a time are what the plan's tables say, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kits.checkpoint_maker import llama_config
from kits.plan_maker import good, header_checkpoint, llama, llama_specs

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.execute.ops import JobPart, Jobs, RowJob
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.plan import Plan


def _view(row: Mapping[str, Any], shape: str) -> View | None:
    if not row["view_strides"]:
        return None
    return View(row["view_offset"], tuple(row[shape]), tuple(row["view_strides"]))


def _read(row: Mapping[str, Any]) -> Read:
    place = (row["source"], row["key"], row["offset"], row["nbytes"])
    return Read(row["part"], *place, DType(row["dtype"]), _view(row, "view_shape"))


def _parts(plan: Plan, row: Mapping[str, Any]) -> Iterator[JobPart]:
    reads = [_read(each) for each in plan["inputs"].slice(row["first_input"], row["num_inputs"]).to_pylist()]
    for number, part in enumerate(plan["parts"].slice(row["first_part"], row["num_parts"]).to_pylist()):
        own = tuple(read for read in reads if read.part == number)
        yield JobPart(part["logical"], tuple(part["shape"]), _view(part, "shape"), own)


def _expected(plan: Plan, segment: int) -> Iterator[RowJob]:
    """The rows of a segment, each looked up by itself."""
    rows, shards = plan["rows"].to_pylist(), plan["shards"].column("name").to_pylist()
    bounds = plan["segments"].to_pylist()[segment]
    for index in range(bounds["first_row"], bounds["first_row"] + bounds["num_rows"]):
        row = rows[index]
        if row["copy_of"] >= 0:
            continue
        tensor = plan["tensors"].to_pylist()[row["tensor"]]
        written = (row, *(rows[other] for other in row["also"]))
        yield RowJob(
            index=index,
            tensor=tensor["name"],
            check_finite=tensor["check_finite"],
            expression=plan.expressions[row["expression"]],
            first_element=row["first_element"],
            num_elements=row["num_elements"],
            is_flat=row["is_flat"],
            parts=tuple(_parts(plan, row)),
            places=tuple((shards[each["shard"]], each["offset"]) for each in written),
        )


def _assert_decoded(plan: Plan) -> list[RowJob]:
    jobs = Jobs(plan)
    found = [jobs.rows(segment) for segment in range(plan["segments"].num_rows)]
    assert found == [tuple(_expected(plan, segment)) for segment in range(len(found))]
    return [row for rows in found for row in rows]


def _linear(*models: Path) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m} for m in models], "parameters": {"weight": 1}}


def _karcher(*models: Path) -> dict[str, Any]:
    """A method that needs each matrix by itself."""
    return {"merge_method": "karcher", "models": [{"model": m} for m in models]}


@pytest.fixture
def large(tmp_path: Path) -> Plan:
    """Of several segments and shards; a long tensor is cut into rows."""
    specs = {**llama_specs(2), "model.big.weight": (DType.BF16, (3_000_000,))}
    roots = [header_checkpoint(tmp_path / name, specs, llama_config(layers=2)) for name in "ab"]
    return good({**_linear(*roots), "shard_size": 4_000_000}).plan


def test_rows_of_several_segments_and_shards(large: Plan) -> None:
    rows = _assert_decoded(large)
    assert large["segments"].num_rows > 3
    assert large["shards"].num_rows > 1
    assert [row.index for row in rows] == list(range(large["rows"].num_rows))
    assert sum(row.tensor == "model.big.weight" for row in rows) > 1
    assert any(row.first_element for row in rows)


def test_tables_may_be_cut_by_arrow(large: Plan) -> None:
    cut = {
        name: pa.concat_tables([table.slice(0, 1), table.slice(1)]) for name, table in large.tables.items()
    }
    assert _assert_decoded(replace(large, tables=cut)) == _assert_decoded(large)


def test_rows_that_another_one_writes_are_left_out(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    piece = {"sources": [{"model": model, "layer_range": [0, 2]} for model in (a, b)]}
    plan = good({"merge_method": "linear", "slices": [piece, piece], "parameters": {"weight": 1}}).plan
    rows = _assert_decoded(plan)
    assert len(rows) == plan["rows"].num_rows - 18
    assert sum(len(row.places) == 2 for row in rows) == 18


def test_fused_experts_have_a_part_for_each_matrix(tmp_path: Path) -> None:
    config = llama_config(layers=1) | {"model_type": "qwen3_moe", "num_experts": 3}
    config |= {"moe_intermediate_size": 8, "architectures": ["Qwen3MoeForCausalLM"]}
    trunk = {name: spec for name, spec in llama_specs(1).items() if ".mlp." not in name}
    stored = {"gate_up_proj": (DType.BF16, (3, 16, 32)), "down_proj": (DType.BF16, (3, 32, 8))}
    fused = {f"model.layers.0.mlp.experts.{word}": spec for word, spec in stored.items()}
    router = {"model.layers.0.mlp.gate.weight": (DType.BF16, (3, 32))}
    roots = [header_checkpoint(tmp_path / name, {**trunk, **router, **fused}, config) for name in "ab"]
    rows = _assert_decoded(good(_karcher(*roots)).plan)
    logical = [part.logical for row in rows for part in row.parts]
    assert len([name for name in logical if ".experts." in name]) == 9
    assert {len(part.inputs) for row in rows for part in row.parts} == {2}


def test_experts_taken_from_a_fused_tensor_are_read_through_views(tmp_path: Path) -> None:
    """One parent stores experts together and transposed, the other each by itself."""
    config = llama_config(layers=1) | {"model_type": "llama4_text", "num_local_experts": 2}
    config |= {"intermediate_size": 8, "architectures": ["Llama4ForCausalLM"]}
    trunk = {name: spec for name, spec in llama_specs(1).items() if ".mlp." not in name}
    head = "model.layers.0.feed_forward"
    fused = {
        f"{head}.experts.gate_up_proj": (DType.BF16, (2, 32, 16)),
        f"{head}.experts.down_proj": (DType.BF16, (2, 8, 32)),
        f"{head}.router.weight": (DType.BF16, (2, 32)),
    }
    roots = [header_checkpoint(tmp_path / name, {**trunk, **fused}, config) for name in "ab"]
    rows = _assert_decoded(good(_karcher(*roots)).plan)
    views = [part.view for row in rows for part in row.parts if ".experts." in part.logical]
    assert len(views) == 6
    assert all(view is not None and view.strides for view in views)
