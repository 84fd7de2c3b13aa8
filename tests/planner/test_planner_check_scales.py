"""Every kind of damage to the scales of a plan is noticed: those that are read, and those that are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_config
from kits.marks import one_in
from kits.plan_damage import changes, tampered
from kits.plan_maker import Specs, good, header_checkpoint

from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.check_inputs import Contradictions, check_scales
from raymerge.merge_plan.plan import SCHEMAS, Plan, digest

HIDDEN, RAGGED = 512, 1000
"""Columns of the quantised matrices, and rows of the longest: 8 bands of 128 of which the last has 104."""
EXPERTS, WIDTH = 2, 96


def _fp8(root: Path, scale: DType) -> Path:
    """Llama in block FP8: a matrix that is cut into pieces, its last band ragged, and short ones."""
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
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": EXPERTS,
        "hidden_size": 64,
        "intermediate_size": WIDTH,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return header_checkpoint(root, specs, config)


def _twice(a: Path, b: Path) -> Mapping[str, Any]:
    """All layers of both, two times, so that rows are copies of others."""
    piece = {"sources": [{"model": model, "layer_range": [0, 2]} for model in (a, b)]}
    return {"merge_method": "linear", "slices": [piece, piece], "parameters": {"weight": 1}}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Pieces of cut tensors, copies, two encodings, several shards."""
    root = tmp_path_factory.mktemp("fp8")
    a, b = _fp8(root / "a", DType.F32), _fp8(root / "b", DType.U8)
    return good({**_twice(a, b), "shard_size": 1_200_000}).plan


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Views and parts within blocks, copies."""
    root = tmp_path_factory.mktemp("mxfp4")
    asked = _twice(_mxfp4(root / "a"), _mxfp4(root / "b"))
    return good({**asked, "merge_method": "multislerp"}).plan


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def plan(request: pytest.FixtureRequest) -> Plan:
    found: Plan = request.getfixturevalue(request.param)
    return found


COLUMNS = [(table, field.name) for table in ("rows", "inputs", "scales") for field in SCHEMAS[table]]
FREE = {("inputs", "source"), ("inputs", "offset"), ("inputs", "view_offset"), ("scales", "offset")}
"""What no other column speaks of: another place within a file is left to the digest."""


def test_sound_plans_are_found_sound(fp8: Plan, mxfp4: Plan) -> None:
    rows, inputs = fp8["rows"].to_pylist(), fp8["inputs"].to_pylist()
    assert check_plan(fp8) == check_plan(mxfp4) == ()
    assert len(fp8.encodings) == 2
    assert len(fp8["shards"]) > 1
    assert any(row["first_element"] > 0 and row["scales"] >= 0 for row in rows)
    assert any(row["copy_of"] >= 0 and row["num_inputs"] == 0 for row in rows)
    assert any(each["view_strides"] and each["scales"] >= 0 for each in mxfp4["inputs"].to_pylist())
    assert all(row["scales"] < 0 or rows[row["scales"]]["made_with"] == i for i, row in enumerate(rows))
    assert {each["dtype"] for each in inputs if each["scales"] >= 0} == {"F8_E4M3"}


@pytest.mark.parametrize(("table", "column"), one_in(2, [pair for pair in COLUMNS if pair not in FREE]))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_changed_value_is_noticed(plan: Plan, table: str, column: str, data: st.DataObject) -> None:
    values = plan[table].column(column).to_pylist()
    row = data.draw(st.integers(0, len(values) - 1))
    value = data.draw(st.sampled_from(changes(values[row], SCHEMAS[table].field(column).type)))
    if (table, column) == ("inputs", "view_strides"):
        # Another distance of columns, or of rows within the region, is left to the digest.
        assume(len(value) != 2 or min(value) < 0)
    assert check_plan(tampered(plan, table, column, {row: value}))


@pytest.mark.parametrize(
    ("table", "column"), [("inputs", "source"), ("inputs", "offset"), ("scales", "offset")]
)
def test_what_lies_outside_its_file_is_noticed(plan: Plan, table: str, column: str) -> None:
    for value in (-1, 2**30):
        assert check_plan(tampered(plan, table, column, {2: value}))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_other_rows_for_made_with_and_scales_are_noticed(plan: Plan, data: st.DataObject) -> None:
    """Any other row, which may well be one of scales, or of codes."""
    column = data.draw(st.sampled_from(["made_with", "scales"]))
    values = plan["rows"].column(column).to_pylist()
    row, other = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    assume(values[row] != other)
    assert check_plan(tampered(plan, "rows", column, {row: other}))


@pytest.mark.parametrize(
    ("trade", "sentence"),
    [
        ("sizes", "it is not as many scales as its codes have"),
        ("matrices", "it is called the scales of another matrix than its codes are"),
        ("pieces", "it does not follow the scales of the piece before"),
    ],
)
def test_scales_that_are_traded_on_both_sides_are_noticed(fp8: Plan, trade: str, sentence: str) -> None:
    """Two rows of codes trade their scales: each still points at a row that points back."""
    rows = fp8["rows"].to_pylist()
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
    traded = tampered(fp8, "rows", "scales", {one: second, other: first})
    traded = tampered(traded, "rows", "made_with", {second: one, first: other})
    assert sentence in _sentences(traded)


def test_scales_with_other_copies_than_their_codes_are_noticed(fp8: Plan) -> None:
    """The copy of some codes names other scales of the same size, which in turn name it."""
    rows = fp8["rows"].to_pylist()
    copies = [i for i, row in enumerate(rows) if row["copy_of"] >= 0 and not row["num_inputs"]]
    size = rows[copies[0]]["nbytes"]
    one, other = [each for each in copies if rows[each]["nbytes"] == size][:2]
    old, new = rows[one]["copy_of"], rows[other]["copy_of"]
    changed = tampered(fp8, "rows", "copy_of", {one: new})
    changed = tampered(changed, "rows", "also", {old: [], new: sorted([*rows[new]["also"], one])})
    assert "its scales have other copies than it has" in _sentences(changed)


def _sentences(plan: Plan) -> str:
    return " ".join(problem.what for problem in check_plan(plan))


@pytest.mark.parametrize("left_out", [1, 0], ids=["without", "twice"])
def test_scales_left_out_or_repeated_are_noticed(plan: Plan, left_out: int) -> None:
    old = plan["scales"]
    for row in range(len(old)):
        kept = [old.slice(0, row + 1 - left_out), old.slice(row + left_out)]
        tables = {**plan.tables, "scales": pa.concat_tables(kept)}
        assert check_plan(replace(plan, tables=tables, digest=digest(plan.manifest, tables)))


def test_inputs_that_lose_or_trade_their_scales_are_noticed(fp8: Plan) -> None:
    named = fp8["inputs"].column("scales").to_pylist()
    read = [index for index, each in enumerate(named) if each >= 0]
    assert "arithmetic reads codes" in _sentences(tampered(fp8, "inputs", "scales", {read[0]: -1}))
    plain = named.index(-1)
    assert check_plan(tampered(fp8, "inputs", "scales", {plain: named[read[0]]}))
    assert check_plan(tampered(fp8, "inputs", "scales", {read[0]: named[read[1]], read[1]: named[read[0]]}))


def _with(plan: Plan, **entries: Any) -> tuple[Problem, ...]:
    manifest = {**plan.manifest, **entries}
    return check_plan(replace(plan, manifest=manifest, digest=digest(manifest, plan.tables)))


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


def test_expressions_that_encode_wrongly_are_noticed(plan: Plan) -> None:
    expressions = plan.manifest["expressions"]
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
        each = [*expressions[:which], {**expressions[which], **changed}, *expressions[which + 1 :]]
        assert _with(plan, expressions=each), changed


def test_a_tensor_of_codes_with_other_columns_is_noticed(fp8: Plan) -> None:
    """As many codes in rows of another length: its bands would be other elements."""
    tensors = fp8["tensors"].to_pylist()
    name = "model.layers.0.self_attn.k_proj.weight"
    number = next(i for i, each in enumerate(tensors) if each["name"] == name)
    changed = tampered(fp8, "tensors", "shape", {number: [64, 2 * HIDDEN]})
    found = Contradictions()
    check_scales(changed, found)
    assert "its tensor has other columns than it has" in " ".join(each.what for each in found.problems())


def test_scales_for_other_columns_than_their_codes_are_noticed(fp8: Plan, mxfp4: Plan) -> None:
    """As many bands and bytes: blocks of 64 rows with twice the columns, of which each is twice as wide."""
    encodings = fp8.manifest["encodings"]
    wide = [{**each, "block": [64, 256]} for each in encodings]
    columns = fp8["scales"].column("columns").to_pylist()
    changed = tampered(fp8, "scales", "columns", {i: 2 * each for i, each in enumerate(columns)})
    manifest = {**changed.manifest, "encodings": wide}
    problems = check_plan(replace(changed, manifest=manifest, digest=digest(manifest, changed.tables)))
    assert any("its scales are those of other columns" in each.what for each in problems)
    columns = mxfp4["scales"].column("columns").to_pylist()
    narrow = tampered(mxfp4, "scales", "columns", {i: 3 * each for i, each in enumerate(columns)})
    assert "its scales are those of other columns" in _sentences(narrow)


def test_pieces_that_are_cut_within_a_band_are_noticed(fp8: Plan) -> None:
    """Encodings of higher bands than the pieces have; that sizes differ as well is said beside it."""
    encodings = [{**each, "block": [10_000, 128]} for each in fp8.manifest["encodings"]]
    problems = _with(fp8, encodings=encodings)
    assert any("it is a piece that does not begin and end between bands" in each.what for each in problems)
