"""The memory contract: what a worker needs for every row of a plan, and how large its tiles may be.

A worker keeps ``SLOTS`` segments in flight, each with the tile that is computed, the next one's bytes already
read and the previous one's bytes still being written. All of it is counted here, per element of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymerge.dtypes import DType
from raymerge.methods import BLOCK, Access, Method, find_method
from raymerge.planner.expressions import Expression
from raymerge.planner.tables import Plan

SLOTS = 2
"""Segments that a worker has in flight."""
TILE_MOST = 1 << 20
"""Elements of the largest tile; more only costs cache."""
SMALLEST_BUDGET = 16 << 20
"""No worker is run with less, in bytes."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a row asks of a worker, in bytes per element of a tile."""

    bytes_per_element: float
    """Everything that lives while a tile is made."""
    resident_per_element: float
    """Raw input bytes, kept whole over several passes where they fit."""
    least_elements: int
    """Elements of the smallest tile that the row can be cut into."""

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest tile."""
        return round(self.bytes_per_element * self.least_elements)


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


def row_need(
    expression: Expression, dtypes: Sequence[DType], num_parts: int, *, num_elements: int, is_flat: bool
) -> Need:
    """Memory of one row.

    Args:
        expression: what is computed.
        dtypes: stored dtype of each read, of all parts.
        num_parts: logical tensors in the row.
        num_elements: elements of the row.
        is_flat: whether tiles may be cut; otherwise the row is made at once.
    """
    raw = sum(dtype.bits / 8 for dtype in dtypes) / num_parts
    out = expression.cast.bits / 8
    if expression.is_copy:
        return Need(2 * raw, 0, min(num_elements, BLOCK))
    method = find_method(expression.method)
    scratch = _scratch(method, len(dtypes) // num_parts)
    # Two tiles of raw bytes (one read ahead), float32 copies, scratch, the result, its bytes, and the previous
    # tile's bytes on their way out. A row that is not flat reads each part's region whole.
    regions = raw * num_parts
    per_element = 2 * regions + 4 * (len(dtypes) // num_parts) + 4 * scratch + 8 + 2 * out
    divisible = is_flat and (method is None or method.access in (Access.ELEMENT, Access.TENSOR))
    return Need(per_element, raw, min(num_elements, BLOCK) if divisible else num_elements)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one row is cut under a budget."""

    elements: int
    """Elements of a tile: a multiple of BLOCK, or the whole of a smaller row."""
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
    slot = budget / SLOTS
    kept = need.resident_per_element * num_elements
    resident = passes > 0 and kept <= slot / 2
    room = slot - kept if resident else slot
    affordable = min(TILE_MOST, int(room / max(need.bytes_per_element, 1e-9))) // BLOCK * BLOCK
    elements = max(1, min(num_elements, max(need.least_elements, affordable)))
    return Tiling(elements, resident, round(need.bytes_per_element * elements + (kept if resident else 0)))


def project(plan: Plan, budget: int) -> Projection:
    """Peak memory of a plan under a budget, and the smallest budget it can be run with."""
    names = plan["tensors"].column("name")
    peak = least = 0
    peak_tensor = least_tensor = 0
    for tensor, num_elements, need, passes in _needs(plan):
        mine = tiling(need, num_elements, budget, passes=passes).peak * SLOTS
        if mine > peak:
            peak, peak_tensor = mine, tensor
        if need.least_bytes * SLOTS > least:
            least, least_tensor = need.least_bytes * SLOTS, tensor
    named = len(names) > 0
    return Projection(
        budget, peak, names[peak_tensor].as_py() if named else "",
        max(least, SMALLEST_BUDGET), names[least_tensor].as_py() if named else "",
    )


def _needs(plan: Plan) -> Iterator[tuple[int, int, Need, int]]:
    """Every distinct need of a plan's rows: tensor, elements, need, passes."""
    expressions = plan.expressions
    dtypes = plan["inputs"].column("dtype").to_pylist()
    rows = plan["rows"]
    wanted = ("tensor", "num_elements", "expression", "is_flat", "num_parts", "first_input", "num_inputs")
    seen: set[tuple[object, ...]] = set()
    for tensor, count, index, is_flat, parts, first, inputs in zip(
        *(rows.column(name).to_pylist() for name in wanted), strict=True
    ):
        key = (count, index, is_flat, parts, tuple(dtypes[first : first + inputs]))
        if key in seen:
            continue
        seen.add(key)
        expression = expressions[index]
        kinds = [DType(name) for name in dtypes[first : first + inputs]]
        need = row_need(expression, kinds, parts, num_elements=count, is_flat=is_flat)
        yield tensor, count, need, expression_passes(expression)


def expression_passes(expression: Expression) -> int:
    """Statistics passes that an expression makes over its inputs before the last one."""
    method = find_method(expression.method)
    if expression.is_copy or method is None:
        return 0
    return method.kernel.passes(expression.bind(keys=(), shape=()))


def _scratch(method: Method | None, num_reads: int) -> float:
    if method is None:
        return 0.0
    return method.scratch + method.scratch_per_source * num_reads
