"""Tensor names, shapes and config fields as families publish them, cut down to a few layers and experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Names = dict[str, tuple[int, ...]]


class Family(NamedTuple):
    config: dict[str, Any]
    names: Names


def _attention(layer: str, d: int = 8) -> Names:
    return {f"{layer}.self_attn.{p}_proj.weight": (d, d) for p in "qkvo"}


def _norms(layer: str, d: int = 8) -> Names:
    return {f"{layer}.input_layernorm.weight": (d,), f"{layer}.post_attention_layernorm.weight": (d,)}


def _mlp(block: str, d: int = 8, rows: int = 6) -> Names:
    shapes = {"gate_proj": (rows, d), "up_proj": (rows, d), "down_proj": (d, rows)}
    return {f"{block}.{name}.weight": shape for name, shape in shapes.items()}


def _experts(block: str, words: Mapping[str, str], *, count: int = 4, d: int = 8, rows: int = 6) -> Names:
    shapes = {"gate": (rows, d), "up": (rows, d), "down": (d, rows)}
    return {
        f"{block}.experts.{e}.{words[kind]}.weight": shape
        for e in range(count)
        for kind, shape in shapes.items()
    }


QWEN = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def _ends(prefix: str = "model", d: int = 8) -> Names:
    return {
        f"{prefix}.embed_tokens.weight": (32, d),
        f"{prefix}.norm.weight": (d,),
        "lm_head.weight": (32, d),
    }


def llama(num_layers: int = 3) -> Family:
    names = _ends()
    for number in range(num_layers):
        layer = f"model.layers.{number}"
        names |= _attention(layer) | _norms(layer) | _mlp(f"{layer}.mlp")
    return Family({"model_type": "llama", "num_hidden_layers": num_layers, "hidden_size": 8}, names)


def _moe(config: Mapping[str, Any], blocks: Iterable[Names], prefix: str = "model") -> Family:
    names = _ends(prefix)
    count = 0
    for count, block in enumerate(blocks, start=1):
        layer = f"{prefix}.layers.{count - 1}"
        names |= _attention(layer) | _norms(layer)
        names |= {f"{layer}.{name}": shape for name, shape in block.items()}
    sizes = {"num_hidden_layers": count, "hidden_size": 8, "intermediate_size": 6}
    return Family({**sizes, **config}, names)


def mixtral() -> Family:
    block = {"block_sparse_moe.gate.weight": (4, 8)} | _experts("block_sparse_moe", MIXTRAL)
    return _moe({"model_type": "mixtral", "num_local_experts": 4}, [block] * 2)


def qwen2_moe() -> Family:
    block = {"mlp.gate.weight": (4, 8), "mlp.shared_expert_gate.weight": (1, 8)}
    block |= _experts("mlp", QWEN) | _mlp("mlp.shared_expert")
    return _moe({"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 6}, [block] * 2)


def qwen3_moe() -> Family:
    block = {"mlp.gate.weight": (4, 8), "self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,)}
    block |= _experts("mlp", QWEN)
    return _moe({"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 6}, [block] * 2)


def qwen3_next() -> Family:
    linear = {f"linear_attn.{n}.weight": (8, 8) for n in ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj")}
    linear |= {"linear_attn.A_log": (4,), "linear_attn.dt_bias": (4,), "linear_attn.norm.weight": (4,)}
    block = linear | {"mlp.gate.weight": (4, 8), "mlp.shared_expert_gate.weight": (1, 8)}
    block |= _experts("mlp", QWEN) | _mlp("mlp.shared_expert")
    family = _moe({"model_type": "qwen3_next", "num_experts": 4, "moe_intermediate_size": 6}, [block] * 2)
    mtp = {"mtp.fc.weight": (8, 16), "mtp.norm.weight": (8,), "mtp.layers.0.mlp.gate.weight": (4, 8)}
    mtp |= _experts("mtp.layers.0.mlp", QWEN)
    return Family(family.config, family.names | mtp)


def qwen3_5_moe() -> Family:
    block = {
        "mlp.gate.weight": (4, 8),
        "mlp.experts.gate_up_proj": (4, 12, 8),
        "mlp.experts.down_proj": (4, 8, 6),
    }
    text = _moe({"model_type": "qwen3_5_moe_text", "num_experts": 4, "moe_intermediate_size": 6}, [block] * 2)
    names = {name.replace("model.", "model.language_model.", 1): s for name, s in text.names.items()}
    names |= {f"model.visual.blocks.{n}.attn.qkv.weight": (12, 4) for n in range(3)}
    names |= {"model.visual.merger.linear_fc1.weight": (8, 4), "model.visual.patch_embed.proj.weight": (4, 3)}
    return Family(
        {"model_type": "qwen3_5_moe", "text_config": text.config, "vision_config": {"depth": 3}}, names
    )


def deepseek_v3() -> Family:
    mla = {
        f"self_attn.{n}.weight": (8, 8) for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    }
    mla |= {"self_attn.q_a_layernorm.weight": (8,), "self_attn.kv_a_layernorm.weight": (8,)}
    dense = mla | _mlp("mlp", rows=16)
    sparse = mla | {"mlp.gate.weight": (4, 8), "mlp.gate.e_score_correction_bias": (4,)}
    sparse |= _experts("mlp", QWEN) | _mlp("mlp.shared_experts")
    config = {"model_type": "deepseek_v3", "n_routed_experts": 4, "moe_intermediate_size": 6}
    config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "moe_layer_freq": 1}
    family = _moe(config, [dense, sparse, sparse])
    layer = "model.layers.3"
    mtp = {f"{layer}.{n}.weight": (8,) for n in ("enorm", "hnorm", "shared_head.norm")}
    mtp |= {f"{layer}.eh_proj.weight": (8, 16), f"{layer}.shared_head.head.weight": (32, 8)}
    mtp |= {f"{layer}.embed_tokens.weight": (32, 8)} | _attention(layer) | _norms(layer)
    mtp |= {f"{layer}.{name}": shape for name, shape in sparse.items()}
    return Family(family.config, family.names | mtp)


def gpt_oss() -> Family:
    """The bf16 layout: (in, out), gate and up taking turns; equal widths."""
    block = {"mlp.router.weight": (4, 8), "mlp.router.bias": (4,), "self_attn.sinks": (2,)}
    block |= {"mlp.experts.gate_up_proj": (4, 8, 16), "mlp.experts.gate_up_proj_bias": (4, 16)}
    block |= {"mlp.experts.down_proj": (4, 8, 8), "mlp.experts.down_proj_bias": (4, 8)}
    config = {"model_type": "gpt_oss", "num_local_experts": 4, "intermediate_size": 8}
    return _moe(config, [block] * 2)


def minimax_m2() -> Family:
    block = {"block_sparse_moe.gate.weight": (4, 8), "block_sparse_moe.e_score_correction_bias": (4,)}
    block |= _experts("block_sparse_moe", MIXTRAL)
    return _moe({"model_type": "minimax_m2", "num_local_experts": 4}, [block] * 2)


def llama4() -> Family:
    sparse = {"feed_forward.router.weight": (4, 8), "feed_forward.experts.gate_up_proj": (4, 8, 12)}
    sparse |= {"feed_forward.experts.down_proj": (4, 6, 8)} | _mlp("feed_forward.shared_expert")
    text = _moe(
        {"model_type": "llama4_text", "num_local_experts": 4}, [_mlp("feed_forward", rows=9), sparse] * 2
    )
    names = {f"language_model.{name}": shape for name, shape in text.names.items()}
    names |= {f"vision_model.model.layers.{n}.self_attn.q_proj.weight": (4, 4) for n in range(2)}
    names |= {"multi_modal_projector.linear_1.weight": (8, 4)}
    config = {"model_type": "llama4", "vision_config": {"num_hidden_layers": 2}}
    text_config = text.config | {"interleave_moe_layer_step": 2}
    return Family(config | {"text_config": text_config}, names)


def granitemoe() -> Family:
    block = {
        "block_sparse_moe.input_linear.weight": (4, 12, 8),
        "block_sparse_moe.router.layer.weight": (4, 8),
    }
    block |= {"block_sparse_moe.output_linear.weight": (4, 8, 6), "mamba.A_log": (4,), "mamba.D": (4,)}
    block |= {"shared_mlp.input_linear.weight": (12, 8), "shared_mlp.output_linear.weight": (8, 6)}
    family = _moe({"model_type": "granitemoehybrid", "num_local_experts": 4}, [block] * 2)
    names = {name: shape for name, shape in family.names.items() if name != "lm_head.weight"}
    return Family(family.config | {"tie_word_embeddings": True}, names)


def dbrx() -> Family:
    names: Names = {
        "transformer.wte.weight": (32, 8),
        "lm_head.weight": (32, 8),
        "transformer.norm_f.weight": (8,),
    }
    for number in range(2):
        block = f"transformer.blocks.{number}"
        names |= {f"{block}.ffn.experts.mlp.{word}": (24, 8) for word in ("w1", "v1", "w2")}
        names |= {f"{block}.ffn.router.layer.weight": (4, 8), f"{block}.norm_attn_norm.norm_1.weight": (8,)}
        names |= {f"{block}.norm_attn_norm.attn.Wqkv.weight": (16, 8)}
    config = {"model_type": "dbrx", "n_layers": 2, "d_model": 8}
    return Family(config | {"ffn_config": {"moe_num_experts": 4, "ffn_hidden_size": 6}}, names)


def jamba() -> Family:
    dense = _mlp("feed_forward") | {"mamba.A_log": (8, 2), "mamba.D": (8,), "mamba.in_proj.weight": (16, 8)}
    sparse = {"feed_forward.router.weight": (4, 8)} | _experts("feed_forward", QWEN)
    config = {"model_type": "jamba", "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
    return _moe(config, [dense, sparse] * 2)


def hunyuan() -> Family:
    block = {"mlp.gate.wg.weight": (4, 8), "self_attn.query_layernorm.weight": (4,)}
    block |= _experts("mlp", QWEN) | _mlp("mlp.shared_mlp")
    return _moe({"model_type": "hunyuan_v1_moe", "num_experts": 4}, [block] * 2)


def ernie() -> Family:
    block = {"mlp.gate.weight": (8, 4), "mlp.moe_statics.e_score_correction_bias": (1, 4)}
    block |= _experts("mlp", QWEN) | _mlp("mlp.shared_experts")
    return _moe({"model_type": "ernie4_5_moe", "moe_num_experts": 4}, [block] * 2)


def phimoe() -> Family:
    block = {
        "block_sparse_moe.gate.weight": (4, 8),
        "self_attn.q_proj.bias": (8,),
        "input_layernorm.bias": (8,),
    }
    family = _moe({"model_type": "phimoe"}, [block | _experts("block_sparse_moe", MIXTRAL)] * 2)
    return Family(family.config, family.names | {"lm_head.bias": (32,), "model.norm.bias": (8,)})


def gpt2(prefix: str = "transformer.") -> Family:
    names: Names = {
        f"{prefix}wte.weight": (32, 8),
        f"{prefix}wpe.weight": (16, 8),
        f"{prefix}ln_f.weight": (8,),
    }
    for number in range(2):
        h = f"{prefix}h.{number}"
        names |= {f"{h}.attn.bias": (1, 1, 16, 16), f"{h}.attn.masked_bias": (), f"{h}.ln_1.weight": (8,)}
        names |= {f"{h}.attn.c_attn.weight": (8, 24), f"{h}.attn.c_attn.bias": (24,)}
        names |= {f"{h}.mlp.c_fc.weight": (8, 32), f"{h}.mlp.c_proj.weight": (32, 8)}
    return Family({"model_type": "gpt2", "n_layer": 2, "n_embd": 8}, names)


def bert() -> Family:
    names: Names = {
        f"bert.embeddings.{n}_embeddings.weight": (32, 8) for n in ("word", "position", "token_type")
    }
    names |= {"bert.embeddings.position_ids": (1, 16), "bert.embeddings.LayerNorm.weight": (8,)}
    for number in range(2):
        layer = f"bert.encoder.layer.{number}"
        names |= {
            f"{layer}.attention.self.query.weight": (8, 8),
            f"{layer}.attention.output.dense.weight": (8, 8),
        }
        names |= {f"{layer}.intermediate.dense.weight": (16, 8), f"{layer}.output.dense.weight": (8, 16)}
        names |= {f"{layer}.attention.output.LayerNorm.weight": (8,), f"{layer}.output.LayerNorm.bias": (8,)}
    names |= {"bert.pooler.dense.weight": (8, 8), "cls.predictions.bias": (32,)}
    names |= {"cls.predictions.transform.dense.weight": (8, 8), "cls.predictions.decoder.weight": (32, 8)}
    return Family({"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 8}, names)


def llava(new: bool = False) -> Family:
    text = llama(2)
    names: Names = {}
    for name, shape in text.names.items():
        moved = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        names[moved if new else f"language_model.{name}"] = shape
    beside = {f"vision_tower.vision_model.encoder.layers.{n}.mlp.fc1.weight": (8, 4) for n in range(4)}
    beside |= {"vision_tower.vision_model.embeddings.position_ids": (1, 5)}
    beside |= {"multi_modal_projector.linear_1.weight": (8, 4)}
    names |= {f"model.{name}" if new else name: shape for name, shape in beside.items()}
    config = {"model_type": "llava", "text_config": text.config, "vision_config": {"num_hidden_layers": 4}}
    return Family(config, names)


def t5() -> Family:
    names: Names = {
        "shared.weight": (32, 8),
        "lm_head.weight": (32, 8),
        "decoder.final_layer_norm.weight": (8,),
    }
    for side in ("encoder", "decoder"):
        for number in range(2):
            block = f"{side}.block.{number}.layer"
            names |= {f"{block}.0.SelfAttention.q.weight": (8, 8), f"{block}.0.layer_norm.weight": (8,)}
            names |= {
                f"{block}.1.DenseReluDense.wi_0.weight": (16, 8),
                f"{block}.1.DenseReluDense.wo.weight": (8, 16),
            }
    config = {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "is_encoder_decoder": True}
    return Family(config, names)


def whisper() -> Family:
    names: Names = {"model.decoder.embed_tokens.weight": (32, 8), "proj_out.weight": (32, 8)}
    for side, depth in (("encoder", 4), ("decoder", 2)):
        for number in range(depth):
            layer = f"model.{side}.layers.{number}"
            names |= {f"{layer}.self_attn.q_proj.weight": (8, 8), f"{layer}.fc1.weight": (16, 8)}
    config = {"model_type": "whisper", "encoder_layers": 4, "decoder_layers": 2, "num_hidden_layers": 4}
    return Family(config | {"is_encoder_decoder": True}, names)


def unheard_of() -> Family:
    names: Names = {"foo.embed.weight": (32, 8), "foo.out.weight": (32, 8)}
    names |= {f"foo.stages.{number}.w": (8, 8) for number in range(4)}
    return Family({"model_type": "foonet", "num_hidden_layers": 4}, names)
