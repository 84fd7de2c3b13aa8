"""Tensors of DeepSeek-V4 and V4.1 by the names on the Hub, and headers of V4-Flash in its true size."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from kits.checkpoint_maker import fields, sparse_checkpoint

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Experts = Literal["fp4", "fp8", "bf16"]

FLASH_NUM_TENSORS = 69_187
"""As published."""
FLASH_CONFIG: Mapping[str, Any] = {
    **fields(
        "architectures: [DeepseekV4ForCausalLM], model_type: deepseek_v4, num_hidden_layers: 43, "
        "hidden_size: 4096, moe_intermediate_size: 2048, n_routed_experts: 256, num_experts_per_tok: 6, "
        "n_shared_experts: 1, num_attention_heads: 64, num_key_value_heads: 1, head_dim: 512, "
        "q_lora_rank: 1024, o_lora_rank: 1024, o_groups: 8, qk_rope_head_dim: 64, index_n_heads: 64, "
        "index_head_dim: 128, index_topk: 512, hc_mult: 4, num_hash_layers: 3, num_nextn_predict_layers: 1, "
        "vocab_size: 129280, scoring_func: sqrtsoftplus, topk_method: noaux_tc, norm_topk_prob: true, "
        "routed_scaling_factor: 1.5, tie_word_embeddings: false, sliding_window: 128, torch_dtype: bfloat16, "
        "expert_dtype: fp4"
    ),
    "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0],
    "quantization_config": fields(
        "activation_scheme: dynamic, fmt: e4m3, quant_method: fp8, scale_fmt: ue8m0, "
        "weight_block_size: [128, 128]"
    ),
}


_SMALL = fields(
    "num_hidden_layers: 3, hidden_size: 256, moe_intermediate_size: 128, n_routed_experts: 4, "
    "num_experts_per_tok: 2, num_attention_heads: 4, head_dim: 64, q_lora_rank: 128, o_lora_rank: 64, "
    "o_groups: 2, index_n_heads: 2, index_head_dim: 64, hc_mult: 2, vocab_size: 64"
)
SMALL_CONFIG: Mapping[str, Any] = {
    **FLASH_CONFIG,
    **_SMALL,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],
}
_OF_TEXT = {key: value for key, value in FLASH_CONFIG.items() if key not in ("architectures", "expert_dtype")}
V41_CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "text_config": {
        **{key: _OF_TEXT[key] for key in _OF_TEXT if key not in ("quantization_config", "num_hash_layers")},
        **_SMALL,
        **fields(
            "model_type: deepseek_v41_text, num_nextn_predict_layers: 2, compress_ratios: [0, 2, 1, 0, 0], "
            "dspark_n_routed_experts: 2, dspark_num_experts_per_tok: 1, dspark_target_layer_ids: [1, 2], "
            "kv_source_layer_ids: [1], index_source_layer_ids: [1, 2], candidate_source_layer_id: 1, "
            "engram_layer_ids: [1], engram_num_embeddings: [96], engram_head_dim: 64"
        ),
    },
    "vision_config": fields("model_type: deepseek_v41_vision, hidden_size: 64, num_hidden_layers: 2"),
    "quantization_config": fields(
        "activation_scheme: dynamic, quant_method: fp8, scale_fmt: ue8m0, weight_block_size: [32, 32], "
        "expert_dtype: fp4"
    ),
}
"""Dense matrices have smaller blocks, layers that predict further tokens have fewer experts, and few layers
have keys and values of their own."""


def v4_shapes(config: Mapping[str, Any]) -> Shapes:
    """Of V4, or of V4.1, whose config has a section for text."""
    text = config.get("text_config", config)
    hidden, vocab, mixed = text["hidden_size"], text["vocab_size"], text["hc_mult"]
    yield "embed.weight", (vocab, hidden)
    for layer in range(text["num_hidden_layers"]):
        block = f"layers.{layer}"
        yield from _block(block, text, text["n_routed_experts"])
        yield from (_source_layer if "text_config" in config else _compressed_layer)(block, layer, text)
        yield from _gate(f"{block}.ffn.gate", layer, text)
        yield from _engram(f"{block}.engram", layer, text)
    for layer in range(text["num_nextn_predict_layers"]):
        block = f"mtp.{layer}"
        yield from _block(block, text, text.get("dspark_n_routed_experts", text["n_routed_experts"]))
        yield f"{block}.ffn.gate.bias", (text.get("dspark_n_routed_experts", text["n_routed_experts"]),)
        yield from _prediction(block, layer, text)
    yield "norm.weight", (hidden,)
    yield from _head_mix("", hidden, mixed)
    yield "head.weight", (vocab, hidden)
    yield from _sight(config, hidden)


def _block(block: str, text: Mapping[str, Any], num_experts: int) -> Shapes:
    hidden, width, mixed = text["hidden_size"], text["moe_intermediate_size"], text["hc_mult"]
    heads, head = text["num_attention_heads"], text["head_dim"]
    queries, groups, rank = text["q_lora_rank"], text["o_groups"], text["o_lora_rank"]
    for part in ("attn", "ffn"):
        yield f"{block}.{part}_norm.weight", (hidden,)
        yield f"{block}.hc_{part}_fn", ((2 + mixed) * mixed, mixed * hidden)
        yield f"{block}.hc_{part}_base", ((2 + mixed) * mixed,)
        yield f"{block}.hc_{part}_scale", (3,)
    yield f"{block}.attn.wq_a.weight", (queries, hidden)
    yield f"{block}.attn.q_norm.weight", (queries,)
    yield f"{block}.attn.wq_b.weight", (heads * head, queries)
    yield f"{block}.attn.wkv.weight", (head, hidden)
    yield f"{block}.attn.kv_norm.weight", (head,)
    yield f"{block}.attn.wo_a.weight", (groups * rank, heads * head // groups)
    yield f"{block}.attn.wo_b.weight", (hidden, groups * rank)
    yield f"{block}.attn.attn_sink", (heads,)
    yield f"{block}.ffn.gate.weight", (num_experts, hidden)
    for name in ("shared_experts", *(f"experts.{number}" for number in range(num_experts))):
        for matrix, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
            yield f"{block}.ffn.{name}.{matrix}.weight", shape


def _compressed_layer(block: str, layer: int, text: Mapping[str, Any]) -> Shapes:
    """V4: every layer with a ratio compresses keys and values, and those with a small one have an indexer."""
    ratio, hidden = text["compress_ratios"][layer], text["hidden_size"]
    if not ratio:
        return
    indexes = ratio == 4
    yield from _compressor(f"{block}.attn.compressor", text["head_dim"] * (1 + indexes), ratio, hidden)
    if indexes:
        size, heads = text["index_head_dim"], text["index_n_heads"]
        yield f"{block}.attn.indexer.wq_b.weight", (heads * size, text["q_lora_rank"])
        yield f"{block}.attn.indexer.weights_proj.weight", (heads, hidden)
        yield from _compressor(f"{block}.attn.indexer.compressor", 2 * size, ratio, hidden)


def _compressor(block: str, width: int, ratio: int, hidden: int) -> Shapes:
    yield f"{block}.wkv.weight", (width, hidden)
    yield f"{block}.wgate.weight", (width, hidden)
    yield f"{block}.ape", (ratio, width)
    yield f"{block}.norm.weight", (width // 2 if ratio == 4 else width,)


def _source_layer(block: str, layer: int, text: Mapping[str, Any]) -> Shapes:
    """V4.1: few layers compress and index, and the others use what these have."""
    hidden, head, size = text["hidden_size"], text["head_dim"], text["index_head_dim"]
    if layer in text["kv_source_layer_ids"]:
        yield f"{block}.attn.compressor.wkv.weight", (head, hidden)
        yield f"{block}.attn.compressor.norm.weight", (head,)
        yield f"{block}.attn.indexer.wk.weight", (size, head)
        yield f"{block}.attn.indexer.k_norm.weight", (size,)
    if layer in text["index_source_layer_ids"]:
        yield f"{block}.attn.indexer.wq_b.weight", (text["index_n_heads"] * size, text["q_lora_rank"])
        yield f"{block}.attn.indexer.weights_proj.weight", (text["index_n_heads"], hidden)


def _gate(gate: str, layer: int, text: Mapping[str, Any]) -> Shapes:
    if layer < text.get("num_hash_layers", 0):
        yield f"{gate}.tid2eid", (text["vocab_size"], text["num_experts_per_tok"])
        return
    yield f"{gate}.bias", (text["n_routed_experts"],)
    if "engram_layer_ids" in text:
        yield f"{gate}.bias_vl", (text["n_routed_experts"],)


def _engram(block: str, layer: int, text: Mapping[str, Any]) -> Shapes:
    if layer not in text.get("engram_layer_ids", ()):
        return
    rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
    hidden, mixed, width = text["hidden_size"], text["hc_mult"], text["engram_head_dim"]
    yield f"{block}.embed.weight", (rows, width)
    yield f"{block}.wkv.weight", ((1 + mixed) * hidden, 2 * width)
    yield f"{block}.q_weight", (mixed, hidden)
    yield f"{block}.k_weight", (mixed, hidden)


def _prediction(block: str, layer: int, text: Mapping[str, Any]) -> Shapes:
    """V4 has one layer that predicts further tokens; V4.1 several, whose first and last have parts of their
    own."""
    hidden, mixed, last = text["hidden_size"], text["hc_mult"], text["num_nextn_predict_layers"] - 1
    targets = text.get("dspark_target_layer_ids")
    if targets is None:
        yield f"{block}.e_proj.weight", (hidden, hidden)
        yield f"{block}.h_proj.weight", (hidden, hidden)
        yield f"{block}.enorm.weight", (hidden,)
        yield f"{block}.hnorm.weight", (hidden,)
    elif layer == 0:
        yield f"{block}.main_proj.weight", (hidden, len(targets) * hidden)
        yield f"{block}.main_norm.weight", (hidden,)
    if layer == last:
        yield f"{block}.norm.weight", (hidden,)
        yield from _head_mix(f"{block}.", hidden, mixed)


def _head_mix(prefix: str, hidden: int, mixed: int) -> Shapes:
    yield f"{prefix}hc_head_fn", (mixed, mixed * hidden)
    yield f"{prefix}hc_head_base", (mixed,)
    yield f"{prefix}hc_head_scale", (1,)


def _sight(config: Mapping[str, Any], hidden: int) -> Shapes:
    if "vision_config" not in config:
        return
    width = config["vision_config"]["hidden_size"]
    yield "vision.patch_embed.proj.weight", (width, 3, 2, 2)
    for layer in range(config["vision_config"]["num_hidden_layers"]):
        yield f"vision.blocks.{layer}.attn.wqkv.weight", (3 * width, width)
        yield f"vision.blocks.{layer}.norm1.weight", (width,)
    yield "aligner.proj.weight", (hidden, width)
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        yield name, (hidden,)


_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj", "main_proj", "embed")
_PLAIN = ("compressor.", "vision.", "aligner.")


def is_fp8(name: str) -> bool:
    """Whether a matrix is published as codes of 8 bits, or an expert's, which may have 4."""
    inside = name.startswith(("layers.", "mtp."))
    return inside and name.endswith(tuple(f".{word}.weight" for word in _FP8)) and not _has(name, _PLAIN)


def is_float32(name: str) -> bool:
    return ".gate.bias" in name or name.endswith((".attn_sink", ".ape")) or "hc_" in name


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def flash_specs(config: Mapping[str, Any] = FLASH_CONFIG) -> list[list[TensorSpec]]:
    """A file for each layer, and one for what is in none."""
    files: dict[str, list[TensorSpec]] = {}
    for name, shape in v4_shapes(config):
        words = name.split(".")
        key = ".".join(words[:2]) if words[0] in ("layers", "mtp") else ""
        files.setdefault(key, []).extend(v4_specs(name, shape))
    return [files[key] for key in sorted(files)]


def v4_specs(
    name: str, shape: tuple[int, ...], *, experts: Experts = "fp4", block: int = 128
) -> Iterator[TensorSpec]:
    is_expert = ".experts." in name
    if name.endswith("tid2eid"):
        yield TensorSpec(name, DType.I32, shape)
    elif not is_fp8(name) or (is_expert and experts == "bf16"):
        yield TensorSpec(name, DType.F32 if is_float32(name) else DType.BF16, shape)
    elif is_expert and experts == "fp4":
        yield TensorSpec(name, DType.I8, (shape[0], shape[1] // 2))
        yield TensorSpec(scale_name(name), DType.F8_E8M0, (shape[0], shape[1] // 32))
    else:
        # Rows of V4.1's memory are looked up one by one, so that each has scales of its own.
        rows = 1 if name.endswith(".embed.weight") else block
        yield TensorSpec(name, DType.F8_E4M3, shape)
        yield TensorSpec(scale_name(name), DType.F8_E8M0, (-(-shape[0] // rows), -(-shape[1] // block)))


def scale_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def small_v4(root: Path, config: Mapping[str, Any] = SMALL_CONFIG, *, experts: Experts = "fp8") -> Path:
    """Headers, and files that hold nothing but zeros."""
    block = config["quantization_config"]["weight_block_size"][0]
    specs = [each for named in v4_shapes(config) for each in v4_specs(*named, experts=experts, block=block)]
    return sparse_checkpoint(root, [specs], with_experts(config, experts))


def with_experts(config: Mapping[str, Any], experts: Experts) -> dict[str, Any]:
    """The config of a model whose experts are stored so."""
    result = copy.deepcopy(dict(config))
    for section in (result, result["quantization_config"]):
        if "expert_dtype" in section:
            section["expert_dtype"] = "fp4" if experts == "fp4" else "fp8"
    return result
