"""MXFP4: e2m1 codes, of which 32 share a power of two (OCP Microscaling v1.0), as in gpt-oss's experts."""

from __future__ import annotations

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.codec import Codec, load_scales
from raymerge.checkpoints.codecs.nibbles import E2M1_IN_LOOPS, E2M1_IN_TORCH
from raymerge.checkpoints.quantisation.encoding import Packing

# 2 ** 125: six times that is still a float32, and six times the next no more.
_LARGEST_EXPONENT = 252


class Mxfp4(Codec):
    """MXFP4.

    The exponent is that of the largest magnitude, rounded to an element's precision, less that of the largest
    element: what is nearer to 8 than to 6 makes the next one. The specification's own choice, which never
    rounds up, is further from the values: by 3 % in root mean square for normal numbers, by 46 % for evenly
    distributed ones; one that never saturates, by 3 % and 0 %.
    """

    in_torch = E2M1_IN_TORCH
    in_loops = E2M1_IN_LOOPS

    def _fresh(self, packing: Packing, largest: Tensor, _: Tensor | None) -> Tensor:
        # Half of the last bit that an element has of its mantissa carries into the exponent from 1.75 on.
        exponents = ((largest.view(torch.int32) + (1 << 21)) >> 23) - 2
        stored = exponents.clamp(0, _LARGEST_EXPONENT).to(torch.uint8)
        scales = load_scales(packing.scale_dtype, stored.view(-1)).view(largest.shape)
        return torch.where(largest == 0, 1.0, scales)
