"""Masks: a function of key and index, and as good as chance."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import same_bits

from raymerge.methods import keep_mask, random_key
from raymerge.methods import reduce as reduce_module
from raymerge.methods.random import (
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

GOLDEN_KEY = 4517192690449279934
GOLDEN_START = "1011000010001011101010111001100110100110001001101110001111101111"
GOLDEN_FAR = "0000000000010000010100101100000001000100011010110011100000000010"


def plain_number(key: int, index: int) -> int:
    """The definition in Python's own integers."""
    word = 1 << 64
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"raymerge word").digest()
    state = (index // 2 * 0x9E3779B97F4A7C15 + key) % word
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % word
    state = (state + int.from_bytes(digest, "little")) % word
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % word
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
