"""Families that dense models are built into: what they and their tensors are called, and their configs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.dense_headers import FIELDS, HIDDEN, LAYERS, WIDTH, parent

from raymerge.architectures import Role, describe, fused_layout, load_rules, logical_name, logical_names
from raymerge.architectures.moe_targets import (
    AddedTensor,
    MoeTarget,
    added_tensors,
    dense_mlp,
    expert_names,
    fused_names,
    moe_config,
    named_targets,
    router_name,
    shared_gate_name,
    shared_names,
    targets,
)
from raymerge.dtypes import DType

TARGETS = targets()


def config_of(target: MoeTarget, base: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
    """A config of four experts, of which two work."""
    usual = {
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_width": WIDTH,
        "shared_width": 0,
        "dtype_name": None,
    }
    return moe_config(target, base, **{**usual, **sizes})


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("Mix", ["mixtral"]),
        ("qwen", ["qwen2_moe", "qwen3_moe"]),
        ("Qwen MoE", ["qwen2_moe"]),
        ("DeepSeek MoE", ["deepseek"]),
        ("deepseek-v", ["deepseek_v3", "deepseek_v2"]),
        ("glm", ["glm4_moe"]),
        ("olmo", ["olmoe"]),
        ("", []),
        ("llama", []),
    ],
)
def test_a_recipe_may_name_a_target_in_many_ways(prefix: str, names: list[str]) -> None:
    assert [target.name for target in named_targets(prefix)] == names


@given(name=st.sampled_from(sorted(TARGETS)), blanks=st.sampled_from(["", " ", "-", "_"]))
@settings(deadline=None, max_examples=20)
def test_the_own_name_and_title_mean_one_target_however_spelt(name: str, blanks: str) -> None:
    for word in (name, TARGETS[name].title):
        spelt = word.replace("_", blanks).replace("-", blanks).upper()
        assert [target.name for target in named_targets(spelt)] == [name]


# Names of tensors


@given(layer=st.integers(0, 200), expert=st.integers(0, 500), name=st.sampled_from(sorted(TARGETS)))
@settings(deadline=None, max_examples=60)
def test_roles_tell_what_every_published_name_is(layer: int, expert: int, name: str) -> None:
    target, rules = TARGETS[name], load_rules(name)
    found = describe(router_name(target, layer, "hub"), rules)
    assert (found.role, found.layer) == (Role.ROUTER, layer)
    if target.hub:
        for word, tensor in expert_names(target, layer, expert).items():
            info = describe(tensor, rules)
            assert (info.role, info.layer, info.expert) == (Role.EXPERT, layer, expert)
            assert info.projection == word
            canonical = f"model.layers.{layer}.mlp.experts.{expert}.{word}_proj.weight"
            assert logical_name(tensor, rules) == canonical
    for word, tensor in shared_names(target, layer).items():
        info = describe(tensor, rules)
        assert (info.role, info.projection) == (Role.SHARED_EXPERT, word)
    if target.selection_bias is not None:
        bias = f"model.layers.{layer}.{target.selection_bias}"
        assert describe(bias, rules).role is Role.ROUTER_BIAS
    gate = shared_gate_name(target, layer)
    assert gate is None or describe(gate, rules).role is Role.SHARED_EXPERT_GATE


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.fused])
def test_fused_experts_are_read_as_they_are_written(name: str) -> None:
    target, rules = TARGETS[name], load_rules(name)
    family = next(iter(target.bases))
    config = config_of(target, {"model_type": family, **FIELDS}, shared_width=WIDTH)
    gate_up, down = fused_names(target, 1)
    assert describe(router_name(target, 1, "fused"), rules).role is Role.ROUTER
    for tensor, shape, words in (
        (gate_up, (4, 2 * WIDTH, HIDDEN), ("gate", "up")),
        (down, (4, HIDDEN, WIDTH), ("down",)),
    ):
        layout = fused_layout(tensor, shape, config, rules)
        assert layout is not None
        assert (layout.kind, layout.projections, layout.num_experts) == ("out_in", words, 4)
        assert logical_names(layout)[0].endswith(f"experts.0.{words[0]}_proj.weight")


def test_the_matrices_of_dense_networks() -> None:
    base = parent("llama")
    assert base.matrices == {
        (layer, word): f"model.layers.{layer}.mlp.{word}_proj.weight"
        for layer in range(LAYERS)
        for word in ("gate", "up", "down")
    }
    fused = ["model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    assert dense_mlp(fused, {"num_hidden_layers": 1}) == {(0, "gate_up"): fused[0], (0, "down"): fused[1]}
    mixed = ["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    assert dense_mlp(mixed, {"num_hidden_layers": 2}) == {(1, "up"): mixed[1]}
    assert dense_mlp([], {}) == {}


def test_layers_behind_the_others_are_no_part_of_the_main_stack() -> None:
    names = [
        *parent("deepseek_v3").shapes,
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.enorm.weight",
    ]
    config = {"model_type": "deepseek_v3", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    assert {layer for layer, _ in dense_mlp(names, config)} == {0, 1, 2}


def test_what_the_base_lacks_is_added() -> None:
    llama, qwen = parent("llama"), parent("qwen2")
    added = added_tensors(TARGETS["qwen2_moe"], llama, 4)
    assert len(added) == 3 * LAYERS
    assert added[0] == AddedTensor("model.layers.0.self_attn.q_proj.bias", None, (HIDDEN,), 0.0)
    assert added_tensors(TARGETS["qwen2_moe"], qwen, 4) == ()
    biases = added_tensors(TARGETS["glm4_moe"], llama, 4)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert biases[-1] == AddedTensor(name, DType.F32, (4,), 0.0)
    assert added_tensors(TARGETS["mixtral"], llama, 4) == ()


# Configs


@pytest.mark.parametrize(
    ("name", "family"), [(name, family) for name, each in TARGETS.items() for family in each.bases]
)
def test_every_config_is_complete(name: str, family: str) -> None:
    base = {
        "model_type": family,
        **FIELDS,
        "architectures": ["Dense"],
        "vocab_size": 99,
        "own": {"kept": [1]},
    }
    before = copy.deepcopy(base)
    config = config_of(TARGETS[name], base, shared_width=WIDTH)
    assert "$" not in json.dumps(config)
    assert (config["model_type"], config["architectures"]) == (name, [TARGETS[name].architecture])
    assert (config["vocab_size"], config["own"], config["num_experts_per_tok"]) == (99, {"kept": [1]}, 2)
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    assert [config[key] for key in counts if key in config] == [4]
    config["own"]["kept"].append(2)
    assert base == before


@pytest.mark.parametrize(
    ("base", "given", "said"),
    [
        ({"dtype": "float32"}, "bfloat16", {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, "bfloat16", {"torch_dtype": "bfloat16"}),
        ({}, "bfloat16", {"dtype": "bfloat16"}),
    ],
)
def test_the_dtype_stands_where_the_base_says_it(
    base: dict[str, Any], given: str | None, said: dict[str, Any]
) -> None:
    config = config_of(TARGETS["mixtral"], {"model_type": "llama", **base}, dtype_name=given)
    assert {key: config[key] for key in ("dtype", "torch_dtype") if key in config} == said


def test_deepseek_is_told_everything_in_the_words_of_its_own_code() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    base = {"model_type": "llama", **FIELDS, "rope_parameters": rope, "auto_map": {"AutoModel": "its own"}}
    config = config_of(TARGETS["deepseek"], base, dtype_name="bfloat16")
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}
    assert (config["n_shared_experts"], config["torch_dtype"]) == (None, "bfloat16")
    assert config["auto_map"]["AutoModel"].endswith("modeling_deepseek.DeepseekModel")
    assert config_of(TARGETS["deepseek"], base, shared_width=WIDTH)["n_shared_experts"] == 1
    plain = config_of(TARGETS["deepseek"], {"model_type": "llama", **FIELDS, "rope_theta": 7.0})
    assert (plain["rope_theta"], plain["rope_scaling"]) == (7.0, None)


def test_rotary_fields_are_said_once_and_whole() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    glm = config_of(TARGETS["glm4_moe"], {"model_type": "llama", **FIELDS, "rope_parameters": rope})
    assert glm["rope_parameters"] == {**rope, "partial_rotary_factor": 1.0}
    assert glm["partial_rotary_factor"] == 1.0
    assert "rope_theta" not in glm
    # Mixtral's own default is another one.
    assert config_of(TARGETS["mixtral"], {"model_type": "mistral"})["rope_theta"] == 10000.0


def test_windows_are_told_layer_by_layer_where_the_target_can() -> None:
    """A silent Qwen2-MoE would slide in other layers than Qwen2 does."""
    base = {"model_type": "qwen2", **FIELDS, "sliding_window": 8, "max_window_layers": 1}
    sliding = config_of(TARGETS["qwen2_moe"], {**base, "use_sliding_window": True})
    assert sliding["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert (sliding["use_sliding_window"], sliding["sliding_window"]) == (True, 8)
    plain = config_of(TARGETS["qwen2_moe"], base)
    assert plain["layer_types"] == ["full_attention"] * LAYERS
    assert (plain["use_sliding_window"], plain["sliding_window"]) == (False, None)
    mistral = {"model_type": "mistral", **FIELDS, "sliding_window": 8}
    assert config_of(TARGETS["qwen2_moe"], mistral)["layer_types"] == ["sliding_attention"] * LAYERS
    assert config_of(TARGETS["mixtral"], mistral)["sliding_window"] == 8


def test_factors_of_granite() -> None:
    llama = config_of(TARGETS["granitemoe"], {"model_type": "llama", **FIELDS, "head_dim": 16})
    assert (llama["attention_multiplier"], llama["embedding_multiplier"]) == (0.25, 1.0)
    granite = config_of(
        TARGETS["granitemoe"], {"model_type": "granite", **FIELDS, "attention_multiplier": 0.1}
    )
    assert (granite["attention_multiplier"], granite["logits_scaling"]) == (0.1, 1.0)


def test_shared_experts_are_counted_in_whole_ones() -> None:
    base = {"model_type": "llama", **FIELDS}
    assert config_of(TARGETS["glm4_moe"], base, shared_width=3 * WIDTH)["n_shared_experts"] == 3
    with pytest.raises(ValueError, match="no whole number"):
        config_of(TARGETS["glm4_moe"], base, shared_width=WIDTH + 1)
