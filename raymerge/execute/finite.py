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
_CHUNK = 1 << 16
"""Elements looked at together, so that looking takes no memory worth counting."""


def first_non_finite(data: npt.NDArray[np.uint8], dtype: DType) -> int | None:
    """Index of the first element that is NaN or infinite, or None.

    Args:
        data: bytes of whole elements.
        dtype: their dtype; formats without such values (integers, narrow codes) are never at fault.
    """
    if dtype not in _EXPONENTS:
        return None
    kind, mask = _EXPONENTS[dtype]
    elements = data.view(kind)
    for start in range(0, elements.size, _CHUNK):
        exponents = elements[start : start + _CHUNK] & kind(mask)
        if int(exponents.max()) == mask:
            return start + int(np.argmax(exponents == mask))
    return None
