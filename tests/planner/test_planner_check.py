"""Every kind of damage to a plan is noticed, whether or not the digest was made to fit it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_config
from kits.gather_maker import Stock, expression, make_stock, plan_of, whole
from kits.marks import one_in
from kits.plan_damage import (
    changes,
    tampered,
    with_expression,
    with_manifest,
    with_row_twice,
    with_table,
    without_row,
)
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, make_recipe, same_needs
from kits.recipe_maker import one, twice

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.check_ops import Check, check_scales
from raymerge.merge_plan.expressions import Gather, Op, Output, Part, Product, Read, copy_expression, gathered
from raymerge.merge_plan.jobs import GatheredInput, Jobs
from raymerge.merge_plan.memory import gather_needs
from raymerge.merge_plan.plan import SCHEMAS, Plan, input_bytes
from raymerge.merge_plan.segments import Segment
from raymerge.merge_plan.tables import load_plan, save_plan
from raymerge.methods import BLOCK
from raymerge.planner.inputs.sources import open_models
from raymerge.planner.merges import build_plan
from raymerge.planner.outputs import build

Damage = Callable[[pa.Table, int], pa.Table]
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
    return good({**twice(a, b, 2), "dtype": "float32", "shard_size": 600}).plan


FREE = {
    ("tensors", "check_finite"),
    ("parts", "logical"),
    ("dispositions", "name"),
    ("inputs", "source"),
    ("inputs", "offset"),
}
"""What no other column speaks of: small changes of these are left to the digest."""


UNUSED = ("gathers", "gather_inputs", "factors", "runs", "scales", "files")
"""Tables without rows in this plan."""
USED = sorted(set(SCHEMAS) - set(UNUSED))
COLUMNS = [(table, field.name) for table, schema in SCHEMAS.items() if table in USED for field in schema]


def test_a_sound_plan_is_found_sound(plan: Plan) -> None:
    assert check_plan(plan) == ()
    rows = plan["ops"].to_pylist()
    assert any(not row["is_flat"] for row in rows)
    assert any(row["copy_of"] >= 0 for row in rows)
    assert any(row["first_element"] > 0 for row in rows)
    assert len(plan["shards"]) > 1
    assert all(not len(plan[table]) for table in UNUSED)


def test_pieces_read_what_lies_behind_the_pieces_before(plan: Plan) -> None:
    rows, inputs = plan["ops"].to_pylist(), plan["inputs"].to_pylist()
    pieces = [(rows[at - 1], row) for at, row in enumerate(rows) if row["first_element"] > 0]
    assert pieces
    for before, piece in pieces:
        for number in range(piece["num_inputs"]):
            behind, read = (inputs[row["first_input"] + number] for row in (before, piece))
            assert read["offset"] == behind["offset"] + behind["nbytes"]


@pytest.mark.sample(15)
@pytest.mark.parametrize(("table", "column"), [pair for pair in COLUMNS if pair not in FREE])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_changed_value_is_noticed(plan: Plan, table: str, column: str, data: st.DataObject) -> None:
    _notice_a_change(plan, table, column, data, _is_a_change)


def _notice_a_change(
    plan: Plan, table: str, column: str, data: st.DataObject, is_a_change: Callable[..., bool]
) -> None:
    values = plan[table].column(column).to_pylist()
    row = data.draw(st.integers(0, len(values) - 1))
    value = data.draw(st.sampled_from(changes(values[row], SCHEMAS[table].field(column).type)))
    assume(is_a_change(plan, table, column, row, value))
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("table", USED)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_rows_left_out_repeated_or_swapped_are_noticed(plan: Plan, table: str, data: st.DataObject) -> None:
    old = plan[table]
    row = data.draw(st.integers(0, len(old) - 2))
    kind = data.draw(st.sampled_from(["without", "twice", "swapped"]))
    if table in ("parts", "inputs", "dispositions", "tensors") and kind == "swapped":
        # Order alone says nothing in a list of dispositions, or among equals.
        kind = "without"
    swapped = [old.slice(0, row), old.slice(row + 1, 1), old.slice(row, 1), old.slice(row + 2)]
    changed = {
        "without": without_row(old, row),
        "twice": with_row_twice(old, row),
        "swapped": pa.concat_tables(swapped),
    }[kind]
    assert check_plan(with_table(plan, table, changed))


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


def _said(plan: Plan) -> str:
    return "\n".join(str(problem) for problem in check_plan(plan))


def _with(plan: Plan, **entries: Any) -> tuple[Problem, ...]:
    return check_plan(with_manifest(plan, **entries))


@pytest.mark.parametrize(
    ("table", "column", "by", "sentence"),
    [
        ("ops", "offset", 1, "it leaves a hole or overlaps in its tensor"),
        ("ops", "offset", -1, "it leaves a hole or overlaps in its tensor"),
        ("ops", "nbytes", -1, "it is the last of a tensor that ends elsewhere"),
        ("ops", "nbytes", 1, "it is the last of a tensor that ends elsewhere"),
        ("tensors", "offset", 1, "it leaves a hole or overlaps in its shard"),
        ("tensors", "offset", -1, "it leaves a hole or overlaps in its shard"),
        ("tensors", "nbytes", -1, "its shard ends elsewhere"),
    ],
)
def test_holes_and_overlaps_are_named(plan: Plan, table: str, column: str, by: int, sentence: str) -> None:
    """At the last of its tensor or shard, where nothing behind it is out of place as well."""
    places = plan[table].column("offset").to_numpy() + plan[table].column("nbytes").to_numpy()
    last = int(places.argmax())
    value = plan[table].column(column)[last].as_py()
    assert sentence in _said(tampered(plan, table, column, {last: value + by}))


def test_tensors_without_rows_or_of_another_dtype_are_named(plan: Plan) -> None:
    tensors, shards = (plan["ops"].column(name).to_pylist() for name in ("tensor", "shard"))
    alone = (row for row in range(1, len(tensors)) if tensors.count(tensors[row]) == 1)
    row = next(row for row in alone if shards[row] == shards[row - 1])
    lost = tampered(plan, "ops", "tensor", {row: tensors[row - 1]})
    assert "its ops are missing or do not stand together" in _said(lost)
    number = next(i for i, each in enumerate(plan.expressions) if each.cast is not DType.F32)
    other = with_expression(plan, number, cast="F32")
    assert "it is written in another dtype than its tensor's" in _said(other)


def test_parts_that_leave_elements_out_are_named(plan: Plan) -> None:
    first = next(row for row in plan["ops"].to_pylist() if row["num_parts"] > 1)["first_part"]
    offset = plan["parts"].column("view_offset")[first].as_py()
    twice = tampered(plan, "parts", "view_offset", {first + 1: offset})
    assert "its parts leave elements out" in _said(twice)


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
        assert check_plan(with_expression(plan, number, **changed)), changed


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
    short = with_table(plan, "dispositions", plan["dispositions"].slice(3))
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
    recipe = make_recipe(one(_model(tmp_path / "a")))
    monkeypatch.setattr(build, "cut_segments", lambda _: (Segment(0, 1, 0, 0),))
    with pytest.raises(RuntimeError, match="they do not take every op once"):
        build_plan(recipe, open_models(recipe).require(), version="0")


def test_two_producers_of_one_name_are_a_problem_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(one(_model(tmp_path / "a")))
    heads = build.with_heads
    monkeypatch.setattr(
        build, "with_heads", lambda aligned, *rest, **named: [*heads(aligned, *rest, **named)] * 2
    )
    made = build_plan(recipe, open_models(recipe).require(), version="0")
    (problem,) = made.problems
    assert "11 tensors would be made twice" in problem.what


SHAPE = "model.layers.1.mlp.up_proj.weight_shape"


@pytest.fixture(scope="module")
def constants_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Packed integers, which have their shapes beside them."""
    config = llama_config(layers=2, hidden=32) | {"torch_dtype": "bfloat16"}
    root = header_checkpoint(tmp_path_factory.mktemp("a") / "model", llama_specs(2), config)
    models = [{"model": str(root), "parameters": {"weight": 1}}] * 2
    return good({"merge_method": "linear", "models": models, "out_format": "int4"}).plan


def _row(plan: Plan) -> dict[str, Any]:
    names = plan["tensors"].column("name").to_pylist()
    found: dict[str, Any] = next(r for r in plan["ops"].to_pylist() if r["tensor"] == names.index(SHAPE))
    return found


def test_a_sound_plan_is_found_sound_saved_and_loaded(constants_plan: Plan, tmp_path: Path) -> None:
    assert check_plan(constants_plan) == ()
    row = _row(constants_plan)
    assert (row["num_inputs"], row["num_elements"], row["nbytes"]) == (0, 2, 16)
    expression = constants_plan.expressions[row["expression"]]
    assert [int.from_bytes(expression.content[at : at + 8], "little") for at in (0, 8)] == [64, 32]
    save_plan(constants_plan, tmp_path)
    assert load_plan(tmp_path).digest == constants_plan.digest


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
def test_other_constants_are_noticed(constants_plan: Plan, changed: dict[str, Any]) -> None:
    assert check_plan(with_expression(constants_plan, _row(constants_plan)["expression"], **changed))


def test_a_row_that_is_no_constant_or_a_constant_that_reads_is_noticed(constants_plan: Plan) -> None:
    rows, row = constants_plan["ops"].to_pylist(), _row(constants_plan)
    merged = next(index for index, each in enumerate(rows) if each["num_inputs"])
    scales = next(index for index, each in enumerate(rows) if each["made_with"] >= 0)
    for other in (merged, scales):
        assert check_plan(tampered(constants_plan, "ops", "expression", {other: row["expression"]}))
    assert check_plan(tampered(constants_plan, "ops", "num_inputs", {rows.index(row): 1}))


HIDDEN, RAGGED = 640, 1000
"""Columns of the quantised matrices, of which no block is a scale row, and rows of the longest: 8 scale rows
of 128 of which the last has 104."""
EXPERTS, WIDTH = 2, 96


def _fp8(root: Path, scale: DType) -> Path:
    """Llama in block FP8: a matrix that is cut into pieces, its last scale row ragged, and short ones."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.BF16, (64, HIDDEN)),
        "model.norm.weight": (DType.BF16, (HIDDEN,)),
        "lm_head.weight": (DType.BF16, (64, HIDDEN)),
    }
    for layer in range(2):
        block = f"model.layers.{layer}"
        specs[f"{block}.input_layernorm.weight"] = (DType.BF16, (HIDDEN,))
        specs |= _quantised(f"{block}.self_attn.k_proj.weight", (128, HIDDEN), scale)
        specs |= _quantised(f"{block}.self_attn.o_proj.weight", (128, HIDDEN // 2), scale)
        specs |= _quantised(f"{block}.mlp.up_proj.weight", (RAGGED, HIDDEN), scale)
    table: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if scale is not DType.F32:
        table["scale_fmt"] = "ue8m0"
    config = llama_config(layers=2, hidden=HIDDEN)
    return header_checkpoint(root, specs, {**config, "torch_dtype": "bfloat16", "quantization_config": table})


def _quantised(name: str, shape: tuple[int, int], scale: DType) -> Specs:
    grid = tuple(-(-size // 128) for size in shape)
    return {name: (DType.F8_E4M3, shape), f"{name}_scale_inv": (scale, grid)}


def _mxfp4(root: Path) -> Path:
    """gpt-oss: matrices of experts within one tensor, rows of gate and up taking turns."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.BF16, (16, 64)),
        "model.norm.weight": (DType.BF16, (64,)),
        "lm_head.weight": (DType.BF16, (16, 64)),
    }
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        specs[f"{block}.router.weight"] = (DType.BF16, (EXPERTS, 64))
        for name, rows, columns in (("gate_up_proj", 2 * WIDTH, 64), ("down_proj", 64, WIDTH)):
            grid = (EXPERTS, rows, columns // 32)
            specs[f"{block}.experts.{name}_blocks"] = (DType.U8, (*grid, 16))
            specs[f"{block}.experts.{name}_scales"] = (DType.U8, grid)
    sizes = {"num_local_experts": EXPERTS, "hidden_size": 64, "intermediate_size": WIDTH}
    said = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    return header_checkpoint(root, specs, {**CONFIG, **sizes, **said})


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Pieces of cut tensors, copies, two encodings, several shards."""
    root = tmp_path_factory.mktemp("fp8")
    a, b = _fp8(root / "a", DType.F32), _fp8(root / "b", DType.U8)
    return good({**twice(a, b, 2), "shard_size": 1_200_000}).plan


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Views and parts within blocks, copies."""
    root = tmp_path_factory.mktemp("mxfp4")
    asked = twice(_mxfp4(root / "a"), _mxfp4(root / "b"), 2)
    return good({**asked, "merge_method": "multislerp"}).plan


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def scales_plan(request: pytest.FixtureRequest) -> Plan:
    found: Plan = request.getfixturevalue(request.param)
    return found


SCALE_COLUMNS = [(table, field.name) for table in ("ops", "inputs", "scales") for field in SCHEMAS[table]]
SCALE_FREE = {("inputs", "source"), ("inputs", "offset"), ("inputs", "view_offset"), ("scales", "offset")}
"""What no other column speaks of: another place within a file is left to the digest."""


def test_sound_plans_are_found_sound(fp8: Plan, mxfp4: Plan) -> None:
    rows, inputs = fp8["ops"].to_pylist(), fp8["inputs"].to_pylist()
    assert check_plan(fp8) == check_plan(mxfp4) == ()
    assert len(fp8.encodings) == 2
    assert len(fp8["shards"]) > 1
    assert any(row["first_element"] > 0 and row["scales"] >= 0 for row in rows)
    assert any(row["copy_of"] >= 0 and row["num_inputs"] == 0 for row in rows)
    assert any(each["view_strides"] and each["scales"] >= 0 for each in mxfp4["inputs"].to_pylist())
    assert all(row["scales"] < 0 or rows[row["scales"]]["made_with"] == i for i, row in enumerate(rows))
    assert {each["dtype"] for each in inputs if each["scales"] >= 0} == {"F8_E4M3"}


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("table", "column"), one_in(2, [pair for pair in SCALE_COLUMNS if pair not in SCALE_FREE])
)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_changed_scale_is_noticed(scales_plan: Plan, table: str, column: str, data: st.DataObject) -> None:
    _notice_a_change(scales_plan, table, column, data, _is_another_view)


def _is_another_view(_plan: Plan, table: str, column: str, _row: int, value: Any) -> bool:
    """Another distance of columns, or of rows within the region, is left to the digest."""
    return (table, column) != ("inputs", "view_strides") or len(value) != 2 or min(value) < 0


@pytest.mark.parametrize(
    ("table", "column"), [("inputs", "source"), ("inputs", "offset"), ("scales", "offset")]
)
def test_what_lies_outside_its_file_is_noticed(scales_plan: Plan, table: str, column: str) -> None:
    for value in (-1, 2**30):
        assert check_plan(tampered(scales_plan, table, column, {2: value}))


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_other_rows_for_made_with_and_scales_are_noticed(scales_plan: Plan, data: st.DataObject) -> None:
    """Any other op, which may well be one of scales, or of codes."""
    column = data.draw(st.sampled_from(["made_with", "scales"]))
    values = scales_plan["ops"].column(column).to_pylist()
    row, other = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    assume(values[row] != other)
    assert check_plan(tampered(scales_plan, "ops", column, {row: other}))


@pytest.mark.parametrize(
    ("trade", "sentence"),
    [
        ("sizes", "it is not as many scales as its codes have"),
        ("matrices", "it is called the scales of another matrix than its codes are"),
        ("pieces", "it does not follow the scales of the piece before"),
    ],
)
def test_scales_that_are_traded_on_both_sides_are_noticed(fp8: Plan, trade: str, sentence: str) -> None:
    """Two ops of codes trade their scales: each still points at an op that points back."""
    rows = fp8["ops"].to_pylist()
    made = [(index, row["scales"]) for index, row in enumerate(rows) if row["scales"] >= 0]

    def differs(column: str, one: int, other: int) -> bool:
        return bool(rows[one][column] != rows[other][column])

    (one, first), (other, second) = next(
        (a, b)
        for a in made
        for b in made
        if a < b
        and differs("nbytes", a[1], b[1]) == (trade == "sizes")
        and differs("tensor", a[0], b[0]) == (trade != "pieces")
    )
    traded = tampered(fp8, "ops", "scales", {one: second, other: first})
    traded = tampered(traded, "ops", "made_with", {second: one, first: other})
    assert sentence in _said(traded)


def test_scales_with_other_copies_than_their_codes_are_noticed(fp8: Plan) -> None:
    """The copy of some codes names other scales of the same size, which in turn name it."""
    rows = fp8["ops"].to_pylist()
    copies = [i for i, row in enumerate(rows) if row["copy_of"] >= 0 and not row["num_inputs"]]
    size = rows[copies[0]]["nbytes"]
    one, other = [each for each in copies if rows[each]["nbytes"] == size][:2]
    old, new = rows[one]["copy_of"], rows[other]["copy_of"]
    changed = tampered(fp8, "ops", "copy_of", {one: new})
    changed = tampered(changed, "ops", "also", {old: [], new: sorted([*rows[new]["also"], one])})
    assert "its scales have other copies than it has" in _said(changed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", [without_row, with_row_twice])
def test_scales_left_out_or_repeated_are_noticed(scales_plan: Plan, damage: Damage) -> None:
    _notice_every_row(scales_plan, "scales", damage)


def _notice_every_row(plan: Plan, table: str, damage: Damage) -> None:
    rows = range(0, len(plan[table]), 1 + len(plan[table]) // 10)
    assert all(check_plan(with_table(plan, table, damage(plan[table], row))) for row in rows)


def test_inputs_that_lose_or_trade_their_scales_are_noticed(fp8: Plan) -> None:
    named = fp8["inputs"].column("scales").to_pylist()
    read = [index for index, each in enumerate(named) if each >= 0]
    assert "arithmetic reads codes" in _said(tampered(fp8, "inputs", "scales", {read[0]: -1}))
    plain = named.index(-1)
    assert check_plan(tampered(fp8, "inputs", "scales", {plain: named[read[0]]}))
    assert check_plan(tampered(fp8, "inputs", "scales", {read[0]: named[read[1]], read[1]: named[read[0]]}))


def test_encodings_that_are_not_those_of_the_scales_are_noticed(fp8: Plan) -> None:
    first, second = fp8.manifest["encodings"]
    for changed in (
        {"format": "fp7"},
        {"format": "int4", "block": [1, 32], "scale_dtype": "BF16"},
        {"block": [128, 64]},
        {"block": [64, 128]},
        {"block": [128]},
        {"block": [-128, 128]},
        {"block": ["128", 128]},
        {"scale_dtype": "F16"},
        {"scale_dtype": "I64"},
        {"scale_dtype": "U8"},
    ):
        assert _with(fp8, encodings=[{**first, **changed}, second]), changed
    assert _with(fp8, encodings=[second, first])
    assert _with(fp8, encodings=[first, second, first])
    assert _with(fp8, encodings=[first])
    assert _with(fp8, encodings="?")
    manifest = {key: value for key, value in fp8.manifest.items() if key != "encodings"}
    assert check_plan(replace(fp8, manifest=manifest))


def test_expressions_that_encode_wrongly_are_noticed(scales_plan: Plan) -> None:
    expressions = scales_plan.manifest["expressions"]
    number = next(i for i, each in enumerate(expressions) if each["encode"] is not None)
    scales = next(i for i, each in enumerate(expressions) if each["method"] == "scales")
    encode = expressions[number]["encode"]
    for which, changed in (
        (number, {"encode": None}),
        (number, {"cast": "U8"}),
        (number, {"cast": "BF16"}),
        (number, {"cast": "F4" if expressions[number]["cast"] != "F4" else "F8_E4M3"}),
        (number, {"encode": {**encode, "block": [1, 16]}}),
        (number, {"encode": {**encode, "scale_dtype": "BF16"}}),
        (number, {"encode": {**encode, "format": "nvfp4", "block": [1, 16]}}),
        (number, {"method": "scales", "settings": '{"sources":[],"values":{}}'}),
        (scales, {"encode": encode}),
        (scales, {"method": "copy"}),
        (scales, {"has_base": True}),
        (scales, {"cast": "I8"}),
        (scales, {"cast": "I32"}),
        (scales, {"settings": '{"sources":[{}],"values":{}}'}),
    ):
        assert check_plan(with_expression(scales_plan, which, **changed)), changed


def test_a_tensor_of_codes_with_other_columns_is_noticed(fp8: Plan) -> None:
    """As many codes in rows of another length: its scale rows would be other elements."""
    tensors = fp8["tensors"].to_pylist()
    name = "model.layers.0.self_attn.k_proj.weight"
    number = next(i for i, each in enumerate(tensors) if each["name"] == name)
    changed = tampered(fp8, "tensors", "shape", {number: [64, 2 * HIDDEN]})
    found = Check(changed)
    check_scales(found)
    assert "its tensor has other columns than it has" in " ".join(each.what for each in found.problems)


def test_scales_for_other_columns_than_their_codes_are_noticed(fp8: Plan, mxfp4: Plan) -> None:
    """As many scale rows and bytes: blocks of 64 rows with twice the columns, of which each is twice as
    wide."""
    encodings = fp8.manifest["encodings"]
    wide = [{**each, "block": [64, 256]} for each in encodings]
    columns = fp8["scales"].column("columns").to_pylist()
    changed = tampered(fp8, "scales", "columns", {i: 2 * each for i, each in enumerate(columns)})
    assert "its scales are those of other columns" in _said(with_manifest(changed, encodings=wide))
    columns = mxfp4["scales"].column("columns").to_pylist()
    narrow = tampered(mxfp4, "scales", "columns", {i: 3 * each for i, each in enumerate(columns)})
    assert "its scales are those of other columns" in _said(narrow)


def test_pieces_that_are_cut_within_a_band_are_noticed(fp8: Plan) -> None:
    """Encodings of higher scale rows than the pieces have; that sizes differ as well is said beside it."""
    encodings = [{**each, "block": [10_000, 128]} for each in fp8.manifest["encodings"]]
    said = _said(with_manifest(fp8, encodings=encodings))
    assert "it is a piece that does not begin and end between scale rows" in said


ROWS, COLS, RANK = 12, 6, 2


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.ones(ROWS, COLS),
        "b": torch.ones(ROWS + 3, COLS, dtype=torch.bfloat16),
        "ids": torch.ones(ROWS, COLS, dtype=torch.int64),
        "fused": torch.ones(COLS, 2 * ROWS),
        "vector": torch.ones(ROWS),
        "lora.up": torch.ones(ROWS, RANK),
        "lora.down": torch.ones(RANK, COLS),
        "lora.magnitude": torch.ones(ROWS),
        "flipped.up": torch.ones(COLS, RANK),
        "flipped.down": torch.ones(RANK, ROWS),
        "square": torch.ones(COLS, COLS),
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return make_stock(tmp_path_factory.mktemp("stock"), _tensors(), _tensors())


def _output(
    name: str, reads: tuple[Read, ...], shape: tuple[int, ...] = (ROWS, COLS), method: str = "linear"
) -> Output:
    made_of = expression(method, sources=len(reads), weight=0.5)
    size = torch.Size(shape).numel()
    return Output(name, DType.F32, shape, (Op(size, made_of, (Part(name, shape, None),), reads),), True)


def _mixed(stock: Stock) -> Gather:
    """Two inputs with products, moved rows, and padding."""
    gather_inputs = (
        stock.term("a", product=stock.product("lora", RANK, scale=0.5, magnitude=True)),
        stock.term("b", 1),
    )
    return Gather(ROWS, COLS, gather_inputs, ((0, 2, 4, 0), (1, 9, 6, 1), (8, 0, 2, 1)), 10)


@pytest.fixture(scope="module")
def assembly_plan(stock: Stock) -> Plan:
    """Gathers of every kind, one of them twice."""
    mixed = _mixed(stock)
    flipped = stock.term("a", product=stock.product("flipped", RANK, transposed=True))
    view = View(1, (ROWS, COLS), (2, 2 * ROWS))
    outputs = (
        _output("one", (gathered(0, mixed), stock.read("a"))),
        _output("three", (gathered(0, whole(flipped, COLS)),)),
        _output("two", (gathered(0, whole(stock.term("fused", view=view), COLS)), gathered(0, mixed))),
        _output("vector", (gathered(0, whole(stock.term("vector"), 1)),), (ROWS,)),
        _output("zero", (stock.read("a"), stock.read("a", 1))),
    )
    made = plan_of(stock, outputs)
    assert check_plan(made) == ()
    return made


def test_each_assembly_stands_once_and_in_order(assembly_plan: Plan) -> None:
    assert assembly_plan["inputs"].column("gather").to_pylist() == [0, -1, 1, 2, 0, 3, -1, -1]
    assert assembly_plan["gathers"].column("num_gather_inputs").to_pylist() == [2, 1, 1, 1]
    assert assembly_plan["gather_inputs"].column("num_factors").to_pylist() == [3, 0, 2, 0, 0]
    assert assembly_plan["runs"].to_pylist()[1] == {"to_row": 1, "from_row": 9, "count": 6, "input": 1}
    assert assembly_plan["ops"].column("is_flat").to_pylist() == [True, True, False, True, True]


def test_jobs_hold_what_the_plan_was_told(assembly_plan: Plan, stock: Stock) -> None:
    jobs = {
        op.tensor: op
        for segment in range(len(assembly_plan["segments"]))
        for op in Jobs(assembly_plan).ops(segment)
    }
    first = jobs["one"].inputs[0]
    assert isinstance(first, GatheredInput)
    mixed = _mixed(stock)
    assert first.inputs == mixed.inputs
    assert tuple(zip(*first.runs.tolist(), strict=True)) == mixed.runs
    assert (first.num_rows, first.num_columns, first.real_rows) == (ROWS, COLS, 10)
    fused = jobs["two"].inputs[0]
    assert isinstance(fused, GatheredInput)
    assert fused.inputs[0].read.view == View(1, (ROWS, COLS), (2, 2 * ROWS))
    assert jobs["zero"].inputs == (stock.read("a"), stock.read("a", 1))
    needs = gather_needs(assembly_plan)
    assert (first.need, fused.need) == (needs[0], needs[2])
    assert same_needs(assembly_plan) == len(jobs)


def test_a_matrix_is_only_multiplied_by_one_as_wide_as_it_is(stock: Stock) -> None:
    mixed = stock.term("a", product=Product(None, stock.read("square"), COLS, 1.0))
    made = plan_of(stock, [_output("one", (gathered(0, whole(mixed, COLS)),))])
    assert check_plan(made) == ()
    taken = Jobs(made).ops(0)[0].inputs[0]
    assert isinstance(taken, GatheredInput)
    assert taken.inputs == (mixed,)
    for column, value in (("rank", COLS - 1), ("transposed", True)):
        assert _said(tampered(made, "gather_inputs", column, {0: value}))


def test_equal_content_shares_bytes_only_where_the_assembly_is_equal(stock: Stock) -> None:
    mixed = _mixed(stock)
    other = replace(mixed, real_rows=11)
    reads = [(gathered(0, each),) for each in (mixed, other, mixed, other)]
    made = plan_of(stock, [_output(name, each) for name, each in zip("abcd", reads, strict=True)])
    assert check_plan(made) == ()
    assert made["ops"].column("copy_of").to_pylist() == [-1, -1, 0, 1]
    changed = tampered(made, "inputs", "gather", {2: 1, 3: 0})
    assert "it differs from the op that it is a copy of" in _said(changed)


def test_cost_is_all_that_is_read(assembly_plan: Plan) -> None:
    costs = assembly_plan["segments"].column("cost").to_pylist()
    matrix, half = 4 * ROWS * COLS, 2 * (ROWS + 3) * COLS
    lora = 4 * (ROWS * RANK + RANK * COLS + ROWS)
    flipped = 4 * (COLS * RANK + RANK * ROWS)
    mixed = (matrix + half + lora) // ROWS * ROWS
    by_input = [mixed, matrix, matrix + flipped, 2 * matrix, mixed, 4 * ROWS, matrix, matrix]
    assert input_bytes(assembly_plan).tolist() == by_input
    reads = [mixed + matrix, matrix + flipped, 2 * matrix + mixed, 4 * ROWS, 2 * matrix]
    assert sum(costs) == sum(reads) + 4 * matrix + 4 * ROWS


ASSEMBLY_FREE = {
    ("gather_inputs", "source"),
    ("gather_inputs", "offset"),
    ("gather_inputs", "scale"),
    ("factors", "source"),
    ("factors", "offset"),
}
"""What small changes of no other column contradicts: left to the digest."""
COLUMNS_USED = [
    (table, field.name)
    for table in ("gathers", "gather_inputs", "factors", "runs")
    for field in SCHEMAS[table]
    if (table, field.name) not in ASSEMBLY_FREE
]


@pytest.mark.sample(9)
@pytest.mark.parametrize(("table", "column"), [*COLUMNS_USED, ("inputs", "gather")])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_changed_assembly_is_noticed(
    assembly_plan: Plan, table: str, column: str, data: st.DataObject
) -> None:
    _notice_a_change(assembly_plan, table, column, data, _is_another_assembly)


def _is_another_assembly(plan: Plan, table: str, column: str, row: int, value: Any) -> bool:
    """Other rows that are there as well, another end of the padding, and no factors: left to the digest."""
    runs = plan["runs"].to_pylist()
    if table == "runs" and column in ("to_row", "from_row", "count"):
        return not 0 <= value <= ROWS + 3
    if (table, column) == ("runs", "input"):
        return value not in (0, 1) or row > 2
    if (table, column) == ("gathers", "real_rows"):
        limit = max(run["to_row"] + run["count"] for run in runs[:3]) if row == 0 else ROWS
        return not limit <= value <= ROWS
    return True


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "words"),
    [
        ("inputs", "gather", 4, -1, "cost is not the bytes read and written"),
        ("gathers", "num_columns", 0, 2**41, "no such number of rows or columns"),
        ("gathers", "real_rows", 0, 9, "it leaves its gather"),
        ("gather_inputs", "dtype", 1, "I16", "arithmetic reads codes"),
        ("gather_inputs", "scale", 0, float("nan"), "its scale is no number"),
        ("gather_inputs", "scale", 1, 1.0, "its scale is no number"),
        ("gather_inputs", "transposed", 0, True, "it is transposed and has no product, or a magnitude"),
        ("gather_inputs", "transposed", 2, False, "nbytes is not that of its shape"),
        ("gather_inputs", "view_offset", 3, 2, "its view leaves its region"),
        ("runs", "from_row", 0, 9, "it leaves its input"),
        ("runs", "to_row", 0, -1, "it leaves its gather"),
        ("runs", "to_row", 2, 6, "its input gives a row twice"),
        ("runs", "to_row", 0, 2, "it stands behind a later row or input"),
        ("runs", "input", 3, 1, "its gather has no such input"),
    ],
)
def test_damage_is_named(
    assembly_plan: Plan, table: str, column: str, row: int, value: Any, words: str
) -> None:
    assert words in _said(tampered(assembly_plan, table, column, {row: value}))


@pytest.mark.parametrize("table", ["gather_inputs", "factors"])
def test_references_outside_are_noticed(assembly_plan: Plan, table: str) -> None:
    for column, values in (("source", [-1, 2]), ("offset", [-4, 2**40]), ("dtype", ["X9"])):
        assert all(check_plan(tampered(assembly_plan, table, column, {0: value})) for value in values)


@pytest.mark.sample(3)
@pytest.mark.parametrize("table", ["gathers", "gather_inputs", "factors", "runs"])
@pytest.mark.parametrize("damage", [without_row, with_row_twice])
def test_rows_left_out_or_repeated_are_noticed(assembly_plan: Plan, table: str, damage: Damage) -> None:
    _notice_every_row(assembly_plan, table, damage)


def test_an_assembly_that_no_input_names_is_noticed(assembly_plan: Plan) -> None:
    changed = tampered(assembly_plan, "inputs", "gather", {5: 2})
    assert "inputs do not name every one of them, in order" in _said(changed)


def test_what_cannot_be_assembled_is_refused(stock: Stock) -> None:
    """Rows of a gather are those of its part, so that groups of them are."""
    gather_input, part = stock.term("a"), Part("a", (ROWS, COLS), None)
    copied = Op(ROWS * COLS, copy_expression(DType.F32), (part,), (gathered(0, whole(gather_input, COLS)),))
    flat = gathered(0, whole(replace(gather_input, num_rows=ROWS * COLS), 1))
    for output, words in (
        (Output("a", DType.F32, (ROWS, COLS), (copied,), True), "a copy of bytes is gathered from rows"),
        (_output("a", (flat,)), "its gather has another shape than its part"),
        (_output("a", (gathered(0, whole(stock.term("ids"), COLS)),)), "arithmetic reads codes"),
    ):
        assert words in _said(plan_of(stock, [output]))


def test_a_piece_of_a_method_that_needs_the_whole_tensor_is_refused(stock: Stock) -> None:
    output = _output("a", (stock.read("a"), stock.read("a", 1)), method="multislerp")
    (op,) = output.ops
    half = ROWS * COLS // 2
    halves = [
        op._replace(
            num_elements=half,
            reads=tuple(r._replace(nbytes=4 * half, offset=r.offset + 4 * part * half) for r in op.reads),
        )
        for part in range(2)
    ]
    made = plan_of(stock, [output._replace(ops=tuple(halves))])
    told = tampered(made, "ops", "first_element", {1: half})
    assert "its method needs the whole tensor" in _said(told)


@pytest.mark.parametrize("position", ["2.0", "-1", '"x"'])
def test_a_position_that_is_none_is_noticed(assembly_plan: Plan, position: str) -> None:
    settings = assembly_plan.manifest["expressions"][0]["settings"]
    changed = settings.replace("{", f'{{"position":{position},', 1)
    assert check_plan(with_expression(assembly_plan, 0, settings=changed))
