"""Tensor names, shapes and config fields as families publish them, cut down to a few layers and experts.

A line is a name with alternatives in braces, and a shape, ``8x8`` unless it is said.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

Names = dict[str, tuple[int, ...]]


class Family(NamedTuple):
    config: dict[str, Any]
    names: Names


def _names(*lines: str) -> Names:
    found: Names = {}
    for line in lines:
        pattern, _, shape = line.partition(" ")
        found |= dict.fromkeys(_expanded(pattern), tuple(map(int, (shape or "8x8").split("x"))))
    return found


def _expanded(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    first, _, last = match[1].partition("..")
    words = map(str, range(int(first), int(last) + 1)) if last else match[1].split(",")
    before, behind = pattern[: match.start()], pattern[match.end() :]
    return [each for word in words for each in _expanded(f"{before}{word}{behind}")]


_ENDS = ("model.embed_tokens.weight 32x8", "model.norm.weight 8", "lm_head.weight 32x8")
_LAYER = ("self_attn.{q,k,v,o}_proj.weight", "{input,post_attention}_layernorm.weight 8")
_MLP = ("{gate,up}_proj.weight 6x8", "down_proj.weight 8x6")
_QWEN = ("experts.{0..3}.{gate,up}_proj.weight 6x8", "experts.{0..3}.down_proj.weight 8x6")
_MIXTRAL = ("experts.{0..3}.{w1,w3}.weight 6x8", "experts.{0..3}.w2.weight 8x6")


def _below(prefix: str, *lines: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{line}" for line in lines)


def _layer(numbers: str, *lines: str) -> tuple[str, ...]:
    return _below(f"model.layers.{{{numbers}}}", *_LAYER, *lines)


def _decoder(config: dict[str, Any], *lines: str, layers: int = 2) -> Family:
    sizes = {"num_hidden_layers": layers, "hidden_size": 8, "intermediate_size": 6}
    return Family(sizes | config, _names(*_ENDS, *lines))


def _uniform(model_type: str, *lines: str, **config: Any) -> Family:
    """Two layers of one kind, with four experts each."""
    return _decoder({"model_type": model_type, **config}, *_layer("0..1", *lines))


def _moved(names: Names, old: str, new: str) -> Names:
    return {re.sub(f"^{old}", new, name): shape for name, shape in names.items()}


def llama(num_layers: int = 3) -> Family:
    names = _names(*_ENDS, *_layer(f"0..{num_layers - 1}", *_below("mlp", *_MLP)))
    return Family({"model_type": "llama", "num_hidden_layers": num_layers, "hidden_size": 8}, names)


def _qwen3_5_moe() -> Family:
    experts = ("mlp.gate.weight 4x8", "mlp.experts.gate_up_proj 4x12x8", "mlp.experts.down_proj 4x8x6")
    text = _uniform("qwen3_5_moe_text", *experts, num_experts=4, moe_intermediate_size=6)
    sight = ("blocks.{0..2}.attn.qkv.weight", "merger.linear_fc1.weight", "patch_embed.proj.weight")
    names = _moved(text.names, r"model\.", "model.language_model.") | _names(*_below("model.visual", *sight))
    config = {"model_type": "qwen3_5_moe", "text_config": text.config, "vision_config": {"depth": 3}}
    return Family(config, names)


def _deepseek_v3() -> Family:
    attention = ("self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj}.weight",)
    attention += ("self_attn.{q,kv}_a_layernorm.weight 8",)
    sparse = ("mlp.gate.weight 4x8", "mlp.gate.e_score_correction_bias 4", *_below("mlp", *_QWEN))
    sparse += (*_below("mlp.shared_experts", *_MLP), *attention)
    config = {"model_type": "deepseek_v3", "n_routed_experts": 4, "moe_intermediate_size": 6}
    config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "moe_layer_freq": 1}
    more = ("{enorm,hnorm,shared_head.norm}.weight 8", "eh_proj.weight 8x16")
    more += ("{shared_head.head,embed_tokens}.weight 32x8",)
    dense = _layer("0", *attention, *_below("mlp", *_MLP))
    return _decoder(config, *dense, *_layer("1..3", *sparse), *_below("model.layers.3", *more), layers=3)


def _llama4() -> Family:
    sparse = ("router.weight 4x8", "experts.gate_up_proj 4x8x12", "experts.down_proj 4x6x8")
    sparse += _below("shared_expert", *_MLP)
    layers = (
        *_layer("0,2", *_below("feed_forward", *_MLP)),
        *_layer("1,3", *_below("feed_forward", *sparse)),
    )
    text = _decoder({"model_type": "llama4_text", "num_local_experts": 4}, *layers, layers=4)
    names = _moved(text.names, "", "language_model.")
    names |= _names(
        "vision_model.model.layers.{0..1}.self_attn.q_proj.weight", "multi_modal_projector.linear_1.weight"
    )
    config = {"model_type": "llama4", "vision_config": {"num_hidden_layers": 2}}
    return Family(config | {"text_config": text.config | {"interleave_moe_layer_step": 2}}, names)


def _granitemoe() -> Family:
    experts = ("input_linear.weight 4x12x8", "router.layer.weight 4x8", "output_linear.weight 4x8x6")
    lines = (*_below("block_sparse_moe", *experts), "mamba.{A_log,D} 4")
    shared = ("shared_mlp.input_linear.weight 12x8", "shared_mlp.output_linear.weight 8x6")
    family = _uniform("granitemoehybrid", *lines, *shared, num_local_experts=4, tie_word_embeddings=True)
    del family.names["lm_head.weight"]
    return family


def _dbrx() -> Family:
    block = ("ffn.experts.mlp.{w1,v1,w2} 24x8", "ffn.router.layer.weight 4x8")
    block += ("norm_attn_norm.norm_1.weight 8", "norm_attn_norm.attn.Wqkv.weight 16x8")
    ends = ("{transformer.wte,lm_head}.weight 32x8", "transformer.norm_f.weight 8")
    config = {"model_type": "dbrx", "n_layers": 2, "d_model": 8}
    config |= {"ffn_config": {"moe_num_experts": 4, "ffn_hidden_size": 6}}
    return Family(config, _names(*ends, *_below("transformer.blocks.{0..1}", *block)))


def _jamba() -> Family:
    dense = (*_below("feed_forward", *_MLP), "mamba.{A_log,D,in_proj.weight}")
    sparse = _below("feed_forward", "router.weight 4x8", *_QWEN)
    config = {"model_type": "jamba", "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
    return _decoder(config, *_layer("0,2", *dense), *_layer("1,3", *sparse), layers=4)


def _gpt2(prefix: str = "transformer.") -> Family:
    lines = ("{wte,wpe,ln_f}.weight", "h.{0..1}.attn.{bias,masked_bias}", "h.{0..1}.ln_1.weight 8")
    lines += ("h.{0..1}.attn.c_attn.{weight,bias}", "h.{0..1}.mlp.{c_fc,c_proj}.weight")
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8}
    return Family(config, _names(*(f"{prefix}{line}" for line in lines)))


def _bert() -> Family:
    layer = (
        "attention.{self.query,output.dense,output.LayerNorm}.weight",
        "{intermediate,output}.dense.weight",
    )
    layer += ("output.LayerNorm.bias 8",)
    inner = ("embeddings.{word_embeddings,position_embeddings,token_type_embeddings,LayerNorm}.weight",)
    inner += ("embeddings.position_ids 1x16", "pooler.dense.weight", *_below("encoder.layer.{0..1}", *layer))
    head = ("cls.predictions.{bias,transform.dense.weight,decoder.weight}",)
    config = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 8}
    return Family(config, _names(*_below("bert", *inner), *head))


def _llava(*, new: bool = False) -> Family:
    text = llama(2)
    beside = _names(
        "vision_tower.vision_model.{encoder.layers.{0..3}.mlp.fc1.weight,embeddings.position_ids}",
        "multi_modal_projector.linear_1.weight",
    )
    names = _moved(text.names, r"model\.", "model.language_model.") | _moved(beside, "", "model.")
    if not new:
        names = _moved(text.names, "", "language_model.") | beside
    config = {"model_type": "llava", "text_config": text.config, "vision_config": {"num_hidden_layers": 4}}
    return Family(config, names)


def _t5() -> Family:
    block = ("0.SelfAttention.q.weight", "0.layer_norm.weight 8", "1.DenseReluDense.{wi_0,wo}.weight")
    ends = ("{shared,lm_head}.weight 32x8", "decoder.final_layer_norm.weight 8")
    config = {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "is_encoder_decoder": True}
    return Family(config, _names(*ends, *_below("{encoder,decoder}.block.{0..1}.layer", *block)))


def _whisper() -> Family:
    layers = ("{encoder.layers.{0..3},decoder.layers.{0..1}}.{self_attn.q_proj,fc1}.weight",)
    config = {"model_type": "whisper", "encoder_layers": 4, "decoder_layers": 2, "num_hidden_layers": 4}
    names = _names("{model.decoder.embed_tokens,proj_out}.weight 32x8", *_below("model", *layers))
    return Family(config | {"is_encoder_decoder": True}, names)


_FOUR = {"num_experts": 4, "moe_intermediate_size": 6}
_GATE, _SHARED_GATE = "mlp.gate.weight 4x8", "mlp.shared_expert_gate.weight 1x8"
_SHARED = _below("mlp.shared_expert", *_MLP)
_SPARSE = _below("block_sparse_moe", *_MIXTRAL)
_LINEAR = (
    "linear_attn.{in_proj_qkvz,in_proj_ba,conv1d,out_proj,norm}.weight",
    "linear_attn.{A_log,dt_bias} 4",
)
_STACKED = ("gate_up_proj 4x8x16", "gate_up_proj_bias 4x16", "down_proj 4x8x8", "down_proj_bias 4x8")

FAMILIES: dict[str, Family] = {
    "llama": llama(),
    "mixtral": _uniform("mixtral", "block_sparse_moe.gate.weight 4x8", *_SPARSE, num_local_experts=4),
    "qwen2_moe": _uniform("qwen2_moe", _GATE, _SHARED_GATE, *_SHARED, *_below("mlp", *_QWEN), **_FOUR),
    "qwen3_moe": _uniform(
        "qwen3_moe", _GATE, "self_attn.{q,k}_norm.weight 4", *_below("mlp", *_QWEN), **_FOUR
    ),
    "qwen3_next": _uniform(
        "qwen3_next", *_LINEAR, _GATE, _SHARED_GATE, *_SHARED, *_below("mlp", *_QWEN), **_FOUR
    ),
    "qwen3_5_moe": _qwen3_5_moe(),
    "deepseek_v3": _deepseek_v3(),
    # The bf16 layout: (in, out), gate and up taking turns; equal widths.
    "gpt_oss": _uniform(
        "gpt_oss",
        *("mlp.router.weight 4x8", "mlp.router.bias 4", "self_attn.sinks 2"),
        *_below("mlp.experts", *_STACKED),
        num_local_experts=4,
        intermediate_size=8,
    ),
    "minimax_m2": _uniform(
        "minimax_m2", "block_sparse_moe.{gate.weight,e_score_correction_bias}", *_SPARSE, num_local_experts=4
    ),
    "llama4": _llama4(),
    "granitemoe": _granitemoe(),
    "dbrx": _dbrx(),
    "jamba": _jamba(),
    "hunyuan": _uniform(
        "hunyuan_v1_moe",
        *("mlp.gate.wg.weight 4x8", "self_attn.query_layernorm.weight 4"),
        *(*_below("mlp", *_QWEN), *_below("mlp.shared_mlp", *_MLP)),
        num_experts=4,
    ),
    "ernie": _uniform(
        "ernie4_5_moe",
        *("mlp.gate.weight 8x4", "mlp.moe_statics.e_score_correction_bias 1x4"),
        *(*_below("mlp", *_QWEN), *_below("mlp.shared_experts", *_MLP)),
        moe_num_experts=4,
    ),
    "phimoe": _uniform(
        "phimoe", "block_sparse_moe.gate.weight 4x8", "{self_attn.q_proj,input_layernorm}.bias 8", *_SPARSE
    ),
    "gpt2": _gpt2(),
    "gpt2 without its prefix": _gpt2(""),
    "bert": _bert(),
    "llava": _llava(),
    "new llava": _llava(new=True),
    "t5": _t5(),
    "whisper": _whisper(),
    "unheard of": Family(
        {"model_type": "foonet", "num_hidden_layers": 4},
        _names("foo.{embed,out}.weight 32x8", "foo.stages.{0..3}.w"),
    ),
}
FAMILIES["qwen3_next"].names.update(
    _names("mtp.fc.weight 8x16", "mtp.norm.weight 8", *_below("mtp.layers.0.mlp", "gate.weight 4x8", *_QWEN))
)
FAMILIES["phimoe"].names.update(_names("lm_head.bias 32", "model.norm.bias 8"))
