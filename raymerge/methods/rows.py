"""Inner products along rows and along columns, the same bits for every tiling and number of threads.

Like ``reduce``, only that there are many sums. Each row is a vector by itself: what else is in the tile
cannot change it. Columns are folded in groups of ROW_GROUP rows, which no tile cuts, and group after group;
what lacks to a whole group counts as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raymerge.methods.method import ROW_GROUP
from raymerge.methods.reduce import PIECE, RUN, chunk_length, elements, flat, folded, piece_sums


def row_grams(vectors: torch.Tensor, origin: torch.Tensor | None, row_length: int) -> torch.Tensor:
    """The inner products of all pairs of vectors, for each row of them.

    Args:
        vectors: float32 ``[N, rows * row_length]``, the elements of a vector side by side.
        origin: float32 ``[rows * row_length]``, subtracted from all of them first.
        row_length: elements of a row.

    Returns:
        float64 ``[N (N + 1) / 2, rows]``: of each vector with those before it and with itself.
    """
    if not vectors.is_cpu:
        return row_grams_in_torch(vectors, origin, row_length)
    from raymerge.kernels import sums

    count, length = vectors.shape
    totals = torch.zeros(length // row_length, count * (count + 1) // 2, dtype=torch.float64)
    sums.add_grams(totals.numpy(), flat(vectors), vectors.stride(0), count, elements(origin))
    return totals.T


def row_grams_in_torch(vectors: torch.Tensor, origin: torch.Tensor | None, row_length: int) -> torch.Tensor:
    """The same sums as ``row_grams``, on any device."""
    count, length = vectors.shape
    shape = (count * (count + 1) // 2, length // row_length)
    totals = torch.zeros(shape, dtype=torch.float64, device=vectors.device)
    pairs = [(left, right) for left in range(count) for right in range(left + 1)]
    for total, (left, right) in zip(totals, pairs, strict=True):
        _add_rows(total, difference(vectors[left], origin), difference(vectors[right], origin), row_length)
    return totals


def difference(vector: torch.Tensor, origin: torch.Tensor | None) -> torch.Tensor:
    """The vector less the origin; the vector itself without one."""
    return vector if origin is None else vector - origin


def _add_rows(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, row_length: int) -> None:
    """Add the inner product of each row of ``left`` with the same row of ``right``."""
    lefts, rights = left.view(-1, row_length), right.view(-1, row_length)
    for begin in range(0, row_length, PIECE):
        columns = slice(begin, min(begin + PIECE, row_length))
        width = RUN << ((columns.stop - begin - 1) // RUN).bit_length()
        for rows in row_batches(lefts.shape[0], width, left.numel(), left.device):
            products = left.new_zeros((rows.stop - rows.start, width), dtype=torch.float64)
            part = products[:, : columns.stop - begin]
            part.copy_(lefts[rows, columns]).mul_(rights[rows, columns])
            total[rows].add_(piece_sums(products))


def add_column_pairs(totals: torch.Tensor, matrices: torch.Tensor, origin: torch.Tensor | None) -> None:
    """Add the inner products of the columns of two matrices.

    Args:
        totals: float64 ``[3, row_length]``, written to: of first and first, first and second, second and
            second.
        matrices: float32 ``[2, rows * row_length]``; the first row has a multiple of ROW_GROUP as its number.
        origin: float32 ``[rows * row_length]``, subtracted from both first.
    """
    if not matrices.is_cpu:
        add_column_pairs_in_torch(totals, matrices, origin)
        return
    from raymerge.kernels import sums

    sums.add_columns(totals.numpy(), matrices[0].numpy(), matrices[1].numpy(), elements(origin))


def add_column_pairs_in_torch(
    totals: torch.Tensor, matrices: torch.Tensor, origin: torch.Tensor | None
) -> None:
    """The same sums as ``add_column_pairs``, on any device."""
    first, second = difference(matrices[0], origin), difference(matrices[1], origin)
    for total, pair in zip(totals, ((first, first), (first, second), (second, second)), strict=True):
        _add_columns(total, *pair)


def _add_columns(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the inner product of each column of ``left`` with the same column of ``right``."""
    lefts, rights = left.view(-1, total.numel()), right.view(-1, total.numel())
    width = min(total.numel(), chunk_length(left.numel(), left.device) // ROW_GROUP)
    num_groups = -(-lefts.shape[0] // ROW_GROUP)
    for begin in range(0, total.numel(), width):
        columns = slice(begin, begin + width)
        for groups in row_batches(num_groups, ROW_GROUP * width, left.numel(), left.device):
            rows = slice(groups.start * ROW_GROUP, groups.stop * ROW_GROUP)
            _add_groups(total[columns], lefts[rows, columns].double().mul_(rights[rows, columns]))


def row_batches(num_rows: int, row_length: int, num_elements: int, device: torch.device) -> Iterator[slice]:
    """Runs of rows covering ``[0, num_rows)``, of as many elements as may be in work at once, but one row
    at least; their length changes no result."""
    length = max(1, chunk_length(num_elements, device) // row_length)
    for begin in range(0, num_rows, length):
        yield slice(begin, min(begin + length, num_rows))


def _add_groups(total: torch.Tensor, products: torch.Tensor) -> None:
    """Add the sums of each group of ROW_GROUP rows, and of the rest; ``products`` is overwritten."""
    whole = products.shape[0] // ROW_GROUP * ROW_GROUP
    groups = folded(products[:whole].view(-1, ROW_GROUP, products.shape[1]), dim=1)
    # By index: to go through a tensor makes one of every group, all at once.
    for index in range(groups.shape[0]):
        total.add_(groups[index])
    if whole < products.shape[0]:
        rest = products.new_zeros((ROW_GROUP, products.shape[1]))
        rest[: products.shape[0] - whole] = products[whole:]
        total.add_(folded(rest, dim=0))
