"""MXFP4: e2m1 codes, of which 32 share a power of two (OCP Microscaling v1.0).

The same codes are published in three layouts, under one name in recipes:

================ ========================================== ======================================
``MXFP4``        ``Y_blocks`` U8 [..., rows, blocks, 16]    ``Y_scales`` U8: gpt-oss's experts
``MXFP4_ROWS``   ``X.weight_packed`` U8 [rows, columns/2]   ``X.weight_scale`` U8: Kimi-K3, by
                                                            compressed-tensors
``MXFP4_BYTES``  ``X.weight`` I8 [rows, columns/2]          ``X.scale`` F8_E8M0: DeepSeek-V4's experts
================ ========================================== ======================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.block_codec import (
    BlockValues,
    Blockwise,
    Codec,
    InLoops,
    InTorch,
    load_scales,
    nibble_elements,
    pack_nibbles,
)
from raymerge.checkpoints.quantisation.config import (
    Declared,
    GroupWeights,
    Scheme,
    names_in,
    plain_modules,
    unknown_fields,
)
from raymerge.checkpoints.quantisation.detect import QuantMethod, Search
from raymerge.checkpoints.quantisation.encoding import EXPONENTS, Format, QuantSpec, Reference
from raymerge.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor


def _e2m1(code: int) -> float:
    """1 sign, 2 exponent and 1 mantissa bit (OCP Microscaling v1.0, 5.3.3)."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return size if code < 8 else -size


E2M1_NUMBERS = tuple(map(_e2m1, range(16)))
"""By code, for audits."""
MXFP4 = Format(
    "mxfp4",
    (1, 32),
    code_dtype=DType.U8,
    scale_dtypes=EXPONENTS,
    usual_scale=DType.U8,
    # A scale is a power of two, which what is nearer to 6 than to 8 may exceed. From 3.5 on, which rounds to
    # 4, up to 7 is the largest of a block.
    reference=Reference(E2M1_NUMBERS, reach=7 / 6, least_peak=4.0),
    parts={"codes": "_blocks", "scales": "_scales"},
    has_block_axis=True,
    for_experts_only=True,
)
MXFP4_ROWS = replace(
    MXFP4,
    name="mxfp4_rows",
    layout_of="mxfp4",
    parts={"codes": "_packed", "scales": "_scale"},
    has_block_axis=False,
    for_experts_only=False,
)
MXFP4_BYTES = replace(
    MXFP4,
    name="mxfp4_bytes",
    layout_of="mxfp4",
    code_dtype=DType.I8,
    usual_scale=DType.F8_E8M0,
    parts={"codes": "", "scales": ".scale"},
    has_block_axis=False,
    expert_dtype="fp4",
)

_KEYS = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})


def _read_table(table: Mapping[str, Any]) -> Declared:
    plain, wrong = plain_modules(names_in(table, "modules_to_not_convert"))
    return Declared(
        "mxfp4",
        (Scheme(MXFP4, None),),
        plain=plain,
        contradictions=wrong,
        not_understood=tuple(unknown_fields(table, _KEYS)),
    )


def _fresh_table(
    quant_specs: Mapping[str, QuantSpec], cache: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if cache is not None or any(each.format != MXFP4 for each in quant_specs.values()):
        return None
    return {"modules_to_not_convert": [], "quant_method": "mxfp4"}


def group_scheme(weights: GroupWeights) -> Scheme | None:
    return Scheme(MXFP4_ROWS, None) if weights.kind == ("float", 4) and weights.group == 32 else None


def _are_codes(tensor: StoredTensor, _: Mapping[str, StoredTensor]) -> bool:
    return tensor.dtype is DType.U8 and tensor.name.endswith("_blocks") and tensor.shape[-1:] == (16,)


def _add(search: Search, codes: StoredTensor) -> None:
    name = codes.name.removesuffix("_blocks")
    scales = search.partner(codes, [f"{name}_scales"])
    if scales is None:
        return
    if scales.shape != codes.shape[:-1]:
        search.report_misfit(codes, scales)
        return
    shape = (*codes.shape[:-2], codes.shape[-2] * 32)
    search.add(name, codes, scales, (), (MXFP4, (1, 32), shape))


def _are_bytes(tensor: StoredTensor, _: Mapping[str, StoredTensor]) -> bool:
    return tensor.dtype is DType.I8 and tensor.name.endswith(".weight")


def _add_bytes(search: Search, codes: StoredTensor) -> None:
    """Add DeepSeek-V4's codes; other bytes without such scales are of a format that is not read."""
    module = codes.name.removesuffix(".weight")
    name = f"{module}.scale"
    is_declared = any(each.format == MXFP4_BYTES and each.is_stated for each in search.declared.schemes)
    scales = search.partner(codes, [name]) if is_declared or name in search.stored else None
    if scales is None:
        return
    if len(codes.shape) < 2 or scales.shape != (*codes.shape[:-1], codes.shape[-1] // 16):
        search.report_misfit(codes, scales)
        return
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    search.add(codes.name, codes, scales, (), (MXFP4_BYTES, (1, 32), shape))


def _codes_of(scale: StoredTensor) -> tuple[str, ...]:
    is_of_blocks = scale.name.endswith("_scales") and scale.dtype is DType.U8
    return (f"{scale.name.removesuffix('_scales')}_blocks",) if is_of_blocks else ()


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_E2M1 = E2M1[-1]


def _elements(codes: Tensor) -> Tensor:
    return nibble_elements(codes, (*E2M1, *(-element for element in E2M1)))


def _nearest(quotients: Tensor) -> Tensor:
    import torch

    magnitudes = quotients.abs().clamp_(max=LARGEST_E2M1)
    # The distance between neighbours is a half, one or two, and codes count them.
    halves, ones, twos = (magnitudes * 2).round_(), magnitudes.round() + 2, (magnitudes / 2).round_() + 4
    codes = torch.where(magnitudes < 2, halves, torch.where(magnitudes < 4, ones, twos))
    return pack_nibbles(codes.to(torch.uint8) | (quotients.signbit().to(torch.uint8) << 3))


E2M1_IN_TORCH = InTorch(_elements, _nearest)
"""float4 e2m1, saturating at 6. Non-finite values have no code."""
E2M1_IN_LOOPS: Blockwise = InLoops("E2M1")

# 2 ** 125: six times that is still a float32, and six times the next no more.
_LARGEST_EXPONENT = 252


class Mxfp4(Codec):
    """MXFP4.

    The exponent is that of the largest magnitude, rounded to an element's precision, less that of the largest
    element: what is nearer to 8 than to 6 makes the next one. The specification's own choice, which never
    rounds up, has more error: 3 % in root mean square for normal numbers, 46 % for uniform ones; one that
    never saturates, 3 % and 0 %."""

    in_torch: ClassVar[Blockwise] = E2M1_IN_TORCH
    in_loops: ClassVar[Blockwise | None] = E2M1_IN_LOOPS

    def _fresh(self, quant_spec: QuantSpec, blocks: BlockValues) -> Tensor:
        import torch

        # Half of the last bit that an element has of its mantissa carries into the exponent from 1.75 on.
        exponents = ((blocks.largest.view(torch.int32) + (1 << 21)) >> 23) - 2
        stored = exponents.clamp(0, _LARGEST_EXPONENT).to(torch.uint8)
        scales = load_scales(quant_spec.scale_dtype, stored.view(-1)).view(exponents.shape)
        return torch.where(blocks.largest == 0, 1.0, scales)


GPT_OSS = QuantMethod(
    "mxfp4",
    {MXFP4: Mxfp4()},
    read_table=_read_table,
    are_codes=_are_codes,
    add=_add,
    codes_of=_codes_of,
    fresh_table=_fresh_table,
)
DEEPSEEK_V4 = QuantMethod(
    "fp8", {MXFP4_BYTES: Mxfp4()}, are_codes=_are_bytes, add=_add_bytes, codes_of=lambda _: ()
)
"""Experts beside FP8, whose table is that of the model."""
