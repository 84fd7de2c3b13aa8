"""What a plan takes of a worker's memory: its lanes, its peak, and the smallest budget that works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from raymerge.checkpoints.views import View
from raymerge.dtypes import DType
from raymerge.errors import Problem
from raymerge.merge_plan.columns import ints, last_values, lists, sums
from raymerge.merge_plan.expressions import Expression, Scales
from raymerge.merge_plan.gathers import read_view, repeated_inputs
from raymerge.merge_plan.memory import (
    InputNeed,
    Lane,
    Need,
    PartSize,
    RowSize,
    assembly_needs,
    expression_passes,
    row_need,
    tiling,
)
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.tables import read_scales
from raymerge.storage.local.direct_io import BOUNCE_BYTES
from raymerge.units import format_size

SMALLEST_BUDGET = 16 << 20
"""No worker is run with less, in bytes."""
SMALLEST_LANE = 1 << 20
"""Bytes: in the shares of a smaller one nothing is read or written at once that is worth the asking."""


def too_little_memory(option: str, budget: int, least: int, what: str) -> Problem:
    """Says that a worker's memory is too little for something, and how much is enough."""
    return Problem(
        option,
        f"{format_size(budget)} a worker are too little for {what}.",
        f"The smallest budget that works is {least} bytes ({format_size(least)}).",
    )


@dataclass(frozen=True, slots=True)
class Projection:
    """Peak memory of a plan under a budget, beyond an idle worker."""

    budget: int
    """Bytes that a worker may use."""
    lanes: int
    """Segments that it makes side by side."""
    peak: int
    """Bytes that it will use at most."""
    tensor: str
    """The output that sets the peak."""
    least_budget: int
    """Smallest budget, in bytes, that this plan can be run with."""
    least_tensor: str
    """The output that sets the smallest budget."""
    least_method: str
    """The method that makes it."""
    shared: int = 0
    """Bytes of the budget that are no lane's: for writing what goes to several places."""
    beside: int = 0
    """Bytes that each lane takes besides its share of the budget, for what it asks of servers."""
    apart: int = 0
    """Bytes that a worker takes besides its lanes, to ask servers anything."""

    @property
    def whole_peak(self) -> int:
        """Bytes that a worker will use at most, with what goes to servers and comes from them."""
        return self.peak + self.lanes * self.beside + self.apart

    def shortage(self, option: str = "--memory", *, given: int | None = None) -> Problem | None:
        """What there is to say if the budget is too small for the plan.

        Args:
            option: gave the budget.
            given: bytes that a worker was given for all that it does; None for the budget, and what comes
                beside it.
        """
        if self.budget >= self.least_budget:
            return None
        what = f"{self.least_tensor} with {self.least_method}"
        if self.least_budget <= SMALLEST_BUDGET:
            what = "any merge that speaks to servers" if self.beside else "any merge"
        whole = self.budget + self.lanes * self.beside + self.apart if given is None else given
        least = self.least_budget + self.beside + self.apart
        return too_little_memory(option, whole, least, what)

    @property
    def lane(self) -> Lane:
        """The share of one lane."""
        return Lane((self.budget - self.shared) // self.lanes)


def project(plan: Plan, budget: int, *, lanes: int = 1) -> Projection:
    """Peak memory of a plan under a budget, and the smallest budget it can be run with.

    Args:
        plan: what is to be made.
        budget: bytes that a worker may use.
        lanes: segments that a worker is to make side by side; fewer where the budget does not hold so many,
            or the plan has not as many.
    """
    names = plan["tensors"].column("name")
    found = list(_needs(plan))
    least, least_tensor, least_method = max(
        ((need.least_bytes, tensor, expression.method) for tensor, _, need, expression, _ in found),
        default=(0, 0, ""),
        key=lambda each: each[0],
    )
    shared = BOUNCE_BYTES if (ints(plan["rows"], "copy_of") >= 0).any() else 0
    most = (budget - shared) // max(SMALLEST_LANE, least)
    lanes = max(1, min(lanes, most, plan["segments"].num_rows))
    lane = Lane((budget - shared) // lanes)
    peak, peak_tensor = max(
        ((tiling(need, count, lane, passes=n).peak, tensor) for tensor, count, need, _, n in found),
        default=(0, 0),
        key=lambda each: each[0],
    )
    named = len(names) > 0
    return Projection(
        budget,
        lanes,
        peak * lanes + shared,
        names[peak_tensor].as_py() if named else "",
        max(least + shared, SMALLEST_BUDGET),
        names[least_tensor].as_py() if named else "",
        least_method,
        shared,
    )


def _needs(plan: Plan) -> Iterator[tuple[int, int, Need, Expression, int]]:
    """Every distinct need of a plan's rows: tensor, elements, need, expression, passes."""
    expressions = plan.expressions
    inputs, rows = plan["inputs"], plan["rows"]
    assemblies = assembly_needs(plan)
    encodings = plan.encodings
    scales = [_sized(read_scales(tuple(row.values()), encodings)) for row in plan["scales"].to_pylist()]
    reads = [
        (dtype, nbytes, assemblies[number] if number >= 0 else None, scales[own] if own >= 0 else None, *more)
        for dtype, nbytes, number, own, *more in zip(
            *(inputs.column(name).to_pylist() for name in ("dtype", "nbytes", "assembly", "scales")),
            _views(inputs, "view_shape"),
            repeated_inputs(plan).tolist(),
            strict=True,
        )
    ]
    sizes = _part_sizes(plan)
    wanted = ("tensor", "num_elements", "expression", "is_flat", "first_part", "num_parts")
    spans = ("first_input", "num_inputs")
    seen: set[tuple[object, ...]] = set()
    for columns, rank, tensor, count, index, is_flat, first_part, parts, first, num_inputs in zip(
        *_shapes(plan), *(rows.column(name).to_pylist() for name in (*wanted, *spans)), strict=True
    ):
        if expressions[index].is_scales:
            continue
        own = tuple(reads[first : first + num_inputs])
        places = () if is_flat else tuple(sizes[part] for part in range(first_part, first_part + parts))
        key = (count, index, is_flat, parts, columns, rank, places, own)
        if key in seen:
            continue
        seen.add(key)
        kinds = [InputNeed(DType(dtype), *rest) for dtype, *rest in own]
        size = RowSize(count, parts, columns, rank, is_flat, places)
        need = row_need(expressions[index], kinds, size)
        yield tensor, count, need, expressions[index], expression_passes(expressions[index], size.shape)


def _views(table: pa.Table, shape: str) -> list[View | None]:
    """The views of inputs or parts."""
    names = ("view_offset", shape, "view_strides")
    return [read_view(*values) for values in zip(*(table.column(n).to_pylist() for n in names), strict=True)]


def _part_sizes(plan: Plan) -> Mapping[int, PartSize]:
    """The parts of rows that are not row-major, by their numbers."""
    rows, parts = plan["rows"], plan["parts"]
    is_loose = np.repeat(ints(rows, "is_flat") == 0, ints(rows, "num_parts"))
    numbers = np.flatnonzero(is_loose)
    chosen = parts.filter(pa.array(is_loose))
    shapes = map(tuple, chosen.column("shape").to_pylist())
    return dict(zip(numbers.tolist(), map(PartSize, shapes, _views(chosen, "shape")), strict=True))


def _sized(scales: Scales) -> Scales:
    """Scales by what memory hangs on, so that those of equal tensors are equal."""
    return replace(scales, key="", offset=0, tensor_key="", tensor_offset=0)


def _shapes(plan: Plan) -> tuple[list[int], list[int]]:
    """Of each row: elements of a logical row, summed over its parts, and the dimensions of the parts."""
    lengths, sizes = lists(plan["parts"], "shape")
    columns = np.maximum(1, last_values(lengths, sizes, default=1))
    first = ints(plan["rows"], "first_part")
    return sums(ints(plan["rows"], "num_parts"), columns).tolist(), lengths[first].tolist()
