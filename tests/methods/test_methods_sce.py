"""SCE, RAM, consensus, LiNeS and Arcee Fusion against their papers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import (
    Case,
    MethodKit,
    assert_as_expected,
    expected_of,
    make_settings,
    merge,
    method_named,
    random_inputs,
    same_bits,
    sources_of,
    threads,
)
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Value
from raymerge.methods.arcee_fusion import _divergences


def run(base: torch.Tensor, sources: list[torch.Tensor], select_topk: float = 1.0) -> torch.Tensor:
    case = Case({"select_topk": select_topk}, ({},) * len(sources))
    return merge(method_named("sce"), make_settings(method_named("sce"), case, base.shape), base, sources)


class TestSce(MethodKit):
    name = "sce"
    cases = (
        Case(sources=({}, {}, {})),
        Case({"select_topk": 0.6}, ({}, {}, {})),
        Case({"select_topk": 0.05, "int8_mask": True}, ({}, {})),
        Case({"select_topk": 0.5}, ({},)),
    )


# Against the definition -------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Squares 25 and 75: weights 1/4 and 3/4. Signs go to both, the second, the first and the first."""
    base = torch.full((4,), 1.0)
    first, second = torch.tensor([4.0, -1.0, -2.0, 2.0]), torch.tensor([7.0, 5.0, 1.0, 0.0])
    result = run(base, [base + first, base + second])
    assert result.tolist() == [1 + (4 + 3 * 7) / 4, 6.0, -1.0, 3.0]


def test_selection_by_hand() -> None:
    """The deltas differ in three of four elements, by 6, 2 and 4: two thirds are the first and the last."""
    base = torch.zeros(4)
    first, second = torch.tensor([3.0, 1.0, 5.0, 4.0]), torch.tensor([-3.0, 3.0, 5.0, 8.0])
    result = run(base, [first, second], select_topk=2 / 3)
    # Squares of what is selected: 9 + 16 and 9 + 64; the tie of the first element is positive.
    merged = (4 * 25 + 8 * 73) / (25 + 73)
    assert result.tolist() == pytest.approx([3.0, 0.0, 0.0, merged], rel=1e-6)


# What mergekit gets wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32,), (7, 5), (2, 3, 4), ()])
@pytest.mark.parametrize("select_topk", [0.0, 0.5])
def test_deltas_that_are_all_alike_select_nothing_and_the_shape_stays(
    shape: tuple[int, ...], select_topk: float
) -> None:
    base, [source] = random_inputs(1, shape)
    assert torch.equal(run(base, [source] * 3, select_topk), base)
    assert torch.equal(run(base, [base] * 3, select_topk), base)


def test_a_source_that_changes_more_weighs_more_however_small_the_change() -> None:
    base = torch.zeros(1000)
    result = run(base, [torch.full((1000,), 1e-6), torch.full((1000,), 3e-6)])
    torch.testing.assert_close(result, torch.full((1000,), 2.8e-6), rtol=1e-6, atol=0)


def test_a_source_alone_with_its_sign_keeps_its_delta_whole() -> None:
    """Also one of a weight far below 1e-6, which mergekit's divisor would cut down."""
    first, second = torch.zeros(1000), torch.zeros(1000)
    first[:500], second[500:] = 1e-4, 1.0
    result = run(torch.zeros(1000), [first, second])
    torch.testing.assert_close(result, first + second, rtol=1e-6, atol=0)


# Ties and passes --------------------------------------------------------------------------------------


def test_of_equal_deviations_the_right_share_is_selected() -> None:
    count = 4 * BLOCK
    result = run(torch.zeros(count), [torch.ones(count), torch.full((count,), 3.0)], 0.25)
    selected = (result != 0).double()
    assert float(selected.mean()) == pytest.approx(0.25, abs=0.005)
    assert float((selected.view(4, -1).mean(dim=1) - 0.25).abs().max()) < 0.01


def test_what_does_not_differ_is_never_selected() -> None:
    base, sources = random_inputs(2, (4000,))
    sources[0][:3000] = sources[1][:3000]
    result = run(base, sources, 0.999)
    assert torch.equal(result[:3000], base[:3000])
    assert int((result != base).sum()) == 999


@pytest.mark.parametrize(("select_topk", "passes"), [(1.0, 1), (0.999, 2), (0.0, 2)])
def test_passes(select_topk: float, passes: int) -> None:
    method = method_named("sce")
    settings = make_settings(method, Case({"select_topk": select_topk}, ({}, {})))
    assert method.kernel.passes(settings) == passes


SHAPE = (37, 101)
NAMES = ["ram", "ramplus_tl"]


def ram(
    name: str, base: torch.Tensor, sources: list[torch.Tensor], cuts: tuple[int, ...] = (), **values: Value
) -> torch.Tensor:
    case = Case(values, ({},) * len(sources))
    return merge(method_named(name), make_settings(method_named(name), case, base.shape), base, sources, cuts)


class TestRam(MethodKit):
    name = "ram"
    scales = False
    cases = (
        Case(sources=({}, {}, {})),
        Case({"epsilon": 0.05}, ({}, {})),
        Case({"epsilon": 0.0}, ({},)),
        Case({"epsilon": 10.0}, ({}, {})),
    )


class TestRamPlus(MethodKit):
    name = "ramplus_tl"
    scales = False
    cases = (
        Case({"epsilon": 0.05}, ({}, {}, {})),
        Case({"epsilon": 0.03, "r": 2.0, "alpha": 5.0}, ({}, {})),
        Case({"epsilon": 0.0}, ({},)),
        Case({"epsilon": 0.05, "r": -0.5}, ({}, {})),
    )


def test_ram_by_hand() -> None:
    """Unique to the first: 1; unique to the second: 2; shared: (2 + 4) / 2; below epsilon: nothing."""
    base = torch.full((4,), 10.0)
    first, second = torch.tensor([1.0, 0.0, 2.0, 0.25]), torch.tensor([0.0, 2.0, 4.0, 0.0])
    sources = [base + first, base + second]
    assert ram("ram", base, sources, epsilon=0.5).tolist() == [11.0, 12.0, 13.0, 10.0]
    # One shared and one unique element each: a ratio of 1, of which alpha lets 0.5 count.
    enlarged = ram("ramplus_tl", base, sources, epsilon=0.5, r=0.5, alpha=0.5)
    assert enlarged.tolist() == [11.25, 12.5, 13.0, 10.0]


def test_each_source_has_its_own_gain() -> None:
    """First: two unique, one shared, ratio 0.5; second: one shared only."""
    base = torch.zeros(3)
    sources = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 3.0])]
    assert ram("ramplus_tl", base, sources, r=1.0, alpha=9.0).tolist() == [1.5, 1.5, 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_epsilon_is_the_users_own_number(name: str) -> None:
    """It is absolute: deltas and epsilon scaled alike give a merged delta scaled alike."""
    base, (first, second) = random_inputs(2, SHAPE)
    deltas = [first - base, second - base]
    large = ram(name, torch.zeros(SHAPE), deltas, epsilon=2.0**-5)
    small = ram(name, torch.zeros(SHAPE), [delta * 2.0**-20 for delta in deltas], epsilon=2.0**-25)
    assert torch.equal(small * 2.0**20, large)
    nothing = ram(name, torch.zeros(SHAPE), [delta * 2.0**-20 for delta in deltas])
    assert not bool(nothing.any())


LINES_SHAPE = (23, 41)


def consensus(
    name: str, case: Case, base: torch.Tensor, sources: list[torch.Tensor], position: float = 0.0
) -> torch.Tensor:
    method = method_named(name)
    settings = replace(make_settings(method, case, base.shape), position=position)
    return merge(method, settings, base, sources)


class TestConsensus(MethodKit):
    name = "consensus_ta"
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"lambda": 0.7}, sources_of(0.5, 0.3, -0.2, mask_lambda=0.2)),
        Case({"consensus": 1}, sources_of(0.5)),
        Case({"consensus": 0}, sources_of(0.5, 0.0)),
    )


class TestLines(MethodKit):
    name = "lines"
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"alpha": 0.2, "beta": 0.5}, sources_of(0.5, -0.3)),
        Case(sources=sources_of(0.5)),
    )


# consensus_ta -----------------------------------------------------------------------------------------


def test_consensus_by_hand() -> None:
    """Terms (1, 1, 1) are used by all; (4, 0, 0) by one; (3, 1, 0) by the first alone; (2, 2, 0) by two."""
    base = torch.tensor([10.0, 10.0, 10.0, 10.0])
    deltas = [[1.0, 4.0, 3.0, 2.0], [1.0, 0.0, 1.0, 2.0], [1.0, 0.0, 0.0, 0.0]]
    sources = [base + torch.tensor(delta) for delta in deltas]
    entries = sources_of(1.0, 1.0, 1.0, mask_lambda=0.4)
    two = consensus("consensus_ta", Case(sources=entries), base, sources)
    assert two.tolist() == [13.0, 10.0, 10.0, 14.0]
    one = consensus("consensus_ta", Case({"consensus": 1, "lambda": 0.5}, entries), base, sources)
    assert one.tolist() == [11.5, 12.0, 12.0, 12.0]
    three = consensus("consensus_ta", Case({"consensus": 3}, entries), base, sources)
    assert three.tolist() == [13.0, 10.0, 10.0, 10.0]


def test_an_element_as_near_to_the_base_as_to_the_merged_model_is_not_used() -> None:
    """The paper's inequality is strict: with factor 1, two equal deltas are half of their sum."""
    base = torch.tensor([10.0, 10.0])
    sources = [base + torch.tensor([2.0, 3.0]), base + torch.tensor([2.0, 1.0])]
    entries = sources_of(1.0, 1.0, mask_lambda=1.0)
    result = consensus("consensus_ta", Case({"consensus": 1}, entries), base, sources)
    assert result.tolist() == [10.0, 14.0]


def test_no_consensus_asked_for_is_task_arithmetic() -> None:
    base, sources = random_inputs(3, LINES_SHAPE)
    entries = sources_of(0.6, 0.3, -0.5)
    plain = consensus("task_arithmetic", Case({"lambda": 0.7}, entries), base, sources)
    free = consensus("consensus_ta", Case({"lambda": 0.7, "consensus": 0}, entries), base, sources)
    assert torch.equal(free, plain)


def test_lambda_has_no_part_in_the_masks() -> None:
    base, sources = (torch.zeros(LINES_SHAPE), [delta - 0.5 for delta in random_inputs(3, LINES_SHAPE)[1]])
    full = consensus("consensus_ta", Case(sources=sources_of(1.0, 1.0, 1.0)), base, sources)
    half = consensus("consensus_ta", Case({"lambda": 0.5}, sources_of(1.0, 1.0, 1.0)), base, sources)
    assert torch.equal(half, full * 0.5)


def test_a_source_of_weight_0_uses_nothing() -> None:
    base, sources = random_inputs(2, LINES_SHAPE)
    result = consensus("consensus_ta", Case(sources=sources_of(1.0, 0.0)), base, sources)
    assert torch.equal(result, base)


@pytest.mark.parametrize(("wanted", "fits"), [(0, True), (2, True), (3, False)])
def test_a_consensus_of_more_than_there_are_is_refused(wanted: int, fits: bool) -> None:
    method = method_named("consensus_ta")
    sentence = method.check(make_settings(method, Case({"consensus": wanted}, sources_of(1.0, 1.0))))
    expected = "consensus is 3, but only 2 of the sources merge here, so nothing would be kept"
    assert sentence == (None if fits else expected)


# lines ------------------------------------------------------------------------------------------------


def test_lines_by_hand() -> None:
    """Two sources: 1/2 in the first of three layers, 3/4 in the second, the whole sum in the third."""
    base = torch.tensor([1.0, -2.0])
    sources = [base + torch.tensor([4.0, 0.0]), base + torch.tensor([4.0, -8.0])]
    case = Case(sources=sources_of(1.0, 1.0))
    layers = [consensus("lines", case, base, sources, position).tolist() for position in (0.0, 0.5, 1.0)]
    assert layers == [[5.0, -6.0], [7.0, -8.0], [9.0, -10.0]]


def test_one_source_is_scaled_by_what_alpha_says() -> None:
    base, sources = torch.zeros(4), [torch.ones(4)]
    case = Case({"alpha": 0.25}, sources_of(1.0))
    assert consensus("lines", case, base, sources).tolist() == [0.25] * 4
    assert consensus("lines", case, base, sources, 1.0).tolist() == [1.0] * 4


def test_the_last_layer_of_lines_is_task_arithmetic() -> None:
    base, sources = random_inputs(3, LINES_SHAPE)
    entries = sources_of(0.6, 0.3, -0.5)
    plain = consensus("task_arithmetic", Case(sources=entries), base, sources)
    assert torch.equal(consensus("lines", Case({"alpha": 0.5}, entries), base, sources, 1.0), plain)


Array = NDArray[np.float64]


def fusion(base: torch.Tensor, source: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    method = method_named("arcee_fusion")
    return merge(method, make_settings(method, Case(), base.shape), base, [source], cuts)


class TestArceeFusion(MethodKit):
    name = "arcee_fusion"
    scales = False
    cases = (Case(),)


# Against the definition -------------------------------------------------------------------------------


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True)) + 1e-8


def test_arcee_fusion_by_hand() -> None:
    """Two rows of four. Only the second row's softmax changes, so that only its elements matter; its shift by
    5 in one element is taken, its small shifts are not."""
    base = torch.zeros(2, 4)
    source = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.5, 0.5, 0.5]])
    q, p = 0.25 + 1e-8, [math.exp(x) / (math.exp(5) + 3 * math.exp(0.5)) + 1e-8 for x in (5.0, 0.5)]
    divergence = p[0] * math.log(p[0] / q) + 3 * p[1] * math.log(p[1] / q)
    # Sorted importances: 0 0 0 0, then 0.5 three times and 5 once the divergence.
    assert 5 * divergence >= 0.0 + 1.5 * (0.5 * divergence - 0.0) > 0.5 * divergence
    assert fusion(base, source).tolist() == [[0.0] * 4, [5.0, 0.0, 0.0, 0.0]]


def test_quartiles_are_exact_beyond_a_million_elements() -> None:
    """mergekit draws a sample there, and another one for the median."""
    base, [source] = random_inputs(1, (1100, 1000))
    result = fusion(base, source)
    method = method_named("arcee_fusion")
    settings = make_settings(method, Case(), base.shape)
    assert_as_expected(result, expected_of(method, settings, base, [source]))
    assert same_bits(fusion(base, source), result)


def test_what_changes_nothing_is_the_base_and_a_single_column_the_source() -> None:
    base, _ = random_inputs(1, SHAPE)
    assert same_bits(fusion(base, base), base)
    column, [other] = random_inputs(1, (20, 1))
    torch.testing.assert_close(fusion(column, other), other)


# Small changes ----------------------------------------------------------------------------------------


def divergences(base: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _divergences(base, source, -(-base.shape[1] // 64) * 64)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 20_000])
def test_divergences_are_those_of_the_definition(length: int) -> None:
    base, [source] = random_inputs(1, (3, length))
    p, q = softmax(source.double().numpy()), softmax(base.double().numpy())
    expected = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(divergences(base, source).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("exponent", [8, 14, 20, 30])
def test_divergences_of_tiny_changes_do_not_drown_in_rounding(exponent: int) -> None:
    """They fall with the square of the change: half the variance of the change under q."""
    base, change = torch.zeros(1, 256), torch.linspace(-1.0, 1.0, 256).unsqueeze(0)
    expected = float(change.double().var(correction=0)) / 2
    measured = float(divergences(base, change * 2.0**-exponent)) * 4.0**exponent
    assert measured == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("exponent", [10, 20, 30])
def test_the_merged_delta_is_as_small_as_the_deltas(exponent: int) -> None:
    """Over a uniform row, of which the softmax moves in proportion to the change when that is small."""
    _, (first, second) = random_inputs(2, SHAPE)
    delta, factor = (first - second) * 2.0**-5, 2.0**-exponent
    large, small = (fusion(torch.zeros(SHAPE), delta), fusion(torch.zeros(SHAPE), delta * factor))
    taken = large != 0
    assert 0 < int(taken.sum()) < taken.numel()
    assert float(((small != 0) != taken).double().mean()) < 0.01
    both = taken & (small != 0)
    assert torch.equal(small[both], large[both] * factor)


def test_large_values_overflow_nothing() -> None:
    base = torch.tensor([[-1e4, 0.0, 1e4, 3.0]])
    source = torch.tensor([[1e4, 0.0, -1e4, 3.0]])
    assert bool(divergences(base, source).isfinite().all())
    assert bool(fusion(base, source).isfinite().all())


# The same bits ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    length=st.sampled_from([1, 7, 63, 64, 65, 1501, 16_383, 33_001]),
    first=st.integers(0, 9),
    count=st.integers(1, 9),
)
def test_a_divergence_depends_on_its_row_alone(length: int, first: int, count: int) -> None:
    base, [source] = random_inputs(1, (10, length))
    part = slice(first, first + count)
    whole, alone = divergences(base, source)[part], divergences(base[part], source[part])
    assert torch.equal(whole.view(torch.int64), alone.view(torch.int64))


def test_threads_do_not_change_a_bit_of_long_and_short_rows() -> None:
    for shape in ((40, 3001), (2, 70_001), (120_001,), (30_000, 3)):
        base, [source] = random_inputs(1, shape)
        with threads(1):
            alone = fusion(base, source)
        with threads(2):
            assert same_bits(fusion(base, source), alone)
