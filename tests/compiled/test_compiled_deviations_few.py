"""How far deltas of a few sources lie apart: float32 never decides what float64 would decide otherwise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from kits.marks import slow_but
from numpy.typing import NDArray

from raymerge.kernels.deviations import (
    add_squares_few,
    count_deviations_few,
    count_deviations_of_rows,
    counts_few,
    merge_by_deviation_few,
)
from raymerge.kernels.elect import (
    BY_DEVIATION,
    NO_CHANCES,
    FewInputs,
    Inputs,
    Selection,
    Thresholds,
    add_squares_stored,
    merge_selected_stored,
    numbers_of,
)
from raymerge.kernels.selection import MIXED, Bins
from raymerge.methods.sce import sum_of

TINY = (np.float32(0.0), np.float32(1e-17), np.float32(1e-12))
Words = NDArray[np.uint16]
COUNT = 5000
SPECIAL = (0.0, -0.0, 1e-40, 3.3e38, -3.3e38, math.nan, math.inf, -math.inf)
KINDS = ("coarse", "smooth", "nearly equal", "special", "large", "small")
seeds = pytest.mark.parametrize("seed", range(3))
numbers_of_sources = pytest.mark.parametrize("num_sources", slow_but(range(2, 7), 3))
kinds = pytest.mark.parametrize("kind", KINDS)


def stored(kind: str, num_sources: int, seed: int) -> Words:
    """Base and sources ``[1 + N, COUNT]``."""
    generator = np.random.default_rng((seed, num_sources))
    changes = generator.standard_normal((num_sources, COUNT))
    base = generator.standard_normal(COUNT)
    if kind == "coarse":
        # Few distances, of which many lie exactly at a level.
        base, changes = np.full(COUNT, 64.0), generator.integers(-3, 4, (num_sources, COUNT)) * 0.5
    elif kind == "nearly equal":
        changes = changes[:1] * 100 + np.round(changes)
    else:
        changes *= 0.05
    values = np.stack([base, *(base + changes)])
    if kind == "special":
        chosen = generator.random(values.shape) < 0.05
        values[chosen] = generator.choice(SPECIAL, int(chosen.sum()))
    scale = {"large": 1e17, "small": 1e-12}.get(kind, 1.0)
    patterns = torch.from_numpy((values * scale).astype(np.float32)).bfloat16().view(torch.int16)
    return patterns.numpy().view(np.uint16).copy()


def deviations_of(words: Words) -> NDArray[np.float32]:
    rows = (words.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        deltas = (rows[1:] - rows[:1]).astype(np.float64)
        totals = np.zeros(COUNT)
        for delta in deltas:
            totals += delta
        squares = np.zeros(COUNT)
        for delta in deltas:
            squares += (len(deltas) * delta - totals) ** 2
        return (np.sqrt(squares) * (1.0 / len(deltas))).astype(np.float32)


def levels_of(words: Words) -> list[np.float32]:
    """Deviations that occur, and their neighbours."""
    found = np.unique(deviations_of(words))
    found = found[np.isfinite(found) & (found > 2.0**-50)]
    some = found[np.linspace(0, found.size - 1, 9).astype(int)]
    return [np.nextafter(each, np.float32(to)) for each in some for to in (-1.0, each, math.inf)]


def few(words: Words, start: int = 0) -> FewInputs:
    return FewInputs(words.reshape(-1), tuple(np.uint64(row * COUNT) for row in range(len(words))), start)


def cuts_at(level: np.float32, tied: float, limit: int) -> Thresholds:
    above, ties = np.array([level, math.inf], np.float32), np.array([tied, math.nan], np.float32)
    return Thresholds(above, ties, np.array([limit, 0]), np.array([[12, 34], [5, 6]], np.uint64))


def all_cuts(words: Words) -> list[Thresholds]:
    """At levels that occur, with some of their equals and without any, and such that keep all or nothing."""
    levels = levels_of(words)
    found = [
        cuts_at(level, math.nan, 0) for level in [*levels, np.float32(-1.0), np.float32(math.inf), *TINY]
    ]
    return found + [cuts_at(level, float(level), 1 << 31) for level in levels]


@kinds
@numbers_of_sources
@seeds
def test_counts_are_those_of_the_definition(kind: str, num_sources: int, seed: int) -> None:
    words = stored(kind, num_sources, seed)
    places = np.arange(num_sources + 1) * COUNT
    patterns = sorted(int(level.view(np.uint32)) for level in levels_of(words))
    ends = [0, *patterns, 0x7F80_0000]
    for low, high in [*itertools.pairwise(ends), (0, patterns[4]), (patterns[3], patterns[-3])]:
        shift = 0
        while (high - low) >> shift > 1 << 16:
            shift += 1
        bins = Bins(np.uint32(low), np.uint32(high), np.uint32(shift))
        assert counts_few(bins)
        expected, found = np.zeros((2, (high - low >> shift) + 1), np.int64)
        numbers = count_deviations_of_rows(words.reshape(-1), places, COUNT, bins, expected)
        assert count_deviations_few(few(words), COUNT, bins, found) == numbers
        assert np.array_equal(found, expected)
        deviations = deviations_of(words)
        inside = (deviations.view(np.uint32) & 0x7FFF_FFFF) - np.uint32(low) < np.uint32(high - low)
        assert (found & (MIXED - 1)).sum() == inside.sum()
        assert numbers[1] == (deviations != 0).sum()


@kinds
@numbers_of_sources
@seeds
def test_merges_have_the_bits_of_merging_source_by_source(kind: str, num_sources: int, seed: int) -> None:
    words = stored(kind, num_sources, seed)
    inputs = Inputs(words.reshape(-1), np.arange(num_sources + 1) * COUNT, 77)
    how = sum_of(tuple(np.random.default_rng(seed).dirichlet(np.ones(num_sources)).tolist()))
    for levels in all_cuts(words):
        selection = Selection(BY_DEVIATION, levels, NO_CHANCES)
        expected, found = np.zeros((2, COUNT), np.uint16)
        merge_selected_stored(inputs, selection, how, expected)
        merge_by_deviation_few(few(words, 77), selection, how, numbers_of(how, selection), found)
        assert np.array_equal(found, expected)


@kinds
@numbers_of_sources
@pytest.mark.parametrize("selects", [True, False])
def test_squares_have_the_bits_of_adding_source_by_source(kind: str, num_sources: int, selects: bool) -> None:
    words = stored(kind, num_sources, 5)
    inputs = Inputs(words.reshape(-1), np.arange(num_sources + 1) * COUNT, 16_384)
    for levels in all_cuts(words):
        expected, found = np.full((2, num_sources), 0.1)
        add_squares_stored(inputs, COUNT, levels, selects, expected)
        add_squares_few(few(words, 16_384), COUNT, levels, selects, found)
        assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1024, 1100])
def test_what_lies_behind_the_elements_does_not_count(size: int) -> None:
    words = stored("smooth", 3, 1)
    levels = cuts_at(np.float32(0.05), math.nan, 0)
    inputs = Inputs(words.reshape(-1), np.arange(4) * COUNT, 0)
    expected, found = np.zeros((2, 3))
    add_squares_stored(inputs, size, levels, True, expected)
    add_squares_few(few(words), size, levels, True, found)
    assert np.array_equal(found, expected)
    out = np.zeros(COUNT, np.uint16)
    how = sum_of((0.2, 0.3, 0.5))
    selection = Selection(BY_DEVIATION, levels, NO_CHANCES)
    merge_by_deviation_few(few(words), selection, how, numbers_of(how, selection), out[:size])
    assert not out[size:].any()


def test_levels_whose_square_is_nothing_in_float32_are_left_to_the_other_loops() -> None:
    low, high = np.float32(1e-17).view(np.uint32), np.float32(1.0).view(np.uint32)
    assert not counts_few(Bins(low, high, np.uint32(0)))
    assert not counts_few(Bins(np.uint32(0), low, np.uint32(0)))
    assert not counts_few(Bins(np.uint32(0), np.uint32(1 << 31), np.uint32(15)))
