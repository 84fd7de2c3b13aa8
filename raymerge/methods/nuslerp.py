"""Interpolation along the arc between two tensors or two deltas, each taken as one vector, or row by row, or
column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from raymerge.deferred import torch
from raymerge.methods import reference
from raymerge.methods.combine import Coefficients, arc_coefficients, excess_of, points_of_arcs
from raymerge.methods.gram import CombinationKernel, Gram
from raymerge.methods.kernel import Kernel, Settings, Tile
from raymerge.methods.method import Access, BaseUse, Method, Parameter
from raymerge.methods.reduce import add_column_pairs, row_batches, row_grams

_CANCELS = 1e-6
# Vectors; the numbers of one take about 200 bytes as Python's objects, so these take less than a tile.
_VECTORS_AT_ONCE = 1024
# Elements; the numbers of a vector that is shorter take more memory than half of its elements.
_SHORT = 16


class _Whole(CombinationKernel):
    def coefficients(self, gram: Gram, settings: Settings) -> Coefficients:
        return arc_coefficients(gram.product(0, 0), gram.product(0, 1), gram.product(1, 1), t=_turn(settings))


class _Rows(Kernel):
    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """In batches, where rows are short."""
        length, turn = settings.row_length, _turn(settings)
        if length >= _SHORT:
            return _of_rows(tile, length, turn)
        merged = torch.empty_like(tile.sources[0])
        for rows in _batches(merged, length):
            run = slice(rows.start * length, rows.stop * length)
            base = None if tile.base is None else tile.base[run]
            merged[run] = _of_rows(Tile(base, tile.sources[:, run], 0), length, turn)
        return merged


@dataclass(slots=True)
class _ColumnStatistics:
    sums: torch.Tensor
    """Of the tiles seen so far; see ``_column_sums``."""
    factors: torch.Tensor | None = None
    """See ``_factors``; set after the pass."""


class _Columns(Kernel):
    def passes(self, settings: Settings) -> int:
        return 1

    def begin(self, settings: Settings, num_elements: int, device: torch.device) -> _ColumnStatistics:
        return _ColumnStatistics(torch.zeros(3, settings.row_length, dtype=torch.float64, device=device))

    def observe(self, state: _ColumnStatistics, tile: Tile, settings: Settings, pass_index: int) -> None:
        add_column_pairs(state.sums, tile.sources, tile.base)

    def conclude(self, state: _ColumnStatistics, settings: Settings, pass_index: int) -> bool:
        state.factors = _factors(state.sums, _turn(settings))
        return False

    def apply(self, tile: Tile, settings: Settings, state: _ColumnStatistics) -> torch.Tensor:
        assert state.factors is not None
        return _blended(tile, state.factors, _turn(settings), by_column=True)


class _FirstDimension(Kernel):
    """An arc for each run along the first of three or more dimensions, with the whole tensor as one tile:
    such runs are too many for statistics."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        """In batches of columns, where they are short."""
        num_rows, turn = max(1, settings.shape[0]), _turn(settings)
        if num_rows >= _SHORT:
            return _of_columns(tile, num_rows, turn)
        merged = torch.empty_like(tile.sources[0])
        matrix = merged.view(num_rows, -1) if merged.numel() else merged.view(num_rows, 0)
        for columns in _batches(merged, num_rows):
            part = _of_columns(_cut(tile, columns, num_rows), num_rows, turn)
            matrix[:, columns] = part.view(num_rows, -1)
        return merged


def _of_rows(tile: Tile, length: int, turn: float) -> torch.Tensor:
    return _blended(tile, _factors(row_grams(tile.sources, tile.base, length), turn), turn)


def _of_columns(tile: Tile, num_rows: int, turn: float) -> torch.Tensor:
    shape, device = (3, tile.sources.shape[1] // num_rows), tile.sources.device
    sums = torch.zeros(shape, dtype=torch.float64, device=device)
    add_column_pairs(sums, tile.sources, tile.base)
    return _blended(tile, _factors(sums, turn), turn, by_column=True)


def _batches(elements: torch.Tensor, length: int) -> Iterator[slice]:
    """Batches of short vectors of ``length`` elements each."""
    count = elements.numel()
    return row_batches(count // length, _SHORT, count, elements.device)


def _cut(tile: Tile, columns: slice, num_rows: int) -> Tile:

    def cut(elements: torch.Tensor) -> torch.Tensor:
        return elements.view(num_rows, -1)[:, columns].reshape(-1)

    base = None if tile.base is None else cut(tile.base)
    return Tile(base, torch.stack([cut(source) for source in tile.sources]), 0)


def _factors(sums: torch.Tensor, turn: float) -> torch.Tensor:
    """Factors of ``points_of_arcs``, float32 ``[2, vectors]``, from inner products, float64 ``[3, vectors]``.

    Angle by angle in Python: a library's vectorised sine may depend on the alignment of each number. In
    batches, since numbers take more memory in Python than in a tensor."""
    factors = torch.empty(2, sums.shape[1], dtype=torch.float32, device=sums.device)
    for begin in range(0, sums.shape[1], _VECTORS_AT_ONCE):
        vectors = slice(begin, begin + _VECTORS_AT_ONCE)
        products = zip(*sums[:, vectors].tolist(), strict=True)
        pairs = [arc_coefficients(*each, t=turn) for each in products]
        farther = [pair[0 if turn >= 0.5 else 1] for pair in pairs]
        excess = [excess_of(pair) for pair in pairs]
        factors[:, vectors] = torch.tensor([excess, farther], dtype=torch.float32)
    return factors


def _blended(tile: Tile, factors: torch.Tensor, turn: float, *, by_column: bool = False) -> torch.Tensor:
    nearer = int(turn >= 0.5)
    start, other = tile.sources[nearer], tile.sources[1 - nearer]
    return points_of_arcs(start, other, tile.base, factors, by_column=by_column)


def _turn(settings: Settings) -> float:
    """The share t; a half when the weights cancel out."""
    first, second = settings.per_source("weight")
    if abs(first + second) <= _CANCELS * (abs(first) + abs(second)):
        return 0.5
    return second / (first + second)


_WHOLE, _ROWS, _COLUMNS, _FIRST_DIMENSION = _Whole(), _Rows(), _Columns(), _FirstDimension()


def _kernel(settings: Settings) -> Kernel:
    """The arc from the first to the second source (delta, with a base), ``t = w_2 / (w_1 + w_2)`` of the way.

    The vectors are the whole tensor; without ``nuslerp_flatten`` the runs along its last dimension, with
    ``nuslerp_row_wise`` those along its first one. A vector is one run along its only dimension."""
    if settings.flag("nuslerp_flatten") or len(settings.shape) < 2:
        return _WHOLE
    if not settings.flag("nuslerp_row_wise"):
        return _ROWS
    return _COLUMNS if len(settings.shape) == 2 else _FIRST_DIMENSION


def _access(settings: Settings) -> Access:
    kernel = _kernel(settings)
    if kernel is _WHOLE:
        return Access.TENSOR
    return Access.MATRIX if kernel is _FIRST_DIMENSION else Access.ROW


def _reference(tensor: reference.LogicalTensor) -> Callable[[reference.Block], reference.Expected]:
    settings = tensor.settings
    if settings.flag("nuslerp_flatten") or len(settings.shape) < 2:
        gram = reference.inner_products(tensor, reference.differences)
        return reference.Combined(
            reference.arc_pair(gram[0, 0], gram[0, 1], gram[1, 1], _reference_turn(settings)), origin=True
        )
    return _ReferenceColumns(tensor) if settings.flag("nuslerp_row_wise") else _ReferenceRows(tensor)


def _reference_turn(settings: Settings) -> float:
    first, second = settings.per_source("weight")
    if abs(first + second) <= 1e-6 * (abs(first) + abs(second)):
        return 0.5
    return second / (first + second)


class _ReferenceRows:
    def __init__(self, tensor: reference.LogicalTensor) -> None:
        self._length, self._turn = tensor.row_length, _reference_turn(tensor.settings)

    def __call__(self, block: reference.Block) -> reference.Expected:
        pairs = _pairs(
            _products(reference.differences(block).reshape(2, -1, self._length), axis=2), self._turn
        )
        return reference.combination(block, pairs.repeat(self._length, axis=1), origin=True)


class _ReferenceColumns:
    def __init__(self, tensor: reference.LogicalTensor) -> None:
        shape = tensor.settings.shape
        self._columns = max(1, tensor.num_elements // max(1, shape[0]))
        total = np.zeros((3, self._columns))
        for block in tensor.blocks():
            vectors, places = reference.differences(block), block.indices % self._columns
            for index, (left, right) in enumerate(((0, 0), (0, 1), (1, 1))):
                products = vectors[left] * vectors[right]
                total[index] += np.bincount(places, products, minlength=self._columns)
        self._pairs = _pairs(total, _reference_turn(tensor.settings))

    def __call__(self, block: reference.Block) -> reference.Expected:
        return reference.combination(block, self._pairs[:, block.indices % self._columns], origin=True)


def _products(vectors: reference.Floats, axis: int) -> reference.Floats:
    """Inner products of two vectors with themselves and each other ``[3, vectors]``."""
    first, second = vectors
    products = (first * first, first * second, second * second)
    return np.stack([each.sum(axis - 1) for each in products])


def _pairs(sums: reference.Floats, t: float) -> reference.Floats:
    """Coefficients of both vectors of each arc ``[2, vectors]``."""
    pairs = [reference.arc_pair(first, mixed, second, t) for first, mixed, second in sums.T.tolist()]
    return np.array(pairs).reshape(-1, 2).T


NUSLERP = Method(
    name="nuslerp",
    summary="Spherical interpolation between two sources, or between their deltas.",
    access=Access.MATRIX,
    base=BaseUse.OPTIONAL,
    kernel=_WHOLE,
    reference=reference.Reference(_reference, by_row=True),
    parameters=(
        Parameter("weight", "float", "source", "share of the way to the source", required=True),
        Parameter.switch("nuslerp_flatten", "one arc for the tensor, not one for each vector", default=True),
        Parameter.switch(
            "nuslerp_row_wise", "vectors along the first dimension, not along the last one", default=False
        ),
    ),
    min_sources=2,
    max_sources=2,
    scratch=4.0,
    state_bytes_per_column=24,
    access_of=_access,
    kernel_of=_kernel,
)
