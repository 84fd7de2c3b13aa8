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

import torch

from raymerge.methods.method import Rows, Settings, Tile
from raymerge.methods.reduce import add_products
from raymerge.methods.sums import sum_of_products
from raymerge.methods.task_arithmetic import on_base

Coefficients: TypeAlias = tuple[float, ...]

# Half the distance from 1 to the next float32 below.
NEGLIGIBLE = 2.0**-25
"""A share of a float32 that is lost when it is added to it."""


class Gram:
    """Inner products of all pairs of ``size`` vectors over the tiles seen so far, float64."""

    def __init__(self, size: int) -> None:
        self.size = size
        """How many vectors there are."""
        self._products = [[0.0] * (index + 1) for index in range(size)]

    def add(self, vectors: Rows, origin: torch.Tensor | None) -> None:
        """Add a tile's inner products; with an origin, those of the vectors' differences to it.

        Differences are taken again for each pair, so that memory does not grow with the vectors' number.
        """
        buffers = None if origin is None else (torch.empty_like(origin), torch.empty_like(origin))
        for row, products in enumerate(self._products):
            left = _difference(vectors[row], origin, buffers and buffers[0])
            for column in range(row):
                right = _difference(vectors[column], origin, buffers and buffers[1])
                products[column] = add_products(products[column], left, right)
            products[row] = add_products(products[row], left, left)

    @property
    def is_finite(self) -> bool:
        """Whether no vector has an element that is not finite: a finite float32 cannot overflow here."""
        return all(math.isfinite(products[-1]) for products in self._products)

    def product(self, left: int, right: int) -> float:
        """The inner product of two vectors."""
        return self._products[max(left, right)][min(left, right)]

    def norms(self) -> list[float]:
        """The norms of all vectors."""
        return [math.sqrt(products[-1]) for products in self._products]

    def between(self, left: Sequence[float], right: Sequence[float]) -> float:
        """The inner product of two combinations of the vectors, given by their coefficients."""
        indices = range(self.size)
        return math.fsum(left[i] * right[j] * self.product(i, j) for i in indices for j in indices)

    def norm_of(self, coefficients: Sequence[float]) -> float:
        """The norm of a combination of the vectors."""
        return math.sqrt(max(0.0, self.between(coefficients, coefficients)))


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


class DeltaCombinationKernel(CombinationKernel):
    """``B + sum c_i d_i`` for a method that is given deltas."""

    def observe(self, state: Combination, tile: Tile, settings: Settings, pass_index: int) -> None:
        """Add the inner products of the tile's deltas."""
        state.gram.add(tile.sources, None)

    def apply(self, tile: Tile, settings: Settings, state: Combination) -> torch.Tensor:
        """The base plus the combination."""
        return add_deltas(tile, state.coefficients)


def combine(sources: Rows, coefficients: Coefficients, origin: torch.Tensor | None) -> torch.Tensor:
    """``O + sum c_i (T_i - O)``, with O the origin, or 0 without one; float32 ``[n]`` all.

    Added up as changes to the source A of the largest coefficient, ``A + (sum c_i - 1) (A - O) + sum c_i
    (T_i - A)``: where the sources agree and c sums to 1 that is A to the last bit, and so is the end of an
    arc. Changes are subtracted, for an equal pair's difference of 0.0 must not turn -0.0 into 0.0. What is
    not finite in a source of coefficient 0 reaches the result all the same.
    """
    anchor = max(range(len(sources)), key=lambda index: abs(coefficients[index]))
    start = sources[anchor]
    merged, change = start.clone(), torch.empty_like(start)
    excess = math.fsum(coefficients) - 1.0
    if not abs(excess) < NEGLIGIBLE:
        centre = torch.zeros((), device=start.device) if origin is None else origin
        _subtract(merged, centre, start, excess, change)
    for index, source in enumerate(sources):
        if index != anchor:
            _subtract(merged, start, source, coefficients[index], change)
    return merged


def _subtract(
    merged: torch.Tensor, left: torch.Tensor, right: torch.Tensor, factor: float, change: torch.Tensor
) -> None:
    """Subtract ``factor * (left - right)``, written so that equal ones give 0.0 and never -0.0."""
    first, second = (right, left) if factor < 0 else (left, right)
    torch.sub(first, second, out=change).mul_(abs(factor))
    merged.sub_(change if factor else change.add_(0.0))


def add_deltas(tile: Tile, coefficients: Coefficients) -> torch.Tensor:
    """``B + sum c_i d_i`` for a tile of deltas."""
    return on_base(sum_of_products(tile.sources, coefficients), tile)
