"""Reductions over tensors, rows and columns, with the same bits for every tiling, thread count and device.

The order is part of the definition, in plain float64 additions. A piece of 16,384 elements consists of runs
of 256, each of them 16 rows of 16; a run's rows are folded in halves to 16 lanes, then the runs of the piece,
then the lanes. Pieces are added one after the other, the last padded with zeros.

Each row is a vector by itself: what else is in the tile cannot change it. Columns are folded in groups of
ROW_GROUP rows, which no tile cuts, and group after group, the last padded with zeros.

``raymerge.kernels.sums`` has the loops for the CPU; the forms in torch serve all devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from raymerge.deferred import torch
from raymerge.methods import loops
from raymerge.methods.kernel import BLOCK, ROW_GROUP

PIECE = BLOCK // 4
"""Elements folded into one float64; divides BLOCK, so that tiles never cut a piece."""

RUN, LANES = 256, 16

# A processor is fastest on what its cache holds, a GPU on what hides the launch of its operations.
_LONGEST_CPU_CHUNK = 1 << 17
_LONGEST_GPU_CHUNK = 1 << 22


def flat(rows: torch.Tensor) -> npt.NDArray[np.float32]:
    """All memory of a matrix ``[N, n]`` from its first element to its last; row r starts at ``r *
    stride(0)``."""
    if rows.is_contiguous():
        return rows.numpy().reshape(-1)
    count, length = rows.shape
    span = (count - 1) * rows.stride(0) + length if length and count else 0
    elements: npt.NDArray[np.float32] = rows.as_strided((span,), (1,)).numpy()
    return elements


def row_places(rows: torch.Tensor) -> npt.NDArray[np.int64]:
    return np.arange(rows.shape[0], dtype=np.int64) * rows.stride(0)


def elements(vector: torch.Tensor | None) -> npt.NDArray[np.float32]:
    """As numpy; empty for None."""
    return np.empty(0, dtype=np.float32) if vector is None else vector.numpy()


def chunks(num_elements: int, device: torch.device) -> Iterator[slice]:
    """Runs of whole pieces covering ``[0, num_elements)``; their length changes no result."""
    length = chunk_length(num_elements, device)
    for begin in range(0, num_elements, length):
        yield slice(begin, min(begin + length, num_elements))


def chunk_length(num_elements: int, device: torch.device) -> int:
    """Elements processed at once: whole pieces. On the processor their two 8-byte temporaries take no more
    than one float32 tile of ``max(num_elements, BLOCK)``; a GPU takes what it is given, up to a limit,
    and its pieces are sized for that."""
    if device.type != "cpu":
        return _LONGEST_GPU_CHUNK
    return max(PIECE, min(_LONGEST_CPU_CHUNK, num_elements // 4 // PIECE * PIECE))


def bring_to_host(*lists: list[torch.Tensor]) -> None:
    """Replace the 64-bit tensors in some lists by copies on the host.

    It waits once for all of them, until a GPU has done what was begun before."""
    on_gpu = [(each, index) for each in lists for index in range(len(each)) if not each[index].is_cpu]
    if not on_gpu:
        return
    flattened = [each[index].reshape(-1).view(torch.int64) for each, index in on_gpu]
    parts = torch.split(torch.cat(flattened).cpu(), [len(part) for part in flattened])
    for (each, index), part in zip(on_gpu, parts, strict=True):
        each[index] = part.view(each[index].dtype)


class PieceSums:
    """Sums over the tiles of a tensor, each in float64 and in piece order.

    What a GPU's tiles add stays there until somebody asks for the totals."""

    def __init__(self, count: int) -> None:
        self._totals = np.zeros(count)
        self._places: list[int] = []
        self.pending: list[torch.Tensor] = []
        """Sums of pieces, float64 ``[pieces]``, still to be added; ``bring_to_host`` may take them along."""

    @property
    def totals(self) -> npt.NDArray[np.float64]:
        """``[count]``, for compiled loops to add to."""
        bring_to_host(self.pending)
        for place, pieces in zip(self._places, self.pending, strict=True):
            total = float(self._totals[place])
            for partial in pieces.tolist():
                total += partial
            self._totals[place] = total
        self._places.clear()
        self.pending.clear()
        return self._totals

    def add_values(self, place: int, values: torch.Tensor) -> None:
        """Add ``values``, ``[n]``, to a sum."""
        if values.is_cpu:
            self._totals[place] = loops.sums.add_values(self._totals[place], values.numpy())
        else:
            self.add_in_torch(place, values)

    def add_squares(self, place: int, values: torch.Tensor) -> None:
        """Add the squares of float32 ``[n]`` to a sum."""
        if values.is_cpu:
            self._totals[place] = loops.sums.add_squares(self._totals[place], values.numpy())
        else:
            self.add_in_torch(place, values, values)

    def add_pair(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the products of left and left, left and right, right and right to the three sums."""
        if left.is_cpu:
            loops.sums.add_pair(self._totals, left.numpy(), right.numpy())
            return
        for place, pair in enumerate(((left, left), (left, right), (right, right))):
            self.add_in_torch(place, *pair)

    def add_in_torch(self, place: int, left: torch.Tensor, right: torch.Tensor | None = None) -> None:
        """Add ``left``, or its products with ``right``, float32 ``[n]``."""
        for chunk in chunks(left.numel(), left.device):
            products = _padded(left[chunk])
            if left is right:
                products.mul_(products)
            elif right is not None:
                products[: chunk.stop - chunk.start].mul_(right[chunk])
            self._places.append(place)
            self.pending.append(piece_sums(products.view(-1, PIECE)))


def _padded(values: torch.Tensor) -> torch.Tensor:
    """float64 copy, filled up with zeros to whole pieces."""
    num_pieces = -(-values.numel() // PIECE)
    padded = torch.zeros(num_pieces * PIECE, dtype=torch.float64, device=values.device)
    padded[: values.numel()].copy_(values)
    return padded


def piece_sums(pieces: torch.Tensor) -> torch.Tensor:
    """The sum of each piece, float64 ``[pieces]``, of float64 ``[pieces, m]``, which is overwritten. m is RUN
    times a power of two up to PIECE: the rest of a piece may be left out where it is all zeros."""
    lanes = folded(pieces.view(-1, RUN // LANES, LANES), dim=1)
    return folded(lanes.reshape(pieces.shape[0], pieces.shape[1] // (RUN // LANES)), dim=1)


def folded(values: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Sums along a dimension that is not empty, folded in halves; ``values`` is overwritten. Of an odd number
    the middle one waits for the next round."""
    width = values.shape[dim]
    while width > 1:
        half = (width + 1) // 2
        values.narrow(dim, 0, width - half).add_(values.narrow(dim, half, width - half))
        width = half
    return values.select(dim, 0)


def row_grams(vectors: torch.Tensor, origin: torch.Tensor | None, row_length: int) -> torch.Tensor:
    """Inner products of all pairs (each vector with those before it and with itself) of float32 ``[N, rows *
    row_length]``, less the origin, for each row: float64 ``[N (N + 1) / 2, rows]``."""
    if not vectors.is_cpu:
        return row_grams_in_torch(vectors, origin, row_length)
    count, length = vectors.shape
    totals = torch.zeros(length // row_length, count * (count + 1) // 2, dtype=torch.float64)
    loops.sums.add_grams(totals.numpy(), flat(vectors), row_places(vectors), length, elements(origin))
    return totals.T


def row_grams_in_torch(vectors: torch.Tensor, origin: torch.Tensor | None, row_length: int) -> torch.Tensor:
    count, length = vectors.shape
    shape = (count * (count + 1) // 2, length // row_length)
    totals = torch.zeros(shape, dtype=torch.float64, device=vectors.device)
    pairs = [(left, right) for left in range(count) for right in range(left + 1)]
    for total, (left, right) in zip(totals, pairs, strict=True):
        _add_rows(total, difference(vectors[left], origin), difference(vectors[right], origin), row_length)
    return totals


def difference(vector: torch.Tensor, origin: torch.Tensor | None) -> torch.Tensor:
    return vector if origin is None else vector - origin


def _add_rows(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, row_length: int) -> None:
    """Add the inner products of each row of ``left`` and ``right``."""
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
    """Add the inner products (first and first, first and second, second and second) of the columns of two
    matrices, float32 ``[2, rows * row_length]``, less the origin, to float64 ``[3, row_length]``. The first
    row's number is a multiple of ROW_GROUP."""
    first, second = difference(matrices[0], origin), difference(matrices[1], origin)
    for total, pair in zip(totals, ((first, first), (first, second), (second, second)), strict=True):
        _add_columns(total, *pair)


def _add_columns(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the inner products of each column of ``left`` and ``right``."""
    lefts, rights = left.view(-1, total.numel()), right.view(-1, total.numel())
    width = min(total.numel(), chunk_length(left.numel(), left.device) // ROW_GROUP)
    num_groups = -(-lefts.shape[0] // ROW_GROUP)
    for begin in range(0, total.numel(), width):
        columns = slice(begin, begin + width)
        for groups in row_batches(num_groups, ROW_GROUP * width, left.numel(), left.device):
            rows = slice(groups.start * ROW_GROUP, groups.stop * ROW_GROUP)
            _add_groups(total[columns], lefts[rows, columns].double().mul_(rights[rows, columns]))


def row_batches(num_rows: int, row_length: int, num_elements: int, device: torch.device) -> Iterator[slice]:
    """Runs of rows covering ``[0, num_rows)``, as many as may be processed at once and at least one; their
    length changes no result."""
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
