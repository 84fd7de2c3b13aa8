"""The tiles of a segment's rows, and the loads in which they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from raymerge.execute.ops import AssembledInput, RowJob
from raymerge.merge_plan.expressions import Read, Scales
from raymerge.merge_plan.memory import Lane, Need, expression_passes, tiling
from raymerge.methods import ROW_GROUP

_GPU_PIECE = 1 << 22
"""Elements that keep a GPU busy for much longer than it takes to tell it what to do."""


@dataclass(frozen=True, slots=True)
class TileJob:
    """A run of elements of one row that is read and computed at once."""

    row: RowJob
    start: int
    """First element within the row; of a padding tile within the logical tensor."""
    count: int
    piece: int
    """Most elements of a piece; 0: the tile is computed at once."""
    is_padding: bool = False
    """Whether it is read for the mean of the rows of padded inputs only, before all others."""

    @property
    def first_element(self) -> int:
        return self.start if self.is_padding else self.row.first_element + self.start

    def span(self, source: Read) -> tuple[int, int]:
        """First byte and number of bytes that the tile takes of an input."""
        if self.count == self.row.num_elements:
            return source.offset, source.nbytes
        return source.offset + source.dtype.nbytes(self.start), source.dtype.nbytes(self.count)

    def scales_span(self, scales: Scales) -> tuple[int, int]:
        if self.count == self.row.num_elements:
            return scales.offset, scales.nbytes
        return scales.of(self.start, self.count)

    def window(self, source: AssembledInput) -> tuple[int, int]:
        """The rows of an assembled input that hold the tile: first and stop."""
        limit = source.real_rows if self.is_padding else source.num_rows
        if not self.row.is_flat:
            return 0, limit
        first = self.first_element // source.num_columns
        stop = -(-(self.first_element + self.count) // source.num_columns)
        return min(first, limit), min(stop, limit)

    def place(self, source: AssembledInput) -> tuple[int, int]:
        if not self.row.is_flat:
            return 0, source.num_rows * source.num_columns
        return self.first_element - self.window(source)[0] * source.num_columns, self.count


@dataclass(frozen=True, slots=True)
class Load:
    """Tiles that are read together: several short rows whole, or one tile of a longer row."""

    tiles: tuple[TileJob, ...]
    nbytes: int
    work_bytes: int
    """Most bytes of the host's memory that computing one of them takes."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Rows of a segment that are made one after the other: any number in one load, or one in several."""

    loads: tuple[Load, ...]
    """What they are read in; of a row in several loads every pass takes them all, in order."""
    padding: tuple[Load, ...]
    """What is read for the mean of padded rows beforehand."""
    joined: tuple[ReadPlan, ...] = ()
    """Rows that are looked at beforehand: the only row here shares the one scale of a matrix with them."""


def read_plans(rows: Sequence[RowJob], lane: Lane, device: torch.device) -> Iterator[ReadPlan]:
    """Cut a segment's rows for a lane: short ones together, long ones into tiles."""
    cut = _cut(rows, lane, device)
    return cut if device.type == "cpu" else map(_without_work, cut)


def _cut(rows: Sequence[RowJob], lane: Lane, device: torch.device) -> Iterator[ReadPlan]:
    batch: list[TileJob] = []
    nbytes = work = 0
    for row in rows:
        need = row.need if device.type == "cpu" else _for_gpu(row.need, lane)
        passes = expression_passes(row.expression, row.parts[0].shape)
        cut = tiling(need, row.num_elements, lane, passes=passes)
        mine = need.load_bytes(row.num_elements)
        if batch and nbytes + mine > lane.load_bytes:
            yield ReadPlan((Load(tuple(batch), nbytes, work),), ())
            batch, nbytes, work = [], 0, 0
        # What is made in place of its input must be nobody else's, and equal bytes of a load are read once.
        is_apart = _padded(row) or need.in_place or bool(row.joined_with)
        if not cut.is_whole(row.num_elements) or is_apart:
            if batch:
                yield ReadPlan((Load(tuple(batch), nbytes, work),), ())
                batch, nbytes, work = [], 0, 0
            joined = tuple(each for other in row.joined_with for each in _cut([other], lane, device))
            yield replace(_long(row, need, cut.elements), joined=joined)
            continue
        batch.append(TileJob(row, 0, row.num_elements, need.piece))
        nbytes += mine
        work = max(work, need.work_bytes(need.piece_of(row.num_elements)))
    if batch:
        yield ReadPlan((Load(tuple(batch), nbytes, work),), ())


def _without_work(read_plan: ReadPlan) -> ReadPlan:
    """A stretch that is computed on a GPU: that takes none of the host's memory."""
    loads, padding = (
        tuple(replace(each, work_bytes=0) for each in loads) for loads in (read_plan.loads, read_plan.padding)
    )
    return ReadPlan(loads, padding, tuple(map(_without_work, read_plan.joined)))


def _for_gpu(need: Need, lane: Lane) -> Need:
    """A need with pieces as large as a GPU wants them, and as its share of the memory holds."""
    if not need.piece:
        return need
    room = int(lane.budget // 2 / max(need.work_per_element, 1.0))
    return replace(need, piece=max(need.piece, min(_GPU_PIECE, room) // need.unit * need.unit))


def _long(row: RowJob, need: Need, elements: int) -> ReadPlan:
    """A row of several tiles, or with a pass of its own."""
    padding: tuple[Load, ...] = ()
    padded = _padded(row)
    if padded:
        # Whole groups of rows, as far as padded inputs have rows of their own.
        group = ROW_GROUP * padded[0].num_columns
        total = max(each.real_rows * each.num_columns for each in padded)
        cut = max(1, elements // group) * group if row.is_flat else total
        padding = _loads(row, need, (total, cut), is_padding=True)
    loads = _loads(row, need, (row.num_elements, max(1, elements)), is_padding=False)
    return ReadPlan(loads, padding)


def _loads(row: RowJob, need: Need, elements: tuple[int, int], *, is_padding: bool) -> tuple[Load, ...]:
    total, size = elements
    tiles = [
        TileJob(row, start, min(size, total - start), need.piece, is_padding)
        for start in range(0, max(1, total), size)
    ]
    return tuple(
        Load((tile,), need.load_bytes(tile.count), need.work_bytes(need.piece_of(tile.count)))
        for tile in tiles
    )


def _padded(row: RowJob) -> list[AssembledInput]:
    return [each for each in row.inputs if isinstance(each, AssembledInput) and each.is_padded]
