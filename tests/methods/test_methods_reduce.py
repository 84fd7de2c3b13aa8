"""Sums: exact where they say so, the same for every way to compute them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import threads

from raymerge.methods import BLOCK
from raymerge.methods import reduce as reduce_module
from raymerge.methods.reduce import (
    LANES,
    PIECE,
    RUN,
    add_pair,
    add_products_in_torch,
    add_squares,
    add_values,
    chunks,
    elements,
    flat,
    folded,
)

CPU = torch.device("cpu")
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


@settings(deadline=None, max_examples=20)
@given(blocks=st.lists(st.integers(0, 6), max_size=4))
def test_tiles_do_not_change_a_bit_of_a_sum(blocks: list[int]) -> None:
    left, right = numbers(6 * BLOCK + 99), numbers(6 * BLOCK + 99, 1)
    bounds = sorted({0, left.numel(), *(block * BLOCK for block in blocks)})
    total = 0.0
    for begin, end in itertools.pairwise(bounds):
        total = products(total, left[begin:end], right[begin:end])
    assert total == products(0.0, left, right)


def test_threads_and_chunks_do_not_change_a_bit_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = numbers(9 * BLOCK + 5), numbers(9 * BLOCK + 5, 1)
    with threads(1):
        alone = products(0.0, left, right)
    with threads(2):
        assert products(0.0, left, right) == alone
        assert add_products_in_torch(0.0, left, right) == alone
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", PIECE)
    assert add_products_in_torch(0.0, left, right) == alone


def test_a_matrix_is_seen_as_one_run_of_memory() -> None:
    matrix = numbers(40).view(4, 10)
    assert flat(matrix).tolist() == matrix.flatten().tolist()
    part = flat(matrix[1:, 2:5])
    assert part.tolist() == matrix.flatten()[12:35].tolist()
    matrix[1, 2] = 7.0
    assert part[0] == 7.0
    assert flat(matrix[:, :0]).size == flat(matrix[:0]).size == flat(matrix[:0, :3]).size == 0
    assert elements(matrix[0]).tolist() == matrix[0].tolist()
    assert elements(None).size == 0
