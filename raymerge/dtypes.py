"""The element types of a safetensors file, by the names that stand in its header.

No torch here: headers are read and plans are made without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """A dtype by its safetensors name."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _FACTS[self].bits

    @property
    def torch_name(self) -> str | None:
        """Attribute of the ``torch`` module, or None where torch has no such dtype."""
        return _FACTS[self].torch_name

    @property
    def is_mergeable(self) -> bool:
        """Whether its elements are plain floating point numbers, on which arithmetic means something."""
        return self in MERGEABLE

    @property
    def is_narrow_float(self) -> bool:
        """Whether it is an 8-bit or smaller float: a code that means nothing without its scale."""
        return self in NARROW_FLOATS

    def nbytes(self, num_elements: int) -> int:
        """Bytes of ``num_elements`` elements.

        Raises:
            ValueError: the elements do not fill whole bytes (sub-byte dtypes).
        """
        bits = self.bits * num_elements
        if bits % 8:
            raise ValueError(f"{num_elements} elements of {self.value} do not fill whole bytes")
        return bits // 8


@dataclass(frozen=True, slots=True)
class _Facts:
    bits: int
    torch_name: str | None


_FACTS = {
    DType.BOOL: _Facts(8, "bool"),
    DType.F4: _Facts(4, None),
    DType.F6_E2M3: _Facts(6, None),
    DType.F6_E3M2: _Facts(6, None),
    DType.U8: _Facts(8, "uint8"),
    DType.I8: _Facts(8, "int8"),
    DType.F8_E5M2: _Facts(8, "float8_e5m2"),
    DType.F8_E4M3: _Facts(8, "float8_e4m3fn"),
    DType.F8_E8M0: _Facts(8, "float8_e8m0fnu"),
    DType.F8_E4M3FNUZ: _Facts(8, "float8_e4m3fnuz"),
    DType.F8_E5M2FNUZ: _Facts(8, "float8_e5m2fnuz"),
    DType.I16: _Facts(16, "int16"),
    DType.U16: _Facts(16, "uint16"),
    DType.F16: _Facts(16, "float16"),
    DType.BF16: _Facts(16, "bfloat16"),
    DType.I32: _Facts(32, "int32"),
    DType.U32: _Facts(32, "uint32"),
    DType.F32: _Facts(32, "float32"),
    DType.C64: _Facts(64, "complex64"),
    DType.F64: _Facts(64, "float64"),
    DType.I64: _Facts(64, "int64"),
    DType.U64: _Facts(64, "uint64"),
}

MERGEABLE = frozenset({DType.F16, DType.BF16, DType.F32, DType.F64})
NARROW_FLOATS = frozenset(
    {
        DType.F4,
        DType.F6_E2M3,
        DType.F6_E3M2,
        DType.F8_E5M2,
        DType.F8_E4M3,
        DType.F8_E8M0,
        DType.F8_E4M3FNUZ,
        DType.F8_E5M2FNUZ,
    }
)

_RECIPE_NAMES = {
    "float32": DType.F32,
    "fp32": DType.F32,
    "float16": DType.F16,
    "fp16": DType.F16,
    "half": DType.F16,
    "bfloat16": DType.BF16,
    "bf16": DType.BF16,
    "float64": DType.F64,
}


def dtype_names() -> tuple[str, ...]:
    """Names that a recipe's ``dtype`` accepts, for messages."""
    return tuple(_RECIPE_NAMES)


def parse_dtype(name: str) -> DType:
    """The dtype a recipe means by ``bfloat16``, ``torch.float16``, ``fp32`` ...

    Raises:
        KeyError: no floating point dtype of that name can be merged to.
    """
    return _RECIPE_NAMES[name.removeprefix("torch.").lower()]


def config_name(dtype: DType) -> str:
    """The name that ``config.json`` uses (``bfloat16`` for BF16)."""
    return dtype.torch_name or dtype.value.lower()
