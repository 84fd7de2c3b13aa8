"""Integers of which each block has its own for 0: numbers need not lie evenly around it.

A number is its code, less the block's zero point, times the block's scale."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar

from raymerge.checkpoints.quantisation.block_codec import (
    Codec,
    InTorch,
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

    def _scales(
        self,
        quant_spec: QuantSpec,
        values: Tensor,
        given_scales: Tensor | None,
        given_zeros: Tensor | None,
        tensor_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        largest = self._finite_largest(quant_spec, values)
        scales = self._fresh(quant_spec, values, largest, tensor_scale)
        zeros = self.least - _reach(values, scales.shape)[0] / scales
        zeros = zeros.round_().clamp_(self.least, self.greatest)
        if given_scales is not None:
            had = self._factors(quant_spec, given_scales, given_zeros, tensor_scale)
            fits = self.fits(quant_spec, values, given_scales, given_zeros, tensor_scale=tensor_scale)
            scales, zeros = torch.where(fits, had[0], scales), torch.where(fits, had[1], zeros)
        return store_scales(quant_spec.scale_dtype, scales), self._stored(quant_spec, zeros)

    def _fresh(self, quant_spec: QuantSpec, values: Tensor, largest: Tensor, _: Tensor | None) -> Tensor:
        num_steps = self.greatest - self.least
        low, high = _reach(values, largest.shape)
        # Each by itself, as a difference may be beyond float32.
        return storable_scales_above(
            quant_spec.scale_dtype, quotients(high, num_steps) - quotients(low, num_steps)
        )

    def _factors(
        self, quant_spec: QuantSpec, scales: Tensor, zero_points: Tensor | None, tensor_scale: Tensor | None
    ) -> Tensor:
        import torch

        assert zero_points is not None
        steps = self._steps(quant_spec, scales, tensor_scale)
        height, length = quant_spec.format.rows_of_zeros, quant_spec.scale_row_length
        together = zero_points.view(-(-steps.shape[0] // height), -1)
        apart = self.in_torch.elements(together).view(-1, length, height).transpose(1, 2)
        return torch.stack([steps, apart.reshape(-1, length)[: steps.shape[0]]])

    def _stored(self, quant_spec: QuantSpec, zeros: Tensor) -> Tensor:
        """Zero points of whole runs of rows, uint8 [bytes]; those of rows that are not there are code 0."""
        from torch.nn.functional import pad

        height = quant_spec.format.rows_of_zeros
        padded = pad(zeros, (0, 0, 0, -zeros.shape[0] % height), value=self.least)
        together = padded.view(-1, height, zeros.shape[1]).transpose(1, 2)
        return self.in_torch.nearest(together.reshape(len(together), -1)).view(-1)


def _reach(values: Tensor, grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block of one row, and 0: float32 [rows, blocks] each."""
    blocks = values.reshape(*grid, -1)
    return blocks.amin(2).clamp_(max=0), blocks.amax(2).clamp_(min=0)
