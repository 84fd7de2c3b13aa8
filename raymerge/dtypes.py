"""The element types of safetensors files, without torch."""

from __future__ import annotations

from enum import StrEnum

_MERGEABLE = ("F16", "BF16", "F32", "F64")
_NARROW_FLOATS = ("F4", "F6_", "F8_")


class DType(StrEnum):
    bits: int
    torch_name: str | None
    numpy_name: str
    """Empty where numpy has no such type."""
    is_mergeable: bool
    """Whether it is a plain floating point type, fit for arithmetic."""
    is_narrow_float: bool
    """Whether it is a float of at most 8 bits, meaningless without a scale."""

    # Fields and not properties: plans of many tensors ask for them more often than for anything else.
    # The defaults are for ``DType("BF16")`` alone, which finds a member and makes none.
    def __new__(cls, value: str, bits: int = 0, torch_name: str | None = None) -> DType:
        member = str.__new__(cls, value)
        member._value_ = value
        member.bits, member.torch_name = bits, torch_name
        is_numpy = bits >= 8 and value[1:] == str(bits)
        member.numpy_name = f"<{value[0].lower()}{bits // 8}" if is_numpy else ""
        member.is_mergeable = value in _MERGEABLE
        member.is_narrow_float = value.startswith(_NARROW_FLOATS)
        return member

    BOOL = "BOOL", 8, "bool"
    F4 = "F4", 4, None
    F6_E2M3 = "F6_E2M3", 6, None
    F6_E3M2 = "F6_E3M2", 6, None
    U8 = "U8", 8, "uint8"
    I8 = "I8", 8, "int8"
    F8_E5M2 = "F8_E5M2", 8, "float8_e5m2"
    F8_E4M3 = "F8_E4M3", 8, "float8_e4m3fn"
    F8_E8M0 = "F8_E8M0", 8, "float8_e8m0fnu"
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8, "float8_e4m3fnuz"
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8, "float8_e5m2fnuz"
    I16 = "I16", 16, "int16"
    U16 = "U16", 16, "uint16"
    F16 = "F16", 16, "float16"
    BF16 = "BF16", 16, "bfloat16"
    I32 = "I32", 32, "int32"
    U32 = "U32", 32, "uint32"
    F32 = "F32", 32, "float32"
    C64 = "C64", 64, "complex64"
    F64 = "F64", 64, "float64"
    I64 = "I64", 64, "int64"
    U64 = "U64", 64, "uint64"

    def nbytes(self, num_elements: int) -> int:
        """Raises ValueError if the elements do not fill whole bytes (sub-byte dtypes)."""
        nbytes, rest = divmod(self.bits * num_elements, 8)
        if rest:
            raise ValueError(f"{num_elements} elements of {self.value} do not fill whole bytes")
        return nbytes


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
    return tuple(_RECIPE_NAMES)


def parse_dtype(name: str) -> DType:
    """The dtype for ``bfloat16``, ``torch.float16``, ``fp32``...; KeyError if none can be merged to."""
    return _RECIPE_NAMES[name.removeprefix("torch.").lower()]


def config_name(dtype: DType) -> str:
    return dtype.torch_name or dtype.value.lower()
