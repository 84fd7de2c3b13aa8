"""Every kind of damage to a plan is noticed, whether or not the digest was made to fit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.plan_damage import changes, tampered
from kits.plan_maker import good, header_checkpoint, make_recipe

from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.plan import SCHEMAS, Plan, digest
from raymerge.merge_plan.segments import Segment
from raymerge.methods import BLOCK
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.merges import build_plan
from raymerge.planner.outputs import build, finish

E, F, D = 2, 3, 4
CONFIG: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_local_experts": E,
    "hidden_size": D,
    "intermediate_size": F,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def _model(root: Path, *, fused: bool = True) -> Path:
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.F32, (8, D)),
        "model.big.weight": (DType.F32, (9 * BLOCK + 3,)),
        "model.positions": (DType.I64, (2,)),
        "model.norm.weight": (DType.F32, (D,)),
        "lm_head.weight": (DType.F32, (8, D)),
    }
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        specs[f"{block}.router.weight"] = (DType.F32, (E, D))
        if fused:
            specs[f"{block}.experts.gate_up_proj"] = (DType.F32, (E, D, 2 * F))
            specs[f"{block}.experts.down_proj"] = (DType.F32, (E, F, D))
            continue
        for expert in range(E):
            for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                specs[f"{block}.experts.{expert}.{name}_proj.weight"] = (DType.F32, shape)
    return header_checkpoint(root, specs, CONFIG)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Views, copies, pieces of a cut tensor, several shards: a plan with a bit of everything."""
    root = tmp_path_factory.mktemp("models")
    a, b = _model(root / "a"), _model(root / "b", fused=False)
    piece = {"sources": [{"model": m, "layer_range": [0, 2]} for m in (a, b)]}
    data = {"merge_method": "linear", "slices": [piece, piece], "parameters": {"weight": 1}}
    return good({**data, "dtype": "float32", "shard_size": 600}).plan


FREE = {
    ("tensors", "check_finite"),
    ("parts", "logical"),
    ("dispositions", "name"),
    ("inputs", "source"),
    ("inputs", "offset"),
}
"""What no other column speaks of: small changes of these are left to the digest."""


UNUSED = ("assemblies", "terms", "factors", "runs", "scales", "files")
"""Tables without rows in this plan."""
USED = sorted(set(SCHEMAS) - set(UNUSED))
COLUMNS = [(table, field.name) for table, schema in SCHEMAS.items() if table in USED for field in schema]


def test_a_sound_plan_is_found_sound(plan: Plan) -> None:
    assert check_plan(plan) == ()
    rows = plan["rows"].to_pylist()
    assert any(not row["is_flat"] for row in rows)
    assert any(row["copy_of"] >= 0 for row in rows)
    assert any(row["first_element"] > 0 for row in rows)
    assert len(plan["shards"]) > 1
    assert all(not len(plan[table]) for table in UNUSED)


@pytest.mark.parametrize(("table", "column"), [pair for pair in COLUMNS if pair not in FREE])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_changed_value_is_noticed(plan: Plan, table: str, column: str, data: st.DataObject) -> None:
    values = plan[table].column(column).to_pylist()
    row = data.draw(st.integers(0, len(values) - 1))
    value = data.draw(st.sampled_from(changes(values[row], SCHEMAS[table].field(column).type)))
    assume(_is_a_change(plan, table, column, row, value))
    assert check_plan(tampered(plan, table, column, {row: value}))


def _is_a_change(plan: Plan, table: str, column: str, row: int, value: Any) -> bool:
    if (table, column) == ("inputs", "view_offset"):
        # Another place within the region is left to the digest.
        strided = plan["inputs"].column("view_strides").to_pylist()[row]
        return not strided or not 0 <= value < D * 2 * F
    if (table, column) == ("inputs", "view_strides"):
        return min(value, default=0) < 0 or len(value) != 2 or value[0] * F > 2 * D * F
    if (table, column) == ("dispositions", "output"):
        return plan["dispositions"].column("disposition").to_pylist()[row] != "dropped"
    return True


@pytest.mark.parametrize(("table", "column"), sorted(FREE))
def test_what_only_the_digest_guards_is_noticed_by_it(plan: Plan, table: str, column: str) -> None:
    first = plan[table].column(column).to_pylist()[0]
    other = {"source": 1 - first, "offset": first + 4}.get(column) if isinstance(first, int) else None
    value = not first if isinstance(first, bool) else f"{first}x" if isinstance(first, str) else other
    damaged = replace(tampered(plan, table, column, {0: value}), digest=plan.digest)
    (problem,) = check_plan(damaged)
    assert problem.where == "plan, digest"


@pytest.mark.parametrize("column", ["source", "offset"])
def test_inputs_outside_their_files_are_noticed(plan: Plan, column: str) -> None:
    for value in (-1, 2**30):
        assert check_plan(tampered(plan, "inputs", column, {3: value}))


@pytest.mark.parametrize("table", USED)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_rows_left_out_repeated_or_swapped_are_noticed(plan: Plan, table: str, data: st.DataObject) -> None:
    old = plan[table]
    row = data.draw(st.integers(0, len(old) - 2))
    kind = data.draw(st.sampled_from(["without", "twice", "swapped"]))
    if table in ("parts", "inputs", "dispositions", "tensors") and kind == "swapped":
        # Order alone says nothing in a list of dispositions, or among equals.
        kind = "without"
    pieces = {
        "without": [old.slice(0, row), old.slice(row + 1)],
        "twice": [old.slice(0, row + 1), old.slice(row)],
        "swapped": [old.slice(0, row), old.slice(row + 1, 1), old.slice(row, 1), old.slice(row + 2)],
    }[kind]
    tables = {**plan.tables, table: pa.concat_tables(pieces)}
    assert check_plan(replace(plan, tables=tables, digest=digest(plan.manifest, tables)))


@pytest.mark.parametrize("table", sorted(SCHEMAS))
def test_a_table_of_other_columns_or_with_nulls_is_noticed(plan: Plan, table: str) -> None:
    short = plan[table].drop_columns(plan[table].column_names[-1:])
    nulls = plan[table].set_column(
        0, SCHEMAS[table].field(0), pa.nulls(len(plan[table]), SCHEMAS[table].field(0).type)
    )
    damaged: tuple[pa.Table, ...] = (short, nulls, plan[table].slice(0, 0)) if table in USED else (short,)
    for changed in damaged:
        assert check_plan(replace(plan, tables={**plan.tables, table: changed}))[0].where != "plan, digest"
    without = {name: each for name, each in plan.tables.items() if name != table}
    (problem, *_) = check_plan(replace(plan, tables=without))
    assert f"table {table}" in problem.where


def _with(plan: Plan, **entries: Any) -> tuple[Problem, ...]:
    manifest = {**plan.manifest, **entries}
    return check_plan(replace(plan, manifest=manifest, digest=digest(manifest, plan.tables)))


def test_a_manifest_without_an_entry_is_noticed(plan: Plan) -> None:
    assert _with(plan) == ()
    for name in ("sources", "expressions", "config", "tie", "donor", "format", "recipe"):
        manifest = {key: value for key, value in plan.manifest.items() if key != name}
        assert check_plan(replace(plan, manifest=manifest))
        assert _with(plan, **{name: "?"}), name
    assert _with(plan, donor=2)
    assert _with(plan, format=0)


def test_sources_with_other_files_or_numbers_of_tensors_are_noticed(plan: Plan) -> None:
    first, second = plan.manifest["sources"]
    (key, nbytes, header) = first["files"][0]
    for changed in (
        {"num_tensors": first["num_tensors"] + 1},
        {"num_tensors": "many"},
        {"files": []},
        {"files": [[key, nbytes - 1, header]]},
        {"files": [["other", nbytes, header]]},
        {"files": [[key, str(nbytes), header]]},
        {"files": [[key]]},
    ):
        assert _with(plan, sources=[{**first, **changed}, second]), changed
    assert _with(plan, sources=[first])


def test_expressions_that_cannot_be_carried_out_are_noticed(plan: Plan) -> None:
    expressions = plan.manifest["expressions"]
    number = next(i for i, each in enumerate(expressions) if each["method"] == "linear")
    one = '{"sources":[{"weight":1.0}],"values":{}}'
    unknown = '{"sources":[{"weight":1.0,"temperature":2}],"values":{}}'
    for changed in (
        {"method": "nearly"},
        {"method": "copy"},
        {"method": "slerp"},
        {"has_base": True},
        {"cast": "BF16"},
        {"cast": "F8_E4M3"},
        {"cast": "float32"},
        {"settings": "{"},
        {"settings": "[]"},
        {"settings": '{"sources":[],"values":{}}'},
        {"settings": one},
        {"settings": unknown},
    ):
        each = [*expressions[:number], {**expressions[number], **changed}, *expressions[number + 1 :]]
        assert _with(plan, expressions=each), changed


def test_a_config_that_contradicts_the_tensors_is_noticed(plan: Plan) -> None:
    config, tie = plan.manifest["config"], plan.manifest["tie"]
    assert _with(plan, config={**config, "torch_dtype": "bfloat16"})
    assert _with(plan, config={**config, "dtype": "float16"})
    assert _with(plan, config={k: v for k, v in config.items() if k != "torch_dtype"})
    assert _with(plan, config={**config, "tie_word_embeddings": True})
    assert _with(plan, tie={**tie, "tied": True})
    assert _with(plan, tie={**tie, "tied": False, "head": "other"})
    assert _with(plan, tie={**tie, "tied": False}) == ()


def test_a_plan_with_problems_need_not_be_complete(plan: Plan) -> None:
    tables = {**plan.tables, "dispositions": plan["dispositions"].slice(3)}
    short = replace(plan, tables=tables, digest=digest(plan.manifest, tables))
    assert check_plan(short)
    assert check_plan(replace(short, problems=(Problem("w", "it is.", "Mend it."),))) == ()


def test_sentences_say_where_how_many_and_what_to_do(plan: Plan) -> None:
    problem = check_plan(tampered(plan, "inputs", "nbytes", {2: 1, 5: 1}))[0]
    assert problem.where == "plan, table inputs, row 2"
    assert problem.what == "nbytes is not that of its elements (1 more rows alike)."
    assert "please report it with the recipe" in problem.remedy


def test_a_built_plan_that_contradicts_itself_is_a_bug_and_named_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe({"merge_method": "passthrough", "models": [{"model": _model(tmp_path / "a")}]})
    monkeypatch.setattr(finish, "cut_segments", lambda _: (Segment(0, 1, 0, 0),))
    with pytest.raises(RuntimeError, match="they do not take every row once"):
        build_plan(recipe, open_sources(recipe), version="0")


def test_two_producers_of_one_name_are_a_problem_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe({"merge_method": "passthrough", "models": [{"model": _model(tmp_path / "a")}]})
    heads = build.with_heads
    monkeypatch.setattr(
        build, "with_heads", lambda aligned, *rest, **named: [*heads(aligned, *rest, **named)] * 2
    )
    made = build_plan(recipe, open_sources(recipe), version="0")
    (problem,) = made.problems
    assert "11 tensors would be made twice" in problem.what
