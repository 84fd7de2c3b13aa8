"""Headers and config that do not fit each other are found; designs that look odd are not taken for damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import (
    V3_CONFIG,
    deepseek_v3_specs,
    llama_config,
    llama_shapes,
    sparse_checkpoint,
    tiny_llama,
)
from kits.plan_maker import good, header_checkpoint, refusals

from raymerge.dtypes import DType
from raymerge.merge_plan.plan import Plan
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.merges import build_plan
from raymerge.recipes import Recipe, recipe_from_mapping
from raymerge.verifier.structure import verify_structure

Shapes = dict[str, tuple[int, ...]]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def said(
    root: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, dtype: DType = DType.BF16
) -> list[str]:
    """What verify says of a checkpoint of these shapes."""
    specs = {name: (dtype, shape) for name, shape in shapes.items()}
    verdict = verify_structure(header_checkpoint(root / "model", specs, config))
    return [str(problem) for problem in verdict.problems]


def llama(layers: int = 4, **config: Any) -> tuple[Shapes, dict[str, Any]]:
    made = llama_config(layers=layers)
    return llama_shapes(made), {**made, **config}


def only(problems: list[str]) -> str:
    (problem,) = problems
    return problem


# Values


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": None}, "hidden_size is null; expected a whole number of at least 1"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a whole number of at least 1"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5; expected a whole number of at least 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is null; expected"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true; expected"),
        ({"vocab_size": -1}, "vocab_size is -1; expected a whole number of at least 0"),
        ({"vocab_size": "96"}, 'vocab_size is "96"; expected'),
        ({"num_experts_per_tok": [2, -2]}, "num_experts_per_tok is [2, -2]; expected"),
        ({"text_config": {"num_attention_heads": 2.5}}, "text_config.num_attention_heads is 2.5; expected"),
        ({"ffn_config": {"moe_num_experts": "8"}}, 'ffn_config.moe_num_experts is "8"; expected'),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    shapes, config = llama(**fields)
    assert any(words in problem for problem in said(tmp_path, shapes, config))
    root = tmp_path / "model"
    (problem,) = refusals({"merge_method": "passthrough", "models": [{"model": root}]})
    assert f"{root}/config.json: {words}" in problem
    assert "Correct it, or take config.json from the place the weights come from." in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": None, "num_experts": None},
        {"num_key_value_heads": [2, 2, 2, 2], "num_experts": 0},
        {"text_config": llama_config(layers=4), "hidden_size": None, "num_hidden_layers": None},
    ],
)
def test_values_that_stand_for_a_default(fields: dict[str, Any], tmp_path: Path) -> None:
    shapes, config = llama(**fields)
    assert said(tmp_path, shapes, config) == []


# Sizes


def test_a_hidden_size_that_is_not_the_embeddings_width(tmp_path: Path) -> None:
    shapes, config = llama(hidden_size=64)
    assert "the hidden size is 64, but model.embed_tokens.weight is 32 wide" in only(
        said(tmp_path, shapes, config)
    )


@pytest.mark.parametrize("field", ["embedding_size", "word_embed_proj_dim", "emb_dim"])
def test_an_embedding_of_a_width_of_its_own(field: str, tmp_path: Path) -> None:
    shapes, config = llama(hidden_size=64, **{field: 32})
    assert said(tmp_path, shapes, config) == []


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_too_few_rows_for_the_vocabulary(name: str, tmp_path: Path) -> None:
    shapes, config = llama()
    shapes[name] = (63, 32)
    assert f"vocab_size is 64, but {name} has 63 rows" in only(said(tmp_path, shapes, config))
    assert said(tmp_path / "drafts", shapes, {**config, "draft_vocab_size": 63}) == []


# Layers


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.mtp.embed_tokens.weight", (60, 32)),
        ("mtp_layers.0.shared_head.head.weight", (60, 32)),
        ("encoder.embed_tokens.weight", (60, 32)),
        ("lm_head.bias", (60,)),
    ],
)
def test_too_few_rows_of_a_tensor_beside_the_pair(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    shapes, config = llama()
    problem = only(said(tmp_path / "short", {**shapes, name: shape}, config))
    assert f"vocab_size is 64, but {name} has 60 rows" in problem
    assert said(tmp_path / "whole", {**shapes, name: (64, *shape[1:])}, config) == []
    # A vocabulary of its own has a field of its own, wherever that stands.
    assert said(tmp_path / "own", {**shapes, name: shape}, {**config, "audio": {"vocab_size": 60}}) == []


@pytest.mark.parametrize(
    "name", ["visual.embed_tokens.weight", "encoder.embed_positions.weight", "wpe.weight"]
)
def test_what_counts_no_tokens_is_left_alone(name: str, tmp_path: Path) -> None:
    shapes, config = llama()
    assert said(tmp_path, {**shapes, name: (60, 32)}, config) == []


def test_an_absent_layer(tmp_path: Path) -> None:
    shapes, config = llama()
    rest = {name: shape for name, shape in shapes.items() if ".layers.1." not in name}
    assert "no tensors of model.layers are in layers 1." in only(said(tmp_path, rest, config))
    blocks = [{"no_op": layer == 1} for layer in range(4)]
    assert said(tmp_path / "blocks", rest, {**config, "block_configs": blocks}) == []


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    shapes = {"model.layers.999999999.a.weight": (1,)}
    config = {"architectures": ["A"], "model_type": "a", "num_hidden_layers": 1_000_000_000}
    assert "counts 1000000000 layers, but only 1 tensors" in only(said(tmp_path, shapes, config))


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("suffix", ["mlp.up_proj.weight", "self_attn.q_proj.weight"])
def test_a_layer_with_a_hole(layer: int, suffix: str, tmp_path: Path) -> None:
    shapes, config = llama()
    del shapes[f"model.layers.{layer}.{suffix}"]
    assert f"model.layers.{layer} lacks {suffix}, which the other layers have" in only(
        said(tmp_path, shapes, config)
    )


def test_an_incomplete_base_is_neither_copied_nor_merged(tmp_path: Path) -> None:
    shapes, config = llama(5)
    name = "mlp.down_proj.weight"
    rest = {each: shape for each, shape in shapes.items() if each != f"model.layers.2.{name}"}
    whole, base, other = (
        header_checkpoint(tmp_path / each, {n: (DType.BF16, s) for n, s in own.items()}, config)
        for each, own in (("whole", shapes), ("base", rest), ("other", rest))
    )
    linear = {"merge_method": "linear", "base_model": base, "parameters": {"weight": 1}}
    recipes: list[dict[str, Any]] = [
        {"merge_method": "passthrough", "models": [{"model": base}]},
        {**linear, "models": [{"model": base}, {"model": other}]},
        {**linear, "models": [{"model": base}, {"model": whole}], "extra_tensors": "drop"},
    ]
    for recipe in recipes:
        assert f"model.layers.2 lacks {name}, which the other layers have" in only(refusals(recipe))


def _zaya(shapes: Shapes) -> None:
    """No scale of earlier router states in the first layer."""
    shapes |= {f"model.layers.{n}.mlp.gate.states_scale": (32,) for n in range(1, 4)}


def _zaya_as_published(shapes: Shapes) -> None:
    """Experts in every other layer, the first of which has no scale of earlier router states."""
    for layer in range(1, 8, 2):
        for name in [each for each in shapes if f".layers.{layer}.self_attn." in each]:
            del shapes[name]
        shapes[f"model.layers.{layer}.router.weight"] = (4, 32)
        if layer > 1:
            shapes[f"model.layers.{layer}.router_states_scale"] = (32,)


def _rwkv_7(shapes: Shapes) -> None:
    """Nothing that mixes in the first layer's values in the first layer."""
    for layer in range(1, 4):
        module = f"model.layers.{layer}.self_attn.v_lora.lora"
        shapes |= {f"{module}.0.weight": (4, 32), f"{module}.2.weight": (32, 4), f"{module}.2.bias": (32,)}


@pytest.mark.parametrize(("design", "layers"), [(_zaya, 4), (_zaya_as_published, 8), (_rwkv_7, 4)])
def test_what_a_design_leaves_out_of_a_layer_is_no_hole(
    design: Callable[[Shapes], None], layers: int, tmp_path: Path
) -> None:
    shapes, config = llama(layers)
    design(shapes)
    a, b = (
        header_checkpoint(tmp_path / each, {n: (DType.BF16, s) for n, s in shapes.items()}, config)
        for each in "ab"
    )
    both = [{"model": a}, {"model": b}]
    good({"merge_method": "passthrough", "models": [{"model": a}]})
    good({"merge_method": "linear", "models": both, "parameters": {"weight": 1}})
    assert verify_structure(a).problems == ()
    # Such a design does not hide damage.
    del shapes["model.layers.2.mlp.up_proj.weight"]
    assert "model.layers.2 lacks mlp.up_proj.weight" in only(said(tmp_path / "holed", shapes, config))


@pytest.mark.parametrize("module", ["self_attn", "mlp"])
def test_a_last_layer_without_its_last_tensors(module: str, tmp_path: Path) -> None:
    shapes, config = llama()
    rest = {name: shape for name, shape in shapes.items() if f".layers.3.{module}." not in name}
    assert f"model.layers.3 lacks {module}." in only(said(tmp_path, rest, config))


_UP = "2.mlp.up_proj.weight"

DESIGNS: Mapping[str, tuple[str, Shapes, dict[str, Any]]] = {
    "ModernBERT's first layer": ("0.input_layernorm.weight", {}, {}),
    "a kind that occurs once": (_UP, {}, {"layer_types": ["a", "a", "b", "a"]}),
    "listed by number": (_UP, {}, {"table": {"special_layers": [3]}}),
    "in a string": (_UP, {}, {"hybrid_override_pattern": "MM*M"}),
    "by period": ("", {"3.mlp.up_proj.weight": (5, 32)}, {"moe_layer_interval": 4}),
    "T5's first layer": ("", {"0.self_attn.relative_bias.weight": (4, 4)}, {}),
    "shared keys": ("3.self_attn.k_proj.weight", {}, {"num_kv_shared_layers": 1}),
    "a buffer in some": ("", {f"{n}.self_attn.rotary_emb.inv_freq": (4,) for n in (0, 1)}, {}),
    "OpenELM's sizes by layer": (
        "",
        {f"{n}.mlp.up_proj.weight": (64 + n, 32) for n in range(4)},
        {"ffn_sizes": [64, 65, 66, 67]},
    ),
}
"""What layers lack and have besides, and what the config says of it."""


@pytest.mark.parametrize("design", DESIGNS)
def test_odd_designs_are_sound(design: str, tmp_path: Path) -> None:
    shapes, config = llama()
    lacking, more, fields = DESIGNS[design]
    if lacking:
        del shapes[f"model.layers.{lacking}"]
    shapes |= {f"model.layers.{name}": shape for name, shape in more.items()}
    assert said(tmp_path, shapes, {**config, **fields}) == []


@pytest.mark.parametrize("kinds", [["a", "a", "a", "a"], ["b", "a", "a", "a"]])
def test_kinds_that_are_told_apart_do_not_hide_a_hole_within_one(kinds: list[str], tmp_path: Path) -> None:
    shapes, config = llama(layer_types=kinds)
    del shapes["model.layers.2.mlp.up_proj.weight"]
    assert "model.layers.2 lacks mlp.up_proj.weight" in only(said(tmp_path, shapes, config))


def test_layers_of_other_shapes(tmp_path: Path) -> None:
    shapes, config = llama(2)
    wide = llama_shapes(llama_config(layers=2, hidden=64))
    shapes |= {name: shape for name, shape in wide.items() if ".layers.1." in name}
    problem = only(said(tmp_path, shapes, config))
    assert "model.layers.1." in problem
    assert "and 8 more tensors alike" in problem


def test_packed_tensors_may_differ_by_layer(tmp_path: Path) -> None:
    shapes, config = llama()
    specs = {name: (DType.BF16, shape) for name, shape in shapes.items()}
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.up_proj"
        del specs[f"{name}.weight"]
        specs |= {
            f"{name}.qweight": (DType.I32, (8 + layer, 32)),
            f"{name}.scales": (DType.F16, (layer + 1, 32)),
        }
    config["quantization_config"] = {"quant_method": "gptq"}
    assert verify_structure(header_checkpoint(tmp_path / "m", specs, config)).problems == ()


def test_a_layer_that_is_not_quantised_is_no_hole(tmp_path: Path) -> None:
    shapes, config = llama(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    specs = {name: (DType.BF16, shape) for name, shape in shapes.items()}
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        specs |= {name: (DType.F8_E4M3, shapes[name]), f"{name}_scale_inv": (DType.F32, (1, 1))}
    assert verify_structure(header_checkpoint(tmp_path / "whole", specs, config)).problems == ()
    for ending in ("", "_scale_inv"):
        del specs[f"model.layers.1.mlp.up_proj.weight{ending}"]
    verdict = verify_structure(header_checkpoint(tmp_path / "hole", specs, config))
    assert "model.layers.1 lacks mlp.up_proj.weight" in only([str(each) for each in verdict.problems])


# Experts


def moe(
    *, experts: int = 4, rows: int = 4, fused: bool = False, layers: int = 3
) -> tuple[Shapes, dict[str, Any]]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "moe_intermediate_size": 6,
        "num_experts": 4,
        "num_hidden_layers": layers,
        "tie_word_embeddings": True,
        "vocab_size": 16,
    }
    shapes: Shapes = {EMBEDDING: (16, 8), "model.norm.weight": (8,)}
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp"
        shapes[f"{block}.gate.weight"] = (rows, 8)
        if fused:
            shapes |= {
                f"{block}.experts.gate_up_proj": (experts, 12, 8),
                f"{block}.experts.down_proj": (experts, 8, 6),
            }
            continue
        for expert in range(experts):
            shapes |= {f"{block}.experts.{expert}.{each}_proj.weight": (6, 8) for each in ("gate", "up")}
            shapes[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    return shapes, config


@pytest.mark.parametrize("fused", [True, False])
def test_experts_against_their_number(fused: bool, tmp_path: Path) -> None:
    assert said(tmp_path / "good", *moe(fused=fused)) == []
    problem = only(said(tmp_path / "bad", *moe(fused=fused, experts=3)))
    assert "counts 4 experts, but in layers 0, 1, 2 of model.layers 3 are stored" in problem


def test_router_rows_against_the_number_of_experts(tmp_path: Path) -> None:
    shapes, config = moe(rows=5)
    problem = only(said(tmp_path / "bad", shapes, config))
    assert "counts 4 experts, but in layers 0, 1, 2 of model.layers mlp.gate.weight has 5 rows" in problem
    assert said(tmp_path / "zero", shapes, {**config, "zero_expert_num": 1}) == []


def test_routers_of_several_matrices_are_left_alone(tmp_path: Path) -> None:
    shapes, config = moe()
    shapes |= {f"model.layers.{layer}.mlp.router.down_proj.weight": (5, 8) for layer in range(3)}
    assert said(tmp_path, shapes, config) == []


def test_an_absent_expert_of_one_layer(tmp_path: Path) -> None:
    shapes, config = moe()
    shapes = {name: shape for name, shape in shapes.items() if "layers.1.mlp.experts.2." not in name}
    problems = "\n".join(said(tmp_path, shapes, config))
    assert "in layers 1 of model.layers 3 are stored" in problems
    assert "model.layers.1 lacks mlp.experts.2.down_proj.weight" in problems


# Multi-token prediction


@pytest.mark.parametrize("declared", [0, 2])
def test_prediction_layers_against_their_number(declared: int, tmp_path: Path) -> None:
    shapes, config = llama(num_nextn_predict_layers=1)
    shapes |= {"model.layers.4.enorm.weight": (32,), "model.layers.4.eh_proj.weight": (32, 64)}
    assert said(tmp_path / "good", shapes, config) == []
    problem = only(said(tmp_path / "bad", shapes, {**config, "num_nextn_predict_layers": declared}))
    assert (
        f"num_nextn_predict_layers is {declared}, but 1 multi-token-prediction layers are stored" in problem
    )


def test_prediction_layers_that_were_left_out_by_who_published_are_no_damage(tmp_path: Path) -> None:
    assert said(tmp_path, *llama(num_nextn_predict_layers=1)) == []


def test_deepseek_v3_is_sound(tmp_path: Path) -> None:
    root = sparse_checkpoint(tmp_path / "v3", [[s for f in deepseek_v3_specs() for s in f]], V3_CONFIG)
    assert verify_structure(root).problems == ()


def test_a_donor_that_names_another_dtype_than_it_has_is_put_right(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "a", 1, dtype=torch.bfloat16)
    config = json.loads((model / "config.json").read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    (model / "config.json").write_text(json.dumps({**config, key: "float32"}))
    plan = _planned(model)
    assert plan.problems == ()
    assert plan.manifest["config"][key] == "bfloat16"


def _planned(model: Path) -> Plan:
    recipe = recipe_from_mapping({"merge_method": "passthrough", "models": [{"model": str(model)}]})
    assert isinstance(recipe, Recipe)
    return build_plan(recipe, open_sources(recipe), version="0")
