"""The config that a plan writes for layers of models that describe their layers differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, llama_shapes
from kits.plan_maker import Specs, good, header_checkpoint, llama, refusals

from raymerge.dtypes import DType


def _piece(model: Path, start: int, stop: int) -> dict[str, Any]:
    return {"sources": [{"model": model, "layer_range": [start, stop]}]}


def _stack(*pieces: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"merge_method": "passthrough", "slices": list(pieces), **more}


def _moe(root: Path, dense: list[int], *, layers: int = 3) -> Path:
    """A Qwen3 mixture of experts whose listed layers are dense."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.BF16, (16, 8)),
        "model.norm.weight": (DType.BF16, (8,)),
    }
    for layer in range(layers):
        block = f"model.layers.{layer}.mlp"
        specs[f"model.layers.{layer}.input_layernorm.weight"] = (DType.BF16, (8,))
        paths = [block] if layer in dense else [f"{block}.experts.{expert}" for expert in range(2)]
        for path in paths:
            specs |= {f"{path}.{each}_proj.weight": (DType.BF16, (8, 8)) for each in ("gate", "up", "down")}
        if layer not in dense:
            specs[f"{block}.gate.weight"] = (DType.BF16, (2, 8))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "moe_intermediate_size": 8,
        "num_experts": 2,
        "num_hidden_layers": layers,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "tie_word_embeddings": True,
        "vocab_size": 16,
    }
    return header_checkpoint(root, specs, config)


def _stored_dense(names: list[str]) -> list[int]:
    return [int(name.split(".")[2]) for name in names if name.endswith(".mlp.up_proj.weight")]


def test_lists_of_dense_layers_agree_with_what_is_stored(tmp_path: Path) -> None:
    a, b = _moe(tmp_path / "a", [0]), _moe(tmp_path / "b", [0, 1], layers=4)
    for pieces in ([(a, 0, 1), (b, 1, 3)], [(b, 0, 4), (a, 0, 3)], [(b, 2, 4), (a, 0, 1), (b, 0, 2)]):
        made = good(_stack(*(_piece(*each) for each in pieces)))
        assert made.config["mlp_only_layers"] == _stored_dense(made.names())


def test_what_no_config_can_say_names_both_models_and_the_field(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a", 4, moe_layer_interval=2), llama(tmp_path / "b", 4)
    (problem,) = refusals(_stack(_piece(a, 0, 2), _piece(b, 2, 4)))
    for words in ("moe_layer_interval is 2", str(b), "slices", "models whose configs agree"):
        assert words in problem


def _fp8(root: Path, said: dict[str, Any]) -> Path:
    """A Llama of two layers, in the second of which one matrix is block FP8."""
    config = llama_config(layers=2)
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        name: (DType.BF16, shape) for name, shape in llama_shapes(config).items()
    }
    name = "model.layers.1.self_attn.q_proj.weight"
    specs |= {name: (DType.F8_E4M3, specs[name][1]), f"{name}_scale_inv": (DType.F32, (1, 1))}
    table = {"quant_method": "fp8", "weight_block_size": [128, 128], **said}
    return header_checkpoint(root, specs, {**config, "quantization_config": table})


def test_names_in_what_is_said_of_quantisation_are_renumbered(tmp_path: Path) -> None:
    name = "model.layers.{}.self_attn.q_proj"
    said = {"modules_to_not_convert": [name.format(0), "lm_head"]}
    a = _fp8(tmp_path / "a", said)
    made = good(_stack(_piece(a, 1, 2), _piece(a, 0, 1), _piece(a, 0, 1)))
    kept = made.config["quantization_config"]["modules_to_not_convert"]
    assert kept == [name.format(1), name.format(2), "lm_head"]
    pattern = _fp8(tmp_path / "p", {**said, "ignore": ["re:.*layers.0.*"]})
    fresh = good(_stack(_piece(pattern, 1, 2), _piece(pattern, 0, 1))).config["quantization_config"]
    assert "ignore" not in fresh
    assert name.format(1) in fresh["modules_to_not_convert"]
    assert name.format(0) not in fresh["modules_to_not_convert"]


def test_patterns_of_layers_are_refused_where_no_other_table_can_be_written(tmp_path: Path) -> None:
    model = _fp8(tmp_path / "a", {"quant_method": "gptq", "ignore": ["re:.*layers.0.*"]})
    said = refusals(_stack(_piece(model, 1, 2), _piece(model, 0, 1)))
    assert len(said) == 2
    assert "re:.*layers.0.*" in said[0]
    assert "2 tensors would be copied as block FP8 (such as model.layers.0.self_attn.q_proj.weight" in said[1]


def _predicting(root: Path, predicts: int, *, declared: int | None = None, apart: bool = False) -> Path:
    """A Llama of two layers, and layers that predict further tokens."""
    config = llama_config(layers=2)
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        name: (DType.BF16, shape) for name, shape in llama_shapes(config).items()
    }
    for number in range(predicts):
        block = f"mtp.layers.{number}" if apart else f"model.layers.{2 + number}"
        specs[f"{block}.enorm.weight"] = (DType.BF16, (32,))
        specs[f"{block}.eh_proj.weight"] = (DType.BF16, (32, 64))
    number = predicts if declared is None else declared
    return header_checkpoint(root, specs, {**config, "num_nextn_predict_layers": number})


@pytest.mark.parametrize("apart", [True, False])
def test_prediction_layers_are_counted_as_they_are_written(apart: bool, tmp_path: Path) -> None:
    one, none = _predicting(tmp_path / "one", 1, apart=apart), _predicting(tmp_path / "none", 0)
    for pieces, count in (([(none, 0, 2), (one, 0, 2)], 1), ([(one, 0, 2), (none, 0, 2)], 0)):
        made = good(_stack(*(_piece(*each) for each in pieces)))
        assert any("enorm" in name for name in made.names()) == bool(count)
        assert made.config["num_nextn_predict_layers"] == count


def test_a_donor_without_a_number_of_prediction_layers_gets_one(tmp_path: Path) -> None:
    base, one = llama(tmp_path / "base", 2), _predicting(tmp_path / "one", 1)
    made = good(_stack(_piece(one, 0, 2), _piece(one, 1, 2), base_model=base))
    assert made.config["num_nextn_predict_layers"] == 1


def test_a_number_that_was_published_wrong_is_left_alone(tmp_path: Path) -> None:
    a = _predicting(tmp_path / "a", 0, declared=1)
    assert good(_stack(_piece(a, 0, 2), _piece(a, 1, 2))).config["num_nextn_predict_layers"] == 1
    models = {"merge_method": "passthrough", "models": [{"model": a}]}
    assert good(models).config["num_nextn_predict_layers"] == 1


TEXT = {"num_hidden_layers": 2, "tie_word_embeddings": True, "hidden_size": 4}


def _multimodal(root: Path, **text: Any) -> Path:
    specs: Specs = {
        "model.language_model.embed_tokens.weight": (DType.BF16, (8, 4)),
        **{f"model.language_model.layers.{n}.w.weight": (DType.BF16, (4, 4)) for n in range(2)},
        **{f"model.visual.blocks.{n}.w.weight": (DType.BF16, (4, 4)) for n in range(2)},
    }
    config = {"model_type": "any_vl", "architectures": ["Any"], "text_config": {**TEXT, **text}}
    return header_checkpoint(root, specs, {**config, "vision_config": {"depth": 2}})


def test_a_module_taken_whole_from_another_model_brings_what_its_config_says(tmp_path: Path) -> None:
    a, b = (
        _multimodal(tmp_path / "a", layer_types=["x", "y"]),
        _multimodal(tmp_path / "b", layer_types=["y", "y"]),
    )
    modules = {"vision_tower": {"models": [{"model": a}]}, "text_decoder": {"models": [{"model": b}]}}
    made = good({"merge_method": "passthrough", "modules": modules})
    assert made.config["text_config"] == {**TEXT, "layer_types": ["y", "y"]}
