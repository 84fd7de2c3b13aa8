"""What experts compute where their config says nothing: as transformers takes it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from raymerge.architectures.expert_fields import ExpertMeaning, expert_meaning

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
