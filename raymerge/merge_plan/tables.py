"""The plan's Arrow tables: made from what was decided, saved with the run, and loaded again."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.ipc

from raymerge.checkpoints.components import directory_of
from raymerge.checkpoints.header import FileLayout, shards_by_stem, weight_map_json
from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.quantisation.encoding import Encoding
from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import PlanError, Problem
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.dispositions import Disposition
from raymerge.merge_plan.expressions import (
    MADE,
    Expression,
    Gather,
    GatherInput,
    Output,
    Product,
    Read,
    Scales,
)
from raymerge.merge_plan.plan import FORMAT, SCHEMAS, Plan, digest
from raymerge.merge_plan.segments import PlacedOp, Segment
from raymerge.storage.local.store import LocalStore

__all__ = ["OpTables", "Plan", "disposition_table", "load_plan", "op_tables", "other_tables", "save_plan"]

_T = TypeVar("_T")
_AFRESH = "Start again with --replace."
_ARROW_START = b"ARROW1\0\0"
_MAX_NBYTES = 2 << 30
_ROWS_AT_ONCE = 1 << 14
_LATEST = 256
"""Objects whose numbers are remembered by what they are, and not by what they are equal to."""
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a file raises that was changed."""


def read_scales(row: Sequence[Any], encodings: Sequence[Encoding]) -> Scales:
    encoding, *rest = row
    return Scales(encodings[encoding], *rest)


class OpTables(NamedTuple):
    """What is made and how; expressions and encodings in the order in which ops and scales number them."""

    tables: dict[str, pa.Table]
    expressions: Sequence[Expression]
    encodings: Sequence[Encoding]


def op_tables(
    outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]], ops: Sequence[PlacedOp]
) -> OpTables:
    made = [placed.op for placed in ops]
    reads = [read for op in made for read in op.reads]
    expressions, expression_numbers = _numbered(op.expression for op in made)
    gathers, gather_numbers = _numbered(read.gather for read in reads)
    scales, scales_numbers = _numbered(read.scales for read in reads)
    encodings, encoding_numbers = _numbered(each.encoding for each in scales)
    # Reads and scales by place, in the order of fields: half a million take a second less than by name.
    rows: dict[str, Iterable[Sequence[Any]]] = {
        "tensors": _tensor_rows(outputs, shards),
        "ops": _op_rows(ops, expression_numbers),
        "parts": ((p.logical, p.shape, *_viewed(p.view)[::2]) for op in made for p in op.parts),
        "inputs": (
            (*read[:6], *_viewed(read.view), gather, own)
            for read, gather, own in zip(reads, gather_numbers, scales_numbers, strict=True)
        ),
        "scales": ((n, *each[1:]) for n, each in zip(encoding_numbers, scales, strict=True)),
        **_gather_rows(gathers),
    }
    return OpTables(_tables(rows), expressions, encodings)


def other_tables(
    shards: Sequence[tuple[str, FileLayout]], segments: Iterable[Segment], files: Mapping[str, bytes]
) -> dict[str, pa.Table]:
    """All tables but those of ``op_tables`` and that of dispositions."""
    return _tables(
        {
            "segments": segments,
            "shards": ((name, layout.nbytes, layout.header) for name, layout in shards),
            "files": files.items(),
        }
    )


def disposition_table(dispositions: Iterable[tuple[int, str, Disposition]]) -> pa.Table:
    rows = ((source, name, *disposition) for source, name, disposition in dispositions)
    return _table(SCHEMAS["dispositions"], rows)


def _tables(rows: Mapping[str, Iterable[Sequence[Any]]]) -> dict[str, pa.Table]:
    return {name: _table(SCHEMAS[name], own) for name, own in rows.items()}


def _numbered(values: Iterable[_T | None]) -> tuple[list[_T], list[int]]:
    """The distinct values in order of first use, and for each value its number; -1 for None.

    What follows one another mostly is one object, or one of a few, which must live on: it is then not hashed
    again, which for a gather may be 100,000 runs."""
    known: dict[_T, int] = {}
    latest: dict[int, int] = {}
    numbers: list[int] = []
    for value in values:
        if value is None:
            numbers.append(-1)
            continue
        number = latest.get(id(value))
        if number is None:
            if len(latest) == _LATEST:
                latest.clear()
            number = latest[id(value)] = known.setdefault(value, len(known))
        numbers.append(number)
    return list(known), numbers


def _table(schema: pa.Schema, rows: Iterable[Sequence[Any]]) -> pa.Table:
    """A table of rows, made some at a time: each of a million takes more memory than what becomes of it."""
    left, batches = iter(rows), []
    while some := list(islice(left, _ROWS_AT_ONCE)):
        columns = zip(zip(*some, strict=True), schema, strict=True)
        batches.append(
            pa.record_batch([pa.array(values, type=field.type) for values, field in columns], schema=schema)
        )
    return pa.Table.from_batches(batches, schema=schema)


def _tensor_rows(
    outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]
) -> Iterator[Sequence[Any]]:
    where = {
        tensor.name: (shard, tensor) for shard, (_, layout) in enumerate(shards) for tensor in layout.tensors
    }
    for output in outputs:
        shard, tensor = where[output.name]
        place = (shard, tensor.offset, tensor.nbytes)
        yield (output.name, output.dtype, output.shape, *place, output.check_finite)


def _op_rows(ops: Sequence[PlacedOp], expressions: Sequence[int]) -> Iterator[Sequence[Any]]:
    also: dict[int, list[int]] = {}
    # Arrays, as a key for each of 250,000 ops takes much more.
    made: dict[str, array[int]] = {what: array("q", [-1]) * len(ops) for what in MADE}
    for number, placed in enumerate(ops):
        if placed.copy_of >= 0:
            also.setdefault(placed.copy_of, []).append(number)
        if placed.made_with >= 0:
            made[placed.op.expression.method][placed.made_with] = number
    first_part, first_input = 0, 0
    numbered = enumerate(zip(ops, expressions, *made.values(), strict=True))
    for number, (placed, expression, *made_with_it) in numbered:
        op = placed.op
        yield (
            *(placed.tensor, placed.shard, placed.offset, op.nbytes, placed.first_element),
            *(op.num_elements, expression, op.is_flat, placed.copy_of, placed.made_with),
            *made_with_it,
            *(placed.joined_with, also.get(number, ())),
            *(first_part, len(op.parts), first_input, len(op.reads)),
        )
        first_part, first_input = first_part + len(op.parts), first_input + len(op.reads)


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


def index_names(plan: Plan) -> Mapping[str, Sequence[str]]:
    """Shards by the key of the index that names them, that of the model last; none of a single file."""
    groups = shards_by_stem(plan["shards"].column("name").to_pylist())
    return {
        f"{stem}.safetensors.index.json": own for stem, own in reversed(tuple(groups.items())) if len(own) > 1
    }


def index_bytes(plan: Plan, key: str) -> bytes:
    """Contents of one of ``index_names``."""
    shards, own = plan["shards"].column("name").to_pylist(), frozenset(index_names(plan)[key])
    directory = directory_of(key)
    columns = plan.columns("tensors", "name", "shard", "nbytes")
    named = [(name, shards[shard], nbytes) for name, shard, nbytes in columns if shards[shard] in own]
    weight_map = {name.removeprefix(directory): file.removeprefix(directory) for name, file, _ in named}
    return weight_map_json(weight_map, sum(nbytes for _, _, nbytes in named))


def load_plan(directory: Path) -> Plan:
    """Read what ``save_plan`` wrote and check that it is whole and that every invariant of a plan holds.

    Raises:
        PlanError: a table is missing, of another format or changed, or the plan contradicts itself."""
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
    old releases said it; field 3 of a batch is where new ones do."""
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


def _gather_rows(gathers: Iterable[Gather]) -> dict[str, list[tuple[Any, ...]]]:
    tables: dict[str, list[tuple[Any, ...]]] = {"gathers": [], "gather_inputs": [], "factors": [], "runs": []}
    for gather in gathers:
        places = (len(tables["gather_inputs"]), len(gather.inputs), len(tables["runs"]), len(gather.runs))
        sizes = (gather.num_rows, gather.num_columns, gather.real_rows)
        tables["gathers"].append((*sizes, *places))
        for gather_input in gather.inputs:
            tables["gather_inputs"].append(_gather_input_row(gather_input, len(tables["factors"])))
            tables["factors"] += [_place(factor) for factor in gather_input.factors]
        tables["runs"] += gather.runs
    return tables


def _gather_input_row(gather_input: GatherInput, first_factor: int) -> tuple[Any, ...]:
    read, product = gather_input.read, gather_input.product
    added = (product.rank, product.scale, product.transposed) if product else (0, 0.0, False)
    factors = (first_factor, len(gather_input.factors))
    return (*_place(read), *_viewed(read.view), gather_input.num_rows, *added, *factors)


def _place(read: Read) -> tuple[Any, ...]:
    return (read.source, read.key, read.offset, read.nbytes, read.dtype)


def _viewed(view: View | None) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return (view.offset, view.shape, view.strides) if view else (0, (), ())


def read_gather_input(row: Mapping[str, Any], factors: Sequence[Mapping[str, Any]]) -> GatherInput:
    read = _read(row, read_view(row["view_offset"], row["view_shape"], row["view_strides"]))
    if not factors:
        return GatherInput(read, row["num_rows"])
    reads = [_read(each, None) for each in factors]
    up, down, *magnitude = (None, *reads) if len(reads) == 1 else reads
    assert down is not None
    product = Product(
        up, down, row["rank"], row["scale"], row["transposed"], magnitude[0] if magnitude else None
    )
    return GatherInput(read, row["num_rows"], product)


def _read(row: Mapping[str, Any], view: View | None) -> Read:
    return Read(0, row["source"], row["key"], row["offset"], row["nbytes"], DType(row["dtype"]), view)


def read_view(offset: int, shape: Sequence[int], strides: Sequence[int]) -> View | None:
    return View(offset, tuple(shape), tuple(strides)) if strides else None
