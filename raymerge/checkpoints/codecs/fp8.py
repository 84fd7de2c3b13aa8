"""FP8: float8 e4m3 without infinities (arXiv 2209.05433), one code to a byte, and scales of any block.

A code times its scale is the number; the name ``weight_scale_inv`` of published scales is historical.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.blockwise import Blockwise, InLoops, InTorch
from raymerge.checkpoints.codecs.codec import Codec, power_of_two_above, quotients, storable_scales
from raymerge.checkpoints.quantisation.encoding import Packing

if TYPE_CHECKING:
    from raymerge.kernels.blockwise import Loops

_LARGEST = 448.0


def _elements(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _nearest(quotients: Tensor) -> Tensor:
    # Beyond the largest, torch would make NaN; what is not finite must not pass for the largest.
    lost = ~quotients.isfinite()
    codes = quotients.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(lost, 0x7F, codes)


def _loops() -> Loops:
    from raymerge.kernels.blockwise import E4M3

    return E4M3


class Fp8(Codec):
    """FP8 in blocks, by channel or with one scale for the tensor.

    The scale is what makes the largest magnitude of a block the largest element, rounded up to a power of two
    where scales are such. 0 keeps its sign.
    """

    in_torch: ClassVar[Blockwise] = InTorch(_elements, _nearest)
    in_loops: ClassVar[Blockwise] = InLoops(_loops)

    def _fresh(self, packing: Packing, largest: Tensor, _: Tensor | None) -> Tensor:
        scales = quotients(largest, _LARGEST)
        wanted = power_of_two_above(scales) if packing.power_of_two else scales
        return storable_scales(packing.scale_dtype, wanted)
