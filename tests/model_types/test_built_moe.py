"""Mixtures built of dense models: they load, give what they should, and their configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.dense_maker import HIDDEN, LAYERS, WIDTH, load_whole, logits, make_dense
from kits.marks import one_in
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import raymerge
from raymerge.architectures.moe_targets import (
    dense_families,
    dense_model,
    full_config,
    moe_config,
    shared_gate_name,
    targets,
    windows,
)

Tensors = dict[str, torch.Tensor]
WINDOW = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A target and a base that it holds."""

    target: str
    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the base's config."""

    def __str__(self) -> str:
        return "-".join([self.target, "of", self.family, *self.changes])


CASES = (
    Case("mixtral", "llama"),
    Case("mixtral", "llama", {"head_dim": 16}),
    Case("mixtral", "mistral"),
    Case("mixtral", "mistral", {"sliding_window": WINDOW}),
    Case("qwen2_moe", "llama"),
    Case("qwen2_moe", "llama", {"head_dim": 16}),
    Case("qwen2_moe", "mistral", {"sliding_window": WINDOW}),
    Case("qwen2_moe", "qwen2"),
    Case(
        "qwen2_moe", "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    Case("qwen3_moe", "qwen3"),
    Case("qwen3_moe", "qwen3", {"attention_bias": True}),
    Case("qwen3_moe", "qwen3", {"tie_word_embeddings": True}),
    Case(
        "qwen3_moe", "qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    ),
    Case("glm4_moe", "llama", {"hidden_act": "gelu"}),
    Case("glm4_moe", "mistral"),
    Case("glm4_moe", "qwen2"),
    Case("glm4_moe", "qwen3", {"head_dim": 16}),
    Case("granitemoe", "granite"),
    Case("granitemoe", "granite", {"attention_bias": True}),
    Case("granitemoe", "llama"),
    Case("granitemoe", "mistral", {"head_dim": 16}),
    Case("flex_olmo", "olmo2"),
    Case("flex_olmo", "olmo2", {"attention_bias": True}),
    Case("olmoe", "qwen3", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HIDDEN}),
    Case("deepseek_v2", "deepseek_v2"),
    Case("deepseek_v3", "deepseek_v3"),
    Case("deepseek_v3", "deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
)


def build(
    case: Case,
    tmp_path: Path,
    *,
    routed: float = 1.0,
    shared: float = 0.0,
    num_shared: int = 1,
    **recipe: Any,
) -> None:
    """A mixture of a dense model and itself, whose routers and gates have no preferences.

    ``routed`` and ``shared`` are factors on the down projections of routed and shared experts, which a target
    has none or ``num_shared`` of.
    """
    dense = tmp_path / "dense"
    if not dense.exists():
        make_dense(case.family, dense, **case.changes)
    expert = {"source_model": str(dense)}
    data: dict[str, Any] = {
        "base_model": str(dense),
        "architecture": case.target,
        "gate_mode": "random",
        "gate_scale": 1e-6,
        "weight_scaling": False,
        "experts": [{**expert, "copies": recipe.pop("num_experts", 2), "residual_scale": routed}],
        **recipe,
    }
    if targets()[case.target].shared is not None:
        data["shared_experts"] = [{**expert, "residual_scale": shared}] * num_shared
    raymerge.submit(data, tmp_path / "moe", raymerge.RunOptions(inline=True))
    file = tmp_path / "moe" / "model.safetensors"
    gates = [shared_gate_name(targets()[case.target], layer) for layer in range(LAYERS)]
    zeros = {gate: torch.zeros(1, HIDDEN) for gate in gates if gate is not None}
    save_file({**load_file(file), **zeros}, file, {"format": "pt"})


def check(case: Case, tmp_path: Path, **asked: Any) -> Any:
    """The mixture loads with nothing left over, says what the dense model says, and generates."""
    build(case, tmp_path, **asked)
    model, info = load_whole(tmp_path / "moe")
    assert not any(info.values()), info
    assert model.config.model_type == case.target
    assert type(model).__name__ == targets()[case.target].architecture
    expected = logits(load_whole(tmp_path / "dense")[0])
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    tokens = torch.tensor([[1, 5, 9]])
    mask = torch.ones_like(tokens)
    grown = model.generate(tokens, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert grown.shape == (1, 6)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", one_in(6, CASES), ids=str)
def test_two_equal_experts_are_the_dense_model(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", one_in(3, CASES), ids=str)
def test_two_of_four_equal_fused_experts_are_the_dense_model(case: Case, tmp_path: Path) -> None:
    chosen = 2 if targets()[case.target].weights_sum_to_one else 4
    check(case, tmp_path, num_experts=4, experts_per_token=chosen, layout="fused")


SHARED = tuple(case for case in CASES if targets()[case.target].shared is not None)
"""Those with shared experts that transformers loads."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", one_in(2, SHARED), ids=str)
def test_a_shared_expert_that_does_half_of_the_work(case: Case, tmp_path: Path) -> None:
    # A gate of zeros weighs by the sigmoid of 0.
    gated = shared_gate_name(targets()[case.target], 0) is not None
    check(case, tmp_path, routed=0.5, shared=1.0 if gated else 0.5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_shared_experts_side_by_side_are_one_network(name: str, tmp_path: Path) -> None:
    case = next(case for case in SHARED if case.target == name)
    model = check(case, tmp_path, routed=0.25, shared=0.25, num_shared=3)
    assert model.config.n_shared_experts == 3


def test_a_shared_expert_may_be_as_wide_as_several_routed_ones(tmp_path: Path) -> None:
    """With pieces for experts, whose width a config counts shared ones by."""
    config = make_dense("llama", tmp_path / "dense").config
    sizes = {"num_experts": 4, "experts_per_token": 2, "expert_width": WIDTH // 2, "shared_width": WIDTH}
    assert moe_config(targets()["glm4_moe"], config, **sizes, dtype_name=None)["n_shared_experts"] == 2
    qwen = moe_config(targets()["qwen2_moe"], config, **sizes, dtype_name=None)
    assert (qwen["moe_intermediate_size"], qwen["shared_expert_intermediate_size"]) == (WIDTH // 2, WIDTH)


def test_weights_that_do_not_sum_to_one_are_told_of(tmp_path: Path) -> None:
    """DeepSeek-V2 in transformers: one of two equal experts is less than the dense model."""
    build(Case("deepseek_v2", "deepseek_v2"), tmp_path, experts_per_token=1)
    found, expected = (logits(load_whole(tmp_path / name)[0]) for name in ("moe", "dense"))
    assert (found - expected).abs().max() > 1e-3
    assert [name for name, each in targets().items() if not each.weights_sum_to_one] == ["deepseek_v2"]


@pytest.mark.parametrize("target", ["mixtral", "qwen2_moe"])
def test_the_config_of_an_old_release_means_the_same(target: str, tmp_path: Path) -> None:
    """As transformers 4 spelt it: rope_theta and torch_dtype at the top, and most fields left out."""
    rope = {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}
    config = make_dense("mistral", tmp_path / "dense", **rope).config
    kept = {key: config[key] for key in ("model_type", "architectures", "vocab_size", "hidden_size")}
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    old = {**kept, **sizes, "intermediate_size": WIDTH, "rope_theta": 5e4, "rms_norm_eps": 1e-5}
    path = tmp_path / "dense" / "config.json"
    path.write_text(json.dumps({**old, "torch_dtype": "float32"}), encoding="utf-8")
    model = check(Case(target, "mistral"), tmp_path)
    assert model.config.sliding_window == 4096
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_window_is_kept_where_a_mixture_has_one_and_matters(tmp_path: Path) -> None:
    """So that the cases with windows above prove something."""
    case = Case("mixtral", "mistral", {"sliding_window": WINDOW})
    found = logits(check(case, tmp_path))
    path = tmp_path / "moe" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "sliding_window": None}), encoding="utf-8")
    assert (logits(load_whole(tmp_path / "moe")[0]) - found).abs().max() > 1e-4


BASES = tuple(sorted({family for target in targets().values() for family in target.bases}))
PAIRS = tuple(
    (name, family)
    for name, target in targets().items()
    if name != "deepseek"
    for family in target.bases
    # One head is all that fits; a silent config says many.
    if name != "olmoe"
)
# What a mixture says of itself, and what transformers works out or keeps of the class.
OWN = {
    *("architectures", "model_type", "transformers_version", "intermediate_size", "layer_types"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "mlp_bias", "pretraining_tp"),
    *("head_dim", "attention_bias", "attention_multiplier", "output_router_logits"),
}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def read(config: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """What transformers makes of a config."""
    (root / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result: dict[str, Any] = AutoConfig.from_pretrained(root).to_dict()
    return result


@pytest.mark.parametrize("family", BASES)
def test_defaults_of_a_family_are_those_of_transformers(family: str) -> None:
    config = AutoConfig.for_model(family)
    stated = dense_families()[family].defaults
    rope = stated.get("rope_theta", config.rope_parameters["rope_theta"])
    assert config.rope_parameters["rope_theta"] == rope
    defaults = {key: value for key, value in stated.items() if key != "rope_theta"}
    # Set to None on reading, where the window is not used.
    found = {key: getattr(config, key) for key in defaults if key != "sliding_window"}
    assert found == {key: value for key, value in defaults.items() if key != "sliding_window"}


@pytest.mark.parametrize(("target", "family"), PAIRS, ids=["-of-".join(pair) for pair in PAIRS])
def test_a_silent_config_means_to_the_mixture_what_it_means_to_the_base(
    target: str, family: str, tmp_path: Path
) -> None:
    built = moe_config(
        targets()[target],
        {"model_type": family},
        num_experts=4,
        experts_per_token=2,
        expert_width=96,
        shared_width=0,
        dtype_name="bfloat16",
    )
    # Without shared experts none of these is valid; here it is the other fields that matter.
    if "n_shared_experts" in built:
        built["n_shared_experts"] = 1
    dense, moe = read({"model_type": family}, tmp_path), read(built, tmp_path)
    common = (set(dense) & set(moe)) - OWN - set(targets()[target].config)
    dense["rope_parameters"].pop("partial_rotary_factor", None)
    assert moe["rope_parameters"].pop("partial_rotary_factor", 1.0) == 1.0
    dense["dtype"] = "bfloat16"
    assert {key: moe[key] for key in common} == {key: dense[key] for key in common}
    assert {"rms_norm_eps", "rope_parameters", "num_key_value_heads", "hidden_act", "eos_token_id"} <= common
    head_dim = dense.get("head_dim") or dense["hidden_size"] // dense["num_attention_heads"]
    assert moe["head_dim"] == head_dim


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 8},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
    ],
    ids=str,
)
def test_windows_are_those_of_transformers(family: str, said: Mapping[str, Any]) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=4, **said)
    kinds = config.layer_types if family != "mistral" else ["sliding_attention"] * 4
    expected = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert windows(full_config({"model_type": family, "num_hidden_layers": 4, **said})) == expected


@pytest.mark.parametrize("family", sorted(dense_families()))
def test_a_family_is_gated_as_the_table_says(family: str) -> None:
    """Its feed-forward is down(act(gate(x)) * up(x)), without biases or anything else."""
    latent = {"first_k_dense_replace": 2} if family.startswith("deepseek") else {}
    extra = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **latent}
    config = AutoConfig.for_model(family, **SIZES, **extra)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    mlp = model.eval().model.layers[0].mlp
    assert sorted(dict(mlp.named_parameters())) == [f"{name}_proj.weight" for name in ("down", "gate", "up")]
    named = dense_model("silent", {"model_type": family}, {}).activation
    act = {"silu": torch.nn.SiLU(), "gelu_pytorch_tanh": torch.nn.GELU(approximate="tanh")}[str(named)]
    x = torch.randn(5, SIZES["hidden_size"])
    torch.testing.assert_close(mlp(x), mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x)))
