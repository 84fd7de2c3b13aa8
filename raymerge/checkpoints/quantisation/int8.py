"""INT8: integers from -128 to 127, one to a byte, with a scale for each row.

compressed-tensors' ``int-quantized``: ``X.weight`` I8 with ``X.weight_scale`` [rows, 1], and
``X.weight_zero_point`` I8 [rows, 1] where 0 has not the same code in all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Codec,
    InTorch,
    quotients,
    storable_scales_above,
)
from raymerge.checkpoints.quantisation.config import GroupWeights, Scheme
from raymerge.checkpoints.quantisation.encoding import FLOATS, WHOLE, Format, QuantSpec, Reference
from raymerge.checkpoints.quantisation.zero_points import ZeroPointCodec
from raymerge.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

_LEAST, _GREATEST = -128, 127
_HALF_RANGE = 127.5


def _signed(code: int) -> float:
    return float(code - 256 if code > _GREATEST else code)


INT8_CHANNEL = Format(
    "int8_channel",
    (1, WHOLE),
    code_dtype=DType.I8,
    code_bits=8,
    scale_dtypes=FLOATS,
    usual_scale=DType.BF16,
    # From -128 to 127 around a scale of the largest over 127.5, or the next that can be stored.
    reference=Reference(
        tuple(map(_signed, range(256))), top=_HALF_RANGE, reach=_HALF_RANGE / _GREATEST * (1 + 2.0**-7)
    ),
    parts={"codes": "", "scales": "_scale"},
)
INT8_ASYMMETRIC = replace(
    INT8_CHANNEL,
    name="int8_asymmetric",
    title="int8_channel with zero points",
    reference=Reference(INT8_CHANNEL.reference.elements, top=255.0),
    parts={**INT8_CHANNEL.parts, "zero_points": "_zero_point"},
    zero_points=DType.I8,
)


def group_scheme(weights: GroupWeights) -> Scheme | None:
    if weights.kind != ("int", 8) or weights.strategy != "channel":
        return None
    return Scheme(INT8_CHANNEL if weights.is_symmetric else INT8_ASYMMETRIC, None)


def _elements(codes: Tensor) -> Tensor:
    import torch

    return codes.view(torch.int8).float()


def _nearest(quotients: Tensor) -> Tensor:
    """Saturates. Non-finite values and -0 have no code."""
    import torch

    return quotients.round_().clamp_(_LEAST, _GREATEST).to(torch.int8).view(torch.uint8)


class Int8(Codec):
    """INT8, symmetric: the scale is the largest magnitude over half of the range, as in compressed-tensors.
    -0 becomes 0."""

    in_torch: ClassVar[InTorch] = InTorch(_elements, _nearest)

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        return storable_scales_above(quant_spec.scale_dtype, quotients(blocks.largest, _HALF_RANGE))


class Int8Asymmetric(ZeroPointCodec):
    """INT8 with zero points. -0 becomes 0."""

    in_torch: ClassVar[InTorch] = InTorch(_elements, _nearest)
    least: ClassVar[int] = _LEAST
    greatest: ClassVar[int] = _GREATEST
