"""Methods whose result is one linear combination of the sources, chosen by angles and distances alone.

Such numbers follow from the inner products of the sources (their Gram matrix): the norm of ``sum a_i X_i`` is
the root of ``sum a_i a_j <X_i, X_j>``. One pass gathers these, all that follows runs on a few float64
numbers, and a second pass adds up."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.combine import Coefficients, combine, combine_stored, stored_sum_on_base, sum_on_base
from raymerge.methods.kernel import Settings, Stored, StoredKernel, Tile, Words
from raymerge.methods.reduce import PieceSums, elements, flat, row_places


class Gram:
    """Inner products of all pairs of ``size`` vectors over the tiles seen so far, float64."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sums = PieceSums(size * (size + 1) // 2)

    @property
    def products(self) -> npt.NDArray[np.float64]:
        """``[pairs, 1]``, ordered by ``pair_index``."""
        return self._sums.totals[:, None]

    def add(self, vectors: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Add the inner products of float32 ``[size, n]``, less the origin where there is one."""
        if not self.size:
            return
        if not vectors.is_cpu:
            self.add_in_torch(vectors, origin)
            return
        size, places = vectors.shape[1], row_places(vectors)
        loops.sums.add_grams(self.products.T, flat(vectors), places, size, elements(origin))

    def add_stored(self, stored: Stored) -> None:
        """``add`` of stored vectors; less the first input where that is one more than ``size``."""
        if not self.size:
            return
        origin, places = stored.origin(self.size)
        loops.sums.add_grams(self.products.T, stored.words, places, stored.count, origin)

    def add_in_torch(self, vectors: torch.Tensor, origin: torch.Tensor | None) -> None:
        """Takes differences again for each pair, so that memory does not grow with the number of vectors."""
        buffers = None if origin is None else (torch.empty_like(origin), torch.empty_like(origin))
        for row in range(self.size):
            left = _difference(vectors[row], origin, buffers and buffers[0])
            for column in range(row):
                right = _difference(vectors[column], origin, buffers and buffers[1])
                self._sums.add_in_torch(pair_index(row, column), left, right)
            self._sums.add_in_torch(pair_index(row, row), left, left)

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite: products of finite float32 numbers cannot overflow here."""
        return all(math.isfinite(self.product(index, index)) for index in range(self.size))

    def product(self, left: int, right: int) -> float:
        return float(self.products[pair_index(left, right), 0])

    def norms(self) -> list[float]:
        return [math.sqrt(self.product(index, index)) for index in range(self.size)]

    def between(self, left: Sequence[float], right: Sequence[float]) -> float:
        indices = range(self.size)
        return math.fsum(left[i] * right[j] * self.product(i, j) for i in indices for j in indices)

    def norm_of(self, coefficients: Sequence[float]) -> float:
        return math.sqrt(max(0.0, self.between(coefficients, coefficients)))


def pair_index(left: int, right: int) -> int:
    """Index of a pair: each vector with those before it, then with itself."""
    first, last = min(left, right), max(left, right)
    return last * (last + 1) // 2 + first


def _difference(vector: torch.Tensor, origin: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    return vector if origin is None else torch.sub(vector, origin, out=out)


@dataclass(slots=True)
class Combination:
    gram: Gram
    coefficients: Coefficients = ()
    """One for each source, set after the pass. NaN when an element of the tensor is not finite."""


class CombinationKernel(StoredKernel):
    """``sum c_i T_i``, or ``B + sum c_i (T_i - B)`` with a base, with c from the inner products."""

    concludes_each = True

    def observed(self, settings: Settings) -> Hashable:
        return len(settings.sources)

    @abstractmethod
    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        """One coefficient for each source, from finite inner products."""

    def passes(self, settings: Settings) -> int:
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> Combination:
        return Combination(Gram(len(settings.sources)))

    def observe(self, state: Combination, tile: Tile, settings: Settings, pass_index: int) -> None:
        state.gram.add(tile.sources, tile.base)

    def observe_stored(self, state: Combination, stored: Stored, settings: Settings, pass_index: int) -> None:
        """Add the tile's inner products; deltas are differences to the first input."""
        state.gram.add_stored(stored)

    def conclude(self, state: Combination, settings: Settings, pass_index: int) -> bool:
        if state.gram.is_finite:
            state.coefficients = self.coefficients(state.gram, settings)
        else:
            state.coefficients = (math.nan,) * len(settings.sources)
        return False

    def apply(self, tile: Tile, settings: Settings, state: Combination) -> torch.Tensor:
        return combine(tile.sources, state.coefficients, tile.base)

    def apply_stored(self, stored: Stored, settings: Settings, state: Combination, out: Words) -> None:
        combine_stored(stored, state.coefficients, out)


class DeltaCombinationKernel(CombinationKernel):
    def observe(self, state: Combination, tile: Tile, settings: Settings, pass_index: int) -> None:
        state.gram.add(tile.sources, None)

    def apply(self, tile: Tile, settings: Settings, state: Combination) -> torch.Tensor:
        return sum_on_base(tile, state.coefficients)

    def apply_stored(self, stored: Stored, settings: Settings, state: Combination, out: Words) -> None:
        stored_sum_on_base(stored, state.coefficients, out)
