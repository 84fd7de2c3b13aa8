"""How numbers are stored as codes with scales: shapes, sizes and which elements share a scale.

No torch here: headers are read and plans are made without it. The numbers are made in
``raymerge.checkpoints.codecs``.

A stored matrix [rows, columns] is covered by a grid of blocks, and all elements of a block share a scale.
Blocks at the right and the lower edge of block FP8 may be ragged. The rows that share a row of the grid are
a band: tensors are cut between bands, never within one.

Layouts, as published: DeepSeek-V3's ``README_WEIGHTS.md`` (FP8_BLOCK); compressed-tensors'
``float-quantized`` (FP8_CHANNEL, FP8_TENSOR), ``pack-quantized`` (INT4), ``nvfp4-pack-quantized`` (NVFP4) and
``mxfp4-pack-quantized`` (MXFP4_ROWS, as Kimi-K3 has it); gpt-oss (MXFP4, both by OCP Microscaling v1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType


@dataclass(frozen=True, slots=True)
class Packs:
    """What of a checkpoint is codes with scales."""

    stored: Mapping[str, StoredTensor]
    """Every tensor as it lies in its file, by name."""
    packed: Mapping[str, Packed]
    """What is codes with scales, by the name that it has as numbers."""
    members: Mapping[str, str]
    """That name by the name of each stored tensor that belongs to it."""
    unknown: Mapping[str, str]
    """Stored tensors that are quantised in some other way: what to call the format, by name."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One logical tensor that is stored as codes with scales."""

    name: str
    """What the tensor is called where it is not quantised.

    Its shape need not be the one that it has there: gpt-oss stores experts as [E, rows, columns], and the
    same experts in bfloat16 as [E, columns, rows].
    """
    packing: Packing
    """How its numbers are stored."""
    codes: str
    """The stored tensor of codes."""
    scales: str
    """The stored tensor of scales; of NVFP4, those of the blocks."""
    others: tuple[str, ...]
    """Further stored tensors that belong to it."""

    @property
    def stored(self) -> tuple[str, ...]:
        """Every stored tensor of it."""
        return (self.codes, self.scales, *self.others)

    @property
    def tensor_scale(self) -> str | None:
        """The stored scale of the whole tensor; None where only blocks have scales."""
        if self.packing.format is Format.FP8_TENSOR:
            return self.scales
        return next((name for name in self.others if name.endswith(".weight_global_scale")), None)

    @property
    def shape_tensor(self) -> str | None:
        """The stored tensor that repeats the shape, or None."""
        return next((name for name in self.others if name.endswith(".weight_shape")), None)


class Format(StrEnum):
    """A way of storing numbers as codes with scales.

    Recipes have the same names for them, and one for both of MXFP4: which it is hangs on the model.
    """

    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    FP8_TENSOR = "fp8_tensor"
    MXFP4 = "mxfp4"
    """The codes of a run of 32 columns are a dimension of their own."""
    MXFP4_ROWS = "mxfp4_rows"
    """The codes of a row lie one after the other."""
    INT4 = "int4"
    NVFP4 = "nvfp4"

    @property
    def word(self) -> str:
        """What recipes and messages call it."""
        return "mxfp4" if self is Format.MXFP4_ROWS else self.value

    @property
    def is_fp8(self) -> bool:
        """Whether codes are float8 e4m3 numbers, one to a byte."""
        return self in (Format.FP8_BLOCK, Format.FP8_CHANNEL, Format.FP8_TENSOR)


_CODE_DTYPES: Mapping[Format, DType] = {
    Format.MXFP4: DType.U8,
    Format.MXFP4_ROWS: DType.U8,
    Format.INT4: DType.I32,
    Format.NVFP4: DType.U8,
}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a stack of matrices is stored as codes with scales.

    Raises:
        ValueError: the shapes do not fit together, or the format has no such scales; a sentence says which.
    """

    format: Format
    """What a code means."""
    shape: tuple[int, ...]
    """Of the numbers as they are stored: [..., rows, columns]; what is before them is a stack (experts)."""
    block: tuple[int, int]
    """Rows and columns that share a scale: (128, 128), (1, 32), (1, columns), (rows, columns)."""
    scale_dtype: DType
    """How the scales of blocks are stored. F8_E8M0 and U8 are exponents b, for a scale of 2 ** (b - 127)."""
    power_of_two: bool
    """Whether every scale is a power of two, whatever it is stored in (ue8m0)."""
    scales_shape: tuple[int, ...]
    """Of the stored tensor of scales; one more or one less dimension of size 1 makes no difference."""

    def __post_init__(self) -> None:
        if fault := _fault(self):
            raise ValueError(f"{self.format.word} {fault}")

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of one matrix."""
        return self.shape[-1]

    @property
    def num_matrices(self) -> int:
        """Matrices of the stack; 1 where there is none."""
        return prod(self.shape[:-2])

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks that cover one matrix."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def band(self) -> int:
        """Rows that share a row of the grid, between which a matrix may be cut.

        1 for FP8_TENSOR: its scale is the tensor's, not that of any rows.
        """
        return 1 if self.format is Format.FP8_TENSOR else self.block[0]

    @property
    def scales_per_band(self) -> int:
        """Scales of a band; 0 for FP8_TENSOR."""
        return 0 if self.format is Format.FP8_TENSOR else self.grid[1]

    @property
    def code_bits(self) -> int:
        """Bits of one code."""
        return 8 if self.format.is_fp8 else 4

    @property
    def code_dtype(self) -> DType:
        """Dtype of the stored tensor of codes."""
        return _CODE_DTYPES.get(self.format, DType.F8_E4M3)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor of codes; of 4 bits, several are in an element, the first lowest."""
        if self.format.is_fp8:
            return self.shape
        if self.format is Format.MXFP4:
            return (*self.shape[:-1], self.grid[1], self.block[1] // 2)
        return (*self.shape[:-1], self.columns * 4 // self.code_dtype.bits)

    @property
    def tensor_scale_dtype(self) -> DType | None:
        """Dtype of the one scale that all blocks of a matrix share, or None where there is none.

        For FP8_TENSOR that is its only scale. NVFP4 divides the scales of blocks by it.
        """
        return _tensor_scale_dtype(self.format, self.scale_dtype)

    def has_bands_of(self, start: int, count: int) -> bool:
        """Whether the bands of a run of elements are those of a single matrix with as many rows.

        Not so where it goes from one matrix into the next and bands do not divide their rows: each matrix of
        a stack begins a band.
        """
        size = self.rows * self.columns
        return not self.rows % self.band or start // size == (start + count - 1) // size

    def codes_nbytes(self, num_rows: int) -> int:
        """Bytes of the codes of ``num_rows`` whole rows."""
        return num_rows * self.columns * self.code_bits // 8

    def scales_nbytes(self, num_rows: int) -> int:
        """Bytes of the scales of ``num_rows`` rows from the beginning of a band."""
        return self.scale_dtype.nbytes(-(-num_rows // self.band) * self.scales_per_band)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How matrices of any shape are stored as codes with scales: a packing without a shape."""

    format: Format
    """What a code means."""
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 for as many as a matrix has."""
    scale_dtype: DType
    """How the scales of blocks are stored."""
    power_of_two: bool
    """Whether every scale is a power of two."""

    @property
    def band(self) -> int:
        """Rows between whose runs a matrix may be cut."""
        return self.block[0] or 1

    @property
    def code_dtype(self) -> DType:
        """Dtype of stored tensors of codes."""
        return _CODE_DTYPES.get(self.format, DType.F8_E4M3)

    @property
    def tensor_scale_dtype(self) -> DType | None:
        """Dtype of the one scale that all blocks of a matrix share; see ``Packing``."""
        return _tensor_scale_dtype(self.format, self.scale_dtype)

    def scales_nbytes(self, columns: int) -> int:
        """Bytes of the scales of one band of a matrix with so many columns."""
        if self.format is Format.FP8_TENSOR:
            return 0
        return self.scale_dtype.nbytes(-(-columns // (self.block[1] or columns)))

    def packing(self, shape: tuple[int, ...]) -> Packing:
        """How a tensor [..., rows, columns] is stored.

        Raises:
            ValueError: a matrix of this shape cannot be stored so.
        """
        rows, columns = shape[-2:]
        block = self.block[0] or rows, self.block[1] or columns
        grid = -(-rows // block[0]), -(-columns // block[1])
        return Packing(self.format, shape, block, self.scale_dtype, self.power_of_two, (*shape[:-2], *grid))


def _tensor_scale_dtype(form: Format, scale_dtype: DType) -> DType | None:
    if form is Format.NVFP4:
        return DType.F32
    return scale_dtype if form is Format.FP8_TENSOR else None


def encoding_of(packing: Packing) -> Encoding:
    """What a packing says of matrices of any shape."""
    by_format = {Format.FP8_CHANNEL: (1, 0), Format.FP8_TENSOR: (0, 0)}
    block = by_format.get(packing.format, packing.block)
    return Encoding(packing.format, block, packing.scale_dtype, packing.power_of_two)


def usual_packing(
    form: Format, shape: tuple[int, ...], *, scale_dtype: DType | None = None, power_of_two: bool = False
) -> Packing:
    """The packing that publishers use for a format: what a tensor is given that had none of it before.

    Args:
        form: the format.
        shape: [..., rows, columns].
        scale_dtype: how scales are stored, where that is not to be the format's usual dtype.
        power_of_two: for FP8: whether scales are powers of two (ue8m0).

    Raises:
        ValueError: a matrix of this shape cannot be stored so.
    """
    if len(shape) < 2:
        raise ValueError(f"{form.word} is for matrices, but the shape is {list(shape)}.")
    rows, columns = shape[-2:]
    blocks: Mapping[Format, tuple[int, int]] = {
        Format.FP8_BLOCK: (128, 128),
        Format.FP8_CHANNEL: (1, columns),
        Format.FP8_TENSOR: (rows, columns),
        Format.MXFP4: (1, 32),
        Format.MXFP4_ROWS: (1, 32),
        Format.INT4: (1, 32),
        Format.NVFP4: (1, 16),
    }
    block = blocks[form]
    grid = tuple(-(-size // max(of, 1)) for size, of in zip((rows, columns), block, strict=True))
    stack = shape[:-2]
    scales_shape = (*stack, *grid) if stack or form is not Format.FP8_TENSOR else (1,)
    dtype = scale_dtype or _USUAL_SCALE[form]
    exponents = dtype in (DType.F8_E8M0, DType.U8)
    return Packing(form, shape, block, dtype, power_of_two or exponents, scales_shape)


_EXPONENTS = frozenset({DType.F8_E8M0, DType.U8})
_FLOATS = frozenset({DType.F32, DType.BF16, DType.F16})
_SCALES: Mapping[Format, frozenset[DType]] = {
    Format.FP8_BLOCK: _FLOATS | _EXPONENTS,
    Format.FP8_CHANNEL: _FLOATS | _EXPONENTS,
    Format.FP8_TENSOR: _FLOATS | _EXPONENTS,
    Format.MXFP4: _EXPONENTS,
    Format.MXFP4_ROWS: _EXPONENTS,
    Format.INT4: _FLOATS,
    Format.NVFP4: frozenset({DType.F8_E4M3}),
}
_USUAL_SCALE: Mapping[Format, DType] = {
    Format.FP8_BLOCK: DType.F32,
    Format.FP8_CHANNEL: DType.BF16,
    Format.FP8_TENSOR: DType.BF16,
    Format.MXFP4: DType.U8,
    Format.MXFP4_ROWS: DType.U8,
    Format.INT4: DType.BF16,
    Format.NVFP4: DType.F8_E4M3,
}


def _fault(packing: Packing) -> str | None:
    """What is wrong with a packing, as the end of a sentence that begins with the format's name."""
    shape, block = packing.shape, packing.block
    if len(shape) < 2 or min(shape) < 1:
        return f"is for matrices that have elements, but the shape is {list(shape)}."
    if min(block) < 1:
        return f"has blocks of {list(block)}, which hold no element."
    return _wrong_block(packing) or _wrong_scales(packing)


def _wrong_block(packing: Packing) -> str | None:
    form, columns, block = packing.format, packing.columns, packing.block
    wanted = {
        Format.FP8_CHANNEL: (1, columns),
        Format.FP8_TENSOR: (packing.rows, columns),
        Format.MXFP4: (1, 32),
        Format.MXFP4_ROWS: (1, 32),
        Format.INT4: (1, block[1]),
        Format.NVFP4: (1, 16),
    }.get(form, block)
    if block != wanted:
        return f"has blocks of {list(wanted)} in a tensor of shape {list(packing.shape)}, not {list(block)}."
    if form.is_fp8:
        return None
    if columns % block[1]:
        return f"needs columns that {block[1]} divides, but the shape is {list(packing.shape)}."
    if block[1] % 2:
        return f"has two codes to a byte, and no blocks of {block[1]} columns, which would end within one."
    if columns * 4 % packing.code_dtype.bits:
        per_element = packing.code_dtype.bits // 4
        return f"has {per_element} codes to an element, which do not divide {columns} columns."
    return None


def _wrong_scales(packing: Packing) -> str | None:
    form, dtype, have = packing.format, packing.scale_dtype, packing.scales_shape
    if dtype not in _SCALES[form]:
        return f"has scales of {', '.join(sorted(_SCALES[form]))}, not {dtype.value}."
    if dtype in _EXPONENTS and not packing.power_of_two:
        return f"has scales of {dtype.value}, which are powers of two."
    if packing.power_of_two and form in (Format.INT4, Format.NVFP4):
        return "has scales that are not held to powers of two."
    wanted = (*packing.shape[:-2], *packing.grid)
    if _without_ones(have) != _without_ones(wanted):
        return (
            f"of shape {list(packing.shape)} in blocks of {list(packing.block)} has scales of shape "
            f"{list(wanted)}, not {list(have)}."
        )
    return None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
