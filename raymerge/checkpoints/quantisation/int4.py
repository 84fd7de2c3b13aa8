"""INT4: integers from -8 to 7 with a scale for each group or row, as compressed-tensors packs them.

``pack-quantized``: eight codes to an I32, and a tensor of the shape, needed where only it gives the number
of columns. Where 0 has not the same code in all groups (``symmetric: false``), its codes are packed down the
rows: eight rows to an I32, one for each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Blockwise,
    Codec,
    InLoops,
    InTorch,
    nibble_elements,
    pack_nibbles,
    quotients,
    storable_scales,
)
from raymerge.checkpoints.quantisation.config import GroupWeights, Scheme
from raymerge.checkpoints.quantisation.encoding import ANY, FLOATS, WHOLE, Format, QuantSpec, Reference
from raymerge.checkpoints.quantisation.zero_points import ZeroPointCodec
from raymerge.dtypes import DType
from raymerge.storage.store import ReadStore, num_readers, read_together

if TYPE_CHECKING:
    from torch import Tensor

INT4 = Format(
    "int4",
    (1, ANY),
    usual_block=(1, 32),
    code_dtype=DType.I32,
    scale_dtypes=FLOATS,
    usual_scale=DType.BF16,
    # From -8 to 7 around a scale of the largest over 7.5.
    reference=Reference(tuple(code - 8.0 for code in range(16)), top=7.5, reach=7.5 / 7 * (1 + 2.0**-7)),
    parts={"codes": "_packed", "scales": "_scale", "shape": "_shape"},
)
INT4_ASYMMETRIC = replace(
    INT4,
    name="int4_asymmetric",
    title="INT4 with zero points",
    reference=Reference(tuple(map(float, range(16))), top=15.0),
    parts={**INT4.parts, "zero_points": "_zero_point"},
    zero_points=DType.I32,
)
INT4_CHANNEL = replace(INT4, name="int4_channel", block=(1, WHOLE), usual_block=(1, WHOLE))
INT4_CHANNEL_ASYMMETRIC = replace(
    INT4_ASYMMETRIC,
    name="int4_channel_asymmetric",
    title="int4_channel with zero points",
    block=(1, WHOLE),
    usual_block=(1, WHOLE),
)
SHAPE_ENDING = ".weight_shape"


def group_scheme(weights: GroupWeights) -> Scheme | None:
    if weights.kind != ("int", 4):
        return None
    if weights.strategy == "group" and weights.group:
        return Scheme(INT4 if weights.is_symmetric else INT4_ASYMMETRIC, (1, weights.group))
    form = INT4_CHANNEL if weights.is_symmetric else INT4_CHANNEL_ASYMMETRIC
    return Scheme(form, None) if weights.strategy == "channel" else None


_MOST_CHECKS = 64
"""Requests for shapes that are implied anyway and only checked."""


def read_shapes(store: ReadStore, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, int]]:
    """The stored shapes of packed integers, except those of 0.

    Reads all that determine the number of columns, and few of the others: I32 shapes lie between matrices,
    and a large model has tens of thousands."""
    needed, others = list[StoredTensor](), list[StoredTensor]()
    for name, tensor in tensors.items():
        if name.endswith(SHAPE_ENDING) and tensor.dtype in (DType.I32, DType.I64) and tensor.shape == (2,):
            (needed if _is_open(tensors, name.removesuffix(SHAPE_ENDING)) else others).append(tensor)
    readers = num_readers(store)
    stored = chain(
        read_together(store, needed, readers=readers),
        read_together(store, others, readers=readers, most=_MOST_CHECKS),
    )
    shapes = ((tensor.name, np.frombuffer(data, tensor.dtype.numpy_name).tolist()) for tensor, data in stored)
    return {name: (rows, columns) for name, (rows, columns) in shapes if rows or columns}


def _is_open(tensors: Mapping[str, StoredTensor], module: str) -> bool:
    """Whether codes and scales leave the number of columns open.

    They do not where a smaller group size would leave a whole integer of each row unused."""
    codes, scales = tensors.get(f"{module}.weight_packed"), tensors.get(f"{module}.weight_scale")
    if codes is None or scales is None or not codes.shape or not scales.shape or not scales.shape[-1]:
        return False
    per_element, groups = codes.dtype.bits // 4, scales.shape[-1]
    return groups < per_element or codes.shape[-1] * per_element % groups != 0


# Arithmetic

# The code for 0: codes are unsigned, as compressed-tensors packs them.
_OFFSET = 8
_HALF_RANGE = 7.5
_NEAR = 2.0**-7 * (1 + 2.0**-8)
"""Tolerated relative distance from a multiple: it and the largest are each rounded to bfloat16, by one part
in 257 at most, and quotients to float32."""


def _elements(codes: Tensor) -> Tensor:
    return nibble_elements(codes, tuple(float(code - _OFFSET) for code in range(16)))


def _nearest(quotients: Tensor) -> Tensor:
    """Saturates at -8 and 7. Non-finite values and -0 have no code."""
    import torch

    return pack_nibbles(quotients.round_().clamp_(-_OFFSET, _OFFSET - 1).add_(_OFFSET).to(torch.uint8))


def _nearest_above_zero(numbers: Tensor) -> Tensor:
    import torch

    return pack_nibbles(numbers.round_().clamp_(0, 15).to(torch.uint8))


class Int4(Codec):
    """INT4, symmetric.

    The scale is compressed-tensors' own: the largest magnitude over half of the range from -8 to 7, rounded
    to its stored dtype before codes are made. Numbers that were codes, rounded to bfloat16 at most, get their
    former scale and so return to their codes. -0 becomes 0."""

    in_torch: ClassVar[Blockwise] = InTorch(_elements, _nearest)
    in_loops: ClassVar[Blockwise | None] = InLoops("INT4")

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        import torch

        dtype, former = quant_spec.scale_dtype, grid_steps(blocks.values, blocks.largest)
        usual = storable_scales(dtype, quotients(blocks.largest, _HALF_RANGE))
        return torch.where(former > 0, storable_scales(dtype, former), usual)


class Int4Asymmetric(ZeroPointCodec):
    """INT4 with zero points. -0 becomes 0."""

    in_torch: ClassVar[InTorch] = InTorch(
        lambda codes: nibble_elements(codes, INT4_ASYMMETRIC.reference.elements), _nearest_above_zero
    )
    least: ClassVar[int] = 0
    greatest: ClassVar[int] = 15


def grid_steps(values: Tensor, largest: Tensor) -> Tensor:
    """The former scale of numbers that were codes of INT4; 0 for blocks not near multiples of one, -8 to 7.

    Codes times a scale, rounded to bfloat16, are near multiples of it, and quantisers make the largest code
    7 or -8. So the largest magnitude gives it but for rounding; magnitudes of 1, 2 or 4 times
    the scale give it exactly, since those products are not rounded. ``values`` float32 [rows, columns],
    ``largest`` float32 [rows, blocks]."""
    return (grid_steps_in_loops if values.is_cpu else grid_steps_in_torch)(values, largest)


def grid_steps_in_torch(values: Tensor, largest: Tensor) -> Tensor:
    import torch

    blocks, most = values.reshape(*largest.shape, -1), largest.unsqueeze(2)
    numbers, is_near = _multiples(blocks, quotients(most, 7.0))
    # Products with powers of two are not rounded. Those with others count nothing.
    numbers.masked_fill_((numbers != 1) & (numbers != 2) & (numbers != 4), torch.inf)
    exact = (blocks / numbers).abs_().amax(dim=2)
    del numbers
    steps = torch.where(is_near, torch.where(exact > 0, exact, quotients(largest, 7.0)), 0.0)
    return torch.where(_multiples(blocks, most / 8)[1], largest / 8, steps)


def grid_steps_in_loops(values: Tensor, largest: Tensor) -> Tensor:
    import torch

    from raymerge.kernels.block_scales import int4_grids

    steps, width = torch.zeros(largest.shape), values.shape[1] // largest.shape[1]
    arrays = values.contiguous().numpy(), largest.contiguous().numpy()
    int4_grids(*arrays, width, np.float32(_NEAR), steps.numpy())
    return steps


def _multiples(blocks: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitude of each number's nearest multiple, and whether all of a block are near."""
    quotients = blocks / steps
    numbers = quotients.round().clamp_(-8, 7)
    beyond = quotients.sub_(numbers).abs_()
    # Exact: a product of few bits.
    beyond.sub_(numbers.abs_(), alpha=_NEAR)
    # False too where 0 is divided by 0.
    return numbers, (beyond <= 0).all(dim=2)
