"""Headers of the true size of Kimi-K3: experts one by one in MXFP4, as compressed-tensors packs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kits.checkpoint_maker import fields

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType

K3_NUM_LAYERS, K3_NUM_EXPERTS = 93, 896
_HIDDEN, _VOCAB, _INNER = 7168, 163_840, 64 * 128
# The width with which the published number of bytes comes out: 1.56 TB, 96.5 % of them of experts.
_WIDTH, _DENSE_WIDTH = 1600, 18_432
_LATENT, _ROPE, _HEAD = 512, 64, 128
_EVERY = 4
"""Of so many layers one has latent attention: the last of them, and the last of all."""
_FULL = [n for n in range(1, K3_NUM_LAYERS + 1) if n % _EVERY == 0 or n == K3_NUM_LAYERS]
_KDA = [n for n in range(1, K3_NUM_LAYERS + 1) if n not in _FULL]

K3_NBYTES = 1_560_427_190_784
K3_NUM_EXPERT_TENSORS = (K3_NUM_LAYERS - 1) * K3_NUM_EXPERTS * 3 * 2
K3_CONFIG: Mapping[str, Any] = {
    **fields(
        "architectures: [KimiLinearForCausalLM], model_type: kimi_linear, first_k_dense_replace: 1, "
        "num_experts_per_token: 8, num_shared_experts: 1, num_attention_heads: 64, num_key_value_heads: 64, "
        "tie_word_embeddings: false, torch_dtype: bfloat16"
    ),
    "hidden_size": _HIDDEN,
    "vocab_size": _VOCAB,
    "num_hidden_layers": K3_NUM_LAYERS,
    "num_experts": K3_NUM_EXPERTS,
    "moe_intermediate_size": _WIDTH,
    "intermediate_size": _DENSE_WIDTH,
    "kv_lora_rank": _LATENT,
    "qk_rope_head_dim": _ROPE,
    "qk_nope_head_dim": _HEAD,
    "v_head_dim": _HEAD,
    "linear_attn_config": {"kda_layers": _KDA, "full_attn_layers": _FULL, "num_heads": 64, "head_dim": _HEAD},
    "quantization_config": {
        "config_groups": fields(
            "group_0: {targets: [Linear], input_activations: null, output_activations: null, "
            "weights: {num_bits: 4, type: float, strategy: group, group_size: 32, symmetric: true, "
            "dynamic: false}}"
        ),
        "format": "mxfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\..*"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}


def kimi_k3_specs(num_experts: int = K3_NUM_EXPERTS) -> list[list[TensorSpec]]:
    """A file for each layer, and three for what is in none."""
    layers = [list(_layer(number, num_experts)) for number in range(K3_NUM_LAYERS)]
    ends = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN), "lm_head.weight": (_VOCAB, _HIDDEN)}
    return [*layers, *([_plain(*each)] for each in ends.items()), [_plain("model.norm.weight", (_HIDDEN,))]]


def _layer(number: int, num_experts: int) -> Iterator[TensorSpec]:
    block = f"model.layers.{number}"
    yield _plain(f"{block}.input_layernorm.weight", (_HIDDEN,))
    yield _plain(f"{block}.post_attention_layernorm.weight", (_HIDDEN,))
    attention = _latent_attention if number + 1 in _FULL else _linear_attention
    yield from attention(f"{block}.self_attn")
    if not number:
        yield from _mlp(f"{block}.mlp", ("gate_proj", "up_proj", "down_proj"), _DENSE_WIDTH)
        return
    moe = f"{block}.block_sparse_moe"
    yield _plain(f"{moe}.gate.weight", (num_experts, _HIDDEN))
    yield TensorSpec(f"{moe}.gate.e_score_correction_bias", DType.F32, (num_experts,))
    yield from _mlp(f"{moe}.shared_experts", ("gate_proj", "up_proj", "down_proj"), _WIDTH)
    for expert in range(num_experts):
        for spec in _mlp(f"{moe}.experts.{expert}", ("w1", "w3", "w2"), _WIDTH):
            rows, columns = spec.shape
            yield TensorSpec(f"{spec.name}_packed", DType.U8, (rows, columns // 2))
            yield TensorSpec(f"{spec.name}_scale", DType.U8, (rows, columns // 32))


def _mlp(block: str, words: tuple[str, str, str], width: int) -> Iterator[TensorSpec]:
    gate, up, down = words
    yield _plain(f"{block}.{gate}.weight", (width, _HIDDEN))
    yield _plain(f"{block}.{up}.weight", (width, _HIDDEN))
    yield _plain(f"{block}.{down}.weight", (_HIDDEN, width))


def _linear_attention(block: str) -> Iterator[TensorSpec]:
    """Kimi Delta Attention, with its F32 tensors."""
    for name in "qkv":
        yield _plain(f"{block}.{name}_proj.weight", (_INNER, _HIDDEN))
        yield TensorSpec(f"{block}.{name}_conv1d.weight", DType.F32, (_INNER, 1, 4))
    for name in "fg":
        yield _plain(f"{block}.{name}_a_proj.weight", (_HEAD, _HIDDEN))
        yield _plain(f"{block}.{name}_b_proj.weight", (_INNER, _HEAD))
    yield _plain(f"{block}.b_proj.weight", (64, _HIDDEN))
    yield TensorSpec(f"{block}.A_log", DType.F32, (1, 1, 64, 1))
    yield TensorSpec(f"{block}.dt_bias", DType.F32, (_INNER,))
    yield _plain(f"{block}.o_norm.weight", (_HEAD,))
    yield _plain(f"{block}.o_proj.weight", (_HIDDEN, _INNER))


def _latent_attention(block: str) -> Iterator[TensorSpec]:
    yield _plain(f"{block}.q_proj.weight", (64 * (_HEAD + _ROPE), _HIDDEN))
    yield _plain(f"{block}.kv_a_proj_with_mqa.weight", (_LATENT + _ROPE, _HIDDEN))
    yield _plain(f"{block}.kv_a_layernorm.weight", (_LATENT,))
    yield _plain(f"{block}.kv_b_proj.weight", (64 * 2 * _HEAD, _LATENT))
    yield _plain(f"{block}.o_proj.weight", (_HIDDEN, _INNER))


def _plain(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, DType.BF16, shape)
