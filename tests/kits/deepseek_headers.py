"""Tensors of DeepSeek-V3 and of models that are built like it, and headers of the true size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kits.checkpoint_maker import TOKENIZER_FILES, fields, sparse_checkpoint

from raymerge.checkpoints.header import TensorSpec, split_into_shards
from raymerge.dtypes import DType

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_UNQUANTISED: Mapping[str, Any] = fields(
    "architectures: [DeepseekV3ForCausalLM], model_type: deepseek_v3, num_hidden_layers: 61, "
    "num_nextn_predict_layers: 1, first_k_dense_replace: 3, hidden_size: 7168, "
    "intermediate_size: 18432, moe_intermediate_size: 2048, n_routed_experts: 256, "
    "n_shared_experts: 1, num_attention_heads: 128, num_key_value_heads: 128, q_lora_rank: 1536, "
    "kv_lora_rank: 512, qk_rope_head_dim: 64, qk_nope_head_dim: 128, v_head_dim: 128, "
    "vocab_size: 129280, tie_word_embeddings: false, torch_dtype: bfloat16"
)


def deepseek_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, vocab, num_layers = (config[f] for f in ("hidden_size", "vocab_size", "num_hidden_layers"))
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(num_layers + config["num_nextn_predict_layers"]):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
        yield from _latent_attention(f"{block}.self_attn", config)
        yield from _feed_forward(f"{block}.mlp", config, is_dense=layer < config["first_k_dense_replace"])
        if layer >= num_layers:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{block}.{name}.weight", (hidden,)
            yield f"{block}.eh_proj.weight", (hidden, 2 * hidden)
            for name in ("embed_tokens", "shared_head.head"):
                yield f"{block}.{name}.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _latent_attention(block: str, config: Mapping[str, Any]) -> Shapes:
    hidden, heads, turned = (config[f] for f in ("hidden_size", "num_attention_heads", "qk_rope_head_dim"))
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    straight, values = config["qk_nope_head_dim"], config["v_head_dim"]
    yield f"{block}.q_a_layernorm.weight", (queries,)
    yield f"{block}.kv_a_layernorm.weight", (keys,)
    yield f"{block}.q_a_proj.weight", (queries, hidden)
    yield f"{block}.q_b_proj.weight", (heads * (straight + turned), queries)
    yield f"{block}.kv_a_proj_with_mqa.weight", (keys + turned, hidden)
    yield f"{block}.kv_b_proj.weight", (heads * (straight + values), keys)
    yield f"{block}.o_proj.weight", (hidden, heads * values)


def _feed_forward(block: str, config: Mapping[str, Any], *, is_dense: bool) -> Shapes:
    hidden, num_experts = config["hidden_size"], config["n_routed_experts"]
    if is_dense:
        yield from _mlp(block, hidden, config["intermediate_size"])
        return
    yield f"{block}.gate.weight", (num_experts, hidden)
    yield f"{block}.gate.e_score_correction_bias", (num_experts,)
    for name in ("shared_experts", *(f"experts.{number}" for number in range(num_experts))):
        yield from _mlp(f"{block}.{name}", hidden, config["moe_intermediate_size"])


def _mlp(block: str, hidden: int, width: int) -> Shapes:
    yield f"{block}.gate_proj.weight", (width, hidden)
    yield f"{block}.up_proj.weight", (width, hidden)
    yield f"{block}.down_proj.weight", (hidden, width)


def is_fp8(name: str) -> bool:
    """Whether DeepSeek-V3 is published with this tensor as codes."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name


def _plain(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, DType.F32 if name.endswith("correction_bias") else DType.BF16, shape)


# DeepSeek-V3, in blocks of FP8

V3_NUM_TENSORS = 91_991
V3_NBYTES = 688_574_839_360
V3_NUM_FILES = 163
V3_CONFIG: Mapping[str, Any] = {
    **_UNQUANTISED,
    "quantization_config": fields(
        "activation_scheme: dynamic, fmt: e4m3, quant_method: fp8, weight_block_size: [128, 128]"
    ),
}


def deepseek_v3_names() -> tuple[str, ...]:
    return tuple(
        f"model-{number:05d}-of-{V3_NUM_FILES:06d}.safetensors" for number in range(1, V3_NUM_FILES + 1)
    )


def deepseek_v3_specs(config: Mapping[str, Any] = V3_CONFIG) -> list[list[TensorSpec]]:
    """Tensors by file; of a model with fewer layers as much in a file as the whole one has."""
    specs = [spec for name, shape in deepseek_shapes(config) for spec in _fp8_or_plain(name, shape)]
    share = V3_NBYTES / V3_NUM_FILES
    num_files = max(1, round(sum(spec.nbytes for spec in specs) / share))
    files: list[list[TensorSpec]] = [[] for _ in range(num_files)]
    before = 0
    for spec in specs:
        files[min(int(before / share), num_files - 1)].append(spec)
        before += spec.nbytes
    return files


def _fp8_or_plain(name: str, shape: tuple[int, ...]) -> Iterator[TensorSpec]:
    if not is_fp8(name):
        yield _plain(name, shape)
        return
    yield TensorSpec(name, DType.F8_E4M3, shape)
    yield TensorSpec(f"{name}_scale_inv", DType.F32, tuple(-(-size // 128) for size in shape))


# Kimi-K2-Thinking, whose experts are integers of four bits

_KIMI_LAYERS, _KIMI_EXPERTS = 61, 384
KIMI_TABLE: Mapping[str, Any] = {
    "config_groups": fields(
        "group_0: {input_activations: null, output_activations: null, targets: [Linear], "
        "weights: {actorder: null, block_structure: null, dynamic: false, group_size: 32, num_bits: 4, "
        "observer: minmax, observer_kwargs: {}, strategy: group, symmetric: true, type: int}}"
    ),
    "format": "pack-quantized",
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
KIMI_NUM_TENSORS = 3 + _KIMI_LAYERS * 9 + 3 + (_KIMI_LAYERS - 1) * (2 + 3 + 3 * 3 * _KIMI_EXPERTS)
KIMI_CONFIG: Mapping[str, Any] = {
    **_UNQUANTISED,
    "model_type": "kimi_k2",
    "num_hidden_layers": _KIMI_LAYERS,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "n_routed_experts": _KIMI_EXPERTS,
    "num_attention_heads": 64,
    "vocab_size": 163_840,
    "quantization_config": KIMI_TABLE,
}


def kimi_k2_thinking_specs() -> list[list[TensorSpec]]:
    """A file for each layer, and one for what is in none."""
    files: list[list[TensorSpec]] = [[] for _ in range(_KIMI_LAYERS + 1)]
    for name, shape in deepseek_shapes(KIMI_CONFIG):
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else _KIMI_LAYERS
        files[layer] += int4_or_plain(name, shape)
    return files


def int4_or_plain(name: str, shape: tuple[int, ...]) -> Iterator[TensorSpec]:
    if ".experts." not in name:
        yield _plain(name, shape)
        return
    rows, columns = shape
    yield TensorSpec(f"{name}_packed", DType.I32, (rows, columns // 8))
    yield TensorSpec(f"{name}_scale", DType.BF16, (rows, columns // 32))
    yield TensorSpec(f"{name}_shape", DType.I32, (2,))


# The largest mixtures of experts that are published, not quantised


@dataclass(frozen=True, slots=True)
class HugeSize:
    layers: int = 61
    experts: int = 768
    width: int = 1024

    @property
    def config(self) -> Mapping[str, Any]:
        return {
            **_UNQUANTISED,
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": self.width,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 163_840,
        }


def huge_checkpoint(root: Path, size: HugeSize) -> Path:
    sparse_checkpoint(root, split_into_shards(list(huge_tensors(size)), 20 << 30), size.config)
    for name, text in TOKENIZER_FILES.items():
        (root / name).write_text(text)
    return root


def huge_tensors(size: HugeSize) -> Iterator[TensorSpec]:
    return (_plain(name, shape) for name, shape in deepseek_shapes(size.config))
