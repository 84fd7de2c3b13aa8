"""Shards, and segments: the contiguous byte ranges of shards that workers take.

Cuts depend on what is written alone: not on the number of workers, so that a run can be resumed with another
number, nor on what is read, so that merges of the same outputs can be made together."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raymerge.checkpoints.components import Component
from raymerge.checkpoints.header import (
    MODEL_STEM,
    FileLayout,
    TensorSpec,
    lay_out,
    shard_names,
    split_into_shards,
)
from raymerge.checkpoints.source import in_natural_order
from raymerge.merge_plan.expressions import (
    MADE,
    Op,
    Output,
    Part,
    Read,
    group_multiple,
    made_expression,
    made_part,
)
from raymerge.methods import BLOCK
from raymerge.methods.internal import LARGEST

_SEGMENTS_WANTED = 64
_SMALLEST = 128 << 10
_LARGEST = 160 << 20
"""Bytes of output: of two models, half a gigabyte is read and written."""


class PlacedOp(NamedTuple):
    tensor: int
    shard: int
    offset: int
    first_element: int
    """Index of its first element within the logical tensor; not 0 where a tensor was cut."""
    op: Op
    copy_of: int = -1
    """Index of an earlier placed op with the same content, which writes this one too; -1 for none."""
    made_with: int = -1
    """Index of the placed op of codes whose scales these are, and which writes them; -1 for none."""
    joined_with: tuple[int, ...] = ()
    """Indices of the other placed ops of codes with which it shares the one scale of a matrix."""
    joined_read_bytes: int = 0


class Segment(NamedTuple):
    """A contiguous byte range of one shard, as a run of ops."""

    first_op: int
    num_ops: int
    shard: int
    cost: int


def place_shards(
    outputs: Sequence[Output], shard_size: int, components: Sequence[Component] = ()
) -> tuple[tuple[str, FileLayout], ...]:
    """File names and layouts of the shards, tensors in natural order of their names; those of ``components``
    in files of their own behind those of the model."""
    specs = in_natural_order(TensorSpec(o.name, o.dtype, o.shape) for o in outputs)
    homes = _homes(outputs, components)
    own: dict[Component | None, list[TensorSpec]] = {None: [], **{each: [] for each in components}}
    for spec in specs.values():
        own[homes.get(spec.name)].append(spec)
    shards: list[tuple[str, FileLayout]] = []
    for component, tensors in own.items():
        is_single = component is not None and component.is_single
        parts = split_into_shards(tuple(tensors), 0 if is_single else shard_size)
        stem, directory = (MODEL_STEM, "") if component is None else (component.stem, component.directory)
        layouts = [_laid_out(part, directory) for part in parts]
        shards += zip(shard_names(len(layouts), f"{directory}{stem}"), layouts, strict=True)
    return tuple(shards)


def _homes(outputs: Sequence[Output], components: Sequence[Component]) -> Mapping[str, Component]:
    """The component that an output belongs to, by name. Scales that its source has not go with their codes,
    all else that it has not by the directory."""
    if not components:
        return {}
    by_name = {name: each for each in components for name in each.names}
    by_directory = {each.directory: each for each in reversed(components) if each.directory}
    homes: dict[str, Component] = {}
    for output in outputs:
        below = (each for directory, each in by_directory.items() if output.name.startswith(directory))
        home = by_name.get(output.name) or by_name.get(output.scales_of) or next(below, None)
        if home is not None:
            homes[output.name] = home
    return homes


def _laid_out(specs: Sequence[TensorSpec], directory: str) -> FileLayout:
    """The layout of a file, in which tensors have no ``directory`` before their names."""
    if not directory:
        return lay_out(specs)
    layout = lay_out([spec._replace(name=spec.name.removeprefix(directory)) for spec in specs])
    named = [tensor._replace(name=f"{directory}{tensor.name}") for tensor in layout.tensors]
    return replace(layout, tensors=tuple(named))


def place_ops(outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]) -> tuple[PlacedOp, ...]:
    """Every op at its offset, in shard order, long ones cut, equal ones pointed at the first of them."""
    index = {output.name: position for position, output in enumerate(outputs)}
    target = _segment_target(sum([op.nbytes for o in outputs for op in o.ops]))
    placed: list[PlacedOp] = []
    twins: dict[tuple[object, ...], int] = {}
    # Arrays, as a range for each of 500,000 outputs takes much more.
    begins, ends = array("q", [0]) * len(outputs), array("q", [0]) * len(outputs)
    joined, alike = _joined_contents(outputs), _alike(outputs)
    pieces = {each.name: tuple(_pieces(each, target)) for each in outputs if not each.scales_of}
    for shard, (_, layout) in enumerate(shards):
        for tensor in layout.tensors:
            number, offset = index[tensor.name], tensor.offset
            own = outputs[number]
            codes = outputs[index[own.scales_of]] if own.scales_of else None
            cut = pieces[own.name] if codes is None else _scales_cut(own, codes, pieces[codes.name])
            begins[number] = len(placed)
            for first, piece in cut:
                twin = len(placed)
                if number in alike and codes is None and not _is_made_quickly(piece):
                    # Codes hang on what all are made of with which they share a scale, too.
                    content = (first, piece.content(), joined.get(own.joined))
                    twin = twins.setdefault(content, len(placed))
                copy_of = twin if twin < len(placed) else -1
                placed.append(PlacedOp(number, shard, offset, first, piece, copy_of=copy_of))
                offset += piece.nbytes
            ends[number] = len(placed)

    def ops_of(name: str) -> range:
        return range(begins[index[name]], ends[index[name]])

    _join(placed, [(each.joined, ops_of(each.name)) for each in outputs if each.joined])
    for what in MADE:
        scales = (o for o in outputs if o.scales_of and o.made == what)
        _tie_scales(placed, ((ops_of(each.scales_of), ops_of(each.name)) for each in scales))
    return tuple(placed)


def _alike(outputs: Sequence[Output]) -> frozenset[int]:
    """The outputs with an op that begins to read where another one does: no others have ops of equal content,
    which takes long to compare."""
    first: dict[tuple[object, ...], int] = {}
    alike: set[int] = set()
    for number, output in enumerate(outputs):
        for op in output.ops:
            place = op.reads[0][1:4] if op.reads else ()
            if place in first:
                alike |= {first[place], number}
            first[place] = number
    return frozenset(alike)


def _pieces(output: Output, target: int) -> Iterator[tuple[int, Op]]:
    for op in output.ops:
        yield from _cut(op, target)


def _scales_cut(scales: Output, codes: Output, pieces: Iterable[tuple[int, Op]]) -> Iterator[tuple[int, Op]]:
    """The ops of the scales of an output of codes: one to each of its pieces."""
    expression = made_expression(scales.dtype, scales.made)
    for _, piece in pieces:
        encode, (part, *_) = piece.expression.encode, piece.parts
        if encode is None:
            raise ValueError(f"{codes.name} has scales and is no codes")
        columns = part.columns
        nbytes = encode.made_nbytes(scales.made, piece.num_elements // columns, columns)
        count = nbytes * 8 // scales.dtype.bits
        made = Part(made_part(part.logical, scales.made), (count,), None)
        yield 0, Op(count, expression, (made,), ())


def _joined_contents(outputs: Sequence[Output]) -> dict[str, tuple[object, ...]]:
    """What all codes are made of that share one scale, by the word of their outputs."""
    joined: dict[str, tuple[object, ...]] = {}
    for output in outputs:
        if output.joined:
            contents = tuple(op.content() for op in output.ops)
            joined[output.joined] = (*joined.get(output.joined, ()), contents)
    return joined


def _join(placed: list[PlacedOp], tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Point ops of codes at those with which they share one scale."""
    groups: dict[str, list[int]] = {}
    for joined, (op_index,) in tensors:
        if placed[op_index].copy_of < 0:
            groups.setdefault(joined, []).append(op_index)
    for indices in groups.values():
        total = sum(placed[op_index].op.read_bytes for op_index in indices)
        for op_index in indices:
            others, own = tuple(each for each in indices if each != op_index), placed[op_index].op.read_bytes
            placed[op_index] = placed[op_index]._replace(joined_with=others, joined_read_bytes=total - own)


def _tie_scales(placed: list[PlacedOp], tensors: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Point ops of scales at the ops of codes that they are made with, or at the scales of equal codes.
    ``tensors`` are ops of codes and ops of scales of one kind, one to one."""
    scales = array("q", [-1]) * len(placed)
    for codes, own in tensors:
        for code, scale in zip(codes, own, strict=True):
            scales[code] = scale
    for code, scale in enumerate(scales):
        twin = placed[code].copy_of
        if scale < 0:
            continue
        if twin < 0:
            placed[scale] = placed[scale]._replace(made_with=code)
        else:
            placed[scale] = placed[scale]._replace(copy_of=scales[twin])


def cut_segments(ops: Sequence[PlacedOp]) -> tuple[Segment, ...]:
    """Runs of ops that write about equally much, none across two shards."""
    sizes = [each.op.nbytes if each.copy_of < 0 and each.made_with < 0 else 0 for each in ops]
    target = _segment_target(sum(sizes))
    segments: list[Segment] = []
    start, total = 0, 0
    for position, (op, nbytes) in enumerate(zip(ops, sizes, strict=True)):
        if position > start and (op.shard != ops[start].shard or total + nbytes > target):
            segments.append(_segment(ops, start, position))
            start, total = position, 0
        total += nbytes
    if ops:
        segments.append(_segment(ops, start, len(ops)))
    return tuple(segments)


def _segment(ops: Sequence[PlacedOp], start: int, stop: int) -> Segment:
    made = [each for each in ops[start:stop] if each.copy_of < 0 and each.made_with < 0]
    cost = sum([each.op.cost + each.joined_read_bytes for each in made])
    return Segment(start, stop - start, ops[start].shard, cost)


def _is_made_quickly(op: Op) -> bool:
    """Whether it is made as quickly as copied, which would take memory of its own."""
    return op.expression.is_constant or op.expression.method == LARGEST.name


def _segment_target(total_nbytes: int) -> int:
    return min(max(total_nbytes // _SEGMENTS_WANTED, _SMALLEST), _LARGEST)


def _cut(op: Op, target: int) -> Iterator[tuple[int, Op]]:
    """A long op in pieces with the index of their first element, where its method allows any cut."""
    if 2 * op.nbytes <= target:
        yield 0, op
        return
    unit = _unit(op)
    step = max(unit, target * op.num_elements // max(1, op.nbytes) // unit * unit)
    if not (op.num_elements > step and op.is_flat and _fills_bytes(op, unit) and _divides(op)):
        yield 0, op
        return
    for first in range(0, op.num_elements, step):
        count = min(step, op.num_elements - first)
        reads = tuple(_sub_read(read, first, count) for read in op.reads)
        yield first, op._replace(num_elements=count, reads=reads)


def _fills_bytes(op: Op, unit: int) -> bool:
    dtypes = (op.expression.cast, *(read.dtype for read in op.reads))
    return all(unit * dtype.bits % 8 == 0 for dtype in dtypes)


def _unit(op: Op) -> int:
    """Elements that pieces are cut in multiples of: whole groups of rows where inputs are made of rows."""
    columns = [read.gather.num_columns for read in op.reads if read.gather is not None]
    scale_rows = [read.scales.unit for read in op.reads if read.scales is not None]
    if op.expression.encode is not None:
        scale_rows.append(op.expression.encode.cut_height * op.parts[0].columns)
    if scale_rows:
        return math.lcm(*scale_rows)
    return group_multiple(max(columns)) if columns else BLOCK


def _divides(op: Op) -> bool:
    """Whether any piece can be made by itself. Padding is the mean of all rows, so it is made in one op, and
    so is what reads nothing."""
    is_padded = any(read.gather is not None and read.gather.is_padded for read in op.reads)
    return not (is_padded or op.expression.is_unread) and op.expression.divides(op.parts[0].shape)


def _sub_read(read: Read, first: int, count: int) -> Read:
    if read.gather is not None:
        return read
    scales = None if read.scales is None else read.scales.part(first, count)
    offset = read.offset + read.dtype.nbytes(first)
    return read._replace(offset=offset, nbytes=read.dtype.nbytes(count), scales=scales)
