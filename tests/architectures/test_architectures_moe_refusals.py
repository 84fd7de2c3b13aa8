"""What cannot be built of which models, in sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.dense_headers import FIELDS, HIDDEN, LAYERS, MLP, ROW, SQUARE, WIDTH, mixture, parent, reshaped

from raymerge.architectures.moe_refusals import Mixture, refusals
from raymerge.architectures.moe_targets import DenseModel, dense_model, targets

TARGETS = targets()
SHARED, OTHER = parent("llama", "s"), parent("llama", "other")
FITS = (
    ("mixtral", "llama", 0),
    ("mixtral", "mistral", 0),
    ("deepseek", "llama", 1),
    ("deepseek", "mistral", 0),
    ("qwen2_moe", "llama", 1),
    ("qwen2_moe", "qwen2", 1),
    ("qwen3_moe", "qwen3", 0),
    ("glm4_moe", "qwen2", 1),
    ("glm4_moe", "qwen3", 3),
    ("granitemoe", "mistral", 0),
    ("deepseek_v3", "deepseek_v3", 2),
)


@pytest.mark.parametrize(("name", "family", "num_shared"), FITS)
def test_what_fits_is_not_refused(name: str, family: str, num_shared: int) -> None:
    base = parent(family)
    asked = mixture(base, parent("qwen2", "other"), shared=(base,) * num_shared)
    assert refusals(TARGETS[name], base, asked) == ()


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
@settings(deadline=None, max_examples=60)
def test_configs_of_any_kind_are_refused_or_taken_in_words(
    fields: dict[str, Any], family: str, name: str
) -> None:
    base = parent(family, **{key: value for key, value in fields.items() if key != "num_hidden_layers"})
    broken = dense_model("base", {**base.config, **fields}, base.shapes)
    for each in refusals(TARGETS[name], broken, mixture(broken)):
        assert each.reason.endswith(".")
