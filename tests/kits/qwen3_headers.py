"""Headers of the true size of Qwen3-235B-A22B, which is published in bfloat16, each expert by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kits.checkpoint_maker import fields

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType

QWEN3_NUM_TENSORS, QWEN3_NBYTES = 36_945, 470_187_269_120
"""Tensors of the published model, and bytes of their data."""
QWEN3_CONFIG: Mapping[str, Any] = fields(
    "architectures: [Qwen3MoeForCausalLM], model_type: qwen3_moe, hidden_size: 4096, "
    "num_hidden_layers: 94, num_attention_heads: 64, num_key_value_heads: 4, head_dim: 128, "
    "intermediate_size: 12288, moe_intermediate_size: 1536, num_experts: 128, num_experts_per_tok: 8, "
    "decoder_sparse_step: 1, mlp_only_layers: [], norm_topk_prob: true, tie_word_embeddings: false, "
    "torch_dtype: bfloat16, vocab_size: 151936"
)


def qwen3_235b_specs(config: Mapping[str, Any] = QWEN3_CONFIG) -> list[TensorSpec]:
    shapes = {"model.embed_tokens": (151936, 4096), "model.norm": (4096,), "lm_head": (151936, 4096)}
    for block in (f"model.layers.{layer}" for layer in range(config["num_hidden_layers"])):
        shapes |= {f"{block}.{name}_layernorm": (4096,) for name in ("input", "post_attention")}
        shapes |= {f"{block}.self_attn.{name}_norm": (128,) for name in "qk"}
        shapes |= {f"{block}.self_attn.{name}_proj": (512, 4096) for name in "kv"}
        shapes |= {f"{block}.self_attn.q_proj": (8192, 4096), f"{block}.self_attn.o_proj": (4096, 8192)}
        shapes[f"{block}.mlp.gate"] = (128, 4096)
        for expert in (f"{block}.mlp.experts.{number}" for number in range(128)):
            shapes |= {f"{expert}.{name}_proj": (1536, 4096) for name in ("gate", "up")}
            shapes[f"{expert}.down_proj"] = (4096, 1536)
    return [TensorSpec(f"{name}.weight", DType.BF16, shape) for name, shape in shapes.items()]
