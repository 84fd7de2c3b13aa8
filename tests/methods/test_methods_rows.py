"""Inner products along rows and columns: right, and the same for every tiling and number of threads."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import FEW_BYTES, MemoryMeter, threads

from raymerge.methods.method import BLOCK, ROW_GROUP
from raymerge.methods.reduce import PIECE
from raymerge.methods.rows import column_products, row_batches, row_products

CPU = torch.device("cpu")
SHAPES = [(77, 1501), (3, 40_000), (1, 3 * PIECE), (40, 1), (5, 7), (16, 64), (33, 5000), (1, 1)]


def pair(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def columns_of(left: torch.Tensor, right: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """Sums of a matrix cut before these rows."""
    num_rows, row_length = left.shape
    total = torch.zeros(row_length, dtype=torch.float64)
    for begin, end in itertools.pairwise((0, *cuts, num_rows)):
        column_products(total, left[begin:end].flatten(), right[begin:end].flatten(), row_length)
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    products = left.double().numpy() * right.double().numpy()
    rows = row_products(left.flatten(), right.flatten(), shape[1])
    columns = columns_of(left, right)
    assert rows.dtype is columns.dtype is torch.float64
    exact_rows = [math.fsum(row) for row in products]
    exact_columns = [math.fsum(column) for column in products.T]
    np.testing.assert_allclose(rows.numpy(), exact_rows, rtol=1e-13, atol=1e-12)
    np.testing.assert_allclose(columns.numpy(), exact_columns, rtol=1e-13, atol=1e-12)


def test_by_hand() -> None:
    left, right = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1.0, 1, 2], [0.5, 0, -1]])
    assert row_products(left.flatten(), right.flatten(), 3).tolist() == [9.0, -4.0]
    assert columns_of(left, right).tolist() == [3.0, 2.0, 0.0]


def test_columns_are_added_to_what_is_there() -> None:
    total = torch.tensor([10.0, 20.0], dtype=torch.float64)
    column_products(total, torch.ones(6), torch.full((6,), 2.0), 2)
    assert total.tolist() == [16.0, 26.0]


@pytest.mark.parametrize("shape", [(0, 5), (0, 1)])
def test_nothing_sums_to_nothing(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    assert row_products(left.flatten(), right.flatten(), shape[1]).shape == (0,)
    assert columns_of(left, right).tolist() == [0.0] * shape[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    whole = row_products(left.flatten(), right.flatten(), shape[1])
    alone = [row_products(a, b, shape[1]) for a, b in zip(left, right, strict=True)]
    assert torch.equal(torch.cat(alone), whole)


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


def test_threads_do_not_change_a_bit() -> None:
    left, right = pair((70, 20_000))
    results = []
    for count in (1, 2):
        with threads(count):
            results.append((row_products(left.flatten(), right.flatten(), 20_000), columns_of(left, right)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    left, right = pair((20, 30))
    left[3, 4] = math.nan
    right[3, 4] = 0.0
    bad_rows = row_products(left.flatten(), right.flatten(), 30).isfinite().logical_not()
    bad_columns = columns_of(left, right).isfinite().logical_not()
    assert bad_rows.nonzero().tolist() == [[3]]
    assert bad_columns.nonzero().tolist() == [[4]]


@pytest.mark.parametrize("shape", [(1, 9 * BLOCK), (9, BLOCK), (144, 4096), (4096, 144), (9 * BLOCK, 1)])
def test_temporaries_take_a_tile(shape: tuple[int, int]) -> None:
    left, right = pair(shape)
    flat_left, flat_right = left.flatten(), right.flatten()
    with MemoryMeter() as rows:
        sums = row_products(flat_left, flat_right, shape[1])
    assert rows.peak_bytes <= 4 * left.numel() + sums.nbytes + FEW_BYTES
    total = torch.zeros(shape[1], dtype=torch.float64)
    with MemoryMeter() as columns:
        column_products(total, flat_left, flat_right, shape[1])
    assert columns.peak_bytes <= 4 * left.numel() + FEW_BYTES


@settings(deadline=None, max_examples=50)
@given(num_rows=st.integers(0, 5000), row_length=st.integers(1, 50_000))
def test_batches_cover_all_rows_in_order(num_rows: int, row_length: int) -> None:
    batches = list(row_batches(num_rows, row_length, num_rows * row_length, CPU))
    assert [row for batch in batches for row in range(num_rows)[batch]] == list(range(num_rows))
    assert all(batch.stop > batch.start for batch in batches)
