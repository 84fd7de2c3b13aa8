"""Every codec through the kit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

from kits.codec_kit import CodecKit

from raymerge.checkpoints.quantisation.encoding import QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4, MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4
from raymerge.dtypes import DType

SCALES = [
    *((dtype, power) for dtype in (DType.F32, DType.BF16, DType.F16) for power in (False, True)),
    (DType.F8_E8M0, True),
    (DType.U8, True),
]


def small_blocks(rows: int, columns: int, dtype: DType, *, power: bool) -> QuantSpec:
    """Block FP8 with blocks of 4 by 8, so that ragged ones are cheap to try."""
    grid = (-(-rows // 4), -(-columns // 8))
    return QuantSpec(FP8_BLOCK, (rows, columns), (4, 8), dtype, power, grid)


class TestFp8Block(CodecKit):
    packings: ClassVar[Sequence[QuantSpec]] = (
        *(small_blocks(11, 21, dtype, power=power) for dtype, power in SCALES),
        *(
            small_blocks(rows, columns, DType.F32, power=False)
            for rows, columns in itertools.product((1, 4, 8, 9), (1, 8, 16, 17))
        ),
        usual_quant_spec(FP8_BLOCK, (144, 136)),
    )


class TestFp8Channel(CodecKit):
    packings: ClassVar[Sequence[QuantSpec]] = tuple(
        usual_quant_spec(FP8_CHANNEL, (6, 33), scale_dtype=dtype, power_of_two=power)
        for dtype, power in SCALES
    )


class TestFp8Tensor(CodecKit):
    packings: ClassVar[Sequence[QuantSpec]] = tuple(
        usual_quant_spec(FP8_TENSOR, (7, 19), scale_dtype=dtype) for dtype in (DType.F32, DType.BF16)
    )


class TestMxfp4(CodecKit):
    packings: ClassVar[Sequence[QuantSpec]] = (
        usual_quant_spec(MXFP4, (7, 96)),
        usual_quant_spec(MXFP4, (1, 32)),
        usual_quant_spec(MXFP4, (3, 64), scale_dtype=DType.F8_E8M0),
        usual_quant_spec(MXFP4, (2, 5, 64)),
        usual_quant_spec(MXFP4_ROWS, (3, 64)),
    )


class TestInt4(CodecKit):
    packings: ClassVar[Sequence[QuantSpec]] = (
        *(usual_quant_spec(INT4, (7, 96), scale_dtype=d) for d in (DType.BF16, DType.F16, DType.F32)),
        QuantSpec(INT4, (5, 128), (1, 128), DType.BF16, False, (5, 1)),
    )


class TestNvfp4(CodecKit):
    packings: ClassVar[Sequence[QuantSpec]] = (
        usual_quant_spec(NVFP4, (7, 48)),
        usual_quant_spec(NVFP4, (1, 16)),
    )
