"""Methods whose result is one linear combination of the sources, chosen by angles and distances alone.

Every such number follows from the inner products of the sources (their Gram matrix): the norm of
``sum a_i X_i`` is the root of ``sum a_i a_j <X_i, X_j>``. So one pass over the tensor gathers the inner
products, all that follows, iterations too, runs on a few float64 numbers, and a second pass adds up.
"""

# ruff: noqa: ARG002 - a kernel has all arguments of the protocol, whether it needs them or not

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from raymerge.methods.method import AnchoredSum, Settings, Stored, Tile
from raymerge.methods.reduce import add_products_in_torch, elements, flat
from raymerge.methods.sums import stored_sum_on_base, sum_on_base

Coefficients: TypeAlias = tuple[float, ...]
Words: TypeAlias = NDArray[np.uint16]

# Half the distance from 1 to the next float32 below.
NEGLIGIBLE = 2.0**-25
"""A share of a float32 that is lost when it is added to it."""


class Gram:
    """Inner products of all pairs of ``size`` vectors over the tiles seen so far, float64."""

    def __init__(self, size: int) -> None:
        self.size = size
        """How many vectors there are."""
        self.products = np.zeros((size * (size + 1) // 2, 1))
        """Where ``pair_index`` says, each alone in a row."""

    def add(self, vectors: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Add the inner products of a tile's vectors, float32 ``[size, n]``; with an origin, those of their
        differences to it."""
        if not self.size:
            return
        if not vectors.is_cpu:
            self.add_in_torch(vectors, origin)
            return
        from raymerge.kernels import sums

        sums.add_grams(self.products.T, flat(vectors), vectors.stride(0), self.size, elements(origin))

    def add_stored(self, stored: Stored) -> None:
        """The same of stored vectors; of their differences to the first input where that is one more."""
        if not self.size:
            return
        from raymerge.kernels import sums

        num_origins = len(stored.places) - self.size
        totals = self.products[:, 0]
        sums.add_stored_grams(totals, stored.words, stored.places, stored.count, num_origins)

    def add_in_torch(self, vectors: torch.Tensor, origin: torch.Tensor | None) -> None:
        """The same as ``add``, on any device.

        Differences are taken again for each pair, so that memory does not grow with the vectors' number.
        """
        buffers = None if origin is None else (torch.empty_like(origin), torch.empty_like(origin))
        totals = self.products[:, 0]
        for row in range(self.size):
            left = _difference(vectors[row], origin, buffers and buffers[0])
            for column in range(row):
                right = _difference(vectors[column], origin, buffers and buffers[1])
                pair = pair_index(row, column)
                totals[pair] = add_products_in_torch(float(totals[pair]), left, right)
            totals[pair_index(row, row)] = add_products_in_torch(
                float(totals[pair_index(row, row)]), left, left
            )

    @property
    def is_finite(self) -> bool:
        """Whether no vector has an element that is not finite: a finite float32 cannot overflow here."""
        return all(math.isfinite(self.product(index, index)) for index in range(self.size))

    def product(self, left: int, right: int) -> float:
        """The inner product of two vectors."""
        return float(self.products[pair_index(left, right), 0])

    def norms(self) -> list[float]:
        """The norms of all vectors."""
        return [math.sqrt(self.product(index, index)) for index in range(self.size)]

    def between(self, left: Sequence[float], right: Sequence[float]) -> float:
        """The inner product of two combinations of the vectors, given by their coefficients."""
        indices = range(self.size)
        return math.fsum(left[i] * right[j] * self.product(i, j) for i in indices for j in indices)

    def norm_of(self, coefficients: Sequence[float]) -> float:
        """The norm of a combination of the vectors."""
        return math.sqrt(max(0.0, self.between(coefficients, coefficients)))


def pair_index(left: int, right: int) -> int:
    """Where the product of two vectors stands: each vector's with those before it and with itself."""
    first, last = min(left, right), max(left, right)
    return last * (last + 1) // 2 + first


def _difference(vector: torch.Tensor, origin: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    return vector if origin is None else torch.sub(vector, origin, out=out)


@dataclass(slots=True)
class Combination:
    """Statistics of one tensor."""

    gram: Gram
    """Inner products."""
    coefficients: Coefficients = ()
    """One for each source; there after the pass. NaN when an element of the tensor is not finite."""


class CombinationKernel(ABC):
    """``sum c_i T_i``, or ``B + sum c_i (T_i - B)`` with a base, with c from the inner products."""

    @abstractmethod
    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        """One coefficient for each source, from finite inner products."""

    def passes(self, settings: Settings) -> int:
        """One, for the inner products."""
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Combination:
        """Inner products of nothing."""
        return Combination(Gram(len(settings.sources)))

    def observe(self, state: Combination, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Add the tile's inner products."""
        state.gram.add(tile.sources, tile.base)

    def observe_stored(self, state: Combination, stored: Stored, settings: Settings, pass_index: int) -> bool:
        """Add the tile's inner products: of deltas, too, which are differences to the first input."""
        state.gram.add_stored(stored)
        return True

    def conclude(self, state: Combination, settings: Settings, pass_index: int) -> bool:
        """Choose the coefficients."""
        if state.gram.is_finite:
            state.coefficients = self.coefficients(state.gram, settings)
        else:
            state.coefficients = (math.nan,) * len(settings.sources)
        return False

    def apply(self, tile: Tile, settings: Settings, state: Combination) -> torch.Tensor:
        """The combination."""
        return combine(tile.sources, state.coefficients, tile.base)

    def apply_stored(self, stored: Stored, settings: Settings, state: Combination, out: Words) -> bool:
        """The combination."""
        combine_stored(stored, state.coefficients, out)
        return True


class DeltaCombinationKernel(CombinationKernel):
    """``B + sum c_i d_i`` for a method that is given deltas."""

    def observe(self, state: Combination, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Add the inner products of the tile's deltas."""
        state.gram.add(tile.sources, None)

    def apply(self, tile: Tile, settings: Settings, state: Combination) -> torch.Tensor:
        """The base plus the combination."""
        return sum_on_base(tile, state.coefficients)

    def apply_stored(self, stored: Stored, settings: Settings, state: Combination, out: Words) -> bool:
        """The base plus the combination."""
        stored_sum_on_base(stored, state.coefficients, out)
        return True


def combine(sources: torch.Tensor, coefficients: Coefficients, origin: torch.Tensor | None) -> torch.Tensor:
    """``O + sum c_i (T_i - O)`` of float32 ``[N, n]``, with O the origin ``[n]``, or 0 without one.

    Added up as changes to the source A of the largest coefficient, ``A + (sum c_i - 1) (A - O) + sum c_i
    (T_i - A)``: where the sources agree and c sums to 1 that is A to the last bit, and so is the end of an
    arc. Changes are subtracted, and as 0.0 rather than -0.0: no difference must not turn A's -0.0 into 0.0.
    What is not finite in a source of coefficient 0 reaches the result all the same.
    """
    if not sources.is_cpu:
        return combine_in_torch(sources, coefficients, origin)
    from raymerge.kernels import combine as loops

    out = torch.empty(sources.shape[1], dtype=torch.float32)
    anchor, excess = _anchor(coefficients)
    of_sources = np.array(coefficients)
    loops.combination(
        out.numpy(), flat(sources), sources.stride(0), of_sources, anchor, excess, elements(origin)
    )
    return out


def combine_stored(stored: Stored, coefficients: Coefficients, out: Words) -> None:
    """The result of ``combine``, rounded into ``out``; with one input more than coefficients, that is O."""
    from raymerge.kernels import combine as loops

    anchor, excess = _anchor(coefficients)
    loops.stored_combination(out, stored.words, stored.places, np.array(coefficients), anchor, excess)


def anchored_sum(coefficients: Coefficients) -> AnchoredSum:
    """What ``combine`` computes of these coefficients without an origin."""
    anchor, excess = _anchor(coefficients)
    return AnchoredSum(tuple(coefficients), anchor, excess)


def combine_in_torch(
    sources: torch.Tensor, coefficients: Coefficients, origin: torch.Tensor | None
) -> torch.Tensor:
    """The same result as ``combine``, on any device."""
    anchor, excess = _anchor(coefficients)
    start = sources[anchor]
    merged, change = start.clone(), torch.empty_like(start)
    if excess:
        centre = torch.zeros((), device=start.device) if origin is None else origin
        merged.sub_(torch.sub(centre, start, out=change).mul_(excess).add_(0.0))
    for index, source in enumerate(sources):
        if index != anchor:
            merged.sub_(torch.sub(start, source, out=change).mul_(coefficients[index]).add_(0.0))
    return merged


def _anchor(coefficients: Coefficients) -> tuple[int, float]:
    """The index of the source that changes are counted from, and by what the coefficients' sum exceeds 1."""
    magnitudes = [abs(coefficient) for coefficient in coefficients]
    excess = math.fsum(coefficients) - 1.0
    return magnitudes.index(max(magnitudes)), 0.0 if abs(excess) < NEGLIGIBLE else excess
