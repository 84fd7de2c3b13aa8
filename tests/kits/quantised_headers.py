"""Headers of the true size, of models that are published quantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kits.checkpoint_maker import V3_CONFIG
from kits.quantised_models import KIMI_TABLE

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType

_LAYERS, _EXPERTS, _HIDDEN, _WIDTH, _VOCAB, _HEADS, _FILES = 61, 384, 7168, 2048, 163_840, 64, 62

KIMI_NUM_TENSORS = 3 + _LAYERS * 9 + 3 + (_LAYERS - 1) * (2 + 3 + 3 * 3 * _EXPERTS)
KIMI_CONFIG: Mapping[str, Any] = {
    **V3_CONFIG,
    "model_type": "kimi_k2",
    "num_hidden_layers": _LAYERS,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "n_routed_experts": _EXPERTS,
    "num_attention_heads": _HEADS,
    "vocab_size": _VOCAB,
    "quantization_config": KIMI_TABLE,
}


def kimi_k2_thinking_specs() -> list[list[TensorSpec]]:
    files = [list(_layer(f"model.layers.{layer}", dense=layer == 0)) for layer in range(_LAYERS)]
    rest = {
        "model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCAB, _HIDDEN),
    }
    return [*files, [_plain(name, *shape) for name, shape in rest.items()]]


def _layer(block: str, *, dense: bool) -> Iterator[TensorSpec]:
    yield _plain(f"{block}.input_layernorm.weight", _HIDDEN)
    yield _plain(f"{block}.post_attention_layernorm.weight", _HIDDEN)
    attention = {
        "q_a_proj": (1536, _HIDDEN),
        "q_a_layernorm": (1536,),
        "q_b_proj": (_HEADS * 192, 1536),
        "kv_a_proj_with_mqa": (576, _HIDDEN),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (_HEADS * 256, 512),
        "o_proj": (_HIDDEN, _HEADS * 128),
    }
    for name, shape in attention.items():
        yield _plain(f"{block}.self_attn.{name}.weight", *shape)
    if dense:
        for name, shape in _mlp(18432).items():
            yield _plain(f"{block}.mlp.{name}.weight", *shape)
        return
    yield _plain(f"{block}.mlp.gate.weight", _EXPERTS, _HIDDEN)
    yield TensorSpec(f"{block}.mlp.gate.e_score_correction_bias", DType.F32, (_EXPERTS,))
    for name, shape in _mlp(_WIDTH).items():
        yield _plain(f"{block}.mlp.shared_experts.{name}.weight", *shape)
    for expert in range(_EXPERTS):
        for name, (rows, columns) in _mlp(_WIDTH).items():
            yield from _int4(f"{block}.mlp.experts.{expert}.{name}", rows, columns)


def _mlp(width: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, _HIDDEN), "up_proj": (width, _HIDDEN), "down_proj": (_HIDDEN, width)}


def _plain(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, DType.BF16, shape)


def _int4(module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{module}.weight_packed", DType.I32, (rows, columns // 8))
    yield TensorSpec(f"{module}.weight_scale", DType.BF16, (rows, columns // 32))
    yield TensorSpec(f"{module}.weight_shape", DType.I32, (2,))
