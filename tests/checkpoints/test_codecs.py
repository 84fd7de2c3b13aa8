"""Codecs of every format: CodecKit, grids, forms and packing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.codec_kit import CodecKit, bits, inherited, seeds
from kits.codec_reference import num_steps, scale_numbers, spread, steps_of
from torch import Tensor

from raymerge.checkpoints.quantisation.block_codec import (
    Blockwise,
    Codec,
    Encoded,
    NotFiniteError,
    Steps,
    StoredScales,
    load_scales,
    store_scales,
)
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of, formats
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP8
from raymerge.checkpoints.quantisation.int4 import (
    INT4,
    INT4_ASYMMETRIC,
    grid_steps,
    grid_steps_in_loops,
    grid_steps_in_torch,
)
from raymerge.checkpoints.quantisation.int8 import INT8_ASYMMETRIC, INT8_CHANNEL
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4, MXFP4_BYTES, MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4, NVFP4_MODELOPT, NVFP4_STACK
from raymerge.dtypes import DType

FP8 = codec_of(FP8_BLOCK)
NVFP4S = [NVFP4, NVFP4_MODELOPT]


def row(*values: float, length: int = 32) -> Tensor:
    """A row that begins with these values and ends in zeros."""
    return torch.tensor([*values, *(0.0,) * (length - len(values))]).view(1, length)


def random_codes(shape: tuple[int, int]) -> Tensor:
    """Four bits for each number."""
    made = torch.randint(256, (shape[0] * shape[1] // 2,), generator=torch.Generator().manual_seed(3))
    return made.to(torch.uint8)


def test_fp8_saturates_and_keeps_signs() -> None:
    quant_spec = usual_quant_spec(FP8_TENSOR, (1, 8), scale_dtype=DType.F32)
    values = torch.tensor([[448.0, 463.9, 464.0, 1e9, -1e9, -0.0, 2.0**-10, 1.5 * 2.0**-9]])
    encoded = FP8.encode(quant_spec, values, StoredScales(tensor_scale=torch.tensor(1.0)))
    # 464 lies half-way to the next number there is not; 2 ** -10 half-way to the least: to even, so to 0.
    assert encoded.codes.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x80, 0x00, 0x02]
    assert encoded.scales.numel() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16, DType.U8, DType.F8_E8M0])
def test_what_is_not_finite_is_not_encoded(bad: float, dtype: DType) -> None:
    quant_spec = usual_quant_spec(FP8_CHANNEL, (2, 4), scale_dtype=dtype)
    values = torch.tensor([[1.0, bad, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    for kept in (None, torch.full((quant_spec.scales_nbytes(2),), 60, dtype=torch.uint8)):
        with pytest.raises(NotFiniteError):
            FP8.encode(quant_spec, values, StoredScales(kept))
    # Here the caller looks, before it chooses the scale; what it missed does not pass for a number.
    whole = usual_quant_spec(FP8_TENSOR, (2, 4), scale_dtype=DType.F32)
    one = torch.tensor(0.5)
    assert FP8.decode(whole, FP8.encode(whole, values, StoredScales(tensor_scale=one)))[0, 1].isnan()


@inherited
@given(seed=seeds, dtype=st.sampled_from([DType.F32, DType.BF16, DType.U8, DType.F8_E8M0]))
def test_scales_that_are_powers_of_two_are_the_least_that_reach(seed: int, dtype: DType) -> None:
    generator = np.random.default_rng(seed)
    largest = float(np.ldexp(generator.random() + 0.5, generator.integers(-100, 100)))
    values = row(float(np.float32(largest)), length=4)
    quant_spec = usual_quant_spec(FP8_CHANNEL, (1, 4), scale_dtype=dtype, power_of_two=True)
    scale = scale_numbers(dtype, FP8.encode(quant_spec, values).scales.numpy()).item()
    assert np.frexp(scale)[0] == 0.5
    # The quotient by 448 is rounded to float32 before its exponent is taken.
    assert scale * 448 >= values.max().item() * (1 - 2.0**-24)
    assert scale / 2 * 448 < values.max().item()


def test_fp8_scales_are_the_largest_magnitude_over_448() -> None:
    quant_spec = usual_quant_spec(FP8_BLOCK, (144, 200))
    values = torch.randn(144, 200, generator=torch.Generator().manual_seed(3))
    values[143, 199] = -9.0
    found = FP8.encode(quant_spec, values).scales.view(torch.float32).view(2, 2)
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
    quant_spec = usual_quant_spec(MXFP4, (1, 32))
    codes = torch.tensor([0x21, 0xF7, *(0,) * 14], dtype=torch.uint8)
    decoded = codec_of(MXFP4).decode(quant_spec, Encoded(codes, torch.tensor([128], dtype=torch.uint8)))
    assert decoded[0, :4].tolist() == [1.0, 2.0, 12.0, -12.0]


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(4.0, 0), (6.0, 0), (6.99, 0), (7.0, 1), (8.0, 1), (1.0, -2), (1.74, -2), (1.75, -1), (3.4e38, 125)],
)
def test_mxfp4_exponents_are_those_of_the_rounded_largest_magnitude(largest: float, exponent: int) -> None:
    quant_spec = usual_quant_spec(MXFP4, (1, 32))
    encoded = codec_of(MXFP4).encode(quant_spec, row(-largest))
    assert encoded.scales.item() - 127 == exponent
    assert codec_of(MXFP4).decode(quant_spec, encoded).isfinite().all()


def test_transformers_decodes_mxfp4_to_the_same_numbers() -> None:
    # A second's worth of modules that no other test needs.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quant_spec = usual_quant_spec(MXFP4, (3, 6, 64))
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, quant_spec.codes_shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, quant_spec.scales_shape, generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        ours = codec_of(MXFP4).decode(quant_spec, Encoded(blocks[expert].view(-1), scales[expert].view(-1)))
        # It gives [columns, rows], as its modules have it.
        assert ours.t().equal(theirs[expert])


def test_int4_words_are_as_compressed_tensors_packs_them() -> None:
    """Its ``pack_to_int32``: 8 is added, and the first of eight is in the lowest bits."""
    quant_spec = usual_quant_spec(INT4, (1, 32), scale_dtype=DType.F32)
    numbers = [-8, -7, -1, 0, 1, 2, 6, 7]
    word = sum((number + 8) << (4 * place) for place, number in enumerate(numbers))
    words = torch.tensor([word - (1 << 32), *(-0x77777778,) * 3], dtype=torch.int32)
    scale = torch.tensor([0.25]).view(torch.uint8)
    decoded = codec_of(INT4).decode(quant_spec, Encoded(words.view(torch.uint8), scale))
    assert decoded[0].tolist() == [*(number / 4 for number in numbers), *(0.0,) * 24]


def test_int4_scales_are_rounded_before_codes_are_made() -> None:
    quant_spec, codec = usual_quant_spec(INT4, (1, 32)), codec_of(INT4)
    values = row(1.0, 0.2, -1.0, -0.47)
    encoded = codec.encode(quant_spec, values)
    scale = (torch.tensor(1.0) / 7.5).bfloat16()
    assert encoded.scales.view(torch.bfloat16).equal(scale.view(1))
    codes = (values / scale.float()).round().clamp(-8, 7)
    assert codec.decode(quant_spec, encoded).equal(codes * scale.float())


@pytest.mark.parametrize("form", NVFP4S, ids=lambda form: form.name)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 0.02, 0.5, 3.0, 40.0, 1e6, 1e30])
def test_nvfp4_has_scales_for_numbers_of_any_size(size: float, form: Format) -> None:
    quant_spec, codec = usual_quant_spec(form, (16, 64)), codec_of(form)
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(9))
    values *= size / values.abs().max()
    one = codec.fresh_tensor_scale(quant_spec, values.abs().max())
    encoded = codec.encode(quant_spec, values, StoredScales(tensor_scale=one))
    decoded = codec.decode(quant_spec, encoded)
    assert ((decoded - values).double().norm() / values.double().norm()) < 0.12


@pytest.mark.parametrize("form", NVFP4S, ids=lambda form: form.name)
@pytest.mark.parametrize("had", [None, 2.0**13])
def test_nvfp4_has_one_scale_for_tensors_that_differ_within_bounds(had: float | None, form: Format) -> None:
    """Servers join q, k and v, and take one scale for all of them; ModelOpt's is one over the other's."""
    quant_spec, codec = usual_quant_spec(form, (16, 64)), codec_of(form)
    power = -1 if form == NVFP4_MODELOPT else 1
    old = None if had is None else torch.tensor(had**power)
    limit = 448 * 7 / (had or 448 * 6 / 4)

    def scale(largest: float) -> float:
        return float(codec.fresh_tensor_scale(quant_spec, torch.tensor(largest), had=old))

    usual = scale(0.0)
    of_smaller = 16.0**power
    assert had is None or usual == had**power
    assert {scale(limit * share) for share in (0.99, 0.3, 1 / 20, 1 / 255)} == {usual}
    assert {scale(limit * share) for share in (1.01, 3.0, 15.9)} == {usual / of_smaller}
    assert {scale(limit * share) for share in (1 / 257, 1 / 1000, 1 / 4095)} == {usual * of_smaller}
    assert scale(limit * 17) == usual / of_smaller**2


@pytest.mark.parametrize("form", NVFP4S, ids=lambda form: form.name)
@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0.0])
def test_nvfp4_with_a_damaged_scale_gives_no_numbers(scale: float, form: Format) -> None:
    quant_spec, codec = usual_quant_spec(form, (2, 32)), codec_of(form)
    encoded = codec.encode(quant_spec, torch.ones(2, 32), StoredScales(tensor_scale=torch.tensor(1.0)))
    assert not codec.decode(quant_spec, encoded._replace(tensor_scale=torch.tensor(scale))).isfinite().any()


def test_only_some_packings_have_a_scale_of_the_whole_tensor() -> None:
    with pytest.raises(ValueError, match="mxfp4 has no scale of the whole tensor"):
        codec_of(MXFP4).fresh_tensor_scale(usual_quant_spec(MXFP4, (1, 32)), torch.tensor(1.0))
    quant_spec = usual_quant_spec(FP8_TENSOR, (3, 5))
    found = FP8.fresh_tensor_scale(quant_spec, torch.tensor(3.0))
    assert found == (torch.tensor(3.0) / 448).bfloat16().float()


def test_modelopt_and_compressed_tensors_mean_the_same_numbers() -> None:
    """A factor of a power of two is exactly one over a divisor."""
    codes, scales = random_codes((4, 64)), torch.tensor([0x38, 0x7E, 0x01, 0x40] * 4, dtype=torch.uint8)
    decoded = [
        codec_of(form).decode(
            usual_quant_spec(form, (4, 64)), Encoded(codes, scales, None, torch.tensor(one))
        )
        for form, one in ((NVFP4, 1024.0), (NVFP4_MODELOPT, 2.0**-10))
    ]
    assert decoded[0].equal(decoded[1])


def test_deepseek_v4_has_the_even_column_in_the_lower_half() -> None:
    quant_spec = usual_quant_spec(MXFP4_BYTES, (1, 32))
    codes = torch.tensor([0x21, 0xF7, *(0,) * 14], dtype=torch.uint8)
    # Of the scale's byte b the factor is 2 ** (b - 127); 0 is no zero, and 255 no number.
    for byte, factor in ((127, 1.0), (128, 2.0), (0, 2.0**-127)):
        decoded = codec_of(MXFP4_BYTES).decode(
            quant_spec, Encoded(codes, torch.tensor([byte], dtype=torch.uint8))
        )
        assert decoded[0, :4].tolist() == [0.5 * factor, factor, 6 * factor, -6 * factor]
    lost = codec_of(MXFP4_BYTES).decode(quant_spec, Encoded(codes, torch.tensor([255], dtype=torch.uint8)))
    assert lost.isnan().all()


def test_nvfp4_leaves_a_scale_that_is_of_no_use() -> None:
    for form, had in itertools.product(NVFP4S, (0.0, -3.0, float("inf"), float("nan"), 1e38)):
        quant_spec, codec = usual_quant_spec(form, (16, 64)), codec_of(form)
        one = codec.fresh_tensor_scale(quant_spec, torch.tensor(1e3), had=torch.tensor(had))
        divisor = 1 / one if form == NVFP4_MODELOPT else one
        assert 1 / 260 < 1e3 * divisor / (448 * 7) <= 1, (form.name, had)


FORMS = {"fp8": codec_of(FP8_BLOCK), "e2m1": codec_of(MXFP4), "int4": codec_of(INT4)}
codecs = st.sampled_from(sorted(FORMS))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1e30, -1e30, 448.0, 464.0, 480.0, 6.0]


def per_byte(codec: Codec) -> int:
    return 1 if codec is FORMS["fp8"] else 2


def decode(form: Blockwise, codes: Tensor, steps: Steps, block: tuple[int, int], columns: int) -> Tensor:
    values = torch.empty(len(codes), columns)
    form.decode(codes, steps, block, values)
    return values


def patterns(exponents: range) -> Tensor:
    """float32 numbers of all upper bits, with lower bits of ties and next to ties; [1, n]."""
    found = [
        sign << 31 | exponent << 23 | upper << 18 | lower
        for sign, exponent, upper in itertools.product((0, 1), exponents, range(32))
        for lower in (0, 1, 2**17 - 1, 2**17, 2**17 + 1, 2**18 - 1)
    ]
    return torch.from_numpy(np.array(found, np.uint32).view(np.float32)).view(1, -1)


@pytest.mark.parametrize("kind", FORMS)
def test_every_code_decodes_to_the_same_bits(kind: str) -> None:
    codec = FORMS[kind]
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    columns = 256 * per_byte(codec)
    for step in (1.0, 0.3, 2.0**-149, 2.0**-126, 3e38, 0.0, -2.5):
        steps = Steps(torch.tensor([[step]]))
        loops = decode(codec.in_loops, codes, steps, (1, columns), columns)
        in_torch = decode(codec.in_torch, codes, steps, (1, columns), columns)
        numbers = ~in_torch.isnan()
        assert loops.isnan().equal(~numbers)
        assert bits(loops[numbers]) == bits(in_torch[numbers])


@pytest.mark.parametrize("kind", FORMS)
def test_every_kind_of_number_has_the_same_code(kind: str) -> None:
    codec = FORMS[kind]
    # All exponents but the last, which are infinity and NaN: those are codes in FP8 alone.
    values = patterns(range(256 if kind == "fp8" else 255))
    nbytes = values.shape[1] // per_byte(codec)
    steps, block = Steps(torch.ones(1, 1)), (1, values.shape[1])
    loops = codec.in_loops.encode(values, steps, block, nbytes)
    in_torch = codec.in_torch.encode(values, steps, block, nbytes)
    assert loops.equal(in_torch)
    if kind == "fp8":
        finite = values.isfinite()
        assert (loops[~finite] == 0x7F).all()
        assert ((loops[finite] & 0x7F) != 0x7F).all()


@inherited
@given(kind=codecs, seed=seeds, data=st.data())
def test_grids_of_every_shape_give_the_same_bits(kind: str, seed: int, data: st.DataObject) -> None:
    codec = FORMS[kind]
    of = per_byte(codec)
    height, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)) * of
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12)) * of
    generator = np.random.default_rng(seed)
    grid = (-(-rows // height), -(-columns // width))
    steps = torch.from_numpy(np.ldexp(generator.random(grid) + 0.5, generator.integers(-3, 3, grid))).float()
    steps[generator.random(grid) < 0.1] = 0.0
    by = Steps(steps)
    values = torch.from_numpy(generator.standard_normal((rows, columns)) * 3).float()
    which = torch.from_numpy(generator.integers(0, len(SPECIAL) * 8, values.shape))
    for place, special in enumerate(SPECIAL):
        values[which == place] = special
    loops, in_torch, block = codec.in_loops, codec.in_torch, (height, width)
    codes = loops.encode(values, by, block, columns // of)
    assert codes.equal(in_torch.encode(values, by, block, columns // of))
    decoded = decode(loops, codes, by, block, columns)
    assert bits(decoded) == bits(decode(in_torch, codes, by, block, columns))
    assert bits(loops.largest(values, block)) == bits(in_torch.largest(values, block))
    mixed = torch.where(torch.from_numpy(generator.random((rows, 1)) < 0.7), decoded, values)
    fits = loops.fits(mixed, by, block, columns // of)
    assert fits.equal(in_torch.fits(mixed, by, block, columns // of))
    finite = values.nan_to_num(0.0, 1.0, -1.0)
    codes = loops.encode(finite, by, block, columns // of)
    mine, theirs = (each.squares(codes, by, block, finite) for each in (loops, in_torch))
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_values_with_gaps_are_encoded_as_those_without() -> None:
    codec = FORMS["fp8"]
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)).t()
    steps = Steps(torch.full((3, 2), 0.01))
    found = codec.in_loops.encode(values, steps, (4, 4), 8)
    assert found.equal(codec.in_torch.encode(values.contiguous(), steps, (4, 4), 8))


def test_a_nan_is_the_largest_of_its_block() -> None:
    values = torch.ones(2, 4)
    values[1, 2] = float("nan")
    values[0, 0] = -float("inf")
    for form in (FORMS["fp8"].in_loops, FORMS["fp8"].in_torch):
        found = form.largest(values, (2, 2))
        assert found[0, 0] == float("inf")
        assert found[0, 1].isnan()


CODEC = codec_of(INT4)
ONE = usual_quant_spec(INT4, (1, 32))


def coded(rows: int, largest: int, seed: int) -> Tensor:
    """Codes of which one of each row is ``largest``, and one is 1; float32 [rows, 32]."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-7, 8, (rows, 32)).astype(np.float32)
    codes[:, 5], codes[:, 17] = largest, 1
    return torch.from_numpy(codes)


def decoded(quant_spec: QuantSpec, values: Tensor) -> Tensor:
    return CODEC.decode(quant_spec, CODEC.encode(quant_spec, values))


@pytest.mark.parametrize("largest", [7, -7, -8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_times_a_scale_return_whatever_the_scale_is(largest: int, dtype: torch.dtype) -> None:
    """All mantissas that a scale in bfloat16 may have; bfloat16 rounds most of the products."""
    scales = torch.arange(0x3C80, 0x3D80, dtype=torch.int16).view(torch.bfloat16)
    codes = coded(len(scales), largest, 3)
    quant_spec = usual_quant_spec(INT4, (len(scales), 32))
    values = (codes * scales.float().view(-1, 1)).to(dtype).float()
    found = CODEC.encode(quant_spec, values)
    assert found.scales.view(torch.bfloat16).equal(scales)
    assert decoded(quant_spec, values).equal(codes * scales.float().view(-1, 1))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_what_was_encoded_once_is_not_changed_by_way_of_plain_numbers(kept: torch.dtype) -> None:
    quant_spec = usual_quant_spec(INT4, (64, 64))
    first = CODEC.encode(quant_spec, torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * 0.02)
    values = CODEC.decode(quant_spec, first).to(kept).float()
    again = CODEC.encode(quant_spec, values)
    assert again.codes.equal(first.codes)
    assert again.scales.equal(first.scales)


@pytest.mark.parametrize(
    ("form", "least", "most"), [(FP8_BLOCK, 0.0018, 0.0025), (INT4, 0.0012, 0.0018), (MXFP4, 0.0, 0.0)]
)
def test_encoding_once_more_after_bfloat16_loses_little(form: Format, least: float, most: float) -> None:
    """The figures of docs/reliability.md."""
    quant_spec, codec = usual_quant_spec(form, (256, 256)), codec_of(form)
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    rounded = codec.decode(quant_spec, codec.encode(quant_spec, values)).bfloat16().float()
    again = codec.error_sums(quant_spec, rounded, codec.encode(quant_spec, rounded))
    assert least <= (again.squared_errors / again.squared_values) ** 0.5 <= most


@pytest.mark.parametrize(
    "values",
    [
        row(1.0, 0.2, -1.0, -0.47),  # no multiples
        row(-1.0, 0.3, 0.126),  # one that is near, and one that is not
        row(7.0, 1.0, 0.01),  # near 0, which is no multiple of anything
        row(6.0, 1.0, 5.0, 2.0),  # multiples, of which none is as large as quantisers make it
    ],
)
def test_other_numbers_have_the_usual_scale(values: Tensor) -> None:
    assert grid_steps(values, values.abs().amax().view(1, 1)).item() == 0
    scale = load_scales(DType.BF16, CODEC.encode(ONE, values).scales)
    assert scale.equal((values.abs().amax() / 7.5).bfloat16().float().view(1))


def test_a_positive_number_is_never_eight_times_the_scale() -> None:
    values = row(8.0, -8.0, 4.0, 2.0, 1.0)
    assert grid_steps(values, torch.tensor([[8.0]])).item() == 0
    assert grid_steps(-values[:, 0::2], torch.tensor([[8.0]])).item() == 1


@pytest.mark.parametrize("value", [1.0, -1.0, 0.33])
def test_a_block_of_one_number_keeps_it(value: float) -> None:
    found = decoded(ONE, row(0.0, value))
    assert (found - row(0.0, value)).abs().max() <= abs(value) * 2.0**-8


def mixed(seed: int) -> tuple[Tensor, Tensor]:
    """Blocks that are grids, nearly, not at all, of zeros, and of numbers of any size; and the largest."""
    generator = np.random.default_rng(seed)
    values = torch.cat([coded(8, 7, seed), coded(8, -8, seed)])
    values *= torch.from_numpy(
        np.ldexp(1 + generator.random((16, 1)), generator.integers(-148, 120, (16, 1)))
    )
    values[::3] = values[::3].bfloat16().float()
    values[1::5, 7] *= 1 + float(generator.uniform(-2.0, 2.0)) * 2.0**-7
    values[4, :30] = 0.0
    values[5] = 0.0
    values[6] = torch.from_numpy(generator.standard_normal(32)).float()
    return values.view(4, 128), values.abs().amax(dim=1).view(4, 4)


@inherited
@given(seed=seeds)
def test_both_forms_find_the_same_steps(seed: int) -> None:
    values, largest = mixed(seed)
    found = grid_steps_in_loops(values, largest)
    assert bits(found) == bits(grid_steps_in_torch(values, largest))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_steps() -> None:
    for seed in range(50):
        values, largest = mixed(seed)
        found = grid_steps(values.cuda(), largest.cuda()).cpu()
        assert bits(found) == bits(grid_steps(values, largest))


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
    quant_specs: ClassVar[Sequence[QuantSpec]] = (
        *(small_blocks(11, 21, dtype, power=power) for dtype, power in SCALES),
        *(
            small_blocks(rows, columns, DType.F32, power=False)
            for rows, columns in ((1, 1), (4, 8), (8, 17), (9, 16))
        ),
        usual_quant_spec(FP8_BLOCK, (130, 24)),
    )


class TestFp8Channel(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = tuple(
        usual_quant_spec(FP8_CHANNEL, (6, 33), scale_dtype=dtype, power_of_two=power)
        for dtype, power in SCALES
    )


class TestMxfp8(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = (
        usual_quant_spec(MXFP8, (3, 96)),
        usual_quant_spec(MXFP8, (1, 32), scale_dtype=DType.F8_E8M0),
    )


class TestFp8Tensor(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = tuple(
        usual_quant_spec(FP8_TENSOR, (7, 19), scale_dtype=dtype) for dtype in (DType.F32, DType.BF16)
    )


class TestMxfp4(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = (
        usual_quant_spec(MXFP4, (7, 96)),
        usual_quant_spec(MXFP4, (1, 32)),
        usual_quant_spec(MXFP4, (3, 64), scale_dtype=DType.F8_E8M0),
        usual_quant_spec(MXFP4, (2, 5, 64)),
        usual_quant_spec(MXFP4_ROWS, (3, 64)),
        usual_quant_spec(MXFP4_BYTES, (3, 64)),
    )


class TestInt4(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = (
        *(usual_quant_spec(INT4, (7, 96), scale_dtype=d) for d in (DType.BF16, DType.F16, DType.F32)),
        QuantSpec(INT4, (5, 128), (1, 128), DType.BF16, False, (5, 1)),
    )


class TestInt8(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = tuple(
        usual_quant_spec(INT8_CHANNEL, (6, 33), scale_dtype=d) for d in (DType.BF16, DType.F16, DType.F32)
    )


class TestZeroPoints(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = (
        QuantSpec(INT4_ASYMMETRIC, (21, 96), (1, 32), DType.BF16, False, (21, 3)),
        QuantSpec(INT4_ASYMMETRIC, (8, 48), (1, 48), DType.F16, False, (8, 1)),
        QuantSpec(INT8_ASYMMETRIC, (5, 33), (1, 33), DType.F32, False, (5, 1)),
    )

    @pytest.mark.parametrize("side", ["both", "above", "below"])
    def test_steps_are_the_least_that_reach_all_numbers_and_0(self, side: str) -> None:
        for case, quant_spec in self.each():
            values = case.values(5)
            values = {"both": values, "above": values.abs() + 0.2, "below": -values.abs()}[side]
            values[-1] *= 40
            encoded = case.encode(values)
            steps = steps_of(quant_spec, encoded.scales.numpy(), None, quant_spec.rows)
            errors = np.abs((case.decode(encoded) - values).double().numpy())
            assert (errors <= steps * 0.5 * (1 + 1e-5)).all()
            blocks = values.view(*quant_spec.grid, -1)
            apart = blocks.amax(2).clamp(min=0) - blocks.amin(2).clamp(max=0)
            apart = spread(quant_spec, apart.double().numpy(), quant_spec.rows)
            assert ((steps * num_steps(quant_spec.format) <= apart * 1.01) | (apart == 0)).all()


class TestNvfp4(CodecKit):
    quant_specs: ClassVar[Sequence[QuantSpec]] = (
        usual_quant_spec(NVFP4, (7, 48)),
        usual_quant_spec(NVFP4, (1, 16)),
        usual_quant_spec(NVFP4_MODELOPT, (5, 48)),
        usual_quant_spec(NVFP4_STACK, (48, 6)),
    )


sizes = st.integers(1, 9)


def test_one_scale_for_a_tensor_is_that_of_no_rows() -> None:
    quant_spec = usual_quant_spec(FP8_TENSOR, (64, 32))
    assert (quant_spec.scale_row_height, quant_spec.scale_row_length) == (1, 0)
    assert quant_spec.scales_nbytes(64) == 0
    assert quant_spec.tensor_scale_dtype is DType.BF16
    assert usual_quant_spec(NVFP4, (64, 32)).tensor_scale_dtype is DType.F32
    assert usual_quant_spec(MXFP4, (64, 32)).tensor_scale_dtype is None


@given(form=st.sampled_from(list(formats())), stack=st.lists(sizes, max_size=2), rows=sizes, blocks=sizes)
def test_stored_sizes_agree_with_stored_shapes(
    form: Format, stack: list[int], rows: int, blocks: int
) -> None:
    rows *= form.rows_of_codes * (form.block[0] or 1) if form.packs_rows else 1
    quant_spec = usual_quant_spec(form, (*stack, rows, blocks * 32))
    nbytes = quant_spec.format.code_dtype.nbytes(prod(quant_spec.codes_shape))
    assert nbytes == quant_spec.num_matrices * quant_spec.codes_nbytes(rows)
    if quant_spec.scale_row_length:
        stored = quant_spec.scale_dtype.nbytes(prod(quant_spec.scales_shape))
        assert stored == quant_spec.num_matrices * quant_spec.scales_nbytes(rows)


@pytest.mark.parametrize("scales_shape", [(6,), (6, 1), (1, 6, 1)])
def test_scales_of_channels_may_have_dimensions_of_one(scales_shape: tuple[int, ...]) -> None:
    quant_spec = QuantSpec(FP8_CHANNEL, (6, 40), (1, 40), DType.BF16, False, scales_shape)
    assert quant_spec.scales_shape == scales_shape


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
        ((MXFP8, (2, 48), (1, 32), DType.U8, True, (2, 2)), "columns that 32 divides"),
        ((MXFP8, (2, 64), (1, 32), DType.F32, True, (2, 2)), "scales of F8_E8M0, U8, not F32"),
        ((MXFP4, (2, 64), (1, 32), DType.F32, False, (2, 2)), "scales of F8_E8M0, U8, not F32"),
        ((NVFP4_STACK, (2, 24, 8), (16, 1), DType.F8_E4M3, False, (2, 2, 8)), "needs rows that 16 divides"),
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
