"""Shards, and segments: the contiguous byte ranges of shards that workers take.

Cuts depend on the plan alone, never on the number of workers, so that a run can be resumed with another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raymerge.checkpoints.layout import FileLayout, TensorSpec, lay_out, shard_names, split_into_shards
from raymerge.checkpoints.source import natural_key
from raymerge.methods import BLOCK, Access, find_method
from raymerge.planner.expressions import Output, Read, Row

_SEGMENTS_WANTED = 64
_SMALLEST = 256 << 10
_LARGEST = 512 << 20


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A row with its place in a shard."""

    tensor: int
    """Index of its tensor among the outputs."""
    shard: int
    """Index of its shard."""
    offset: int
    """First byte in the shard's file."""
    first_element: int
    """Index of its first element within the logical tensor; not 0 where a tensor was cut."""
    row: Row
    """What it is made of."""
    copy_of: int = -1
    """Index of an earlier placed row with the same content, which writes this one too; -1 for none."""

    @property
    def cost(self) -> int:
        """Bytes read and written to make it."""
        return 0 if self.copy_of >= 0 else sum(r.nbytes for r in self.row.reads) + self.row.nbytes


def place_shards(outputs: Sequence[Output], shard_size: int) -> tuple[tuple[str, FileLayout], ...]:
    """File names and layouts of the shards, tensors in natural order of their names."""
    ordered = sorted(outputs, key=lambda output: natural_key(output.name))
    shards = split_into_shards([TensorSpec(o.name, o.dtype, o.shape) for o in ordered], shard_size)
    return tuple(zip(shard_names(len(shards)), (lay_out(shard) for shard in shards), strict=True))


def place_rows(
    outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]
) -> tuple[PlacedRow, ...]:
    """Every row at its offset, in shard order, long ones cut, equal ones pointed at the first of them."""
    index = {output.name: position for position, output in enumerate(outputs)}
    target = _segment_target(sum(row.nbytes + sum(r.nbytes for r in row.reads) for o in outputs for row in o.rows))
    placed: list[PlacedRow] = []
    seen: dict[tuple[object, ...], int] = {}
    for shard, (_, layout) in enumerate(shards):
        for tensor in layout.tensors:
            output = outputs[index[tensor.name]]
            offset = tensor.offset
            for row in output.rows:
                for first, piece in _cut(row, target):
                    twin = seen.setdefault((first, *piece.content()), len(placed))
                    placed.append(
                        PlacedRow(
                            index[tensor.name], shard, offset, first, piece,
                            copy_of=twin if twin != len(placed) else -1,
                        )
                    )
                    offset += piece.nbytes
    return tuple(placed)


def cut_segments(rows: Sequence[PlacedRow]) -> tuple[tuple[int, int], ...]:
    """Ranges ``[first row, last row)`` of about equal cost, none across two shards."""
    target = _segment_target(sum(row.cost for row in rows))
    segments: list[tuple[int, int]] = []
    start, cost = 0, 0
    for position, row in enumerate(rows):
        if position > start and (row.shard != rows[start].shard or cost + row.cost > target):
            segments.append((start, position))
            start, cost = position, 0
        cost += row.cost
    if rows:
        segments.append((start, len(rows)))
    return tuple(segments)


def _segment_target(total_cost: int) -> int:
    return min(max(total_cost // _SEGMENTS_WANTED, _SMALLEST), _LARGEST)


def _cut(row: Row, target: int) -> Iterator[tuple[int, Row]]:
    """A long row in pieces with the index of their first element, where its method allows any cut."""
    bytes_per_element = max(1, (row.nbytes + sum(r.nbytes for r in row.reads)) // max(1, row.num_elements))
    step = max(BLOCK, target // bytes_per_element // BLOCK * BLOCK)
    method = find_method(row.expression.method)
    divisible = row.expression.is_copy or (method is not None and method.access is Access.ELEMENT)
    if not (divisible and row.is_flat and row.num_elements > step and row.expression.cast.bits % 8 == 0):
        yield 0, row
        return
    for first in range(0, row.num_elements, step):
        count = min(step, row.num_elements - first)
        reads = tuple(_sub_read(read, first, count) for read in row.reads)
        yield first, replace(row, num_elements=count, reads=reads)


def _sub_read(read: Read, first: int, count: int) -> Read:
    return replace(read, offset=read.offset + read.dtype.nbytes(first), nbytes=read.dtype.nbytes(count))
