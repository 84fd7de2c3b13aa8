"""Where the logical matrices lie inside a stored tensor, as offsets and strides counted in elements.

Experts are published separately, stacked ``[E, 2F, d]``, transposed, interleaved or flattened; a view
locates one projection of one expert, so that arithmetic is always on ``[out, in]`` matrices. E: experts, P:
projections stored together, F: rows of one projection, d: its columns."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Row length of the stored matrix, whether stored as it is or transposed, or with columns more."""
        if self.strides[-1] > 1:
            return self.strides[-1]
        is_padded = len(self.shape) == 2 and self.shape[1] > 0 and self.strides[0] % self.shape[1]
        return self.strides[0] if is_padded else self.shape[-1]

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
    one = _shape_of_one(kind, shape, num_projections, num_experts)
    # First the axis that projections share, which is that of the rows of a logical matrix.
    lengths, strides = one, row_major(one)
    if kind in ("in_out", "in_out_interleaved", "rows_transposed"):
        lengths, strides = lengths[::-1], strides[::-1]
    if not one or lengths[0] % num_projections:
        raise ValueError(
            f"a tensor of kind {kind} with {num_experts} experts and {num_projections} projections "
            f"cannot have the shape {list(shape)}"
        )
    rows = lengths[0] // num_projections
    step, gap = (num_projections, 1) if kind.endswith("interleaved") else (1, rows)
    return tuple(
        View(
            expert * prod(one) + projection * gap * strides[0],
            (rows, *lengths[1:]),
            (step * strides[0], *strides[1:]),
        )
        for expert in range(num_experts)
        for projection in range(num_projections)
    )


def concatenated_views(
    shape: tuple[int, ...], heights: Sequence[int]
) -> tuple[tuple[View, ...], tuple[Block, ...]]:
    """The views of tensors that lie one below the other, of so many rows each, and their runs."""
    shapes = [(height, *shape[1:]) for height in heights]
    sizes = [prod(each) for each in shapes]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    views = (View(start, each, row_major(each)) for start, each in zip(starts, shapes, strict=True))
    runs = (Block(start, size, (i,)) for i, (start, size) in enumerate(zip(starts, sizes, strict=True)))
    return tuple(views), tuple(runs)


def _shape_of_one(
    kind: FusedKind, shape: tuple[int, ...], num_projections: int, num_experts: int
) -> tuple[int, ...]:
    """What an expert has of a fused tensor; () where that is none of so many experts and projections."""
    if num_experts < 1 or num_projections < 1:
        return ()
    if kind.startswith("rows"):
        fits = len(shape) == 2 and num_projections == 1 and not shape[0] % num_experts
        return (shape[0] // num_experts, *shape[1:]) if fits else ()
    return shape[1:] if len(shape) in (2, 3) and shape[0] == num_experts else ()


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
