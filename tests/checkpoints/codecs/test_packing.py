"""Packings: sizes and shapes of what is stored, and what is refused."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import formats
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4
from raymerge.dtypes import DType

sizes = st.integers(1, 9)


def test_one_scale_for_a_tensor_is_that_of_no_rows() -> None:
    packing = usual_quant_spec(FP8_TENSOR, (64, 32))
    assert (packing.band, packing.scales_per_band, packing.scales_nbytes(64)) == (1, 0, 0)
    assert packing.tensor_scale_dtype is DType.BF16
    assert usual_quant_spec(NVFP4, (64, 32)).tensor_scale_dtype is DType.F32
    assert usual_quant_spec(MXFP4, (64, 32)).tensor_scale_dtype is None


@given(form=st.sampled_from(list(formats())), stack=st.lists(sizes, max_size=2), rows=sizes, blocks=sizes)
def test_stored_sizes_agree_with_stored_shapes(
    form: Format, stack: list[int], rows: int, blocks: int
) -> None:
    packing = usual_quant_spec(form, (*stack, rows, blocks * 32))
    nbytes = packing.format.code_dtype.nbytes(prod(packing.codes_shape))
    assert nbytes == packing.num_matrices * packing.codes_nbytes(rows)
    if packing.scales_per_band:
        stored = packing.scale_dtype.nbytes(prod(packing.scales_shape))
        assert stored == packing.num_matrices * packing.scales_nbytes(rows)


@pytest.mark.parametrize("scales_shape", [(6,), (6, 1), (1, 6, 1)])
def test_scales_of_channels_may_have_dimensions_of_one(scales_shape: tuple[int, ...]) -> None:
    packing = QuantSpec(FP8_CHANNEL, (6, 40), (1, 40), DType.BF16, False, scales_shape)
    assert packing.scales_shape == scales_shape


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((FP8_BLOCK, (576, 7168), (128, 128), DType.F32, False, (4, 56)), r"shape \[5, 56\], not \[4"),
        ((FP8_BLOCK, (8,), (128, 128), DType.F32, False, (1,)), "is for matrices"),
        ((FP8_BLOCK, (0, 8), (128, 128), DType.F32, False, (0, 1)), "is for matrices that have elem"),
        ((FP8_BLOCK, (8, 8), (0, 8), DType.F32, False, (1, 1)), "hold no element"),
        ((FP8_BLOCK, (8, 8), (8, 8), DType.U8, False, (1, 1)), "powers of two"),
        ((FP8_CHANNEL, (8, 8), (1, 4), DType.F32, False, (8, 2)), r"blocks of \[1, 8\]"),
        ((FP8_TENSOR, (3, 8, 8), (8, 8), DType.F32, False, (1,)), r"shape \[3, 1, 1\], not \[1\]"),
        ((MXFP4, (2, 48), (1, 32), DType.U8, True, (2, 2)), "columns that 32 divides"),
        ((MXFP4, (2, 64), (1, 32), DType.F32, False, (2, 2)), "scales of F8_E8M0, U8, not F32"),
        ((INT4, (2, 12), (1, 4), DType.BF16, False, (2, 3)), "8 codes to an element"),
        ((INT4, (2, 24), (1, 3), DType.BF16, False, (2, 8)), "and no blocks of 3 columns"),
        ((INT4, (2, 64), (2, 32), DType.BF16, False, (1, 2)), r"blocks of \[1, 32\]"),
        ((INT4, (2, 64), (1, 32), DType.BF16, True, (2, 2)), "not held to powers of two"),
        ((NVFP4, (2, 32), (1, 16), DType.BF16, False, (2, 2)), "scales of F8_E4M3, not BF16"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_facts(
    fields: tuple[Format, tuple[int, ...], tuple[int, int], DType, bool, tuple[int, ...]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        QuantSpec(*fields)
