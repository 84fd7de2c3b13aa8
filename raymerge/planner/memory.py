"""The memory contract: what a worker needs for every row of a plan, and how large its tiles may be.

A worker keeps ``SLOTS`` segments in flight, each with the tile that is computed, the next one's bytes already
read and the previous one's bytes still being written. All of it is counted here, per element of a tile.
Where a segment goes from one row to the next, it overlaps them only as far as both fit into its slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raymerge.dtypes import DType
from raymerge.methods import BLOCK, ROW_GROUP, Access, Method, find_method
from raymerge.planner.assembly_memory import AssemblyNeed, assembly_needs, group_multiple
from raymerge.planner.columns import ints, last_values, lists, sums
from raymerge.planner.expressions import Expression
from raymerge.planner.plan import Plan

SLOTS = 2
"""Segments that a worker has in flight."""
TILE_MOST = 1 << 20
"""Elements of the largest tile; more only costs cache."""
SMALLEST_BUDGET = 16 << 20
"""No worker is run with less, in bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a row asks of a worker."""

    bytes_per_element: float
    """Bytes that live while a tile is made, for each of its elements."""
    scratch_per_element: float
    """The part of them that the method's temporaries take: never less than for a tile of BLOCK elements."""
    fixed_bytes: int
    """Bytes of statistics, held whatever the tile."""
    resident_per_element: float
    """Bytes of raw input, kept whole over several passes where they fit."""
    least_elements: int
    """Elements of the smallest tile that the row can be cut into."""
    unit: int = BLOCK
    """Elements that tiles are multiples of, but for a last one."""

    def tile_bytes(self, num_elements: int) -> int:
        """Bytes that live while a tile of so many elements is made."""
        short = max(0, BLOCK - num_elements)
        varying = self.bytes_per_element * num_elements + self.scratch_per_element * short
        return math.ceil(varying) + self.fixed_bytes

    def elements_within(self, nbytes: float) -> int:
        """Elements of the largest tile that takes so many bytes beside what is fixed; negative for none."""
        elements = int(nbytes / max(self.bytes_per_element, 1e-9))
        if elements >= BLOCK:
            return elements
        rest = self.bytes_per_element - self.scratch_per_element
        return int((nbytes - self.scratch_per_element * BLOCK) / max(rest, 1e-9))

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest tile."""
        return self.tile_bytes(self.least_elements)


@dataclass(frozen=True, slots=True)
class Projection:
    """Peak memory of a plan under a budget, beyond an idle worker."""

    budget: int
    """Bytes that a worker may use."""
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


@dataclass(frozen=True, slots=True)
class InputNeed:
    """What one input of a row asks of a worker."""

    dtype: DType
    """How it is stored; of an assembled one its first term."""
    nbytes: int
    """Bytes read; of an assembled one its first term's."""
    assembly: AssemblyNeed | None = None
    """What assembling it takes; None where it is read as it is stored."""

    def raw_bytes(self, num_elements: int, *, is_flat: bool) -> float:
        """Stored bytes of it that a row of so many elements is made of."""
        if self.assembly is None:
            return self.nbytes
        return self.assembly.raw_bytes(num_elements, is_flat=is_flat)

    def kept_bytes(self, num_elements: int, *, is_flat: bool) -> float:
        """Stored bytes of it that all tiles of such a row hold together."""
        overlap = self.assembly.overlap if self.assembly is not None and is_flat else 1.0
        return overlap * self.raw_bytes(num_elements, is_flat=is_flat)


@dataclass(frozen=True, slots=True)
class RowSize:
    """What of a row's size sets its need."""

    num_elements: int
    """Elements of the row."""
    num_parts: int
    """Logical tensors in it."""
    columns: int
    """Elements of a logical row, summed over its parts."""
    num_dimensions: int
    """Dimensions of its parts."""
    is_flat: bool
    """Whether tiles may be cut; otherwise the row is made at once."""

    @property
    def shape(self) -> tuple[int, ...]:
        """A shape of so many dimensions, elements and columns: methods decide by it on access and passes."""
        if self.num_dimensions < 2:
            return (self.num_elements,) * self.num_dimensions
        ones = (1,) * (self.num_dimensions - 2)
        return (*ones, self.num_elements // max(1, self.columns), self.columns)


def row_need(expression: Expression, inputs: Sequence[InputNeed], size: RowSize) -> Need:
    """Memory of one row.

    Args:
        expression: what is computed.
        inputs: every input, of all parts.
        size: the row's size.
    """
    num_elements, is_flat = size.num_elements, size.is_flat
    raw = sum(each.raw_bytes(num_elements, is_flat=is_flat) for each in inputs) / max(1, num_elements)
    kept = sum(each.kept_bytes(num_elements, is_flat=is_flat) for each in inputs) / max(1, num_elements)
    out = expression.cast.bits / 8
    method = find_method(expression.method)
    if expression.is_copy or method is None:
        # The tile in hand, the next one being read, the one before being written.
        return Need(3 * raw, 0, 0, raw, min(num_elements, BLOCK))
    per_part = len(inputs) // size.num_parts
    scratch = 4 * (method.scratch + method.scratch_per_source * per_part)
    assemblies = [each.assembly for each in inputs if each.assembly is not None]
    # A view is gathered in its stored dtype before it is widened, and so are rows before they are placed.
    gathered = 0.0 if is_flat else max(each.dtype.bits / 8 for each in inputs)
    placed = max((each.placed_per_element(num_elements, is_flat=is_flat) for each in assemblies), default=0)
    # Raw bytes of two tiles (one read ahead), float32 inputs, the result and its place in the row, and the
    # encoded bytes of two tiles (one on its way out).
    per_element = 2 * raw + gathered + placed + 4 * per_part + scratch + 8 + 2 * out
    state = method.state_bytes * len(inputs) + method.state_bytes_per_column * per_part * size.columns
    fixed = state + sum(each.fixed_bytes for each in assemblies)
    unit = _unit(expression, method, size, assemblies)
    return Need(per_element, scratch, fixed, kept, min(num_elements, unit), unit)


def _unit(expression: Expression, method: Method, size: RowSize, assemblies: Sequence[AssemblyNeed]) -> int:
    """Elements that a row's tiles are multiples of."""
    if not size.is_flat:
        return max(1, size.num_elements)
    settings = expression.bind(keys=(), shape=size.shape)
    columns = max((each.columns for each in assemblies), default=0)
    match method.access_with(settings):
        case Access.ELEMENT:
            return group_multiple(columns) if columns else BLOCK
        case Access.TENSOR:
            padded = max((each.columns for each in assemblies if each.is_padded), default=0)
            return BLOCK * -(-ROW_GROUP * padded // BLOCK) if padded else BLOCK
        case Access.ROW | Access.MATRIX:
            return method.granule(settings)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one row is cut under a budget."""

    elements: int
    """Elements of a tile: a multiple of the row's unit, or the whole of a smaller row."""
    resident: bool
    """Whether the inputs are read once and kept over all passes."""
    peak: int
    """Bytes that a slot uses while the row is made."""


def tiling(need: Need, num_elements: int, budget: int, *, passes: int) -> Tiling:
    """Cut a row so that it fits a worker's budget, reading inputs once where they fit beside a tile.

    Args:
        need: the row's need.
        num_elements: its elements.
        budget: bytes that the whole worker may use; a slot has its share.
        passes: statistics passes before the last one.
    """
    slot = budget / SLOTS - need.fixed_bytes
    kept = math.ceil(need.resident_per_element * num_elements)
    resident = passes > 0 and kept <= slot / 2 and need.least_bytes + kept <= budget / SLOTS
    room = slot - kept if resident else slot
    affordable = min(TILE_MOST, need.elements_within(room)) // need.unit * need.unit
    elements = max(1, min(num_elements, max(need.least_elements, affordable)))
    return Tiling(elements, resident, need.tile_bytes(elements) + (kept if resident else 0))


def project(plan: Plan, budget: int) -> Projection:
    """Peak memory of a plan under a budget, and the smallest budget it can be run with."""
    names = plan["tensors"].column("name")
    peak = least = 0
    peak_tensor = least_tensor = 0
    least_method = ""
    for tensor, num_elements, need, expression, passes in _needs(plan):
        mine = tiling(need, num_elements, budget, passes=passes).peak * SLOTS
        if mine > peak:
            peak, peak_tensor = mine, tensor
        if need.least_bytes * SLOTS > least:
            least, least_tensor = need.least_bytes * SLOTS, tensor
            least_method = expression.method
    named = len(names) > 0
    return Projection(
        budget,
        peak,
        names[peak_tensor].as_py() if named else "",
        max(least, SMALLEST_BUDGET),
        names[least_tensor].as_py() if named else "",
        least_method,
    )


def _needs(plan: Plan) -> Iterator[tuple[int, int, Need, Expression, int]]:
    """Every distinct need of a plan's rows: tensor, elements, need, expression, passes."""
    expressions = plan.expressions
    inputs, rows = plan["inputs"], plan["rows"]
    assemblies = assembly_needs(plan)
    reads = [
        (dtype, nbytes, assemblies[number] if number >= 0 else None)
        for dtype, nbytes, number in zip(
            *(inputs.column(name).to_pylist() for name in ("dtype", "nbytes", "assembly")), strict=True
        )
    ]
    wanted = ("tensor", "num_elements", "expression", "is_flat", "num_parts", "first_input", "num_inputs")
    seen: set[tuple[object, ...]] = set()
    for columns, rank, tensor, count, index, is_flat, parts, first, num_inputs in zip(
        *_shapes(plan), *(rows.column(name).to_pylist() for name in wanted), strict=True
    ):
        own = tuple(reads[first : first + num_inputs])
        key = (count, index, is_flat, parts, columns, rank, own)
        if key in seen:
            continue
        seen.add(key)
        kinds = [InputNeed(DType(dtype), nbytes, assembly) for dtype, nbytes, assembly in own]
        size = RowSize(count, parts, columns, rank, is_flat)
        need = row_need(expressions[index], kinds, size)
        yield tensor, count, need, expressions[index], expression_passes(expressions[index], size.shape)


def _shapes(plan: Plan) -> tuple[list[int], list[int]]:
    """Of each row: elements of a logical row, summed over its parts, and the dimensions of the parts."""
    lengths, sizes = lists(plan["parts"], "shape")
    columns = np.maximum(1, last_values(lengths, sizes, default=1))
    first = ints(plan["rows"], "first_part")
    return sums(ints(plan["rows"], "num_parts"), columns).tolist(), lengths[first].tolist()


def expression_passes(expression: Expression, shape: tuple[int, ...] = ()) -> int:
    """Statistics passes that an expression makes over inputs of a shape before the last one."""
    method = find_method(expression.method)
    if expression.is_copy or method is None:
        return 0
    return method.kernel.passes(expression.bind(keys=(), shape=shape))
