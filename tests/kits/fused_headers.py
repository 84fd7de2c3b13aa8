"""Headers of the true size, of models that are published with the experts of a layer in fused stacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kits.checkpoint_maker import fields

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType

GPT_OSS_NUM_TENSORS = 687
GPT_OSS_CONFIG: Mapping[str, Any] = fields(
    "architectures: [GptOssForCausalLM], model_type: gpt_oss, hidden_size: 2880, "
    "intermediate_size: 2880, num_hidden_layers: 36, num_attention_heads: 64, num_key_value_heads: 8, "
    "head_dim: 64, num_local_experts: 128, num_experts_per_tok: 4, vocab_size: 201088, "
    "tie_word_embeddings: false, torch_dtype: bfloat16, quantization_config: {quant_method: mxfp4, "
    "modules_to_not_convert: ['model.layers.*.self_attn', 'model.layers.*.mlp.router', "
    "model.embed_tokens, lm_head]}"
)

MAVERICK_CONFIG: Mapping[str, Any] = fields(
    "architectures: [Llama4ForConditionalGeneration], model_type: llama4, "
    "text_config: {model_type: llama4_text, hidden_size: 5120, intermediate_size: 8192, "
    "intermediate_size_mlp: 16384, num_hidden_layers: 48, num_attention_heads: 40, "
    "num_key_value_heads: 8, head_dim: 128, num_local_experts: 128, num_experts_per_tok: 1, "
    "interleave_moe_layer_step: 2, vocab_size: 202048, tie_word_embeddings: false}, "
    "torch_dtype: bfloat16"
)


def gpt_oss_120b_specs(config: Mapping[str, Any] = GPT_OSS_CONFIG) -> list[TensorSpec]:
    specs = []
    for name, shape in gpt_oss_shapes(config):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = shape
            specs.append(TensorSpec(f"{name}_blocks", DType.U8, (experts, rows, columns // 32, 16)))
            specs.append(TensorSpec(f"{name}_scales", DType.U8, (experts, rows, columns // 32)))
        else:
            specs.append(_plain(name, *shape))
    return specs


def gpt_oss_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    experts, heads, head = config["num_local_experts"], config["num_attention_heads"], config["head_dim"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", (hidden,)
        yield f"{block}.post_attention_layernorm.weight", (hidden,)
        sizes = {"queries": heads * head, "keys": config["num_key_value_heads"] * head}
        for name, rows, columns in _attention(hidden, **sizes):
            yield f"{block}.self_attn.{name}.weight", (rows, columns)
            yield f"{block}.self_attn.{name}.bias", (rows,)
        yield f"{block}.self_attn.sinks", (heads,)
        yield f"{block}.mlp.router.weight", (experts, hidden)
        yield f"{block}.mlp.router.bias", (experts,)
        for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            yield f"{block}.mlp.experts.{name}", (experts, rows, columns)
            yield f"{block}.mlp.experts.{name}_bias", (experts, rows)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def maverick_specs(config: Mapping[str, Any] = MAVERICK_CONFIG) -> list[TensorSpec]:
    text = config["text_config"]
    hidden, vocab, head = text["hidden_size"], text["vocab_size"], "language_model"
    numbers = range(text["num_hidden_layers"])
    layers = (_maverick_layer(f"{head}.model.layers.{n}", text, dense=n % 2 == 0) for n in numbers)
    return [
        _plain(f"{head}.model.embed_tokens.weight", vocab, hidden),
        *(spec for layer in layers for spec in layer),
        _plain(f"{head}.model.norm.weight", hidden),
        _plain(f"{head}.lm_head.weight", vocab, hidden),
    ]


def _maverick_layer(block: str, text: Mapping[str, Any], *, dense: bool) -> Iterator[TensorSpec]:
    hidden, width, experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield _plain(f"{block}.input_layernorm.weight", hidden)
    yield _plain(f"{block}.post_attention_layernorm.weight", hidden)
    heads, keys = text["num_attention_heads"], text["num_key_value_heads"]
    for name, rows, columns in _attention(
        hidden, queries=heads * text["head_dim"], keys=keys * text["head_dim"]
    ):
        yield _plain(f"{block}.self_attn.{name}.weight", rows, columns)
    if dense:
        yield from _mlp(f"{block}.feed_forward", hidden, text["intermediate_size_mlp"])
        return
    yield _plain(f"{block}.feed_forward.router.weight", experts, hidden)
    yield _plain(f"{block}.feed_forward.experts.gate_up_proj", experts, hidden, 2 * width)
    yield _plain(f"{block}.feed_forward.experts.down_proj", experts, width, hidden)
    yield from _mlp(f"{block}.feed_forward.shared_expert", hidden, width)


def _attention(hidden: int, *, queries: int, keys: int) -> tuple[tuple[str, int, int], ...]:
    rows = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    return (*((name, count, hidden) for name, count in rows), ("o_proj", hidden, queries))


def _mlp(block: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield _plain(f"{block}.gate_proj.weight", width, hidden)
    yield _plain(f"{block}.up_proj.weight", width, hidden)
    yield _plain(f"{block}.down_proj.weight", hidden, width)


def _plain(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, DType.BF16, shape)
