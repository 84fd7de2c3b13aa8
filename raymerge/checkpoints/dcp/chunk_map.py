"""A tensor of several chunks as one run of bytes: which bytes of which files stand where in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raymerge.checkpoints.dcp.metadata import SavedTensor

_Ints = npt.NDArray[np.int64]
_MOST_CELLS = 1 << 22


def coverage_fault(tensor: SavedTensor) -> str:
    """What is wrong with how chunks share out a tensor's elements, as the end of a sentence; "" if each is in
    exactly one."""
    boxes = [(each.begin, each.sizes) for each in tensor.chunks if math.prod(each.sizes)]
    if not boxes:
        return "has elements, but no chunk" if math.prod(tensor.shape) else ""
    cuts = [
        np.unique([edge for begin, sizes in boxes for edge in (begin[dim], begin[dim] + sizes[dim])])
        for dim in range(len(tensor.shape))
    ]
    cells = [len(edges) - 1 for edges in cuts]
    if math.prod(cells) > _MOST_CELLS:
        return f"has {len(boxes)} chunks whose edges are no grid"
    counts = np.zeros(cells, dtype=np.int32)
    for begin, sizes in boxes:
        edges = zip(cuts, begin, sizes, strict=True)
        counts[tuple(slice(*np.searchsorted(own, (at, at + size))) for own, at, size in edges)] += 1
    if (counts > 1).any():
        return "has chunks that overlap"
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    return "" if volume == math.prod(tensor.shape) else "has elements that are in none of its chunks"


class Piece(NamedTuple):
    """``rows * width`` bytes of a file, that stand in rows of ``width`` bytes, ``stride`` apart."""

    file: int
    offset: int
    to: int
    rows: int
    width: int
    stride: int


class ChunkMap:
    """The chunks of a tensor, cut into lines: what one index of all dimensions but the last ones that no
    chunk cuts stands for. A chunk has a part of the same columns of each of its lines, and these parts lie
    side by side in its file."""

    def __init__(self, tensor: SavedTensor, files: Sequence[int], offsets: Sequence[int]) -> None:
        """``files`` and ``offsets``: where the elements of each chunk are."""
        # A scalar is one line of one element.
        shape = tensor.shape or (1,)
        boxes = [(each.begin or (0,), each.sizes or (1,)) for each in tensor.chunks]
        cuts = (dim for _, sizes in boxes for dim, size in enumerate(sizes) if size != shape[dim])
        cut = max(cuts, default=0)
        unit = tensor.dtype.nbytes(math.prod(shape[cut + 1 :]))
        self._line = shape[cut] * unit
        rows = [
            run
            for (begin, sizes), *place in zip(boxes, files, offsets, strict=True)
            if math.prod(sizes)
            for run in _runs(shape, begin, sizes, cut, unit, (place[0], place[1]))
        ]
        self._runs: _Ints = np.array(sorted(rows), dtype=np.int64).reshape(-1, 6)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """What a run of its bytes consists of; ``to`` counts from its first one."""
        line = self._line
        first, last = begin // line, -(-end // line)
        if last - first == 1:
            yield from self._block(first, last, begin - first * line, end - first * line, begin)
            return
        if begin % line:
            yield from self._block(first, first + 1, begin % line, line, begin)
            first += 1
        if end % line:
            last -= 1
            yield from self._block(last, last + 1, 0, end % line, begin)
        if first < last:
            yield from self._block(first, last, 0, line, begin)

    def _block(self, first: int, last: int, left: int, right: int, begin: int) -> Iterator[Piece]:
        """Of the lines from ``first`` to ``last`` the bytes from ``left`` to ``right``: all, if there are
        several."""
        run, count, column, width = self._runs[:, :4].T
        which = (run < last) & (run + count > first) & (column < right) & (column + width > left)
        for at, lines, start, wide, file, offset in self._runs[which].tolist():
            top, bottom = max(first, at), min(last, at + lines)
            own, stop = max(left, start), min(right, start + wide)
            rows = bottom - top
            where, to = offset + (top - at) * wide + own - start, top * self._line + own - begin
            if wide == self._line:
                yield Piece(file, where, to, 1, (rows - 1) * wide + stop - own, self._line)
            else:
                yield Piece(file, where, to, rows, stop - own, self._line)


def _runs(
    shape: tuple[int, ...],
    begin: tuple[int, ...],
    sizes: tuple[int, ...],
    cut: int,
    unit: int,
    place: tuple[int, int],
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Lines of a chunk that follow each other: first, count, column, width, file, offset."""
    column, width = begin[cut] * unit, sizes[cut] * unit
    file, offset = place
    if not cut:
        yield 0, 1, column, width, file, offset
        return
    steps = [math.prod(shape[dim + 1 : cut]) for dim in range(cut)]
    count = sizes[cut - 1]
    for index in product(
        *(range(at, at + size) for at, size in zip(begin[: cut - 1], sizes[: cut - 1], strict=True))
    ):
        first = sum(at * step for at, step in zip((*index, begin[cut - 1]), steps, strict=True))
        yield first, count, column, width, file, offset
        offset += count * width
