"""Sums over tensors, rows and columns: exact where they say so, the same for every way to compute them."""

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
from kits.method_kit import FEW_BYTES, threads

from raymerge.methods import BLOCK, ROW_GROUP
from raymerge.methods import reduce as reduce_module
from raymerge.methods.reduce import (
    LANES,
    PIECE,
    RUN,
    add_column_pairs,
    add_pair,
    add_products_in_torch,
    add_squares,
    add_values,
    chunks,
    folded,
    row_batches,
    row_grams,
    row_grams_in_torch,
)

CPU = torch.device("cpu")
OfRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]
RUNS = range(0, PIECE, RUN)
LENGTHS = [0, 1, 2, PIECE - 1, PIECE, PIECE + 1, BLOCK, BLOCK + 1, 5 * BLOCK + 333]


def products(total: float, left: torch.Tensor, right: torch.Tensor) -> float:
    """``total`` plus the products of both, of the three sums that are made together."""
    totals = np.array([0.0, total, 0.0])
    add_pair(totals, left, right)
    return float(totals[1])


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", LENGTHS)
def test_chunks_cover_everything_once_in_whole_pieces(count: int) -> None:
    runs = list(chunks(count, CPU))
    assert [index for run in runs for index in range(run.start, run.stop)] == list(range(count))
    assert all(run.start % PIECE == 0 for run in runs)
    assert all(16 * (run.stop - run.start) <= 4 * max(count, BLOCK) for run in runs)


def _halved(values: list[float]) -> float:
    """By the definition: the upper half is added to the lower one, the middle of an odd number stays."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [x + y for x, y in itertools.zip_longest(values[:half], values[half:], fillvalue=0.0)]
    return values[0]


@settings(deadline=None, max_examples=30)
@given(width=st.integers(1, 300), others=st.integers(0, 4), dim=st.integers(0, 1))
def test_folding_is_by_halves_along_either_dimension(width: int, others: int, dim: int) -> None:
    values = numbers(width * others).double().view(others, width)
    expected = [_halved(row) for row in values.tolist()]
    turned = values.t().contiguous() if dim == 0 else values
    assert folded(turned, dim=dim).tolist() == expected


def _by_definition(values: list[float]) -> float:
    """Runs of 16 rows, folded to 16 lanes; then runs, then lanes; pieces one after the other."""
    total = 0.0
    for begin in range(0, len(values), PIECE):
        piece = values[begin : begin + PIECE]
        piece += [0.0] * (PIECE - len(piece))
        runs = [[_halved(piece[at + lane : at + RUN : LANES]) for lane in range(LANES)] for at in RUNS]
        total += _halved([_halved(list(lane)) for lane in zip(*runs, strict=True)])
    return total


@pytest.mark.parametrize("count", [1, 17, 300, 5 * RUN, PIECE - 1, 2 * PIECE + 333])
def test_the_order_is_that_of_the_definition(count: int) -> None:
    left, right = numbers(count), numbers(count, 1)
    assert add_values(0.0, left) == _by_definition(left.tolist())
    expected = (left.double() * right.double()).tolist()
    assert products(0.0, left, right) == _by_definition(expected)
    assert add_squares(0.0, left) == _by_definition((left.double() * left.double()).tolist())


def test_products_do_not_overflow_or_cancel_in_float32() -> None:
    large = torch.full((1000,), 1e30)
    assert add_squares(0.0, large) == pytest.approx(1e63, rel=1e-6)
    near = torch.cat([torch.full((PIECE,), 1e8), torch.ones(PIECE), torch.full((PIECE,), -1e8)])
    assert add_values(0.0, near) == PIECE


def test_threads_and_chunks_do_not_change_a_bit_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = numbers(9 * BLOCK + 5), numbers(9 * BLOCK + 5, 1)
    with threads(1):
        alone = products(0.0, left, right)
    with threads(2):
        assert products(0.0, left, right) == alone
        assert add_products_in_torch(0.0, left, right) == alone
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", PIECE)
    assert add_products_in_torch(0.0, left, right) == alone


# Rows and columns --------------------------------------------------------------------------------------

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
