"""Small dense models as far as configs and headers go, and what a recipe may ask to be built of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kits.checkpoint_maker import llama_shapes

from raymerge.architectures.moe_targets import DenseModel, Mixture, dense_model

HIDDEN, WIDTH, LAYERS, HEADS, HEAD = 32, 48, 3, 4, 8
FIELDS = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "sliding_window": None,
}
MLP = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
SQUARE, ROW = (HIDDEN, HIDDEN), (HIDDEN,)


def parent(family: str, name: str = "base", *, layers: int = LAYERS, **fields: Any) -> DenseModel:
    config = {"model_type": family, **FIELDS, "num_hidden_layers": layers}
    shapes = llama_shapes({**config, "vocab_size": 64, "tie_word_embeddings": False})
    for layer in range(layers):
        head = f"model.layers.{layer}."
        if family == "qwen2":
            shapes |= {f"{head}self_attn.{word}_proj.bias": ROW for word in "qkv"}
        if family == "qwen3":
            shapes |= {f"{head}self_attn.{word}_norm.weight": (HEAD,) for word in "qk"}
    return dense_model(name, {**config, **fields}, shapes)


def reshaped(model: DenseModel, shapes: Mapping[str, tuple[int, ...] | None]) -> DenseModel:
    changed = {name: shape for name, shape in {**model.shapes, **shapes}.items() if shape is not None}
    return dense_model(model.name, model.config, changed)


def mixture(*experts: DenseModel, **changes: Any) -> Mixture:
    usual = Mixture(experts, (), None, max(2, len(experts)), 1, "hub")
    return replace(usual, **changes)
