"""INT4 finds the scale again that numbers had when they were codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from kits.codec_kit import bits, inherited, seeds
from torch import Tensor

from raymerge.checkpoints.quantisation.codec import load_scales
from raymerge.checkpoints.quantisation.encoding import Format, QuantSpec, usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.checkpoints.quantisation.int4 import INT4, grid_steps, grid_steps_in_loops, grid_steps_in_torch
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4
from raymerge.dtypes import DType

CODEC = codec_of(INT4)
ONE = usual_quant_spec(INT4, (1, 32))


def coded(rows: int, largest: int, seed: int) -> Tensor:
    """Codes of which one of each row is ``largest``, and one is 1; float32 [rows, 32]."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-7, 8, (rows, 32)).astype(np.float32)
    codes[:, 5], codes[:, 17] = largest, 1
    return torch.from_numpy(codes)


def row(*values: float) -> Tensor:
    """A block that begins with these values and ends in zeros."""
    return torch.tensor([[*values, *(0.0,) * (32 - len(values))]])


def decoded(packing: QuantSpec, values: Tensor) -> Tensor:
    return CODEC.decode(packing, *CODEC.encode(packing, values))


@pytest.mark.parametrize("largest", [7, -7, -8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_times_a_scale_return_whatever_the_scale_is(largest: int, dtype: torch.dtype) -> None:
    """All mantissas that a scale in bfloat16 may have; bfloat16 rounds most of the products."""
    scales = torch.arange(0x3C80, 0x3D80, dtype=torch.int16).view(torch.bfloat16)
    codes = coded(len(scales), largest, 3)
    packing = usual_quant_spec(INT4, (len(scales), 32))
    values = (codes * scales.float().view(-1, 1)).to(dtype).float()
    found = CODEC.encode(packing, values)
    assert found.scales.view(torch.bfloat16).equal(scales)
    assert decoded(packing, values).equal(codes * scales.float().view(-1, 1))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_what_was_encoded_once_is_not_changed_by_way_of_plain_numbers(kept: torch.dtype) -> None:
    packing = usual_quant_spec(INT4, (64, 64))
    first = CODEC.encode(packing, torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * 0.02)
    values = CODEC.decode(packing, *first).to(kept).float()
    again = CODEC.encode(packing, values)
    assert again.codes.equal(first.codes)
    assert again.scales.equal(first.scales)


@pytest.mark.parametrize(
    ("form", "least", "most"), [(FP8_BLOCK, 0.0018, 0.0025), (INT4, 0.0012, 0.0018), (MXFP4, 0.0, 0.0)]
)
def test_encoding_once_more_after_bfloat16_loses_little(form: Format, least: float, most: float) -> None:
    """The figures of docs/reliability.md."""
    packing, codec = usual_quant_spec(form, (256, 256)), codec_of(form)
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    rounded = codec.decode(packing, *codec.encode(packing, values)).bfloat16().float()
    again = codec.error_sums(packing, rounded, codec.encode(packing, rounded))
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
