"""Columns of tables: short runs of rows as plain values, whatever way Arrow keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.merge_plan.plan import RunReader

SCHEMA = pa.schema(
    [("number", pa.int32()), ("word", pa.string()), ("sizes", pa.list_(pa.int64())), ("is_so", pa.bool_())]
)
Rows = Sequence[tuple[int, str, list[int], bool]]
ROWS = st.lists(
    st.tuples(
        st.integers(-5, 5), st.text(max_size=4), st.lists(st.integers(0, 9), max_size=3), st.booleans()
    ),
    min_size=1,
    max_size=20,
)


def _table(rows: Rows) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, type=f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


@given(rows=ROWS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_runs_and_rows_are_those_of_the_table(rows: Rows, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    first = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - first))
    whole = _table(rows)
    # In one piece, in two, and as what is left of a longer table.
    for table in (
        whole,
        pa.concat_tables([whole.slice(0, cut), whole.slice(cut)]),
        pa.concat_tables([whole, whole]).combine_chunks().slice(len(rows)),
    ):
        reader = RunReader(table, *SCHEMA.names)
        assert list(reader.read(first, count)) == list(rows[first : first + count])
        assert [reader.row(index) for index in range(len(rows))] == list(rows)
