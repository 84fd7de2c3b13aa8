"""The largest mixtures of experts that are published, as far as headers go: the data is one hole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kits.checkpoint_maker import TOKENIZER_FILES, sparse_checkpoint

from raymerge.checkpoints.header import TensorSpec, shard_names, split_into_shards
from raymerge.dtypes import DType

_HIDDEN, _VOCAB, _FILE_NBYTES = 7168, 163_840, 20 << 30


@dataclass(frozen=True, slots=True)
class HugeSize:
    layers: int = 61
    experts: int = 768
    width: int = 1024

    @property
    def config(self) -> Mapping[str, Any]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 1,
            "hidden_size": _HIDDEN,
            "intermediate_size": 18432,
            "moe_intermediate_size": self.width,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": _VOCAB,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


def huge_checkpoint(root: Path, size: HugeSize) -> Path:
    files = split_into_shards(list(huge_tensors(size)), _FILE_NBYTES)
    sparse_checkpoint(root, files, size.config, names=shard_names(len(files)))
    for name, text in TOKENIZER_FILES.items():
        (root / name).write_text(text)
    return root


def huge_tensors(size: HugeSize) -> Iterator[TensorSpec]:
    yield _weight("model.embed_tokens", _VOCAB, _HIDDEN)
    for layer in range(size.layers + 1):
        yield from _layer(f"model.layers.{layer}", size, is_dense=layer < 1)
    yield from _prediction(f"model.layers.{size.layers}")
    yield _weight("model.norm", _HIDDEN)
    yield _weight("lm_head", _VOCAB, _HIDDEN)


def _prediction(block: str) -> Iterator[TensorSpec]:
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield _weight(f"{block}.{name}", _HIDDEN)
    yield _weight(f"{block}.eh_proj", _HIDDEN, 2 * _HIDDEN)
    for name in ("embed_tokens", "shared_head.head"):
        yield _weight(f"{block}.{name}", _VOCAB, _HIDDEN)


def _layer(block: str, size: HugeSize, *, is_dense: bool) -> Iterator[TensorSpec]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _weight(f"{block}.{name}", _HIDDEN)
    yield _weight(f"{block}.self_attn.q_a_layernorm", 1536)
    yield _weight(f"{block}.self_attn.kv_a_layernorm", 512)
    yield _weight(f"{block}.self_attn.q_a_proj", 1536, _HIDDEN)
    yield _weight(f"{block}.self_attn.q_b_proj", 64 * 192, 1536)
    yield _weight(f"{block}.self_attn.kv_a_proj_with_mqa", 576, _HIDDEN)
    yield _weight(f"{block}.self_attn.kv_b_proj", 64 * 256, 512)
    yield _weight(f"{block}.self_attn.o_proj", _HIDDEN, 64 * 128)
    if is_dense:
        yield from _mlp(f"{block}.mlp", 18432)
        return
    yield _weight(f"{block}.mlp.gate", size.experts, _HIDDEN)
    yield TensorSpec(f"{block}.mlp.gate.e_score_correction_bias", DType.F32, (size.experts,))
    yield from _mlp(f"{block}.mlp.shared_experts", size.width)
    for expert in range(size.experts):
        yield from _mlp(f"{block}.mlp.experts.{expert}", size.width)


def _mlp(block: str, width: int) -> Iterator[TensorSpec]:
    yield _weight(f"{block}.gate_proj", width, _HIDDEN)
    yield _weight(f"{block}.up_proj", width, _HIDDEN)
    yield _weight(f"{block}.down_proj", _HIDDEN, width)


def _weight(module: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"{module}.weight", DType.BF16, shape)
