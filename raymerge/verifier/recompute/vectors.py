"""nuslerp where each row or column of a tensor has an arc of its own, in float64."""

from __future__ import annotations

import numpy as np

from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.combined import combination
from raymerge.verifier.recompute.interpolate import arc, turn
from raymerge.verifier.recompute.tensor import Block, Expected, LogicalTensor


class NuslerpRows:
    """An arc for each run along the last dimension."""

    def __init__(self, tensor: LogicalTensor) -> None:
        self._length, self._turn = tensor.row_length, turn(tensor.settings)

    def __call__(self, block: Block) -> Expected:
        pairs = _pairs(_sums(_vectors(block).reshape(2, -1, self._length), axis=2), self._turn)
        return combination(block, pairs.repeat(self._length, axis=1), origin=True)


class NuslerpColumns:
    """An arc for each run along the first dimension; of more than two, the tensor is read as a matrix."""

    def __init__(self, tensor: LogicalTensor) -> None:
        shape = tensor.settings.shape
        self._columns = max(1, tensor.num_elements // max(1, shape[0]))
        total = np.zeros((3, self._columns))
        for block in tensor.blocks():
            vectors, places = _vectors(block), block.indices % self._columns
            for index, (left, right) in enumerate(((0, 0), (0, 1), (1, 1))):
                products = vectors[left] * vectors[right]
                total[index] += np.bincount(places, products, minlength=self._columns)
        self._pairs = _pairs(total, turn(tensor.settings))

    def __call__(self, block: Block) -> Expected:
        return combination(block, self._pairs[:, block.indices % self._columns], origin=True)


def _vectors(block: Block) -> Floats:
    return block.sources if block.base is None else block.sources - block.base


def _sums(vectors: Floats, axis: int) -> Floats:
    """Inner products of two vectors with themselves and each other ``[3, vectors]``."""
    first, second = vectors
    products = (first * first, first * second, second * second)
    return np.stack([each.sum(axis - 1) for each in products])


def _pairs(sums: Floats, t: float) -> Floats:
    """Coefficients of both vectors of each arc ``[2, vectors]``."""
    found = [arc(first, mixed, second, t) for first, mixed, second in sums.T.tolist()]
    return np.array(found).reshape(-1, 2).T
