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
    changed = plan[table].set_column(index, kind, pa.array(values, type=kind.type))
    tables = {**plan.tables, table: changed}
    return replace(plan, tables=tables, digest=digest(plan.manifest, tables))


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
