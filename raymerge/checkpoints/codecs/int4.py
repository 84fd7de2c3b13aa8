"""INT4: whole numbers from -8 to 7 with a scale for each group, as compressed-tensors packs them.

Finds the scale that numbers had when they were codes of INT4, from the numbers alone.

Codes times a scale, rounded to bfloat16, are near multiples of it, and the scale that quantisers choose makes
the largest of them 7 or -8. So the largest magnitude tells it, but for the rounding; and those that are 1, 2
or 4 times the scale tell it exactly, since such products are not rounded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raymerge.checkpoints.codecs.codec import Codec, quotients, storable_scales
from raymerge.checkpoints.codecs.nibbles import INT4_IN_LOOPS, INT4_IN_TORCH
from raymerge.checkpoints.quantisation.encoding import Packing

_NEAR = 2.0**-7 * (1 + 2.0**-8)
"""How far a number may lie from the multiple, as a part of that: it and the largest are each rounded to
bfloat16, by one part in 257 at most, and quotients to float32."""


def grid_steps(values: Tensor, largest: Tensor) -> Tensor:
    """The scale of every block whose numbers are near multiples of one, from -8 to 7; 0 for all other blocks.

    Args:
        values: float32 [rows, columns].
        largest: the largest magnitude of every block, float32 [rows, blocks].
    """
    form = grid_steps_in_loops if values.device.type == "cpu" else grid_steps_in_torch
    return form(values, largest)


def grid_steps_in_torch(values: Tensor, largest: Tensor) -> Tensor:
    """The same on any device."""
    blocks, most = values.reshape(*largest.shape, -1), largest.unsqueeze(2)
    numbers, is_near = _multiples(blocks, quotients(most, 7.0))
    # Products with powers of two are not rounded. Those with others count nothing.
    numbers.masked_fill_((numbers != 1) & (numbers != 2) & (numbers != 4), torch.inf)
    told = (blocks / numbers).abs_().amax(dim=2)
    del numbers
    found = torch.where(is_near, torch.where(told > 0, told, quotients(largest, 7.0)), 0.0)
    return torch.where(_multiples(blocks, most / 8)[1], largest / 8, found)


def grid_steps_in_loops(values: Tensor, largest: Tensor) -> Tensor:
    """The same on the CPU."""
    from raymerge.kernels.blockwise import int4_grids

    found, width = torch.zeros(largest.shape), values.shape[1] // largest.shape[1]
    arrays = values.contiguous().numpy(), largest.contiguous().numpy()
    int4_grids(*arrays, width, np.float32(_NEAR), found.numpy())
    return found


def _multiples(blocks: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitude of the multiple that each number is nearest to, and whether all of a block are near."""
    quotients = blocks / steps
    numbers = quotients.round().clamp_(-8, 7)
    beyond = quotients.sub_(numbers).abs_()
    # Exact: a product of few bits.
    beyond.sub_(numbers.abs_(), alpha=_NEAR)
    # False too where 0 is divided by 0.
    return numbers, (beyond <= 0).all(dim=2)


_HALF_RANGE = 7.5


class Int4(Codec):
    """INT4, symmetric.

    The scale is compressed-tensors' own: the largest magnitude over half of the range from -8 to 7, rounded
    to the dtype it is stored in before codes are made. But numbers that were codes before, and rounded to
    bfloat16 at most, have the scale that they had then: so they return to their codes.
    There is no negative 0: it becomes 0.
    """

    in_torch = INT4_IN_TORCH
    in_loops = INT4_IN_LOOPS

    def _fresh(self, packing: Packing, largest: Tensor, _: Tensor | None) -> Tensor:
        return storable_scales(packing.scale_dtype, quotients(largest, _HALF_RANGE))

    def _fresh_of(
        self, packing: Packing, values: Tensor, largest: Tensor, tensor_scale: Tensor | None
    ) -> Tensor:
        found = grid_steps(values, largest)
        usual = self._fresh(packing, largest, tensor_scale)
        return torch.where(found > 0, storable_scales(packing.scale_dtype, found), usual)
