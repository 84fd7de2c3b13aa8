"""The rank-th largest magnitude: exact whatever is counted first, and from one pass where a sample helps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.kernels.selection import COUNTED
from raymerge.methods import BLOCK, Tile, sample_of
from raymerge.methods.selection import (
    _MOST_BINS,
    HISTOGRAM_BYTES,
    Bracket,
    MagnitudeSelection,
    Sample,
    _count_compiled,
    count_in_torch,
)

CPU = torch.device("cpu")
LAST = (1 << 31) - 1
float32s = st.floats(width=32)


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def passes_of(selection: MagnitudeSelection, values: torch.Tensor, cut: int | None = None) -> int:
    """Run all passes over the values, and say how many they were."""
    step = cut or max(1, values.numel())
    for num_passes in itertools.count(1):
        for begin in range(0, values.numel(), step):
            selection.observe(values[begin : begin + step])
        if not selection.conclude():
            return num_passes
    raise AssertionError


def select(values: torch.Tensor, rank: int, *, cut: int | None = None) -> MagnitudeSelection:
    selection = MagnitudeSelection(rank, CPU, with_sums=True)
    passes_of(selection, values, cut)
    return selection


def expected_threshold(values: torch.Tensor, rank: int) -> float:
    """By sorting patterns, where NaN is the largest."""
    patterns = np.sort(np.abs(values.numpy()).view(np.int32))
    return float(patterns[-rank : len(patterns) - rank + 1].view(np.float32)[0])


def facts(selection: MagnitudeSelection) -> tuple[str, float]:
    """What it found; as text, in which NaN is equal to itself."""
    return str(selection.threshold), selection.tied_share


# Exactness --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.data(), values=st.lists(float32s, min_size=1, max_size=40))
def test_selection_is_exact_on_any_floats(data: st.DataObject, values: list[float]) -> None:
    """Zeros, denormals, infinity and NaN included."""
    tensor = torch.tensor(values, dtype=torch.float32)
    rank = data.draw(st.integers(1, len(values)))
    threshold, expected = select(tensor, rank).threshold, expected_threshold(tensor, rank)
    assert threshold == expected or (math.isnan(threshold) and math.isnan(expected))


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


def test_a_rank_of_zero_keeps_nothing_finite() -> None:
    selection = select(numbers(10), 0)
    assert selection.threshold == math.inf
    assert selection.sum_kept == 0.0


def test_a_finished_selection_takes_no_notice_of_further_passes() -> None:
    """Another one beside it may need them."""
    values = numbers(1000)
    selection = select(values, 10)
    before = facts(selection), selection.sum_all, selection.sum_kept
    assert passes_of(selection, values * 2) == 1
    assert (facts(selection), selection.sum_all, selection.sum_kept) == before


# Brackets ---------------------------------------------------------------------------------------------


@st.composite
def brackets(draw: st.DrawFn) -> Bracket:
    """Any that holds no more bins than allowed: too low, too high, around the values, of one pattern."""
    shift = draw(st.sampled_from([0, 1, 3, 13, 15]))
    low = draw(st.one_of(st.integers(0, LAST), st.integers(0x3F80_0000 - 300, 0x3F80_0000 + 300)))
    bins = draw(st.integers(1, 400))
    return Bracket(low, min(low + (bins << shift), LAST + 1), shift)


some_values = st.lists(
    st.one_of(float32s, st.sampled_from([1.0, -1.0, 1.00001, 0.0, -0.0, 3.4e38, 1e-45])),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), values=some_values, bracket=brackets())
def test_no_bracket_changes_what_is_found(data: st.DataObject, values: list[float], bracket: Bracket) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    rank = data.draw(st.integers(0, len(values)))
    plain, guided = select(tensor, rank), MagnitudeSelection(rank, CPU, with_sums=True)
    if rank:
        guided.look_within(bracket)
    assert passes_of(guided, tensor) <= 3
    assert facts(guided) == facts(plain)
    for ours, theirs in ((guided.sum_all, plain.sum_all), (guided.sum_kept, plain.sum_kept)):
        assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True)


@settings(deadline=None, max_examples=100)
@given(values=some_values, bracket=brackets(), repeats=st.integers(1, 60))
def test_the_loop_counts_as_torch_does(values: list[float], bracket: Bracket, repeats: int) -> None:
    tensor = torch.tensor(values * repeats, dtype=torch.float32)
    ours, theirs = (torch.zeros(bracket.num_bins, dtype=torch.int64) for _ in range(2))
    told = _count_compiled(tensor, bracket, ours), count_in_torch(tensor, bracket, theirs)
    assert told[0] == told[1]
    assert torch.equal(ours, theirs)


def test_the_whole_range_is_counted_alike() -> None:
    """Its own loop on the CPU."""
    whole = Bracket(0, LAST + 1, 15)
    values = torch.cat([numbers(3000), torch.tensor([math.nan, -math.inf, -0.0])])
    ours, theirs = (torch.zeros(whole.num_bins, dtype=torch.int64) for _ in range(2))
    assert _count_compiled(values, whole, ours) == count_in_torch(values, whole, theirs) == 0
    assert torch.equal(ours, theirs)
    assert int((ours & COUNTED).sum()) == 3003


@pytest.mark.parametrize(("rank", "with_sums", "passes"), [(1, False, 2), (2, False, 1), (2, True, 2)])
def test_a_bin_of_several_magnitudes_costs_a_pass_only_where_they_matter(
    rank: int, with_sums: bool, passes: int
) -> None:
    """Where the wanted one is among them, or their sum is asked for."""
    values = torch.from_numpy(np.array([0x3F80_0011, 0x3F80_0000, 0x3F80_0000], np.int32)).view(torch.float32)
    selection = MagnitudeSelection(rank, CPU, with_sums=with_sums)
    selection.look_within(Bracket(0x3F80_0000, 0x3F80_0080, 4))
    assert passes_of(selection, values) == passes
    plain = select(values, rank)
    assert facts(selection) == facts(plain)
    assert selection.sum_kept == (plain.sum_kept if with_sums else 0.0)


# Samples ----------------------------------------------------------------------------------------------


def sample_from(values: torch.Tensor) -> torch.Tensor:
    return sample_of(Tile(None, values.unsqueeze(0), 0)).sources[0]


def guided_passes(values: torch.Tensor, share: float) -> int:
    """Passes with a sample; what is found is that of a selection without."""
    rank = int(share * values.numel())
    selection = MagnitudeSelection(rank, CPU)
    selection.expect(Sample(sample_from(values)), share)
    num_passes = passes_of(selection, values, 4 * BLOCK)
    assert selection.threshold == expected_threshold(values, rank)
    return num_passes


COUNT = 17 * BLOCK + 5
ROWS = torch.arange(COUNT) // 4096


ALIKE = {
    "float32": numbers(COUNT) * 0.003,
    "bfloat16": (numbers(COUNT) * 0.003).bfloat16().float(),
    "float16": (numbers(COUNT) * 0.003).half().float(),
    "rows far apart": numbers(COUNT).bfloat16().float() * (1 << (ROWS % 6)),
    "zeros": torch.zeros(COUNT),
    "equal": torch.ones(COUNT),
}
UNLIKE = {
    "three kinds of rows": numbers(COUNT) * (1 + ROWS % 3),
    "rows of every size": numbers(COUNT) * torch.exp(3 * numbers(int(ROWS.max()) + 1, seed=3))[ROWS],
    "mostly zeros": torch.where(torch.arange(COUNT) % 50 == 0, numbers(COUNT), 0.0),
}


@pytest.mark.parametrize("share", [0.02, 0.9])
@pytest.mark.parametrize("kind", ALIKE)
def test_a_sample_spares_the_second_pass(kind: str, share: float) -> None:
    assert guided_passes(ALIKE[kind], share) == 1


@pytest.mark.parametrize("share", [0.01, 0.95])
@pytest.mark.parametrize("kind", UNLIKE)
def test_where_rows_differ_the_threshold_is_found_as_well(kind: str, share: float) -> None:
    assert guided_passes(UNLIKE[kind], share) <= 3


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30, math.nan])
def test_a_sample_that_misleads_costs_passes_only(factor: float) -> None:
    """What the sample sees is unlike all the rest."""
    values = numbers(COUNT)
    misled = Sample(sample_from(values * factor))
    rank = COUNT // 3
    selection = MagnitudeSelection(rank, CPU)
    selection.expect(misled, rank / COUNT)
    assert passes_of(selection, values) == 3
    assert selection.threshold == expected_threshold(values, rank)


@settings(deadline=None, max_examples=40)
@given(
    share=st.floats(0.0, 1.0),
    exponent=st.integers(-40, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.floats(0.0, 20.0),
)
def test_a_bracket_keeps_to_its_memory(
    share: float, exponent: int, dtype: torch.dtype, spread: float
) -> None:
    sizes = torch.exp(spread * numbers(256, seed=1)).repeat_interleave(1024)
    sample = (numbers(1 << 18) * sizes * 2.0**exponent).to(dtype).float()
    bracket = Sample(sample).bracket(share)
    assert 0 <= bracket.low < bracket.high <= LAST + 1
    assert 1 <= bracket.num_bins <= HISTOGRAM_BYTES // 8
    assert bracket.shift <= 15


@pytest.mark.parametrize("share", [0.02, 0.3, 0.87])
def test_differences_of_bfloat16_take_few_bins_and_one_pass(share: float) -> None:
    """Fresh memory for many would take longer than counting them."""
    base = numbers(COUNT).bfloat16()
    values = (base + numbers(COUNT, seed=1) * 0.02).bfloat16().float() - base.float()
    assert Sample(sample_from(values)).bracket(share).num_bins <= _MOST_BINS // 2
    assert guided_passes(values, share) == 1
