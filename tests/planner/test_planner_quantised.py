"""Codes and their scales, found by what they are; what an inspection tells of them and of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.family_names import llama
from kits.marks import one_in
from kits.packed_headers import FP8, GOOD, NV, W4, X, compressed, f8, f32
from kits.plan_damage import changes, tampered
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, planned, refusals
from kits.recipe_maker import linear, one, twice

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, WeightFile, open_checkpoint
from raymerge.dtypes import DType
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.check_ops import Check, check_ops, check_scales
from raymerge.merge_plan.memory import expression_passes, project
from raymerge.merge_plan.plan import SCHEMAS, Plan
from raymerge.planner.inputs.quantised import quantised_formats
from raymerge.planner.inputs.sources import open_reference
from raymerge.planner.inspection import Inspection, inspect_checkpoint, quantised_groups
from raymerge.recipes.entry import ModelReference

Q = "model.layers.0.self_attn.q_proj"

FORMATS: dict[str, Specs] = {
    "hqq": {"W_q": (DType.U8, (16, 32)), "scale": (DType.F16, (1, 64)), "zero": (DType.F16, (1, 64))},
    "quanto": {"weight._data": (DType.I8, (32, 32)), "weight._scale": (DType.F16, (32, 1))},
    "vptq": {
        "indices": (DType.I32, (8, 8)),
        "centroids.weight": (DType.BF16, (8, 8)),
        "weight_scale": (DType.BF16, (32,)),
        "weight_bias": (DType.BF16, (32,)),
    },
    "aqlm": {
        "codes": (DType.I16, (8, 8, 1)),
        "codebooks": (DType.F16, (1, 8, 1, 8)),
        "scales": (DType.F16, (8, 1, 1, 1)),
    },
    "eetq": {"weight": (DType.I8, (32, 32)), "weight_scales": (DType.F16, (32,))},
    "bitnet": {"weight": (DType.U8, (8, 32)), "weight_scale": (DType.BF16, (1,))},
    "gptq": {
        "qweight": (DType.I32, (4, 32)),
        "qzeros": (DType.I32, (1, 4)),
        "scales": (DType.F16, (1, 32)),
        "g_idx": (DType.I32, (32,)),
        "bias": (DType.F16, (32,)),
    },
    "awq": {"qweight": (DType.I32, (32, 4)), "qzeros": (DType.I32, (1, 4)), "scales": (DType.F16, (1, 32))},
    "bitsandbytes": {
        "weight": (DType.U8, (512, 1)),
        "weight.absmax": (DType.U8, (16,)),
        "weight.nested_absmax": (DType.F32, (1,)),
        "weight.quant_map": (DType.F32, (16,)),
        "weight.quant_state.bitsandbytes__nf4": (DType.U8, (80,)),
    },
}


W4_PARTS: Specs = {"weight_packed": (DType.I32, (32, 4)), "weight_scale": (DType.BF16, (32, 1))}


def _model(root: Path, extra: Specs, **config: Any) -> Path:
    specs = {name: spec for name, spec in llama_specs(1).items() if not name.startswith(Q)}
    return header_checkpoint(root, {**specs, **extra}, {**llama_config(layers=1), **config})


def _formats(root: Path, extra: Specs, **config: Any) -> dict[str, str]:
    return dict(quantised_formats(open_reference(ModelReference(str(_model(root, extra, **config))))))


def _in_q(specs: Specs) -> Specs:
    return {f"{Q}.{leaf}": spec for leaf, spec in specs.items()}


NAMES = {
    "hqq": ("HQQ", "dequantize"),
    "quanto": ("quanto", "optimum-quanto"),
    "vptq": ("VPTQ", "vptq"),
    "aqlm": ("AQLM", "aqlm"),
    "eetq": ("EETQ", "made from"),
    "bitnet": ("BitNet", "bfloat16"),
    "gptq": ("GPTQ", "gptqmodel"),
    "awq": ("AWQ", "compressed-tensors"),
    "bitsandbytes": ("bitsandbytes in 4 bits (NF4 or FP4)", "model.dequantize()"),
}
"""What each is called, and a word of what to do."""


@pytest.mark.parametrize("method", one_in(3, FORMATS))
def test_a_declared_format_is_refused_whole_and_by_its_own_name(tmp_path: Path, method: str) -> None:
    config = {"quantization_config": {"quant_method": method}}
    a, b = (_model(tmp_path / each, _in_q(FORMATS[method]), **config) for each in "ab")
    problems = refusals(linear(a, b))
    assert len(problems) == 2
    count = len(FORMATS[method])
    name, word = NAMES[method]
    for problem in problems:
        assert f"{count} tensors are quantised as {name}," in problem
        assert word in problem
        assert "merge_method: passthrough" in problem
        assert any(tensor in problem for tensor in _in_q(FORMATS[method]))
    good(one(a))


@pytest.mark.parametrize("is_lead", [True, False])
def test_codes_that_have_no_counterpart_are_refused_by_the_name_of_their_format(
    tmp_path: Path, is_lead: bool
) -> None:
    """Else all of a parent's codes might be left out, as tensors that the other one lacks."""
    table = {"quantization_config": {"quant_method": "gptq"}}
    codes = {leaf: spec for leaf, spec in FORMATS["gptq"].items() if leaf != "bias"}
    coded = _model(tmp_path / "coded", _in_q(codes), **table)
    plain = _model(tmp_path / "plain", {f"{Q}.weight": (DType.BF16, (32, 32))})
    parents = [coded, plain] if is_lead else [plain, coded]
    left_out = {"base_model": str(parents[0]), "missing_tensors": "copy_base", "extra_tensors": "drop"}
    for recipe in (linear(*parents), linear(*parents, **left_out)):
        (problem,) = refusals(recipe)
        assert problem.startswith(f"{coded}: ")
        assert "tensors are quantised as GPTQ," in problem
        assert "gptqmodel" in problem
    unchanged = {
        "methods": [{"glob": f"{Q}*", "merge_method": "passthrough", "sources": [left_out["base_model"]]}]
    }
    good(linear(*parents, **left_out, **unchanged))


@pytest.mark.parametrize("method", FORMATS)
def test_a_format_that_nobody_declares_is_refused_whole_all_the_same(tmp_path: Path, method: str) -> None:
    found = _formats(tmp_path / "a", _in_q(FORMATS[method]))
    inside = _in_q(FORMATS[method])
    if method == "bitsandbytes":
        # The state's path is one deeper, and only a declaration says what it belongs to.
        inside = {name: spec for name, spec in inside.items() if "quant_state" not in name}
    assert found.keys() == inside.keys()


@pytest.mark.parametrize("section", ["text_config", "compression_config"])
def test_a_declaration_counts_wherever_it_stands(tmp_path: Path, section: str) -> None:
    table = {"quant_method": "hqq"}
    config = {"text_config": {"quantization_config": table}} if section == "text_config" else {section: table}
    assert set(_formats(tmp_path / "a", _in_q(FORMATS["hqq"]), **config).values()) == {"HQQ"}


PLAIN: dict[str, Specs] = {
    "positions of BERT": {
        "bert.embeddings.position_ids": (DType.I64, (1, 8)),
        "bert.embeddings.scale": (DType.BF16, (8,)),
    },
    "a mask": {"model.attn_block.mask": (DType.BOOL, (8, 8)), "model.attn_block.gain": (DType.BF16, (8,))},
    "a counter": {
        "model.bn.num_batches_tracked": (DType.I64, ()),
        "model.bn.running_mean": (DType.BF16, (8,)),
    },
    "DeepSeek-V4's experts by token": {
        "layers.0.ffn.gate.tid2eid": (DType.I64, (32, 2)),
        "layers.0.ffn.gate.weight": (DType.BF16, (4, 8)),
    },
    "a long counter": {"model.bn.seen": (DType.I64, (4,)), "model.bn.running_mean": (DType.BF16, (8,))},
    "integers alone": {"model.table.index": (DType.I32, (4, 4))},
    "a name alone": {"x.scales": (DType.F32, (2,))},
}


@pytest.mark.parametrize("kind", PLAIN)
def test_integers_that_are_no_codes_stay_copied_from_the_lead(tmp_path: Path, kind: str) -> None:
    a, b = (_model(tmp_path / each, PLAIN[kind]) for each in "ab")
    made = good(linear(a, b))
    for name, (dtype, _) in PLAIN[kind].items():
        assert made.method(name) == ("linear" if dtype.is_mergeable else "copy")


@pytest.mark.parametrize(
    "kind", ["positions of BERT", "a mask", "a counter", "a long counter", "DeepSeek-V4's experts by token"]
)
def test_nor_are_they_codes_where_something_else_is_declared_quantised(tmp_path: Path, kind: str) -> None:
    assert not _formats(tmp_path / "a", PLAIN[kind], quantization_config={"quant_method": "hqq"})


def test_a_plain_stack_of_experts_beside_a_quantised_one_stays_plain(tmp_path: Path) -> None:
    block = "model.layers.0.mlp.experts"
    extra: Specs = {
        f"{block}.down_proj_blocks": (DType.U8, (2, 8, 4)),
        f"{block}.down_proj_scales": (DType.U8, (2, 8)),
        f"{block}.down_proj_bias": (DType.BF16, (2, 8)),
        f"{block}.gate_up_proj": (DType.BF16, (2, 8, 8)),
    }
    found = _formats(tmp_path / "a", extra)
    assert found == {name: "mxfp4" for name in extra if "gate_up" not in name}


DECLARED = {"quantization_config": {"quant_method": "compressed-tensors"}}
SOME, FBGEMM = ({"quantization_config": {"quant_method": name}} for name in ("some", "fbgemm_fp8"))
NV_PARTS: Specs = {
    "weight_packed": (DType.U8, (2, 8)),
    "weight_scale": f8(2, 1),
    "weight_global_scale": (DType.F32, (1,)),
}
SINQ = {"quantization_config": {"quant_method": "sinq"}}
UNNAMED = {"quantization_config": {"a": 1}}


@pytest.mark.parametrize(
    ("extra", "config", "form"),
    [
        (NV_PARTS, SOME, "nvfp4"),
        ({"weight": f8(2, 2), "weight_scale": f32()}, SOME, "fp8_channel or fp8_tensor"),
        ({"weight": f8(2, 2), "weight_scale": f32()}, FBGEMM, "FBGEMM FP8"),
        ({"weight": f8(2, 2), "qscale_weight": f32()}, DECLARED, "FP8 with qscale_weight"),
        ({"weight": (DType.I8, (2, 2)), "SCB": f32(2)}, DECLARED, "bitsandbytes in 8 bits (LLM.int8)"),
        ({"weight_packed": (DType.I32, (2, 2))}, UNNAMED, "I32 codes"),
        (W4_PARTS, UNNAMED, "int4 or int4_channel"),
        (
            {**W4_PARTS, "weight_zero_point": (DType.I32, (4, 1))},
            UNNAMED,
            "INT4 with zero points or int4_channel with zero points",
        ),
        ({"weight": (DType.I8, (2, 16)), "scale": (DType.F8_E8M0, (2, 1))}, UNNAMED, "mxfp4"),
        ({"weight": (DType.U8, (2, 2))}, UNNAMED, "U8 codes"),
        ({"qweight": (DType.I32, (2, 2)), "qzeros": (DType.I32, (1, 1))}, {}, "GPTQ or AWQ"),
        ({"qweight": (DType.I32, (2, 2)), "qzeros": (DType.I32, (1, 1))}, SOME, "some"),
        ({"qweight": (DType.I32, (4, 32)), "g_idx": (DType.I32, (32,))}, {}, "GPTQ"),
        ({"weight": (DType.F8_E5M2, (2, 2))}, {}, "FP8 e5m2"),
        ({"weight": (DType.F8_E4M3FNUZ, (2, 2)), "weight_scale": f32()}, DECLARED, "FP8 e4m3fnuz"),
        ({"W_q": (DType.U8, (2, 2)), "scale": f32(2)}, SINQ, "SINQ"),
        ({"weight": (DType.U32, (2, 2)), "scales": f32(2), "biases": f32(2)}, {}, "MLX"),
    ],
)
def test_names_that_only_one_format_uses_tell_more_than_the_declaration(
    tmp_path: Path, extra: Specs, config: Mapping[str, Any], form: str
) -> None:
    assert _formats(tmp_path / "a", _in_q(extra), **config) == dict.fromkeys(_in_q(extra), form)


ROTATED = "weights rotated by transform_config"
NOT_UNDERSTOOD: dict[str, tuple[dict[str, Any], str]] = {
    "a rotation": ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, ROTATED),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights (2:4 or by bitmask)"),
    "Marlin": ({"format": "marlin-24"}, "sparse weights (2:4 or by bitmask)"),
    "another format": (
        {"format": "mxfp6-pack-quantized"},
        "compressed-tensors, of which quantization_config gives format as mxfp6-pack-quantized",
    ),
    "a field": ({"codebook": 1}, "compressed-tensors, of which quantization_config has codebook"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 e5m2"),
    "fnuz": ({"quant_method": "fp8", "fmt": "float8_e4m3fnuz"}, "FP8 e4m3fnuz"),
    "experts": (
        {"quant_method": "fp8", "expert_dtype": "fp6"},
        "fp8, of which quantization_config gives expert_dtype as fp6",
    ),
    "scales": (
        {"quant_method": "fp8", "scale_fmt": "e5m3"},
        "fp8, of which quantization_config gives scale_fmt as e5m3",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", NOT_UNDERSTOOD)
def test_a_config_that_is_not_understood_refuses_numbers_and_not_copies(kind: str, tmp_path: Path) -> None:
    """Alone, and of a stack whose other layers are plain."""
    fields, name = NOT_UNDERSTOOD[kind]
    is_fp8 = fields.get("quant_method") == "fp8"
    extra = {"weight": f8(32, 32), "weight_scale_inv": f32(1, 1)} if is_fp8 else W4_PARTS
    table = {"quant_method": "compressed-tensors", **compressed(W4)} | fields
    a, b = (_model(tmp_path / each, _in_q(extra), quantization_config=table) for each in "ab")
    problems = refusals(linear(a, b))
    assert len(problems) == 2
    assert all(f"tensors are quantised as {name}, which raymerge can neither" in each for each in problems)
    assert all(f"{Q}.weight" in each for each in problems) or kind == "a rotation"
    made = good(one(a))
    assert made.method(next(iter(_in_q(extra)))) == "copy"
    assert made.config["quantization_config"] == table


def test_plain_numbers_are_no_codes_of_a_method_that_always_stores_some(tmp_path: Path) -> None:
    a, b = (_model(tmp_path / each, {}, quantization_config={"quant_method": "gptq"}) for each in "ab")
    assert all(
        "says that weights are quantised by gptq, but no tensor is: all are BF16" in problem
        for problem in refusals(linear(a, b))
    )
    # Loaders quantise by this while they load.
    c, d = (_model(tmp_path / each, {}, quantization_config={"quant_method": "torchao"}) for each in "cd")
    assert good(linear(c, d)).config["quantization_config"] == {"quant_method": "torchao"}


def test_what_a_name_alone_calls_codes_is_refused(tmp_path: Path) -> None:
    a, b = (_model(tmp_path / each, {"x.weight_packed": (DType.I64, (2, 2))}) for each in "ab")
    problems = refusals(linear(a, b))
    assert len(problems) == 2
    assert all("quantised as I64 in weight_packed," in problem for problem in problems)


def test_parents_with_the_same_names_are_looked_at_each_by_itself(tmp_path: Path) -> None:
    """One has twice the columns, under the same config."""
    wide: Specs = {"weight_packed": (DType.I32, (32, 8)), "weight_scale": (DType.BF16, (32, 2))}
    table = {"quantization_config": compressed(W4)}
    a, b = (
        _model(tmp_path / name, _in_q(parts), **table) for name, parts in {"a": W4_PARTS, "b": wide}.items()
    )
    (problem,) = refusals(linear(a, b))
    assert "1 tensors have other shapes than in" in problem
    assert f"{Q}.weight is [32, 64] here and [32, 32] there" in problem


def test_scales_without_their_codes_count_where_the_config_declares_a_quantisation(tmp_path: Path) -> None:
    extra: Specs = {f"{Q}.input_scale": (DType.F32, (1,))}
    found = _formats(tmp_path / "a", extra, quantization_config={"quant_method": "some"})
    assert found == {f"{Q}.input_scale": "some"}
    assert _formats(tmp_path / "b", extra, quantization_config={"x": 1}) == {
        f"{Q}.input_scale": "a format that has no name"
    }


def _opened(root: Path, specs: Specs, table: Mapping[str, Any]) -> Checkpoint:
    return open_checkpoint(
        header_checkpoint(root, specs, {"model_type": "llama", "quantization_config": table}), "a model"
    )


@pytest.mark.parametrize("kind", GOOD)
def test_every_layout_that_is_read_is_one_line(kind: str, tmp_path: Path) -> None:
    specs, table, (form, shape, block) = GOOD[kind]
    (group,), faults = quantised_groups(_opened(tmp_path / "a", specs, table))
    assert faults == ()
    assert (group.name, group.tensors) == (form.word, len(specs))
    assert group.nbytes == sum(dtype.nbytes(prod(size)) for dtype, size in specs.values())
    assert group.bits_per_weight == pytest.approx(group.nbytes * 8 / prod(shape), abs=1e-4)
    assert group.block is not None
    wanted = zip(group.block, block, shape[-2:], strict=True)
    assert all(said == have or (said == 0 and have == whole) for said, have, whole in wanted)
    assert group.scales in {dtype.value for dtype, _ in specs.values()}


def test_ways_of_storing_are_lines_of_their_own_and_the_largest_is_first(tmp_path: Path) -> None:
    specs: Specs = {
        "a.weight": f8(256, 256),
        "a.weight_scale_inv": f32(2, 2),
        "b.weight": f8(256, 512),
        "b.weight_scale_inv": (DType.F8_E8M0, (2, 4)),
        "c.weight": f8(512, 256),
        "c.weight_scale_inv": f32(4, 2),
        "d.weight": (DType.I8, (4, 4)),
        "d.weight_means": (DType.BF16, (4,)),
    }
    groups, _ = quantised_groups(_opened(tmp_path / "a", specs, FP8))
    assert [(each.name, each.block, each.scales, each.power_of_two, each.tensors) for each in groups] == [
        ("fp8_block", (128, 128), "F32", False, 4),
        ("fp8_block", (128, 128), "F8_E8M0", True, 2),
        ("I8 codes", None, "", False, 2),
    ]
    assert groups[-1].bits_per_weight is None


def test_what_is_amiss_is_a_note_with_its_remedy(tmp_path: Path) -> None:
    found = inspect_checkpoint(_opened(tmp_path / "a", {f"{X}.weight": f8(256, 256)}, FP8))
    (note,) = found.notes
    assert f"{X}.weight F8_E4M3[256, 256]" in note
    assert "is codes without scales: there is no" in note
    assert note.endswith("or use one that is converted to bfloat16.")
    assert [group.block for group in found.quantised] == [None]


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


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    root = tmp_path_factory.mktemp("nvfp4")
    return good({**twice(_nvfp4(root / "a"), _nvfp4(root / "b"), 1), "shard_size": 1_500_000}).plan


def test_a_matrix_is_one_row_with_two_of_scales(plan: Plan) -> None:
    rows, tensors = plan["ops"].to_pylist(), plan["tensors"].column("name").to_pylist()
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


@pytest.mark.parametrize("gate_weight", [1, 2])
def test_equal_matrices_are_copies_only_where_those_they_share_a_scale_with_are_equal(
    gate_weight: int, tmp_path: Path
) -> None:
    """Servers join gate and up: both are made with one scale, which hangs on both."""
    weights = [{"filter": "gate_proj", "value": gate_weight}, {"value": 1}]
    recipe = twice(_nvfp4(tmp_path / "a"), _nvfp4(tmp_path / "b"), 1)
    piece = recipe["slices"][0]["sources"]
    other = {"sources": [{**piece[0], "parameters": {"weight": weights}}, piece[1]]}
    made = good({**recipe, "slices": [{"sources": piece}, other]}).plan
    names = made["tensors"].column("name").to_pylist()
    up = [names.index(f"model.layers.{layer}.mlp.up_proj.weight_packed") for layer in (0, 1)]
    first, second = (row for row in made["ops"].to_pylist() if row["tensor"] in up)
    assert (second["copy_of"] >= 0) == (gate_weight == 1)
    assert first["copy_of"] == -1


def test_the_scale_takes_a_pass_more(plan: Plan) -> None:
    expressions = [each for each in plan.expressions if each.encode is not None]
    assert [expression_passes(each, (ROWS, HIDDEN)) for each in expressions] == [1]


def test_its_memory_is_that_of_tiles(plan: Plan) -> None:
    small, large = (project(plan, budget) for budget in (16 << 20, 1 << 30))
    assert small.peak <= 16 << 20 < large.peak


COLUMNS = [
    *(("ops", name) for name in ("made_with", "scales", "tensor_scale", "copy_of", "expression")),
    *(("scales", name) for name in ("encoding", "nbytes", "tensor_key", "columns")),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_a_changed_value_is_noticed(plan: Plan, table: str, column: str) -> None:
    assert check_plan(plan) == ()
    values, kind = plan[table].column(column).to_pylist(), SCHEMAS[table].field(column).type
    for row in range(0, len(values), 1 + len(values) // 5):
        for value in changes(values[row], kind)[:2]:
            assert check_plan(tampered(plan, table, column, {row: value})), (row, value)


def test_a_scale_outside_its_file_is_noticed(plan: Plan) -> None:
    for value in (-1, 2**40):
        assert check_plan(tampered(plan, "scales", "tensor_offset", {1: value}))


@pytest.mark.parametrize("column", ["scales", "tensor_scale"])
def test_scales_that_two_matrices_trade_are_noticed(plan: Plan, column: str) -> None:
    rows = plan["ops"].to_pylist()
    (one, first), (other, second) = ((i, row[column]) for i, row in enumerate(rows) if row[column] >= 0)
    traded = tampered(plan, "ops", column, {one: second, other: first})
    problems = check_plan(tampered(traded, "ops", "made_with", {second: one, first: other}))
    assert any("the scales of another matrix than its codes are" in each.what for each in problems)


def test_kinds_of_scales_that_are_traded_are_noticed(plan: Plan) -> None:
    """The scales of blocks named as the one of the matrix, and the other way about."""
    rows = plan["ops"].to_pylist()
    number, row = next((i, row) for i, row in enumerate(rows) if row["tensor_scale"] >= 0)
    traded = tampered(plan, "ops", "scales", {number: row["tensor_scale"]})
    assert check_plan(tampered(traded, "ops", "tensor_scale", {number: row["scales"]}))


def test_a_matrix_whose_codes_share_one_scale_is_not_cut(plan: Plan) -> None:
    rows = plan["ops"].to_pylist()
    number, row = next((i, row) for i, row in enumerate(rows) if row["tensor_scale"] >= 0)
    cut = tampered(plan, "ops", "num_elements", {number: row["num_elements"] // 2})
    found = Check(tampered(cut, "ops", "nbytes", {number: row["nbytes"] // 2}))
    check_ops(found)
    assert "it is a piece, and its method needs the whole tensor" in str(found.problems)


def test_a_tensor_of_several_matrices_in_one_row_is_noticed(plan: Plan) -> None:
    """As many codes, as a stack of two matrices: they would share one scale."""
    tensors = plan["tensors"].to_pylist()
    number = next(i for i, each in enumerate(tensors) if each["name"].endswith("up_proj.weight_packed"))
    changed = tampered(plan, "tensors", "shape", {number: [2, ROWS // 2, HIDDEN // 2]})
    found = Check(changed)
    check_scales(found)
    assert "it is not one matrix, or one stack, as what shares one scale must be" in str(found.problems)


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
    recipe = linear(a, b)
    for more in ({}, {"dtype": "bfloat16"}):
        problems = refusals({**recipe, **more})
        assert any("1 tensors are several matrices with one scale each" in each for each in problems)
        assert all(f"{name} [2, 6, 6]" in each for each in problems)
    assert planned(one(a)).plan.problems == ()


STACK = "model.layers.0.feed_forward.experts.down_proj"
ONLY_COPIED: dict[str, tuple[Specs, dict[str, Any] | None, str]] = {
    "NVFP4 in a stack": (
        {
            STACK: (DType.U8, (2, 16, 6)),
            f"{STACK}_weight_scale": f8(2, 2, 6),
            f"{STACK}_weight_scale_2": f32(2),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4 in stacks of experts",
    ),
    "FP8 in a stack": (
        {STACK: f8(2, 32, 6), f"{STACK}_weight_scale": f32(2)},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "FP8 in stacks of experts",
    ),
    "FP8 that the config does not allow": (
        {STACK: f8(2, 32, 6), f"{STACK}_weight_scale": f32()},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "fp8_tensor in stacks of experts by their layout, where config.json says modelopt (ModelOpt nvfp4)",
    ),
    "NVFP4 without a table": (
        {
            STACK: (DType.U8, (2, 16, 6)),
            f"{STACK}_weight_scale": f8(2, 2, 6),
            f"{STACK}_weight_scale_2": f32(),
        },
        None,
        "ModelOpt nvfp4 in stacks of experts by their layout, where config.json has no quantization_config",
    ),
    "FP8 in a stack with _scale": (
        {STACK: f8(2, 32, 6), f"{STACK}_scale": f32()},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "FP8 in stacks of experts",
    ),
    "INT8 by tensor": (
        _in_q({"weight": (DType.I8, (32, 32)), "weight_scale": f32(1)}),
        compressed({"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}),
        "INT8 with one scale for each matrix",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ONLY_COPIED)
def test_all_parts_of_codes_that_are_only_copied_are_refused_by_one_name(kind: str, tmp_path: Path) -> None:
    parts, table, title = ONLY_COPIED[kind]
    a, b = (_model(tmp_path / each, parts, quantization_config=table) for each in "ab")
    problems = refusals(linear(a, b))
    assert len(problems) == 2
    assert all(f"{len(parts)} tensors are quantised as {title}" in each for each in problems)
    made = good(one(a))
    assert {made.method(name) for name in parts} == {"copy"}


@pytest.mark.parametrize("ending", ["input_scale", "activation_scale", "act_scale"])
def test_scales_of_inputs_come_with_codes_that_are_only_copied(ending: str, tmp_path: Path) -> None:
    """They are not taken from all, as those of codes that are read are."""
    parts, table, _ = ONLY_COPIED["INT8 by tensor"]
    scaled = {**parts, f"{Q}.{ending}": f32(1)}
    a, b = (_model(tmp_path / each, scaled, quantization_config=table) for each in "ab")
    rule = {"glob": f"{Q}.weight*", "merge_method": "passthrough", "sources": [str(b)]}
    assert any(f"{Q}.{ending} F32[1]" in each for each in refusals({**linear(a, b), "methods": [rule]}))


Shapes = Mapping[str, tuple[int, ...]]


def _inspected(
    shapes: Shapes, config: Mapping[str, Any], *, dtypes: Mapping[str, DType] | None = None
) -> Inspection:
    """Of a checkpoint that exists as headers only."""
    tensors = {}
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, DType.BF16)
        plain = StoredTensor(name, dtype, shape, "model.safetensors", 0, 0)
        tensors[name] = plain._replace(nbytes=dtype.nbytes(plain.num_elements))
    file = WeightFile("model.safetensors", sum(t.nbytes for t in tensors.values()), "0", "0")
    made = Checkpoint("model", "model", tensors, (file,), config, ("tokenizer.json",), ("a note",))
    return inspect_checkpoint(made)


def _moe() -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in llama(2).names.items() if ".mlp." not in name}


def test_every_tensor_and_byte_is_in_one_role_and_one_dtype() -> None:
    family = llama()
    found = _inspected(family.names, family.config, dtypes={"model.norm.weight": DType.F32})
    for groups in (found.roles, found.dtypes):
        assert sum(group.tensors for group in groups) == found.tensors
        assert sum(group.nbytes for group in groups) == found.nbytes
    assert [group.name for group in found.dtypes] == ["BF16", "F32"]


@pytest.mark.parametrize("declared", [True, False, None])
@pytest.mark.parametrize("stored", [True, False])
def test_a_tie_is_told_as_declared_and_as_stored(declared: bool | None, stored: bool) -> None:
    family = llama()
    names = {name: shape for name, shape in family.names.items() if stored or name != "lm_head.weight"}
    config = family.config | ({} if declared is None else {"tie_word_embeddings": declared})
    tie = _inspected(names, config).tie
    assert tie is not None
    assert (tie.head, tie.embedding) == ("lm_head.weight", "model.embed_tokens.weight")
    assert (tie.declared, tie.stored) == (declared, stored)


def test_layers_with_unequal_numbers_of_experts_are_told() -> None:
    names = _moe()
    for layer, count in enumerate((4, 3)):
        block = f"model.layers.{layer}.mlp"
        names[f"{block}.gate.weight"] = (4, 8)
        for expert in range(count):
            names |= {f"{block}.experts.{expert}.{p}_proj.weight": (6, 8) for p in ("gate", "up")}
            names[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    found = _inspected(names, {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8})
    assert found.experts[0].num_experts == (3, 4)


def test_fused_experts_are_told_by_their_kind() -> None:
    names = _moe()
    for layer in range(2):
        names[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (4, 12, 8)
        names[f"model.layers.{layer}.mlp.experts.down_proj"] = (4, 8, 6)
    config = {"model_type": "someone", "num_hidden_layers": 2, "hidden_size": 8, "moe_intermediate_size": 6}
    (layout,) = _inspected(names, config).experts
    assert (layout.kind, layout.num_experts, layout.layers) == ("out_in", (4,), 2)


def test_fused_experts_that_cannot_be_told_are_unknown() -> None:
    names = _moe() | {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8)}
    (layout,) = _inspected(names, {"model_type": "someone", "num_hidden_layers": 2}).experts
    assert layout.kind == "unknown"


def test_codes_of_fused_experts_are_not_taken_for_matrices() -> None:
    block = "model.layers.0.mlp.experts.gate_up_proj"
    names = _moe() | {f"{block}_blocks": (4, 12, 1, 16), f"{block}_scales": (4, 12, 1)}
    codes = {f"{block}_blocks": DType.U8, f"{block}_scales": DType.U8}
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    found = _inspected(names, config, dtypes=codes)
    assert [(layout.kind, layout.num_experts) for layout in found.experts] == [
        ("codes of fused experts", (4,))
    ]
    (group,) = found.quantised
    assert (group.name, group.block, group.scales, group.tensors) == ("mxfp4", (1, 32), "U8", 2)
    assert group.bits_per_weight == 4.25
    assert found.declared_quantisation == "mxfp4"


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
        ({"quantization_config": {"bits": 4}}, "of unnamed kind"),
        ({"quantization_config": {}}, None),
        ({"quantization_config": None}, None),
    ],
)
def test_a_declared_quantisation_is_named(config: dict[str, Any], declared: str | None) -> None:
    family = llama()
    assert _inspected(family.names, family.config | config).declared_quantisation == declared
