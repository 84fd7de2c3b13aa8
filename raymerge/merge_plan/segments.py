"""Shards, and segments: the contiguous byte ranges of shards that workers take.

Cuts depend on the plan alone, never on the number of workers, so that a run can be resumed with another
number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymerge.checkpoints.header import FileLayout, TensorSpec, lay_out, shard_names, split_into_shards
from raymerge.checkpoints.source import in_natural_order
from raymerge.merge_plan.expressions import (
    LARGEST,
    Output,
    Part,
    Read,
    Row,
    group_multiple,
    scales_expression,
    scales_part,
)
from raymerge.methods import BLOCK, Access, find_method

_SEGMENTS_WANTED = 64
_SMALLEST = 256 << 10
_LARGEST = 512 << 20


class PlacedRow(NamedTuple):
    tensor: int
    shard: int
    offset: int
    first_element: int
    """Index of its first element within the logical tensor; not 0 where a tensor was cut."""
    row: Row
    copy_of: int = -1
    """Index of an earlier placed row with the same content, which writes this one too; -1 for none."""
    made_with: int = -1
    """Index of the placed row of codes whose scales these are, and which writes them; -1 for none."""
    joined_with: tuple[int, ...] = ()
    """Indices of the other placed rows of codes with which it shares the one scale of a matrix."""
    joined_read_bytes: int = 0

    @property
    def cost(self) -> int:
        is_made = self.copy_of < 0 and self.made_with < 0
        return self.row.cost + self.joined_read_bytes if is_made else 0


class Segment(NamedTuple):
    """A contiguous byte range of one shard, as a run of rows."""

    first_row: int
    num_rows: int
    shard: int
    cost: int


def place_shards(outputs: Sequence[Output], shard_size: int) -> tuple[tuple[str, FileLayout], ...]:
    """File names and layouts of the shards, tensors in natural order of their names."""
    specs = in_natural_order(TensorSpec(o.name, o.dtype, o.shape) for o in outputs)
    shards = split_into_shards(tuple(specs.values()), shard_size)
    return tuple(zip(shard_names(len(shards)), (lay_out(shard) for shard in shards), strict=True))


def place_rows(outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]) -> tuple[PlacedRow, ...]:
    """Every row at its offset, in shard order, long ones cut, equal ones pointed at the first of them."""
    index = {output.name: position for position, output in enumerate(outputs)}
    target = _segment_target(sum([row.cost for o in outputs for row in o.rows]))
    placed: list[PlacedRow] = []
    twins: dict[tuple[object, ...], int] = {}
    made: dict[str, range] = {}
    joined = _joined_contents(outputs)
    for shard, (_, layout) in enumerate(shards):
        for tensor in layout.tensors:
            number, offset = index[tensor.name], tensor.offset
            own = outputs[number]
            codes = outputs[index[own.scales_of]] if own.scales_of else None
            cut = _pieces(own, target) if codes is None else _scales_cut(own, codes, target)
            begin = len(placed)
            for first, piece in cut:
                twin = len(placed)
                if codes is None and not _is_made_quickly(piece):
                    # Codes hang on what all are made of with which they share a scale, too.
                    content = (first, piece.content(), joined.get(own.joined))
                    twin = twins.setdefault(content, len(placed))
                copy_of = twin if twin < len(placed) else -1
                placed.append(PlacedRow(number, shard, offset, first, piece, copy_of=copy_of))
                offset += piece.nbytes
            made[tensor.name] = range(begin, len(placed))
    _join(placed, [(each.joined, made[each.name]) for each in outputs if each.joined])
    for is_tensor_scale in (False, True):
        scales = [o for o in outputs if o.scales_of and o.is_tensor_scale is is_tensor_scale]
        _tie_scales(placed, [(made[each.scales_of], made[each.name]) for each in scales])
    return tuple(placed)


def _pieces(output: Output, target: int) -> Iterator[tuple[int, Row]]:
    for row in output.rows:
        yield from _cut(row, target)


def _scales_cut(scales: Output, codes: Output, target: int) -> Iterator[tuple[int, Row]]:
    """The rows of the scales of an output of codes: one to each of its pieces."""
    is_one = scales.is_tensor_scale
    expression = scales_expression(scales.dtype, is_tensor_scale=is_one)
    for _, piece in _pieces(codes, target):
        encode, (part, *_) = piece.expression.encode, piece.parts
        if encode is None:
            raise ValueError(f"{codes.name} has scales and is no codes")
        columns = part.columns
        bands = -(-piece.num_elements // (encode.band * columns))
        count = 1 if is_one else bands * encode.scales_nbytes(columns) * 8 // encode.scale_dtype.bits
        made = Part(scales_part(part.logical, is_tensor_scale=is_one), (count,), None)
        yield 0, Row(count, expression, (made,), ())


def _joined_contents(outputs: Sequence[Output]) -> dict[str, tuple[object, ...]]:
    """What all codes are made of that share one scale, by the word of their outputs."""
    joined: dict[str, tuple[object, ...]] = {}
    for output in outputs:
        if output.joined:
            contents = tuple(row.content() for row in output.rows)
            joined[output.joined] = (*joined.get(output.joined, ()), contents)
    return joined


def _join(placed: list[PlacedRow], tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Point rows of codes at those with which they share one scale."""
    groups: dict[str, list[int]] = {}
    for joined, (row,) in tensors:
        if placed[row].copy_of < 0:
            groups.setdefault(joined, []).append(row)
    for rows in groups.values():
        total = sum(placed[row].row.read_bytes for row in rows)
        for row in rows:
            others, own = tuple(each for each in rows if each != row), placed[row].row.read_bytes
            placed[row] = placed[row]._replace(joined_with=others, joined_read_bytes=total - own)


def _tie_scales(placed: list[PlacedRow], tensors: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Point rows of scales at the rows of codes that they are made with, or at the scales of equal codes.
    ``tensors`` are rows of codes and rows of scales of one kind, one to one."""
    scales = {code: scale for codes, own in tensors for code, scale in zip(codes, own, strict=True)}
    for code, scale in scales.items():
        twin = placed[code].copy_of
        if twin < 0:
            placed[scale] = placed[scale]._replace(made_with=code)
        else:
            placed[scale] = placed[scale]._replace(copy_of=scales[twin])


def cut_segments(rows: Sequence[PlacedRow]) -> tuple[Segment, ...]:
    """Runs of rows of about equal cost, none across two shards."""
    costs = [row.cost for row in rows]
    target = _segment_target(sum(costs))
    segments: list[Segment] = []
    start, total = 0, 0
    for position, (row, cost) in enumerate(zip(rows, costs, strict=True)):
        if position > start and (row.shard != rows[start].shard or total + cost > target):
            segments.append(Segment(start, position - start, rows[start].shard, total))
            start, total = position, 0
        total += cost
    if rows:
        segments.append(Segment(start, len(rows) - start, rows[start].shard, total))
    return tuple(segments)


def _is_made_quickly(row: Row) -> bool:
    """Whether it is made as quickly as copied, which would take memory of its own."""
    return row.expression.is_constant or row.expression.method == LARGEST


def _segment_target(total_cost: int) -> int:
    return min(max(total_cost // _SEGMENTS_WANTED, _SMALLEST), _LARGEST)


def _cut(row: Row, target: int) -> Iterator[tuple[int, Row]]:
    """A long row in pieces with the index of their first element, where its method allows any cut."""
    bytes_per_element = max(1, row.cost // max(1, row.num_elements))
    unit = _unit(row)
    step = max(unit, target // bytes_per_element // unit * unit)
    dtypes = (row.expression.cast, *(read.dtype for read in row.reads))
    fills_bytes = all(unit * dtype.bits % 8 == 0 for dtype in dtypes)
    if not (row.num_elements > step and row.is_flat and fills_bytes and _divides(row)):
        yield 0, row
        return
    for first in range(0, row.num_elements, step):
        count = min(step, row.num_elements - first)
        reads = tuple(_sub_read(read, first, count) for read in row.reads)
        yield first, row._replace(num_elements=count, reads=reads)


def _unit(row: Row) -> int:
    """Elements that pieces are cut in multiples of: whole groups of rows where inputs are made of rows."""
    columns = [read.assembly.num_columns for read in row.reads if read.assembly is not None]
    bands = [read.scales.unit for read in row.reads if read.scales is not None]
    if row.expression.encode is not None:
        bands.append(row.expression.encode.band * row.parts[0].columns)
    if bands:
        return math.lcm(*bands)
    return group_multiple(max(columns)) if columns else BLOCK


def _divides(row: Row) -> bool:
    """Whether any piece can be made by itself. Padding is the mean of all rows, so it is made in one row, and
    so is a matrix whose codes share one scale."""
    if any(read.assembly is not None and read.assembly.is_padded for read in row.reads):
        return False
    expression = row.expression
    if expression.encode is not None and expression.encode.tensor_scale_dtype is not None:
        return False
    method = find_method(expression.method)
    return expression.is_copy or (
        method is not None
        and method.access_with(expression.bind(keys=(), shape=row.parts[0].shape)) is Access.ELEMENT
    )


def _sub_read(read: Read, first: int, count: int) -> Read:
    if read.assembly is not None:
        return read
    scales = read.scales
    if scales is not None:
        offset, nbytes = scales.of(first, count)
        scales = replace(scales, offset=offset, nbytes=nbytes)
    offset = read.offset + read.dtype.nbytes(first)
    return read._replace(offset=offset, nbytes=read.dtype.nbytes(count), scales=scales)
