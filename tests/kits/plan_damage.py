"""Plans with a value changed, whose digest fits all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from raymerge.merge_plan.plan import SCHEMAS, Plan, digest


def tampered(plan: Plan, table: str, column: str, change: dict[int, Any]) -> Plan:
    values = plan[table].column(column).to_pylist()
    for row, value in change.items():
        values[row] = value
    kind = SCHEMAS[table].field(column)
    index = SCHEMAS[table].get_field_index(column)
    return with_table(plan, table, plan[table].set_column(index, kind, pa.array(values, type=kind.type)))


def with_table(plan: Plan, name: str, table: pa.Table) -> Plan:
    tables = {**plan.tables, name: table}
    return replace(plan, tables=tables, digest=digest(plan.manifest, tables))


def with_manifest(plan: Plan, **entries: Any) -> Plan:
    manifest = {**plan.manifest, **entries}
    return replace(plan, manifest=manifest, digest=digest(manifest, plan.tables))


def with_expression(plan: Plan, number: int, **changed: Any) -> Plan:
    expressions = [dict(each) for each in plan.manifest["expressions"]]
    expressions[number] |= changed
    return with_manifest(plan, expressions=expressions)


def without_row(table: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([table.slice(0, row), table.slice(row + 1)])


def with_row_twice(table: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([table.slice(0, row + 1), table.slice(row)])


def changes(value: Any, kind: pa.DataType) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        far = 2**30 if kind == pa.int32() else 2**62
        return [value + delta for delta in (-1, 1, -far, far - 1)]
    if isinstance(value, float):
        return [float("nan"), float("inf"), -float("inf")]
    if isinstance(value, str):
        return [f"{value}x", ""] if value else ["x"]
    if isinstance(value, bytes):
        return [value[:-1], value + b" ", b"", value.replace(b'"', b"'", 1)]
    larger = [[value[0] + 1, *value[1:]], value[1:], [-value[0] - 1, *value[1:]]] if value else []
    return [*larger, [*value, 2]]
