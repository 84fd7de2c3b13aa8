"""Tiny models whose matrices have one scale each, alone or beside those of blocks.

Parents of one layout are the same model plus a little that hangs on the seed, each quantised by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kits.checkpoint_maker import TOKENIZER_FILES, fields, llama_config, llama_shapes, write_checkpoint
from kits.packed_headers import compressed
from kits.quantised_models import QuantisedModel
from kits.quantised_numbers import Coded, Values, fp8_matrices, mxfp8, nvfp4, parent_numbers, plain

Shapes = Mapping[str, tuple[int, ...]]
Parts = Mapping[str, torch.Tensor]

EXPERTS = 3
JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices that have one scale of NVFP4 together, as servers join them."""
ODD = "o_proj"
"""A matrix whose scale of NVFP4 is for much larger numbers than it has, and that of FP8 of no dimension."""
_JOINED_LARGEST = 0.25
_HIDDEN, _WIDTH = 32, 48
_WEIGHTS: Mapping[str, Mapping[str, Any]] = fields(
    "float-quantized: {num_bits: 8, type: float, strategy: tensor, symmetric: true}, "
    "nvfp4-pack-quantized: {num_bits: 4, type: float, strategy: tensor_group, group_size: 16, "
    "symmetric: true}"
)


def fp8_llama(root: Path, seed: int, *, shapes: Shapes | None = None) -> QuantisedModel:
    return _llama(root, seed, "float-quantized", _as_fp8, shapes)


def nvfp4_llama(root: Path, seed: int, *, shapes: Shapes | None = None) -> QuantisedModel:
    return _llama(root, seed, "nvfp4-pack-quantized", _as_nvfp4, shapes)


def modelopt_llama(root: Path, seed: int, algorithm: str, *, is_legacy: bool = False) -> QuantisedModel:
    """As NVIDIA publishes it: the table in the config, and in a file beside it, or there alone."""
    size = {"NVFP4": 16, "MXFP8": 32}.get(algorithm)
    algorithms = {"quant_algo": algorithm, **({"group_size": size} if size else {})}
    table = {**algorithms, "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "modelopt"}
    beside = {**algorithms, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    config = llama_config(layers=1, hidden=64)
    return _written(
        root,
        seed,
        config if is_legacy else {**config, "quantization_config": table},
        llama_shapes(config),
        lambda name: name.endswith("_proj.weight"),
        _MODELOPT[algorithm],
        {"hf_quant_config.json": json.dumps({"producer": {"name": "modelopt"}, "quantization": beside})},
    )


def nvfp4_mixture(
    root: Path,
    seed: int,
    *,
    words: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    is_modelopt: bool = False,
) -> QuantisedModel:
    """Experts that are stored one by one, and attention with latent inputs; what is joined has one scale."""
    block, attention = "model.layers.0.mlp", "model.layers.0.self_attn"
    sizes = zip(words, ((_WIDTH, _HIDDEN), (_WIDTH, _HIDDEN), (_HIDDEN, _WIDTH)), strict=True)
    shapes = {
        "model.embed_tokens.weight": (16, _HIDDEN),
        f"{attention}.q_a_proj.weight": (16, _HIDDEN),
        f"{attention}.kv_a_proj_with_mqa.weight": (24, _HIDDEN),
        f"{block}.gate.weight": (2, _HIDDEN),
        **{f"{block}.experts.{e}.{word}.weight": size for word, size in sizes for e in range(2)},
        "model.norm.weight": (_HIDDEN,),
    }
    config = llama_config(layers=1, hidden=_HIDDEN, vocab=16, tie=True) | {
        "model_type": "mixtral",
        "num_local_experts": 2,
    }
    table = _table("nvfp4-pack-quantized")
    if is_modelopt:
        table = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    is_code = lambda name: ".experts." in name or "_a_proj" in name  # noqa: E731
    stored = partial(_as_nvfp4, is_modelopt=is_modelopt, largest=_JOINED_LARGEST)
    return _written(root, seed, {**config, "quantization_config": table}, shapes, is_code, stored)


def fp8_mixture(root: Path, seed: int) -> QuantisedModel:
    block = "model.layers.0.mlp"
    shapes = {
        "model.embed_tokens.weight": (16, _HIDDEN),
        f"{block}.gate.weight": (EXPERTS, _HIDDEN),
        f"{block}.experts.gate_up_proj": (EXPERTS, 2 * _WIDTH, _HIDDEN),
        f"{block}.experts.down_proj": (EXPERTS, _HIDDEN, _WIDTH),
        "model.norm.weight": (_HIDDEN,),
    }
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_local_experts": EXPERTS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDTH,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": None},
    }
    return _written(root, seed, config, shapes, lambda name: "experts" in name, _as_fp8_experts)


def _llama(
    root: Path,
    seed: int,
    form: str,
    stored: Callable[[str, Values], tuple[Coded, Parts]],
    shapes: Shapes | None,
) -> QuantisedModel:
    table, config = _table(form), llama_config(layers=1, hidden=64)
    return _written(
        root,
        seed,
        {**config, "quantization_config": table},
        llama_shapes(config) if shapes is None else shapes,
        lambda name: name.endswith("_proj.weight"),
        stored,
    )


def _table(form: str) -> dict[str, Any]:
    return compressed(_WEIGHTS[form], format=form, ignore=["lm_head"])


def _written(
    root: Path,
    seed: int,
    config: Mapping[str, Any],
    shapes: Shapes,
    is_code: Callable[[str], bool],
    stored: Callable[[str, Values], tuple[Coded, Parts]],
    extra: Mapping[str, str] | None = None,
) -> QuantisedModel:
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Values] = {}
    for name, shape in shapes.items():
        numbers = parent_numbers(name, shape, seed)
        if is_code(name):
            coded, parts = stored(name, numbers)
            values[name] = coded.values
            tensors |= parts
        else:
            tensors[name], values[name] = plain(numbers, torch.bfloat16)
    _join_inputs(tensors)
    # Codes and their scales lie in several files.
    write_checkpoint(root, tensors, config, files=3, extra={**TOKENIZER_FILES, **(extra or {})})
    return QuantisedModel(root, values, frozenset(name for name in shapes if is_code(name)))


def _as_fp8(name: str, values: Values, *, is_modelopt: bool = False) -> tuple[Coded, Parts]:
    coded = fp8_matrices(values)
    inputs = torch.tensor([float(np.abs(values).sum())])
    scale = coded.scales.squeeze() if is_modelopt or ODD in name else coded.scales
    parts = {"weight": coded.codes, "weight_scale": scale}
    return coded, _of_module(name, {**parts, "input_scale": inputs.squeeze() if is_modelopt else inputs})


def _as_nvfp4(
    name: str, values: Values, *, is_modelopt: bool = False, largest: float | None = None
) -> tuple[Coded, Parts]:
    """``largest`` is what the scale of the whole matrix is for, where all have the same."""
    if largest is None:
        is_joined = any(word in name for word in JOINED)
        largest = _JOINED_LARGEST if is_joined else float(np.abs(values).max()) * (1024 if ODD in name else 1)
    coded = nvfp4(values, largest, is_factor=is_modelopt)
    assert coded.whole is not None
    inputs = torch.full_like(coded.whole, float(np.abs(values).sum()))
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    if is_modelopt:
        names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    parts = zip(names, (coded.codes, coded.scales, coded.whole, inputs), strict=True)
    return coded, _of_module(name, dict(parts))


def _as_mxfp8(name: str, values: Values) -> tuple[Coded, Parts]:
    coded = mxfp8(values)
    return coded, _of_module(name, {"weight": coded.codes, "weight_scale": coded.scales})


_MODELOPT = {
    "NVFP4": partial(_as_nvfp4, is_modelopt=True),
    "FP8": partial(_as_fp8, is_modelopt=True),
    "MXFP8": _as_mxfp8,
}


def _of_module(name: str, parts: Parts) -> Parts:
    return {f"{name.removesuffix('weight')}{word}": tensor for word, tensor in parts.items()}


def _join_inputs(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        first = re.sub(r"\.[kv]_proj\.(input\w+)$", r".q_proj.\1", name)
        first = re.sub(r"\.up_proj\.(input\w+)$", r".gate_proj.\1", first)
        tensors[name] = tensors.get(first, tensor)


def _as_fp8_experts(name: str, values: Values) -> tuple[Coded, Parts]:
    coded = fp8_matrices(values)
    scales = coded.scales[:, None] if name.endswith("down_proj") else coded.scales
    return coded, {name: coded.codes, f"{name}_scale": scales}
