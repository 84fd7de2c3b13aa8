"""Tiny mixtures of experts as their families publish them, and the same edits done by hand in torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from kits.model_types import ModelType
from kits.model_types_decoders import SPARSE

from raymerge.api import submit
from raymerge.options import RunOptions

NUM_EXPERTS = 4

Edit = Callable[[torch.Tensor], torch.Tensor]
"""What is done to a tensor ``[experts, ...]`` along its first dimension."""

_OF_EXPERTS = re.compile(
    r"experts\.|\.(input|output)_linear\.|\.router\.|(mlp|moe|feed_forward|ffn|mixer)\.gate\."
    r"|correction_bias|expert_bias|moe_statics"
)
_SHARED = re.compile(r"shared|\.mlp\.gate_proj")


def sparse(name: str) -> ModelType:
    return next(each for each in SPARSE if each.name == name)


def write_model(root: Path, kind: ModelType, seed: int, **changes: Any) -> torch.nn.Module:
    return save(kind.build(seed, **changes), root)


def save(model: torch.nn.Module, root: Path, *, fused: bool = False) -> torch.nn.Module:
    write: Callable[..., None] = getattr(model, "save_pretrained")  # noqa: B009 - no part of torch's Module
    write(root, save_original_format=not fused)
    return model


def same_experts(model: torch.nn.Module, edit: Edit, *, into: torch.nn.Module) -> torch.nn.Module:
    """``into`` with everything of ``model``, its experts and router rows edited.

    In memory every tensor of experts has them along its first dimension, or in equal runs along it.
    """
    state = {name: _edited(name, tensor, edit) for name, tensor in model.state_dict().items()}
    into.load_state_dict(state, strict=True)
    return into.eval()


def picked(*ids: int) -> Edit:
    return lambda tensor: tensor[list(ids)]


def averaged(*groups: Mapping[int, float]) -> Edit:

    def edit(tensor: torch.Tensor) -> torch.Tensor:
        means = [
            sum(tensor[e].double() * weight for e, weight in group.items()) / sum(group.values())
            for group in groups
        ]
        return torch.stack([torch.as_tensor(mean) for mean in means]).to(tensor.dtype)

    return edit


def is_of_experts(name: str, tensor: torch.Tensor) -> bool:
    if not _OF_EXPERTS.search(name) or _SHARED.search(name):
        return False
    return tensor.dim() > 0 and (tensor.shape[0] % NUM_EXPERTS == 0 or tensor.shape == (1, NUM_EXPERTS))


def _edited(name: str, tensor: torch.Tensor, edit: Edit) -> torch.Tensor:
    if not is_of_experts(name, tensor):
        return tensor
    if tensor.shape == (1, NUM_EXPERTS):
        return edit(tensor[0])[None]
    shares = tensor.view(NUM_EXPERTS, tensor.shape[0] // NUM_EXPERTS, *tensor.shape[1:])
    return edit(shares).flatten(0, 1)


def submitted(root: Path, out: str, change: Mapping[str, Any], **recipe: Any) -> Path:
    data = {"base_model": str(root / "base"), "experts": dict(change), **recipe}
    submit(data, root / out, RunOptions(inline=True))
    return root / out
