"""The memory contract: what a worker needs for every row of a plan, and how large its tiles may be.

A worker keeps ``SLOTS`` segments in flight, each with the tile that is computed, the next one's bytes already
read and the previous one's bytes still being written. All of it is counted here, per element of a tile.
Where a segment goes from one row to the next, it overlaps them only as far as both fit into its slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raymerge.dtypes import DType
from raymerge.methods import BLOCK, Access, find_method
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

    def tile_bytes(self, num_elements: int) -> int:
        """Bytes that live while a tile of so many elements is made."""
        short = max(0, BLOCK - num_elements)
        varying = self.bytes_per_element * num_elements + self.scratch_per_element * short
        return math.ceil(varying) + self.fixed_bytes

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


def row_need(
    expression: Expression,
    reads: Sequence[tuple[DType, int]],
    num_parts: int,
    *,
    num_elements: int,
    is_flat: bool,
) -> Need:
    """Memory of one row.

    Args:
        expression: what is computed.
        reads: stored dtype and bytes of each read, of all parts.
        num_parts: logical tensors in the row.
        num_elements: elements of the row.
        is_flat: whether tiles may be cut; otherwise the row is made at once.
    """
    raw = sum(nbytes for _, nbytes in reads) / max(1, num_elements)
    out = expression.cast.bits / 8
    method = find_method(expression.method)
    if expression.is_copy or method is None:
        # The tile in hand, the next one being read, the one before being written.
        return Need(3 * raw, 0, 0, raw, min(num_elements, BLOCK))
    inputs = len(reads) // num_parts
    scratch = 4 * (method.scratch + method.scratch_per_source * inputs)
    # A view is gathered in its stored dtype before it is widened.
    gathered = 0.0 if is_flat else max(dtype.bits / 8 for dtype, _ in reads)
    # Raw bytes of two tiles (one read ahead), float32 inputs, the result and its place in the row, and the
    # encoded bytes of two tiles (one on its way out).
    per_element = 2 * raw + gathered + 4 * inputs + scratch + 8 + 2 * out
    divisible = is_flat and method.access in (Access.ELEMENT, Access.TENSOR)
    return Need(
        per_element,
        scratch,
        method.state_bytes * len(reads),
        raw,
        min(num_elements, BLOCK) if divisible else num_elements,
    )


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
    slot = budget / SLOTS - need.fixed_bytes
    kept = math.ceil(need.resident_per_element * num_elements)
    resident = passes > 0 and kept <= slot / 2 and need.least_bytes + kept <= budget / SLOTS
    room = slot - kept if resident else slot
    affordable = min(TILE_MOST, int(room / max(need.bytes_per_element, 1e-9))) // BLOCK * BLOCK
    elements = max(1, min(num_elements, max(need.least_elements, affordable)))
    return Tiling(elements, resident, need.tile_bytes(elements) + (kept if resident else 0))


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
        budget,
        peak,
        names[peak_tensor].as_py() if named else "",
        max(least, SMALLEST_BUDGET),
        names[least_tensor].as_py() if named else "",
    )


def _needs(plan: Plan) -> Iterator[tuple[int, int, Need, int]]:
    """Every distinct need of a plan's rows: tensor, elements, need, passes."""
    expressions = plan.expressions
    inputs = plan["inputs"]
    reads = list(zip(inputs.column("dtype").to_pylist(), inputs.column("nbytes").to_pylist(), strict=True))
    rows = plan["rows"]
    wanted = ("tensor", "num_elements", "expression", "is_flat", "num_parts", "first_input", "num_inputs")
    seen: set[tuple[object, ...]] = set()
    for tensor, count, index, is_flat, parts, first, num_inputs in zip(
        *(rows.column(name).to_pylist() for name in wanted), strict=True
    ):
        own = tuple(reads[first : first + num_inputs])
        key = (count, index, is_flat, parts, own)
        if key in seen:
            continue
        seen.add(key)
        kinds = [(DType(dtype), nbytes) for dtype, nbytes in own]
        need = row_need(expressions[index], kinds, parts, num_elements=count, is_flat=is_flat)
        yield tensor, count, need, expression_passes(expressions[index])


def expression_passes(expression: Expression) -> int:
    """Statistics passes that an expression makes over its inputs before the last one."""
    method = find_method(expression.method)
    if expression.is_copy or method is None:
        return 0
    return method.kernel.passes(expression.bind(keys=(), shape=()))
