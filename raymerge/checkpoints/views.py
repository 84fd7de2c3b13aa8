"""Where the logical matrices lie inside a stored tensor, as offsets and strides counted in elements.

Experts are published separately, stacked ``[E, 2F, d]``, transposed, interleaved or flattened; a view
locates one projection of one expert, so that arithmetic is always on ``[out, in]`` matrices. E: experts, P:
projections stored together, F: rows of one projection, d: its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

FusedKind = Literal["out_in", "out_in_interleaved", "in_out", "in_out_interleaved", "rows", "rows_transposed"]
"""``out_in`` [E, P*F, d]; ``in_out`` [E, d, P*F]; ``out_in_interleaved`` and ``in_out_interleaved`` the same
with projections alternating by row or column; ``rows`` [E*F, d]; ``rows_transposed`` [E*F, d] whose logical
matrix is [d, F]. All but the last two also hold biases [E, P*F]."""


@dataclass(frozen=True, slots=True)
class View:
    offset: int
    """Index of the first element in the stored tensor's row-major order."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Stored elements between neighbours along each logical dimension."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def columns(self) -> int:
        """Row length of the stored matrix, whether stored as it is or transposed."""
        return self.strides[-1] if self.strides[-1] > 1 else self.shape[-1]

    @property
    def has_whole_rows(self) -> bool:
        """Whether it consists of whole rows of a stored matrix with as many columns."""
        if len(self.shape) != 2 or self.strides[1] != 1:
            return False
        columns = self.shape[1]
        return columns > 0 and not self.offset % columns and not self.strides[0] % columns

    @property
    def is_flat(self) -> bool:
        """Whether its elements are one contiguous run in row-major order."""
        if self.num_elements == 0:
            return True
        expected = row_major(self.shape)
        return all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, self.strides, expected, strict=True)
        )


class Block(NamedTuple):
    """A contiguous run of a stored tensor that holds whole logical tensors only."""

    start: int
    num_elements: int
    members: tuple[int, ...]
    """Indices into ``fused_views``."""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def whole_view(shape: tuple[int, ...]) -> View:
    return View(0, shape, row_major(shape))


def fused_views(
    kind: FusedKind, shape: tuple[int, ...], num_projections: int, num_experts: int
) -> tuple[View, ...]:
    """The views of a fused tensor, by expert, then by projection. Raises ValueError: the shape cannot be of
    this kind with so many experts and projections."""
    if kind == "rows" or kind == "rows_transposed":
        return _row_views(kind, shape, num_projections, num_experts)
    _check_stack(kind, shape, num_projections, num_experts)
    return tuple(
        _stack_view(kind, shape, num_projections, (expert, projection))
        for expert in range(num_experts)
        for projection in range(num_projections)
    )


def blocks(
    kind: FusedKind, shape: tuple[int, ...], num_projections: int, num_experts: int
) -> tuple[Block, ...]:
    """The smallest contiguous runs of complete logical tensors, in stored order.

    One per projection where projections are contiguous, else one per expert. Raises as ``fused_views``."""
    views = fused_views(kind, shape, num_projections, num_experts)
    is_split = kind == "out_in" or (kind == "in_out" and len(shape) == 2)
    group = 1 if is_split else num_projections
    size = prod(shape) * group // len(views)
    return tuple(
        Block(index * size, size, tuple(range(index * group, (index + 1) * group)))
        for index in range(len(views) // group)
    )


def _row_views(
    kind: FusedKind, shape: tuple[int, ...], num_projections: int, num_experts: int
) -> tuple[View, ...]:
    if len(shape) != 2 or num_projections != 1 or num_experts < 1 or shape[0] % num_experts:
        raise ValueError(
            f"a tensor of kind {kind} is [experts * rows, columns] with one projection, "
            f"not {list(shape)} with {num_experts} experts and {num_projections} projections"
        )
    rows, columns = shape[0] // num_experts, shape[1]
    flipped = kind == "rows_transposed"
    logical = (columns, rows) if flipped else (rows, columns)
    strides = (1, columns) if flipped else (columns, 1)
    return tuple(View(expert * rows * columns, logical, strides) for expert in range(num_experts))


def _check_stack(kind: FusedKind, shape: tuple[int, ...], num_projections: int, num_experts: int) -> None:
    fits = len(shape) in (2, 3) and num_projections >= 1 and num_experts >= 1 and shape[0] == num_experts
    joined = 1 if kind in ("out_in", "out_in_interleaved") and len(shape) == 3 else -1
    if not fits or shape[joined] % num_projections:
        raise ValueError(
            f"a tensor of kind {kind} with {num_experts} experts and {num_projections} projections "
            f"cannot have the shape {list(shape)}"
        )


def _stack_view(
    kind: FusedKind, shape: tuple[int, ...], num_projections: int, place: tuple[int, int]
) -> View:
    expert, projection = place
    start = expert * prod(shape[1:])
    step = num_projections if kind in ("in_out_interleaved", "out_in_interleaved") else 1
    if len(shape) == 2:
        size = shape[1] // num_projections
        return View(start + projection * (1 if step > 1 else size), (size,), (step,))
    if kind in ("out_in", "out_in_interleaved"):
        rows, columns = shape[1] // num_projections, shape[2]
        first = projection * (1 if step > 1 else rows) * columns
        return View(start + first, (rows, columns), (step * columns, 1))
    inputs, outputs = shape[1], shape[2] // num_projections
    first = projection if step > 1 else projection * outputs
    return View(start + first, (outputs, inputs), (step, shape[2]))
