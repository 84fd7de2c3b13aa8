"""Merging a few sources at once gives the bits of going source by source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.marks import slow_but
from numpy.typing import NDArray

from raymerge.kernels.elect import (
    AT_RANDOM,
    BY_MAGNITUDE,
    MOST,
    NO_CHANCES,
    NO_THRESHOLDS,
    Chances,
    FewInputs,
    Inputs,
    Selection,
    Sum,
    Thresholds,
    merge_few,
    merge_selected_stored,
    numbers_of,
)
from raymerge.kernels.selection import RUN

SPECIAL = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7F7F, 0x0080], np.uint16)
GUARD = 0x1234
levels = st.sampled_from([0.0, 0.25, 0.5, 1.0, float("inf")])
shares = st.sampled_from([0, 1, 1 << 30, 1 << 31, 1 << 32])


def stored(num_inputs: int, size: int, seed: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Few values, so that many deltas are at a level; some special; at odd places."""
    generator = np.random.default_rng(seed)
    values = generator.integers(-4, 5, (num_inputs, size)).astype(np.float32) * np.float32(0.25)
    if seed % 2:
        values += generator.standard_normal((num_inputs, size)).astype(np.float32)
    words = np.full(num_inputs * (size + 3) + 1, GUARD, np.uint16)
    places = 1 + (size + 3) * generator.permutation(num_inputs).astype(np.int64)
    for place, row in zip(places, values, strict=True):
        run = (row.view(np.uint32) >> 16).astype(np.uint16)
        odd = generator.random(size) < 0.03 * (seed % 3)
        run[odd] = generator.choice(SPECIAL, int(odd.sum()))
        words[place : place + size] = run
    return words, places


@st.composite
def all_cuts(draw: st.DrawFn, num_sources: int) -> Thresholds:
    """Levels or none, the second ones above the first, or the same and a part of it."""
    above: list[float] = []
    tied: list[float] = []
    limits: list[float] = []
    for _ in range(num_sources):
        level, share = draw(levels), draw(shares)
        is_tied, kind = draw(st.booleans()), draw(st.sampled_from(["none", "same", "above"]))
        first = (level, level, share) if is_tied else (draw(st.sampled_from([-1.0, level])), np.nan, 0)
        second = (np.inf, np.nan, 0)
        if kind == "same" and is_tied:
            second = (np.nextafter(np.float32(level), np.float32(-1)), level, share >> 1)
        elif kind == "above" and level < np.inf:
            second = (np.nextafter(np.float32(level + 1), np.float32(-1)), level + 1, draw(shares))
        for numbers, pair in zip((above, tied, limits), zip(first, second, strict=True), strict=True):
            numbers.extend(pair)
    words = np.random.default_rng(num_sources).integers(0, 1 << 63, (num_sources, 1, 2), dtype=np.uint64)
    keys = np.repeat(words, 2, axis=1).reshape(-1, 2)
    return Thresholds(
        np.array(above, np.float32), np.array(tied, np.float32), np.array(limits, np.int64), keys
    )


@st.composite
def all_chances(draw: st.DrawFn, num_sources: int) -> Chances:
    words = np.random.default_rng(num_sources).integers(0, 1 << 63, (num_sources, 2), dtype=np.uint64)
    limits = draw(st.lists(shares, min_size=num_sources, max_size=num_sources))
    factors = np.linspace(1.0, 3.0, num_sources, dtype=np.float32)
    return Chances(words, np.array(limits, np.int64), factors)


@st.composite
def sums(draw: st.DrawFn, num_sources: int) -> Sum:
    def each(*values: float) -> NDArray[np.float32]:
        drawn = draw(st.lists(st.sampled_from(values), min_size=num_sources, max_size=num_sources))
        return np.array(drawn, np.float32)

    factor = np.float32(draw(st.sampled_from([1.0, -0.5, 0.0, 1.7])))
    elects, divides = draw(st.booleans()), draw(st.booleans())
    weights = each(0.5, 1.0, -0.3, 0.0)
    return Sum(each(0.5, -0.3, 0.0, 1.1, np.inf), each(1.0, 0.2), weights, factor, elects, divides)


@pytest.mark.parametrize("num_sources", slow_but(range(1, MOST + 1), 3))
@settings(deadline=None, max_examples=13)
@given(
    data=st.data(),
    size=st.sampled_from([0, 1, 31, RUN - 1, RUN, 2 * RUN + 33]),
    start=st.sampled_from([0, 1, (1 << 33) + 5]),
    seed=st.integers(0, 1 << 16),
    by_chance=st.booleans(),
)
def test_few_at_once_are_merged_as_one_by_one(
    num_sources: int, data: st.DataObject, size: int, start: int, seed: int, *, by_chance: bool
) -> None:
    words, places = stored(1 + num_sources, size, seed)
    selection = (
        Selection(AT_RANDOM, NO_THRESHOLDS, data.draw(all_chances(num_sources)))
        if by_chance
        else Selection(BY_MAGNITUDE, data.draw(all_cuts(num_sources)), NO_CHANCES)
    )
    how = data.draw(sums(num_sources))
    ours, theirs = np.full((2, size + 2), GUARD, np.uint16)
    before = words.copy()
    few = FewInputs(words, tuple(places.astype(np.uint64)), start)
    merge_few(few, selection, numbers_of(how, selection), ours[1:-1])
    merge_selected_stored(Inputs(words, places, start), selection, how, theirs[1:-1])
    assert np.array_equal(ours, theirs)
    assert ours[0] == ours[-1] == GUARD
    assert np.array_equal(words, before)
