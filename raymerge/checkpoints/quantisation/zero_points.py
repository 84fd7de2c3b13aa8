"""Integers of which each block has its own for 0: numbers need not lie evenly around it.

A number is its code, less the block's zero point, times the block's scale."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar

from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Codec,
    InTorch,
    Steps,
    StoredScales,
    quotients,
    storable_scales_above,
    store_scales,
)
from raymerge.checkpoints.quantisation.encoding import QuantSpec

if TYPE_CHECKING:
    from torch import Tensor


class ZeroPointCodec(Codec, ABC):
    """Integers with zero points, from numbers as compressed-tensors' observers make them.

    The scale maps what lies between the least and the greatest number of a block, and 0, to all codes. It is
    rounded to its stored dtype before zero point and codes are made, as 0 is to have a code."""

    in_torch: ClassVar[InTorch]
    least: ClassVar[int]
    greatest: ClassVar[int]
    """Elements of the codes."""

    def _scales(self, quant_spec: QuantSpec, values: Tensor, given: StoredScales) -> tuple[Tensor, Tensor]:
        import torch

        scales = self._fresh(quant_spec, BlockValues(values, self._finite_largest(quant_spec, values)))
        zeros = self.least - _block_range(values, scales.shape)[0] / scales
        zeros = zeros.round_().clamp_(self.least, self.greatest)
        if given.scales is not None:
            had, fits = self._steps(quant_spec, given), self.fits(quant_spec, values, given)
            assert had.zeros is not None
            scales, zeros = torch.where(fits, had.steps, scales), torch.where(fits, had.zeros, zeros)
        return store_scales(quant_spec.scale_dtype, scales), self._stored(quant_spec, zeros)

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        num_steps = self.greatest - self.least
        low, high = _block_range(blocks.values, blocks.largest.shape)
        # Each by itself, as a difference may be beyond float32.
        return storable_scales_above(
            quant_spec.scale_dtype, quotients(high, num_steps) - quotients(low, num_steps)
        )

    def _steps(self, quant_spec: QuantSpec, stored: StoredScales) -> Steps:
        assert stored.zero_points is not None
        steps = super()._steps(quant_spec, stored).steps
        height, length = quant_spec.format.rows_of_zeros, quant_spec.scale_row_length
        packed = stored.zero_points.view(-(-steps.shape[0] // height), -1)
        by_row = self.in_torch.elements(packed).view(-1, length, height).transpose(1, 2)
        return Steps(steps, by_row.reshape(-1, length)[: steps.shape[0]])

    def _stored(self, quant_spec: QuantSpec, zeros: Tensor) -> Tensor:
        """Zero points of whole runs of rows, uint8 [bytes]; those of rows that are not there are code 0."""
        from torch.nn.functional import pad

        height = quant_spec.format.rows_of_zeros
        padded = pad(zeros, (0, 0, 0, -zeros.shape[0] % height), value=self.least)
        by_element = padded.view(-1, height, zeros.shape[1]).transpose(1, 2)
        return self.in_torch.nearest(by_element.reshape(len(by_element), -1)).view(-1)


def _block_range(values: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block of one row, and 0: float32 [rows, blocks] each."""
    blocks = values.reshape(*grid, -1)
    return blocks.amin(2).clamp_(max=0), blocks.amax(2).clamp_(min=0)
