"""Assemblies in a plan's tables: written once each, read back, and every kind of damage noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.assembly_maker import Stock, expression, make_stock, plan_of, whole
from kits.plan_damage import changes, tampered

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.execute.ops import AssembledInput, Jobs
from raymerge.merge_plan.check import check_plan
from raymerge.merge_plan.expressions import Assembly, Output, Part, Read, Row, assembled, copy_expression
from raymerge.merge_plan.memory import assembly_needs
from raymerge.merge_plan.plan import SCHEMAS, Plan, digest, input_bytes

ROWS, COLUMNS, RANK = 12, 6, 2


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.ones(ROWS, COLUMNS),
        "b": torch.ones(ROWS + 3, COLUMNS, dtype=torch.bfloat16),
        "ids": torch.ones(ROWS, COLUMNS, dtype=torch.int64),
        "fused": torch.ones(COLUMNS, 2 * ROWS),
        "vector": torch.ones(ROWS),
        "lora.up": torch.ones(ROWS, RANK),
        "lora.down": torch.ones(RANK, COLUMNS),
        "lora.magnitude": torch.ones(ROWS),
        "flipped.up": torch.ones(COLUMNS, RANK),
        "flipped.down": torch.ones(RANK, ROWS),
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return make_stock(tmp_path_factory.mktemp("stock"), _tensors(), _tensors())


def _output(
    name: str, reads: tuple[Read, ...], shape: tuple[int, ...] = (ROWS, COLUMNS), method: str = "linear"
) -> Output:
    made_of = expression(method, sources=len(reads), weight=0.5)
    size = torch.Size(shape).numel()
    return Output(name, DType.F32, shape, (Row(size, made_of, (Part(name, shape, None),), reads),), True)


def _mixed(stock: Stock) -> Assembly:
    """Two terms with products, moved rows, and padding."""
    terms = (
        stock.term("a", product=stock.product("lora", RANK, scale=0.5, magnitude=True)),
        stock.term("b", 1),
    )
    return Assembly(ROWS, COLUMNS, terms, ((0, 2, 4, 0), (1, 9, 6, 1), (8, 0, 2, 1)), 10)


@pytest.fixture(scope="module")
def plan(stock: Stock) -> Plan:
    """Assemblies of every kind, one of them twice."""
    mixed = _mixed(stock)
    flipped = stock.term("a", product=stock.product("flipped", RANK, transposed=True))
    view = View(1, (ROWS, COLUMNS), (2, 2 * ROWS))
    outputs = (
        _output("one", (assembled(0, mixed), stock.read("a"))),
        _output("three", (assembled(0, whole(flipped, COLUMNS)),)),
        _output("two", (assembled(0, whole(stock.term("fused", view=view), COLUMNS)), assembled(0, mixed))),
        _output("vector", (assembled(0, whole(stock.term("vector"), 1)),), (ROWS,)),
        _output("zero", (stock.read("a"), stock.read("a", 1))),
    )
    made = plan_of(stock, outputs)
    assert check_plan(made) == ()
    return made


# Tables


def test_each_assembly_stands_once_and_in_order(plan: Plan) -> None:
    assert plan["inputs"].column("assembly").to_pylist() == [0, -1, 1, 2, 0, 3, -1, -1]
    assert plan["assemblies"].column("num_terms").to_pylist() == [2, 1, 1, 1]
    assert plan["terms"].column("num_factors").to_pylist() == [3, 0, 2, 0, 0]
    assert plan["runs"].to_pylist()[1] == {"to_row": 1, "from_row": 9, "count": 6, "term": 1}
    assert plan["rows"].column("is_flat").to_pylist() == [True, True, False, True, True]


def test_jobs_hold_what_the_plan_was_told(plan: Plan, stock: Stock) -> None:
    jobs = {row.tensor: row for segment in range(len(plan["segments"])) for row in Jobs(plan).rows(segment)}
    first = jobs["one"].inputs[0]
    assert isinstance(first, AssembledInput)
    mixed = _mixed(stock)
    assert first.terms == mixed.terms
    assert tuple(zip(*first.runs.tolist(), strict=True)) == mixed.runs
    assert (first.num_rows, first.num_columns, first.real_rows) == (ROWS, COLUMNS, 10)
    fused = jobs["two"].inputs[0]
    assert isinstance(fused, AssembledInput)
    assert fused.terms[0].read.view == View(1, (ROWS, COLUMNS), (2, 2 * ROWS))
    assert jobs["zero"].inputs == (stock.read("a"), stock.read("a", 1))
    needs = assembly_needs(plan)
    assert (first.need, fused.need) == (needs[0], needs[2])


def test_equal_content_shares_bytes_only_where_the_assembly_is_equal(stock: Stock) -> None:
    mixed = _mixed(stock)
    other = replace(mixed, real_rows=11)
    reads = [(assembled(0, each),) for each in (mixed, other, mixed, other)]
    made = plan_of(stock, [_output(name, each) for name, each in zip("abcd", reads, strict=True)])
    assert check_plan(made) == ()
    assert made["rows"].column("copy_of").to_pylist() == [-1, -1, 0, 1]
    changed = tampered(made, "inputs", "assembly", {2: 1, 3: 0})
    assert "it differs from the row that it is a copy of" in _said(changed)


def test_cost_is_all_that_is_read(plan: Plan) -> None:
    costs = plan["segments"].column("cost").to_pylist()
    matrix, half = 4 * ROWS * COLUMNS, 2 * (ROWS + 3) * COLUMNS
    lora = 4 * (ROWS * RANK + RANK * COLUMNS + ROWS)
    flipped = 4 * (COLUMNS * RANK + RANK * ROWS)
    mixed = (matrix + half + lora) // ROWS * ROWS
    by_input = [mixed, matrix, matrix + flipped, 2 * matrix, mixed, 4 * ROWS, matrix, matrix]
    assert input_bytes(plan).tolist() == by_input
    reads = [mixed + matrix, matrix + flipped, 2 * matrix + mixed, 4 * ROWS, 2 * matrix]
    assert sum(costs) == sum(reads) + 4 * matrix + 4 * ROWS


# Damage


def _said(plan: Plan) -> str:
    return "\n".join(str(problem) for problem in check_plan(plan))


FREE = {
    ("terms", "source"),
    ("terms", "offset"),
    ("terms", "scale"),
    ("factors", "source"),
    ("factors", "offset"),
}
"""What small changes of no other column contradicts: left to the digest."""
COLUMNS_USED = [
    (table, field.name)
    for table in ("assemblies", "terms", "factors", "runs")
    for field in SCHEMAS[table]
    if (table, field.name) not in FREE
]


@pytest.mark.parametrize(("table", "column"), [*COLUMNS_USED, ("inputs", "assembly")])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_changed_value_is_noticed(plan: Plan, table: str, column: str, data: st.DataObject) -> None:
    values = plan[table].column(column).to_pylist()
    row = data.draw(st.integers(0, len(values) - 1))
    value = data.draw(st.sampled_from(changes(values[row], SCHEMAS[table].field(column).type)))
    assume(_is_a_change(plan, table, column, row, value))
    assert check_plan(tampered(plan, table, column, {row: value}))


def _is_a_change(plan: Plan, table: str, column: str, row: int, value: Any) -> bool:
    """Other rows that are there as well, another end of the padding, and no factors: left to the digest."""
    runs = plan["runs"].to_pylist()
    if table == "runs" and column in ("to_row", "from_row", "count"):
        return not 0 <= value <= ROWS + 3
    if (table, column) == ("runs", "term"):
        return value not in (0, 1) or row > 2
    if (table, column) == ("assemblies", "real_rows"):
        limit = max(run["to_row"] + run["count"] for run in runs[:3]) if row == 0 else ROWS
        return not limit <= value <= ROWS
    return True


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "words"),
    [
        ("inputs", "assembly", 4, -1, "cost is not the bytes read and written"),
        ("assemblies", "num_columns", 0, 2**41, "no such number of rows or columns"),
        ("assemblies", "real_rows", 0, 9, "it leaves its assembly"),
        ("terms", "dtype", 1, "I16", "arithmetic reads codes"),
        ("terms", "scale", 0, float("nan"), "its scale is no number"),
        ("terms", "scale", 1, 1.0, "its scale is no number"),
        ("terms", "transposed", 0, True, "it is transposed and has no product, or a magnitude"),
        ("terms", "transposed", 2, False, "nbytes is not that of its shape"),
        ("terms", "view_offset", 3, 2, "its view leaves its region"),
        ("runs", "from_row", 0, 9, "it leaves its term"),
        ("runs", "to_row", 0, -1, "it leaves its assembly"),
        ("runs", "to_row", 2, 6, "its term gives a row twice"),
        ("runs", "to_row", 0, 2, "it stands behind a later row or term"),
        ("runs", "term", 3, 1, "its assembly has no such term"),
    ],
)
def test_damage_is_named(plan: Plan, table: str, column: str, row: int, value: Any, words: str) -> None:
    assert words in _said(tampered(plan, table, column, {row: value}))


@pytest.mark.parametrize("table", ["terms", "factors"])
def test_references_outside_are_noticed(plan: Plan, table: str) -> None:
    for column, values in (("source", [-1, 2]), ("offset", [-4, 2**40]), ("dtype", ["X9"])):
        assert all(check_plan(tampered(plan, table, column, {0: value})) for value in values)


@pytest.mark.parametrize("table", ["assemblies", "terms", "factors", "runs"])
@pytest.mark.parametrize("kind", ["without", "twice"])
def test_rows_left_out_or_repeated_are_noticed(plan: Plan, table: str, kind: str) -> None:
    old = plan[table]
    for row in range(len(old)):
        rest = row + (kind == "without")
        changed = pa.concat_tables([old.slice(0, row + (kind == "twice")), old.slice(rest)])
        tables = {**plan.tables, table: changed}
        assert check_plan(replace(plan, tables=tables, digest=digest(plan.manifest, tables)))


def test_an_assembly_that_no_input_names_is_noticed(plan: Plan) -> None:
    changed = tampered(plan, "inputs", "assembly", {5: 2})
    assert "inputs do not name every one of them, in order" in _said(changed)


def test_a_copy_of_bytes_cannot_be_assembled(stock: Stock) -> None:
    read = assembled(0, whole(stock.term("a"), COLUMNS))
    row = Row(ROWS * COLUMNS, copy_expression(DType.F32), (Part("a", (ROWS, COLUMNS), None),), (read,))
    made = plan_of(stock, [Output("a", DType.F32, (ROWS, COLUMNS), (row,), True)])
    assert "a copy of bytes is assembled of rows" in _said(made)


def test_a_matrix_that_is_assembled_element_by_element_is_refused(stock: Stock) -> None:
    """Rows of an assembly are those of its part, so that groups of them are."""
    term = replace(stock.term("a"), num_rows=ROWS * COLUMNS)
    made = plan_of(stock, [_output("a", (assembled(0, whole(term, 1)),))])
    assert "its assembly has another shape than its part" in _said(made)


def test_integers_are_not_added_to(stock: Stock) -> None:
    made = plan_of(stock, [_output("a", (assembled(0, whole(stock.term("ids"), COLUMNS)),))])
    assert "arithmetic reads codes" in _said(made)


def test_a_piece_of_a_method_that_needs_the_whole_tensor_is_refused(stock: Stock) -> None:
    output = _output("a", (stock.read("a"), stock.read("a", 1)), method="multislerp")
    (row,) = output.rows
    half = ROWS * COLUMNS // 2
    halves = [
        row._replace(
            num_elements=half,
            reads=tuple(r._replace(nbytes=4 * half, offset=r.offset + 4 * part * half) for r in row.reads),
        )
        for part in range(2)
    ]
    made = plan_of(stock, [output._replace(rows=tuple(halves))])
    told = tampered(made, "rows", "first_element", {1: half})
    assert "its method needs the whole tensor" in _said(told)


# Positions


@pytest.mark.parametrize("position", ["2.0", "-1", '"x"'])
def test_a_position_that_is_none_is_noticed(plan: Plan, position: str) -> None:
    expressions = [dict(each) for each in plan.manifest["expressions"]]
    expressions[0]["settings"] = expressions[0]["settings"].replace("{", f'{{"position":{position},', 1)
    manifest = {**plan.manifest, "expressions": expressions}
    assert check_plan(replace(plan, manifest=manifest, digest=digest(manifest, plan.tables)))
