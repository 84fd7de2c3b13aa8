"""Small adapters of one model that has three matrices, and recipes that merge them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, write_adapter
from safetensors.torch import load_file

from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.schema import Recipe

SHAPES: Mapping[str, tuple[int, int]] = {
    "model.layers.0.self_attn.q_proj": (6, 5),
    "model.layers.0.mlp.down_proj": (5, 9),
    "model.layers.1.self_attn.q_proj": (6, 5),
}
Q0, DOWN, Q1 = SHAPES
BASE = {f"{module}.weight": torch.zeros(shape) for module, shape in SHAPES.items()}
"""The model itself: what an adapter makes of it is what the adapter adds."""


def adapter(root: Path, seed: int, modules: Sequence[str] = tuple(SHAPES), **changes: Any) -> Path:
    config = lora_config(target_modules=["q_proj", "down_proj"]) | changes
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        tensors |= factor_tensors(module, SHAPES[module], config["r"], generator, scale=1.0)
    return write_adapter(root, tensors, config)


def add(root: Path, **tensors: torch.Tensor) -> None:
    before = load_file(root / "adapter_model.safetensors")
    more = {PREFIX + name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_adapter(root, before | more, json.loads((root / "adapter_config.json").read_text()))


def recipe(
    method: str, roots: Sequence[Path], entries: Sequence[Mapping[str, Any]] = (), **fields: Any
) -> Recipe:
    entries = entries or [{"weight": 1.0}] * len(roots)
    models = [{"model": str(root), "parameters": dict(p)} for root, p in zip(roots, entries, strict=True)]
    made = recipe_from_mapping({"merge_method": method, "models": models, **fields})
    assert isinstance(made, Recipe)
    return made


def with_heads(root: Path) -> list[Path]:
    roots = [adapter(root / str(i), i, modules_to_save=["lm_head"]) for i in range(2)]
    for index, each in enumerate(roots):
        add(each, lm_head__weight=torch.full((4, 5), float(index)).bfloat16())
    return roots
