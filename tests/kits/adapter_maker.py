"""Adapters on disk as peft saves them, and peft's rule for applying them, written anew from its meaning."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import write_json
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
LLAMA_TARGETS = ("q_proj", "v_proj", "down_proj")


def lora_config(**changes: Any) -> dict[str, Any]:
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "base",
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "target_modules": list(LLAMA_TARGETS),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | changes


def write_adapter(
    root: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    clones = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(clones, root / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(root / "adapter_config.json", lora_config() if config is None else config)
    return root


def pickled_adapter(adapter: Path, root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    torch.save(load_file(adapter / "adapter_model.safetensors"), root / "adapter_model.bin")
    (root / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    return root


def factor_tensors(
    module: str, shape: tuple[int, int], rank: int, generator: torch.Generator, *, scale: float = 0.1
) -> dict[str, torch.Tensor]:
    rows, columns = shape
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.randn(rank, columns, generator=generator) * scale,
        f"{PREFIX}{module}.lora_B.weight": torch.randn(rows, rank, generator=generator) * scale,
    }


def tiny_lora(
    root: Path,
    base: Mapping[str, torch.Tensor],
    seed: int,
    *,
    targets: Sequence[str] = LLAMA_TARGETS,
    dtype: torch.dtype = torch.float32,
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = tensor.shape
            tensors |= factor_tensors(module, (rows, columns), 4, generator)
    settings = lora_config(target_modules=list(targets))
    return write_adapter(root, {name: tensor.to(dtype) for name, tensor in tensors.items()}, settings)


def peft_merge(base: Mapping[str, torch.Tensor], root: Path) -> dict[str, torch.Tensor]:
    """The model ``base`` with the adapter at ``root`` merged in, float64, as peft's modules compute it.

    Raises:
        AssertionError: a tensor that peft would look for is missing, or there is one that it would not use.
    """
    config = json.loads((root / "adapter_config.json").read_text())
    left = {name: tensor.double() for name, tensor in load_file(root / "adapter_model.safetensors").items()}
    merged = {name: tensor.double() for name, tensor in base.items()}
    modules = {name.rpartition(".")[0] for name in base}
    saved = {m for m in modules if any(m.endswith(key) for key in config["modules_to_save"] or ())}
    for name in base:
        if name.rpartition(".")[0] in saved:
            merged[name] = left.pop(PREFIX + name)
        elif config["bias"] == "all" and "bias" in name:
            wrapped = PREFIX + name.removesuffix("bias") + "base_layer.bias"
            merged[name] = left.pop(wrapped, merged[name])
    for module in sorted(modules - saved):
        if _is_targeted(module, config["target_modules"]):
            name = f"{module}.weight"
            _add_bias(merged, module, config, left)
            merged[name] = _changed(merged[name], module, config, left)
    assert not left, f"peft would not use {sorted(left)}"
    return merged


def _is_targeted(module: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return module in targets or any(module.endswith(f".{target}") for target in targets)


def _number(patterns: Mapping[str, float], module: str, default: float) -> float:
    keys = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    found = next(keys, None)
    return default if found is None else patterns[found]


def _scale(module: str, config: Mapping[str, Any]) -> tuple[int, float]:
    rank = int(_number(config["rank_pattern"], module, config["r"]))
    alpha = _number(config["alpha_pattern"], module, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def _add_bias(
    merged: dict[str, torch.Tensor], module: str, config: Mapping[str, Any], left: dict[str, torch.Tensor]
) -> None:
    bias = left.pop(f"{PREFIX}{module}.lora_B.bias", None)
    if bias is not None:
        assert config["lora_bias"]
        merged[f"{module}.bias"] = merged[f"{module}.bias"] + _scale(module, config)[1] * bias


def _changed(
    weight: torch.Tensor, module: str, config: Mapping[str, Any], left: dict[str, torch.Tensor]
) -> torch.Tensor:
    rank, scale = _scale(module, config)
    is_embedding = f"{PREFIX}{module}.lora_embedding_A" in left
    a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
    down, up = left.pop(f"{PREFIX}{module}.{a}"), left.pop(f"{PREFIX}{module}.{b}")
    assert down.shape[0] == up.shape[1] == rank
    flipped = is_embedding or config["fan_in_fan_out"]
    changed = (weight.T if flipped else weight) + scale * (up @ down)
    if config["use_dora"]:
        magnitude = left.pop(f"{PREFIX}{module}.lora_magnitude_vector")
        changed = changed * (magnitude / changed.norm(dim=1))[:, None]
    return changed.T if flipped else changed
