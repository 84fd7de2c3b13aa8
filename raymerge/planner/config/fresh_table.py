"""``quantization_config`` for an output in a format that its config's donor does not have.

Fields are those that publishers write: DeepSeek-V3 for block FP8, gpt-oss for its MXFP4, and for the others
compressed-tensors, as in Kimi-K2-Thinking (INT4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from raymerge.checkpoints.quantisation.encoding import Format, Packing

_FORMATS: Mapping[Format, str] = MappingProxyType(
    {
        Format.FP8_CHANNEL: "float-quantized",
        Format.FP8_TENSOR: "float-quantized",
        Format.INT4: "pack-quantized",
        Format.MXFP4_ROWS: "mxfp4-pack-quantized",
        Format.NVFP4: "nvfp4-pack-quantized",
    }
)
"""What compressed-tensors calls what it packs."""
_STRATEGIES: Mapping[Format, str] = MappingProxyType(
    {Format.FP8_CHANNEL: "channel", Format.FP8_TENSOR: "tensor", Format.NVFP4: "tensor_group"}
)
"""What of the tensor shares a scale, where that is not a group."""
_BY_TOKEN = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}


def fresh_table(
    packing: Packing, plain: Sequence[str], *, cache: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The table that says how all tensors of codes are stored.

    Args:
        packing: how one of them is; the others differ in their shapes.
        plain: paths of the modules whose matrices are plain numbers.
        cache: how keys and values are stored while a model runs (``kv_cache_scheme``), where there are scales
            for them; only compressed-tensors says so.
    """
    if packing.format in _FORMATS:
        return _compressed(packing, plain, cache)
    listed = {"modules_to_not_convert": list(plain)}
    if packing.format is Format.MXFP4:
        return {**listed, "quant_method": "mxfp4"}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        **listed,
        "quant_method": "fp8",
        **({"scale_fmt": "ue8m0"} if packing.power_of_two else {}),
        "weight_block_size": list(packing.block),
    }


def _compressed(packing: Packing, plain: Sequence[str], cache: Mapping[str, Any] | None) -> dict[str, Any]:
    # Codes of 8 bits are for activations in 8 bits too; those of 4 bits are for plain ones.
    activations = dict(_BY_TOKEN) if packing.format.is_fp8 else None
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": _weights(packing),
    }
    return {
        "config_groups": {"group_0": group},
        "format": _FORMATS[packing.format],
        "ignore": list(plain),
        "kv_cache_scheme": None if cache is None else dict(cache),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _weights(packing: Packing) -> dict[str, Any]:
    return {
        "dynamic": False,
        "group_size": None if packing.format.is_fp8 else packing.block[1],
        "num_bits": packing.code_bits,
        **({"scale_dtype": "torch.uint8"} if packing.format is Format.MXFP4_ROWS else {}),
        "strategy": _STRATEGIES.get(packing.format, "group"),
        "symmetric": True,
        "type": "int" if packing.format is Format.INT4 else "float",
    }
