"""What silent configs of dense families mean, and that mixtures are told so, as transformers has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raymerge.architectures.moe_targets import (
    dense_families,
    dense_model,
    full_config,
    moe_config,
    targets,
    windows,
)

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
    "architectures",
    "model_type",
    "transformers_version",
    "intermediate_size",
    "layer_types",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
    "mlp_bias",
    "pretraining_tp",
    "head_dim",
    "attention_bias",
    "attention_multiplier",
    "output_router_logits",
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


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
