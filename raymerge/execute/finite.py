"""Finds NaN and infinity in stored bytes, whatever device made them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raymerge.dtypes import DType

# The exponent bits of each format; a value is not finite when all of them are set.
_EXPONENTS: dict[DType, tuple[type[np.unsignedinteger], int]] = {
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
}
"""For every element of a word: the exponent bits, the lowest bit and the highest."""
_CHUNK = 1 << 15
"""Elements looked at together, so that looking takes no memory worth counting."""


def first_non_finite(data: npt.NDArray[np.uint8], dtype: DType) -> int | None:
    """Index of the first element that is NaN or infinite, or None.

    Args:
        data: bytes of whole elements.
        dtype: their dtype; formats without such values (integers, narrow codes) are never at fault.
    """
    if dtype not in _EXPONENTS or not _has_any(data, dtype):
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
    from raymerge.kernels.finite import has_full

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
