"""The plan as data: Arrow tables and a manifest, with a digest over their canonical values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc

from raymerge.checkpoints.layout import FileLayout
from raymerge.errors import PlanError, Problem
from raymerge.planner.dispositions import Fate
from raymerge.planner.expressions import Expression, Output
from raymerge.planner.segments import PlacedRow

FORMAT = 1
"""Version of the tables' meaning; a plan of another version is not resumed."""

_LIST = pa.list_(pa.int64())
_SCHEMAS: Mapping[str, pa.Schema] = {
    "tensors": pa.schema(
        [
            ("name", pa.string()), ("dtype", pa.string()), ("shape", _LIST), ("shard", pa.int32()),
            ("offset", pa.int64()), ("nbytes", pa.int64()), ("check_finite", pa.bool_()),
        ]
    ),
    "rows": pa.schema(
        [
            ("tensor", pa.int32()), ("shard", pa.int32()), ("offset", pa.int64()), ("nbytes", pa.int64()),
            ("first_element", pa.int64()), ("num_elements", pa.int64()), ("expression", pa.int32()),
            ("is_flat", pa.bool_()), ("copy_of", pa.int64()), ("also", _LIST),
            ("first_part", pa.int64()), ("num_parts", pa.int32()),
            ("first_input", pa.int64()), ("num_inputs", pa.int32()),
        ]
    ),
    "parts": pa.schema(
        [("logical", pa.string()), ("shape", _LIST), ("view_offset", pa.int64()), ("view_strides", _LIST)]
    ),
    "inputs": pa.schema(
        [
            ("part", pa.int32()), ("source", pa.int32()), ("key", pa.string()), ("offset", pa.int64()),
            ("nbytes", pa.int64()), ("dtype", pa.string()), ("view_offset", pa.int64()),
            ("view_shape", _LIST), ("view_strides", _LIST),
        ]
    ),
    "segments": pa.schema(
        [("first_row", pa.int64()), ("num_rows", pa.int64()), ("shard", pa.int32()), ("cost", pa.int64())]
    ),
    "shards": pa.schema([("name", pa.string()), ("nbytes", pa.int64()), ("header", pa.binary())]),
    "dispositions": pa.schema(
        [
            ("source", pa.int32()), ("name", pa.string()), ("disposition", pa.string()),
            ("rule", pa.string()), ("output", pa.string()),
        ]
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A merge, decided: every output byte with where it comes from. Execution decides nothing."""

    manifest: Mapping[str, Any]
    """Recipe, sources with their fingerprints, expressions, config, tie decision, notes; JSON values."""
    tables: Mapping[str, pa.Table]
    """``tensors``, ``rows``, ``parts``, ``inputs``, ``segments``, ``shards``, ``dispositions``."""
    problems: tuple[Problem, ...]
    """What stands in the way; an executable plan has none."""
    digest: str
    """Hex digest over the manifest's canonical JSON and the tables' values."""

    def __getitem__(self, table: str) -> pa.Table:
        return self.tables[table]

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Expressions that rows point at."""
        return tuple(expression_from_json(each) for each in self.manifest["expressions"])

    def require(self) -> Plan:
        """This plan, if nothing stands in the way.

        Raises:
            PlanError: with every problem.
        """
        if self.problems:
            raise PlanError(self.problems)
        return self


def make_plan(
    manifest: Mapping[str, Any], tables: Mapping[str, pa.Table], problems: Sequence[Problem]
) -> Plan:
    """A plan with its digest."""
    return Plan(manifest, tables, tuple(problems), digest(manifest, tables))


def digest(manifest: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> str:
    """Hex blake2b over canonical values; independent of how Arrow chunks or encodes them."""
    hasher = hashlib.blake2b(digest_size=20)
    hasher.update(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(tables):
        for field in tables[name].schema:
            hasher.update(f"\0{name}.{field.name}:{field.type}\0".encode())
            _hash_column(hasher, tables[name].column(field.name), field.type)
    return hasher.hexdigest()


def _hash_column(hasher: hashlib.blake2b, column: pa.ChunkedArray, kind: pa.DataType) -> None:
    array = column.combine_chunks()
    if pa.types.is_list(kind):
        hasher.update(np.asarray(pa.compute.list_value_length(array), dtype=np.int64).tobytes())
        array, kind = array.flatten(), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        for value in array.to_pylist():
            data = value.encode() if isinstance(value, str) else value
            hasher.update(len(data).to_bytes(8, "little") + data)
        return
    hasher.update(np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64).tobytes())


def expression_to_json(expression: Expression) -> dict[str, Any]:
    """JSON form of an expression."""
    return {
        "method": expression.method,
        "has_base": expression.has_base,
        "settings": expression.settings,
        "cast": expression.cast.value,
    }


def expression_from_json(data: Mapping[str, Any]) -> Expression:
    """Inverse of ``expression_to_json``."""
    from raymerge.dtypes import DType

    return Expression(data["method"], data["has_base"], data["settings"], DType(data["cast"]))


def make_tables(
    outputs: Sequence[Output],
    shards: Sequence[tuple[str, FileLayout]],
    rows: Sequence[PlacedRow],
    segments: Sequence[tuple[int, int]],
    fates: Iterable[tuple[int, str, Fate]],
) -> tuple[dict[str, pa.Table], list[Expression]]:
    """The tables, and the expressions in the order that rows number them."""
    expressions: dict[Expression, int] = {}
    for placed in rows:
        expressions.setdefault(placed.row.expression, len(expressions))
    columns = {
        "tensors": _tensor_rows(outputs, shards),
        "rows": _row_rows(rows, expressions),
        "parts": _part_rows(rows),
        "inputs": _input_rows(rows),
        "segments": [
            (first, stop - first, rows[first].shard, sum(r.cost for r in rows[first:stop]))
            for first, stop in segments
        ],
        "shards": [(name, layout.nbytes, layout.header) for name, layout in shards],
        "dispositions": [
            (source, name, fate.disposition.value, fate.rule.value, fate.output)
            for source, name, fate in fates
        ],
    }
    return {name: _table(_SCHEMAS[name], columns[name]) for name in _SCHEMAS}, list(expressions)


def _table(schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.table(
        [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


def _tensor_rows(
    outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]
) -> list[tuple[Any, ...]]:
    where = {
        tensor.name: (shard, tensor) for shard, (_, layout) in enumerate(shards) for tensor in layout.tensors
    }
    return [
        (o.name, o.dtype.value, list(o.shape), where[o.name][0], where[o.name][1].offset,
         where[o.name][1].nbytes, o.check_finite)
        for o in outputs
    ]


def _row_rows(rows: Sequence[PlacedRow], expressions: Mapping[Expression, int]) -> list[tuple[Any, ...]]:
    also: dict[int, list[int]] = {}
    for position, placed in enumerate(rows):
        if placed.copy_of >= 0:
            also.setdefault(placed.copy_of, []).append(position)
    found: list[tuple[Any, ...]] = []
    first_part = first_input = 0
    for position, placed in enumerate(rows):
        row = placed.row
        found.append(
            (placed.tensor, placed.shard, placed.offset, row.nbytes, placed.first_element, row.num_elements,
             expressions[row.expression], row.is_flat, placed.copy_of, also.get(position, []),
             first_part, len(row.parts), first_input, len(row.reads))
        )
        first_part += len(row.parts)
        first_input += len(row.reads)
    return found


def _part_rows(rows: Sequence[PlacedRow]) -> list[tuple[Any, ...]]:
    return [
        (part.logical, list(part.shape), part.view.offset if part.view else 0,
         list(part.view.strides) if part.view else [])
        for placed in rows
        for part in placed.row.parts
    ]


def _input_rows(rows: Sequence[PlacedRow]) -> list[tuple[Any, ...]]:
    return [
        (read.part, read.source, read.key, read.offset, read.nbytes, read.dtype.value,
         read.view.offset if read.view else 0,
         list(read.view.shape) if read.view else [],
         list(read.view.strides) if read.view else [])
        for placed in rows
        for read in placed.row.reads
    ]


def save_plan(plan: Plan, directory: Path) -> None:
    """Write the manifest and one Arrow file a table into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, table in plan.tables.items():
        with pyarrow.ipc.new_file(directory / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    text = json.dumps({**plan.manifest, "digest": plan.digest}, indent=2, sort_keys=True)
    (directory / "manifest.json").write_text(text + "\n", encoding="utf-8")


def load_plan(directory: Path) -> Plan:
    """Read what ``save_plan`` wrote and check that it is whole.

    Raises:
        PlanError: a table is missing, of another format, or the digest does not hold.
    """
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        said = manifest.pop("digest")
        tables = {}
        for name in _SCHEMAS:
            with pyarrow.ipc.open_file(directory / f"{name}.arrow") as reader:
                tables[name] = reader.read_all()
    except (OSError, ValueError, KeyError, pa.ArrowInvalid) as error:
        raise PlanError(
            Problem(str(directory), f"the saved plan cannot be read ({error}).", "Start again with --replace.")
        ) from error
    if manifest.get("format") != FORMAT or digest(manifest, tables) != said:
        raise PlanError(
            Problem(
                str(directory),
                "the saved plan is of another version of raymerge, or was changed.",
                "Start again with --replace.",
            )
        )
    return Plan(manifest, tables, (), said)
