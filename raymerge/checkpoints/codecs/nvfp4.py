"""NVFP4: e2m1 codes, of which 16 share a float8 e4m3 scale, and all a divisor, ``weight_global_scale``."""

from __future__ import annotations

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.codec import Codec
from raymerge.checkpoints.codecs.nibbles import E2M1_IN_LOOPS, E2M1_IN_TORCH, LARGEST_E2M1
from raymerge.checkpoints.codecs.scales import storable_scales
from raymerge.checkpoints.packing import Packing

_LARGEST_SCALE = 448.0
# The least magnitude whose tensor scale is no more than a float32 can hold.
_LEAST = 2.0**-116


class Nvfp4(Codec):
    """NVFP4, as compressed-tensors has it.

    The tensor's scale is what makes the scale of the block with the largest magnitude the largest that can be
    stored. A step is the block's scale over the tensor's, rounded to float32.
    """

    in_torch = E2M1_IN_TORCH
    in_loops = E2M1_IN_LOOPS

    def _fresh_for_tensor(self, _: Packing, largest: Tensor) -> Tensor:
        scale = _LARGEST_SCALE * LARGEST_E2M1 / largest.clamp(min=_LEAST)
        return torch.where(largest == 0, 1.0, scale)

    def _steps(self, packing: Packing, scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
        assert tensor_scale is not None
        return super()._steps(packing, scales, None) / tensor_scale

    def _fresh(self, packing: Packing, largest: Tensor, tensor_scale: Tensor | None) -> Tensor:
        assert tensor_scale is not None
        return storable_scales(packing.scale_dtype, largest / LARGEST_E2M1 * tensor_scale)
