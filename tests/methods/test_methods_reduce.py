"""Sums and selections: exact where they say so, the same for every way to compute them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import threads

from raymerge.methods import BLOCK
from raymerge.methods import reduce as reduce_module
from raymerge.methods.reduce import PIECE, add_products, add_values, chunks, folded
from raymerge.methods.selection import MagnitudeSelection

CPU = torch.device("cpu")
LENGTHS = [0, 1, 2, PIECE - 1, PIECE, PIECE + 1, BLOCK, BLOCK + 1, 5 * BLOCK + 333]


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


@pytest.mark.parametrize("count", LENGTHS)
def test_sums_are_those_of_exact_arithmetic(count: int) -> None:
    left, right = numbers(count), numbers(count, 1)
    exact = math.fsum(float(x) * float(y) for x, y in zip(left.tolist(), right.tolist(), strict=True))
    assert add_products(0.0, left, right) == pytest.approx(exact, rel=1e-12, abs=1e-10)
    assert add_products(0.0, left, left) == pytest.approx(math.fsum(x * x for x in left.tolist()), rel=1e-13)
    assert add_values(2.0, left) == pytest.approx(2.0 + math.fsum(left.tolist()), rel=1e-12, abs=1e-10)


def test_products_do_not_overflow_or_cancel_in_float32() -> None:
    large = torch.full((1000,), 1e30)
    assert add_products(0.0, large, large) == pytest.approx(1e63, rel=1e-6)
    near = torch.cat([torch.full((PIECE,), 1e8), torch.ones(PIECE), torch.full((PIECE,), -1e8)])
    assert add_values(0.0, near) == PIECE


@settings(deadline=None, max_examples=20)
@given(blocks=st.lists(st.integers(0, 6), max_size=4))
def test_tiles_do_not_change_a_bit_of_a_sum(blocks: list[int]) -> None:
    left, right = numbers(6 * BLOCK + 99), numbers(6 * BLOCK + 99, 1)
    bounds = sorted({0, left.numel(), *(block * BLOCK for block in blocks)})
    total = 0.0
    for begin, end in itertools.pairwise(bounds):
        total = add_products(total, left[begin:end], right[begin:end])
    assert total == add_products(0.0, left, right)


def test_threads_and_chunks_do_not_change_a_bit_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = numbers(9 * BLOCK + 5), numbers(9 * BLOCK + 5, 1)
    with threads(1):
        alone = add_products(0.0, left, right)
    with threads(2):
        assert add_products(0.0, left, right) == alone
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", PIECE)
    assert add_products(0.0, left, right) == alone


def test_inputs_of_a_sum_are_left_as_they_are() -> None:
    left, right = numbers(3 * PIECE), numbers(3 * PIECE, 1)
    before = left.clone(), right.clone()
    add_products(0.0, left, right)
    add_products(0.0, left, left)
    add_values(0.0, right)
    assert torch.equal(left, before[0])
    assert torch.equal(right, before[1])


def select(values: torch.Tensor, rank: int, *, cut: int | None = None) -> MagnitudeSelection:
    selection = MagnitudeSelection(rank, CPU, with_sums=True)
    for pass_index in range(selection.passes):
        for begin in range(0, values.numel(), cut or max(1, values.numel())):
            selection.observe(values[begin : begin + (cut or values.numel())], pass_index)
        selection.conclude(pass_index)
    return selection


def expected_threshold(values: torch.Tensor, rank: int) -> float:
    return float(np.sort(np.abs(values.numpy()))[-rank])


float32s = st.floats(width=32, allow_nan=False)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), values=st.lists(float32s, min_size=1, max_size=40))
def test_selection_is_exact_on_any_floats(data: st.DataObject, values: list[float]) -> None:
    """Zeros, denormals and infinity included."""
    tensor = torch.tensor(values, dtype=torch.float32)
    rank = data.draw(st.integers(1, len(values)))
    assert select(tensor, rank).threshold == expected_threshold(tensor, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("density", [0.00001, 0.2, 0.5, 0.999])
def test_selection_is_exact_on_deltas(dtype: torch.dtype, density: float) -> None:
    values = (numbers(3 * BLOCK + 17) * 0.01).to(dtype).float()
    rank = max(1, int(density * values.numel()))
    selection = select(values, rank, cut=BLOCK)
    assert selection.threshold == expected_threshold(values, rank)
    magnitudes = values.double().abs()
    above = int((magnitudes > selection.threshold).sum())
    tied = int((magnitudes == selection.threshold).sum())
    assert above < rank <= above + tied
    assert selection.tied_share == (rank - above) / tied
    assert selection.sum_all == pytest.approx(float(values.double().abs().sum()), rel=1e-12)
    largest = magnitudes.sort(descending=True).values[:rank]
    assert selection.sum_kept == pytest.approx(float(largest.sum()), rel=1e-12)


def test_tiles_and_threads_do_not_change_a_selection() -> None:
    values = numbers(6 * BLOCK + 1)
    whole = select(values, 1000)
    for cut in (BLOCK, 2 * BLOCK, 5 * BLOCK):
        with threads(2):
            tiled = select(values, 1000, cut=cut)
        assert (tiled.threshold, tiled.sum_all, tiled.sum_kept) == (
            whole.threshold,
            whole.sum_all,
            whole.sum_kept,
        )


def test_a_rank_of_zero_keeps_nothing_finite() -> None:
    selection = select(numbers(10), 0)
    assert selection.threshold == math.inf
    assert selection.sum_kept == 0.0


def test_of_equal_values_the_wanted_share_is_told() -> None:
    selection = select(torch.full((100,), -0.25), 3)
    assert selection.threshold == 0.25
    assert selection.tied_share == 0.03
    assert (selection.sum_kept, selection.sum_all) == (0.75, 25.0)


def test_nan_is_among_the_largest() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    assert math.isnan(select(values, 1).threshold)
    assert select(values, 2).threshold == 3.0


def test_selection_leaves_its_input_as_it_is() -> None:
    values = numbers(1000)
    before = values.clone()
    select(values, 10)
    assert torch.equal(values, before)
