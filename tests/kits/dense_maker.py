"""Tiny dense models of the families that mixtures of experts are built from, as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.model_types import Info, perturb
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 64
HIDDEN = 32
WIDTH = 48
LAYERS = 3
TOKENS = 12
"""Tokens of an input: more than the sliding windows hold."""

_USUAL: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": LAYERS,
}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": None},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


@dataclass(frozen=True, slots=True)
class DenseDirectory:
    root: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def make_dense(family: str, root: Path, *, seed: int = 0, **changes: Any) -> DenseDirectory:
    config = AutoConfig.for_model(family, **{**_USUAL, **_OWN.get(family, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    perturb(model.eval(), seed, scale=0.1)
    model.save_pretrained(root)
    return read_dense(root)


def read_dense(root: Path) -> DenseDirectory:
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    return DenseDirectory(root, config, load_file(root / "model.safetensors"))


def load_whole(root: Path) -> tuple[Any, Info]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(root, output_loading_info=True, dtype=torch.float32)
    model, info = loaded
    return model.eval(), info


def logits(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB, (2, TOKENS), generator=generator)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens).logits
    return result
