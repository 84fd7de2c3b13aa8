"""Checkpoints without data in which one module is stored as codes, and what is found in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kits.plan_maker import Specs, header_checkpoint

from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_STACK, FP8_TENSOR, MXFP8
from raymerge.checkpoints.quantisation.int4 import INT4, INT4_ASYMMETRIC, INT4_CHANNEL
from raymerge.checkpoints.quantisation.int8 import INT8_ASYMMETRIC, INT8_CHANNEL
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4, MXFP4_BYTES, MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4, NVFP4_MODELOPT, NVFP4_STACK
from raymerge.checkpoints.source import open_checkpoint
from raymerge.dtypes import DType

X = "model.layers.0.mlp.up_proj"
E = "model.layers.0.mlp.experts"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MX = {"quant_method": "mxfp4"}


def compressed(*weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    groups = {
        f"group_{number}": {
            "targets": ["re:.*self_attn.*" if number + 1 < len(weights) else "Linear"],
            "weights": dict(each),
        }
        for number, each in enumerate(weights)
    }
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
W8 = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def look(root: Path, specs: Specs, table: Mapping[str, Any] | None = None, **config: Any) -> QuantisedWeights:
    fields = {"model_type": "llama", **config} | ({"quantization_config": table} if table else {})
    checkpoint = open_checkpoint(header_checkpoint(root, specs, fields), "a model")
    return packed_tensors(checkpoint, [table] if table else [])


def fault(found: QuantisedWeights) -> str:
    (problem,) = found.faults
    assert problem.remedy
    return str(problem)


def f8(*shape: int) -> tuple[DType, tuple[int, ...]]:
    return DType.F8_E4M3, shape


def f32(*shape: int) -> tuple[DType, tuple[int, ...]]:
    return DType.F32, shape


GOOD: dict[str, tuple[Specs, Mapping[str, Any], tuple[Format, tuple[int, ...], tuple[int, int]]]] = {
    "DeepSeek-V3, ragged rows": (
        {f"{X}.weight": f8(576, 7168), f"{X}.weight_scale_inv": f32(5, 56)},
        FP8,
        (FP8_BLOCK, (576, 7168), (128, 128)),
    ),
    "DeepSeek-V4": (
        {f"{X}.weight": f8(256, 256), f"{X}.scale": (DType.F8_E8M0, (2, 2))},
        {**FP8, "scale_fmt": "ue8m0"},
        (FP8_BLOCK, (256, 256), (128, 128)),
    ),
    "smaller than a block": (
        {f"{X}.weight": f8(64, 32), f"{X}.weight_scale_inv": f32(1, 1)},
        FP8,
        (FP8_BLOCK, (64, 32), (128, 128)),
    ),
    "no block size is 128x128": (
        {f"{X}.weight": f8(256, 300), f"{X}.weight_scale_inv": (DType.BF16, (2, 3))},
        {"quant_method": "fp8"},
        (FP8_BLOCK, (256, 300), (128, 128)),
    ),
    "fused experts": (
        {f"{E}.gate_up_proj": f8(4, 256, 300), f"{E}.gate_up_proj_scale_inv": f32(4, 2, 3)},
        FP8,
        (FP8_BLOCK, (4, 256, 300), (128, 128)),
    ),
    "one scale of FP8": (
        {f"{X}.weight": f8(64, 32), f"{X}.weight_scale": f32(), f"{X}.input_scale": f32()},
        {"quant_method": "fp8", "weight_block_size": None},
        (FP8_TENSOR, (64, 32), (64, 32)),
    ),
    "per tensor": (
        {f"{X}.weight": f8(64, 32), f"{X}.weight_scale": f32(1), f"{X}.input_scale": f32(1)},
        compressed(TENSOR),
        (FP8_TENSOR, (64, 32), (64, 32)),
    ),
    "per channel [rows, 1]": (
        {f"{X}.weight": f8(64, 32), f"{X}.weight_scale": (DType.BF16, (64, 1))},
        compressed(CHANNEL, format="float-quantized"),
        (FP8_CHANNEL, (64, 32), (1, 32)),
    ),
    "per channel [rows]": (
        {f"{X}.weight": f8(64, 32), f"{X}.weight_scale": f32(64)},
        compressed(CHANNEL),
        (FP8_CHANNEL, (64, 32), (1, 32)),
    ),
    "one row per channel": (
        {f"{X}.weight": f8(1, 32), f"{X}.weight_scale": f32(1, 1)},
        compressed(CHANNEL),
        (FP8_CHANNEL, (1, 32), (1, 32)),
    ),
    "blocks of compressed-tensors": (
        {f"{X}.weight": f8(256, 130), f"{X}.weight_scale": f32(2, 2)},
        compressed({**BLOCK, "block_structure": "128x128"}),
        (FP8_BLOCK, (256, 130), (128, 128)),
    ),
    "MXFP8": (
        {f"{X}.weight": f8(4, 64), f"{X}.weight_scale": (DType.U8, (4, 2))},
        compressed(GROUP),
        (FP8_BLOCK, (4, 64), (1, 32)),
    ),
    "MXFP8 of compressed-tensors": (
        {f"{X}.weight": f8(4, 64), f"{X}.weight_scale": (DType.U8, (4, 2))},
        compressed({**GROUP, "scale_dtype": "torch.uint8"}, format="mxfp8-quantized"),
        (MXFP8, (4, 64), (1, 32)),
    ),
    "MXFP8 of ModelOpt": (
        {f"{X}.weight": f8(4, 64), f"{X}.weight_scale": (DType.U8, (4, 2))},
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": ["lm_head"]},
        (MXFP8, (4, 64), (1, 32)),
    ),
    "MXFP8 by its other name": (
        {f"{X}.weight": f8(1, 32), f"{X}.weight_scale_inv": (DType.U8, (1, 1))},
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        (MXFP8, (1, 32), (1, 32)),
    ),
    "FP8 of ModelOpt": (
        {f"{X}.weight": f8(64, 32), f"{X}.weight_scale": f32(), f"{X}.input_scale": f32()},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        (FP8_TENSOR, (64, 32), (64, 32)),
    ),
    "NVFP4 of ModelOpt": (
        {
            f"{X}.weight": (DType.U8, (6, 32)),
            f"{X}.weight_scale": f8(6, 4),
            f"{X}.weight_scale_2": f32(),
            f"{X}.input_scale": f32(),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.self_attn*"]},
        (NVFP4_MODELOPT, (6, 64), (1, 16)),
    ),
    "NVFP4 of ModelOpt in a stack": (
        {
            f"{E}.down_proj": (DType.U8, (4, 16, 6)),
            f"{E}.down_proj_weight_scale": f8(4, 2, 6),
            f"{E}.down_proj_weight_scale_2": f32(),
            f"{E}.down_proj_input_scale": f32(),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        (NVFP4_STACK, (4, 32, 6), (16, 1)),
    ),
    "FP8 of ModelOpt in a stack": (
        {
            f"{E}.down_proj": f8(4, 32, 6),
            f"{E}.down_proj_weight_scale": f32(),
            f"{E}.down_proj_input_scale": f32(),
        },
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        (FP8_STACK, (4, 32, 6), (32, 6)),
    ),
    "DeepSeek-V4's experts": (
        {f"{X}.weight": (DType.I8, (4, 32)), f"{X}.scale": (DType.F8_E8M0, (4, 2))},
        {**FP8, "expert_dtype": "fp4"},
        (MXFP4_BYTES, (4, 64), (1, 32)),
    ),
    "DeepSeek-V4's experts, of which the config is silent": (
        {f"{X}.weight": (DType.I8, (1, 16)), f"{X}.scale": (DType.F8_E8M0, (1, 1))},
        FP8,
        (MXFP4_BYTES, (1, 32), (1, 32)),
    ),
    "gpt-oss": (
        {f"{E}.down_proj_blocks": (DType.U8, (4, 6, 3, 16)), f"{E}.down_proj_scales": (DType.U8, (4, 6, 3))},
        MX,
        (MXFP4, (4, 6, 96), (1, 32)),
    ),
    "Kimi-K3": (
        {f"{X}.weight_packed": (DType.U8, (6, 32)), f"{X}.weight_scale": (DType.U8, (6, 2))},
        compressed({**NV, "strategy": "group", "group_size": 32}),
        (MXFP4_ROWS, (6, 64), (1, 32)),
    ),
    "Kimi-K2-Thinking": (
        {
            f"{X}.weight_packed": (DType.I32, (6, 8)),
            f"{X}.weight_scale": (DType.BF16, (6, 2)),
            f"{X}.weight_shape": (DType.I64, (2,)),
        },
        compressed(W4),
        (INT4, (6, 64), (1, 32)),
    ),
    "INT4 with zero points": (
        {
            f"{X}.weight_packed": (DType.I32, (12, 8)),
            f"{X}.weight_scale": (DType.BF16, (12, 2)),
            f"{X}.weight_shape": (DType.I64, (2,)),
            f"{X}.weight_zero_point": (DType.I32, (2, 2)),
        },
        compressed({**W4, "symmetric": False}),
        (INT4_ASYMMETRIC, (12, 64), (1, 32)),
    ),
    "INT8 per channel": (
        {f"{X}.weight": (DType.I8, (6, 30)), f"{X}.weight_scale": (DType.BF16, (6, 1))},
        compressed({**W8, "strategy": "channel"}, format="int-quantized"),
        (INT8_CHANNEL, (6, 30), (1, 30)),
    ),
    "INT8 per channel with zero points": (
        {
            f"{X}.weight": (DType.I8, (6, 30)),
            f"{X}.weight_scale": f32(6, 1),
            f"{X}.weight_zero_point": (DType.I8, (6, 1)),
        },
        compressed({**W8, "strategy": "channel", "symmetric": False}, format="int-quantized"),
        (INT8_ASYMMETRIC, (6, 30), (1, 30)),
    ),
    "INT8 with zero points in one dimension": (
        {
            f"{X}.weight": (DType.I8, (6, 30)),
            f"{X}.weight_scale": f32(6),
            f"{X}.weight_zero_point": (DType.I8, (6,)),
        },
        compressed({**W8, "strategy": "channel", "symmetric": False}, format="int-quantized"),
        (INT8_ASYMMETRIC, (6, 30), (1, 30)),
    ),
    "INT4 beside wider integers": (
        {f"{X}.weight_packed": (DType.I32, (6, 8)), f"{X}.weight_scale": (DType.BF16, (6, 2))},
        compressed(W8, W4),
        (INT4, (6, 64), (1, 32)),
    ),
    "INT4 per channel": (
        {f"{X}.weight_packed": (DType.I32, (6, 8)), f"{X}.weight_scale": (DType.F16, (6, 1))},
        compressed({**W4, "strategy": "channel", "group_size": None, "actorder": "static"}),
        (INT4_CHANNEL, (6, 64), (1, 64)),
    ),
    "NVFP4": (
        {
            f"{X}.weight_packed": (DType.U8, (6, 16)),
            f"{X}.weight_scale": f8(6, 2),
            f"{X}.weight_global_scale": f32(1),
            f"{X}.input_global_scale": f32(1),
        },
        compressed(NV),
        (NVFP4, (6, 32), (1, 16)),
    ),
}
