"""The plan's Arrow tables: made from what was decided, saved with the run, and loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from raymerge.checkpoints.layout import FileLayout
from raymerge.errors import PlanError, Problem
from raymerge.planner.assemblies import AssemblyNumbers
from raymerge.planner.check import check_plan
from raymerge.planner.dispositions import Fate
from raymerge.planner.expressions import Expression, Output
from raymerge.planner.plan import FORMAT, SCHEMAS, Plan, digest
from raymerge.planner.segments import PlacedRow, Segment
from raymerge.storage.local import LocalStore

__all__ = ["Plan", "load_plan", "make_tables", "save_plan"]

_AFRESH = "Start again with --replace."


def make_tables(
    outputs: Sequence[Output],
    shards: Sequence[tuple[str, FileLayout]],
    rows: Sequence[PlacedRow],
    segments: Sequence[Segment],
    fates: Iterable[tuple[int, str, Fate]],
    files: Mapping[str, bytes],
) -> tuple[dict[str, pa.Table], list[Expression]]:
    """The tables, and the expressions in the order that rows number them."""
    expressions: dict[Expression, int] = {}
    for placed in rows:
        expressions.setdefault(placed.row.expression, len(expressions))
    assemblies = AssemblyNumbers()
    columns = {
        "tensors": _tensor_rows(outputs, shards),
        "rows": _row_rows(rows, expressions),
        "parts": _part_rows(rows),
        # Inputs come first: they number the assemblies.
        "inputs": _input_rows(rows, assemblies),
        **assemblies.rows(),
        "segments": segments,
        "shards": [(name, layout.nbytes, layout.header) for name, layout in shards],
        "files": list(files.items()),
        "dispositions": [
            (source, name, fate.disposition.value, fate.rule.value, fate.output)
            for source, name, fate in fates
        ],
    }
    return {name: _table(SCHEMAS[name], columns[name]) for name in SCHEMAS}, list(expressions)


def _table(schema: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    return pa.table(
        [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)],
        schema=schema,
    )


def _tensor_rows(
    outputs: Sequence[Output], shards: Sequence[tuple[str, FileLayout]]
) -> list[tuple[Any, ...]]:
    where = {
        tensor.name: (shard, tensor) for shard, (_, layout) in enumerate(shards) for tensor in layout.tensors
    }
    return [
        (
            o.name,
            o.dtype.value,
            list(o.shape),
            where[o.name][0],
            where[o.name][1].offset,
            where[o.name][1].nbytes,
            o.check_finite,
        )
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
            (
                placed.tensor,
                placed.shard,
                placed.offset,
                row.nbytes,
                placed.first_element,
                row.num_elements,
                expressions[row.expression],
                row.is_flat,
                placed.copy_of,
                also.get(position, []),
                first_part,
                len(row.parts),
                first_input,
                len(row.reads),
            )
        )
        first_part += len(row.parts)
        first_input += len(row.reads)
    return found


def _part_rows(rows: Sequence[PlacedRow]) -> list[tuple[Any, ...]]:
    return [
        (
            part.logical,
            list(part.shape),
            part.view.offset if part.view else 0,
            list(part.view.strides) if part.view else [],
        )
        for placed in rows
        for part in placed.row.parts
    ]


def _input_rows(rows: Sequence[PlacedRow], assemblies: AssemblyNumbers) -> list[tuple[Any, ...]]:
    return [
        (
            read.part,
            read.source,
            read.key,
            read.offset,
            read.nbytes,
            read.dtype.value,
            read.view.offset if read.view else 0,
            list(read.view.shape) if read.view else [],
            list(read.view.strides) if read.view else [],
            assemblies.number(read.assembly),
        )
        for placed in rows
        for read in placed.row.reads
    ]


def save_plan(plan: Plan, directory: Path) -> None:
    """Write one Arrow file a table and then the manifest into a directory, durably."""
    text = json.dumps({**plan.manifest, "digest": plan.digest}, indent=2, sort_keys=True)
    with LocalStore(directory) as store:
        for name, table in plan.tables.items():
            store.write_atomic(f"{name}.arrow", _arrow_file(table))
        store.write_atomic("manifest.json", f"{text}\n".encode())


def _arrow_file(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def load_plan(directory: Path) -> Plan:
    """Read what ``save_plan`` wrote and check that it is whole and that every invariant of a plan holds.

    Raises:
        PlanError: a table is missing, of another format or changed, or the plan contradicts itself.
    """
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        said = manifest.pop("digest")
        tables = {name: _load_table(directory, name) for name in SCHEMAS}
        whole = manifest["format"] == FORMAT and digest(manifest, tables) == said
    except (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        raise _unusable(directory, f"the saved plan cannot be read ({error}).") from error
    if not whole:
        raise _unusable(directory, "the saved plan is of another version of raymerge, or was changed.")
    plan = Plan(manifest, tables, (), said)
    problems = check_plan(plan)
    if problems:
        raise PlanError([Problem(f"{directory}: {each.where}", each.what, _AFRESH) for each in problems])
    return plan


def _load_table(directory: Path, name: str) -> pa.Table:
    with pyarrow.ipc.open_file(directory / f"{name}.arrow") as reader:
        table = reader.read_all()
    # Offsets that point outside their buffers must be found before anything follows them.
    table.validate(full=True)
    if not table.schema.equals(SCHEMAS[name]) or any(column.null_count for column in table.columns):
        raise ValueError(f"{name}.arrow has other columns, or holes in them")
    return table


def _unusable(directory: Path, what: str) -> PlanError:
    return PlanError(Problem(str(directory), what, _AFRESH))
