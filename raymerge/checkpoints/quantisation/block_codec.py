"""What all codecs share: numbers from codes with scales, and back.

A codec works on whole rows of one matrix, from the start of a scale row
(``checkpoints.quantisation.encoding``) to the end of one or of the matrix. Blocks are independent, so a
matrix that is cut between scale rows gives the same bytes as the whole; every operation is one that IEEE 754
rounds equally on each device.

An element is what a code means without its scale. Its ``step`` is the factor: the block's scale, combined
with the scale of the whole tensor where there is one.

Blockwise arithmetic exists in torch, for any device, and in compiled loops for the CPU, with equal bits.
On one core the loops decode FP8 20 times and encode it 10 times as fast; for MXFP4 3 and 20 times.

torch is imported where it computes, since formats are declared beside their codecs and header readers
need them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from raymerge.checkpoints.quantisation.encoding import EXPONENTS, QuantSpec
from raymerge.dtypes import DType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raymerge.kernels.block_scales import Loops

Block: TypeAlias = tuple[int, int]
_NAN_BITS = 0x7FC00000
_HALF_LEAST_BITS = 0x00400000
_SMALLEST: Mapping[DType, float] = {DType.F16: 2.0**-24, DType.F8_E4M3: 2.0**-9}
_SMALLEST_NORMAL = 2.0**-126
# Of the mantissa of float32.
_DROPPED_BITS: Mapping[DType, int] = {DType.F16: 13, DType.BF16: 16}
# For float16 the largest power of two, which may be what is wanted.
_LARGEST: Mapping[DType, float] = {DType.F16: 2.0**15, DType.F8_E4M3: 448.0}


class StoredScales(NamedTuple):
    """What some rows of codes are stored with."""

    scales: Tensor | None = None
    """uint8 [bytes] of the scale rows, empty where the only scale is the tensor's; None where all are to be
    made."""
    zero_points: Tensor | None = None
    """uint8 [bytes], where the format has such."""
    tensor_scale: Tensor | None = None
    """float32 []: what all of a matrix shares; None where the quantisation spec has no
    ``tensor_scale_dtype``."""


_TO_BE_MADE = StoredScales()


class Encoded(NamedTuple):
    """Codes of whole rows, uint8 [bytes], contiguous; the others are as in ``StoredScales``."""

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    tensor_scale: Tensor | None = None

    @property
    def stored(self) -> StoredScales:
        return StoredScales(*self[1:])


class BlockValues(NamedTuple):
    """Numbers to be encoded: float32 [rows, columns], and the largest magnitude of each block."""

    values: Tensor
    largest: Tensor
    """float32 [scale rows, blocks]; of the whole tensor [], as its ``values`` are then."""
    tensor_scale: Tensor | None = None


class Steps(NamedTuple):
    """What makes numbers of elements, by block: float32 [scale rows, blocks of a scale row] each."""

    steps: Tensor
    zeros: Tensor | None = None
    """The elements that stand for 0; None where 0 does."""


class ErrorSums(NamedTuple):
    """Errors of encoding, summed over the rows of a tensor."""

    squared_errors: float
    squared_values: float


class Exactness(NamedTuple):
    """How many blocks of codes hold exactly the numbers that they were made of."""

    blocks: int
    inexact_blocks: int
    largest_error: float

    def plus(self, other: Exactness) -> Exactness:
        counts = self.blocks + other.blocks, self.inexact_blocks + other.inexact_blocks
        return Exactness(*counts, max(self.largest_error, other.largest_error))


class NotFiniteError(ValueError):
    """Values to encode hold NaN or infinity, for which most formats have no code."""


@dataclass(frozen=True, slots=True)
class InTorch:
    """The arithmetic of one kind of codes.

    ``values`` are float32 [rows, columns], ``codes`` uint8 [rows, bytes of a row]."""

    elements: Callable[[Tensor], Tensor]
    """uint8 [rows, bytes] to float32 [rows, columns]."""
    nearest: Callable[[Tensor], Tensor]
    """float32 [rows, columns], which may be overwritten, to uint8 [rows, bytes]."""

    def decode(self, codes: Tensor, by: Steps, block: Block, values: Tensor) -> None:
        """Write values: each element, less that for 0, times the step of its block."""
        values.copy_(self.elements(codes))
        for part, zero in () if by.zeros is None else _parts(values, by.zeros, block):
            part.sub_(zero)
        for part, step in _parts(values, by.steps, block):
            part.mul_(step)

    def encode(self, values: Tensor, by: Steps, block: Block, row_nbytes: int) -> Tensor:
        """Codes: the nearest to each value over the step of its block (1 where it is 0), ties to even."""
        import torch

        divisors = torch.where(by.steps == 0, 1.0, by.steps)
        quotients = torch.empty_like(values)
        pairs = zip(_parts(values, divisors, block), _parts(quotients, divisors, block), strict=True)
        for (part, divisor), (into, _) in pairs:
            torch.div(part, divisor, out=into)
        for into, zero in () if by.zeros is None else _parts(quotients, by.zeros, block):
            into.add_(zero)
        codes = self.nearest(quotients)
        assert codes.shape[1] == row_nbytes
        return codes

    def fits(self, values: Tensor, by: Steps, block: Block, row_nbytes: int) -> Tensor:
        """Whether every value of a block is exactly an element times the step; bool [scale rows, blocks]."""
        import torch

        decoded = torch.empty_like(values)
        self.decode(self.encode(values, by, block, row_nbytes), by, block, decoded)
        result = torch.empty(_grid(values, block), dtype=torch.bool, device=values.device)
        for part, into in _parts(decoded == values, result, block):
            into.copy_(part.all(dim=3, keepdim=True).all(dim=1, keepdim=True))
        return result

    def largest(self, values: Tensor, block: Block) -> Tensor:
        """Largest magnitude of every block, NaN where there is one; float32 [scale rows, blocks]."""
        result = values.new_empty(_grid(values, block))
        for part, into in _parts(values, result, block):
            into.copy_(part.abs().amax(dim=(1, 3), keepdim=True))
        return result

    def squares(self, codes: Tensor, by: Steps, block: Block, values: Tensor) -> tuple[float, float]:
        """Sums of the squares of decoded codes minus ``values``, and of ``values``.

        Differences are rounded to float32; the rounding of the sums depends on the device."""
        import torch

        def sum_of(numbers: Tensor) -> Tensor:
            norm: Tensor = torch.linalg.vector_norm(numbers, dtype=torch.float64)
            return norm.square()

        decoded = torch.empty_like(values)
        self.decode(codes, by, block, decoded)
        errors, squares = torch.stack([sum_of(decoded.sub_(values)), sum_of(values)]).tolist()
        return errors, squares


@dataclass(frozen=True, slots=True)
class InLoops:
    """``InTorch`` in compiled loops."""

    kind: Literal["E4M3", "E2M1", "INT4"]
    """The name of the codes' loops in ``kernels.block_scales``, imported at first use, which is slow."""

    def load(self) -> Loops:
        from raymerge.kernels import block_scales

        loops: Loops = getattr(block_scales, self.kind)
        return loops

    def decode(self, codes: Tensor, by: Steps, block: Block, values: Tensor) -> None:
        self.load().decode(_array(codes), _array(by.steps), *block, values.numpy())

    def encode(self, values: Tensor, by: Steps, block: Block, row_nbytes: int) -> Tensor:
        import torch

        codes = torch.empty(values.shape[0], row_nbytes, dtype=torch.uint8)
        self.load().encode(_array(values), _array(by.steps), *block, _array(codes))
        return codes

    def fits(self, values: Tensor, by: Steps, block: Block, row_nbytes: int) -> Tensor:  # noqa: ARG002
        import torch

        result = torch.ones(by.steps.shape, dtype=torch.bool)
        self.load().fits(_array(values), _array(by.steps), *block, _array(result))
        return result

    def largest(self, values: Tensor, block: Block) -> Tensor:
        from raymerge.kernels.block_scales import largest

        result = values.new_zeros(_grid(values, block))
        largest(_array(values).view("uint32"), *block, _array(result).view("uint32"))
        return result

    def squares(self, codes: Tensor, by: Steps, block: Block, values: Tensor) -> tuple[float, float]:
        return self.load().squares(_array(codes), _array(by.steps), *block, _array(values))


Blockwise: TypeAlias = InTorch | InLoops


def _array(tensor: Tensor) -> Any:
    # Loops are compiled for arrays without gaps.
    return tensor.contiguous().numpy()


def _grid(values: Tensor, block: Block) -> tuple[int, int]:
    return -(-values.shape[0] // block[0]), -(-values.shape[1] // block[1])


def _parts(elements: Tensor, grid: Tensor, block: Block) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of elements and of their blocks' values, for elementwise operations; at most four pairs. Yields
    [scale rows, rows of one, blocks, columns of one] and [scale rows, 1, blocks, 1]: blocks of one size
    each."""
    height, width = block
    for top, bottom, rows in _cuts(elements.shape[0], height):
        for left, right, columns in _cuts(elements.shape[1], width):
            num_scale_rows, num_blocks = (bottom - top) // rows, (right - left) // columns
            part = elements[top:bottom, left:right].view(num_scale_rows, rows, num_blocks, columns)
            scale_row, first = top // height, left // width
            yield part, grid[scale_row : scale_row + num_scale_rows, None, first : first + num_blocks, None]


def _cuts(size: int, block: int) -> Iterator[tuple[int, int, int]]:
    whole = size // block * block
    if whole:
        yield 0, whole, block
    if whole < size:
        yield whole, size, size - whole


class Codec(ABC):
    """One way of storing numbers as codes with scales."""

    in_torch: ClassVar[Blockwise]
    in_loops: ClassVar[Blockwise | None] = None
    """The CPU implementation; None where that is torch too."""

    def decode(self, quant_spec: QuantSpec, encoded: Encoded, *, out: Tensor | None = None) -> Tensor:
        """Decode whole rows to float32 [rows, columns], or to ``out``, which is contiguous memory for them.

        Each element times its step, rounded once; a NaN scale gives NaN."""
        import torch

        rows = encoded.codes.view(-1, quant_spec.codes_nbytes(1))
        if out is None:
            out = torch.empty(len(rows), quant_spec.columns, device=rows.device)
        self._blockwise(rows).decode(rows, self._steps(quant_spec, encoded.stored), quant_spec.block, out)
        return out

    def encode(self, quant_spec: QuantSpec, values: Tensor, given: StoredScales = _TO_BE_MADE) -> Encoded:
        """Encode whole rows, float32 [rows, columns], as the nearest codes, ties to even.

        A block keeps its given scale, and zero point where the format has such, if every value is exactly a
        code times it: decoded, unchanged values give their original bytes. Otherwise the scale is that of
        the largest magnitude. The tensor's scale must be chosen before the first rows.

        Raises NotFiniteError: a block holds NaN or infinity. Not raised where the only scale is the tensor's,
        nor on a GPU.
        """
        scales, zeros = self._scales(quant_spec, values, given)
        steps = self._steps(quant_spec, StoredScales(scales, zeros, given.tensor_scale))
        codes = self._blockwise(values).encode(values, steps, quant_spec.block, quant_spec.codes_nbytes(1))
        return Encoded(codes.view(-1), scales, zeros, given.tensor_scale)

    def fits(self, quant_spec: QuantSpec, values: Tensor, stored: StoredScales) -> Tensor:
        """Which blocks hold only exact products of a code and these scales: bool [scale rows, scales of a
        scale row], [1, 1] where the only scale is the tensor's. All must, for the tensor's scale to be
        kept."""
        steps = self._steps(quant_spec, stored)
        return self._blockwise(values).fits(values, steps, quant_spec.block, quant_spec.codes_nbytes(1))

    def largest(self, quant_spec: QuantSpec, values: Tensor) -> Tensor:
        """Largest magnitude of whole rows, NaN where there is one; float32 []."""
        return self._blockwise(values).largest(values, quant_spec.block).amax()

    def fresh_tensor_scale(
        self, quant_spec: QuantSpec, largest: Tensor, *, had: Tensor | None = None
    ) -> Tensor:
        """A scale for the whole tensor from its largest magnitude; both float32 [].

        Storable in the quantisation spec's ``tensor_scale_dtype``. Formats that also have block scales keep
        the scale that the tensor ``had`` where it still serves.

        Raises ValueError: the quantisation spec has no such scale."""
        if quant_spec.tensor_scale_dtype is None:
            raise ValueError(f"{quant_spec.format.name} has no scale of the whole tensor.")
        return self._for_tensor(quant_spec, largest, had if quant_spec.format.has_two_scales else None)

    def error_sums(self, quant_spec: QuantSpec, values: Tensor, encoded: Encoded) -> ErrorSums:
        """Errors of encoding these rows, for a report: the rounding depends on how rows are cut."""
        rows = encoded.codes.view(-1, quant_spec.codes_nbytes(1))
        steps = self._steps(quant_spec, encoded.stored)
        return ErrorSums(*self._blockwise(values).squares(rows, steps, quant_spec.block, values))

    def exactness(self, quant_spec: QuantSpec, values: Tensor, encoded: Encoded) -> Exactness:
        """How many of the blocks that have scales of their own hold exactly these values."""
        exact = self.fits(quant_spec, values, encoded.stored)
        lost = exact.numel() - int(exact.sum())
        if not lost:
            return Exactness(exact.numel(), 0, 0.0)
        decoded = self.decode(quant_spec, encoded)
        return Exactness(exact.numel(), lost, float(decoded.sub_(values).abs_().amax()))

    @abstractmethod
    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        """Storable scales for blocks; float32, shaped as their largest magnitudes."""

    def _for_tensor(self, quant_spec: QuantSpec, largest: Tensor, had: Tensor | None) -> Tensor:
        """The scale of a whole tensor; ``had`` is None but for formats that also have block scales."""
        assert had is None
        return self._fresh(quant_spec, BlockValues(largest, largest))

    def _scales(
        self, quant_spec: QuantSpec, values: Tensor, given: StoredScales
    ) -> tuple[Tensor, Tensor | None]:
        """Stored scales and zero points to encode rows with, uint8 [bytes] each."""
        import torch

        if quant_spec.scale_row_length == 0:
            return torch.empty(0, dtype=torch.uint8, device=values.device), None
        blocks = BlockValues(values, self._finite_largest(quant_spec, values), given.tensor_scale)
        fresh = self._fresh(quant_spec, blocks)
        if given.scales is None:
            return store_scales(quant_spec.scale_dtype, fresh), None
        had = load_scales(quant_spec.scale_dtype, given.scales).view(fresh.shape)
        fits = self.fits(quant_spec, values, given)
        return store_scales(quant_spec.scale_dtype, torch.where(fits, had, fresh)), None

    def _finite_largest(self, quant_spec: QuantSpec, values: Tensor) -> Tensor:
        largest = self._blockwise(values).largest(values, quant_spec.block)
        # Of a GPU's the sums of errors tell: to ask here would have the host wait for it once more.
        if largest.is_cpu and not largest.isfinite().all():
            raise NotFiniteError("values that are not finite cannot be encoded")
        return largest

    def _steps(self, quant_spec: QuantSpec, stored: StoredScales) -> Steps:
        if quant_spec.scale_row_length == 0:
            assert stored.tensor_scale is not None
            return Steps(stored.tensor_scale.view(1, 1))
        assert stored.scales is not None
        scales = load_scales(quant_spec.scale_dtype, stored.scales)
        return Steps(scales.view(-1, quant_spec.scale_row_length))

    def _blockwise(self, tensor: Tensor) -> Blockwise:
        return (self.in_loops if tensor.device.type == "cpu" else None) or self.in_torch


def load_scales(dtype: DType, stored: Tensor) -> Tensor:
    """Stored scales, uint8 [nbytes], as float32 [scales]; exponent 255 is NaN."""
    import torch

    if dtype in EXPONENTS:
        exponents = stored.int()
        bits = torch.where(exponents == 0, _HALF_LEAST_BITS, exponents << 23)
        return torch.where(exponents == 255, _NAN_BITS, bits).view(torch.float32)
    # Bytes that were cut from a larger buffer may lie where no element of this dtype can begin.
    aligned = stored.clone() if stored.storage_offset() % (dtype.bits // 8) else stored
    return aligned.view(_torch_dtype(dtype)).float()


def store_scales(dtype: DType, scales: Tensor) -> Tensor:
    """float32 [...], rounded to the nearest storable, as uint8 [nbytes]; exponents need powers of two."""
    import torch

    flat = scales.reshape(-1)
    if dtype in EXPONENTS:
        return (flat.view(torch.int32) >> 23).to(torch.uint8)
    return flat.to(_torch_dtype(dtype)).view(torch.uint8)


def storable_scales(dtype: DType, scales: Tensor) -> Tensor:
    """Nearest storable usable scales; float32, same shape.

    0 (a block of zeros) becomes 1; rounding never gives 0 or infinity."""
    import torch

    within = scales.clamp(_SMALLEST.get(dtype, _SMALLEST_NORMAL), _LARGEST.get(dtype))
    nonzero = torch.where(scales == 0, 1.0, within)
    return load_scales(dtype, store_scales(dtype, nonzero)).view(scales.shape)


def storable_scales_above(dtype: DType, scales: Tensor) -> Tensor:
    """Least storable scales not below ``scales``, so that no code saturates; as ``storable_scales``."""
    import torch

    dropped = _DROPPED_BITS.get(dtype, 0)
    bits = (scales.contiguous().view(torch.int32) + ((1 << dropped) - 1)) >> dropped << dropped
    return storable_scales(dtype, bits.view(torch.float32))


def quotients(values: Tensor, number: float) -> Tensor:
    """Values over a number, rounded once on every device."""
    from raymerge.device_numerics import divisor

    return values / divisor(number, values)


def power_of_two_above(scales: Tensor) -> Tensor:
    """Least powers of two not below the positive ``scales``; float32, same shape.

    Computed from the bits, since logarithms round differently by device. Below 2 ** -126 the result is that;
    0 stays 0, infinity and NaN become infinity."""
    import torch

    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponents.clamp(max=255) << 23).view(torch.float32)


def _torch_dtype(dtype: DType) -> torch.dtype:
    import torch

    resolved = getattr(torch, dtype.torch_name or "")
    assert isinstance(resolved, torch.dtype)
    return resolved


def pack_nibbles(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [rows, columns], two to a byte, the first in the lower half.

    Words of several bytes are little-endian, so an int32 of eight codes is the same four bytes."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def nibble_elements(codes: Tensor, elements: tuple[float, ...]) -> Tensor:
    """Packed 4-bit codes, uint8 [rows, bytes], as float32 elements [rows, columns]."""
    table = _pairs(elements, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape[0], -1)


@cache
def _pairs(elements: tuple[float, ...], device: torch.device) -> Tensor:
    """The two elements of every byte, [256, 2]."""
    import torch

    table, byte = torch.tensor(elements), torch.arange(256)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=1).to(device)
