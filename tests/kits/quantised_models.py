"""Tiny checkpoints in the layouts in which quantised mixtures of experts are published.

Parents of one layout are the same model plus a little that hangs on the seed, each quantised by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import TOKENIZER_FILES, write_json
from kits.deepseek_headers import KIMI_TABLE, deepseek_shapes, is_fp8
from kits.deepseek_v4_headers import SMALL_CONFIG, Experts, is_float32, scale_name, v4_shapes, with_experts
from kits.deepseek_v4_headers import is_fp8 as is_coded
from kits.fused_headers import gpt_oss_shapes
from kits.quantised_numbers import (
    Coded,
    ScaleKind,
    Values,
    fp8_blocks,
    int4,
    mxfp4,
    nvfp4,
    parent_numbers,
    plain,
)
from safetensors.torch import save_file

from raymerge.checkpoints.source import natural_key

_HIDDEN, _VOCAB, _EXPERTS = 256, 64, 4


@dataclass(frozen=True, slots=True)
class QuantisedModel:
    root: Path
    values: Mapping[str, Values]
    """What the stored numbers mean, by logical name, in the stored order of dimensions."""
    quantised: frozenset[str]


def deepseek_v3(root: Path, seed: int, *, scales: ScaleKind = "F32", ragged: bool = True) -> QuantisedModel:
    made, config = _deepseek_v3(seed, scales, ragged)
    return made.write(root, config)


@lru_cache(8)
def _deepseek_v3(seed: int, scales: ScaleKind, ragged: bool) -> tuple[_Made, Mapping[str, Any]]:
    table: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    table |= {"weight_block_size": [128, 128]} | ({} if scales == "F32" else {"scale_fmt": "ue8m0"})
    config = _deepseek_config(layers=2, mtp=1, kv_rank=208 if ragged else 64) | {"quantization_config": table}
    model = _Made(seed)
    for name, shape in deepseek_shapes(config):
        if is_fp8(name):
            model.code(name, shape, lambda values: fp8_blocks(values, scales), name, f"{name}_scale_inv")
        else:
            model.plain(name, shape)
    return model, config


def kimi_k2_thinking(root: Path, seed: int) -> QuantisedModel:
    config = _deepseek_config(layers=2, mtp=0, kv_rank=64) | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "quantization_config": dict(KIMI_TABLE),
    }
    model = _Made(seed)
    for name, shape in deepseek_shapes(config):
        if ".experts." in name:
            module = name.removesuffix(".weight")
            model.code(name, shape, int4, f"{module}.weight_packed", f"{module}.weight_scale")
            model.tensors[f"{module}.weight_shape"] = torch.tensor(shape)
        else:
            model.plain(name, shape)
    return model.write(root, config)


def deepseek_v4(root: Path, seed: int, *, experts: Experts = "fp4") -> QuantisedModel:
    model = _Made(seed)
    for name, shape in v4_shapes(SMALL_CONFIG):
        if name.endswith("tid2eid"):
            model.tensors[name] = torch.arange(shape[0] * shape[1]).view(shape).int() % _EXPERTS
        elif not is_coded(name):
            model.plain(name, shape, torch.float32 if is_float32(name) else torch.bfloat16)
        elif ".experts." in name and experts == "fp4":
            model.code(name, shape, _in_bytes, name, scale_name(name))
        else:
            model.code(name, shape, lambda values: fp8_blocks(values, "F8_E8M0"), name, scale_name(name))
    return model.write(root, with_experts(SMALL_CONFIG, experts))


def gpt_oss(root: Path, seed: int) -> QuantisedModel:
    config = _gpt_oss_config()
    model = _Made(seed)
    for name, shape in gpt_oss_shapes(config):
        if name.endswith(("gate_up_proj", "down_proj")):
            model.code(name, shape, mxfp4, f"{name}_blocks", f"{name}_scales")
        else:
            model.plain(name, shape)
    return model.write(root, config)


def three_formats(root: Path, seed: int) -> QuantisedModel:
    """As NVIDIA publishes DeepSeek-V4: experts in NVFP4, of the next-token layer in MXFP4, the rest FP8."""
    config = _deepseek_config(layers=2, mtp=1, kv_rank=64) | {"expert_dtype": "fp4"}
    model, layers = _Made(seed), dict[str, Any]()
    for name, shape in deepseek_shapes(config):
        module = name.removesuffix(".weight")
        if ".experts." in name and ".layers.2." in name:
            model.code(name, shape, _in_bytes, name, f"{module}.scale")
        elif ".experts." in name:
            model.code(name, shape, lambda values: nvfp4(values, 0.3, is_factor=True), name, f"{name}_scale")
            model.tensors[f"{module}.input_scale"] = torch.tensor(0.5)
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        elif is_fp8(name):
            model.code(name, shape, lambda values: fp8_blocks(values, "F8_E8M0"), name, f"{module}.scale")
        else:
            model.plain(name, shape)
    table: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "moe_quant_algo": "NVFP4"}
    table |= {"quant_method": "fp8", "quantized_layers": layers, "scale_fmt": "ue8m0"}
    return model.write(root, config | {"quantization_config": {**table, "weight_block_size": [128, 128]}})


def _in_bytes(values: Values) -> Coded:
    coded = mxfp4(values)
    codes = coded.codes.reshape(len(values), -1).view(torch.int8)
    return Coded(codes, coded.scales.view(torch.float8_e8m0fnu), coded.values)


class _Made:
    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seed = seed
        self._values: dict[str, Values] = {}
        self._quantised: set[str] = set()

    def code(
        self, name: str, shape: tuple[int, ...], quantise: Callable[[Values], Coded], codes: str, scales: str
    ) -> None:
        coded = quantise(parent_numbers(name, shape, self._seed))
        self.tensors |= {codes: coded.codes, scales: coded.scales}
        if coded.whole is not None:
            self.tensors[f"{codes}_scale_2"] = coded.whole
        self._values[name] = coded.values
        self._quantised.add(name)

    def plain(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        usual = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        values = parent_numbers(name, shape, self._seed)
        self.tensors[name], self._values[name] = plain(values, dtype or usual)

    def write(self, root: Path, config: Mapping[str, Any]) -> QuantisedModel:
        root.mkdir(parents=True, exist_ok=True)
        weight_map: dict[str, str] = {}
        names = sorted(self.tensors, key=natural_key)
        for place, name in enumerate(names):
            # Runs of neighbours, but for every third scale, which lies in the last file.
            apart = place % 3 == 0 and name.endswith(("_scale_inv", "_scale", "_scales", ".scale"))
            number = 3 if apart else place * 4 // len(names)
            weight_map[name] = f"model-{number + 1:05d}-of-000004.safetensors"
        for file in sorted(set(weight_map.values())):
            members = {name: self.tensors[name].contiguous() for name in names if weight_map[name] == file}
            save_file(members, root / file, metadata={"format": "pt"})
        write_json(root / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        write_json(root / "config.json", config)
        for file, text in TOKENIZER_FILES.items():
            (root / file).write_text(text)
        return QuantisedModel(root, self._values, frozenset(self._quantised))


def _deepseek_config(*, layers: int, mtp: int, kv_rank: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": 384,
        "kv_lora_rank": kv_rank,
        "max_position_embeddings": 128,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": mtp,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 64,
        "vocab_size": _VOCAB,
    }


def _gpt_oss_config() -> dict[str, Any]:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 256,
        "model_type": "gpt_oss",
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": _EXPERTS,
        "quantization_config": {"modules_to_not_convert": kept, "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": _VOCAB,
    }
