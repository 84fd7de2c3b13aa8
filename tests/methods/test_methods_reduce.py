"""Sums, products, selections and thresholds that methods share."""

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
from kits.method_kit import (
    CPU,
    FEW_BYTES,
    Case,
    make_settings,
    method_named,
    random_inputs,
    same_bits,
    threads,
)

from raymerge.kernels.selection import COUNTED
from raymerge.methods import (
    BLOCK,
    ROW_GROUP,
    SAMPLE_LENGTH,
    SAMPLE_RUNS,
    Settings,
    Tile,
    Value,
    sample_of,
    sample_runs,
    sampled,
)
from raymerge.methods import reduce as reduce_module
from raymerge.methods.combine import arc_coefficients, combine
from raymerge.methods.gram import Gram
from raymerge.methods.reduce import (
    LANES,
    PIECE,
    RUN,
    PieceSums,
    add_column_pairs,
    row_grams,
    row_grams_in_torch,
)
from raymerge.methods.sce import (
    deviations_in_torch,
    deviations_of,
    merge_selected_in_torch,
    selected_deltas,
    selected_deltas_in_torch,
    selection_by_deviation,
    sum_of,
)
from raymerge.methods.selection import (
    _MOST_BINS,
    HISTOGRAM_BYTES,
    Bracket,
    MagnitudeSelection,
    Sample,
    TorchCounts,
    _count_compiled,
)
from raymerge.methods.task_arithmetic import merge_factors, merge_factors_in_torch
from raymerge.methods.trim import (
    EVERYTHING,
    NOTHING,
    WHOLE,
    SelectedMerge,
    Threshold,
    Trim,
    compiled_thresholds,
    mark_largest_,
    merge_trimmed_in_torch,
    threshold_of,
    tie_key,
    trimmed_merge,
)

OfRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]
RUNS = range(0, PIECE, RUN)


def products(total: float, left: torch.Tensor, right: torch.Tensor) -> float:
    """``total`` plus the products of both, of the three sums that are made together."""
    sums = PieceSums(3)
    sums.totals[1] = total
    sums.add_pair(left, right)
    return float(sums.totals[1])


def values_added(total: float, values: torch.Tensor) -> float:
    sums = PieceSums(1)
    sums.totals[0] = total
    sums.add_values(0, values)
    return float(sums.totals[0])


def squares_added(total: float, values: torch.Tensor) -> float:
    sums = PieceSums(1)
    sums.totals[0] = total
    sums.add_squares(0, values)
    return float(sums.totals[0])


def products_in_torch(left: torch.Tensor, right: torch.Tensor) -> float:
    sums = PieceSums(1)
    sums.add_in_torch(0, left, right)
    return float(sums.totals[0])


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def _halved(values: list[float]) -> float:
    """By the definition: the upper half is added to the lower one, the middle of an odd number stays."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [x + y for x, y in itertools.zip_longest(values[:half], values[half:], fillvalue=0.0)]
    return values[0]


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
    assert values_added(0.0, left) == _by_definition(left.tolist())
    expected = (left.double() * right.double()).tolist()
    assert products(0.0, left, right) == _by_definition(expected)
    assert squares_added(0.0, left) == _by_definition((left.double() * left.double()).tolist())


def test_products_do_not_overflow_or_cancel_in_float32() -> None:
    large = torch.full((1000,), 1e30)
    assert squares_added(0.0, large) == pytest.approx(1e63, rel=1e-6)
    near = torch.cat([torch.full((PIECE,), 1e8), torch.ones(PIECE), torch.full((PIECE,), -1e8)])
    assert values_added(0.0, near) == PIECE


def test_threads_and_chunks_do_not_change_a_bit_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = numbers(9 * BLOCK + 5), numbers(9 * BLOCK + 5, 1)
    with threads(1):
        alone = products(0.0, left, right)
    with threads(2):
        assert products(0.0, left, right) == alone
        assert products_in_torch(left, right) == alone
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", PIECE)
    assert products_in_torch(left, right) == alone


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
    assert found == [products_in_torch(a, b) for a, b in zip(left, right, strict=True)]


@settings(deadline=None, max_examples=10)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(1, 3 * BLOCK), (144, 4096), (3 * BLOCK, 1)])
@pytest.mark.parametrize("of_rows", [row_grams, pytest.param(row_grams_in_torch, marks=pytest.mark.slow)])
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


def gram_of(vectors: list[torch.Tensor], origin: torch.Tensor | None = None) -> Gram:
    gram = Gram(len(vectors))
    gram.add(torch.stack(vectors), origin)
    return gram


@pytest.mark.parametrize("with_origin", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_products_of_all_pairs(with_origin: bool, count: int) -> None:
    origin, vectors = random_inputs(count, (3000,))
    gram = gram_of(vectors, origin if with_origin else None)
    arrays = np.stack([(v - origin if with_origin else v).double().numpy() for v in vectors])
    found = [[gram.product(i, j) for j in range(count)] for i in range(count)]
    np.testing.assert_allclose(found, arrays @ arrays.T, rtol=1e-12)
    np.testing.assert_allclose(gram.norms(), np.linalg.norm(arrays, axis=1), rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gram_knows_whether_all_was_finite(bad: float) -> None:
    vectors = [torch.full((4,), torch.finfo(torch.float32).max), torch.ones(4)]
    assert gram_of(vectors).is_finite
    vectors[1][2] = bad
    assert not gram_of(vectors).is_finite


@pytest.mark.parametrize("with_origin", [False, True])
def test_one_source_alone_is_taken_to_the_last_bit(with_origin: bool) -> None:
    base, sources = random_inputs(3, (50,))
    sources[1][7] = -0.0
    result = combine(torch.stack(sources), (0.0, 1.0, 0.0), base if with_origin else None)
    assert same_bits(result, sources[1])


def on_the_circle(angle: float, t: float, lengths: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
    """Coefficients for two vectors of the plane of that angle between them."""
    first, second = lengths
    return arc_coefficients(first**2, first * second * math.cos(angle), second**2, t=t)


@settings(deadline=None, max_examples=30)
@given(angle=st.floats(0.001, 3.0), t=st.floats(-0.5, 1.5), scale=st.floats(1e-6, 1e6))
def test_the_arc_between_unit_vectors_stays_on_the_circle(angle: float, t: float, scale: float) -> None:
    one, other = on_the_circle(angle, t)
    point = (one + other * math.cos(angle), other * math.sin(angle))
    assert point == pytest.approx((math.cos(t * angle), math.sin(t * angle)), abs=1e-9)
    assert on_the_circle(angle, t, (scale, 1 / scale)) == pytest.approx((one, other), abs=1e-6)


def test_small_angles_go_over_into_the_straight_line() -> None:
    for angle in (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 0.0):
        assert on_the_circle(angle, 0.3) == pytest.approx((0.7, 0.3), abs=1e-6)
    assert on_the_circle(0.0, 0.3) == (0.7, 0.3)


def test_the_smallest_vectors_have_angles_too() -> None:
    least = 2.0**-298
    assert arc_coefficients(least, 0.0, least, t=0.5) == arc_coefficients(1.0, 0.0, 1.0, t=0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_angle_without_finite_products(bad: float) -> None:
    for products in itertools.permutations((bad, 1.0, 1.0)):
        assert all(math.isnan(part) for part in arc_coefficients(*products, t=0.5))


MOST = SAMPLE_RUNS * SAMPLE_LENGTH
SIZES = [MOST + 1, MOST + 255, 8 * BLOCK, 16 * MOST - 1, 16 * MOST, 20 * MOST + 77]


@pytest.mark.parametrize("size", SIZES)
def test_runs_are_alike_and_spread_over_the_tensor(size: int) -> None:
    runs = sample_runs(size)
    firsts, (length, *others) = [first for first, _ in runs], [count for _, count in runs]
    assert len(runs) == SAMPLE_RUNS
    assert set(others) == {length}
    assert firsts[0] == 0
    assert size - SAMPLE_RUNS < firsts[-1] + length <= size
    assert length <= firsts[1] == firsts[-1] / (SAMPLE_RUNS - 1)


def test_of_a_small_tensor_less_is_seen() -> None:
    seen = [SAMPLE_RUNS * sample_runs(size)[0][1] for size in SIZES]
    assert seen == sorted(seen)
    assert seen[0] < MOST / 4
    assert seen[-3] < MOST == seen[-2] == seen[-1]
    assert sample_runs(MOST) == sample_runs(0) == ()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_taken_lies_in_the_runs(size: int) -> None:
    values = torch.arange(2.0 * size).view(2, size)
    whole = Tile(values[0].neg(), values, 0)
    expected = torch.cat([torch.arange(first, first + count) for first, count in sample_runs(size)])
    sample = sample_of(whole)
    assert torch.equal(sample.require_base(), -expected.float())
    assert torch.equal(sample.sources, torch.stack([expected, expected + size]).float())
    stored = values[0].to(torch.int32)
    assert torch.equal(sampled(stored.view(torch.uint8), size).view(torch.int32), expected.int())


LAST = (1 << 31) - 1
float32s = st.floats(width=32)


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
    selection = MagnitudeSelection(rank, with_sums=True)
    passes_of(selection, values, cut)
    return selection


def expected_threshold(values: torch.Tensor, rank: int) -> float:
    """By sorting patterns, where NaN is the largest."""
    patterns = np.sort(np.abs(values.numpy()).view(np.int32))
    return float(patterns[-rank : len(patterns) - rank + 1].view(np.float32)[0])


def facts(selection: MagnitudeSelection) -> tuple[str, float]:
    """What it found; as text, in which NaN is equal to itself."""
    return str(selection.threshold), selection.tied_share


@settings(deadline=None, max_examples=30)
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


@settings(deadline=None, max_examples=50)
@given(data=st.data(), values=some_values, bracket=brackets())
def test_no_bracket_changes_what_is_found(data: st.DataObject, values: list[float], bracket: Bracket) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    rank = data.draw(st.integers(0, len(values)))
    plain, guided = select(tensor, rank), MagnitudeSelection(rank, with_sums=True)
    if rank:
        guided.look_within(bracket)
    assert passes_of(guided, tensor) <= 3
    assert facts(guided) == facts(plain)
    for ours, theirs in ((guided.sum_all, plain.sum_all), (guided.sum_kept, plain.sum_kept)):
        assert ours == pytest.approx(theirs, rel=1e-12, nan_ok=True)


@settings(deadline=None, max_examples=50)
@given(values=some_values, bracket=brackets(), repeats=st.integers(1, 60))
def test_the_loop_counts_as_torch_does(values: list[float], bracket: Bracket, repeats: int) -> None:
    tensor = torch.tensor(values * repeats, dtype=torch.float32)
    counts, in_torch = torch.zeros(bracket.num_bins, dtype=torch.int64), TorchCounts(bracket, CPU)
    above = _count_compiled(tensor, bracket, counts)
    in_torch.add(tensor)
    assert in_torch.result().tolist() == [above, *counts.tolist()]


def test_the_whole_range_is_counted_alike() -> None:
    """Its own loop on the CPU."""
    whole = Bracket(0, LAST + 1, 15)
    values = torch.cat([numbers(3000), torch.tensor([math.nan, -math.inf, -0.0])])
    counts, in_torch = torch.zeros(whole.num_bins, dtype=torch.int64), TorchCounts(whole, CPU)
    assert _count_compiled(values, whole, counts) == 0
    in_torch.add(values)
    assert torch.equal(in_torch.result()[1:], counts)
    assert int((counts & COUNTED).sum()) == 3003


@pytest.mark.parametrize(("rank", "with_sums", "passes"), [(1, False, 2), (2, False, 1), (2, True, 2)])
def test_a_bin_of_several_magnitudes_costs_a_pass_only_where_they_matter(
    rank: int, with_sums: bool, passes: int
) -> None:
    """Where the wanted one is among them, or their sum is asked for."""
    values = torch.from_numpy(np.array([0x3F80_0011, 0x3F80_0000, 0x3F80_0000], np.int32)).view(torch.float32)
    selection = MagnitudeSelection(rank, with_sums=with_sums)
    selection.look_within(Bracket(0x3F80_0000, 0x3F80_0080, 4))
    assert passes_of(selection, values) == passes
    plain = select(values, rank)
    assert facts(selection) == facts(plain)
    assert selection.sum_kept == (plain.sum_kept if with_sums else 0.0)


def sample_from(values: torch.Tensor) -> torch.Tensor:
    return sample_of(Tile(None, values.unsqueeze(0), 0)).sources[0]


def guided_passes(values: torch.Tensor, share: float) -> int:
    """Passes with a sample; what is found is that of a selection without."""
    rank = int(share * values.numel())
    selection = MagnitudeSelection(rank)
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
    selection = MagnitudeSelection(rank)
    selection.expect(misled, rank / COUNT)
    assert passes_of(selection, values) == 3
    assert selection.threshold == expected_threshold(values, rank)


@settings(deadline=None, max_examples=20)
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


SOME = [0.0, -0.0, 1.0, -1.0, 1.5, 2.0, -2.0, 3.0, 1e-45, -1e-40, 3e38, math.inf, -math.inf, math.nan]


def marks(values: torch.Tensor, rank: int, start: int = 0) -> torch.Tensor:
    magnitudes = values.abs()
    mark_largest_(magnitudes, threshold_of(select(values, rank), tie_key("ties", 0)), start=start)
    return magnitudes


@settings(deadline=None, max_examples=30)
@given(data=st.data(), values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_marks_are_the_largest_and_smaller_ranks_mark_fewer(data: st.DataObject, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    rank = data.draw(st.integers(0, len(values)))
    marked = marks(tensor, rank)
    assert set(marked.tolist()) <= {0.0, 1.0}
    threshold = select(tensor, rank).threshold
    assert bool((marked[tensor.abs() > threshold] == 1).all())
    assert bool((marked[tensor.abs() < threshold] == 0).all())
    if rank:
        assert bool((marks(tensor, rank - 1) <= marked).all() or threshold == math.inf)


@pytest.mark.parametrize(("values", "rank"), [([0.0, 2.0, 0.0], 2), ([1.0, 2.0, 3.0], 3), ([5.0], 0)])
def test_a_cut_without_a_choice_has_no_level(values: list[float], rank: int) -> None:
    assert math.isnan(threshold_of(select(torch.tensor(values), rank), 1).tied)


def alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, but for which NaN it is: processors choose one of two by the order of operands."""
    whole = torch.ones(())
    return same_bits(left.where(~left.isnan(), whole), right.where(~right.isnan(), whole)) and torch.equal(
        left.isnan(), right.isnan()
    )


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    """Up to four sources of any length, rows further apart than they are long."""
    num_sources, size = draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, 7, 130, 1024, 1025, 3000]))
    gap, seed = draw(st.sampled_from([0, 1, 17])), draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((num_sources, size + gap), generator=generator)
    if draw(st.booleans()):
        rows = (rows * 2).round().mul_(0.5)
    odd = torch.tensor(draw(st.lists(st.sampled_from(SOME), min_size=1, max_size=20)), dtype=torch.float32)
    if rows.numel():
        places = torch.randint(rows.numel(), (40,), generator=generator)
        rows.view(-1)[places] = odd.repeat(40)[:40]
    base = torch.randn(size, generator=generator)
    base[: size // 3] = -0.0
    start = draw(st.sampled_from([0, BLOCK, (1 << 33) + 5]))
    return Tile(base, rows[:, :size], start)


levels = st.sampled_from([0.5, 1.0, 1.5, 2.0, math.inf])


@st.composite
def cuts(draw: st.DrawFn) -> Threshold:
    if draw(st.booleans()):
        return draw(st.sampled_from([EVERYTHING, NOTHING, Threshold(0.7)]))
    level = draw(levels)
    return Threshold(level, level, draw(st.floats(0.0, 1.0)), draw(st.integers(0, (1 << 64) - 1)))


@st.composite
def trims(draw: st.DrawFn) -> Trim:
    """The second cut never takes more than the first gives: as ranks of one selection do."""
    gain = draw(st.sampled_from([1.0, 3.7]))
    kept = draw(cuts())
    outliers = [NOTHING]
    if kept.above < math.inf:
        level = kept.above + 1
        outliers += [Threshold(level), Threshold(level, level, draw(st.floats(0.0, 1.0)), kept.key)]
    if math.isnan(kept.tied):
        # Just what is kept, of which nothing is left then.
        outliers.append(Threshold(kept.above))
    else:
        outliers.append(Threshold(kept.above, kept.tied, kept.share * draw(st.floats(0.0, 1.0)), kept.key))
        # A cut without a choice at the same level takes all that is larger than the tied ones.
        outliers.append(Threshold(kept.above))
    return Trim(kept, draw(st.sampled_from(outliers)), gain)


@st.composite
def family_settings(draw: st.DrawFn, num_sources: int) -> Settings:
    weights = draw(
        st.lists(st.sampled_from([0.5, 1.0, -0.3, 0.0]), min_size=num_sources, max_size=num_sources)
    )
    values: dict[str, Value] = {
        "normalize": draw(st.booleans()),
        "lambda": draw(st.sampled_from([1.0, -0.5, 1.7])),
    }
    method = method_named("ties")
    return make_settings(method, Case(values, tuple({"weight": weight} for weight in weights)))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), tile=tiles(), elect=st.booleans())
def test_the_loop_trims_and_merges_as_torch_does(data: st.DataObject, tile: Tile, *, elect: bool) -> None:
    count = len(tile.sources)
    chosen = [data.draw(trims()) for _ in range(count)]
    how = data.draw(family_settings(count))
    compiled = trimmed_merge(how, chosen, elect=elect).apply(tile)
    assert alike(compiled, merge_trimmed_in_torch(tile, how, chosen, elect=elect))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_more_nan_than_outliers_leave_what_is_kept(share: float) -> None:
    """A NaN is the largest magnitude; where all outliers are NaN no number may go with them."""
    delta = torch.arange(1.0, 101.0)
    delta[:10] = math.nan
    kept = threshold_of(select(delta, 50), 1)
    outliers = threshold_of(select(delta, round(10 * share)), 1)
    assert not math.isnan(outliers.above)
    method = method_named("breadcrumbs")
    how = make_settings(method, Case({"normalize": False}, ({"weight": 1.0},)))
    tile, chosen = Tile(torch.zeros(100), delta[None], 0), [Trim(kept, outliers)]
    merged = trimmed_merge(how, chosen, elect=False).apply(tile)
    assert alike(merged, merge_trimmed_in_torch(tile, how, chosen, elect=False))
    assert bool(merged[:10].isnan().all())
    assert torch.equal(merged[10:], delta[10:].where(delta[10:] > 60, 0.0))


@pytest.mark.parametrize("elect", [False, True])
def test_infinities_at_an_infinite_level_are_kept_or_make_nan(*, elect: bool) -> None:
    """Where more are infinite than are kept: those that are chosen stay, the others are 0 times infinity."""
    deltas = torch.full((2, 4096), math.inf)
    deltas[1] = 1.0
    tile = Tile(torch.zeros(4096), deltas, 0)
    method = method_named("ties")
    how = make_settings(method, Case({}, ({"weight": 0.5},) * 2))
    chosen = [Trim(Threshold(math.inf, math.inf, 0.5, 11)), WHOLE]
    merged = trimmed_merge(how, chosen, elect=elect).apply(tile)
    assert alike(merged, merge_trimmed_in_torch(tile, how, chosen, elect=elect))
    assert 1500 < int((merged == math.inf).sum()) < 2500
    assert bool((merged.isnan() | (merged == math.inf)).all())


@settings(deadline=None, max_examples=30)
@given(data=st.data(), tile=tiles(), elect=st.booleans(), gap=st.sampled_from([0, 5]))
def test_the_loop_multiplies_and_merges_as_torch_does(
    data: st.DataObject, tile: Tile, *, elect: bool, gap: int
) -> None:
    count, size = tile.sources.shape
    how = data.draw(family_settings(count))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    factors = torch.rand((count, size + gap), generator=generator).sub_(0.5).clamp_min_(0.0)[:, :size]
    compiled = merge_factors(tile, how, factors, elect=elect)
    assert alike(compiled, merge_factors_in_torch(tile, how, factors, elect=elect))


@settings(deadline=None, max_examples=30)
@given(data=st.data(), tile=tiles(), cut=cuts())
def test_the_loop_selects_and_merges_as_torch_does(data: st.DataObject, tile: Tile, cut: Threshold) -> None:
    shares = tuple(data.draw(st.sampled_from([0.0, 0.25, 0.6])) for _ in tile.sources)
    compiled = SelectedMerge(selection_by_deviation(cut), sum_of(shares)).apply(tile)
    assert alike(compiled, merge_selected_in_torch(tile, shares, cut))


@settings(deadline=None, max_examples=30)
@given(tile=tiles(), cut=cuts())
def test_deviations_and_what_they_select_are_those_of_torch(tile: Tile, cut: Threshold) -> None:
    ours, theirs = deviations_of(tile), deviations_in_torch(tile)
    assert alike(ours[0], theirs)
    assert ours[1] == int(torch.count_nonzero(theirs))
    compiled = selected_deltas(tile, compiled_thresholds([(cut, NOTHING)]))
    assert alike(compiled, selected_deltas_in_torch(tile, cut))


@pytest.mark.parametrize("num_sources", range(1, 12))
def test_equal_deltas_lie_nowhere_apart_and_others_always_do(num_sources: int) -> None:
    """Also where the only difference is the smallest number that there is."""
    values = torch.randn(999, generator=torch.Generator().manual_seed(0))
    deltas = values.repeat(num_sources, 1)
    assert deviations_of(Tile(None, deltas, 0))[1] == 0
    if num_sources > 1:
        smallest = torch.zeros((num_sources, 3))
        smallest[-1] = 1e-45
        tile = Tile(None, smallest, 0)
        assert deviations_of(tile)[1] == int(torch.count_nonzero(deviations_in_torch(tile))) == 3
