"""Inner products along rows and columns: right, and the same for every tiling and number of threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.method_kit import FEW_BYTES

from raymerge.methods.kernel import BLOCK, ROW_GROUP
from raymerge.methods.reduce import (
    PIECE,
    add_column_pairs,
    add_products_in_torch,
    row_batches,
    row_grams,
    row_grams_in_torch,
)

CPU = torch.device("cpu")
OfRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]
SHAPES = [(77, 1501), (3, 40_000), (1, 3 * PIECE), (40, 1), (5, 7), (16, 64), (33, 5000), (1, 1)]


def pair(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def stacked(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.stack([left.flatten(), right.flatten()])


def rows_of(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Inner products of left and left, left and right, right and right for each row."""
    return row_grams(stacked(left, right), None, left.shape[1])


def columns_of(left: torch.Tensor, right: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """The same for each column of matrices cut before these rows."""
    num_rows, row_length = left.shape
    totals = torch.zeros(3, row_length, dtype=torch.float64)
    for begin, end in itertools.pairwise((0, *cuts, num_rows)):
        add_column_pairs(totals, stacked(left[begin:end], right[begin:end]), None)
    return totals


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    rows, columns = rows_of(left, right), columns_of(left, right)
    assert rows.dtype is columns.dtype is torch.float64
    for index, (one, other) in enumerate(((left, left), (left, right), (right, right))):
        products = one.double().numpy() * other.double().numpy()
        exact_rows = [math.fsum(row) for row in products]
        exact_columns = [math.fsum(column) for column in products.T]
        np.testing.assert_allclose(rows[index].numpy(), exact_rows, rtol=1e-13, atol=1e-12)
        np.testing.assert_allclose(columns[index].numpy(), exact_columns, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_origin_is_subtracted_in_float32(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    origin = 0.5 * right + 0.1
    apart = stacked(left - origin, right - origin)
    vectors, flat_origin = stacked(left, right), origin.flatten()
    assert torch.equal(row_grams(vectors, flat_origin, shape[1]), row_grams(apart, None, shape[1]))
    found, expected = (torch.zeros(3, shape[1], dtype=torch.float64) for _ in range(2))
    add_column_pairs(found, vectors, flat_origin)
    add_column_pairs(expected, apart, None)
    assert torch.equal(found, expected)


def test_by_hand() -> None:
    left, right = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1.0, 1, 2], [0.5, 0, -1]])
    assert rows_of(left, right).tolist() == [[14.0, 77.0], [9.0, -4.0], [6.0, 1.25]]
    assert columns_of(left, right).tolist() == [[17.0, 29.0, 45.0], [3.0, 2.0, 0.0], [1.25, 1.0, 5.0]]


@pytest.mark.parametrize("shape", [(0, 5), (0, 1)])
def test_nothing_sums_to_nothing(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    assert rows_of(left, right).shape == (3, 0)
    assert columns_of(left, right).tolist() == [[0.0] * shape[1]] * 3


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    alone = [rows_of(a[None], b[None]) for a, b in zip(left, right, strict=True)]
    assert torch.equal(torch.cat(alone, dim=1), rows_of(left, right))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_summed_as_a_vector(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    found = rows_of(left, right)[1].tolist()
    assert found == [add_products_in_torch(0.0, a, b) for a, b in zip(left, right, strict=True)]


@settings(deadline=None, max_examples=20)
@given(
    num_rows=st.integers(1, 200),
    row_length=st.integers(1, 1200),
    groups=st.sets(st.integers(1, 12), max_size=4),
)
def test_columns_do_not_depend_on_the_tiling(num_rows: int, row_length: int, groups: set[int]) -> None:
    left, right = pair((num_rows, row_length))
    cuts = tuple(ROW_GROUP * group for group in sorted(groups) if ROW_GROUP * group < num_rows)
    assert torch.equal(columns_of(left, right, cuts), columns_of(left, right))


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    left, right = pair((20, 30))
    left[3, 4] = math.nan
    right[3, 4] = 0.0
    bad_rows = rows_of(left, right)[1].isfinite().logical_not()
    bad_columns = columns_of(left, right)[1].isfinite().logical_not()
    assert bad_rows.nonzero().tolist() == [[3]]
    assert bad_columns.nonzero().tolist() == [[4]]


@pytest.mark.parametrize("shape", [(1, 3 * BLOCK), (144, 4096), (3 * BLOCK, 1)])
@pytest.mark.parametrize("of_rows", [row_grams, row_grams_in_torch])
def test_temporaries_take_a_tile(shape: tuple[int, int], of_rows: OfRows) -> None:
    left, right = pair(shape)
    vectors, nbytes = stacked(left, right), max(left.nbytes, 4 * BLOCK)
    with AllocationMeter() as rows:
        sums = of_rows(vectors, None, shape[1])
    assert rows.peak_bytes <= nbytes + sums.nbytes + FEW_BYTES
    totals = torch.zeros(3, shape[1], dtype=torch.float64)
    with AllocationMeter() as columns:
        add_column_pairs(totals, vectors, None)
    assert columns.peak_bytes <= nbytes + FEW_BYTES


@settings(deadline=None, max_examples=50)
@given(num_rows=st.integers(0, 5000), row_length=st.integers(1, 50_000))
def test_batches_cover_all_rows_in_order(num_rows: int, row_length: int) -> None:
    batches = list(row_batches(num_rows, row_length, num_rows * row_length, CPU))
    assert [row for batch in batches for row in range(num_rows)[batch]] == list(range(num_rows))
    assert all(batch.stop > batch.start for batch in batches)
