"""Codes and scales by the definitions of their formats, in float64 on numpy arrays, without the codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
from kits.quantised_numbers import e2m1_values, e4m3_values
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_STACK, FP8_TENSOR, MXFP8
from raymerge.checkpoints.quantisation.int4 import (
    INT4,
    INT4_ASYMMETRIC,
    INT4_CHANNEL,
    INT4_CHANNEL_ASYMMETRIC,
)
from raymerge.checkpoints.quantisation.int8 import INT8_ASYMMETRIC, INT8_CHANNEL
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4, MXFP4_BYTES, MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4, NVFP4_MODELOPT, NVFP4_STACK
from raymerge.dtypes import DType

Array = NDArray[Any]


E4M3, E2M1 = e4m3_values(), e2m1_values()
ELEMENTS = {
    FP8_BLOCK: E4M3,
    FP8_CHANNEL: E4M3,
    FP8_TENSOR: E4M3,
    FP8_STACK: E4M3,
    MXFP8: E4M3,
    MXFP4: E2M1,
    MXFP4_ROWS: E2M1,
    MXFP4_BYTES: E2M1,
    NVFP4: E2M1,
    NVFP4_MODELOPT: E2M1,
    NVFP4_STACK: E2M1,
    INT4: np.arange(16.0) - 8,
    INT4_CHANNEL: np.arange(16.0) - 8,
    INT4_ASYMMETRIC: np.arange(16.0),
    INT4_CHANNEL_ASYMMETRIC: np.arange(16.0),
    INT8_CHANNEL: np.arange(256).astype(np.int8).astype(np.float64),
    INT8_ASYMMETRIC: np.arange(256).astype(np.int8).astype(np.float64),
}


def scale_numbers(dtype: DType, stored: Array) -> Array:
    if dtype in (DType.U8, DType.F8_E8M0):
        return np.where(stored == 255, np.nan, np.ldexp(1.0, stored.astype(np.int64) - 127))
    if dtype is DType.F8_E4M3:
        return E4M3[stored]
    if dtype is DType.BF16:
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.view("<f4" if dtype is DType.F32 else "<f2").astype(np.float64)


def unpack(quant_spec: QuantSpec, codes: Array) -> Array:
    if quant_spec.format.code_bits == 4:
        # In stacks two rows share a byte.
        codes = codes.reshape(-1, quant_spec.columns) if quant_spec.format == NVFP4_STACK else codes
        codes = np.stack([codes & 15, codes >> 4], axis=1)
    return codes.reshape(-1, quant_spec.columns)


def elements_of(quant_spec: QuantSpec, codes: Array) -> Array:
    return ELEMENTS[quant_spec.format][unpack(quant_spec, codes)]


def num_steps(form: Format) -> float:
    """The largest element, or where any may stand for 0, how far the outermost are apart."""
    elements = ELEMENTS[form][~np.isnan(ELEMENTS[form])]
    return float(np.abs(elements).max() if form.zero_points is None else np.ptp(elements))


def zeros_of(quant_spec: QuantSpec, stored: Array | None) -> Array:
    """The elements that stand for 0, [rows, columns]; INT4 has them down the rows, eight to an int32, the
    first one lowest."""
    if stored is None:
        return np.zeros((1, 1))
    grid = stored.view(np.int8)
    if quant_spec.format in (INT4_ASYMMETRIC, INT4_CHANNEL_ASYMMETRIC):
        words = stored.view("<u4").reshape(-1, 1, quant_spec.grid[1])
        grid = words >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15
    grid = grid.reshape(-1, quant_spec.grid[1])[: quant_spec.rows]
    return spread(quant_spec, grid.astype(np.float64), quant_spec.rows)


def spread(quant_spec: QuantSpec, grid: Array, num_rows: int) -> Array:
    height, width = quant_spec.block
    return grid.repeat(height, axis=0)[:num_rows].repeat(width, axis=1)[:, : quant_spec.columns]


def steps_of(quant_spec: QuantSpec, scales: Array, tensor_scale: float | None, num_rows: int) -> Array:
    """What elements are multiplied by: float64 [rows, columns] of numbers that float32 holds."""
    if quant_spec.format in (FP8_TENSOR, FP8_STACK):
        return np.full((num_rows, quant_spec.columns), tensor_scale)
    grid = scale_numbers(quant_spec.scale_dtype, scales).reshape(-1, quant_spec.grid[1])
    if quant_spec.format == NVFP4:
        grid = (grid / tensor_scale).astype(np.float32).astype(np.float64)
    if quant_spec.format in (NVFP4_MODELOPT, NVFP4_STACK):
        grid = (grid * tensor_scale).astype(np.float32).astype(np.float64)
    return spread(quant_spec, grid, num_rows)


def reference_decode(
    quant_spec: QuantSpec,
    codes: Array,
    scales: Array,
    tensor_scale: float | None,
    zero_points: Array | None = None,
) -> Array:
    """float32 [rows, columns]: the exact product, rounded once."""
    elements = elements_of(quant_spec, codes)
    if zero_points is not None:
        elements = elements - zeros_of(quant_spec, zero_points)
    with np.errstate(over="ignore"):
        return (elements * steps_of(quant_spec, scales, tensor_scale, len(elements))).astype(np.float32)


def nearest_codes(form: Format, quotients: Array) -> Array:
    """The code with the nearest element, among two the even one; -0 is nearest to what has its sign."""
    elements = ELEMENTS[form]
    signs = np.signbit(elements)
    distances = np.abs(quotients[..., None] - elements)
    distances[np.isnan(distances)] = np.inf
    if signs[elements == 0].any():
        distances[signs != np.signbit(quotients)[..., None]] = np.inf
    # Before an odd code that is as near, the even one: it comes first in this order.
    order = np.argsort(np.arange(elements.size) % 2, kind="stable")
    return order[np.argmin(distances[..., order], axis=-1)].astype(np.uint8)
