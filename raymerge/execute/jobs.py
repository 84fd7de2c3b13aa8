"""One segment's rows, decoded from the plan's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.execute.assembled import AssembledInput, Input
from raymerge.planner.assemblies import read_term, read_view
from raymerge.planner.assembly_memory import assembly_need
from raymerge.planner.columns import ints
from raymerge.planner.expressions import Expression, Read
from raymerge.planner.memory import InputNeed, Need, RowSize, row_need
from raymerge.planner.tables import Plan


@dataclass(frozen=True, slots=True)
class JobPart:
    """One logical tensor of a row."""

    logical: str
    """Name by which chance is drawn."""
    shape: tuple[int, ...]
    """Logical shape."""
    view: View | None
    """Where its elements lie in the row, in elements; None: the row is this part."""
    inputs: tuple[Input, ...]
    """What feeds it, the base first where there is one."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """One row to make."""

    index: int
    """Its number in the plan."""
    tensor: str
    """Its output tensor, for messages."""
    check_finite: bool
    """Whether NaN or infinity in it is an error."""
    expression: Expression
    """What is computed."""
    first_element: int
    """Index of its first element within the logical tensor."""
    num_elements: int
    """Its elements."""
    is_flat: bool
    """Whether it may be cut into tiles."""
    parts: tuple[JobPart, ...]
    """Its logical tensors."""
    places: tuple[tuple[str, int], ...]
    """Shard names and offsets that its bytes go to: its own, and those of rows with equal content."""

    @property
    def inputs(self) -> tuple[Input, ...]:
        """All inputs, part by part."""
        return tuple(each for part in self.parts for each in part.inputs)

    @property
    def need(self) -> Need:
        """Memory that making it takes."""
        shapes = [part.shape for part in self.parts]
        size = RowSize(
            self.num_elements,
            len(shapes),
            sum(max(1, shape[-1]) if shape else 1 for shape in shapes),
            len(shapes[0]),
            self.is_flat,
        )
        return row_need(self.expression, [_input_need(each) for each in self.inputs], size)


def _input_need(source: Input) -> InputNeed:
    if isinstance(source, Read):
        return InputNeed(source.dtype, source.nbytes)
    read = source.terms[0].read
    return InputNeed(read.dtype, read.nbytes, source.need)


class Jobs:
    """Reads jobs out of a plan; expressions are decoded once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._expressions: Sequence[Expression] = plan.expressions
        self._shards: Sequence[str] = plan["shards"].column("name").to_pylist()

    def rows(self, segment: int) -> tuple[RowJob, ...]:
        """The rows that a segment makes, in order; those that another row writes are left out."""
        bounds = self._plan["segments"].slice(segment, 1).to_pylist()[0]
        rows = self._plan["rows"].slice(bounds["first_row"], bounds["num_rows"]).to_pylist()
        return tuple(
            self._row(bounds["first_row"] + position, row)
            for position, row in enumerate(rows)
            if row["copy_of"] < 0
        )

    def _row(self, index: int, row: dict[str, int]) -> RowJob:
        tensor = self._plan["tensors"].slice(row["tensor"], 1).to_pylist()[0]
        return RowJob(
            index=index,
            tensor=tensor["name"],
            check_finite=tensor["check_finite"],
            expression=self._expressions[row["expression"]],
            first_element=row["first_element"],
            num_elements=row["num_elements"],
            is_flat=bool(row["is_flat"]),
            parts=self._parts(row),
            places=((self._shards[row["shard"]], row["offset"]), *self._also(row["also"])),
        )

    def _also(self, rows: object) -> tuple[tuple[str, int], ...]:
        table = self._plan["rows"]
        others = rows if isinstance(rows, list) else []
        return tuple(
            (self._shards[table.column("shard")[other].as_py()], table.column("offset")[other].as_py())
            for other in others
        )

    def _parts(self, row: dict[str, int]) -> tuple[JobPart, ...]:
        parts = self._plan["parts"].slice(row["first_part"], row["num_parts"]).to_pylist()
        rows = self._plan["inputs"].slice(row["first_input"], row["num_inputs"]).to_pylist()
        inputs = [(each["part"], self._input(each)) for each in rows]
        return tuple(
            JobPart(
                part["logical"],
                tuple(part["shape"]),
                read_view(part["view_offset"], part["shape"], part["view_strides"]),
                tuple(each for owner, each in inputs if owner == position),
            )
            for position, part in enumerate(parts)
        )

    def _input(self, row: Mapping[str, Any]) -> Input:
        if row["assembly"] >= 0:
            return self._assembled(row["assembly"])
        view = read_view(row["view_offset"], row["view_shape"], row["view_strides"])
        place = (row["source"], row["key"], row["offset"], row["nbytes"])
        return Read(row["part"], *place, DType(row["dtype"]), view)

    def _assembled(self, number: int) -> AssembledInput:
        (row,) = self._plan["assemblies"].slice(number, 1).to_pylist()
        terms = self._plan["terms"].slice(row["first_term"], row["num_terms"]).to_pylist()
        first = terms[0]["first_factor"]
        count = sum(term["num_factors"] for term in terms)
        factors = self._plan["factors"].slice(first, count).to_pylist()
        runs = self._plan["runs"].slice(row["first_run"], row["num_runs"])
        return AssembledInput(
            num_rows=row["num_rows"],
            num_columns=row["num_columns"],
            real_rows=row["real_rows"],
            terms=tuple(read_term(term, _own_factors(term, factors, first)) for term in terms),
            runs=np.stack([ints(runs, name) for name in ("to_row", "from_row", "count", "term")]),
            need=assembly_need(row, terms, factors),
        )


def _own_factors(
    term: Mapping[str, Any], factors: Sequence[Mapping[str, Any]], first: int
) -> Sequence[Mapping[str, Any]]:
    begin = term["first_factor"] - first
    return factors[begin : begin + term["num_factors"]]
