"""How numbers are stored as codes with scales: shapes, sizes and which elements share a scale.

A stored matrix [rows, columns] is covered by a grid of blocks, whose elements share a scale. Blocks at the
right and lower edge of 8-bit formats may be ragged. The rows of one row of the grid are a scale row: tensors
are cut only between scale rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm, prod
from typing import Literal, NamedTuple, TypeAlias

from raymerge.dtypes import DType

WHOLE, ANY = 0, -1
"""In place of a block's rows or columns: the matrix's number; any number."""
EXPONENTS = frozenset({DType.F8_E8M0, DType.U8})
"""Dtypes of scales that are exponents b, for a scale of 2 ** (b - 127)."""
FLOATS = frozenset({DType.F32, DType.BF16, DType.F16})
SPELL_RIGHT = "Store one over each of them, or use the checkpoint as its quantiser wrote it."
"""Remedy for ``Format.misspelt``."""
Made: TypeAlias = Literal["scales", "tensor_scale", "zero_points"]
"""What is made with codes and stored beside them: scales of blocks, the one scale of a matrix, or the codes
that stand for 0 in each block."""


class Reference(NamedTuple):
    """A format's numbers by definition, for audits: shares nothing with the codec."""

    elements: tuple[float, ...]
    """By code, without scale."""
    top: float = 0.0
    """The largest number of a block over its scale, before the scale is rounded."""
    reach: float = 1 + 2.0**-7
    """How far beyond the largest element a block may reach, since its scale is rounded."""
    least_peak: float | None = None
    """Least magnitude of a block's largest element; None where ``top`` gives it."""


@dataclass(frozen=True, slots=True)
class Format:
    """What codes of one format mean; compared by name alone."""

    name: str
    block: tuple[int, int] = field(compare=False)
    """Rows and columns that share a scale: numbers, ``WHOLE`` or ``ANY``."""
    code_dtype: DType = field(compare=False)
    scale_dtypes: frozenset[DType] = field(compare=False)
    usual_scale: DType = field(compare=False)
    reference: Reference = field(compare=False)
    parts: Mapping[str, str] = field(compare=False)
    """Suffixes of a tensor's name in its stored parts, by field of ``PartNames``; one with a dot before it
    follows the module's name."""
    code_bits: int = field(compare=False, default=4)
    title: str = field(compare=False, default="")
    """What messages call it; "" for its name in recipes."""
    layout_of: str = field(compare=False, default="")
    """Name of the format that differs only in how tensors are called and laid out; "" for none."""
    usual_block: tuple[int, int] | None = field(compare=False, default=None)
    """What publishers choose where ``block`` leaves a choice; None where it leaves none."""
    tensor_scale: Literal["none", "only", "divisor", "factor"] = field(compare=False, default="none")
    """Whether the tensor has one scale: the ``only`` one, or a ``divisor`` or ``factor`` of block scales."""
    other_spelling: str = field(compare=False, default="")
    """What scales of whole matrices look like that are less than 1 for a ``divisor`` or not for a ``factor``,
    as another tool stores them; "" where such scales may be right."""
    has_block_axis: bool = field(compare=False, default=False)
    """Whether blocks are an axis of the stored codes: [..., rows, blocks, bytes of a block]."""
    packs_rows: bool = field(compare=False, default=False)
    """Whether codes that share an element are of rows that follow each other, and not of columns."""
    scales_stack: bool = field(compare=False, default=False)
    """Whether a stack of matrices has the scale of the tensor together, and not each its own."""
    holds_stacks: bool = field(compare=False, default=False)
    """Whether loaders take stacks of experts [experts, out, in] in it, as they take weights of modules."""
    for_experts_only: bool = field(compare=False, default=False)
    """Whether it is a layout that some families have their experts in, and nothing else."""
    zero_points: DType | None = field(compare=False, default=None)
    """Dtype of the elements in which zero points of blocks are packed, those of the first row lowest; None
    where the code for 0 is the same in all blocks."""
    expert_dtype: str = field(compare=False, default="")
    """What the config's ``expert_dtype`` calls experts in it, where the table is that of another format."""

    @property
    def word(self) -> str:
        return self.title or self.recipe_name

    @property
    def recipe_name(self) -> str:
        """What recipes call it and its other layouts."""
        return self.layout_of or self.name

    @property
    def is_fp8(self) -> bool:
        """Whether codes are float8 e4m3, one to a byte."""
        return self.code_dtype is DType.F8_E4M3

    @property
    def element_dtype(self) -> DType:
        """Dtype of one code, whatever dtype the codes are packed in."""
        if self.code_bits == 8:
            return DType.F8_E4M3 if self.is_fp8 else DType.I8
        return DType.F4

    @property
    def rows_of_codes(self) -> int:
        """Rows whose codes share an element."""
        return self.code_dtype.bits // self.code_bits if self.packs_rows else 1

    @property
    def rows_of_zeros(self) -> int:
        """Rows whose zero points share an element."""
        return 1 if self.zero_points is None else self.zero_points.bits // self.code_bits

    def cut_height(self, scale_row_height: int) -> int:
        """Rows between whose runs a matrix may be cut: of a scale row, or such as share their zero points."""
        return lcm(scale_row_height, self.rows_of_zeros)

    def tensor_scale_dtype(self, scale_dtype: DType) -> DType | None:
        """Dtype of the tensor's one scale, given that of its scales; None where there is none."""
        return {"none": None, "only": scale_dtype}.get(self.tensor_scale, DType.F32)

    @property
    def tensor_scale_shape(self) -> tuple[int, ...]:
        """As publishers store the scale of one matrix."""
        return () if self.tensor_scale == "factor" else (1,)

    @property
    def has_two_scales(self) -> bool:
        """Whether blocks have scales beside the one of the tensor."""
        return self.tensor_scale in ("divisor", "factor")

    def misspelt(self, scales: Mapping[str, float]) -> str:
        """A sentence where most scales of whole matrices, by what to call them, look like ``other_spelling``;
        else ""."""
        is_divisor = self.tensor_scale == "divisor"
        others = [name for name, scale in scales.items() if (0 < scale < 1 if is_divisor else scale >= 1)]
        if not self.other_spelling or len(others) * 2 <= len(scales):
            return ""
        looks = f"most scales of whole matrices look like {self.other_spelling}"
        return f"{others[0]} is {scales[others[0]]:g}, and {looks}."

    def fixed_block(self, block: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, int]:
        """The block by the rule of the format for [..., rows, columns]; free sizes as in ``block``."""
        rows, columns = (
            size if rule == WHOLE else have if rule == ANY else rule
            for rule, have, size in zip(self.block, block, shape[-2:], strict=True)
        )
        return rows, columns

    def part_names(self, name: str) -> PartNames:
        module = name.removesuffix(".weight")
        return PartNames(
            **{
                part: f"{module if ending.startswith('.') else name}{ending}"
                for part, ending in self.parts.items()
            }
        )


class PartNames(NamedTuple):
    """Names of the stored parts of a quantised tensor; "" for parts it lacks."""

    codes: str
    scales: str = ""
    tensor_scale: str = ""
    shape: str = ""
    zero_points: str = ""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """One logical tensor that is stored as codes with scales."""

    name: str
    """Its name where it is not quantised.

    Its unquantised shape may differ: gpt-oss stores quantised experts as [E, rows, columns] and bfloat16 ones
    as [E, columns, rows]."""
    quant_spec: QuantSpec
    codes: str
    scales: str
    others: tuple[str, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.codes, self.scales, *self.others)

    @property
    def tensor_scale(self) -> str | None:
        """Name of the whole tensor's stored scale; None where only blocks have scales."""
        if self.quant_spec.format.tensor_scale == "only":
            return self.scales
        if not self.others:
            return None
        ending = self.quant_spec.format.parts.get("tensor_scale")
        whole = f"{self.name}{ending}"
        return whole if ending and whole in self.others else None

    @property
    def shape_tensor(self) -> str | None:
        return self._other(".weight_shape")

    @property
    def zero_points(self) -> str | None:
        return self._other(".weight_zero_point")

    def _other(self, ending: str) -> str | None:
        return next((name for name in self.others if name.endswith(ending)), None) if self.others else None


def part_name(name: str, part: str, other: str) -> str:
    """Rename a part of the quantised tensor ``name`` to that of ``other``."""
    # Mostly there is nothing to rename, and a text less for each of half a million tensors.
    if name == other:
        return part
    return other.removesuffix(".weight") + part[len(name.removesuffix(".weight")) :]


@dataclass(frozen=True)
class QuantSpec:
    """How a stack of matrices is stored as codes with scales. Raises ValueError: the shapes do not fit
    together, or the format has no such scales; the message says which.

    Tens of thousands of experts share one, so that what follows from it is worked out once."""

    format: Format
    shape: tuple[int, ...]
    """Of the numbers: [..., rows, columns]; leading dimensions are a stack (experts)."""
    block: tuple[int, int]
    """Rows and columns that share a scale: (128, 128), (1, 32), (1, columns), (rows, columns)."""
    scale_dtype: DType
    power_of_two: bool
    """Whether every scale is a power of two, whatever its dtype (ue8m0)."""
    scales_shape: tuple[int, ...]
    """Of the stored scales; one dimension of size 1 more or less makes no difference."""
    padding: int = 0
    """Columns at the end that fill the last integer of a row, and are no numbers."""

    def __post_init__(self) -> None:
        if fault := _shape_fault(self) or _block_fault(self) or _scales_fault(self):
            raise ValueError(f"{self.format.word} {fault}")

    @cached_property
    def kind(self) -> tuple[Format, tuple[int, int]]:
        """The format and its block, ``WHOLE`` for the matrix's size: alike for matrices of any shape."""
        rows, columns = (
            WHOLE if rule == WHOLE else size for rule, size in zip(self.format.block, self.block, strict=True)
        )
        return self.format, (rows, columns)

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def logical_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.columns - self.padding)

    @property
    def num_matrices(self) -> int:
        return prod(self.shape[:-2])

    @property
    def num_tensor_scales(self) -> int:
        return 1 if self.format.scales_stack else self.num_matrices

    @cached_property
    def num_elements(self) -> int:
        """Padding included."""
        return prod(self.shape)

    @cached_property
    def whole_scales_nbytes(self) -> int:
        """Bytes of the scales of all blocks."""
        return self.num_matrices * self.grid[0] * self.encoding.scales_nbytes(self.columns)

    @cached_property
    def encoding(self) -> Encoding:
        return Encoding(*self.kind, self.scale_dtype, self.power_of_two)

    @cached_property
    def grid(self) -> tuple[int, int]:
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def scale_row_height(self) -> int:
        """Rows that share a row of the grid; 1 where the only scale is the tensor's."""
        return 1 if self.format.tensor_scale == "only" else self.block[0]

    @property
    def scale_row_length(self) -> int:
        """0 where the only scale is the tensor's."""
        return 0 if self.format.tensor_scale == "only" else self.grid[1]

    @cached_property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the stored codes; several 4-bit codes share an element, the first lowest."""
        bits, height = self.format.code_bits, self.format.rows_of_codes
        if self.format.has_block_axis:
            return (*self.shape[:-1], self.grid[1], self.block[1] * bits // 8)
        columns = self.columns * height * bits // self.format.code_dtype.bits
        return (*self.shape[:-2], self.rows // height, columns)

    @cached_property
    def tensor_scale_dtype(self) -> DType | None:
        return self.format.tensor_scale_dtype(self.scale_dtype)

    @cached_property
    def cut_height(self) -> int:
        """As ``Format.cut_height``."""
        return self.format.cut_height(self.scale_row_height)

    @property
    def zero_points_shape(self) -> tuple[int, ...]:
        """Without the axis of blocks where the scales of rows have none."""
        blocks = () if self.scales_shape == self.shape[:-1] else self.grid[1:]
        return (*self.shape[:-2], -(-self.rows // self.format.rows_of_zeros), *blocks)

    def has_scale_rows_of(self, start: int, count: int) -> bool:
        """Whether the scale rows of a run of elements are those of a single matrix with as many rows.

        Not so where a run crosses matrices of a stack whose rows are not divided by scale rows."""
        size = self.rows * self.columns
        return not self.rows % self.cut_height or start // size == (start + count - 1) // size

    def codes_nbytes(self, num_rows: int) -> int:
        return num_rows * self.columns * self.format.code_bits // 8

    def scales_nbytes(self, num_rows: int) -> int:
        """Bytes of the scales of ``num_rows`` rows from the beginning of a scale row."""
        return self.scale_dtype.nbytes(-(-num_rows // self.scale_row_height) * self.scale_row_length)


@dataclass(frozen=True)
class Encoding:
    """A quantisation spec without a shape: how matrices of any shape are stored as codes with scales."""

    format: Format
    block: tuple[int, int]
    scale_dtype: DType
    power_of_two: bool

    @property
    def scale_row_height(self) -> int:
        """Rows that share a row of the grid."""
        return self.block[0] or 1

    @cached_property
    def cut_height(self) -> int:
        """As ``Format.cut_height``."""
        return self.format.cut_height(self.scale_row_height)

    @cached_property
    def tensor_scale_dtype(self) -> DType | None:
        return self.format.tensor_scale_dtype(self.scale_dtype)

    @cached_property
    def tensor_scale_nbytes(self) -> int:
        """Bytes of the one scale of a matrix; 0 where there is none."""
        return 0 if self.tensor_scale_dtype is None else self.tensor_scale_dtype.nbytes(1)

    def scales_nbytes(self, columns: int) -> int:
        """Of a scale row."""
        return self.made_nbytes("scales", 1, columns)

    def zero_points_nbytes(self, scales_nbytes: int, columns: int) -> int:
        """Bytes of the zero points that go with so many bytes of scales."""
        if self.format.zero_points is None:
            return 0
        num_rows = scales_nbytes // self.scales_nbytes(columns) * self.scale_row_height
        return self.made_nbytes("zero_points", num_rows, columns)

    def made_dtype(self, what: Made) -> DType | None:
        """Dtype of what is made with codes; None where it is not."""
        if what == "scales":
            return None if self.format.tensor_scale == "only" else self.scale_dtype
        return self.tensor_scale_dtype if what == "tensor_scale" else self.format.zero_points

    def made_nbytes(self, what: Made, num_rows: int, columns: int) -> int:
        """Bytes of what is made with some rows of codes, from the beginning of a run that may be cut."""
        dtype = self.made_dtype(what)
        if dtype is None:
            return 0
        if what == "tensor_scale":
            return dtype.nbytes(1)
        height = self.scale_row_height if what == "scales" else self.cut_height
        return dtype.nbytes(-(-num_rows // height) * -(-columns // (self.block[1] or columns)))

    def quant_spec(self, shape: tuple[int, ...]) -> QuantSpec:
        """For a tensor [..., rows, columns]. Raises ValueError: no matrix of this shape can be stored so."""
        rows, columns = shape[-2:]
        block = self.block[0] or rows, self.block[1] or columns
        grid = -(-rows // block[0]), -(-columns // block[1])
        return QuantSpec(self.format, shape, block, self.scale_dtype, self.power_of_two, (*shape[:-2], *grid))


def usual_quant_spec(
    form: Format, shape: tuple[int, ...], *, scale_dtype: DType | None = None, power_of_two: bool = False
) -> QuantSpec:
    """The quantisation spec that publishers use for a format, for tensors that had none before. Raises
    ValueError: a matrix of this shape cannot be stored so."""
    if len(shape) < 2:
        raise ValueError(f"{form.word} is for matrices, but the shape is {list(shape)}.")
    stack, sizes = shape[:-2], shape[-2:]
    usual_block = form.usual_block or form.block
    rows, columns = (usual or size for usual, size in zip(usual_block, sizes, strict=True))
    grid = tuple(-(-size // max(of, 1)) for size, of in zip(sizes, (rows, columns), strict=True))
    is_one = form.tensor_scale == "only" and (form.scales_stack or not stack)
    scales_shape = (1,) if is_one else (*stack, *grid)
    dtype = scale_dtype or form.usual_scale
    return QuantSpec(form, shape, (rows, columns), dtype, power_of_two or dtype in EXPONENTS, scales_shape)


def _shape_fault(quant_spec: QuantSpec) -> str | None:
    """What is wrong with a quantisation spec, as the end of a sentence that begins with the format's name."""
    shape, block = quant_spec.shape, quant_spec.block
    if len(shape) < 2 or min(shape) < 1:
        return f"is for matrices that have elements, but the shape is {list(shape)}."
    if min(block) < 1:
        return f"has blocks of {list(block)}, which hold no element."
    return None


def _block_fault(quant_spec: QuantSpec) -> str | None:
    form, shape, block = quant_spec.format, quant_spec.shape, quant_spec.block
    fixed = form.fixed_block(block, shape)
    if block != fixed:
        return f"has blocks of {list(fixed)} in a tensor of shape {list(shape)}, not {list(block)}."
    if quant_spec.columns % block[1] and (form.code_bits < 8 or form.block[1] > 0):
        return f"needs columns that {block[1]} divides, but the shape is {list(shape)}."
    if form.packs_rows and quant_spec.rows % block[0]:
        return f"needs rows that {block[0]} divides, but the shape is {list(shape)}."
    if form.code_bits == 8:
        return None
    if block[1] % 2 and not form.packs_rows:
        return f"has two codes to a byte, and no blocks of {block[1]} columns, which would end within one."
    if quant_spec.columns * 4 % form.code_dtype.bits:
        per_element = form.code_dtype.bits // 4
        return f"has {per_element} codes to an element, which do not divide {quant_spec.columns} columns."
    return None


def _scales_fault(quant_spec: QuantSpec) -> str | None:
    form, dtype = quant_spec.format, quant_spec.scale_dtype
    if dtype not in form.scale_dtypes:
        return f"has scales of {', '.join(sorted(form.scale_dtypes))}, not {dtype.value}."
    if dtype in EXPONENTS and not quant_spec.power_of_two:
        return f"has scales of {dtype.value}, which are powers of two."
    if quant_spec.power_of_two and dtype not in EXPONENTS and not form.is_fp8:
        return "has scales that are not held to powers of two."
    is_one = form.scales_stack and form.tensor_scale == "only"
    grid = () if is_one else (*quant_spec.shape[:-2], *quant_spec.grid)
    if _without_ones(quant_spec.scales_shape) != _without_ones(grid):
        return (
            f"of shape {list(quant_spec.shape)} in blocks of {list(quant_spec.block)} has scales of shape "
            f"{list(grid)}, not {list(quant_spec.scales_shape)}."
        )
    return None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
