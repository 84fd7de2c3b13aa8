"""What every codec does: numbers from codes with scales, and back.

A codec works on whole rows of one matrix that begin at a band (``raymerge.checkpoints.quantisation.encoding``) and end at
one or with the matrix. Every block is decided by itself, so a matrix that is cut between bands gives the
same bytes as the whole; and every operation is one that IEEE 754 rounds the same way on each device.

An element is what a code means without its scale. It counts ``step`` times: that is the block's scale, or,
where blocks share a scale of the whole tensor as well, what both together make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.blockwise import Blockwise
from raymerge.checkpoints.codecs.scales import load_scales, store_scales
from raymerge.checkpoints.quantisation.encoding import Packing


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
