"""Finds NaN, infinity and negative scales in stored bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.quantisation.encoding import EXPONENTS
from raymerge.dtypes import DType

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
