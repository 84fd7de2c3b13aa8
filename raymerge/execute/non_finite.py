"""Finds NaN, infinity and negative scales in stored bytes, and the source value that made them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.quantisation.encoding import EXPONENTS
from raymerge.deferred import torch
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.execute.decoding import numbers
from raymerge.execute.reading import Load, Raw, RawCodes, RawInput, RawRows, TileJob
from raymerge.merge_plan.expressions import Read
from raymerge.merge_plan.jobs import Input, OpJob

NOT_FINITE, NEGATIVE = "NaN or infinity", "a negative scale"
# The bits of each format that are all set where a value is not finite, and then alone.
_EXPONENTS: dict[DType, tuple[type[np.unsignedinteger], int]] = {
    DType.U8: (np.uint8, 0xFF),
    DType.F8_E8M0: (np.uint8, 0xFF),
    DType.F8_E4M3: (np.uint8, 0x7F),
    DType.F16: (np.uint16, 0x7C00),
    DType.BF16: (np.uint16, 0x7F80),
    DType.F32: (np.uint32, 0x7F800000),
    DType.F64: (np.uint64, 0x7FF0000000000000),
}
_WORD = 8
_LANES = {
    dtype: tuple(
        np.uint64(sum(bits << shift for shift in range(0, 8 * _WORD, 8 * np.dtype(kind).itemsize)))
        for bits in (mask, 1, 1 << (8 * np.dtype(kind).itemsize - 1))
    )
    for dtype, (kind, mask) in _EXPONENTS.items()
    if dtype.is_mergeable
}
"""For every element of a word: the exponent bits, the lowest bit and the highest."""
_CHUNK = 1 << 15
"""Elements looked at together, so that looking takes no memory worth counting."""


def first_non_finite(data: npt.NDArray[np.uint8], dtype: DType) -> int | None:
    """Index of the first element that is NaN or infinite, or None."""
    if dtype not in _LANES or not _has_any(data, dtype):
        return None
    kind, mask = _EXPONENTS[dtype]
    elements = data.view(kind)
    for start in range(0, elements.size, _CHUNK):
        exponents = elements[start : start + _CHUNK] & kind(mask)
        if int(exponents.max()) == mask:
            return start + int(np.argmax(exponents == mask))
    return None


def _has_any(data: npt.NDArray[np.uint8], dtype: DType) -> bool:
    """Whether any element is not finite; elements at the ends that fill no word are taken to be."""
    from raymerge.kernels.elements import has_full

    kind, mask = _EXPONENTS[dtype]
    width = np.dtype(kind).itemsize
    lead = -data.ctypes.data % _WORD
    count = (data.size - lead) // _WORD
    if lead % width or count <= 0:
        return data.size > 0
    words = data[lead : lead + count * _WORD].view(np.uint64)
    ends = (end for end in (data[:lead], data[lead + count * _WORD :]) if end.size)
    full = any(bool((end.view(kind) & kind(mask) == mask).any()) for end in ends)
    return full or has_full(words, *_LANES[dtype])


class Fault(NamedTuple):
    place: int
    words: str


def scale_fault(dtype: DType, stored: npt.NDArray[np.uint8]) -> Fault | None:
    """The first of some stored scales that is NaN, infinite or negative; None if all can be multiplied by."""
    kind, mask = _EXPONENTS[dtype]
    bits, sign = stored.view(kind), _sign(dtype)
    is_negative = _first(bits > sign, NEGATIVE) if sign else None
    return _first((bits & kind(mask)) == mask, NOT_FINITE) or is_negative


def are_negative(dtype: DType, stored: npt.NDArray[np.uint8]) -> bool:
    """Whether any of some stored scales is; the same for NaN with a sign. Takes no memory."""
    sign = _sign(dtype)
    return sign > 0 and stored.size > 0 and int(stored.view(_EXPONENTS[dtype][0]).max()) > sign


def are_zeros(dtype: DType, stored: npt.NDArray[np.uint8]) -> bool:
    """Whether all of some stored scales are 0, which exponents never are."""
    kind, sign = _EXPONENTS[dtype][0], _sign(dtype)
    return sign > 0 and not (stored.view(kind) & kind(sign - 1)).any()


def _sign(dtype: DType) -> int:
    """The bit of the sign, and 0 where there is none."""
    return 0 if dtype in EXPONENTS else 1 << (dtype.bits - 1)


def _first(is_so: npt.NDArray[np.bool_], words: str) -> Fault | None:
    return Fault(int(is_so.argmax()), words) if is_so.any() else None


class StoredByte(NamedTuple):
    source: int
    key: str
    byte: int
    what: str = NOT_FINITE


def find_cause(op: OpJob, loads: Iterable[tuple[Load, Sequence[Raw]]], names: Sequence[str]) -> Problem:
    for load, raws in loads:
        for tile, raw in zip(load.tiles, raws, strict=True):
            for each, held in zip(op.inputs, raw, strict=True):
                byte = _non_finite_byte(tile, each, held)
                if byte is not None:
                    return Problem(
                        f"{names[byte.source]}: {op.tensor}",
                        f"the source holds {byte.what}, here first at byte {byte.byte} of {byte.key}.",
                        "Repair or replace that model; nothing was published.",
                    )
    # Codes can hold whatever float32 can: their scales are made to fit.
    cast = DType.F32 if op.expression.encode is not None else op.expression.cast
    wider = "a wider out_dtype (bfloat16, float32) or " if cast is DType.F16 else ""
    return Problem(
        op.tensor,
        f"the sources are finite, but the merged values do not fit {cast.value}.",
        f"Use {wider}smaller weights; nothing was published.",
    )


def _non_finite_byte(tile: TileJob, source: Input, raw: RawInput) -> StoredByte | None:
    """The first NaN or infinity of an input's bytes for a tile; None where all of them are finite."""
    if isinstance(raw, RawRows):
        return _in_rows(raw)
    if isinstance(raw, RawCodes):
        return _in_codes(tile, raw)
    assert isinstance(source, Read)
    first = first_non_finite(raw.numpy(), source.dtype)
    return None if first is None else _at(source, tile.span(source)[0] + source.dtype.nbytes(first))


def _in_codes(tile: TileJob, raw: RawCodes) -> StoredByte | None:
    """A scale that is not finite, or negative, or else a code that makes no finite number with its scale."""
    source, scales = raw.read, raw.layout
    stored = (
        (scales.encoding.tensor_scale_dtype, raw.tensor_scale, scales.tensor_key, scales.tensor_offset),
        (scales.encoding.scale_dtype, raw.scales, scales.key, tile.scales_span(scales)[0]),
    )
    for dtype, data, key, offset in stored:
        fault = None if dtype is None else scale_fault(dtype, data.numpy())
        if dtype is not None and fault is not None:
            return StoredByte(source.source, key, offset + dtype.nbytes(fault.place), fault.words)
    values = numbers(raw, in_order=False).view(torch.uint8)
    first = first_non_finite(values.numpy(), DType.F32)
    if first is None:
        return None
    # Several codes may lie in one byte. In FP8 alone one of them may itself be no number.
    byte = first * source.dtype.bits // 8
    is_nan = scales.encoding.format.is_fp8 and (int(raw.codes[byte]) & 0x7F) == 0x7F
    found = _at(source, tile.span(source)[0] + byte)
    return found if is_nan else found._replace(what="codes with scales that make numbers beyond float32")


def _in_rows(raw: RawRows) -> StoredByte | None:
    for number, gather_input in enumerate(raw.source.inputs):
        first = first_non_finite(raw.stored[number].numpy(), gather_input.read.dtype)
        if first is not None:
            place = first
            if gather_input.read.view is None:
                row, column = divmod(first, raw.source.num_columns)
                place = raw.taken[number].stored_row(row) * raw.source.num_columns + column
            return _at(gather_input.read, gather_input.read.offset + gather_input.read.dtype.nbytes(place))
        for factor, data in zip(gather_input.factors, raw.factors[number], strict=True):
            first = first_non_finite(data.numpy(), factor.dtype)
            if first is not None:
                return _at(factor, factor.offset + factor.dtype.nbytes(first))
    return None


def _at(read: Read, byte: int) -> StoredByte:
    return StoredByte(read.source, read.key, byte)
