"""Ops of a plan whose tables Arrow holds in several chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from kits.checkpoint_maker import llama_config
from kits.plan_maker import good, header_checkpoint, llama_specs

from raymerge.dtypes import DType
from raymerge.execute.ops import Jobs, RowJob
from raymerge.merge_plan.plan import Plan


def _decoded(plan: Plan) -> list[RowJob]:
    jobs = Jobs(plan)
    return [row for segment in range(plan["segments"].num_rows) for row in jobs.rows(segment)]


def test_tables_may_be_cut_by_arrow(tmp_path: Path) -> None:
    """Of a plan of several segments and shards, with a long tensor that is cut."""
    specs = {**llama_specs(2), "model.big.weight": (DType.BF16, (3_000_000,))}
    roots = [header_checkpoint(tmp_path / name, specs, llama_config(layers=2)) for name in "ab"]
    recipe = {"merge_method": "linear", "models": [{"model": m} for m in roots], "parameters": {"weight": 1}}
    plan = good({**recipe, "shard_size": 4_000_000}).plan
    cut = {name: pa.concat_tables([table.slice(0, 1), table.slice(1)]) for name, table in plan.tables.items()}
    rows = _decoded(plan)
    assert [row.index for row in rows] == list(range(plan["rows"].num_rows))
    assert sum(row.tensor == "model.big.weight" for row in rows) > 1
    assert _decoded(replace(plan, tables=cut)) == rows
