"""INT4: whole numbers from -8 to 7 with a scale for each group, as compressed-tensors packs them."""

from __future__ import annotations

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.codec import Codec
from raymerge.checkpoints.codecs.grids import grid_steps
from raymerge.checkpoints.codecs.nibbles import INT4_IN_LOOPS, INT4_IN_TORCH
from raymerge.checkpoints.codecs.scales import quotients, storable_scales
from raymerge.checkpoints.quantisation.encoding import Packing

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
