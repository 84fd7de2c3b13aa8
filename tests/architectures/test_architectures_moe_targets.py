"""Families that mixtures are built as, and what they refuse; what experts of a family mean."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_shapes

from raymerge.architectures.expert_fields import ExpertMeaning, expert_meaning
from raymerge.architectures.moe_targets import (
    AddedTensor,
    DenseModel,
    Mixture,
    MoeTarget,
    added_tensors,
    dense_mlp,
    dense_model,
    expert_names,
    fused_names,
    moe_config,
    named_targets,
    refusals,
    router_name,
    shared_gate_name,
    shared_names,
    targets,
)
from raymerge.architectures.roles import describe, fused_layout, logical_name, logical_names
from raymerge.architectures.rules import Role, load_rules
from raymerge.dtypes import DType

HIDDEN, WIDTH, LAYERS, HEADS, HEAD = 32, 48, 3, 4, 8
FIELDS = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "sliding_window": None,
}
MLP = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
SQUARE, ROW = (HIDDEN, HIDDEN), (HIDDEN,)


def parent(family: str, name: str = "base", *, layers: int = LAYERS, **fields: Any) -> DenseModel:
    config = {"model_type": family, **FIELDS, "num_hidden_layers": layers}
    shapes = llama_shapes({**config, "vocab_size": 64, "tie_word_embeddings": False})
    for layer in range(layers):
        head = f"model.layers.{layer}."
        if family == "qwen2":
            shapes |= {f"{head}self_attn.{word}_proj.bias": ROW for word in "qkv"}
        if family == "qwen3":
            shapes |= {f"{head}self_attn.{word}_norm.weight": (HEAD,) for word in "qk"}
    return dense_model(name, {**config, **fields}, shapes)


def reshaped(model: DenseModel, shapes: Mapping[str, tuple[int, ...] | None]) -> DenseModel:
    changed = {name: shape for name, shape in {**model.shapes, **shapes}.items() if shape is not None}
    return dense_model(model.name, model.config, changed)


def mixture(*experts: DenseModel, **changes: Any) -> Mixture:
    usual = Mixture(experts, (), None, max(2, len(experts)), 1, "hub")
    return replace(usual, **changes)


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
@settings(deadline=None, max_examples=10)
def test_the_own_name_and_title_mean_one_target_however_spelt(name: str, blanks: str) -> None:
    for word in (name, TARGETS[name].title):
        spelt = word.replace("_", blanks).replace("-", blanks).upper()
        assert [target.name for target in named_targets(spelt)] == [name]


@given(layer=st.integers(0, 200), expert=st.integers(0, 500), name=st.sampled_from(sorted(TARGETS)))
@settings(deadline=None, max_examples=30)
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
    added = added_tensors(TARGETS["qwen2_moe"], llama, 4, DType.BF16)
    assert len(added) == 3 * LAYERS
    assert added[0] == AddedTensor("model.layers.0.self_attn.q_proj.bias", DType.BF16, (HIDDEN,), 0.0)
    assert added_tensors(TARGETS["qwen2_moe"], qwen, 4, DType.BF16) == ()
    biases = added_tensors(TARGETS["glm4_moe"], llama, 4, DType.BF16)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert biases[-1] == AddedTensor(name, DType.F32, (4,), 0.0)
    assert added_tensors(TARGETS["mixtral"], llama, 4, DType.BF16) == ()


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


SHARED, OTHER = parent("llama", "s"), parent("llama", "other")


def reasons(name: str, base: DenseModel, asked: Mixture) -> dict[str, str]:
    """Sentences by parent."""
    found = refusals(TARGETS[name], base, asked)
    assert all(each.target == TARGETS[name].title and each.reason.endswith(".") for each in found)
    return {
        each.parent: " ".join(other.reason for other in found if other.parent == each.parent)
        for each in found
    }


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mixtral", {"shared": (SHARED,)}, "names 1 shared expert; Mixtral takes none"),
        ("qwen2_moe", {}, "names 0 shared experts; Qwen2-MoE takes exactly 1"),
        (
            "deepseek",
            {"shared": (SHARED,), "shared_have_gates": True},
            "Its shared experts have prompts; those of DeepSeek MoE have no gate",
        ),
        ("qwen2_moe", {"shared": (SHARED,), "shared_have_gates": False}, "Its shared experts lack prompts"),
        ("glm4_moe", {"num_experts": 1, "shared": (SHARED,)}, "works with 2 or more"),
        ("deepseek", {"layout": "fused"}, "asks for layout: fused"),
        ("mixtral", {"granularity": 5}, "cuts feed-forward networks 48 wide into 5"),
    ],
)
def test_what_the_recipe_asks_for_in_vain(name: str, changes: dict[str, Any], said: str) -> None:
    base = parent("llama")
    found = reasons(name, base, mixture(base, **changes))
    assert list(found) == ["the recipe"]
    assert said in found["the recipe"]


@pytest.mark.parametrize("told", [True, None])
def test_gates_that_need_no_prompts_are_no_hindrance(told: bool | None) -> None:
    base = parent("llama")
    asked = mixture(base, shared=(base,), shared_have_gates=told)
    assert refusals(TARGETS["qwen2_moe"], base, asked) == ()
    assert bool(refusals(TARGETS["deepseek"], base, asked)) is (told is True)


BIASES = {
    f"model.layers.{layer}.self_attn.{word}_proj.bias": ROW for layer in range(LAYERS) for word in "qkvo"
}
BIASED = reshaped(parent("llama"), BIASES)


@pytest.mark.parametrize(
    ("name", "base", "said"),
    [
        (
            "mixtral",
            parent("qwen2"),
            "is of the family qwen2; the trunk of Mixtral is that of llama or mistral",
        ),
        ("mixtral", parent("qwen2"), "k_proj.bias and 8 more tensors, for which Mixtral has no place"),
        ("qwen2_moe", BIASED, "o_proj.bias and 2 more tensors, for which Qwen2-MoE"),
        (
            "olmoe",
            parent("llama"),
            "lacks model.layers.0.self_attn.k_norm.weight and 5 more tensors, which OLMoE",
        ),
        ("flex_olmo", parent("llama"), "it lacks model.layers.0.post_feedforward_layernorm.weight"),
        ("deepseek_v3", parent("llama"), "(multi-head latent attention)"),
        (
            "deepseek",
            parent("mistral", sliding_window=8),
            "window of 8 tokens (sliding_window); DeepSeek MoE attends",
        ),
        (
            "qwen3_moe",
            parent("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "in some layers and not in others",
        ),
        (
            "deepseek",
            parent("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}),
            "scales rotary positions by llama3; the code of DeepSeek MoE knows default, linear, dynamic",
        ),
        ("mixtral", parent("llama", num_hidden_layers=10**12), "tells of 1000000000000 layers"),
        (
            "mixtral",
            reshaped(parent("llama"), {"model.layers.1.mlp.gate.weight": (4, HIDDEN)}),
            "has experts already (model.layers.1.mlp.gate.weight)",
        ),
        (
            "deepseek_v3",
            reshaped(parent("deepseek_v3"), {"model.layers.3.enorm.weight": ROW}),
            "has model.layers.3.enorm.weight behind its 3 layers",
        ),
    ],
)
def test_trunks_that_do_not_fit(name: str, base: DenseModel, said: str) -> None:
    shared = TARGETS[name].shared
    count = shared.least if shared is not None else 0
    other = OTHER
    found = reasons(name, base, mixture(other, shared=(other,) * count))
    assert said in found["base"]


WIDER = {
    f"model.layers.{layer}.mlp.{word}.weight": tuple(2 * size if size == WIDTH else size for size in shape)
    for layer in range(LAYERS)
    for word, shape in MLP.items()
}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            parent("phi3", "other"),
            "of the family phi3, whose feed-forward is not known to be gate, up and down",
        ),
        (
            reshaped(
                parent("phi3", "other"), {"model.layers.0.mlp.gate_up_proj.weight": (2 * WIDTH, HIDDEN)}
            ),
            "stored with gate and up in one (model.layers.0.mlp.gate_up_proj.weight), is not known",
        ),
        (parent("llama", "other", layers=4), "networks in 4 layers; the base base has 3 layers"),
        (parent("gemma2", "other"), "Its activation is gelu_pytorch_tanh; that of the base base is silu"),
        (
            reshaped(OTHER, {"model.layers.1.mlp.up_proj.weight": None}),
            "lacks matrices of gated feed-forward networks (layer 1: up; 1 in all)",
        ),
        (
            reshaped(OTHER, {"model.layers.1.mlp.up_proj.weight": ()}),
            "has model.layers.1.mlp.up_proj.weight, for which an expert of Mixtral has no place",
        ),
        (reshaped(OTHER, WIDER), "feed-forward is 96 wide; that of the expert first is 48"),
        (
            reshaped(OTHER, {"model.layers.1.mlp.experts.0.up_proj.weight": SQUARE}),
            "It has experts already (model.layers.1.mlp.experts.0.up_proj.weight)",
        ),
    ],
)
def test_experts_that_do_not_fit(other: DenseModel, said: str) -> None:
    base = parent("llama")
    found = reasons("mixtral", base, mixture(parent("mistral", "first"), other))
    assert list(found) == ["other"]
    assert said in found["other"]


def test_a_shared_expert_may_be_wider_where_a_field_says_so() -> None:
    base = parent("llama")
    wide = reshaped(
        parent("llama", "wide"), {name: (72, 32) if s[0] == 96 else (32, 72) for name, s in WIDER.items()}
    )
    asked = mixture(base, shared=(wide,))
    assert refusals(TARGETS["qwen2_moe"], base, asked) == ()
    found = reasons("glm4_moe", base, asked)
    assert "Its shared experts are 72 wide together; GLM-4-MoE counts them by 48" in found["the recipe"]
    assert refusals(TARGETS["glm4_moe"], base, replace(asked, granularity=2, num_experts=4)) == ()


def test_every_reason_of_every_parent_is_told_at_once() -> None:
    base = parent("qwen2", "trunk")
    one, two = parent("phi3", "one"), parent("gemma2", "two", layers=4)
    asked = mixture(one, two, one, shared=(base,), layout="fused")
    found = refusals(TARGETS["deepseek"], base, asked)
    assert [each.parent for each in found] == ["the recipe", "trunk", "trunk", "one", "two", "two"]
    assert len({(each.parent, each.reason) for each in found}) == len(found)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            sorted([*FIELDS, "use_sliding_window", "max_window_layers", "layer_types", "rope_scaling"])
        ),
        st.one_of(
            st.none(), st.booleans(), st.integers(-2, 10**12), st.text(max_size=3), st.just([]), st.just({})
        ),
    ),
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "deepseek_v3", "unheard-of"]),
    name=st.sampled_from(sorted(TARGETS)),
)
@settings(deadline=None, max_examples=30)
def test_configs_of_any_kind_are_refused_or_taken_in_words(
    fields: dict[str, Any], family: str, name: str
) -> None:
    base = parent(family, **{key: value for key, value in fields.items() if key != "num_hidden_layers"})
    broken = dense_model("base", {**base.config, **fields}, base.shapes)
    for each in refusals(TARGETS[name], broken, mixture(broken)):
        assert each.reason.endswith(".")


FAMILIES = (
    *("mixtral", "minimax", "minimax_m2", "granitemoe", "granitemoehybrid", "qwen2_moe", "qwen3_moe"),
    *("qwen3_next", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe"),
    *("hunyuan_v1_moe", "ernie4_5_moe", "phimoe", "lfm2_moe", "llama4_text"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_silent_configs_mean_what_transformers_takes_them_for(name: str) -> None:
    meant: dict[str, Any] = transformers.AutoConfig.for_model(name).to_dict()
    found = expert_meaning({"model_type": name})
    assert found.activation == meant.get("hidden_act", "silu")
    assert found.factor == (meant.get("routed_scaling_factor") or 1.0)
    if "norm_topk_prob" in meant:
        assert found.sums_to_one == meant["norm_topk_prob"]
    assert expert_meaning(meant) == found


def test_what_a_config_says_comes_first() -> None:
    said = {
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 16,
        "hidden_act": "relu",
    }
    found = expert_meaning({"model_type": "deepseek_v2", **said})
    assert found == ExpertMeaning("relu", "sigmoid", True, 16)
    inside = {"model_type": "outer", "text_config": {"model_type": "qwen3_moe", **said}}
    assert expert_meaning(inside) == found


def test_values_of_other_kinds_say_nothing() -> None:
    strange = {"hidden_act": 3, "norm_topk_prob": "yes", "routed_scaling_factor": None, "scoring_func": ["x"]}
    assert expert_meaning({"model_type": "mixtral", **strange}) == expert_meaning({"model_type": "mixtral"})
    assert expert_meaning({"model_type": "unheard_of", **strange}) == ExpertMeaning()
    assert expert_meaning({}) == ExpertMeaning()


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"model_type": "llama", "hidden_act": "gelu"}, "gelu"),
        ({"model_type": "gemma2", "hidden_act": "silu"}, "gelu_pytorch_tanh"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "gelu"),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, "clamped SwiGLU"),
        ({"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "gelu"),
    ],
)
def test_activations(config: dict[str, Any], activation: str) -> None:
    assert expert_meaning(config).activation == activation
