"""SCE, RAM, consensus, LiNeS, Arcee Fusion, singular values and upcycling, against their papers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.method_kit import (
    Case,
    MethodKit,
    assert_as_expected,
    expected_of,
    make_settings,
    merge,
    method_named,
    random_inputs,
    run,
    same_bits,
    sources_of,
    threads,
)
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Access, Settings, Tile, Value, random_key
from raymerge.methods.arcee_fusion import _divergences
from raymerge.methods.random import hashed
from raymerge.methods.reduce import PIECE
from raymerge.methods.upcycle import _limit


def sce(base: torch.Tensor, sources: list[torch.Tensor], select_topk: float = 1.0) -> torch.Tensor:
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


def test_by_hand() -> None:
    """Squares 25 and 75: weights 1/4 and 3/4. Signs go to both, the second, the first and the first."""
    base = torch.full((4,), 1.0)
    first, second = torch.tensor([4.0, -1.0, -2.0, 2.0]), torch.tensor([7.0, 5.0, 1.0, 0.0])
    result = sce(base, [base + first, base + second])
    assert result.tolist() == [1 + (4 + 3 * 7) / 4, 6.0, -1.0, 3.0]


def test_selection_by_hand() -> None:
    """The deltas differ in three of four elements, by 6, 2 and 4: two thirds are the first and the last."""
    base = torch.zeros(4)
    first, second = torch.tensor([3.0, 1.0, 5.0, 4.0]), torch.tensor([-3.0, 3.0, 5.0, 8.0])
    result = sce(base, [first, second], select_topk=2 / 3)
    # Squares of what is selected: 9 + 16 and 9 + 64; the tie of the first element is positive.
    merged = (4 * 25 + 8 * 73) / (25 + 73)
    assert result.tolist() == pytest.approx([3.0, 0.0, 0.0, merged], rel=1e-6)


@pytest.mark.parametrize("shape", [(32,), (7, 5), (2, 3, 4), ()])
@pytest.mark.parametrize("select_topk", [0.0, 0.5])
def test_deltas_that_are_all_alike_select_nothing_and_the_shape_stays(
    shape: tuple[int, ...], select_topk: float
) -> None:
    base, [source] = random_inputs(1, shape)
    assert torch.equal(sce(base, [source] * 3, select_topk), base)
    assert torch.equal(sce(base, [base] * 3, select_topk), base)


def test_a_source_that_changes_more_weighs_more_however_small_the_change() -> None:
    base = torch.zeros(1000)
    result = sce(base, [torch.full((1000,), 1e-6), torch.full((1000,), 3e-6)])
    torch.testing.assert_close(result, torch.full((1000,), 2.8e-6), rtol=1e-6, atol=0)


def test_a_source_alone_with_its_sign_keeps_its_delta_whole() -> None:
    """Also one of a weight far below 1e-6, which mergekit's divisor would cut down."""
    first, second = torch.zeros(1000), torch.zeros(1000)
    first[:500], second[500:] = 1e-4, 1.0
    result = sce(torch.zeros(1000), [first, second])
    torch.testing.assert_close(result, first + second, rtol=1e-6, atol=0)


def test_of_equal_deviations_the_right_share_is_selected() -> None:
    count = 4 * BLOCK
    result = sce(torch.zeros(count), [torch.ones(count), torch.full((count,), 3.0)], 0.25)
    selected = (result != 0).double()
    assert float(selected.mean()) == pytest.approx(0.25, abs=0.005)
    assert float((selected.view(4, -1).mean(dim=1) - 0.25).abs().max()) < 0.01


def test_what_does_not_differ_is_never_selected() -> None:
    base, sources = random_inputs(2, (4000,))
    sources[0][:3000] = sources[1][:3000]
    result = sce(base, sources, 0.999)
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


@pytest.mark.parametrize(("wanted", "fits"), [(0, True), (2, True), (3, False)])
def test_a_consensus_of_more_than_there_are_is_refused(wanted: int, fits: bool) -> None:
    method = method_named("consensus_ta")
    sentence = method.check(make_settings(method, Case({"consensus": wanted}, sources_of(1.0, 1.0))))
    expected = "consensus is 3, but only 2 of the sources merge here, so nothing would be kept"
    assert sentence == (None if fits else expected)


def test_lines_by_hand() -> None:
    """Two sources: 1/2 in the first of three layers, 3/4 in the second, the whole sum in the third."""
    base = torch.tensor([1.0, -2.0])
    sources = [base + torch.tensor([4.0, 0.0]), base + torch.tensor([4.0, -8.0])]
    case = Case(sources=sources_of(1.0, 1.0))
    layers = [consensus("lines", case, base, sources, position).tolist() for position in (0.0, 0.5, 1.0)]
    assert layers == [[5.0, -6.0], [7.0, -8.0], [9.0, -10.0]]


Array = NDArray[np.float64]


def fusion(base: torch.Tensor, source: torch.Tensor, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    method = method_named("arcee_fusion")
    return merge(method, make_settings(method, Case(), base.shape), base, [source], cuts)


class TestArceeFusion(MethodKit):
    name = "arcee_fusion"
    scales = False
    cases = (Case(),)


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


def divergences(base: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _divergences(base, source, -(-base.shape[1] // 64) * 64)


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


def test_threads_do_not_change_a_bit_of_long_and_short_rows() -> None:
    for shape in ((40, 3001), (2, 70_001), (120_001,), (30_000, 3)):
        base, [source] = random_inputs(1, shape)
        with threads(1):
            alone = fusion(base, source)
        with threads(2):
            assert same_bits(fusion(base, source), alone)


BOTH = ["iso_c", "tsv_m"]


def merged_delta(name: str, deltas: list[Array], case: Case | None = None) -> Array:
    """What a method makes of deltas, on a base of zeros."""
    sources = [torch.from_numpy(delta).float() for delta in deltas]
    case = case or Case(sources=({},) * len(deltas))
    return run(name, case, torch.zeros(sources[0].shape), sources).double().numpy()


def weighted_deltas(
    base: torch.Tensor, sources: list[torch.Tensor], weights: tuple[float, ...]
) -> list[Array]:
    """``w d`` of each source; deltas as the executor takes them, subtracted in float32."""
    return [w * (source - base).double().numpy() for w, source in zip(weights, sources, strict=True)]


def orthonormal(rows: int, columns: int, seed: int) -> Array:
    """A random matrix with orthonormal columns."""
    found = np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, columns)))[0]
    return np.asarray(found, dtype=np.float64)


def spectrum(values: list[float], rows: int, columns: int, seed: int) -> Array:
    """A random matrix with these singular values, and zeros for the rest."""
    rank = len(values)
    return np.asarray(
        (orthonormal(rows, rank, seed) * np.array(values)) @ orthonormal(columns, rank, seed + 1).T
    )


class TestIsoC(MethodKit):
    name = "iso_c"
    scales = False
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"lambda": 0.6}, sources_of(0.5, -0.3)),
        Case(sources=({},)),
    )


class TestTsvM(TestIsoC):
    name = "tsv_m"


def test_iso_c_by_hand() -> None:
    """(3, 1) and (4, 2) become their means; a rotation keeps its directions."""
    assert merged_delta("iso_c", [np.diag([3.0, 1.0])]) == pytest.approx(np.diag([2.0, 2.0]))
    turned = np.array([[0.0, 4.0, 0.0], [-2.0, 0.0, 0.0]])
    expected = np.array([[0.0, 3.0, 0.0], [-3.0, 0.0, 0.0]])
    assert merged_delta("iso_c", [turned]) == pytest.approx(expected)
    assert merged_delta("iso_c", [turned / 2, turned / 2]) == pytest.approx(expected)


@pytest.mark.parametrize("rank", [1, 3, 11])
@pytest.mark.parametrize("shape", [(30, 30), (20, 50)])
def test_iso_c_gives_no_direction_to_what_is_not_there(rank: int, shape: tuple[int, int]) -> None:
    """An adapter's delta has few directions. Its float32 elements are not of exact rank, and need not be."""
    generator = np.random.default_rng(5)
    left, right = (generator.standard_normal((side, rank)) for side in shape)
    u, singular, vt = np.linalg.svd(left @ right.T, full_matrices=False)
    reference = singular[:rank].mean() * (u[:, :rank] @ vt[:rank])
    result = merged_delta("iso_c", [left @ right.T])
    np.testing.assert_allclose(result, reference, atol=2e-5 * float(np.abs(reference).max()))
    values = np.linalg.svd(result, compute_uv=False)
    np.testing.assert_allclose(values[:rank], values[0], rtol=1e-5)
    assert float(values[rank:].max()) < 1e-5 * values[0]


def test_iso_c_keeps_small_directions() -> None:
    """A singular value of 1e-5 of the largest is data, and its direction counts as much as the others."""
    matrix = spectrum([1.0, 1e-5], 16, 16, seed=9)
    values = np.linalg.svd(merged_delta("iso_c", [matrix]), compute_uv=False)
    assert float(values[1]) == pytest.approx(float(values[0]), rel=1e-5)


def _procrustes(matrix: Array) -> Array:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vt)


def test_tsv_m_by_hand() -> None:
    """Directions at 0 and 45 degrees are turned to -22.5 and 67.5, the nearest that are orthogonal."""
    one, other = np.array([[2.0, 0.0], [0.0, 0.0]]), np.full((2, 2), 0.5)
    near, far = (np.array([math.cos(a), math.sin(a)]) for a in (-math.pi / 8, 3 * math.pi / 8))
    expected = 2 * np.outer(near, near) + np.outer(far, far)
    assert merged_delta("tsv_m", [one, other]) == pytest.approx(expected, rel=1e-6)


def test_tsv_m_of_equal_deltas_is_their_leading_part() -> None:
    """A set of vectors that is no basis has no nearest orthonormal set; on its span it has."""
    for copies in (2, 3, 4):
        matrix = spectrum([8.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.3, 0.2, 0.1, 0.05], 15, 12, seed=2)
        u, s, vt = np.linalg.svd(matrix.astype(np.float32).astype(np.float64), full_matrices=False)
        count = 12 // copies
        leading = (u[:, :count] * s[:count]) @ vt[:count]
        result = merged_delta("tsv_m", [matrix] * copies)
        np.testing.assert_allclose(result, leading, rtol=1e-5, atol=1e-6)


def test_tsv_m_takes_no_direction_from_a_source_that_changed_nothing() -> None:
    matrix = spectrum([8.0, 4.0, 2.0, 1.0], 4, 4, seed=6)
    u, s, vt = np.linalg.svd(matrix)
    leading = (u[:, :2] * s[:2]) @ vt[:2]
    for pair in ([matrix, np.zeros((4, 4))], [np.zeros((4, 4)), matrix]):
        np.testing.assert_allclose(merged_delta("tsv_m", pair), leading, rtol=1e-5, atol=1e-6)


def test_tsv_m_takes_no_direction_from_an_adapter_beyond_its_rank() -> None:
    """Of rank 1 where 4 were allowed: the other source's directions are as if there were but one of this."""
    generator = np.random.default_rng(8)
    adapter = np.outer(generator.standard_normal(8), generator.standard_normal(8))
    matrix = generator.standard_normal((8, 8))
    (u, s, vt), (others_u, others_s, others_vt) = map(np.linalg.svd, (adapter, matrix))
    left = _procrustes(np.concatenate([u[:, :1], others_u[:, :4]], axis=1))
    right = _procrustes(np.concatenate([vt[:1], others_vt[:4]]))
    expected = (left * np.concatenate([s[:1], others_s[:4]])) @ right
    np.testing.assert_allclose(merged_delta("tsv_m", [adapter, matrix]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BOTH)
def test_equal_singular_values_leave_no_choice_to_the_library(name: str) -> None:
    """Any basis of the space of equal singular values is as good as any other, and none shows."""
    hadamard = np.array([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    for matrix in (np.eye(5), hadamard, 0.25 * hadamard, np.kron(hadamard, hadamard)):
        assert merged_delta(name, [matrix]) == pytest.approx(matrix, abs=1e-6)


def test_equal_singular_values_below_the_cut_leave_no_choice_either() -> None:
    left, right = orthonormal(8, 4, 1), orthonormal(8, 4, 2)
    one = 3.0 * left[:, :2] @ right[:, :2].T
    other = 2.0 * left[:, 2:] @ right[:, 2:].T
    np.testing.assert_allclose(merged_delta("tsv_m", [one, other]), one + other, atol=2e-6)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("shape", [(), (1,), (40,)])
def test_vectors_take_the_mean_of_the_deltas(name: str, shape: tuple[int, ...]) -> None:
    base, sources = random_inputs(3, shape)
    weights = (0.5, 1.0, -0.2)
    mean = np.mean(weighted_deltas(base, sources, weights), axis=0)
    result = run(name, Case({"lambda": 2.0}, sources_of(*weights)), base, sources)
    expected = base.double().numpy() + 2 * mean
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", BOTH)
def test_a_convolution_is_the_matrix_of_its_output_channels(name: str) -> None:
    base, sources = random_inputs(2, (8, 3, 2, 2))
    case = Case(sources=sources_of(1.0, 0.5))
    flat = run(name, case, base.view(8, 12), [source.view(8, 12) for source in sources])
    assert torch.equal(run(name, case, base, sources).view(8, 12), flat)


@hypothesis_settings(deadline=None, max_examples=10)
@given(
    name=st.sampled_from(BOTH),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    exponent=st.integers(-40, 10),
)
def test_deltas_of_another_size_give_the_same_merge(
    name: str, rows: int, columns: int, exponent: int
) -> None:
    """No threshold is absolute: deltas times a power of two give the merged delta times that power."""
    deltas = [source.double().numpy() * 2.0**-8 for source in random_inputs(2, (rows, columns))[1]]
    plain, factor = merged_delta(name, deltas), 2.0**exponent
    scaled = merged_delta(name, [delta * factor for delta in deltas]) / factor
    np.testing.assert_allclose(scaled, plain, rtol=1e-4, atol=1e-6 * float(np.abs(plain).max()))


@pytest.mark.parametrize(
    ("name", "weights"), [("iso_c", (0.0, 0.0)), ("iso_c", (1.0, -1.0)), ("tsv_m", (0.0, 0.0))]
)
def test_deltas_that_come_to_nothing_leave_the_base(name: str, weights: tuple[float, float]) -> None:
    base, sources = random_inputs(1, (6, 6))
    result = run(name, Case(sources=sources_of(*weights)), base, [sources[0], sources[0]])
    assert torch.equal(result, base)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("shape", "num_sources"), [((400, 400), 3), ((260, 520), 1)])
def test_memory_of_matrices(name: str, shape: tuple[int, int], num_sources: int) -> None:
    """The kit's shapes are long and flat; decompositions cost most where sides are equal."""
    method = method_named(name)
    settings = make_settings(method, Case(sources=({},) * num_sources), shape)
    base, sources = random_inputs(num_sources, shape)
    tile = Tile(base.flatten(), torch.stack([(source - base).flatten() for source in sources]), 0)
    assert base.numel() > BLOCK
    with AllocationMeter() as meter:
        result = method.kernel.apply(tile, settings, None)
    assert meter.peak_bytes <= 4 * base.numel() * method.scratch + result.nbytes


MATRIX = (48, 30)


UPCYCLE = method_named("upcycle")


def settings_of(shape: tuple[int, ...] = MATRIX, **values: Value) -> Settings:
    return make_settings(UPCYCLE, Case(sources=(values,)), shape)


def made(source: torch.Tensor, **values: Value) -> torch.Tensor:
    return merge(UPCYCLE, settings_of(tuple(source.shape), **values), None, [source])


def source_of(shape: tuple[int, ...] = MATRIX) -> torch.Tensor:
    return random_inputs(1, shape)[1][0]


def changed_lines(source: torch.Tensor, result: torch.Tensor, axis: int) -> list[int]:
    """Numbers of the rows (axis 0) or columns (axis 1) with any change; all of such a line is changed."""
    changed = (source != result).movedim(axis, 0).reshape(source.shape[axis], -1)
    assert torch.equal(changed.any(dim=1), changed.all(dim=1))
    return changed.any(dim=1).nonzero().flatten().tolist()


class TestUpcycle(MethodKit):
    name = "upcycle"
    scales = False
    cases = (
        Case(sources=({},)),
        Case(sources=({"scale": 0.25},), fixes_equal_inputs=False),
        Case(sources=({"noise_scale": 0.02},), fixes_equal_inputs=False),
        Case(sources=({"reinit_fraction": 0.5, "neuron_key": 3},), fixes_equal_inputs=False),
        Case(
            sources=({"reinit_fraction": 0.3, "neuron_axis": 1, "noise_scale": 0.1, "scale": 2.0},),
            fixes_equal_inputs=False,
        ),
        Case(
            sources=({"reinit_fraction": 0.5, "neuron_first": 7, "num_neurons": 200_000},),
            fixes_equal_inputs=False,
        ),
        Case(sources=({"reinit_fraction": 1.0, "scale": -0.5},), fixes_equal_inputs=False),
    )


def test_scale_alone_by_hand() -> None:
    source = torch.tensor([[1.0, -2.0], [0.5, -0.0]])
    assert same_bits(made(source, scale=-4.0), torch.tensor([[-4.0, 8.0], [-2.0, 0.0]]))


def test_a_redrawn_part_of_one_value_keeps_it() -> None:
    """Its deviation is 0, so that the draw is its mean."""
    source = torch.full(MATRIX, 0.75)
    assert same_bits(made(source, reinit_fraction=0.5), source)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_exactly_the_fraction_is_redrawn_and_the_rest_is_left_alone(axis: int, fraction: float) -> None:
    source = source_of()
    for key in range(8):
        result = made(source, reinit_fraction=fraction, neuron_axis=axis, neuron_key=key)
        assert len(changed_lines(source, result, axis)) == round(fraction * MATRIX[axis])


def test_gate_up_and_down_of_one_key_redraw_the_same_neurons() -> None:
    gate, down = source_of((48, 20)), source_of((20, 48))
    neurons = changed_lines(gate, made(gate, reinit_fraction=0.5, neuron_key=9), 0)
    assert neurons == changed_lines(down, made(down, reinit_fraction=0.5, neuron_key=9, neuron_axis=1), 1)
    wider = source_of((48, 33))
    assert neurons == changed_lines(wider, made(wider, reinit_fraction=0.5, neuron_key=9), 0)
    assert neurons != changed_lines(gate, made(gate, reinit_fraction=0.5, neuron_key=10), 0)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_the_neurons_choose_what_the_whole_chooses(axis: int) -> None:
    source = source_of((48, 48))
    whole = changed_lines(source, made(source, reinit_fraction=0.5, neuron_key=4, neuron_axis=axis), axis)
    found = []
    for first in range(0, 48, 12):
        part = source.narrow(axis, first, 12).contiguous()
        values = {"neuron_key": 4, "neuron_axis": axis, "neuron_first": first, "num_neurons": 48}
        result = made(part, reinit_fraction=0.5, **values)
        found += [first + line for line in changed_lines(part, result, axis)]
    assert found == whole


def test_what_is_redrawn_looks_like_what_it_replaces() -> None:
    source = 0.02 * random_inputs(1, (400, 500))[1][0] + 0.1
    result = made(source, reinit_fraction=0.5, neuron_key=1)
    rows = changed_lines(source, result, 0)
    before, after = source[rows].double(), result[rows].double()
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=5 * 0.02 / math.sqrt(100_000))
    assert float(after.std()) == pytest.approx(float(before.std()), rel=0.02)
    correlation = torch.corrcoef(torch.stack((before.flatten(), after.flatten())))[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(100_000)


def test_statistics_are_those_of_the_replaced_part_alone() -> None:
    source = source_of()
    rows = changed_lines(source, made(source, reinit_fraction=0.5), 0)
    others = [row for row in range(MATRIX[0]) if row not in rows]
    changed = source.clone()
    changed[others] = torch.nan
    assert same_bits(made(changed, reinit_fraction=0.5)[rows], made(source, reinit_fraction=0.5)[rows])


@pytest.mark.parametrize(
    ("shape", "axis", "neurons"), [((), 0, 0), ((48,), 1, 0), ((48,), 0, 24), ((48, 3, 5), 1, 2)]
)
def test_shapes_that_are_no_matrix(shape: tuple[int, ...], axis: int, neurons: int) -> None:
    """What has no such axis has no neurons; of a convolution's weight whole slabs are redrawn."""
    source = source_of(shape)
    result = made(source, reinit_fraction=0.5, neuron_axis=axis)
    if neurons:
        assert len(changed_lines(source, result, axis)) == neurons
    else:
        assert same_bits(result, source)


def test_neurons_beyond_their_number_are_refused() -> None:
    with pytest.raises(ValueError, match="the neurons 7 to 54 has more than 48"):
        made(source_of(), reinit_fraction=0.5, neuron_first=7, num_neurons=48)


@pytest.mark.parametrize(
    ("first", "num_neurons", "sentence"),
    [
        (0, 0, None),
        (0, 48, None),
        (12, 48, None),
        (48, 48, "neuron_first is 48 and must be below num_neurons, which is 48"),
        (12, 0, "neuron_first is 12 and must be below num_neurons, which is 0"),
    ],
)
def test_check(first: int, num_neurons: int, sentence: str | None) -> None:
    given_ = settings_of(neuron_first=first, num_neurons=num_neurons)
    assert UPCYCLE.check(given_) == sentence


@pytest.mark.parametrize("wanted", [1, 2, 30_000, 99_999, 100_000])
def test_more_neurons_than_are_held_at_once(wanted: int) -> None:
    assert 2 * PIECE < 100_000
    assert passed(77, 100_000, wanted) == wanted


def passed(key: int, num_neurons: int, wanted: int) -> int:
    """How many of the hashes reach up to the limit."""
    limit = _limit(key, num_neurons, wanted)
    return int((hashed(key, torch.arange(num_neurons)) <= limit).sum())


def test_noise_has_the_deviation_that_is_asked_for_and_hits_every_element() -> None:
    source = torch.zeros(300, 1000)
    noise = made(source, noise_scale=0.02)
    assert float(noise.double().std()) == pytest.approx(0.02, rel=5 / math.sqrt(2 * 300_000))
    assert abs(float(noise.double().mean())) < 5 * 0.02 / math.sqrt(300_000)


def test_noise_is_another_for_each_tensor_and_seed() -> None:
    source, given_ = torch.zeros(200, 50), settings_of((200, 50), noise_scale=1.0)
    names = [(0, "experts.0"), (0, "experts.1"), (1, "experts.0")]
    drawn = [
        merge(UPCYCLE, replace(given_, keys=(random_key(seed, name, 0),)), None, [source]).flatten()
        for seed, name in names
    ]
    matrix = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert float(matrix.abs().max()) < 5 / math.sqrt(10_000)


def test_noise_on_redrawn_neurons_is_not_what_they_were_drawn_from() -> None:
    """The variance of a sum of independent numbers; of one number twice it would be 4."""
    source = random_inputs(1, (300, 300))[1][0]
    source = (source - source.mean()) / source.std()
    result = made(source, reinit_fraction=1.0, noise_scale=1.0)
    assert float(result.double().var()) == pytest.approx(2.0, rel=0.03)


def test_the_key_of_the_neurons_does_not_move_the_noise() -> None:
    source = source_of()
    assert same_bits(made(source, noise_scale=0.1, neuron_key=1), made(source, noise_scale=0.1, neuron_key=2))


@pytest.mark.parametrize(
    ("values", "identity", "access", "passes"),
    [
        ({}, 0, Access.ELEMENT, 0),
        ({"neuron_key": 5, "neuron_axis": 1, "num_neurons": 48}, 0, Access.ELEMENT, 0),
        ({"scale": 0.5}, None, Access.ELEMENT, 0),
        ({"noise_scale": 1e-3}, None, Access.ELEMENT, 0),
        ({"reinit_fraction": 1e-3}, None, Access.TENSOR, 1),
    ],
)
def test_what_the_settings_ask_for(
    values: dict[str, Value], identity: int | None, access: Access, passes: int
) -> None:
    """As the planner asks: before there are keys and shapes."""
    given_ = replace(settings_of((), **values), keys=())
    assert UPCYCLE.identity(given_) == identity
    assert UPCYCLE.access_with(given_) is access
    assert UPCYCLE.kernel.passes(given_) == passes


def test_large_values_do_not_overflow_and_infinite_ones_show() -> None:
    source = torch.full((4, 4), 3e37)
    source[::2] *= -1
    assert bool(made(source, reinit_fraction=1.0).isfinite().all())
    source[1, 1] = torch.inf
    assert not bool(made(source, reinit_fraction=1.0)[1, 1].isfinite())
