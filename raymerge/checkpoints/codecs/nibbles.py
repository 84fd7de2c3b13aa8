"""Codes of 4 bits, two to a byte, the first in the lower half.

Words of several bytes are little-endian, so an int32 of eight codes is the same four bytes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raymerge.checkpoints.codecs.blockwise import Blockwise, InLoops, InTorch

if TYPE_CHECKING:
    from raymerge.kernels.blockwise import Loops

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Elements of the codes 0 to 7; 8 to 15 are their negatives (OCP Microscaling v1.0, 5.3.3)."""
LARGEST_E2M1 = E2M1[-1]
"""The largest of them."""
# INT4's code for 0: codes are unsigned, as compressed-tensors packs them.
_OFFSET = 8


def _e2m1_elements(codes: Tensor) -> Tensor:
    return _lookup(codes, (*E2M1, *(-element for element in E2M1)))


def _e2m1_nearest(quotients: Tensor) -> Tensor:
    magnitudes = quotients.abs().clamp_(max=LARGEST_E2M1)
    # The distance between neighbours is a half, one or two, and codes count them.
    halves, ones, twos = (magnitudes * 2).round_(), magnitudes.round() + 2, (magnitudes / 2).round_() + 4
    codes = torch.where(magnitudes < 2, halves, torch.where(magnitudes < 4, ones, twos))
    return _packed(codes.to(torch.uint8) | (quotients.signbit().to(torch.uint8) << 3))


def _e2m1_loops() -> Loops:
    from raymerge.kernels.blockwise import E2M1

    return E2M1


def _int4_elements(codes: Tensor) -> Tensor:
    return _lookup(codes, tuple(float(code - _OFFSET) for code in range(16)))


def _int4_nearest(quotients: Tensor) -> Tensor:
    return _packed(quotients.round_().clamp_(-_OFFSET, _OFFSET - 1).add_(_OFFSET).to(torch.uint8))


def _int4_loops() -> Loops:
    from raymerge.kernels.blockwise import INT4

    return INT4


def _packed(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _lookup(codes: Tensor, elements: tuple[float, ...]) -> Tensor:
    table = _pairs(elements, codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape[0], -1)


@cache
def _pairs(elements: tuple[float, ...], device: torch.device) -> Tensor:
    """The two elements of every byte, [256, 2]."""
    table = torch.tensor(elements)
    byte = torch.arange(256)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=1).to(device)


E2M1_IN_TORCH: Blockwise = InTorch(_e2m1_elements, _e2m1_nearest)
"""float4 e2m1, saturating at 6. What is not finite has no code."""
E2M1_IN_LOOPS: Blockwise = InLoops(_e2m1_loops)
"""The same."""
INT4_IN_TORCH: Blockwise = InTorch(_int4_elements, _int4_nearest)
"""Whole numbers, saturating at -8 and 7. What is not finite has no code, nor has -0."""
INT4_IN_LOOPS: Blockwise = InLoops(_int4_loops)
"""The same."""
