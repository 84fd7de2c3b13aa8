"""What is particular to each format: known bytes, choice of scales, saturation, and what others decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.codec_kit import inherited, seeds
from kits.codec_reference import scale_numbers
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raymerge.checkpoints.quantisation.codec import NotFiniteError, load_scales, store_scales
from raymerge.checkpoints.quantisation.encoding import QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4
from raymerge.dtypes import DType

FP8 = codec_of(FP8_BLOCK)


def row(*values: float, length: int) -> Tensor:
    """A row that begins with these values and ends in zeros."""
    return torch.tensor([*values, *(0.0,) * (length - len(values))]).view(1, length)


def channel(columns: int, dtype: DType = DType.F32, *, power: bool = False) -> QuantSpec:
    return usual_quant_spec(FP8_CHANNEL, (1, columns), scale_dtype=dtype, power_of_two=power)


def test_fp8_saturates_and_keeps_signs() -> None:
    packing = usual_quant_spec(FP8_TENSOR, (1, 8), scale_dtype=DType.F32)
    values = torch.tensor([[448.0, 463.9, 464.0, 1e9, -1e9, -0.0, 2.0**-10, 1.5 * 2.0**-9]])
    encoded = FP8.encode(packing, values, tensor_scale=torch.tensor(1.0))
    # 464 lies half-way to the next number there is not; 2 ** -10 half-way to the least: to even, so to 0.
    assert encoded.codes.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x80, 0x00, 0x02]
    assert encoded.scales.numel() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16, DType.U8, DType.F8_E8M0])
def test_what_is_not_finite_is_not_encoded(bad: float, dtype: DType) -> None:
    packing = usual_quant_spec(FP8_CHANNEL, (2, 4), scale_dtype=dtype)
    values = torch.tensor([[1.0, bad, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    for kept in (None, torch.full((packing.scales_nbytes(2),), 60, dtype=torch.uint8)):
        with pytest.raises(NotFiniteError):
            FP8.encode(packing, values, kept=kept)
    # Here the caller looks, before it chooses the scale; what it missed does not pass for a number.
    whole = usual_quant_spec(FP8_TENSOR, (2, 4), scale_dtype=DType.F32)
    one = torch.tensor(0.5)
    assert FP8.decode(whole, *FP8.encode(whole, values, tensor_scale=one), tensor_scale=one)[0, 1].isnan()


@inherited
@given(seed=seeds, dtype=st.sampled_from([DType.F32, DType.BF16, DType.U8, DType.F8_E8M0]))
def test_scales_that_are_powers_of_two_are_the_least_that_reach(seed: int, dtype: DType) -> None:
    generator = np.random.default_rng(seed)
    largest = float(np.ldexp(generator.random() + 0.5, generator.integers(-100, 100)))
    values = row(float(np.float32(largest)), length=4)
    packing = channel(4, dtype, power=True)
    scale = scale_numbers(dtype, FP8.encode(packing, values).scales.numpy()).item()
    assert np.frexp(scale)[0] == 0.5
    # The quotient by 448 is rounded to float32 before its exponent is taken.
    assert scale * 448 >= values.max().item() * (1 - 2.0**-24)
    assert scale / 2 * 448 < values.max().item()


def test_fp8_scales_are_the_largest_magnitude_over_448() -> None:
    packing = usual_quant_spec(FP8_BLOCK, (144, 200))
    values = torch.randn(144, 200, generator=torch.Generator().manual_seed(3))
    values[143, 199] = -9.0
    found = FP8.encode(packing, values).scales.view(torch.float32).view(2, 2)
    for top, left in ((0, 0), (0, 1), (1, 0), (1, 1)):
        block = values[top * 128 : top * 128 + 128, left * 128 : left * 128 + 128]
        assert found[top, left] == block.abs().max() / 448
    assert found[1, 1] == torch.tensor(9.0) / 448


def test_every_exponent_is_what_torch_says_it_is() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    for dtype in (DType.U8, DType.F8_E8M0):
        found = load_scales(dtype, stored)
        assert found[255].isnan()
        assert found[:255].equal(stored.view(torch.float8_e8m0fnu).float()[:255])
        assert store_scales(dtype, found).equal(stored)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16, DType.F8_E4M3])
def test_scales_may_lie_anywhere_in_a_buffer(dtype: DType) -> None:
    scales = torch.tensor([0.5, 1.75, 3.0])
    stored = store_scales(dtype, scales)
    for shift in range(4):
        buffer = torch.cat([torch.zeros(shift, dtype=torch.uint8), stored])
        assert load_scales(dtype, buffer[shift:]).equal(scales)


def test_mxfp4_has_the_first_code_in_the_lower_half() -> None:
    packing = usual_quant_spec(MXFP4, (1, 32))
    codes = torch.tensor([0x21, 0xF7, *(0,) * 14], dtype=torch.uint8)
    decoded = codec_of(MXFP4).decode(packing, codes, torch.tensor([128], dtype=torch.uint8))
    assert decoded[0, :4].tolist() == [1.0, 2.0, 12.0, -12.0]


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(4.0, 0), (6.0, 0), (6.99, 0), (7.0, 1), (8.0, 1), (1.0, -2), (1.74, -2), (1.75, -1), (3.4e38, 125)],
)
def test_mxfp4_exponents_are_those_of_the_rounded_largest_magnitude(largest: float, exponent: int) -> None:
    packing = usual_quant_spec(MXFP4, (1, 32))
    encoded = codec_of(MXFP4).encode(packing, row(-largest, length=32))
    assert encoded.scales.item() - 127 == exponent
    assert codec_of(MXFP4).decode(packing, *encoded).isfinite().all()


def test_mxfp4_is_closer_with_these_exponents_than_with_the_specifications() -> None:
    """Numbers that are evenly distributed, and such as are normal: see the codec's docstring."""
    packing, codec = usual_quant_spec(MXFP4, (4000, 32)), codec_of(MXFP4)
    generator = torch.Generator().manual_seed(5)
    for values, gain in (
        (torch.randn(4000, 32, generator=generator), 1.02),
        (torch.rand(4000, 32, generator=generator) * 2 - 1, 1.4),
    ):
        ours = codec.error_sums(packing, values, codec.encode(packing, values))
        exponents = np.floor(np.log2(values.abs().amax(dim=1).double().numpy())) - 2
        scales = torch.from_numpy((exponents + 127).astype(np.uint8))
        steps = load_scales(DType.U8, scales).view(-1, 1)
        codes = codec.in_torch.encode(values, steps, (1, 32), 16)
        theirs = torch.empty_like(values)
        codec.in_torch.decode(codes, steps, (1, 32), theirs)
        error = (theirs - values).double().square().sum()
        assert (error / ours.squared_errors).sqrt() > gain


def test_transformers_decodes_mxfp4_to_the_same_numbers() -> None:
    packing = usual_quant_spec(MXFP4, (3, 6, 64))
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, packing.codes_shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, packing.scales_shape, generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        ours = codec_of(MXFP4).decode(packing, blocks[expert].view(-1), scales[expert].view(-1))
        # It gives [columns, rows], as its modules have it.
        assert ours.t().equal(theirs[expert])


def test_int4_words_are_as_compressed_tensors_packs_them() -> None:
    """Its ``pack_to_int32``: 8 is added, and the first of eight is in the lowest bits."""
    packing = usual_quant_spec(INT4, (1, 32), scale_dtype=DType.F32)
    numbers = [-8, -7, -1, 0, 1, 2, 6, 7]
    word = sum((number + 8) << (4 * place) for place, number in enumerate(numbers))
    words = torch.tensor([word - (1 << 32), *(-0x77777778,) * 3], dtype=torch.int32)
    scale = torch.tensor([0.25]).view(torch.uint8)
    decoded = codec_of(INT4).decode(packing, words.view(torch.uint8), scale)
    assert decoded[0].tolist() == [*(number / 4 for number in numbers), *(0.0,) * 24]


def test_int4_scales_are_rounded_before_codes_are_made() -> None:
    packing, codec = usual_quant_spec(INT4, (1, 32)), codec_of(INT4)
    values = row(1.0, 0.2, -1.0, -0.47, length=32)
    encoded = codec.encode(packing, values)
    scale = (torch.tensor(1.0) / 7.5).bfloat16()
    assert encoded.scales.view(torch.bfloat16).equal(scale.view(1))
    codes = (values / scale.float()).round().clamp(-8, 7)
    assert codec.decode(packing, *encoded).equal(codes * scale.float())


@pytest.mark.parametrize("size", [1e-30, 1e-6, 0.02, 0.5, 3.0, 40.0, 1e6, 1e30])
def test_nvfp4_has_scales_for_numbers_of_any_size(size: float) -> None:
    packing, codec = usual_quant_spec(NVFP4, (16, 64)), codec_of(NVFP4)
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(9))
    values *= size / values.abs().max()
    one = codec.fresh_tensor_scale(packing, values.abs().max())
    encoded = codec.encode(packing, values, tensor_scale=one)
    decoded = codec.decode(packing, *encoded, tensor_scale=one)
    assert ((decoded - values).double().norm() / values.double().norm()) < 0.12


@pytest.mark.parametrize("had", [None, 448 * 6 / 0.3])
def test_nvfp4_has_one_scale_for_tensors_that_differ_within_bounds(had: float | None) -> None:
    """Servers join q, k and v, and take one scale for all of them."""
    packing, codec = usual_quant_spec(NVFP4, (16, 64)), codec_of(NVFP4)
    old = None if had is None else torch.tensor(had)
    limit = 448 * 7 / (had or 448 * 6 / 4)

    def scale(largest: float) -> float:
        return float(codec.fresh_tensor_scale(packing, torch.tensor(largest), had=old))

    usual = scale(0.0)
    assert had is None or usual == float(old)  # type: ignore[arg-type]
    assert {scale(limit * share) for share in (0.99, 0.3, 1 / 20, 1 / 255)} == {usual}
    assert {scale(limit * share) for share in (1.01, 3.0, 15.9)} == {usual / 16}
    assert {scale(limit * share) for share in (1 / 257, 1 / 1000, 1 / 4095)} == {usual * 16}
    assert scale(limit * 17) == usual / 256


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0.0])
def test_nvfp4_with_a_damaged_scale_gives_no_numbers(scale: float) -> None:
    packing, codec = usual_quant_spec(NVFP4, (2, 32)), codec_of(NVFP4)
    encoded = codec.encode(packing, torch.ones(2, 32), tensor_scale=torch.tensor(1.0))
    assert not codec.decode(packing, *encoded, tensor_scale=torch.tensor(scale)).isfinite().any()


def test_only_some_packings_have_a_scale_of_the_whole_tensor() -> None:
    with pytest.raises(ValueError, match="mxfp4 has no scale of the whole tensor"):
        codec_of(MXFP4).fresh_tensor_scale(usual_quant_spec(MXFP4, (1, 32)), torch.tensor(1.0))
    packing = usual_quant_spec(FP8_TENSOR, (3, 5))
    found = FP8.fresh_tensor_scale(packing, torch.tensor(3.0))
    assert found == (torch.tensor(3.0) / 448).bfloat16().float()


def test_nvfp4_leaves_a_scale_that_is_of_no_use() -> None:
    packing, codec = usual_quant_spec(NVFP4, (16, 64)), codec_of(NVFP4)
    for had in (0.0, -3.0, float("inf"), float("nan"), 1e38):
        one = codec.fresh_tensor_scale(packing, torch.tensor(1e3), had=torch.tensor(had))
        assert 1 / 260 < 1e3 * one / (448 * 7) <= 1, had
