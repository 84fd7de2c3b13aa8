"""Views against tensors that are built by the published formula of each layout, with torch as the judge."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.checkpoints.views import FusedKind, View, blocks, fused_views, whole_view

KINDS: tuple[FusedKind, ...] = ("out_in", "in_out", "in_out_interleaved", "rows", "rows_transposed")
STACKED = KINDS[:3]


class Sizes(NamedTuple):
    experts: int
    projections: int
    rows: int
    columns: int


SIZES = st.builds(Sizes, st.integers(1, 4), st.integers(1, 2), st.integers(1, 5), st.integers(1, 5))


def logical_tensors(sizes: Sizes, *, bias: bool = False) -> list[list[torch.Tensor]]:
    """Distinct numbers everywhere: [expert][projection] -> [F, d], or [F] for biases."""
    shape = (sizes.rows,) if bias else (sizes.rows, sizes.columns)
    numbers = torch.arange(sizes.experts * sizes.projections * prod(shape)).reshape(
        sizes.experts, sizes.projections, *shape
    )
    return [[numbers[e, p].clone() for p in range(sizes.projections)] for e in range(sizes.experts)]


def stored(kind: FusedKind, logical: list[list[torch.Tensor]]) -> torch.Tensor:
    """The fused tensor as its publisher would make it from the matrices."""
    match kind:
        case "out_in":
            return torch.stack([torch.cat(each, dim=0) for each in logical])
        case "in_out":
            return torch.stack(
                [torch.cat([m.mT if m.ndim == 2 else m for m in each], dim=-1) for each in logical]
            )
        case "in_out_interleaved":
            return torch.stack(
                [
                    torch.stack([m.mT if m.ndim == 2 else m for m in each], dim=-1).flatten(-2)
                    for each in logical
                ]
            )
        case "rows":
            return torch.cat([each[0] for each in logical])
        case "rows_transposed":
            return torch.cat([each[0].mT for each in logical])


def gather(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(tensor.contiguous(), view.shape, view.strides, view.offset)


def check(kind: FusedKind, logical: list[list[torch.Tensor]], sizes: Sizes) -> None:
    whole = stored(kind, logical).contiguous()
    shape = tuple(whole.shape)
    views = fused_views(kind, shape, sizes.projections, sizes.experts)
    flat = [matrix for each in logical for matrix in each]
    assert len(views) == len(flat)
    for view, matrix in zip(views, flat, strict=True):
        assert torch.equal(gather(whole, view), matrix)
        assert view.num_elements == matrix.numel()
        assert view.is_flat == gather(whole, view).is_contiguous()
    # Both ways: scattering the matrices into an empty tensor gives the stored one again.
    empty = torch.full(shape, -1, dtype=whole.dtype)
    for view, matrix in zip(views, flat, strict=True):
        torch.as_strided(empty, view.shape, view.strides, view.offset).copy_(matrix)
    assert torch.equal(empty, whole)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", STACKED)
@settings(deadline=None, max_examples=40)
@given(sizes=SIZES)
def test_stacked_matrices_and_biases_both_ways(kind: FusedKind, bias: bool, sizes: Sizes) -> None:
    check(kind, logical_tensors(sizes, bias=bias), sizes)


@pytest.mark.parametrize("kind", ["rows", "rows_transposed"])
@settings(deadline=None, max_examples=40)
@given(sizes=SIZES)
def test_flattened_rows_both_ways(kind: FusedKind, sizes: Sizes) -> None:
    one = sizes._replace(projections=1)
    check(kind, logical_tensors(one), one)


def fused_shape(kind: FusedKind, sizes: Sizes) -> tuple[int, ...]:
    return tuple(stored(kind, logical_tensors(sizes)).shape)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(sizes=SIZES)
def test_blocks_partition_the_tensor_into_complete_logical_tensors(kind: FusedKind, sizes: Sizes) -> None:
    if kind not in STACKED:
        sizes = sizes._replace(projections=1)
    shape = fused_shape(kind, sizes)
    views = fused_views(kind, shape, sizes.projections, sizes.experts)
    position, members = 0, list[int]()
    for start, num_elements, inside in blocks(kind, shape, sizes.projections, sizes.experts):
        assert start == position
        held = {index for member in inside for index in elements(views[member])}
        assert held == set(range(start, start + num_elements))
        position += num_elements
        members += inside
    assert position == prod(shape)
    assert members == list(range(len(views)))


def elements(view: View) -> set[int]:
    size = 1 + view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    return set(gather(torch.arange(size), view).flatten().tolist())


@pytest.mark.parametrize(
    ("kind", "shape", "projections", "num_blocks"),
    [
        ("out_in", (3, 8, 5), 2, 6),
        ("out_in", (3, 8), 2, 6),
        ("in_out", (3, 5, 8), 2, 3),
        ("in_out", (3, 8), 2, 6),
        ("in_out_interleaved", (3, 5, 8), 2, 3),
        ("in_out_interleaved", (3, 8), 2, 3),
        ("rows", (12, 5), 1, 3),
        ("rows_transposed", (12, 5), 1, 3),
    ],
)
def test_blocks_are_the_smallest(
    kind: FusedKind, shape: tuple[int, ...], projections: int, num_blocks: int
) -> None:
    found = blocks(kind, shape, projections, 3)
    assert len(found) == num_blocks
    assert {block.num_elements for block in found} == {prod(shape) // num_blocks}


def test_whole_view_is_flat() -> None:
    assert whole_view((2, 3, 4)) == View(0, (2, 3, 4), (12, 4, 1))
    assert whole_view((2, 3, 4)).is_flat
    assert whole_view(()) == View(0, (), ())
    assert whole_view(()).num_elements == 1
    assert whole_view((0, 4)).is_flat


def test_flatness_looks_past_dimensions_of_one() -> None:
    assert View(7, (1, 5), (99, 1)).is_flat
    assert not View(7, (5, 2), (1, 5)).is_flat
    assert View(7, (0, 2), (1, 5)).is_flat


@pytest.mark.parametrize(
    ("kind", "shape", "projections", "experts"),
    [
        ("out_in", (4, 7, 3), 2, 4),
        ("in_out_interleaved", (4, 7), 2, 4),
        ("out_in", (4,), 1, 4),
        ("rows", (10, 3), 1, 4),
        ("rows", (8, 3), 2, 4),
        ("rows_transposed", (2, 8, 3), 1, 2),
        ("out_in", (0, 6, 3), 2, 0),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    kind: FusedKind, shape: tuple[int, ...], projections: int, experts: int
) -> None:
    with pytest.raises(ValueError, match=kind):
        fused_views(kind, shape, projections, experts)
    with pytest.raises(ValueError, match="experts"):
        blocks(kind, shape, projections, experts)
