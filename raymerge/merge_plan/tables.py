"""The plan's Arrow tables: made from what was decided, saved with the run, and loaded again."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.ipc

from raymerge.checkpoints.header import FileLayout, weight_map_json
from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.dispositions import Fate
from raymerge.merge_plan.expressions import Assembly, Expression, Output, Product, Read, Row, Scales, Term
from raymerge.merge_plan.plan import FORMAT, SCHEMAS, Plan, digest
from raymerge.merge_plan.segments import PlacedRow, Segment
from raymerge.storage.local.store import LocalStore


def read_scales(row: Sequence[Any], encodings: Sequence[Encoding]) -> Scales:
    encoding, columns, key, offset, nbytes, tensor_key, tensor_offset = row
    return Scales(encodings[encoding], columns, key, offset, nbytes, tensor_key, tensor_offset)


__all__ = ["Plan", "load_plan", "make_tables", "save_plan"]

_T = TypeVar("_T")
_AFRESH = "Start again with --replace."
_ARROW_START = b"ARROW1\0\0"
_MAX_NBYTES = 2 << 30
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a file raises that was changed."""


def make_tables(
    outputs: Sequence[Output],
    shards: Sequence[tuple[str, FileLayout]],
    rows: Sequence[PlacedRow],
    segments: Sequence[Segment],
    fates: Iterable[tuple[int, str, Fate]],
    files: Mapping[str, bytes],
) -> tuple[dict[str, pa.Table], list[Expression], list[Encoding]]:
    """The tables, and expressions and encodings in the order in which rows and scales number them."""
    made = [placed.row for placed in rows]
    reads = [read for row in made for read in row.reads]
    expressions, expression_numbers = _numbered(row.expression for row in made)
    assemblies, assembly_numbers = _numbered(read.assembly for read in reads)
    scales, scales_numbers = _numbered(read.scales for read in reads)
    encodings, encoding_numbers = _numbered(each.encoding for each in scales)
    columns: dict[str, Iterable[Sequence[Any]]] = {
        "tensors": _tensor_columns(outputs, shards),
        "rows": _row_columns(rows, expression_numbers),
        "parts": _part_columns(made),
        "inputs": _input_columns(reads, assembly_numbers, scales_numbers),
        "segments": _turned(segments),
        "shards": _turned([(name, layout.nbytes, layout.header) for name, layout in shards]),
        "files": _turned(list(files.items())),
        "dispositions": _turned([(source, name, *fate) for source, name, fate in fates]),
        "scales": _turned(
            [(n, *_scales_row(each)) for n, each in zip(encoding_numbers, scales, strict=True)]
        ),
        **{name: _turned(each) for name, each in _assembly_rows(assemblies).items()},
    }
    return {name: _table(SCHEMAS[name], columns[name]) for name in SCHEMAS}, expressions, encodings


def _numbered(values: Iterable[_T | None]) -> tuple[list[_T], list[int]]:
    """The distinct values in order of first use, and for each value its number; -1 for None.

    What follows one another mostly is one object, which must live on: it is then not hashed again, which for
    an assembly may be 100,000 runs.
    """
    known: dict[_T, int] = {}
    by_object: dict[int, int] = {}
    numbers: list[int] = []
    for value in values:
        if value is None:
            numbers.append(-1)
            continue
        number = by_object.get(id(value))
        if number is None:
            number = by_object[id(value)] = known.setdefault(value, len(known))
        numbers.append(number)
    return list(known), numbers


def _table(schema: pa.Schema, columns: Iterable[Sequence[Any]]) -> pa.Table:
    """A table of columns; those of a generator are made one after the other, to hold few lists at once."""
    made = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=False)]
    # Without rows there may be nothing to turn into columns.
    return pa.table(made, schema=schema) if made else schema.empty_table()


def _turned(rows: Sequence[tuple[Any, ...]], width: int = 0) -> Iterable[Sequence[Any]]:
    """The columns of rows; without rows as many empty ones as ``width`` says."""
    return zip(*rows, strict=True) if rows else ((),) * width


def _tensor_columns(
    outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]
) -> Iterator[Sequence[Any]]:
    where = {
        tensor.name: (shard, tensor) for shard, (_, layout) in enumerate(shards) for tensor in layout.tensors
    }
    placed = [where[output.name] for output in outputs]
    yield [output.name for output in outputs]
    yield [output.dtype for output in outputs]
    yield [output.shape for output in outputs]
    yield [shard for shard, _ in placed]
    yield [tensor.offset for _, tensor in placed]
    yield [tensor.nbytes for _, tensor in placed]
    yield [output.check_finite for output in outputs]


def _row_columns(rows: Sequence[PlacedRow], expressions: Sequence[int]) -> Iterator[Sequence[Any]]:
    also: dict[int, list[int]] = {}
    for position, placed in enumerate(rows):
        if placed.copy_of >= 0:
            also.setdefault(placed.copy_of, []).append(position)
    tensors, shards, offsets, first, made, copy_of, made_with, joined_with, _ = _turned(rows, 9)
    num_parts, num_inputs = [len(row.parts) for row in made], [len(row.reads) for row in made]
    yield from (tensors, shards, offsets)
    yield [row.nbytes for row in made]
    yield first
    yield [row.num_elements for row in made]
    yield expressions
    yield [row.is_flat for row in made]
    yield from (copy_of, made_with)
    yield _made_with(rows, is_tensor_scale=False)
    yield _made_with(rows, is_tensor_scale=True)
    yield joined_with
    yield [also.get(position, ()) for position in range(len(rows))]
    yield _starts(num_parts)
    yield num_parts
    yield _starts(num_inputs)
    yield num_inputs


def _made_with(rows: Sequence[PlacedRow], *, is_tensor_scale: bool) -> Sequence[int]:
    """Of each row the one of its scales, or of the one scale of its matrix; -1 for none."""
    makers = {
        placed.made_with: number
        for number, placed in enumerate(rows)
        if placed.made_with >= 0 and placed.row.expression.is_tensor_scale is is_tensor_scale
    }
    return [makers.get(number, -1) for number in range(len(rows))]


def _starts(counts: Sequence[int]) -> Sequence[int]:
    return [0, *accumulate(counts)][: len(counts)]


def _part_columns(rows: Sequence[Row]) -> Iterator[Sequence[Any]]:
    logical, shapes, views = _turned([part for row in rows for part in row.parts], 3)
    yield from (logical, shapes)
    yield [view.offset if view else 0 for view in views]
    yield [view.strides if view else () for view in views]


def _input_columns(
    reads: Sequence[Read], assemblies: Sequence[int], scales: Sequence[int]
) -> Iterator[Sequence[Any]]:
    *plain, views, _, _ = _turned(reads, 9)
    yield from plain
    yield [view.offset if view else 0 for view in views]
    yield [view.shape if view else () for view in views]
    yield [view.strides if view else () for view in views]
    yield from (assemblies, scales)


def _scales_row(scales: Scales) -> tuple[Any, ...]:
    codes = (scales.key, scales.offset, scales.nbytes)
    return (scales.columns, *codes, scales.tensor_key, scales.tensor_offset)


def save_plan(plan: Plan, directory: Path) -> None:
    """Write one Arrow file a table and then the manifest into a directory, durably."""
    text = json.dumps({**plan.manifest, "digest": plan.digest}, indent=2, sort_keys=True)
    with LocalStore(directory) as store:
        for name, table in plan.tables.items():
            sink = pa.BufferOutputStream()
            with pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            store.write_atomic(f"{name}.arrow", sink.getvalue())
        store.write_atomic("manifest.json", f"{text}\n".encode())


def index_bytes(plan: Plan) -> bytes:
    shards = plan["shards"].column("name").to_pylist()
    weight_map = {name: shards[shard] for name, shard in plan.columns("tensors", "name", "shard")}
    return weight_map_json(weight_map, sum(plan["tensors"].column("nbytes").to_pylist()))


def load_plan(directory: Path) -> Plan:
    """Read what ``save_plan`` wrote and check that it is whole and that every invariant of a plan holds.

    Raises:
        PlanError: a table is missing, of another format or changed, or the plan contradicts itself.
    """
    try:
        manifest = load_json(_content(directory / "manifest.json"))
        stated = manifest.pop("digest")
        tables = {name: _load_table(directory, name) for name in SCHEMAS}
        whole = manifest["format"] == FORMAT and digest(manifest, tables) == stated
        plan = Plan(manifest, tables, (), stated)
        # Whoever changed a plan with its digest may have put any kind of value anywhere.
        problems = check_plan(plan) if whole else ()
    except (*_DAMAGE, pa.ArrowException, struct.error) as error:
        raise _unusable(directory, f"the saved plan cannot be read ({error}).") from error
    if not whole:
        raise _unusable(directory, "the saved plan is of another version of raymerge, or was changed.")
    if problems:
        raise PlanError([Problem(f"{directory}: {each.where}", each.what, _AFRESH) for each in problems])
    return plan


def _load_table(directory: Path, name: str) -> pa.Table:
    data = _content(directory / f"{name}.arrow")
    if not data.startswith(_ARROW_START):
        raise ValueError(f"{name}.arrow is no Arrow file")
    # The stream that a file begins with; what its end says of it would have to be believed.
    stream = pa.py_buffer(data)[len(_ARROW_START) :]
    for message in pyarrow.ipc.MessageReader.open_stream(stream):
        if message.type not in ("schema", "record batch") or _is_packed(message):
            raise ValueError(f"{name}.arrow holds what was not saved by raymerge")
    with pyarrow.ipc.open_stream(stream) as reader:
        if not reader.schema.equals(SCHEMAS[name]):
            raise ValueError(f"{name}.arrow has other columns")
        table = reader.read_all()
    # Offsets that point outside their buffers must be found before anything follows them.
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise ValueError(f"{name}.arrow has holes in its columns")
    return table


def _content(path: Path) -> bytes:
    """A file of a plan; its tables take as much memory as it has bytes."""
    nbytes = path.stat().st_size
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"{path.name} has {nbytes} bytes, more than a plan needs")
    return path.read_bytes()


def _is_packed(message: pyarrow.ipc.Message) -> bool:
    """Whether buffers of a record batch are compressed: a few of their bytes could become gigabytes.

    Only the flatbuffer that describes it tells. There, field 2 of a message is the batch, and field 4 where
    old releases said it; field 3 of a batch is where new ones do.
    """
    if message.type != "record batch":
        return False
    description = message.metadata.to_pybytes()
    (root,) = struct.unpack_from("<I", description, 0)
    batch = _field(description, root, 2)
    (step,) = struct.unpack_from("<I", description, batch)
    return bool(_field(description, root, 4) or _field(description, batch + step, 3))


def _field(description: bytes, table: int, number: int) -> int:
    """Where a flatbuffer holds a field of a table; 0 where it has none."""
    (back,) = struct.unpack_from("<i", description, table)
    fields = table - back
    (size,) = struct.unpack_from("<H", description, fields)
    place = 4 + 2 * number
    if place + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", description, fields + place)
    return table + offset if offset else 0


def _unusable(directory: Path, what: str) -> PlanError:
    return PlanError(Problem(str(directory), what, _AFRESH))


def _assembly_rows(assemblies: Iterable[Assembly]) -> dict[str, list[tuple[Any, ...]]]:
    tables: dict[str, list[tuple[Any, ...]]] = {"assemblies": [], "terms": [], "factors": [], "runs": []}
    for assembly in assemblies:
        places = (len(tables["terms"]), len(assembly.terms), len(tables["runs"]), len(assembly.runs))
        sizes = (assembly.num_rows, assembly.num_columns, assembly.real_rows)
        tables["assemblies"].append((*sizes, *places))
        for term in assembly.terms:
            tables["terms"].append(_term_row(term, len(tables["factors"])))
            tables["factors"] += [_place(factor) for factor in term.factors]
        tables["runs"] += assembly.runs
    return tables


def _term_row(term: Term, first_factor: int) -> tuple[Any, ...]:
    view, product = term.read.view, term.product
    viewed = (view.offset, list(view.shape), list(view.strides)) if view else (0, [], [])
    added = (product.rank, product.scale, product.transposed) if product else (0, 0.0, False)
    return (*_place(term.read), *viewed, term.num_rows, *added, first_factor, len(term.factors))


def _place(read: Read) -> tuple[Any, ...]:
    return (read.source, read.key, read.offset, read.nbytes, read.dtype.value)


def read_term(row: Mapping[str, Any], factors: Sequence[Mapping[str, Any]]) -> Term:
    read = _read(row, read_view(row["view_offset"], row["view_shape"], row["view_strides"]))
    if not factors:
        return Term(read, row["num_rows"])
    up, down, *magnitude = (_read(each, None) for each in factors)
    product = Product(
        up, down, row["rank"], row["scale"], row["transposed"], magnitude[0] if magnitude else None
    )
    return Term(read, row["num_rows"], product)


def _read(row: Mapping[str, Any], view: View | None) -> Read:
    return Read(0, row["source"], row["key"], row["offset"], row["nbytes"], DType(row["dtype"]), view)


def read_view(offset: int, shape: Sequence[int], strides: Sequence[int]) -> View | None:
    return View(offset, tuple(shape), tuple(strides)) if strides else None
