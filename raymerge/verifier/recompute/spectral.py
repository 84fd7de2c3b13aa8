"""iso_c and tsv_m: singular directions of whole matrices, in float64 with numpy's full decomposition."""

from __future__ import annotations

from math import prod

import numpy as np

from raymerge.verifier.numbers import Floats
from raymerge.verifier.recompute.combined import combination
from raymerge.verifier.recompute.tensor import DOUBT, Block, Expected, LogicalTensor

_ROUNDING = 2.0**-23
"""Share of the Frobenius norm up to which a singular value is what rounding to float32 may have made."""
_UNSURE = 4.0
"""Factor around that within which it is open whether a singular value is rounding."""


class Undecided(Exception):  # noqa: N818 - says why there is no answer, and is no error of anybody
    """What a tensor should be hangs on rounding."""


class Spectral:
    """A matrix merged by its singular directions; whatever is none takes the mean of the deltas."""

    def __init__(self, tensor: LogicalTensor, *, name: str) -> None:
        """
        Raises:
            Undecided: it hangs on rounding which singular values count.
        """
        settings = tensor.settings
        self._weights = settings.per_source("weight")
        self._factor = settings.number("lambda")
        self._change: Floats | None = None
        shape = settings.shape
        if len(shape) < 2 or (name == "tsv_m" and min(_matrix(shape)) < tensor.num_sources):
            return
        block = tensor.block(0, tensor.num_elements)
        deltas = np.array(self._weights)[:, None] * block.sources
        matrices = deltas.reshape(len(deltas), *_matrix(shape))
        found, gap = _levelled(matrices.sum(0)) if name == "iso_c" else _whitened(matrices)
        self._change = self._factor * found.reshape(-1)
        # A direction turns by what moves the matrix, over how far apart singular values are.
        size = float(np.abs(deltas).sum(0).max(initial=0.0))
        largest = float(np.abs(self._change).max(initial=0.0))
        doubt = 0.0 if block.doubts is None else float(block.doubts.max())
        self._doubt = (DOUBT * (largest + abs(self._factor) * size) + doubt) * gap

    def __call__(self, block: Block) -> Expected:
        if self._change is None:
            each = [self._factor * weight / len(self._weights) for weight in self._weights]
            return combination(block, each)
        assert block.base is not None
        values = block.base + self._change[block.start : block.start + len(block.base)]
        return Expected(values, DOUBT * block.largest + self._doubt)


def _levelled(matrix: Floats) -> tuple[Floats, float]:
    """The matrix with its singular values made equal; and how much a change of it is enlarged."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = _rank(values)
    mean = float(values[:rank].mean()) if rank else 0.0
    gap = float(values[0] / values[rank - 1]) if rank else 1.0
    return (left[:, :rank] * mean) @ right[:rank], max(1.0, gap)


def _whitened(matrices: Floats) -> tuple[Floats, float]:
    """The leading directions of all matrices, made orthogonal; and how much a change of them is enlarged."""
    each = min(matrices.shape[1:]) // len(matrices)
    lefts, sizes, rights, gap = [], [], [], 1.0
    for matrix in matrices:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        kept = min(each, _rank(values))
        lefts.append(left[:, :kept].T)
        sizes.append(values[:kept])
        rights.append(right[:kept])
        if 0 < kept < len(values) and values[kept] > 0:
            gap = max(gap, float(values[0] / max(values[kept - 1] - values[kept], 1e-300)))
    left, right = (_orthonormal(np.concatenate(rows)) for rows in (lefts, rights))
    return left.T @ (np.concatenate(sizes)[:, None] * right), gap


def _orthonormal(rows: Floats) -> Floats:
    """The orthonormal rows nearest to some rows; directions that these share count once.

    Raises:
        Undecided: it hangs on rounding how many there are.
    """
    left, values, right = np.linalg.svd(rows, full_matrices=False)
    limit = _ROUNDING * np.sqrt((values**2).sum())
    if bool(((values > limit / _UNSURE) & (values < limit * _UNSURE)).any()):
        raise Undecided("two of its singular directions are equal to rounding, or nearly so")
    spans = values > limit
    return np.asarray(left[:, spans] @ right[spans])


def _rank(values: Floats) -> int:
    """How many singular values are more than rounding."""
    limit = _ROUNDING * float(np.sqrt((values**2).sum()))
    if bool(((values > limit / _UNSURE) & (values < limit * _UNSURE)).any()):
        raise Undecided("one of its singular values is as large as what rounding leaves")
    return int((values > limit).sum())


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], prod(shape[1:])
