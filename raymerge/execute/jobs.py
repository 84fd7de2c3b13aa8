"""One segment's rows, decoded from the plan's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.planner.expressions import Expression, Read
from raymerge.planner.memory import Need, row_need
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
    inputs: tuple[Read, ...]
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
    def inputs(self) -> tuple[Read, ...]:
        """All inputs, part by part."""
        return tuple(each for part in self.parts for each in part.inputs)

    @property
    def need(self) -> Need:
        """Memory that making it takes."""
        return row_need(
            self.expression,
            [(each.dtype, each.nbytes) for each in self.inputs],
            len(self.parts),
            num_elements=self.num_elements,
            is_flat=self.is_flat,
        )


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
        inputs = [
            Read(
                each["part"],
                each["source"],
                each["key"],
                each["offset"],
                each["nbytes"],
                DType(each["dtype"]),
                _view(each["view_offset"], each["view_shape"], each["view_strides"]),
            )
            for each in rows
        ]
        return tuple(
            JobPart(
                part["logical"],
                tuple(part["shape"]),
                _view(part["view_offset"], part["shape"], part["view_strides"]),
                tuple(each for each in inputs if each.part == position),
            )
            for position, part in enumerate(parts)
        )


def _view(offset: int, shape: Sequence[int], strides: Sequence[int]) -> View | None:
    return View(offset, tuple(shape), tuple(strides)) if strides else None
