"""Magnitudes of stored deltas are counted as those of the same deltas in float32."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from raymerge.kernels.selection import Bins, count, count_all


def counted(drawn: NDArray[np.uint32], bins: Bins, counts: NDArray[np.int64]) -> int:
    """Count patterns in one place; how many are above."""
    values, above = drawn.view(np.float32), np.zeros(1, np.int64)
    count(values, values, (bins,), (counts,), above)
    return int(above[0])


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
