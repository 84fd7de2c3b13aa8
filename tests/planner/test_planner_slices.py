"""Stacked layers: names, numbers, ends of the model, what the config says of them, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kits.checkpoint_maker import llama_config, llama_shapes
from kits.plan_maker import Specs, good, header_checkpoint, llama, llama_specs, refusals
from kits.recipe_maker import linear, piece, stack

from raymerge.dtypes import DType

Q = "model.layers.{}.self_attn.q_proj.weight"


def test_layers_are_numbered_in_slice_order(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a", 4), llama(tmp_path / "b", 4)
    made = good(stack(piece(a, 0, 3), piece(b, 1, 4), piece(a, 3, 4)))
    sources = [made.reads(Q.format(layer)) for layer in range(7)]
    expected = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (0, 3)]
    assert sources == [[(source, Q.format(layer))] for source, layer in expected]
    assert made.config["num_hidden_layers"] == 7
    assert all(made.method(name) == "copy" for name in made.names())


def test_the_ends_come_from_the_first_and_the_last_slice_and_the_rest_is_dropped(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b")
    made = good(stack(piece(a, 0, 2), piece(b, 1, 3)))
    assert made.reads("model.embed_tokens.weight") == [(0, "model.embed_tokens.weight")]
    assert made.reads("model.norm.weight") == [(1, "model.norm.weight")]
    assert made.reads("lm_head.weight") == [(1, "lm_head.weight")]
    assert made.fate(0, Q.format(2)) == ("dropped", "outside_slices", "")
    assert made.fate(1, Q.format(0)) == ("dropped", "outside_slices", "")
    assert made.fate(0, "lm_head.weight") == ("dropped", "outside_slices", "")
    assert made.fate(1, "model.embed_tokens.weight") == ("dropped", "outside_slices", "")
    assert made.fate(1, Q.format(2)) == ("copied", "one_source", Q.format(3))


def test_a_base_outside_the_slices_gives_config_and_companions_only(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a"), llama(tmp_path / "b", 5, rope_theta=7)
    made = good(stack(piece(a, 0, 2), base_model=b))
    assert made.plan.manifest["donor"] == 0
    assert (made.config["rope_theta"], made.config["num_hidden_layers"]) == (7, 2)
    assert made.fate(0, Q.format(0)) == ("dropped", "config_only", "")


def test_slices_of_unequal_length_are_refused_with_a_recipe_that_plans(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a: #1", 4), llama(tmp_path / "b", 4)
    unequal = {
        "sources": [
            {"model": a, "layer_range": [0, 3], "parameters": {"scale": 2}},
            {"model": b, "layer_range": [2, 4]},
        ],
        "parameters": {"scale": 0.5},
    }
    (problem,) = refusals(stack(piece(a, 0, 1), unequal))
    assert "span 3, 2 layers" in problem
    assert "give each a range of 2 layers" in problem
    assert "slices[1].sources" in problem
    corrected = yaml.safe_load(problem[problem.index("\nslices:") :])
    made = good({"merge_method": "passthrough", **corrected})
    assert made.config["num_hidden_layers"] == 6
    assert made.settings(Q.format(1))["sources"] == [{"scale": 2}]
    assert made.settings(Q.format(4))["sources"] == [{"scale": 0.5}]


def test_the_correction_keeps_references_that_are_maps(tmp_path: Path) -> None:
    a, b = llama(tmp_path / "a@b", 4), llama(tmp_path / "b", 4)
    named = {"model": {"path": str(a)}, "override_architecture": "LlamaForCausalLM"}
    sources = [{"model": named, "layer_range": [0, 3]}, {"model": b, "layer_range": [2, 4]}]
    (problem,) = refusals(stack({"sources": sources}))
    assert good({"merge_method": "passthrough", **yaml.safe_load(problem[problem.index("\nslices:") :])})


def test_layers_out_of_range_are_all_reported(tmp_path: Path) -> None:
    a = llama(tmp_path / "a", 4)
    problems = refusals(stack(piece(a, 0, 5), piece(a, 2, 9)))
    assert len(problems) == 2
    assert f"{a} has 4 layers; layer_range [0, 5] does not fit. Use a range within [0, 4]." in problems[0]
    assert "slices[1].sources[0].layer_range" in problems[1]


def test_an_unknown_method_and_other_families_are_refused(tmp_path: Path) -> None:
    a = llama(tmp_path / "a")
    b = llama(tmp_path / "b", architectures=["MistralForCausalLM"], model_type="mistral")
    data = linear(a, b)
    (problem,) = refusals(data)
    assert "another family (mistral: MistralForCausalLM) than" in problem
    assert "override_architecture: LlamaForCausalLM" in problem
    named = {"model": str(b), "override_architecture": "LlamaForCausalLM"}
    made = good({**data, "models": [{"model": a}, {"model": named}]})
    assert made.config["model_type"] == "llama"
    (problem,) = refusals({**data, "merge_method": "linaer"})
    assert "Did you mean 'linear'?" in problem


DEEP = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 2,
    "tie_word_embeddings": False,
}


def _deep(root: Path, **config: Any) -> Path:
    """Three layers, of which the first is dense, and one that predicts further tokens."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.BF16, (8, 4)),
        "model.norm.weight": (DType.BF16, (4,)),
        "lm_head.weight": (DType.BF16, (8, 4)),
        "model.layers.3.eh_proj.weight": (DType.BF16, (4, 8)),
        "model.layers.3.enorm.weight": (DType.BF16, (4,)),
    }
    for layer in range(4):
        block = f"model.layers.{layer}"
        specs[f"{block}.input_layernorm.weight"] = (DType.BF16, (4,))
        if layer == 0:
            specs[f"{block}.mlp.up_proj.weight"] = (DType.BF16, (4, 4))
            continue
        specs[f"{block}.mlp.gate.weight"] = (DType.BF16, (2, 4))
        specs[f"{block}.mlp.gate.e_score_correction_bias"] = (DType.F32, (2,))
        specs |= {f"{block}.mlp.experts.{e}.up_proj.weight": (DType.BF16, (4, 4)) for e in range(2)}
    return header_checkpoint(root, specs, {**DEEP, **config})


def test_a_prediction_layer_stays_behind_the_last_layer(tmp_path: Path) -> None:
    a, b = _deep(tmp_path / "a"), _deep(tmp_path / "b")
    made = good(stack(piece(a, 0, 3), piece(b, 1, 3)))
    assert made.reads("model.layers.5.eh_proj.weight") == [(1, "model.layers.3.eh_proj.weight")]
    gate = "model.layers.5.mlp.gate.weight"
    assert made.reads(gate) == [(1, "model.layers.3.mlp.gate.weight")]
    assert made.fate(0, "model.layers.3.eh_proj.weight") == ("dropped", "outside_slices", "")
    assert (made.config["num_hidden_layers"], made.config["num_nextn_predict_layers"]) == (5, 1)
    assert made.config["first_k_dense_replace"] == 1


def test_prediction_layers_of_parents_of_other_depth_meet(tmp_path: Path) -> None:
    a, b = _deep(tmp_path / "a"), _deep(tmp_path / "b")
    made = good({"merge_method": "linear", "slices": [piece((a, b), 1, 3)], "parameters": {"weight": 1}})
    name = "model.layers.3.eh_proj.weight"
    assert made.reads("model.layers.2.eh_proj.weight") == [(0, name), (1, name)]
    assert made.config["first_k_dense_replace"] == 0


def test_dense_layers_among_sparse_ones_are_refused(tmp_path: Path) -> None:
    a = _deep(tmp_path / "a")
    (problem,) = refusals(stack(piece(a, 0, 2), piece(a, 0, 2)))
    assert "first_k_dense_replace" in problem


def test_lists_of_layers_that_differ_are_put_together(tmp_path: Path) -> None:
    a = llama(tmp_path / "a", layer_types=["x", "y", "x"], eos_token_id=[1, 2, 3])
    b = llama(tmp_path / "b", layer_types=["y", "x", "z"], eos_token_id=[1, 2, 4])
    deep = llama(tmp_path / "deep", 4, layer_types=["x", "y", "x", "w"])
    silent = llama(tmp_path / "silent")
    made = good(stack(piece(a, 0, 2), piece(b, 2, 3), piece(deep, 3, 4)))
    assert made.config["layer_types"] == ["x", "y", "z", "w"]
    assert made.config["eos_token_id"] == [1, 2, 3]
    (problem,) = refusals(stack(piece(a, 0, 2), piece(silent, 2, 3)))
    assert f"layer_types tells kinds of layers apart in {a} and does not in {silent}" in problem


VISION = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Some"],
    "text_config": {"num_hidden_layers": 2, "tie_word_embeddings": False},
    "vision_config": {"depth": 2},
}


def _vision(root: Path, *, extra: str = "") -> Path:
    text = {name.replace("model.", "language_model.model.", 1): spec for name, spec in llama_specs(2).items()}
    specs = {
        f"language_model.{name}" if name == "lm_head.weight" else name: spec for name, spec in text.items()
    }
    for layer in range(2):
        specs[f"vision_tower.blocks.{layer}.attn.qkv.weight"] = (DType.BF16, (4, 4))
    specs["multi_modal_projector.linear.weight"] = (DType.BF16, (4, 4))
    if extra:
        specs[extra] = (DType.I64, (2,))
    return header_checkpoint(root, specs, VISION)


def _modules(**modules: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "modules": modules, "parameters": {"weight": 1}}


def test_modules_that_are_not_named_are_copied_from_the_donor(tmp_path: Path) -> None:
    a, b = _vision(tmp_path / "a", extra="vision_tower.positions"), _vision(tmp_path / "b")
    slices = [piece(b, 0, 2), piece(b, 1, 2)]
    made = good({**_modules(text_decoder={"slices": slices}), "base_model": a})
    assert made.config["text_config"]["num_hidden_layers"] == 3
    name = "vision_tower.blocks.1.attn.qkv.weight"
    assert made.reads(name) == [(0, name)]
    assert made.fate(0, name) == ("copied", "unnamed_module", name)
    assert made.fate(0, "vision_tower.positions")[:2] == ("copied", "copied_from_lead")
    assert made.fate(1, name) == ("dropped", "outside_modules", "")
    stacked = "language_model.model.layers.2.mlp.up_proj.weight"
    assert made.reads(stacked) == [(1, "language_model.model.layers.1.mlp.up_proj.weight")]
    assert any("modules named in the recipe: text_decoder" in note for note in made.plan.manifest["notes"])


def test_each_module_is_made_its_own_way(tmp_path: Path) -> None:
    a, b = _vision(tmp_path / "a"), _vision(tmp_path / "b")
    both = {"models": [{"model": a}, {"model": b}]}
    made = good(_modules(text_decoder=both, vision_tower={"models": [{"model": b}]}))
    name = "vision_tower.blocks.0.attn.qkv.weight"
    assert made.reads(name) == [(1, name)]
    assert len(made.reads("language_model.model.norm.weight")) == 2
    assert made.fate(0, name)[:2] == ("dropped", "outside_modules")


def test_an_unknown_module_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    a = _vision(tmp_path / "a")
    (problem,) = refusals(_modules(vision_towr={"models": [{"model": a}]}))
    assert "no module 'vision_towr'" in problem
    assert "Did you mean 'vision_tower'?" in problem
    assert "They have: multi_modal_projector, text_decoder, vision_tower." in problem


@pytest.mark.parametrize("ranges", [[(0, 2)], [(0, 1), (1, 2)]])
def test_layers_of_a_vision_tower_may_be_stacked_as_they_were(
    tmp_path: Path, ranges: list[tuple[int, int]]
) -> None:
    a = _vision(tmp_path / "a")
    made = good(_modules(vision_tower={"slices": [piece(a, *each) for each in ranges]}))
    assert made.config == VISION


def test_a_vision_tower_of_other_layers_is_refused(tmp_path: Path) -> None:
    """Its number of layers is not the one that the text decoder's field counts."""
    a = _vision(tmp_path / "a")
    (problem,) = refusals(_modules(vision_tower={"slices": [piece(a, 0, 2), piece(a, 1, 2)]}))
    assert "cannot be told of other layers in 'vision_tower'" in problem


def test_a_model_without_countable_layers_cannot_be_sliced(tmp_path: Path) -> None:
    a = header_checkpoint(tmp_path / "a", {"w.weight": (DType.F32, (2,))}, {"model_type": "x"})
    (problem,) = refusals(stack(piece(a, 0, 1)))
    assert "no one stack of decoder layers" in problem


UP = "model.layers.{}.mlp.up_proj.weight"
NORM = "model.norm.weight"


def _llama(root: Path, *, without: tuple[str, ...] = (), more: Specs | None = None, **config: Any) -> Path:
    """A tiny Llama of three layers; ``hidden`` and ``vocab`` are its sizes, the rest goes into its config."""
    sizes = {key: config.pop(key) for key in ("hidden", "vocab", "layers") if key in config}
    made = llama_config(**sizes)
    if "hidden" in sizes:
        # Heads of one size, so that it is the tensors that tell.
        made |= {"head_dim": 8}
    specs = {name: (DType.BF16, shape) for name, shape in llama_shapes(made).items()} | dict(more or {})
    kept = {name: spec for name, spec in specs.items() if name not in without}
    return header_checkpoint(root, kept, {**made, **config})


def _refused(*pieces: dict[str, Any], **more: Any) -> str:
    return "\n".join(refusals(stack(*pieces, **more)))


def test_layers_of_another_width_are_refused_with_both_shapes(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a"), _llama(tmp_path / "b", hidden=64)
    text = _refused(piece(a, 0, 1), piece(b, 1, 2))
    assert f"{b}: 11 of its tensors have other shapes than in {a}" in text
    assert "model.layers.1.input_layernorm.weight is [64] here and [32] there" in text
    assert "Stack models of one size" in text
    # Nor do they fit a config of another width.
    text = _refused(piece(b, 0, 2), base_model=a)
    assert f"{b}: 12 of its tensors have other shapes than in {a}" in text


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_another_vocabulary_at_either_end_is_refused(tmp_path: Path, order: tuple[int, int]) -> None:
    models = _llama(tmp_path / "a"), _llama(tmp_path / "b", vocab=80)
    first, last = (models[index] for index in order)
    text = _refused(piece(first, 0, 2), piece(last, 2, 3))
    assert "lm_head.weight is [" in text
    text = _refused(piece(first, 0, 2), piece(last, 2, 3), base_model=last)
    assert "model.embed_tokens.weight is [" in text


def test_the_embedding_that_serves_as_head_is_compared_too(tmp_path: Path) -> None:
    a = _llama(tmp_path / "a")
    b = _llama(tmp_path / "b", vocab=80, without=("lm_head.weight",), tie_word_embeddings=True)
    text = _refused(piece(a, 0, 2), piece(b, 2, 3))
    assert "model.embed_tokens.weight is [80, 32] here and [64, 32] there" in text


def test_biases_in_some_layers_only_are_refused(tmp_path: Path) -> None:
    more: Specs = {f"model.layers.{layer}.self_attn.q_proj.bias": (DType.BF16, (32,)) for layer in range(3)}
    a, b = _llama(tmp_path / "a"), _llama(tmp_path / "b", more=more)
    text = _refused(piece(a, 0, 1), piece(b, 1, 3))
    assert f"{b}: its layers are made of other tensors than those of {a}" in text
    assert "model.layers.1.self_attn.q_proj.bias only here" in text
    assert "q_proj.bias only there" in _refused(piece(b, 0, 1), piece(a, 1, 3))


def test_codes_that_are_not_read_are_not_the_layers_of_a_plain_model(tmp_path: Path) -> None:
    more: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for layer in range(3):
        more[UP.format(layer)] = (DType.F8_E4M3, (64, 32))
        more[f"{UP.format(layer).removesuffix('.weight')}.qscale_weight"] = (DType.F32, ())
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    a, b = _llama(tmp_path / "a"), _llama(tmp_path / "b", more=more, quantization_config=said)
    text = _refused(piece(a, 0, 2), piece(b, 2, 3))
    assert f"{UP.format(2)} is F8_E4M3[64, 32] here and [64, 32] there" in text


def test_a_hole_in_a_layer_is_refused_where_the_layer_is_taken(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a"), _llama(tmp_path / "b", without=(UP.format(1),))
    (problem,) = refusals(stack(piece(a, 0, 1), piece(b, 1, 2), piece(a, 2, 3)))
    assert f"{b}: it lacks 1 tensors in single layers" in problem
    assert f": {UP.format(1)}." in problem
    good(stack(piece(a, 0, 2), piece(b, 2, 3)))
    good(stack(piece(b, 0, 1), piece(a, 1, 3)))


def test_fewer_tensors_in_the_same_layer_of_two_sources_are_a_kind(tmp_path: Path) -> None:
    """ModernBERT's first layer has no norm of its own."""
    missing = ("model.layers.0.input_layernorm.weight",)
    a, b = _llama(tmp_path / "a", without=missing), _llama(tmp_path / "b", without=missing)
    made = good(stack(piece(a, 0, 2), piece(b, 2, 3)))
    assert not set(missing) & set(made.names())


def test_recomputed_buffers_make_no_kind(tmp_path: Path) -> None:
    more: Specs = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (DType.F32, (4,)) for layer in range(3)
    }
    a, b = _llama(tmp_path / "a"), _llama(tmp_path / "b", more=more)
    good(stack(piece(a, 0, 1), piece(b, 1, 3)))


def _mixture(root: Path, dense: tuple[int, ...] = (), *, experts: int = 2, fused: bool = False) -> Path:
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {NORM: (DType.BF16, (8,))}
    specs["model.embed_tokens.weight"] = (DType.BF16, (16, 8))
    for layer in range(3):
        block = f"model.layers.{layer}.mlp"
        specs[f"model.layers.{layer}.input_layernorm.weight"] = (DType.BF16, (8,))
        if layer in dense:
            specs[f"{block}.up_proj.weight"] = (DType.BF16, (16, 8))
            continue
        specs[f"{block}.gate.weight"] = (DType.BF16, (experts, 8))
        if fused:
            specs[f"{block}.experts.down_proj"] = (DType.BF16, (experts, 8, 4))
        else:
            names = [f"{block}.experts.{expert}.down_proj.weight" for expert in range(experts)]
            specs |= dict.fromkeys(names, (DType.BF16, (8, 4)))
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 3,
        "num_experts": experts,
        "mlp_only_layers": list(dense),
        "decoder_sparse_step": 1,
        "tie_word_embeddings": True,
    }
    return header_checkpoint(root, specs, config)


def test_kinds_that_one_source_has_by_itself_may_be_mixed(tmp_path: Path) -> None:
    a, b = _mixture(tmp_path / "a", (0,)), _mixture(tmp_path / "b", (0,))
    made = good(stack(piece(a, 0, 2), piece(b, 1, 3)))
    assert made.reads("model.layers.3.mlp.gate.weight") == [(1, "model.layers.2.mlp.gate.weight")]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({}, {"experts": 4}, ["model.layers.1.mlp.experts.2.down_proj.weight only here"]),
        (
            {"fused": True},
            {"experts": 4, "fused": True},
            ["model.layers.1.mlp.gate.weight is [4, 8] here and [2, 8] there"],
        ),
        (
            {},
            {"fused": True},
            [
                "spells its layers as in model.layers.1.mlp.experts.down_proj, where",
                "has model.layers.0.mlp.experts.0.down_proj.weight, and",
            ],
        ),
    ],
)
def test_layers_with_other_experts_are_refused(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], words: list[str]
) -> None:
    a, b = _mixture(tmp_path / "a", **one), _mixture(tmp_path / "b", **other)
    text = _refused(piece(a, 0, 1), piece(b, 1, 2))
    assert all(each in text for each in words)


def _bare(root: Path, **more: Any) -> Path:
    """The same Llama without ``model.`` before its names."""
    config = llama_config()
    specs = {name.removeprefix("model."): (DType.BF16, shape) for name, shape in llama_shapes(config).items()}
    return header_checkpoint(root, {**specs, **more}, config)


def test_names_follow_the_first_slice_s_source(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a"), _bare(tmp_path / "b")
    made = good(stack(piece(a, 0, 2), piece(b, 2, 3)))
    assert set(made.names()) == set(llama_shapes(llama_config()))
    assert made.reads(UP.format(2)) == [(1, "layers.2.mlp.up_proj.weight")]
    assert made.reads(NORM) == [(1, "norm.weight")]
    assert made.reads("lm_head.weight") == [(1, "lm_head.weight")]
    made = good(stack(piece(b, 0, 2), piece(a, 2, 3)))
    assert made.reads("norm.weight") == [(1, NORM)]
    assert not [name for name in made.names() if name.startswith("model.")]


def test_members_of_a_slice_meet_by_either_spelling(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a"), _bare(tmp_path / "b")
    made = good({"merge_method": "linear", "slices": [piece((a, b), 0, 3)], "parameters": {"weight": 1}})
    assert made.reads(NORM) == [(0, NORM), (1, "norm.weight")]
    assert made.reads("model.embed_tokens.weight")[1] == (1, "embed_tokens.weight")


def test_a_name_that_cannot_be_told_by_the_first_source_s_naming_is_refused(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a"), _bare(tmp_path / "b", **{"score.weight": (DType.BF16, (2, 32))})
    text = _refused(piece(a, 0, 2), piece(b, 2, 3))
    assert "what 1 of its tensors would be called: score.weight" in text


def test_an_end_with_other_tensors_than_the_config_s_source_is_refused(tmp_path: Path) -> None:
    a, b = _llama(tmp_path / "a"), _llama(tmp_path / "b", without=(NORM,))
    text = _refused(piece(a, 0, 2), piece(b, 2, 3))
    assert f"{b}: beside its layers it has other tensors than {a}" in text
    assert f"{NORM} only there" in text


OUTSIDE: Mapping[str, tuple[tuple[int, ...], int]] = {
    # The first slice's source is 0 and the last one's is 1.
    "model.embed_norm.weight": ((32,), 0),
    "model.word_embeddings_layernorm.weight": ((32,), 0),
    "model.embeddings.LayerNorm.bias": ((32,), 0),
    "model.embed_positions.weight": ((8, 32), 0),
    "model.project_in.weight": ((32, 32), 0),
    "model.embedding_norm.weight": ((32,), 1),
    "model.final_layer_norm.bias": ((32,), 1),
    "model.project_out.weight": ((32, 32), 1),
    "score.weight": ((2, 32), 1),
    "classifier.weight": ((2, 32), 1),
    "classifier.dense.bias": ((2,), 1),
    "v_head.summary.weight": ((1, 32), 1),
    "cls.predictions.transform.dense.weight": ((32, 32), 1),
    "pooler.dense.weight": ((32, 32), 1),
    "audio_tower.layers.0.self_attn.q_proj.weight": ((4, 4), 0),
    "audio_tower.layers.0.self_attn_layer_norm.weight": ((4,), 0),
    "audio_tower.layer_norm.weight": ((4,), 0),
    "audio_tower.score.weight": ((4,), 0),
    "model.speech.encoder.layers.0.norm.weight": ((4,), 0),
    "model.speech.norm.weight": ((4,), 0),
    "vision_tower.norm.weight": ((4,), 0),
}


def test_what_stands_beside_the_layers_comes_from_its_own_end(tmp_path: Path) -> None:
    more: Specs = {name: (DType.BF16, shape) for name, (shape, _) in OUTSIDE.items()}
    # A model type that puts no module aside, so that the slices count everything.
    a, b = (_llama(tmp_path / each, more=more, model_type="thing") for each in "ab")
    made = good(stack(piece(a, 0, 1), piece(b, 1, 2)))
    assert {name: made.reads(name) for name in OUTSIDE} == {
        name: [(source, name)] for name, (_, source) in OUTSIDE.items()
    }
