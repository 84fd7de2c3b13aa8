"""Stored numbers in float64 against torch, the formats' own references and the definition of chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kits.codec_reference import reference_decode

from raymerge.checkpoints.quantisation.codec import store_scales
from raymerge.checkpoints.quantisation.encoding import Format, encoding_of, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of, formats
from raymerge.checkpoints.quantisation.fp8 import FP8_TENSOR
from raymerge.dtypes import DType
from raymerge.methods import keep_mask, normal
from raymerge.methods.reference import (
    RankThreshold,
    element_numbers,
    magnitudes_of_ranks,
    normal_numbers,
    number_limit,
)
from raymerge.verifier.numbers import (
    code_magnitudes,
    code_steps,
    coded_numbers,
    least_peaks,
    nearest_coded_distance,
    nearest_distance,
    plain_numbers,
    scale_numbers,
)

TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}
CPU = torch.device("cpu")


def _values(seed: int, count: int = 4000) -> Any:
    """Numbers of all sizes, some of them on the border between two that can be stored."""
    found = np.random.default_rng(seed).normal(size=count) * np.exp2(np.arange(count) % 30 - 20.0)
    found[::7] = np.round(found[::7], 2)
    return found


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_plain_numbers_are_torchs(dtype: DType) -> None:
    stored = torch.from_numpy(_values(1)).to(TORCH[dtype])
    raw = stored.view(torch.uint8).numpy()
    assert (plain_numbers(dtype, raw) == stored.float().double().numpy()).all()


def test_float64_is_read_as_float32() -> None:
    values = torch.from_numpy(_values(2))
    found = plain_numbers(DType.F64, values.view(torch.uint8).numpy())
    assert (found == values.float().double().numpy()).all()


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_what_is_rounded_is_as_near_as_can_be(dtype: DType) -> None:
    values = _values(3)
    nearest = torch.from_numpy(values).to(TORCH[dtype]).double().numpy()
    np.testing.assert_allclose(nearest_distance(dtype, values), np.abs(nearest - values), atol=1e-300)


@pytest.mark.parametrize("form", list(formats()))
def test_codes_are_what_the_format_says(form: Format) -> None:
    packing = usual_quant_spec(form, (256, 256))
    chance = np.random.default_rng(4)
    codes = chance.integers(0, 256, packing.codes_nbytes(256), dtype=np.uint8)
    if form.is_fp8:
        codes[(codes & 127) == 127] = 8
    grid = (chance.random(packing.scales_nbytes(256) or 1) * 60 + 30).astype(np.uint8)
    whole = np.float32(3.5)
    stored = grid
    if packing.scale_dtype is DType.BF16:
        stored = torch.rand(len(grid) // 2 or 1).bfloat16().view(torch.uint8).numpy()
    elif packing.scale_dtype is DType.F32:
        stored = torch.rand(len(grid) // 4).view(torch.uint8).numpy()
    encoding = encoding_of(packing)
    tensor_scale = np.frombuffer(
        torch.tensor([3.5]).bfloat16().view(torch.uint8).numpy().tobytes()
        if form == FP8_TENSOR
        else whole.tobytes(),
        np.uint8,
    )
    steps = code_steps(encoding, stored, tensor_scale, rows=(0, 256), columns=256)
    found = coded_numbers(encoding, codes, steps)
    wanted = reference_decode(packing, codes, stored, 3.5)
    assert (found == wanted).all()
    # What codes mean is at no distance from what codes can be, but for the rounding to float32.
    distance = nearest_coded_distance(form, found, steps)
    assert (distance <= 2.0**-22 * np.abs(found)).all()
    assert (nearest_coded_distance(form, found * 0 + 1e9, steps) == -1).all()


@pytest.mark.parametrize("form", list(formats()), ids=lambda form: form.name)
def test_a_scale_that_is_made_for_its_block_is_told_from_a_larger_one(form: Format) -> None:
    packing = usual_quant_spec(form, (256, 256))
    sizes = torch.logspace(-3, 2, 256 * 256).view(256, 256)[:, torch.randperm(256)]
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)) * sizes
    codec, whole = codec_of(form), None
    if packing.tensor_scale_dtype is not None:
        whole = codec.fresh_tensor_scale(packing, codec.largest(packing, values))
    made = codec.encode(packing, values, tensor_scale=whole)
    encoding = encoding_of(packing)
    peaks = code_magnitudes(form, made.codes.numpy()).reshape(256, 256)
    stored = made.scales.numpy()
    if form == FP8_TENSOR:
        assert whole is not None
        stored = store_scales(packing.scale_dtype, whole).numpy()
    scales = scale_numbers(packing.scale_dtype, stored)
    height, width = packing.block
    peaks = peaks.reshape(256 // height, height, 256 // width, width).max((1, 3)).reshape(-1)
    least = least_peaks(encoding, scales)
    assert (peaks >= least).all()
    # With a scale of four times, codes are a quarter.
    assert (peaks / 4 < least_peaks(encoding, scales * 4)).all()


def test_chance_is_the_one_that_methods_draw_by() -> None:
    for key in (0, 1, 2**63 + 12345, 2**64 - 1):
        for start in (0, 1, 2**40 + 7):
            indices = np.arange(start, start + 1001, dtype=np.int64)
            kept = keep_mask(key, start, 1001, 0.37, CPU).numpy()
            assert ((element_numbers(key, indices) < number_limit(0.37)) == kept).all()
            drawn = normal(key, start, 1001, CPU).numpy()
            np.testing.assert_allclose(normal_numbers(key, indices), drawn, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("digits", [1, 2, 9])
def test_magnitudes_of_ranks_are_those_of_a_sort(digits: int) -> None:
    """With many equal ones, and without."""
    values = np.abs(np.round(_values(5), digits)).astype(np.float32).astype(np.float64)
    ordered, ranks = np.sort(values)[::-1], [0, 1, 37, 2000, len(values)]
    # A second kind of numbers, of which none is asked for.
    runs = [np.stack([part, part[::-1]]) for part in (values[:1000], values[1000:])]
    found, nothing = magnitudes_of_ranks(lambda: iter(runs), [ranks, []])
    assert nothing == []
    for rank, cut in zip(ranks, found, strict=True):
        if not rank:
            assert cut == RankThreshold(np.inf)
            continue
        assert cut.threshold == ordered[rank - 1]
        tied, above = int((values == cut.threshold).sum()), int((values > cut.threshold).sum())
        assert cut.limit == number_limit((rank - above) / tied)
        kept = int(cut.keeps(values, np.arange(len(values))).sum())
        assert above <= kept <= above + tied
