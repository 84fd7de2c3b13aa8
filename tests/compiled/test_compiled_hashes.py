"""The compiled hash against the definition in Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.kernels.hashes import fill_factors, fill_numbers, hashed, hashed_pair, keep

WORD = 1 << 64
words = st.integers(0, WORD - 1)
indices = st.one_of(st.integers(0, 3), st.integers(0, 2**45), st.integers(2**32 - 2, 2**32 + 2))
limits = st.one_of(st.integers(0, 2**32), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32]))


def plain_hashed(first: int, second: int, index: int) -> int:
    state = (index * 0x9E3779B97F4A7C15 + first) % WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 + second) % WORD
    return (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD


def plain_number(first: int, second: int, index: int) -> int:
    state = plain_hashed(first, second, index // 2)
    state ^= state >> 31
    return state >> 32 if index % 2 else state % (1 << 32)


@settings(deadline=None, max_examples=100)
@given(first=words, second=words, index=indices, limit=limits)
def test_single_elements(first: int, second: int, index: int, limit: int) -> None:
    keys = np.uint64(first), np.uint64(second)
    assert hashed(*keys, index) == plain_hashed(first, second, index)
    number = plain_number(first, second, index)
    halves = divmod(int(hashed_pair(*keys, index // 2)), 1 << 32)
    assert halves[1 - index % 2] == number
    assert keep(*keys, index, limit) == (number < limit)
    assert not keep(*keys, index, number)
    assert keep(*keys, index, number + 1)


@settings(deadline=None, max_examples=100)
@given(first=words, second=words, start=indices, count=st.integers(0, 70), limit=limits)
def test_runs(first: int, second: int, start: int, count: int, limit: int) -> None:
    keys = np.uint64(first), np.uint64(second)
    expected = [plain_number(first, second, start + offset) for offset in range(count)]
    numbers, factors = np.empty(count, np.int32), np.empty(count, np.float32)
    fill_numbers(*keys, start, numbers)
    assert numbers.tolist() == [number - 2**31 for number in expected]
    fill_factors(*keys, start, limit, np.float32(2.5), factors)
    assert factors.tolist() == [2.5 * (number < limit) for number in expected]
    assert not np.signbit(factors).any()


@pytest.mark.parametrize("start", [0, 5, 2**40 + 1])
def test_nothing_is_written_outside(start: int) -> None:
    keys = np.uint64(3), np.uint64(4)
    for count in (0, 1, 2, 63):
        room = np.full(count + 2, 7, np.int32)
        fill_numbers(*keys, start, room[1:-1])
        assert (room[0], room[-1]) == (7, 7)
