"""What every codec does: numbers from codes with scales, and back.

A codec works on whole rows of one matrix that begin at a band (``checkpoints.quantisation.encoding``) and end
at one or with the matrix. Every block is decided by itself, so a matrix that is cut between bands gives the
same bytes as the whole; and every operation is one that IEEE 754 rounds the same way on each device.

An element is what a code means without its scale. It counts ``step`` times: that is the block's scale, or,
where blocks share a scale of the whole tensor as well, what both together make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.blockwise import Blockwise
from raymerge.checkpoints.quantisation.encoding import Packing
from raymerge.device_numerics import divisor
from raymerge.dtypes import DType

_NAN_BITS = 0x7FC00000
_HALF_LEAST_BITS = 0x00400000
_SMALLEST: Mapping[DType, float] = {DType.F16: 2.0**-24, DType.F8_E4M3: 2.0**-9}
_SMALLEST_NORMAL = 2.0**-126
# For float16 the largest power of two, which may be what is wanted.
_LARGEST: Mapping[DType, float] = {DType.F16: 2.0**15, DType.F8_E4M3: 448.0}


def load_scales(dtype: DType, stored: Tensor) -> Tensor:
    """Stored scales as float32.

    Args:
        dtype: F32, BF16, F16, F8_E4M3, or F8_E8M0 and U8, which are exponents: 2 ** (b - 127), 255 is NaN.
        stored: uint8 [nbytes].

    Returns:
        float32 [scales].
    """
    if dtype in (DType.F8_E8M0, DType.U8):
        exponents = stored.int()
        bits = torch.where(exponents == 0, _HALF_LEAST_BITS, exponents << 23)
        return torch.where(exponents == 255, _NAN_BITS, bits).view(torch.float32)
    # Bytes that were cut from a larger buffer may lie where no element of this dtype can begin.
    aligned = stored.clone() if stored.storage_offset() % (dtype.bits // 8) else stored
    return aligned.view(_torch_dtype(dtype)).float()


def store_scales(dtype: DType, scales: Tensor) -> Tensor:
    """The reverse: float32 [...], rounded to the nearest that can be stored, as uint8 [nbytes].

    What is stored as an exponent must be a power of two.
    """
    flat = scales.reshape(-1)
    if dtype in (DType.F8_E8M0, DType.U8):
        return (flat.view(torch.int32) >> 23).to(torch.uint8)
    return flat.to(_torch_dtype(dtype)).view(torch.uint8)


def storable_scales(dtype: DType, scales: Tensor) -> Tensor:
    """Wanted scales as the nearest that can be stored and serve as such; float32, of the same shape.

    0, which a block has that is all zeros, becomes 1. Scales become neither 0 nor infinite by rounding.
    """
    within = scales.clamp(_SMALLEST.get(dtype, _SMALLEST_NORMAL), _LARGEST.get(dtype))
    nonzero = torch.where(scales == 0, 1.0, within)
    return load_scales(dtype, store_scales(dtype, nonzero)).view(scales.shape)


def quotients(values: Tensor, number: float) -> Tensor:
    """Values over a number, rounded once on every device."""
    return values / divisor(number, values)


def power_of_two_above(scales: Tensor) -> Tensor:
    """The least powers of two that are not below the positive ``scales``; float32, of the same shape.

    Taken from the bits, since a logarithm is rounded differently on each device. Below 2 ** -126 that is the
    answer; 0 stays 0, infinity and NaN become infinity.
    """
    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponents.clamp(max=255) << 23).view(torch.float32)


def _torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch_name or "")
    assert isinstance(found, torch.dtype)
    return found


class Encoded(NamedTuple):
    """Rows of a matrix as they are stored."""

    codes: Tensor
    """uint8 [bytes]."""
    scales: Tensor
    """Those of the rows' bands, uint8 [bytes]; none where the only scale is the tensor's."""


class ErrorSums(NamedTuple):
    """What encoding changed, to be added up over the rows of a tensor."""

    squared_errors: float
    """Sum of the squared differences between decoded and true values."""
    squared_values: float
    """Sum of the squared true values."""


class NotFiniteError(ValueError):
    """Values that are to be encoded hold NaN or infinity, for which most formats have no code."""


class Codec(ABC):
    """One way of storing numbers as codes with scales.

    ``tensor_scale`` is the one scale that all of a matrix shares, float32 []; given where the packing has a
    ``tensor_scale_dtype``, and None elsewhere.
    """

    in_torch: ClassVar[Blockwise]
    """Its arithmetic on any device."""
    in_loops: ClassVar[Blockwise]
    """The same on the CPU."""

    def decode(
        self,
        packing: Packing,
        codes: Tensor,
        scales: Tensor,
        *,
        tensor_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The numbers of whole rows.

        Args:
            packing: how the tensor is stored.
            codes: uint8 [bytes of the rows], contiguous.
            scales: uint8 [bytes of their bands' scales]; empty where the only scale is the tensor's.
            tensor_scale: see above.
            out: contiguous memory for the result, or None for memory of its own.

        Returns:
            float32 [rows, columns]: each element times its step, rounded once. A scale that is NaN gives NaN.
        """
        rows = codes.view(-1, packing.codes_nbytes(1))
        if out is None:
            out = torch.empty(len(rows), packing.columns, device=codes.device)
        steps = self._steps(packing, scales, tensor_scale)
        self._blockwise(codes).decode(rows, steps, packing.block, out)
        return out

    def encode(
        self,
        packing: Packing,
        values: Tensor,
        *,
        kept: Tensor | None = None,
        tensor_scale: Tensor | None = None,
    ) -> Encoded:
        """Whole rows as codes with scales.

        A block keeps the scale it had if every value is exactly a code times it: then nothing is lost, and
        what was decoded and not changed gives the bytes that it came from. Otherwise its scale is made anew
        from its largest magnitude.

        Args:
            packing: how the tensor is stored.
            values: float32 [rows, columns].
            kept: scales that the bands had, uint8 as ``decode`` takes them, or None.
            tensor_scale: see above; chosen by the caller before the first rows.

        Returns:
            The nearest codes, ties to even, and the scales.

        Raises:
            NotFiniteError: a block holds NaN or infinity. Where the only scale is the tensor's, that is to be
                seen before it is chosen.
        """
        stored = self._scales(packing, values, kept, tensor_scale)
        steps = self._steps(packing, stored, tensor_scale)
        codes = self._blockwise(values).encode(values, steps, packing.block, packing.codes_nbytes(1))
        return Encoded(codes.view(-1), stored)

    def fits(
        self, packing: Packing, values: Tensor, scales: Tensor, *, tensor_scale: Tensor | None = None
    ) -> Tensor:
        """Which blocks hold nothing but exact products of a code and these scales.

        All of a tensor's blocks must, for its ``tensor_scale`` to be kept.

        Args:
            packing: how the tensor is stored.
            values: float32 [rows, columns].
            scales: as ``decode`` takes them.
            tensor_scale: see above.

        Returns:
            bool [bands, scales of a band]; [1, 1] where the only scale is the tensor's.
        """
        steps = self._steps(packing, scales, tensor_scale)
        return self._blockwise(values).fits(values, steps, packing.block, packing.codes_nbytes(1))

    def largest(self, packing: Packing, values: Tensor) -> Tensor:
        """The largest magnitude of whole rows, NaN where there is one; float32 []."""
        return self._blockwise(values).largest(values, packing.block).amax()

    def fresh_tensor_scale(self, packing: Packing, largest: Tensor, *, had: Tensor | None = None) -> Tensor:
        """A scale for the whole tensor, from its largest magnitude; both float32 [].

        It can be stored in the packing's ``tensor_scale_dtype``.

        Args:
            packing: how the tensor is stored.
            largest: its largest magnitude.
            had: the scale that it had before it was changed. A format whose blocks have scales too stays with
                it where it serves as well.

        Raises:
            ValueError: the packing has no such scale.
        """
        if packing.tensor_scale_dtype is None:
            raise ValueError(f"{packing.format.value} has no scale of the whole tensor.")
        fresh = self._fresh_for_tensor(packing, largest)
        return fresh if had is None else self._near(had, largest, fresh)

    def error_sums(
        self, packing: Packing, values: Tensor, encoded: Encoded, *, tensor_scale: Tensor | None = None
    ) -> ErrorSums:
        """What encoding changed in these rows, for a report: how it is rounded depends on the cut."""
        rows = encoded.codes.view(-1, packing.codes_nbytes(1))
        steps = self._steps(packing, encoded.scales, tensor_scale)
        return ErrorSums(*self._blockwise(values).squares(rows, steps, packing.block, values))

    @abstractmethod
    def _fresh(self, packing: Packing, largest: Tensor, tensor_scale: Tensor | None) -> Tensor:
        """Scales for blocks with these largest magnitudes, such as can be stored; float32 [bands, blocks]."""

    def _fresh_of(
        self,
        packing: Packing,
        values: Tensor,  # noqa: ARG002
        largest: Tensor,
        tensor_scale: Tensor | None,
    ) -> Tensor:
        """The same for blocks of these values; most formats need no more than the magnitudes."""
        return self._fresh(packing, largest, tensor_scale)

    def _fresh_for_tensor(self, packing: Packing, largest: Tensor) -> Tensor:
        return self._fresh(packing, largest, None)

    def _near(self, had: Tensor, largest: Tensor, fresh: Tensor) -> Tensor:  # noqa: ARG002
        """A scale for the whole tensor that is, or is near, the one that it had; ``fresh`` where none is."""
        return fresh

    def _scales(
        self, packing: Packing, values: Tensor, kept: Tensor | None, tensor_scale: Tensor | None
    ) -> Tensor:
        """The stored scales that rows are to be encoded with, uint8 [bytes]."""
        if packing.scales_per_band == 0:
            return torch.empty(0, dtype=torch.uint8, device=values.device)
        largest = self._blockwise(values).largest(values, packing.block)
        if not largest.isfinite().all():
            raise NotFiniteError("values that are not finite cannot be encoded")
        fresh = self._fresh_of(packing, values, largest, tensor_scale)
        if kept is None:
            return store_scales(packing.scale_dtype, fresh)
        had = load_scales(packing.scale_dtype, kept).view(fresh.shape)
        fits = self.fits(packing, values, kept, tensor_scale=tensor_scale)
        return store_scales(packing.scale_dtype, torch.where(fits, had, fresh))

    def _steps(self, packing: Packing, scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
        """What elements are multiplied by: float32 [bands, blocks of a band]."""
        if packing.scales_per_band == 0:
            assert tensor_scale is not None
            return tensor_scale.view(1, 1)
        return load_scales(packing.scale_dtype, scales).view(-1, packing.scales_per_band)

    def _blockwise(self, tensor: Tensor) -> Blockwise:
        return self.in_loops if tensor.device.type == "cpu" else self.in_torch
