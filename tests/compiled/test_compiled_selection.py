"""The parts of counting, each against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raymerge.kernels.selection import (
    MIXED,
    RUN,
    Bins,
    bin_of_rank,
    count,
    count_all,
    make_finder,
    places,
    write_deviations,
)

MASK = np.uint32(0x7FFF_FFFF)


def patterns(count: int, seed: int = 0) -> NDArray[np.uint32]:
    """Any bits at all, NaN among them."""
    drawn: NDArray[np.uint32] = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return drawn


def counted(drawn: NDArray[np.uint32], bins: Bins, counts: NDArray[np.int64]) -> int:
    """Count patterns in one place; how many are above."""
    values, above = drawn.view(np.float32), np.zeros(1, np.int64)
    count(values, values, (bins,), (counts,), above)
    return int(above[0])


def binned(distances: NDArray[np.int64], shift: int, num_bins: int) -> NDArray[np.int64]:
    """How many lie in each bin, and whether not all of them are its first pattern."""
    mixed = np.zeros(num_bins, np.int64)
    mixed[distances[distances % (1 << shift) != 0] >> shift] = MIXED
    return np.bincount(distances >> shift, minlength=num_bins) | mixed


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize(("low", "high"), [(0, 1 << 29), (1 << 30, 1 << 31), (77, 78), (1 << 30, 3 << 29)])
def test_count(size: int, low: int, high: int) -> None:
    drawn, shift = patterns(size), 14
    if size:
        drawn[size // 2] = 77 | 1 << 31
    counts = np.zeros(((high - low - 1) >> shift) + 1, np.int64)
    above = counted(drawn, Bins(np.uint32(low), np.uint32(high), np.uint32(shift)), counts)
    magnitudes = (drawn & MASK).astype(np.int64)
    inside = magnitudes[(magnitudes >= low) & (magnitudes < high)] - low
    assert above == np.count_nonzero(magnitudes >= high)
    assert np.array_equal(counts, binned(inside, shift, counts.size))


@pytest.mark.parametrize("size", [0, 1, 3000])
def test_count_all(size: int) -> None:
    drawn = patterns(size, 1)
    counts = np.zeros(1 << 16, np.int64)
    bits = count_all(drawn.view(np.float32), drawn.view(np.float32), np.uint32(15), counts)
    assert bits == np.bitwise_or.reduce(drawn & MASK, initial=0)
    assert np.array_equal(counts, binned((drawn & MASK).astype(np.int64), 15, 1 << 16))


@pytest.mark.parametrize("odd", [False, True])
def test_a_bin_is_mixed_from_the_first_pattern_that_is_not_its_first(odd: bool) -> None:
    drawn = np.full(3, 64, np.uint32)
    drawn[0] |= np.uint32(odd)
    counts = np.zeros(8, np.int64)
    counted(drawn, Bins(np.uint32(0), np.uint32(128), np.uint32(4)), counts)
    counted(drawn[1:], Bins(np.uint32(0), np.uint32(128), np.uint32(4)), counts)
    assert counts.tolist() == [0, 0, 0, 0, 5 | odd * MIXED, 0, 0, 0]


@settings(deadline=None, max_examples=60)
@given(chosen=st.sets(st.integers(0, RUN - 1)))
def test_places(chosen: set[int]) -> None:
    finder = make_finder()
    finder.flags[list(chosen)] = 1
    assert sorted(finder.found[: places(finder)]) == sorted(chosen)


@pytest.mark.parametrize("step", [1, 2])
def test_places_of_dense_flags(step: int) -> None:
    finder = make_finder()
    finder.flags[::step] = 1
    assert sorted(finder.found[: places(finder)]) == list(range(0, RUN, step))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 3077])
@pytest.mark.parametrize(
    "ends",
    [
        [(0, 1 << 29)],
        [(0x3D00_0000, 0x3E00_0000)],
        [(1 << 31, 1 << 31)],
        [(0x3C00_0000, 0x3D00_0000), (0x4000_0000, 0x4100_0000)],
        [(0x3C00_0000, 0x4000_0000), (0x3D00_0000, 1 << 31)],
        [(1 << 31, 1 << 31), (0x3D00_0000, 0x3E00_0000)],
    ],
)
def test_magnitudes_of_a_stored_delta_are_counted_as_they_would_be_written_down(
    size: int, ends: list[tuple[int, int]]
) -> None:
    """Of any two patterns: NaN, infinities and what underflows among them; in two places at once, or none."""
    words = np.random.default_rng(size).integers(0, 1 << 16, 2 * size + 5, dtype=np.uint16)
    near = words[2 : 2 + size : 2]
    words[3 + size : 3 + size + near.size] = near ^ 3
    first = np.array([3 + size, 2], np.int64)
    with np.errstate(all="ignore"):
        left, right = ((words[at : at + size].astype(np.uint32) << 16).view(np.float32) for at in first)
        deltas = right - left
    bins = tuple(Bins(np.uint32(low), np.uint32(high), np.uint32(12)) for low, high in ends)
    ours, theirs = (tuple(np.zeros((high - low >> 12) + 1, np.int64) for low, high in ends) for _ in "ab")
    above = np.full(len(ends), 5, np.int64)
    count(words[first[1] :][:size], words[first[0] :][:size], bins, ours, above)
    patterns = deltas.view(np.uint32)
    assert [
        5 + counted(patterns, each, counts) for each, counts in zip(bins, theirs, strict=True)
    ] == above.tolist()
    assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("size", [0, 1, 1025])
def test_every_magnitude_of_a_stored_delta_is_counted(size: int) -> None:
    words = np.random.default_rng(size).integers(0, 1 << 16, 2 * size, dtype=np.uint16)
    with np.errstate(all="ignore"):
        base, source = ((row.astype(np.uint32) << 16).view(np.float32) for row in words.reshape(2, -1))
        deltas = source - base
    ours, theirs = np.zeros((2, 1 << 16), np.int64)
    count_all(words[size:], words[:size], np.uint32(15), ours)
    count_all(deltas, deltas, np.uint32(15), theirs)
    assert np.array_equal(ours, theirs)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), bins=st.sampled_from([1, 5, RUN, RUN + 1, 3 * RUN + 7]))
def test_bin_of_rank(data: st.DataObject, bins: int) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    counts = generator.integers(0, 3, bins) * generator.integers(0, 2, bins)
    rank = data.draw(st.integers(1, int(counts.sum()) + 2))
    place, above = bin_of_rank(counts, rank)
    if rank > counts.sum():
        assert (place, above) == (-1, counts.sum())
    else:
        assert above == counts[place + 1 :].sum() < rank <= above + counts[place]


@pytest.mark.parametrize("num_sources", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 1024, 2500])
def test_spread(num_sources: int, size: int) -> None:
    stride = size + 3
    deltas = np.random.default_rng(2).standard_normal((num_sources, stride)).astype(np.float32)
    deltas[:, : size // 2] = deltas[0, : size // 2]
    out = np.empty(size, np.float32)
    differing = write_deviations(deltas.reshape(-1), stride, num_sources, out)
    used = deltas[:, :size].astype(np.float64)
    expected = np.sqrt(((used - used.mean(axis=0)) ** 2).sum(axis=0))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-12)
    assert differing == np.count_nonzero(out)
    assert not out[: size // 2].any()
