"""The two forms of every codec's arithmetic, in torch and in compiled loops, agree to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.codec_kit import bits, inherited, seeds
from torch import Tensor

from raymerge.checkpoints.quantisation.codec import Blockwise, Codec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4

FORMS = {"fp8": codec_of(FP8_BLOCK), "e2m1": codec_of(MXFP4), "int4": codec_of(INT4)}
codecs = st.sampled_from(sorted(FORMS))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1e30, -1e30, 448.0, 464.0, 480.0, 6.0]


def per_byte(codec: Codec) -> int:
    return 1 if codec is FORMS["fp8"] else 2


def decode(form: Blockwise, codes: Tensor, steps: Tensor, block: tuple[int, int], columns: int) -> Tensor:
    values = torch.empty(len(codes), columns)
    form.decode(codes, steps, block, values)
    return values


def patterns(exponents: range, signs: tuple[int, ...] = (0, 1)) -> Tensor:
    """float32 numbers of all upper bits, with lower bits of ties and next to ties; [1, n]."""
    found = [
        sign << 31 | exponent << 23 | upper << 18 | lower
        for sign, exponent, upper in itertools.product(signs, exponents, range(32))
        for lower in (0, 1, 2**17 - 1, 2**17, 2**17 + 1, 2**18 - 1)
    ]
    return torch.from_numpy(np.array(found, np.uint32).view(np.float32)).view(1, -1)


@pytest.mark.parametrize("kind", FORMS)
def test_every_code_decodes_to_the_same_bits(kind: str) -> None:
    codec = FORMS[kind]
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    columns = 256 * per_byte(codec)
    for step in (1.0, 0.3, 2.0**-149, 2.0**-126, 3e38, 0.0, -2.5):
        steps = torch.tensor([[step]])
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
    steps, block = torch.ones(1, 1), (1, values.shape[1])
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
    values = torch.from_numpy(generator.standard_normal((rows, columns)) * 3).float()
    which = torch.from_numpy(generator.integers(0, len(SPECIAL) * 8, values.shape))
    for place, special in enumerate(SPECIAL):
        values[which == place] = special
    loops, in_torch, block = codec.in_loops, codec.in_torch, (height, width)
    codes = loops.encode(values, steps, block, columns // of)
    assert codes.equal(in_torch.encode(values, steps, block, columns // of))
    decoded = decode(loops, codes, steps, block, columns)
    assert bits(decoded) == bits(decode(in_torch, codes, steps, block, columns))
    assert bits(loops.largest(values, block)) == bits(in_torch.largest(values, block))
    mixed = torch.where(torch.from_numpy(generator.random((rows, 1)) < 0.7), decoded, values)
    fits = loops.fits(mixed, steps, block, columns // of)
    assert fits.equal(in_torch.fits(mixed, steps, block, columns // of))
    finite = values.nan_to_num(0.0, 1.0, -1.0)
    codes = loops.encode(finite, steps, block, columns // of)
    mine, theirs = (each.squares(codes, steps, block, finite) for each in (loops, in_torch))
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_values_with_gaps_are_encoded_as_those_without() -> None:
    codec = FORMS["fp8"]
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(1)).t()
    steps = torch.full((3, 2), 0.01)
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
