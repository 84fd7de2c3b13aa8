"""Stacks of matrices whose rows blocks of scales do not divide, and what block FP8 is refused for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.plan_damage import tampered
from kits.plan_maker import Specs, good, header_checkpoint, refusals

from raymerge.checkpoints.quantisation.encoding import usual_quant_spec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.check import check_plan

HEADS, EXPERTS = "model.layers.0.self_attn.heads.weight", "model.layers.0.mlp.experts"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CONFIG = {
    "model_type": "mystery_moe",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_experts": 4,
    "moe_intermediate_size": 96,
    "tie_word_embeddings": False,
}
IN_OUT = {f"{EXPERTS}.gate_up_proj": (4, 256, 192), f"{EXPERTS}.down_proj": (4, 96, 256)}
OUT_IN = {name: (experts, rows, columns) for name, (experts, columns, rows) in IN_OUT.items()}


def _model(root: Path, shapes: Mapping[str, tuple[int, ...]], *, coded: bool = False, **more: Any) -> Path:
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.norm.weight": (DType.BF16, (256,)),
        "model.layers.0.mlp.gate.weight": (DType.BF16, (4, 256)),
    }
    for name, shape in shapes.items():
        specs |= _coded(name, shape) if coded else {name: (DType.BF16, shape)}
    table = {"quantization_config": FP8} if coded else {}
    return header_checkpoint(root, specs, {**CONFIG, **table, **more})


def _coded(name: str, shape: tuple[int, ...]) -> Specs:
    scales = usual_quant_spec(FP8_BLOCK, shape).scales_shape
    return {name: (DType.F8_E4M3, shape), f"{name}_scale_inv": (DType.F32, scales)}


def _linear(*roots: Path, **more: Any) -> dict[str, Any]:
    parameters = {"weight": 1}
    return {
        "merge_method": "linear",
        "models": [{"model": each} for each in roots],
        "parameters": parameters,
        **more,
    }


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16"}], ids=["same", "bf16"])
@pytest.mark.parametrize("name", [HEADS, f"{EXPERTS}.weird"])
@pytest.mark.parametrize("shape", [(4, 200, 256), (2, 255, 256)], ids=["fewer bands", "as many bands"])
def test_a_stack_that_is_one_tensor_needs_rows_that_bands_divide(
    shape: tuple[int, ...], name: str, more: Mapping[str, Any], tmp_path: Path
) -> None:
    """Bands counted through the stack would be others than those of its matrices."""
    roots = [_model(tmp_path / each, {name: shape}, coded=True) for each in "ab"]
    said = refusals(_linear(*roots, **more))
    wanted = f"1 tensors are several matrices with 2 rows of scales for {shape[1]} rows each"
    assert said
    assert all(wanted in each and f"{name} {list(shape)}" in each for each in said)
    passed = good({"merge_method": "passthrough", "models": [{"model": roots[0]}]})
    assert {each.method for each in passed.plan.expressions} == {"copy"}


def test_numbers_are_not_made_codes_of_such_a_stack(tmp_path: Path) -> None:
    """The base alone is stored so, and is not read."""
    base, plain = (_model(tmp_path / each, {HEADS: (4, 200, 256)}, coded=each == "a") for each in "ab")
    recipe = {"merge_method": "passthrough", "base_model": base, "models": [{"model": plain}]}
    (said,) = refusals(recipe)
    assert "1 tensors are several matrices with 2 rows of scales for 200 rows each" in said


def test_bands_through_several_matrices_contradict_a_plan(tmp_path: Path) -> None:
    roots = [_model(tmp_path / each, {HEADS: (4, 256, 256)}, coded=True) for each in "ab"]
    made = good(_linear(*roots))
    (row, *_) = made.rows(HEADS)
    changed = tampered(made.plan, "parts", "shape", {row["first_part"]: [8, 128, 256]})
    assert check_plan(changed) == ()
    # As many elements and bands, of which most begin in one matrix and end in the next.
    changed = tampered(made.plan, "parts", "shape", {row["first_part"]: [16, 64, 256]})
    assert [_broken(each) for each in check_plan(changed)] == ["inputs"]


def test_codes_that_are_made_through_several_matrices_contradict_a_plan(tmp_path: Path) -> None:
    made = good(_linear(_model(tmp_path / "a", OUT_IN, model_type="qwen3_moe"), out_format="fp8_block"))
    parts = [row["first_part"] for row in made.rows(f"{EXPERTS}.down_proj")]
    changed = tampered(made.plan, "parts", "shape", {part: [8, 128, 96] for part in parts})
    assert check_plan(changed) == ()
    changed = tampered(made.plan, "parts", "shape", {part: [16, 64, 96] for part in parts})
    assert {_broken(each) for each in check_plan(changed)} == {"rows"}


def _broken(problem: Problem) -> str:
    """The table in which bands go through several matrices."""
    assert "its bands are not those of its matrices" in problem.what
    return problem.where.split("table ")[1].split(",")[0]


@pytest.mark.parametrize("rows", [1, 100, 128, 200, 255, 256, 384])
def test_runs_whose_bands_can_be_counted_are_told(rows: int) -> None:
    """Against the rows of scales that each row of the run has."""
    packing = usual_quant_spec(FP8_BLOCK, (3, rows, 8))
    for start, count in ((0, 1), (0, 2), (1, 2), (0, 3), (2, 1)):
        own = [matrix * packing.grid[0] + row // 128 for matrix in range(count) for row in range(rows)]
        as_one = (np.arange(count * rows) // 128).tolist()
        assert packing.has_bands_of(start * rows * 8, count * rows * 8) == (own == as_one)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (HEADS, (4, 200, 256)),
        (HEADS, (4, 256, 256)),
        (f"{EXPERTS}.weird", (4, 200, 256)),
        (f"{EXPERTS}.gate_up_proj_bias", (4, 192)),
        ("model.layers.0.self_attn.rel_bias", (4, 64)),
    ],
)
def test_what_is_no_weight_of_a_module_is_no_block_fp8(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    root = _model(tmp_path / "a", {name: shape})
    (said,) = refusals(_linear(root, out_format=[{"glob": name, "value": "fp8_block"}]))
    kind = "weights of modules in it and stacks of experts, and nothing else"
    taken = "experts in it that lie [experts, out, in]" if name.endswith(".weird") else f"the {kind}"
    assert f"loaders take {taken}" in said
    assert f"{{glob: '{name}', value: bf16}}" in said


def test_experts_that_lie_transposed_are_no_block_fp8(tmp_path: Path) -> None:
    for family in ("llama4_text", "gpt_oss", "qwen3_vl_moe"):
        root = _model(tmp_path / family, IN_OUT, model_type=family)
        (said,) = refusals(_linear(root, out_format=[{"role": "expert", "value": "fp8_block"}, "same"]))
        assert "2 tensors cannot be stored as fp8_block" in said
        assert "loaders take experts in it that lie [experts, out, in], and these do not" in said
    square = {f"{EXPERTS}.gate_up_proj": (4, 192, 192)}
    (said,) = refusals(_linear(_model(tmp_path / "square", square, hidden_size=192), out_format="fp8_block"))
    assert "[experts, out, in], and config and family do not tell that these do" in said


@pytest.mark.parametrize("asked", ["fp8_block", [{"role": "expert", "value": "fp8_block"}, "same"]])
def test_experts_with_a_row_for_each_output_are_encoded_and_their_biases_are_not(
    asked: object, tmp_path: Path
) -> None:
    bias = f"{EXPERTS}.gate_up_proj_bias"
    root = _model(tmp_path / "a", {**OUT_IN, bias: (4, 192)}, model_type="qwen3_moe")
    made = good(_linear(root, out_format=asked))
    scales = {name for name in made.names() if name.endswith("_scale_inv")}
    assert scales == {f"{name}_scale_inv" for name in OUT_IN}


def test_stored_transposed_experts_stay_as_they_are(tmp_path: Path) -> None:
    """Who stored them so has a loader for them."""
    roots = [_model(tmp_path / each, IN_OUT, coded=True, model_type="qwen3_vl_moe") for each in "ab"]
    made = good(_linear(*roots, out_format="fp8_block"))
    assert {f"{name}_scale_inv" for name in IN_OUT} < set(made.names())
