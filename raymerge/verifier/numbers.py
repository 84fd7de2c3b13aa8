"""Stored numbers in float64, and the distances of numbers to the nearest storable ones.

Written from the definitions of the formats, with numpy: shares nothing with the merge, so that no mistake
is shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymerge.checkpoints.quantisation.encoding import EXPONENTS, Encoding, Format
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.dtypes import DType

Floats: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]

WHOLE = frozenset({DType.I16, DType.U16, DType.I32, DType.U32, DType.I64, DType.U64})
"""Whole numbers, of which only tables that name experts are computed."""
# Bits of the mantissa after its first, and the least exponent of a normal number.
_PRECISION: Mapping[DType, tuple[int, int]] = {
    DType.BF16: (7, -126),
    DType.F16: (10, -14),
    DType.F32: (23, -126),
    # Results are float32 numbers, whatever they are stored in.
    DType.F64: (23, -126),
}


def plain_numbers(dtype: DType, stored: Bytes, *, exact: bool = False) -> Floats:
    """Elements of a plain dtype, or whole numbers, in float64, rounded to float32 unless ``exact``, as merges
    read them; raises ValueError for other dtypes."""
    # A NaN that signals, as in bytes of a damaged file, is a NaN like any other.
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is DType.BF16:
            words = stored.view("<u2").astype(np.uint32) << np.uint32(16)
            return words.view(np.float32).astype(np.float64)
        if dtype not in WHOLE and dtype not in _PRECISION:
            raise ValueError(f"{dtype.value} holds no plain numbers")
        numbers = stored.view(dtype.numpy_name)
        is_exact = exact or dtype in WHOLE
        return np.asarray(numbers if is_exact else numbers.astype(np.float32), dtype=np.float64)


def nearest_distance(dtype: DType, values: Floats) -> Floats:
    """Distance of each value to the nearest number of a plain dtype, or whole number."""
    if dtype in WHOLE:
        return np.asarray(np.abs(np.rint(values) - values))
    bits, least = _PRECISION[dtype]
    _, exponents = np.frexp(values)
    steps = np.ldexp(1.0, np.maximum(exponents - 1, least) - bits)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(np.rint(values / steps) * steps - values))


_E4M3 = np.array(FP8_BLOCK.reference.elements)
_SMALLEST_SCALE: Mapping[DType, float] = {DType.F16: 2.0**-24, DType.F8_E4M3: 2.0**-9}
_SCALE_PRECISION: Mapping[DType, tuple[int, int]] = {DType.F8_E4M3: (3, -6)}


def scale_numbers(dtype: DType, stored: Bytes) -> Floats:
    """Stored scales as numbers; F8_E8M0 and U8 are exponents b, for 2 ** (b - 127)."""
    if dtype in EXPONENTS:
        return np.where(stored == 255, np.nan, np.ldexp(1.0, stored.astype(np.int64) - 127))
    return _E4M3[stored] if dtype is DType.F8_E4M3 else plain_numbers(dtype, stored)


def code_steps(
    encoding: Encoding, scales: Bytes, tensor_scale: Bytes, *, rows: tuple[int, int], columns: int
) -> Floats:
    """The factor of the codes of each block: float64 ``[rows, blocks]``.

    ``scales`` are those of whole scale rows, ``rows`` (first, stop) counts within them; ``tensor_scale`` is
    empty where there is none."""
    first, stop = rows
    if encoding.format.tensor_scale == "only":
        assert encoding.tensor_scale_dtype is not None
        whole = scale_numbers(encoding.tensor_scale_dtype, tensor_scale)[0]
        return np.full((stop - first, 1), whole)
    width = encoding.block[1] or columns
    grid = scale_numbers(encoding.scale_dtype, scales).reshape(-1, -(-columns // width))
    if encoding.format.has_two_scales:
        whole, is_factor = scale_numbers(DType.F32, tensor_scale)[0], encoding.format.tensor_scale == "factor"
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            grid = (grid * whole if is_factor else grid / whole).astype(np.float32).astype(np.float64)
    scale_rows = np.arange(first, stop) // encoding.scale_row_height
    return np.asarray(grid[scale_rows])


def _elements(form: Format) -> Floats:
    return np.array(form.reference.elements)


def _sorted(form: Format) -> Floats:
    elements = _elements(form)
    return np.unique(elements[np.isfinite(elements)])


def zero_elements(form: Format, stored: Bytes, blocks: int) -> Floats:
    """The elements that stand for 0 in each block ``[rows, blocks]``; rows come in whole runs that share
    elements of the stored tensor."""
    height = form.rows_of_zeros
    packed = _elements(form)[_one_by_one(form, stored, 0)].reshape(-1, blocks, height)
    return packed.swapaxes(1, 2).reshape(-1, blocks)


def coded_numbers(
    encoding: Encoding, codes: Bytes, steps: Floats, zeros: Floats | None = None, *, columns: int
) -> Floats:
    """Codes, less those for 0, times their steps: float64 ``[rows, columns]``, the exact product rounded once
    to float32. Steps and elements for 0 are those of blocks, ``[rows, blocks]``."""
    width = encoding.block[1] or columns
    elements = code_elements(encoding.format, codes, columns).reshape(len(steps), columns)
    if not columns % width:
        # All operands are float32 numbers, whose product is rounded once; one for each block is spread.
        elements = elements.reshape(*steps.shape, width)

    def by_element(values: Floats) -> NDArray[np.float32]:
        single = values.astype(np.float32)
        return single[:, :, None] if elements.ndim == 3 else spread(single, width, columns)

    with np.errstate(over="ignore"):
        products = (elements if zeros is None else elements - by_element(zeros)) * by_element(steps)
    return products.astype(np.float64).reshape(len(steps), columns)


def spread(values: NDArray[Any], width: int, columns: int) -> NDArray[Any]:
    """One value for each block as one for each element: ``[rows, blocks]`` to ``[rows, columns]``."""
    return values.repeat(width, axis=1)[:, :columns]


def code_elements(form: Format, codes: Bytes, columns: int) -> NDArray[np.float32]:
    elements = _elements(form).astype(np.float32)
    if form.code_bits == 8 or form.packs_rows:
        return elements[_one_by_one(form, codes, columns).reshape(-1)]
    # Both elements of a byte are looked up as one word.
    byte = np.arange(256, dtype=np.uint8)
    pairs = np.ascontiguousarray(elements[_one_by_one(form, byte, columns)]).view(np.uint64)[:, 0]
    return pairs[codes].view(np.float32)


def least_peaks(encoding: Encoding, scales: Floats) -> Floats:
    """Least magnitude of each block's largest element if the scale was made for the block, allowing for the
    scale's rounding, to the nearest or upwards; 0 for the smallest storable scale, which replaces all smaller
    ones. Where blocks have zero points, the least distance of their outermost elements and 0."""
    form, dtype = encoding.format, encoding.scale_dtype
    smallest = _SMALLEST_SCALE.get(dtype, 2.0**-126)
    if form.reference.least_peak is not None:
        return np.where(scales <= smallest, 0.0, form.reference.least_peak)
    if encoding.power_of_two:
        reach = np.full(scales.shape, form.reference.top / 2)
    else:
        bits, least = _SCALE_PRECISION.get(dtype) or _PRECISION[dtype]
        _, exponents = np.frexp(scales)
        ulps = np.ldexp(1.0, np.maximum(exponents - 1, least) - bits)
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = form.reference.top * (1 - ulps / scales)
    elements = _sorted(form)
    if form.zero_points is not None:
        # The outermost numbers lie up to half an element from where 0 would have a code.
        return np.where(scales <= smallest, 0.0, np.floor(reach - 0.5))
    elements = elements[elements >= 0]
    between = (elements[1:] + elements[:-1]) / 2
    peaks = elements[np.searchsorted(between, reach * (1 - 2.0**-20))]
    return np.where(scales <= smallest, 0.0, peaks)


def _one_by_one(form: Format, codes: Bytes, columns: int) -> Bytes:
    if form.code_bits == 8:
        return codes
    if form.packs_rows:
        codes = codes.reshape(-1, columns)
    return np.stack([codes & 15, codes >> 4], axis=1)


def nearest_coded_distance(
    form: Format, values: Floats, steps: Floats, zeros: Floats | None = None
) -> Floats:
    """Distance of each value to the nearest code, less that for 0, times its step; -1 beyond the largest."""
    elements = _sorted(form)
    quotients, below, above = _between(elements, values, steps, zeros)
    distance = np.minimum(np.abs(quotients - below), np.abs(quotients - above)) * np.abs(steps)
    if form.zero_points is not None:
        # Half of a code, as zero points are whole numbers, and what rounding the scale makes of all of them.
        reach = 0.5 + (elements[-1] - elements[0]) * 2.0**-8
        beyond = np.abs(quotients - np.clip(quotients, elements[0], elements[-1])) > reach
    else:
        end = np.where(quotients < 0, elements[0], elements[-1])
        beyond = np.abs(quotients) > np.abs(end) * form.reference.reach
    return np.where(beyond, -1.0, distance)


def code_gaps(form: Format, values: Floats, steps: Floats, zeros: Floats | None = None) -> Floats:
    """Distance of the two codes about each value, or of the outermost two."""
    _, below, above = _between(_sorted(form), values, steps, zeros)
    return np.asarray((above - below) * np.abs(steps))


def _between(
    elements: Floats, values: Floats, steps: Floats, zeros: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """Values in steps of their codes, with the elements below and above them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = values / steps + (0.0 if zeros is None else zeros)
    place = np.clip(np.searchsorted(elements, quotients), 1, len(elements) - 1)
    return quotients, elements[place - 1], elements[place]
