"""Sums of thinned deltas, and the election of signs, in float64; either side of what is open is taken."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.tensor import DOUBT, Block, Expected

Flags = NDArray[np.bool_]

_MOST_SIDES = 64
# Combinations of what may fall either way that are tried; beyond that an element is not judged.


@dataclass(frozen=True, slots=True)
class Thinned:
    """What each delta is multiplied by before it is weighted."""

    factors: Floats
    """``[N, n]``: 0 where an element is dropped."""
    others: Floats
    """The same on the other side of a threshold that the element is near; equal where it is not."""

    def picked(self, places: NDArray[np.int64]) -> Thinned:
        """Those of some elements."""
        return Thinned(self.factors[:, places], self.others[:, places])


@dataclass(frozen=True, slots=True)
class Sum:
    """How terms become a result."""

    coefficients: Floats
    """``[N]``: factors of the terms."""
    shares: Floats
    """``[N]``: what each term adds to the divisor."""
    votes: Floats
    """``[N]``: factors of the terms when signs are elected."""
    factor: float
    """Of the merged delta."""
    elects: bool
    """Whether only terms of the elected sign count."""
    divides: bool
    """Whether the sum is divided by the shares of the terms that count."""


def merged(block: Block, thinned: Thinned, how: Sum) -> Expected:
    """The base plus the merged delta, with all that it may be."""
    assert block.base is not None
    everything = np.arange(block.sources.shape[1])
    values, magnitude = _merged(block, thinned.factors, how, everything, 0, None)
    roundings = DOUBT * max(1.0, len(block.sources) / 8)
    doubt = roundings * (np.abs(block.base) + magnitude)
    if block.doubts is not None:
        gains = np.abs(thinned.factors).max(0) * np.abs(how.coefficients * how.factor).sum()
        doubt += block.input_doubt * (1.0 + gains)
    found = Expected(values, doubt)
    _add_others(found, block, thinned, how)
    return found


def _add_others(found: Expected, block: Block, thinned: Thinned, how: Sum) -> None:
    """Add what elements near a threshold, or in a draw of votes, may be as well."""
    is_near = thinned.factors != thinned.others
    free = _free_signs(block, thinned, how)
    flips = is_near | free
    drawn = _drawn(block, thinned, how) if how.elects else np.zeros(flips.shape[1], dtype=bool)
    places = np.flatnonzero(flips.any(0) | drawn)
    if not len(places):
        return
    few, own = thinned.picked(places), flips[:, places]
    which = np.flatnonzero(own.any(1))
    signs: tuple[int, ...] = (0, 1, -1) if how.elects else (0,)
    if len(signs) << len(which) > _MOST_SIDES:
        found.doubt[places] = np.inf
        return
    for sides in itertools.product((False, True), repeat=len(which)):
        turned = np.zeros(own.shape, dtype=bool)
        turned[which] = own[which] & np.array(sides, dtype=bool)[:, None]
        factors = np.where(turned, few.others, few.factors)
        for sign in signs:
            values, _ = _merged(block, factors, how, places, sign, turned & free[:, places])
            if sign:
                # An election can only be turned where it was a draw.
                values = np.where(drawn[places] | own.any(0), values, found.values[places])
            found.others.append((places, values))


def _merged(
    block: Block,
    factors: Floats,
    how: Sum,
    places: NDArray[np.int64],
    sign: int,
    free: Flags | None,
) -> tuple[Floats, Floats]:
    """The result of some elements, and the magnitude of what was added up.

    Args:
        block: the inputs.
        factors: what deltas are multiplied by ``[N, places]``.
        how: how terms are added.
        places: of the elements.
        sign: the elected one; 0 for what the votes say.
        free: terms that count on the other side than their own sign says.
    """
    assert block.base is not None
    thinned = factors * block.sources[:, places]
    terms = how.coefficients[:, None] * thinned
    counts = np.ones(terms.shape, dtype=bool)
    if how.elects:
        vote = (how.votes[:, None] * thinned).sum(0)
        elected = np.where(vote < 0, -1.0, 1.0) if sign == 0 else np.full(vote.shape, float(sign))
        counts = np.sign(terms) == elected
        counts = counts if free is None else counts ^ free
    delta = np.where(counts, terms, 0.0).sum(0)
    size = np.abs(np.where(counts, terms, 0.0)).sum(0)
    if how.divides:
        divisor = np.where(counts, how.shares[:, None], 0.0).sum(0)
        largest = np.where(counts, np.abs(how.shares)[:, None], 0.0).sum(0)
        # What rounding leaves of weights that cancel out is 0.
        divisor = np.where(np.abs(divisor) <= 2.0**-22 * largest, 1.0, divisor)
        delta, size = delta / divisor, size / np.abs(divisor)
        size *= np.where(largest > 0, np.maximum(1.0, largest / np.abs(divisor)), 1.0)
    return block.base[places] + how.factor * delta, np.abs(how.factor) * size


def _drawn(block: Block, thinned: Thinned, how: Sum) -> Flags:
    """Where rounding, or inputs, may turn the vote."""
    terms = how.votes[:, None] * thinned.factors * block.sources
    size = np.abs(terms).sum(0)
    doubt = DOUBT * size
    if block.doubts is not None:
        doubt = doubt + (np.abs(how.votes[:, None] * thinned.factors) * block.doubts).sum(0)
    return np.asarray((np.abs(terms.sum(0)) <= doubt) & ((np.abs(terms) > 0).sum(0) > 1))


def _free_signs(block: Block, thinned: Thinned, how: Sum) -> Flags:
    """Terms whose own sign is open; none where inputs are exact."""
    if block.doubts is None or not how.elects:
        return np.zeros(block.sources.shape, dtype=bool)
    return np.asarray((np.abs(block.sources) <= block.doubts) & (thinned.factors != 0))


def weighted(weights: Sequence[float], *, factor: float, elects: bool, divides: bool) -> Sum:
    """The sum of the task-arithmetic family."""
    own = np.array(weights, dtype=np.float64)
    return Sum(own, own, own, factor, elects, divides)
