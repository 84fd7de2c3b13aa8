"""INT4: whole numbers from -8 to 7 with a scale for each group, as compressed-tensors packs them."""

from __future__ import annotations

from torch import Tensor

from raymerge.checkpoints.codecs.codec import Codec
from raymerge.checkpoints.codecs.nibbles import INT4_IN_LOOPS, INT4_IN_TORCH
from raymerge.checkpoints.codecs.scales import storable_scales
from raymerge.checkpoints.packing import Packing

_HALF_RANGE = 7.5


class Int4(Codec):
    """INT4, symmetric.

    The scale is compressed-tensors' own: the largest magnitude over half of the range from -8 to 7, rounded
    to the dtype it is stored in before codes are made. There is no negative 0: it becomes 0.
    """

    in_torch = INT4_IN_TORCH
    in_loops = INT4_IN_LOOPS

    def _fresh(self, packing: Packing, largest: Tensor, _: Tensor | None) -> Tensor:
        return storable_scales(packing.scale_dtype, largest / _HALF_RANGE)
