"""Decoding, combining and encoding FP8 in one call gives the bits of doing them one after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from raymerge.checkpoints.quantisation.block_codec import Encoded, ErrorSums, StoredScales, load_scales
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL
from raymerge.dtypes import DType
from raymerge.kernels.block_scales import STRIP, combine_and_encode
from raymerge.methods.combine import anchored_sum, combine

Coefficients = tuple[float, ...]
HALVES = (0.5, 0.5)


def _packing(
    shape: tuple[int, int], form: Format = FP8_BLOCK, dtype: DType = DType.F32, *, power: bool = False
) -> QuantSpec:
    return dataclasses.replace(usual_quant_spec(form, shape), scale_dtype=dtype, power_of_two=power)


def _parents(quant_spec: QuantSpec, count: int) -> list[Encoded]:
    """Numbers of several magnitudes, with blocks of zeros."""
    generator = torch.Generator().manual_seed(quant_spec.rows + quant_spec.columns)
    found = []
    for _ in range(count):
        values = torch.randn(quant_spec.rows, quant_spec.columns, generator=generator)
        values *= torch.rand(quant_spec.rows, 1, generator=generator) * 0.1
        values[: quant_spec.block[0], : quant_spec.block[1]] = 0.0
        found.append(codec_of(quant_spec.format).encode(quant_spec, values))
    return found


def _in_steps(
    quant_spec: QuantSpec, parents: list[Encoded], coefficients: Coefficients, kept: Tensor | None
) -> tuple[Encoded, ErrorSums]:
    codec = codec_of(quant_spec.format)
    sources = torch.stack([codec.decode(quant_spec, each).view(-1) for each in parents])
    values = combine(sources, coefficients, None).view(quant_spec.shape)
    encoded = codec.encode(quant_spec, values, StoredScales(kept))
    return encoded, codec.error_sums(quant_spec, values, encoded)


def _at_once(
    quant_spec: QuantSpec, parents: list[Encoded], coefficients: Coefficients, held: int
) -> tuple[bool, NDArray[np.uint8], NDArray[np.float32], float, float]:
    grid = -1, quant_spec.scale_row_length
    steps = [load_scales(quant_spec.scale_dtype, each.scales).view(grid).numpy() for each in parents]
    total = anchored_sum(coefficients)
    codes, made = np.empty(quant_spec.shape, np.uint8), np.empty_like(steps[0])
    # With something before and between them, as in the memory of a load.
    memory = np.concatenate([np.append(np.zeros(5, np.uint8), each.codes.numpy()) for each in parents])
    places = np.arange(len(parents)) * (parents[0].codes.numel() + 5) + 5
    is_bf16 = quant_spec.scale_dtype is DType.BF16
    found = combine_and_encode(
        codes,
        made,
        memory,
        places,
        np.stack(steps),
        quant_spec.block,
        np.array(total.coefficients),
        total.anchor,
        total.excess,
        held,
        (quant_spec.power_of_two, is_bf16),
    )
    return found[0], codes, made, found[1], found[2]


@pytest.mark.parametrize(
    "quant_spec",
    [
        _packing((256, 384)),
        _packing((130, 200)),
        _packing((3, 5)),
        _packing((256, STRIP + 300)),
        _packing((256, 256), power=True),
        _packing((256, 256), dtype=DType.BF16),
        _packing((9, 2 * STRIP + 7), FP8_CHANNEL),
    ],
)
@pytest.mark.parametrize(
    "coefficients", [HALVES, (0.3, 0.7), (1.5, 0.25), (0.2, 0.3, 0.5), (-1.0, 2.0)], ids=str
)
@pytest.mark.parametrize("held", [0, -1])
def test_bits_are_those_of_one_step_after_the_other(
    quant_spec: QuantSpec, coefficients: Coefficients, held: int
) -> None:
    parents = _parents(quant_spec, len(coefficients))
    kept = parents[held].scales if held >= 0 else None
    expected, sums = _in_steps(quant_spec, parents, coefficients, kept)
    is_finite, codes, steps, errors, squares = _at_once(quant_spec, parents, coefficients, held)
    assert is_finite
    assert codes.tobytes() == expected.codes.numpy().tobytes()
    assert steps.ravel().tolist() == load_scales(quant_spec.scale_dtype, expected.scales).tolist()
    assert errors == pytest.approx(sums.squared_errors, rel=1e-9)
    assert squares == pytest.approx(sums.squared_values, rel=1e-9)


def test_a_model_and_itself_give_its_bytes_and_no_error() -> None:
    """Also where its scales are not those that would be chosen: the largest code is not used everywhere."""
    quant_spec = _packing((200, 300))
    generator = np.random.default_rng(3)
    codes = torch.from_numpy(generator.integers(0, 120, 200 * 300, dtype=np.uint8))
    scales = torch.rand(2 * 3, generator=torch.Generator().manual_seed(4)).view(torch.uint8)
    is_finite, made, steps, errors, _ = _at_once(quant_spec, [Encoded(codes, scales)] * 2, HALVES, 0)
    assert is_finite
    assert made.tobytes() == codes.numpy().tobytes()
    assert steps.tobytes() == scales.numpy().tobytes()
    assert errors == 0.0


@pytest.mark.parametrize("magnitude", [2.0**-140, 2.0**-126, 2.0**-118, 1e30])
def test_scales_of_tiny_and_huge_numbers_are_those_of_the_codec(magnitude: float) -> None:
    for quant_spec in (
        _packing((128, 128)),
        _packing((128, 128), power=True),
        _packing((128, 128), dtype=DType.BF16),
    ):
        codec = codec_of(quant_spec.format)
        values = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(1)) * magnitude
        parents = [codec.encode(quant_spec, each) for each in values]
        expected, _ = _in_steps(quant_spec, parents, HALVES, None)
        is_finite, codes, steps, _, _ = _at_once(quant_spec, parents, HALVES, -1)
        assert is_finite
        assert codes.tobytes() == expected.codes.numpy().tobytes()
        assert steps.ravel().tolist() == load_scales(quant_spec.scale_dtype, expected.scales).tolist()


@pytest.mark.parametrize("place", [0, 77, 200 * 300 - 1])
def test_a_code_of_nan_is_found(place: int) -> None:
    quant_spec = _packing((200, 300))
    one, two = _parents(quant_spec, 2)
    two.codes[place] = 0x7F
    assert not _at_once(quant_spec, [one, two], HALVES, 0)[0]


def test_an_infinite_scale_is_found() -> None:
    quant_spec = _packing((200, 300))
    one, two = _parents(quant_spec, 2)
    two.scales.view(torch.float32)[4] = float("inf")
    assert not _at_once(quant_spec, [one, two], HALVES, 0)[0]
