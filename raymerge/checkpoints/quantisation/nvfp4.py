"""NVFP4: e2m1 codes, of which 16 share a float8 e4m3 scale, and all another one.

================== =================== ============================================= =====================
``NVFP4``          ``X.weight_packed`` ``X.weight_global_scale`` [1], by which steps compressed-tensors:
                                       are divided: 448 * 6 / largest                ``nvfp4-pack-quantized``
``NVFP4_MODELOPT`` ``X.weight``        ``X.weight_scale_2`` [], a factor of steps:   ModelOpt
                                       largest / (448 * 6)
``NVFP4_STACK``    ``Y``               ``Y_weight_scale_2`` [], the same of all      ModelOpt's experts of
                                       experts                                       Llama 4 and gpt-oss
================== =================== ============================================= =====================

Blocks lie along the numbers that are summed over: columns, but in ``Y`` [experts, in, out] rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Blockwise,
    Codec,
    InTorch,
    Steps,
    StoredScales,
    power_of_two_above,
    quotients,
    storable_scales,
)
from raymerge.checkpoints.quantisation.config import GroupWeights, Scheme
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, Reference
from raymerge.checkpoints.quantisation.mxfp4 import E2M1_IN_LOOPS, E2M1_IN_TORCH, E2M1_NUMBERS, LARGEST_E2M1
from raymerge.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

NVFP4 = Format(
    "nvfp4",
    (1, 16),
    code_dtype=DType.U8,
    scale_dtypes=frozenset({DType.F8_E4M3}),
    usual_scale=DType.F8_E4M3,
    # Scales have 4 bits.
    reference=Reference(E2M1_NUMBERS, top=6.0, reach=1 + 2.0**-3),
    parts={"codes": "_packed", "scales": "_scale", "tensor_scale": "_global_scale"},
    tensor_scale="divisor",
    # A factor of 1 is for numbers up to 2688, which no weights reach that were trained.
    other_spelling="factors, as ModelOpt stores them",
)
NVFP4_MODELOPT = replace(
    NVFP4,
    name="nvfp4_modelopt",
    title="ModelOpt nvfp4",
    layout_of="nvfp4",
    parts={"codes": "", "scales": "_scale", "tensor_scale": "_scale_2"},
    tensor_scale="factor",
    other_spelling="divisors, as compressed-tensors stores them",
)
NVFP4_STACK = replace(
    NVFP4_MODELOPT,
    name="nvfp4_stack",
    title="ModelOpt nvfp4 in stacks of experts",
    block=(16, 1),
    parts={"codes": "", "scales": "_weight_scale", "tensor_scale": "_weight_scale_2"},
    packs_rows=True,
    scales_stack=True,
)


def group_scheme(weights: GroupWeights) -> Scheme | None:
    return Scheme(NVFP4, None) if weights.kind == ("float", 4) and weights.group == 16 else None


_LARGEST_SCALE = 448.0
# The least magnitude whose tensor scale is no more than a float32 can hold.
_LEAST = 2.0**-116
# Up to here the largest element is the nearest, halfway to where the next one would be.
_LARGEST_REACHED = 7.0
# Exponent of how much smaller the largest magnitude may be than what a tensor's scale allows: half of the 15
# that scales of blocks have are left for blocks of smaller numbers.
_LEAST_ABOVE = -8
# Of what was not in this format before: for magnitudes up to 4, more than the weights of models have.
_USUAL = _LARGEST_SCALE * LARGEST_E2M1 / 4


class Nvfp4(Codec):
    """NVFP4 in both spellings.

    A step is the block's scale over, or times, the tensor's, rounded to float32; any tensor scale serves
    under which no block's overflows or underflows. Servers fuse q, k and v, and gate and up, with one scale,
    so such matrices get the same: the former one, the usual one, or a power of 16 times it if the largest
    needs it.
    """

    in_torch: ClassVar[Blockwise] = E2M1_IN_TORCH
    in_loops: ClassVar[Blockwise | None] = E2M1_IN_LOOPS

    def _for_tensor(self, quant_spec: QuantSpec, largest: Tensor, had: Tensor | None) -> Tensor:
        import torch

        reach, most = _LARGEST_SCALE * LARGEST_E2M1, largest.clamp(min=_LEAST)
        is_factor = _is_factor(quant_spec)
        scale = quotients(most, reach) if is_factor else reach / most
        usual = torch.full_like(largest, 1 / _USUAL if is_factor else _USUAL)
        fresh = self._near(quant_spec, usual, largest, scale)
        return fresh if had is None else self._near(quant_spec, had, largest, fresh)

    def _near(self, quant_spec: QuantSpec, had: Tensor, largest: Tensor, fresh: Tensor) -> Tensor:
        """The previous scale of the whole tensor or one near it; ``fresh`` where neither serves."""
        import torch

        is_factor = _is_factor(quant_spec)
        share = _share(largest, had, is_factor=is_factor)
        # The exponent of the next power of two, from its bits.
        above = (power_of_two_above(share).view(torch.int32) >> 23) - 127
        steps = torch.where(
            above > 0, (above + 3) // 4, torch.where(above <= _LEAST_ABOVE, (above + 7) // 4, 0)
        )
        # By its bits too: a power is rounded differently on each device.
        exponents = 4 * steps if is_factor else -4 * steps
        factor = ((127 + exponents).clamp(1, 254) << 23).view(torch.float32)
        near = torch.where(largest == 0, had, had * factor)
        serves = near.isfinite() & (near > 0) & (_share(largest, near, is_factor=is_factor) <= 1)
        return torch.where(serves, near, fresh)

    def _steps(self, quant_spec: QuantSpec, stored: StoredScales) -> Steps:
        import torch

        tensor_scale = stored.tensor_scale
        assert tensor_scale is not None
        # Divided by infinity or times 0 all would be 0, and nobody would see that the file is damaged.
        is_usable = tensor_scale.isfinite() & (tensor_scale != 0)
        scale = torch.where(is_usable, tensor_scale, torch.nan)
        blocks = super()._steps(quant_spec, stored).steps
        return Steps(blocks * scale if _is_factor(quant_spec) else blocks / scale)

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        whole, steps = blocks.tensor_scale, quotients(blocks.largest, LARGEST_E2M1)
        assert whole is not None
        scales = steps / whole if _is_factor(quant_spec) else steps * whole
        return storable_scales(quant_spec.scale_dtype, scales)


class Nvfp4Stack(Nvfp4):
    """NVFP4 of which two rows share a byte."""

    in_torch: ClassVar[Blockwise] = InTorch(
        lambda codes: _apart(E2M1_IN_TORCH.elements(codes.reshape(len(codes) // 2, -1))),
        lambda quotients: E2M1_IN_TORCH.nearest(_side_by_side(quotients)).view(len(quotients), -1),
    )
    in_loops: ClassVar[Blockwise | None] = None


def _side_by_side(rows: Tensor) -> Tensor:
    """Pairs of rows as one each, in which they take turns: [rows / 2, 2 * columns]."""
    return rows.view(len(rows) // 2, 2, -1).transpose(1, 2).reshape(len(rows) // 2, -1)


def _apart(pairs: Tensor) -> Tensor:
    return pairs.view(len(pairs), -1, 2).transpose(1, 2).reshape(2 * len(pairs), -1)


def _is_factor(quant_spec: QuantSpec) -> bool:
    return quant_spec.format.tensor_scale == "factor"


def _share(largest: Tensor, scale: Tensor, *, is_factor: bool) -> Tensor:
    """The fraction of the tensor scale's range that the largest magnitude takes."""
    scaled = largest / scale if is_factor else largest * scale
    return quotients(scaled, _LARGEST_SCALE * _LARGEST_REACHED)
