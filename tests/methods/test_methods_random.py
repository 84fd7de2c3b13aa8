"""Random masks and numbers: functions of key and index, and as good as chance."""

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

from raymerge.methods import BLOCK, keep_mask, normal, random_key, uniform
from raymerge.methods import reduce as reduce_module
from raymerge.methods.random import (
    _points,
    _write_numbers,
    chance_of,
    keep_factors,
    keep_some,
    limit_of,
    limits_of,
    write_numbers,
)

CPU = torch.device("cpu")
MANY = 1 << 20
WORD = 1 << 64

GOLDEN_KEY = 4517192690449279934
GOLDEN_START = "1011000010001011101010111001100110100110001001101110001111101111"
GOLDEN_FAR = "0000000000010000010100101100000001000100011010110011100000000010"


def plain_hash(key: int, index: int) -> int:
    """The definition in Python's own integers, without the last xor."""
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"raymerge word").digest()
    state = (index * 0x9E3779B97F4A7C15 + key) % WORD
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state + int.from_bytes(digest, "little")) % WORD
    return (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD


def plain_number(key: int, index: int) -> int:
    state = plain_hash(key, index // 2)
    state ^= state >> 31
    return state >> 32 if index % 2 else state % (1 << 32)


def plain_keep(key: int, index: int, density: float) -> bool:
    return plain_number(key, index) < density * 2**32


def numbers(key: int, start: int, count: int) -> torch.Tensor:
    return write_numbers(key, start, out=torch.empty(count, dtype=torch.int32))


def as_text(mask: torch.Tensor) -> str:
    return "".join("01"[value] for value in mask.tolist())


@settings(deadline=None, max_examples=50)
@given(key=st.integers(0, 2**64 - 1), start=st.integers(0, 2**45), density=st.floats(0.001, 0.999))
def test_mask_follows_its_definition(key: int, start: int, density: float) -> None:
    mask = keep_mask(key, start, 20, density, CPU)
    assert mask.tolist() == [plain_keep(key, start + offset, density) for offset in range(20)]


def test_masks_never_change() -> None:
    """Frozen: another text here means other bytes in every DARE merge ever published."""
    key = random_key(42, "model.layers.0.mlp.up_proj.weight", 1)
    assert key == GOLDEN_KEY
    assert as_text(keep_mask(key, 0, 64, 0.5, CPU)) == GOLDEN_START
    assert as_text(keep_mask(key, 2**33 + 5, 64, 0.25, CPU)) == GOLDEN_FAR


@settings(deadline=None, max_examples=50)
@given(key=st.integers(0, 2**64 - 1), start=st.integers(0, 2**45), count=st.integers(0, 50))
def test_numbers_follow_their_definition(key: int, start: int, count: int) -> None:
    expected = [plain_number(key, start + offset) - 2**31 for offset in range(count)]
    assert numbers(key, start, count).tolist() == expected
    assert _write_numbers(key, start, torch.empty(count, dtype=torch.int32)).tolist() == expected


@settings(deadline=None, max_examples=50)
@given(
    key=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**45),
    count=st.integers(0, 300),
    density=st.one_of(st.floats(0, 1), st.sampled_from([2.0**-32, 2.0**-40, 1 - 2.0**-33, 1 - 2.0**-32])),
)
def test_factors_and_single_elements_follow_the_mask(
    key: int, start: int, count: int, density: float
) -> None:
    mask = keep_mask(key, start, count, density, CPU)
    factors = keep_factors(key, start, density, 1 / 3, out=torch.empty(count))
    assert same_bits(factors, mask * torch.tensor(1 / 3))
    assert torch.equal(keep_some(key, torch.arange(start, start + count), density), mask)


# Densities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "limit"),
    [
        (0.0, 0),
        (-0.5, 0),
        (5e-324, 1),
        (2.0**-32, 1),
        (1.5 * 2.0**-32, 2),
        (0.25, 2**30),
        (1 - 2.0**-32, 2**32 - 1),
        (1 - 2.0**-33, 2**32),
        (1.0, 2**32),
        (7.0, 2**32),
    ],
)
def test_densities_are_rounded_up(density: float, limit: int) -> None:
    """Hence one that is not 0 never keeps nothing at all."""
    assert limit_of(density) == limit
    assert chance_of(density) == limit / 2**32
    assert limits_of(torch.tensor([density], dtype=torch.float64)).tolist() == [limit]


def test_an_element_is_kept_from_its_own_number_on() -> None:
    number = plain_number(3, 77)
    for density, kept in ((number, False), (number + 1e-3, True), (number + 1, True)):
        assert bool(keep_mask(3, 77, 1, density / 2**32, CPU)) == kept


# Chunks and tiles -------------------------------------------------------------------------------------


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = keep_mask(3, 11, MANY, 0.4, CPU)
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", reduce_module.PIECE)
    assert torch.equal(keep_mask(3, 11, MANY, 0.4, CPU), whole)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.0, 1.5])
def test_nothing_and_everything(density: float) -> None:
    mask = keep_mask(1, 7, 100, density, CPU)
    assert bool(mask.all()) if density >= 1 else not bool(mask.any())


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
def test_runs_of_eight_are_equally_likely_patterns(density: float) -> None:
    """Chi-square over all 256 patterns of eight neighbours."""
    bits = keep_mask(random_key(2, "t", 0), 0, MANY, density, CPU).view(-1, 8).int()
    patterns = (bits << torch.arange(8, dtype=torch.int32)).sum(dim=1)
    observed = torch.bincount(patterns, minlength=256).double()
    ones = torch.tensor([number.bit_count() for number in range(256)])
    expected = density**ones * (1 - density) ** (8 - ones) * (MANY // 8)
    usual = expected > 5
    chi_square = float(((observed - expected) ** 2 / expected)[usual].sum())
    freedom = int(usual.sum()) - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0, 1),
        (12345, 12345 ^ (1 << 63)),
        (7, 7 + 0x9E3779B97F4A7C15),
        (random_key(0, "a", 0), random_key(0, "a", 1)),
        (random_key(0, "a", 0), random_key(1, "a", 0)),
    ],
)
def test_keys_are_independent(one: int, other: int) -> None:
    """Also keys that differ by a step of the sequence: their masks must not be shifted copies."""
    other %= 1 << 64
    masks = keep_mask(one, 0, MANY, 0.5, CPU), keep_mask(other, 0, MANY, 0.5, CPU)
    for shift in (-1, 0, 1):
        agreeing = int((masks[0][1:-1] == masks[1].roll(shift)[1:-1]).sum())
        assert abs(agreeing - MANY / 2) < 5 * math.sqrt(MANY) / 2


def test_keys_tell_seed_tensor_and_source_apart() -> None:
    keys = {
        random_key(seed, tensor, source)
        for seed in (0, 1, 11, -1)
        for tensor in ("a", "b", "1/a", "é")
        for source in (0, 1, 11)
    }
    assert len(keys) == 4 * 4 * 3
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits() -> None:
    gpu = torch.device("cuda")
    for start in (0, 2**33 + 5):
        assert torch.equal(keep_mask(5, start, MANY, 0.3, gpu).cpu(), keep_mask(5, start, MANY, 0.3, CPU))


# Normal and uniform numbers --------------------------------------------------------------------------

PLAIN = NormalDist()

GOLDEN_UNIFORM = [12997285, 5009966, 3510748, 1513253]
GOLDEN_NORMAL = [0.7544103264808655, -0.5283815860748291, -0.8090022802352905, -1.339543342590332]

Draw = Callable[[int, int, int, torch.device], torch.Tensor]
DRAWS: tuple[Draw, ...] = (normal, uniform)


def plain_word(key: int, index: int) -> int:
    """The hash as an unsigned number with its top bit flipped."""
    return (plain_hash(key, index) + WORD // 2) % WORD


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


# As chance gives them --------------------------------------------------------------------------------------


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
