"""Tiny dense models of the families that mixtures of experts are built from, as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import read_config
from kits.model_types import LAYERS, VOCAB, Info, perturb
from kits.model_types_decoders import DECODER, LATENT
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HIDDEN: int = DECODER["hidden_size"]
WIDTH: int = DECODER["intermediate_size"]
TOKENS = 12
"""Tokens of an input: more than the sliding windows hold."""

_LATENT: Mapping[str, Any] = {**LATENT, "first_k_dense_replace": LAYERS}
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
    config = AutoConfig.for_model(
        family, **{**DECODER, "rms_norm_eps": 1e-5, **_OWN.get(family, {}), **changes}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    perturb(model.eval(), seed, scale=0.1)
    model.save_pretrained(root)
    return read_dense(root)


def read_dense(root: Path) -> DenseDirectory:
    return DenseDirectory(root, read_config(root), load_file(root / "model.safetensors"))


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
