"""Counts NaN and infinity in stored bytes, whatever device made them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raymerge.dtypes import DType

# The exponent bits of each format; a value is not finite when all of them are set.
_EXPONENTS: dict[DType, tuple[type[np.unsignedinteger], int]] = {  # type: ignore[type-arg]
    DType.F16: (np.uint16, 0x7C00),
    DType.BF16: (np.uint16, 0x7F80),
    DType.F32: (np.uint32, 0x7F800000),
    DType.F64: (np.uint64, 0x7FF0000000000000),
}


def first_non_finite(data: npt.NDArray[np.uint8], dtype: DType) -> int | None:
    """Index of the first element that is NaN or infinite, or None.

    Args:
        data: bytes of whole elements.
        dtype: their dtype; formats without such values (integers, narrow codes) are never at fault.
    """
    if dtype not in _EXPONENTS or data.size == 0:
        return None
    kind, mask = _EXPONENTS[dtype]
    exponents = data.view(kind) & kind(mask)
    if int(exponents.max()) != mask:
        return None
    return int(np.argmax(exponents == mask))
