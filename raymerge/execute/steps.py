"""The tiles of a segment's rows, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymerge.execute.assembled import AssembledInput
from raymerge.execute.jobs import RowJob
from raymerge.methods import ROW_GROUP
from raymerge.planner.expressions import Read
from raymerge.planner.memory import Tiling, expression_passes, tiling

WRITING = -1
"""The pass that writes."""
PADDING = -2
"""The pass that takes the mean of the rows of padded inputs, before all others."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tile of one row in one pass."""

    row: RowJob
    """The row."""
    start: int
    """First element of the tile within the row; in the padding pass within the logical tensor."""
    count: int
    """Elements of the tile."""
    pass_index: int
    """Statistics pass, WRITING or PADDING."""
    begins_row: bool
    """Whether this is the first tile of all."""
    ends_pass: bool
    """Whether this is the last tile of its pass."""
    resident: bool
    """Whether the bytes read are kept for the later passes."""
    peak: int
    """Bytes that a slot uses while the row is made."""

    def span(self, source: Read) -> tuple[int, int]:
        """First byte and number of bytes that the tile takes of an input."""
        if self.count == self.row.num_elements:
            return source.offset, source.nbytes
        return source.offset + source.dtype.nbytes(self.start), source.dtype.nbytes(self.count)

    def window(self, source: AssembledInput) -> tuple[int, int]:
        """The rows of an assembled input that hold the tile: first and stop."""
        limit = source.real_rows if self.pass_index == PADDING else source.num_rows
        if not self.row.is_flat:
            return 0, limit
        first = self._first_element // source.num_columns
        stop = -(-(self._first_element + self.count) // source.num_columns)
        return min(first, limit), min(stop, limit)

    def place(self, source: AssembledInput) -> tuple[int, int]:
        """First element of the tile within that window, and how many there are."""
        if not self.row.is_flat:
            return 0, source.num_rows * source.num_columns
        return self._first_element - self.window(source)[0] * source.num_columns, self.count

    @property
    def _first_element(self) -> int:
        return self.start if self.pass_index == PADDING else self.row.first_element + self.start


def steps(rows: Sequence[RowJob], budget: int) -> Iterator[Step]:
    """Every tile of every pass of some rows under a worker's budget."""
    for row in rows:
        passes = expression_passes(row.expression, row.parts[0].shape)
        tile = tiling(row.need, row.num_elements, budget, passes=passes)
        size = tile.elements if row.is_flat else max(1, row.num_elements)
        padded = _padding(row, size, tile)
        yield from padded
        for index in (*range(passes), WRITING):
            begins = not padded and index == (0 if passes else WRITING)
            yield from _pass(row, index, (row.num_elements, size), tile, begins=begins)


def _padding(row: RowJob, size: int, tile: Tiling) -> tuple[Step, ...]:
    """The tiles of the padding pass: whole groups of rows, as far as padded inputs have rows of their own."""
    padded = [each for each in row.inputs if isinstance(each, AssembledInput) and each.is_padded]
    if not padded:
        return ()
    group = ROW_GROUP * padded[0].num_columns
    elements = max(each.real_rows * each.num_columns for each in padded)
    cut = max(1, size // group) * group if row.is_flat else elements
    return tuple(_pass(row, PADDING, (elements, cut), tile, begins=True))


def _pass(
    row: RowJob, index: int, elements: tuple[int, int], tile: Tiling, *, begins: bool
) -> Iterator[Step]:
    total, size = elements
    for start in range(0, max(1, total), size):
        count = min(size, total - start)
        ends = start + count >= total
        yield Step(row, start, count, index, begins and not start, ends, tile.resident, tile.peak)
