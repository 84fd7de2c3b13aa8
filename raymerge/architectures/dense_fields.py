"""Dense families that a mixture of experts becomes one of, when its experts become one feed-forward network.

Everything but the feed-forward layers has to be the same in both families, tensor for tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_ONLY_EXPERTS = frozenset(
    {
        *("num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"),
        *("mlp_only_layers", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        *("qkv_bias", "auto_map"),
    }
)
# Fields that a dense model has no use for. Code that comes with a checkpoint is for its experts.


@dataclass(frozen=True, slots=True)
class DenseCounterpart:
    """A dense family with the attention, norms and embeddings of a mixture of experts."""

    model_type: str
    """What its config calls it."""
    architecture: str
    """Its class with a language-model head."""
    meant: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the experts' family means by a silent config where the dense family means something else."""
    rope_theta: float = 10_000.0
    """The experts' family's base of rotary embeddings where its config is silent."""
    has_own_width: bool = False
    """Whether heads are of a fixed width where its config is silent, and not what the hidden size leaves."""


_COUNTERPARTS: Mapping[str, DenseCounterpart] = MappingProxyType(
    {
        "mixtral": DenseCounterpart(
            "mistral",
            "MistralForCausalLM",
            MappingProxyType({"sliding_window": None, "rms_norm_eps": 1e-5}),
            rope_theta=1_000_000.0,
        ),
        "qwen2_moe": DenseCounterpart(
            "qwen2",
            "Qwen2ForCausalLM",
            MappingProxyType(
                {
                    "hidden_size": 2048,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 16,
                }
            ),
        ),
        "qwen3_moe": DenseCounterpart(
            "qwen3",
            "Qwen3ForCausalLM",
            MappingProxyType({"hidden_size": 2048, "num_hidden_layers": 24, "num_key_value_heads": 4}),
            has_own_width=True,
        ),
        "granitemoe": DenseCounterpart(
            "granite", "GraniteForCausalLM", MappingProxyType({"num_key_value_heads": None})
        ),
        "flex_olmo": DenseCounterpart(
            "olmo2",
            "Olmo2ForCausalLM",
            MappingProxyType(
                {
                    "vocab_size": 100352,
                    "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-6,
                    "pad_token_id": 100277,
                    "eos_token_id": 100257,
                }
            ),
            rope_theta=500_000.0,
        ),
    }
)


def dense_counterpart(config: Mapping[str, Any]) -> DenseCounterpart | None:
    """The dense family that a mixture of experts can become one of, or None."""
    return _COUNTERPARTS.get(str(config.get("model_type")))


def families_with_dense() -> tuple[str, ...]:
    """Model types that ``dense_counterpart`` has an answer for."""
    return tuple(_COUNTERPARTS)


def dense_objections(config: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what the dense family cannot express of this config."""
    if config.get("use_sliding_window") and not config.get("layer_types"):
        yield (
            "use_sliding_window is true without layer_types, "
            "and the dense family gives windows to other layers."
        )
    if config.get("qkv_bias") is False:
        yield "qkv_bias is false, and the dense family has these biases."


def dense_config(config: Mapping[str, Any], family: DenseCounterpart, *, width: int) -> dict[str, Any]:
    """The complete config of the dense model.

    Args:
        config: that of the mixture of experts.
        family: what it becomes.
        width: rows of the gate projection of every layer.
    """
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in _ONLY_EXPERTS}
    for key, value in family.meant.items():
        result.setdefault(key, value)
    if "rope_theta" not in result and not result.get("rope_parameters"):
        result["rope_theta"] = family.rope_theta
    if family.has_own_width and result.get("head_dim") is None:
        result["head_dim"] = result["hidden_size"] // result.get("num_attention_heads", 32)
    result["architectures"] = [family.architecture]
    result["model_type"] = family.model_type
    result["intermediate_size"] = width
    return result
