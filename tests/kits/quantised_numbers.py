"""A plain quantiser in float64: codes and scales from the definitions of the formats, and values from them.

Nothing here is fast, and nothing here is raymerge's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.float64]
ScaleKind = Literal["F32", "ue8m0 F32", "F8_E8M0", "U8"]
"""What block FP8 scales are: any F32, powers of two in F32, or exponents in one byte."""


@dataclass(frozen=True, slots=True)
class Coded:
    codes: torch.Tensor
    scales: torch.Tensor
    values: Values
    whole: torch.Tensor | None = None
    """The one scale of each matrix beside those of blocks, as stored; None where there is none."""


def parent_numbers(name: str, shape: tuple[int, ...], seed: int) -> Values:
    """What the parent of this seed has there: what all parents have, and a little of its own."""
    shared, own = (np.random.default_rng([crc32(name.encode()), each]) for each in (0, 1 + seed))
    middle = 1.0 if "norm" in name else 0.0
    return middle + shared.standard_normal(shape) * 0.05 + own.standard_normal(shape) * 0.005


def e4m3_values() -> Values:
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code < 128, size, -size)


def e2m1_values() -> Values:
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return np.concatenate([half, -half])


def fp8_blocks(values: Values, kind: ScaleKind, block: int = 128) -> Coded:
    scales = np.empty([-(-size // block) for size in values.shape])
    decoded, codes = np.empty_like(values), np.empty(values.shape, np.uint8)
    for row, column in np.ndindex(scales.shape):
        part = np.s_[row * block : (row + 1) * block, column * block : (column + 1) * block]
        scale = _fp8_scale(float(np.abs(values[part]).max()), kind)
        codes[part] = _nearest(values[part] / scale, e4m3_values()[:127], sign=128)
        decoded[part] = e4m3_values()[codes[part]] * scale
        scales[row, column] = scale
    return Coded(torch.from_numpy(codes).view(torch.float8_e4m3fn), _stored_scales(scales, kind), decoded)


def mxfp4(values: Values) -> Coded:
    """4-bit floats by runs of 32 columns of [..., rows, columns], in gpt-oss's shapes: 16 bytes a run.

    Codes lie in pairs, the first one lowest.
    """
    runs = values.reshape(*values.shape[:-1], -1, 32)
    largest = np.abs(runs).max(-1)
    exponents = np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 2
    scaled = runs / 2.0 ** exponents[..., None]
    codes = _nearest(scaled, e2m1_values()[:8], sign=8)
    pairs = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    decoded = e2m1_values()[codes] * 2.0 ** exponents[..., None]
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    return Coded(torch.from_numpy(pairs), scales, decoded.reshape(values.shape))


def int4(values: Values, group: int = 32) -> Coded:
    """Symmetric 4-bit integers in runs of columns."""
    runs = values.reshape(len(values), -1, group)
    scales = torch.from_numpy(np.abs(runs).max(-1) / 7).bfloat16()
    exact = scales.double().numpy()[..., None]
    numbers = np.clip(np.rint(runs / exact), -8, 7)
    packed = torch.from_numpy(int4_words(numbers.reshape(values.shape)))
    return Coded(packed, scales, (numbers * exact).reshape(values.shape))


def int4_words(codes: Values) -> NDArray[np.int32]:
    """Signed codes of 4 bits plus 8, eight of a row to an int32, the first lowest; unused ones are 0."""
    rows, columns = codes.shape
    unsigned = np.zeros((rows, -(-columns // 8) * 8), np.uint32)
    unsigned[:, :columns] = codes + 8
    shifted = unsigned.reshape(rows, -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(shifted, axis=2).view(np.int32)


def int4_codes(words: NDArray[np.int32]) -> Values:
    """The codes of ``int4_words``, with what fills the last words of rows."""
    unsigned = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return unsigned.reshape(len(words), -1).astype(np.float64) - 8


def fp8_matrices(values: Values) -> Coded:
    largest = np.abs(values).max((-2, -1))
    scales = (largest / 400).astype(np.float32)
    exact = scales.astype(np.float64)[..., None, None]
    codes = _nearest(values / exact, e4m3_values()[:127], sign=128)
    stored = torch.from_numpy(scales.reshape(values.shape[:-2] or (1,)))
    return Coded(torch.from_numpy(codes).view(torch.float8_e4m3fn), stored, e4m3_values()[codes] * exact)


def mxfp8(values: Values) -> Coded:
    """8-bit floats by runs of 32 columns; by OCP's rule the largest may be cut off at 448 times the scale."""
    runs = values.reshape(len(values), -1, 32)
    largest = np.abs(runs).max(-1)
    exponents = np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 8
    steps = 2.0 ** exponents[..., None]
    codes = _nearest(runs / steps, e4m3_values()[:127], sign=128)
    decoded = (e4m3_values()[codes] * steps).reshape(values.shape)
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    stored = torch.from_numpy(codes.reshape(values.shape)).view(torch.float8_e4m3fn)
    return Coded(stored, scales, decoded)


def nvfp4(values: Values, largest: float, *, is_factor: bool = False) -> Coded:
    """4-bit floats by runs of 16 columns; the one scale is ModelOpt's factor, or a divisor."""
    whole = torch.tensor(largest / (448 * 6)) if is_factor else torch.tensor([448 * 6 / largest])
    runs = values.reshape(len(values), -1, 16)
    steps_of_runs = torch.from_numpy(np.abs(runs).max(-1) / 6).float()
    scales = (steps_of_runs / whole if is_factor else steps_of_runs * whole).to(torch.float8_e4m3fn)
    steps = scales.double() * whole.double() if is_factor else scales.double() / whole.double()
    steps = steps.float().double().numpy()[..., None]
    number = _nearest(runs / steps, e2m1_values()[:8], sign=8).reshape(values.shape)
    decoded = (e2m1_values()[number].reshape(runs.shape) * steps).reshape(values.shape)
    pairs = (number[:, 0::2] | number[:, 1::2] << 4).astype(np.uint8)
    return Coded(torch.from_numpy(pairs), scales, decoded, whole)


def plain(values: Values, dtype: torch.dtype) -> tuple[torch.Tensor, Values]:
    stored = torch.from_numpy(values).to(dtype)
    return stored, stored.double().numpy()


def _fp8_scale(largest: float, kind: ScaleKind) -> float:
    if largest == 0:
        return 1.0
    if kind == "F32":
        return float(np.float32(largest / 448))
    fraction, exponent = np.frexp(largest / 448)
    return float(2.0 ** (exponent - (fraction == 0.5)))


def _stored_scales(scales: Values, kind: ScaleKind) -> torch.Tensor:
    if kind in ("F32", "ue8m0 F32"):
        return torch.from_numpy(scales).float()
    exponents = torch.from_numpy((np.log2(scales) + 127).astype(np.uint8))
    return exponents if kind == "U8" else exponents.view(torch.float8_e8m0fnu)


def _nearest(values: Values, ascending: Values, sign: int) -> NDArray[np.uint8]:
    between = (ascending[1:] + ascending[:-1]) / 2
    sizes = np.abs(values)
    codes = np.searchsorted(between, sizes, side="left")
    is_tie = sizes == between[np.minimum(codes, len(between) - 1)]
    codes += is_tie & (codes % 2 == 1)
    return np.where(np.signbit(values), codes + sign, codes).astype(np.uint8)
