"""Methods on the singular values of deltas: iso_c (arXiv 2502.04959) and tsv_m (arXiv 2412.00081).

A tensor of two or more dimensions is the matrix of its first dimension by all others. Deltas of vectors are
averaged, as in both papers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import reference
from raymerge.methods.combine import on_base, sum_of_products, sum_on_base
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import LAMBDA, Access, BaseUse, Method, Takes, delta_weight

_ROUNDING = 2.0**-23
# Rounding the elements of a matrix to float32 moves no singular value by more than half of this share of its
# Frobenius norm. A direction whose singular value is smaller is made of that rounding, and is left out.


class IsoCKernel(Kernel):
    """Gives all singular directions of the summed deltas the same singular value, their mean.

    A direction whose singular value is 0 to rounding stays 0, and the mean is over the others. So the result
    depends on neither signs nor basis of the decomposition, and the nuclear norm is preserved."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        shape = _matrix_shape(settings.shape)
        merged = sum_of_products(tile.sources, settings.per_source("weight"))
        if shape is None or not _is_finite(merged):
            return _average(tile, settings)
        level = _levelled(merged.view(shape), settings.number("lambda"))
        return on_base(merged.copy_(level.flatten()), tile)


def _levelled(matrix: torch.Tensor, factor: float) -> torch.Tensor:
    """``matrix`` with its singular values replaced by ``factor`` times their mean; float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = int((values > _ROUNDING * torch.linalg.vector_norm(values)).sum())
    mean = math.fsum(values[:rank].tolist()) / max(1, rank)
    levelled: torch.Tensor = (left[:, :rank] * (factor * mean)) @ right[:rank]
    return levelled


class TsvMKernel(Kernel):
    """Adds the leading singular directions of every delta, after orthogonalising them.

    Of each of K deltas the ``floor(r / K)`` leading triplets are kept, r the smaller side, without those
    whose singular value is 0 to rounding. The left vectors of all sources, side by side, are replaced by the
    nearest orthonormal set, and so are the right ones; directions that sources share to rounding count once.
    """

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        shape = _matrix_shape(settings.shape)
        has_room = shape is not None and min(shape) >= len(tile.sources)
        if shape is None or not has_room or not all(map(_is_finite, tile.sources)):
            return _average(tile, settings)
        merged = _Triplets.of(tile, settings, shape).recomposed().mul_(settings.number("lambda"))
        if shape[0] < shape[1]:
            merged = merged.T
        return on_base(merged.reshape(-1).float(), tile)


class _Triplets:
    """Leading singular triplets of all sources, in order; one row each, float64.

    From the Gram matrix of the smaller side, a fraction of the cost of a decomposition. It squares the
    condition number; but in float64 a direction's error stays below that of the float32 elements down to
    singular values of about 1e-8 of the largest, and smaller ones are left out."""

    def __init__(self, left: torch.Tensor, values: torch.Tensor, right: torch.Tensor) -> None:
        self._left, self._values, self._right = left, values, right
        self._size = 0

    @classmethod
    def of(cls, tile: Tile, settings: Settings, shape: tuple[int, int]) -> _Triplets:
        height, width = max(shape), min(shape)
        each = width // len(tile.sources)
        most = each * len(tile.sources)
        empty = tile.sources[0].new_empty
        triplets = cls(
            empty((most, height), dtype=torch.float64),
            empty(most, dtype=torch.float64),
            empty((most, width), dtype=torch.float64),
        )
        for delta, weight in zip(tile.sources, settings.per_source("weight"), strict=True):
            matrix = delta.view(shape).double().mul_(weight)
            triplets._add(matrix if shape[0] >= shape[1] else matrix.T, each)
        return triplets

    def _add(self, matrix: torch.Tensor, count: int) -> None:
        """Add up to ``count`` leading triplets, without those of singular value 0."""
        right = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -count:].T
        left = right @ matrix.T
        values = torch.linalg.vector_norm(left, dim=1)
        significant = (values > _ROUNDING * torch.linalg.vector_norm(matrix)).nonzero().flatten()
        rows = slice(self._size, self._size + significant.numel())
        self._values[rows] = values[significant]
        self._right[rows] = right[significant]
        torch.div(left[significant], values[significant, None], out=self._left[rows])
        self._size = rows.stop

    def recomposed(self) -> torch.Tensor:
        left, values, right = (each[: self._size] for each in (self._left, self._values, self._right))
        middle = (_whitener(left) * values) @ _whitener(right)
        return left.T @ (middle @ right)


def _whitener(rows: torch.Tensor) -> torch.Tensor:
    """The inverse square root of the Gram matrix of ``rows``, on their span: makes them orthonormal."""
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    spans = values > _ROUNDING**2 * values.sum()
    whitener: torch.Tensor = (vectors * values.rsqrt().where(spans, 0.0)) @ vectors.T
    return whitener


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else None


def _is_finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _average(tile: Tile, settings: Settings) -> torch.Tensor:
    """``B + lambda * sum w d / K``: for vectors, and for matrices that are not finite, which the result must
    show."""
    factor = settings.number("lambda") / len(tile.sources)
    return sum_on_base(tile, settings.per_source("weight"), factor)


# Of a square matrix, the costliest shape. About half of it is the libraries' own workspace, which only the
# resident size of the process shows: 16.1 was measured for both methods.
_SCRATCH = 18.0

_UNSURE = 4.0
"""Singular values within this factor of the rounding threshold are undecided."""


class _Reference:
    def __init__(self, tensor: reference.LogicalTensor, *, name: str) -> None:
        """Raises Undecided where rounding decides which singular values count."""
        settings = tensor.settings
        self._weights = settings.per_source("weight")
        self._factor = settings.number("lambda")
        self._change: reference.Floats | None = None
        shape = settings.shape
        if len(shape) < 2 or (name == "tsv_m" and min(_matrix(shape)) < tensor.num_sources):
            return
        block = tensor.block(0, tensor.num_elements)
        deltas = np.array(self._weights)[:, None] * block.sources
        matrices = deltas.reshape(len(deltas), *_matrix(shape))
        change, gap = (
            _reference_levelled(matrices.sum(0)) if name == "iso_c" else _reference_whitened(matrices)
        )
        self._change = self._factor * change.reshape(-1)
        # A direction turns by what moves the matrix, over how far apart singular values are.
        size = float(np.abs(deltas).sum(0).max(initial=0.0))
        largest = float(np.abs(self._change).max(initial=0.0))
        doubt = 0.0 if block.doubts is None else float(block.doubts.max())
        self._doubt = (reference.DOUBT * (largest + abs(self._factor) * size) + doubt) * gap

    def __call__(self, block: reference.Block) -> reference.Expected:
        if self._change is None:
            each = [self._factor * weight / len(self._weights) for weight in self._weights]
            return reference.combination(block, each)
        assert block.base is not None
        values = block.base + self._change[block.start : block.start + len(block.base)]
        return reference.Expected(values, reference.DOUBT * block.largest + self._doubt)


def _reference_levelled(matrix: reference.Floats) -> tuple[reference.Floats, float]:
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = _rank(values)
    mean = float(values[:rank].mean()) if rank else 0.0
    gap = float(values[0] / values[rank - 1]) if rank else 1.0
    return (left[:, :rank] * mean) @ right[:rank], max(1.0, gap)


def _reference_whitened(matrices: reference.Floats) -> tuple[reference.Floats, float]:
    """The orthonormalised leading directions of all matrices; and how much that amplifies a change of
    them."""
    each = min(matrices.shape[1:]) // len(matrices)
    lefts, sizes, rights, gap = [], [], [], 1.0
    for matrix in matrices:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
        rank = min(each, _rank(values))
        lefts.append(left[:, :rank].T)
        sizes.append(values[:rank])
        rights.append(right[:rank])
        if 0 < rank < len(values) and values[rank] > 0:
            gap = max(gap, float(values[0] / max(values[rank - 1] - values[rank], 1e-300)))
    left, right = (_orthonormal(np.concatenate(rows)) for rows in (lefts, rights))
    return left.T @ (np.concatenate(sizes)[:, None] * right), gap


def _orthonormal(rows: reference.Floats) -> reference.Floats:
    """The orthonormal rows nearest to ``rows``; shared directions count once. Raises Undecided where rounding
    decides how many there are."""
    left, values, right = np.linalg.svd(rows, full_matrices=False)
    limit = _ROUNDING * np.sqrt((values**2).sum())
    if bool(((values > limit / _UNSURE) & (values < limit * _UNSURE)).any()):
        raise reference.Undecided("two of its singular directions are equal to rounding, or nearly so")
    spans = values > limit
    return np.asarray(left[:, spans] @ right[spans])


def _rank(values: reference.Floats) -> int:
    limit = _ROUNDING * float(np.sqrt((values**2).sum()))
    if bool(((values > limit / _UNSURE) & (values < limit * _UNSURE)).any()):
        raise reference.Undecided("one of its singular values is as large as what rounding leaves")
    return int((values > limit).sum())


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


ISO_C = Method(
    name="iso_c",
    summary="The base plus the sum of the deltas, all its singular values made equal.",
    paper="2502.04959",
    access=Access.MATRIX,
    decomposes=True,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=IsoCKernel(),
    reference=reference.Reference(partial(_Reference, name="iso_c"), whole=True),
    parameters=(delta_weight(1.0), LAMBDA),
    scratch=_SCRATCH,
)

TSV_M = replace(
    ISO_C,
    name="tsv_m",
    summary="The base plus the leading singular directions of each delta, made orthogonal between sources.",
    paper="2412.00081",
    kernel=TsvMKernel(),
    reference=reference.Reference(partial(_Reference, name="tsv_m"), whole=True),
)
