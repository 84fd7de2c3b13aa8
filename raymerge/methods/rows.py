"""Inner products along rows and along columns, the same bits for every tiling and number of threads.

Like ``reduce``, only that there are many sums. A row is folded by itself: what else is in the tile cannot
change it. Columns are folded in groups of ROW_GROUP rows, which no tile cuts, and group after group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raymerge.methods.method import ROW_GROUP
from raymerge.methods.reduce import PIECE, chunk_length, folded


def row_products(left: torch.Tensor, right: torch.Tensor, row_length: int) -> torch.Tensor:
    """The inner product of each row of ``left`` with the same row of ``right``.

    A row is cut into pieces of 16,384 elements; each is folded in halves and added to those before it.

    Args:
        left: float32 ``[rows * row_length]``.
        right: the same.
        row_length: elements of a row.

    Returns:
        float64 ``[rows]``.
    """
    lefts, rights = left.view(-1, row_length), right.view(-1, row_length)
    totals = torch.zeros(lefts.shape[0], dtype=torch.float64, device=left.device)
    for rows in row_batches(lefts.shape[0], min(row_length, PIECE), left.numel(), left.device):
        for begin in range(0, row_length, PIECE):
            columns = slice(begin, begin + PIECE)
            # Never by a name, which would keep it alive while the next one is made.
            totals[rows].add_(folded(lefts[rows, columns].double().mul_(rights[rows, columns]), dim=1))
    return totals


def column_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, row_length: int) -> None:
    """Add to ``total`` the inner product of each column of ``left`` with the same column of ``right``.

    Args:
        total: float64 ``[row_length]``, written to.
        left: float32 ``[rows * row_length]``; its first row has a multiple of ROW_GROUP as its number.
        right: the same.
        row_length: elements of a row.
    """
    lefts, rights = left.view(-1, row_length), right.view(-1, row_length)
    width = min(row_length, chunk_length(left.numel(), left.device) // ROW_GROUP)
    num_groups = -(-lefts.shape[0] // ROW_GROUP)
    for begin in range(0, row_length, width):
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
    for group in folded(products[:whole].view(-1, ROW_GROUP, products.shape[1]), dim=1):
        total.add_(group)
    if whole < products.shape[0]:
        total.add_(folded(products[whole:], dim=0))
