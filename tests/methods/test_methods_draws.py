"""Normal and uniform numbers: functions of key and index, and as good as chance."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.method_kit import FEW_BYTES, same_bits, threads

from raymerge.methods import BLOCK, normal, random_key, uniform
from raymerge.methods import reduce as reduce_module
from raymerge.methods.random import _points

CPU = torch.device("cpu")
MANY = 1 << 20
PLAIN = NormalDist()
WORD = 1 << 64

GOLDEN_UNIFORM = [12997285, 5009966, 3510748, 1513253]
GOLDEN_NORMAL = [0.7544103264808655, -0.5283815860748291, -0.8090022802352905, -1.339543342590332]

Draw = Callable[[int, int, int, torch.device], torch.Tensor]
DRAWS: tuple[Draw, ...] = (normal, uniform)


def plain_word(key: int, index: int) -> int:
    """The hash of the masks in Python's own integers, as an unsigned number with its top bit flipped."""
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"raymerge word").digest()
    state = (index * 0x9E3779B97F4A7C15 + key) % WORD
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state + int.from_bytes(digest, "little")) % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return (state + WORD // 2) % WORD


@settings(deadline=None, max_examples=50)
@given(key=st.integers(0, WORD - 1), start=st.integers(0, 2**45))
def test_uniform_follows_its_definition(key: int, start: int) -> None:
    found = uniform(key, start, 20, CPU).tolist()
    assert found == [(plain_word(key, start + offset) >> 40) / 2**24 for offset in range(20)]


@settings(deadline=None, max_examples=50)
@given(key=st.integers(0, WORD - 1), start=st.integers(0, 2**45))
def test_normal_follows_its_definition(key: int, start: int) -> None:
    points = [((plain_word(key, start + offset) >> 12) + 0.5) / 2**52 for offset in range(20)]
    expected = torch.tensor([PLAIN.inv_cdf(point) for point in points])
    torch.testing.assert_close(normal(key, start, 20, CPU), expected, rtol=2e-7, atol=1e-12)


def test_numbers_never_change() -> None:
    """Frozen: other numbers here mean other bytes in every output that was made with them."""
    key = random_key(42, "model.layers.0.mlp.up_proj.weight", 0)
    assert [int(number * 2**24) for number in uniform(key, 2**33 + 5, 4, CPU).tolist()] == GOLDEN_UNIFORM
    assert normal(key, 2**33 + 5, 4, CPU).tolist() == pytest.approx(GOLDEN_NORMAL, rel=1e-6)


@pytest.mark.parametrize("draw", DRAWS)
@settings(deadline=None, max_examples=30)
@given(start=st.integers(0, 2**40), cuts=st.lists(st.integers(0, 40_000), max_size=4))
def test_any_split_gives_the_same_numbers(draw: Draw, start: int, cuts: list[int]) -> None:
    bounds = sorted({0, *cuts, 40_000})
    parts = [draw(9, start + begin, end - begin, CPU) for begin, end in itertools.pairwise(bounds)]
    assert same_bits(torch.cat(parts), draw(9, start, 40_000, CPU))


@pytest.mark.parametrize("draw", DRAWS)
def test_chunks_and_threads_do_not_show(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(3, 11, MANY, CPU)
    with threads(2):
        assert same_bits(draw(3, 11, MANY, CPU), whole)
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", reduce_module.PIECE)
    assert same_bits(draw(3, 11, MANY, CPU), whole)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("count", [300, BLOCK, 9 * BLOCK])
def test_temporaries_stay_small(draw: Draw, count: int) -> None:
    with AllocationMeter() as meter:
        numbers = draw(5, 3, count, CPU)
    assert meter.peak_bytes <= numbers.nbytes + 4 * 1.5 * max(count, BLOCK) + FEW_BYTES


# As chance gives --------------------------------------------------------------------------------------


def test_the_normal_fills_its_quantiles_evenly() -> None:
    """Chi-square over 256 ranges of equal probability, the outermost open to infinity."""
    edges = torch.tensor([PLAIN.inv_cdf(number / 256) for number in range(1, 256)])
    ranges = torch.bucketize(normal(random_key(1, "t", 0), 0, MANY, CPU), edges)
    counts = torch.bincount(ranges, minlength=256).double()
    chi_square = float(((counts - MANY / 256) ** 2 / (MANY / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


# Extremes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [-(1 << 63), (1 << 63) - 1, -1, 0, 1 << 11, -(1 << 12)])
def test_every_hash_gives_a_finite_number(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest hash and the largest are the tails; those about 0 the middle."""
    monkeypatch.setattr("raymerge.methods.random.hashed", lambda _, words: words.fill_(word))
    points, shares = _points(1, 0, 3, CPU), uniform(1, 0, 3, CPU)
    point = ((word >> 12) + 0.5) / 2**52 + 0.5
    assert 0 < point < 1
    assert points.tolist() == [point] * 3
    numbers = torch.special.ndtri(points)
    assert numbers.tolist() == pytest.approx([PLAIN.inv_cdf(point)] * 3)
    assert float(numbers.abs().max()) <= 8.21
    assert shares.tolist() == [((word >> 40) + 2**23) / 2**24] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same() -> None:
    """Uniform numbers to the last bit, normal ones as near as the two libraries are."""
    gpu = torch.device("cuda")
    for start in (0, 2**33 + 5):
        assert torch.equal(uniform(5, start, MANY, gpu).cpu(), uniform(5, start, MANY, CPU))
        torch.testing.assert_close(
            normal(5, start, MANY, gpu).cpu(), normal(5, start, MANY, CPU), rtol=3e-7, atol=1e-12
        )
        whole = normal(5, start, MANY, gpu)
        parts = (normal(5, start, 100_003, gpu), normal(5, start + 100_003, MANY - 100_003, gpu))
        assert same_bits(torch.cat(parts).cpu(), whole.cpu())
