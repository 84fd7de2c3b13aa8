"""Recognises quantised tensors, so that nothing is ever computed on raw codes.

A quantised weight and its scale are one logical tensor. Until a codec for a format exists, such tensors may
be copied from one source, bytes and scales alike, and combining them is refused by the format's name.
"""

from __future__ import annotations

from collections.abc import Mapping

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint
from raymerge.dtypes import DType

_PARTNER_SUFFIXES = {
    "_scale_inv": "block FP8",
    ".weight_scale": "FP8 with weight_scale",
    ".input_scale": "FP8 with weight_scale",
    ".qscale_weight": "FP8 with qscale_weight",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
    ".weight_packed": "packed INT4",
    ".weight_shape": "packed INT4",
    ".weight_global_scale": "NVFP4",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ or AWQ",
    ".scales": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
}


def quantised_format(tensor: StoredTensor, checkpoint: Checkpoint) -> str | None:
    """Name of the quantised format that a tensor belongs to, as code or as scale; None for plain numbers.

    Suffixes count only where the checkpoint declares a quantisation or really stores codes beside them, so
    that a plain tensor that happens to be called ``scales`` is not one.
    """
    if tensor.dtype.is_narrow_float:
        return _narrow_format(tensor, checkpoint)
    suffix = next((s for s in _PARTNER_SUFFIXES if tensor.name.endswith(s)), None)
    if suffix is not None and (_declares(checkpoint.config) or _has_codes(tensor.name, suffix, checkpoint)):
        return _PARTNER_SUFFIXES[suffix]
    if tensor.dtype in (DType.U8, DType.I8, DType.I32) and tensor.name.endswith(".weight"):
        return f"{tensor.dtype.value} codes" if _declares(checkpoint.config) else None
    return None


def _narrow_format(tensor: StoredTensor, checkpoint: Checkpoint) -> str:
    names = checkpoint.tensors
    if f"{tensor.name}_scale_inv" in names:
        return "block FP8"
    if tensor.name.endswith(".weight") and f"{tensor.name}_scale" in names:
        return "FP8 with weight_scale"
    return f"{tensor.dtype.value} without a scale beside it"


def _declares(config: Mapping[str, object]) -> bool:
    nested = config.get("text_config")
    inner = nested.get("quantization_config") if isinstance(nested, Mapping) else None
    return bool(config.get("quantization_config") or inner or config.get("compression_config"))


def _has_codes(name: str, suffix: str, checkpoint: Checkpoint) -> bool:
    stem = name.removesuffix(suffix)
    beside = (checkpoint.tensors.get(stem), checkpoint.tensors.get(f"{stem}.weight"))
    return any(tensor is not None and tensor.dtype.is_narrow_float for tensor in beside) or any(
        f"{stem}{other}" in checkpoint.tensors for other in _PARTNER_SUFFIXES if other != suffix
    )
