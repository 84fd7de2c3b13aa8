"""Methods against their float64 references, in loops and over stored tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.marks import slow_but
from kits.method_kit import (
    CPU,
    Case,
    assert_as_expected,
    expected_of,
    make_settings,
    merge,
    method_named,
    random_inputs,
    run,
    same_bits,
    sources_of,
)
from numpy.typing import NDArray

from raymerge.methods import (
    BLOCK,
    Access,
    Method,
    Settings,
    Stored,
    StoredKernel,
    Takes,
    Tile,
    Value,
    keep_mask,
    sample_of,
    sample_runs,
)
from raymerge.methods.combine import (
    check_shares,
    combine,
    combine_in_torch,
    points_of_arcs,
    points_of_arcs_in_torch,
    shares,
    sum_of_products,
    sum_of_products_in_torch,
    sum_on_base,
    sum_on_base_in_torch,
)
from raymerge.methods.gram import Gram
from raymerge.methods.nearswap import swap_near, swap_near_in_torch
from raymerge.methods.reduce import PIECE, PieceSums, row_grams, row_grams_in_torch
from raymerge.methods.sce import _Statistics
from raymerge.methods.task_arithmetic import agreeing_sum
from raymerge.methods.trim import TrimState

SHAPE = (37, 101)


def assert_agrees(name: str, case: Case, base: torch.Tensor, sources: list[torch.Tensor]) -> None:
    method = method_named(name)
    settings = replace(make_settings(method, case, sources[0].shape), position=0.25)
    result = merge(method, settings, base, sources)
    assert_as_expected(result, expected_of(method, settings, base, sources))


WEIGHTS = [(0.6, 0.3, 0.5), (1.0, -0.4), (0.5, -0.5), (0.7,)]
SETTINGS: list[dict[str, Value]] = [
    {},
    {"normalize": True, "lambda": 0.5},
    {"normalize": False},
    {"rescale": True},
]
GRID: dict[str, tuple[list[dict[str, Value]], list[dict[str, Value]]]] = {
    "task_arithmetic": (SETTINGS, [{}]),
    "ties": (SETTINGS, [{"density": density} for density in (0.0, 0.1, 0.5)]),
    "dare_linear": ([*SETTINGS, {"rescale": False}], [{"density": density} for density in (0.0, 0.1, 0.5)]),
    "dare_ties": ([*SETTINGS, {"rescale": False}], [{"density": density} for density in (0.0, 0.1, 0.5)]),
    **dict.fromkeys(
        ("breadcrumbs", "breadcrumbs_ties"),
        (
            SETTINGS,
            [
                {"density": density, "gamma": gamma}
                for density, gamma in ((0.0, 0.1), (0.3, 0.0), (0.6, 0.1), (0.9, 0.4), (0.5, 1.0), (1.0, 0.2))
            ],
        ),
    ),
    **dict.fromkeys(("della", "della_linear"), (SETTINGS, [{"density": 0.6, "epsilon": 0.25}])),
    "consensus_ta": (
        [{"consensus": 0}, {"consensus": 1, "lambda": 0.8}],
        [{"mask_lambda": limit} for limit in (0.0, 0.4, 1.7)],
    ),
    "lines": ([{}, {"alpha": 0.3, "beta": 0.9}, {"alpha": 0.0, "beta": 0.0}], [{}]),
}


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_of_weighted_deltas(name: str, weights: tuple[float, ...]) -> None:
    base, sources = random_inputs(len(weights), SHAPE)
    for values, own in itertools.product(*GRID[name]):
        assert_agrees(name, Case(values, sources_of(*weights, **own)), base, sources)


SINGLE: dict[str, list[dict[str, Value]]] = {
    "slerp": [{"t": t} for t in (0.0, 0.25, 0.5, 1.0, -0.3, 1.4)],
    "nearswap": [{"t": t} for t in (0.0, 1e-7, 0.001, 0.03, 10.0, -0.5)],
    "arcee_fusion": [{}],
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("distance", [20.0, 1.0, 0.02])
@pytest.mark.parametrize("shape", [SHAPE, (101,), (5, 2), (70, 64)])
def test_of_one_source(name: str, distance: float, shape: tuple[int, ...]) -> None:
    base, [source] = random_inputs(1, shape)
    for values in SINGLE[name]:
        assert_agrees(name, Case(values), base, [base + distance * (source - base)])


SEVERAL: dict[str, list[dict[str, Value]]] = {
    "sce": [{"select_topk": share} for share in (0.0, 0.01, 0.3, 0.6, 0.99, 1.0)],
    "ram": [{"epsilon": epsilon} for epsilon in (0.0, 1e-5, 0.03, 1.0)],
    "ramplus_tl": [{"epsilon": epsilon, "r": 1.5, "alpha": 10.0} for epsilon in (0.0, 1e-5, 0.03, 0.08, 1.0)],
    "model_stock": [{"filter_wise": False}, {"filter_wise": True}],
    "karcher": [{"max_iter": 200, "tol": 1e-9}],
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_of_several_sources(name: str, count: int) -> None:
    base, sources = random_inputs(count, SHAPE)
    sources = [base + (index + 1) * (source - base) for index, source in enumerate(sources)]
    for values in SEVERAL[name]:
        assert_agrees(name, Case(values, ({},) * count), base, sources)


def test_linear_by_hand() -> None:
    sources = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 4.0, -0.5])]
    mean = run("linear", Case(sources=sources_of(1.0, 3.0)), None, sources)
    assert mean.tolist() == [2.5, 2.5, -0.25]
    total = run("linear", Case({"normalize": False}, sources_of(0.5, -1.0)), None, sources)
    assert total.tolist() == [-2.5, -5.0, 0.75]


def test_slerp_by_hand() -> None:
    base, source = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])
    half = run("slerp", Case({"t": 0.5}), base, [source])
    torch.testing.assert_close(half, torch.tensor([math.sqrt(2), 2 * math.sqrt(2)]))
    third = run("slerp", Case({"t": 1 / 3}), base, [source])
    torch.testing.assert_close(third, torch.tensor([math.sqrt(3), 2.0]))


def test_slerp_of_special_tensors() -> None:
    base, [source] = random_inputs(1, SHAPE)
    zero = torch.zeros(SHAPE)
    from_zero = run("slerp", Case({"t": 0.5}), zero, [source])
    torch.testing.assert_close(from_zero, source * math.sin(math.pi / 4))
    assert not bool(run("slerp", Case({"t": 0.5}), zero, [zero]).any())
    opposite = run("slerp", Case({"t": 0.25}), base, [-base])
    torch.testing.assert_close(opposite, base * 0.5)


def test_task_arithmetic_by_hand() -> None:
    base = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sources = [base + torch.tensor([1.0, 0.0, -2.0, 4.0]), base + torch.tensor([0.5, 2.0, 1.0, 4.0])]
    case = Case({"lambda": 2.0}, sources_of(0.5, 0.25))
    assert run("task_arithmetic", case, base, sources).tolist() == [2.25, 3.0, 1.5, 10.0]
    mean = Case({"normalize": True}, sources_of(1.0, 3.0))
    assert run("task_arithmetic", mean, base, sources).tolist() == [1.625, 3.5, 3.25, 8.0]
    cancelling = Case({"normalize": True}, sources_of(1.0, -1.0))
    assert run("task_arithmetic", cancelling, base, sources).tolist() == [1.5, 0.0, 0.0, 4.0]


def test_ties_by_hand() -> None:
    """Density 0.5 of six keeps three: (4, -3, 2) of the first, (-5, 3, 4) of the second delta."""
    base = torch.full((6,), 10.0)
    first = base + torch.tensor([4.0, -3.0, 2.0, 1.0, 0.5, 0.0])
    second = base + torch.tensor([-5.0, 1.0, 3.0, 0.0, 0.25, 4.0])
    sources = sources_of(1.0, 1.0, density=0.5)
    elected = run("ties", Case({"normalize": False}, sources), base, [first, second])
    assert elected.tolist() == [5.0, 7.0, 15.0, 10.0, 10.0, 14.0]
    normalised = run("ties", Case({"lambda": 2.0}, sources), base, [first, second])
    assert normalised.tolist() == [0.0, 4.0, 15.0, 10.0, 10.0, 18.0]


def test_ties_keeps_as_many_of_the_tied_as_make_up_the_density() -> None:
    num_elements = 4 * BLOCK
    delta = torch.where(torch.arange(num_elements) % 4 == 0, 3.0, -1.0)
    case = Case({"normalize": False}, sources_of(1.0, density=0.5))
    result = run("ties", case, torch.zeros(num_elements), [delta])
    assert bool((result[::4] == 3.0).all())
    tied = (result != 0).view(-1, 4)[:, 1:]
    assert float(tied.double().mean()) == pytest.approx(1 / 3, abs=0.005)
    quarters = tied.double().view(4, -1).mean(dim=1)
    assert float((quarters - 1 / 3).abs().max()) < 0.01


def test_ties_keeps_the_largest_of_a_tensor_that_is_too_small_for_the_density() -> None:
    delta = torch.tensor([1.0, -4.0, 2.0])
    for density, kept in ((0.001, [0.0, -4.0, 0.0]), (0.0, [0.0, 0.0, 0.0])):
        case = Case({"normalize": False}, sources_of(1.0, density=density))
        assert run("ties", case, torch.zeros(3), [delta]).tolist() == kept
        assert_agrees("ties", case, torch.zeros(3), [delta])


def test_ties_chooses_among_equals_by_source_not_alike() -> None:
    delta = torch.ones(BLOCK)
    case = Case({"normalize": False}, sources_of(1.0, 1.0, density=0.5))
    result = run("ties", case, torch.zeros(BLOCK), [delta, delta])
    assert set(result.tolist()) == {0.0, 1.0, 2.0}


def test_ties_keeps_a_zero_threshold_whole() -> None:
    delta = torch.tensor([0.0, 2.0, 0.0, 0.0])
    case = Case({"normalize": False}, sources_of(1.0, density=0.75))
    assert run("ties", case, torch.ones(4), [1 + delta]).tolist() == [1.0, 3.0, 1.0, 1.0]


def test_ties_a_vote_of_zero_is_positive_and_a_negative_weight_turns_a_vote() -> None:
    base = torch.zeros(2)
    one, other = torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 2.0])
    even = run("ties", Case({"normalize": False}, sources_of(1.0, 1.0)), base, [one, other])
    assert even.tolist() == [1.0, 5.0]
    turned = run("ties", Case({"normalize": False}, sources_of(1.0, -1.0)), base, [one, other])
    assert turned.tolist() == [2.0, 3.0]


def test_weights_of_a_negative_sum_are_divided_by_it() -> None:
    case = Case({"normalize": True}, sources_of(-1.0, -3.0))
    sources = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])]
    assert run("task_arithmetic", case, torch.zeros(2), sources).tolist() == [2.5, 2.0]


def test_on_devices_terms_of_the_elected_sign_are_divided_by_their_weights() -> None:
    terms = torch.tensor([[1.0, 1.0, -2.0], [-1.0, 2.0, 1.0]])

    def term(index: int, out: torch.Tensor) -> None:
        out.copy_(terms[index])

    merged = agreeing_sum(terms.sum(0), term, (1.0, 3.0), normalize=True)
    assert merged.tolist() == [1.0, 0.75, -2.0]


@pytest.mark.parametrize("cosine", [-0.96, -0.6])
def test_model_stock_of_deltas_that_nearly_cancel(cosine: float) -> None:
    deltas = [torch.tensor([1.0, 0.0]), torch.tensor([cosine, math.sqrt(1 - cosine**2)])]
    share = 2 * cosine / (1 + cosine)
    expected = [share * (1 + cosine) / 2, share * math.sqrt(1 - cosine**2) / 2]
    case = Case({"filter_wise": False}, ({}, {}))
    assert run("model_stock", case, torch.zeros(2), deltas).tolist() == pytest.approx(expected, rel=1e-4)


def test_dare_by_hand() -> None:
    base, delta = torch.full((64,), 8.0), torch.full((64,), 0.5)
    case = Case(sources=sources_of(1.0, density=0.25))
    result = run("dare_linear", case, base, [base + delta])
    key = make_settings(method_named("dare_linear"), case).keys[0]
    assert result.tolist() == [10.0 if kept else 8.0 for kept in keep_mask(key, 0, 64, 0.25, CPU)]


def test_dare_ties_by_hand() -> None:
    """Where the second delta is dropped the first wins; elsewhere the larger one does."""
    base = torch.zeros(64)
    case = Case({"rescale": False}, (*sources_of(1.0), *sources_of(1.0, density=0.5)))
    result = run("dare_ties", case, base, [torch.full((64,), 1.0), torch.full((64,), -3.0)])
    key = make_settings(method_named("dare_ties"), case).keys[1]
    assert result.tolist() == [-3.0 if kept else 1.0 for kept in keep_mask(key, 0, 64, 0.5, CPU)]


SPECIAL = (0.0, -0.0, 1e-45, -3e-39, 1e-38, 3.4e38, -3.4e38, 1e20, float("nan"), float("inf"), -float("inf"))
LENGTHS = (0, 1, 2, 15, 16, 17, 255, 256, 257, 1023, 1025, 4096, PIECE - 1, PIECE, 2 * PIECE + 300)

any_length = st.sampled_from(LENGTHS)
any_seed = st.integers(0, 1000)
any_factor = st.sampled_from((0.0, -0.0, 1.0, -1.0, 0.3, -0.7, 1 / 3, 2.5, 1e-30, 1e39, float("nan")))
some = settings(deadline=None, max_examples=30)


def vectors(count: int, length: int, seed: int) -> torch.Tensor:
    """A matrix whose rows may lie apart, some of them alike; every third one has special elements."""
    generator = np.random.default_rng((seed, count, length))
    apart = seed % 4
    elements = generator.standard_normal((count, length + apart)).astype(np.float32)
    if seed % 2:
        elements[1:] = elements[:1] + generator.integers(0, 2, (max(0, count - 1), 1)) * elements[1:]
    if seed % 3 == 0:
        places = generator.random(elements.shape) < 0.2
        elements[places] = generator.choice(np.array(SPECIAL, np.float32), int(places.sum()))
    if seed % 5 == 0:
        with np.errstate(all="ignore"):
            elements *= np.float32(1e-38)
    return torch.from_numpy(elements)[:, :length]


def vector(length: int, seed: int) -> torch.Tensor:
    return vectors(1, length, 7 * seed + 1)[0].contiguous()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, where one NaN is as good as another."""
    assert left.dtype == right.dtype
    bits = torch.int32 if left.dtype is torch.float32 else torch.int64
    equal = left.contiguous().view(bits) == right.contiguous().view(bits)
    return left.shape == right.shape and bool((equal | (left.isnan() & right.isnan())).all())


def same_numbers(left: npt.NDArray[np.float64] | float, right: npt.NDArray[np.float64] | float) -> bool:
    return same(torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))


@some
@given(length=any_length, seed=any_seed, total=st.sampled_from((0.0, 1.5, -1e30)))
def test_sums_of_one_and_of_two(length: int, seed: int, total: float) -> None:
    left, right = vectors(2, length, seed)
    found, expected = PieceSums(5), PieceSums(5)
    for each in (found, expected):
        each.totals[:] = total, 0.0, 2.0, total, total
    found.add_pair(left, right)
    found.add_values(3, left)
    found.add_squares(4, left)
    for place, pair in enumerate(((left, left), (left, right), (right, right), (left, None), (left, left))):
        expected.add_in_torch(place, *pair)
    assert same_numbers(found.totals, expected.totals)


@some
@given(count=st.integers(0, 9), length=any_length, seed=any_seed, with_origin=st.booleans())
def test_inner_products(count: int, length: int, seed: int, with_origin: bool) -> None:
    """Of nine vectors there are more products than are in work at once."""
    matrix, origin = vectors(count, length, seed), vector(length, seed) if with_origin else None
    found, expected = Gram(count), Gram(count)
    for _ in range(2):
        found.add(matrix, origin)
        expected.add_in_torch(matrix, origin)
    assert same_numbers(found.products, expected.products)


SHAPES = ((0, 5), (5, 1), (16, 4), (33, 16), (7, 257), (40, 100), (3, PIECE + 20), (1, 3000))


@some
@given(shape=st.sampled_from(SHAPES), count=st.integers(1, 4), seed=any_seed, with_origin=st.booleans())
def test_rows(shape: tuple[int, int], count: int, seed: int, with_origin: bool) -> None:
    length = shape[0] * shape[1]
    matrix, origin = vectors(count, length, seed), vector(length, seed) if with_origin else None
    found = row_grams(matrix, origin, shape[1])
    assert found.shape == (count * (count + 1) // 2, shape[0])
    assert same(found, row_grams_in_torch(matrix, origin, shape[1]))


@some
@given(factors=st.lists(any_factor, min_size=1, max_size=6), length=any_length, seed=any_seed)
def test_sums_of_products(factors: list[float], length: int, seed: int) -> None:
    matrix = vectors(len(factors), length, seed)
    assert same(sum_of_products(matrix, factors), sum_of_products_in_torch(matrix, factors))


@some
@given(
    factors=st.lists(any_factor, min_size=1, max_size=4), factor=any_factor, length=any_length, seed=any_seed
)
def test_sums_on_the_base(factors: list[float], factor: float, length: int, seed: int) -> None:
    tile = Tile(vector(length, seed), vectors(len(factors), length, seed), 0)
    assert same(sum_on_base(tile, factors, factor), sum_on_base_in_torch(tile, factors, factor))


@some
@given(shape=st.sampled_from(SHAPES), count=st.integers(1, 3), seed=any_seed)
def test_sums_on_the_base_with_a_factor_for_each_row(shape: tuple[int, int], count: int, seed: int) -> None:
    length = shape[0] * shape[1]
    tile = Tile(vector(length, seed), vectors(count, length, seed), 0)
    factors = vector(shape[0], seed + 1).double()
    coefficients = (1.0, 0.5, -2.0)[:count]
    assert same(sum_on_base(tile, coefficients, factors), sum_on_base_in_torch(tile, coefficients, factors))


@some
@given(
    factors=st.lists(any_factor, min_size=1, max_size=6),
    length=any_length,
    seed=any_seed,
    with_origin=st.booleans(),
)
def test_combinations(factors: list[float], length: int, seed: int, with_origin: bool) -> None:
    matrix, origin = vectors(len(factors), length, seed), vector(length, seed) if with_origin else None
    for coefficients in (tuple(factors), (1 / len(factors),) * len(factors)):
        found = combine(matrix, coefficients, origin)
        assert same(found, combine_in_torch(matrix, coefficients, origin))


@some
@given(shape=st.sampled_from(SHAPES), seed=any_seed, with_origin=st.booleans())
def test_points_of_arcs(shape: tuple[int, int], seed: int, with_origin: bool) -> None:
    length = shape[0] * shape[1]
    start, other = vectors(2, length, seed)
    origin = vector(length, seed) if with_origin else None
    factors = vectors(2, shape[0], seed + 1).contiguous()
    factors[0, ::2] = 0.0
    found = points_of_arcs(start, other, origin, factors)
    assert same(found, points_of_arcs_in_torch(start, other, origin, factors))


@some
@given(length=any_length, seed=any_seed, t=st.sampled_from((0.0, 0.03, 0.5, -0.1, 1e-6, 1e38)))
def test_swaps(length: int, seed: int, t: float) -> None:
    base, source = vectors(2, length, seed)
    source = torch.where(base.abs() > 0.3, base + 0.05 * source, source)
    assert same(swap_near(base, source, t), swap_near_in_torch(base, source, t))


def weighted(*weights: float, normalize: bool = True) -> Settings:
    return Settings({"normalize": normalize}, tuple({"weight": weight} for weight in weights))


@pytest.mark.parametrize("weights", [(0.3,), (0.3, -0.7), (0.1, 0.2, 0.3, 0.4)])
def test_every_product_and_every_sum_is_rounded(weights: tuple[float, ...]) -> None:
    _, sources = random_inputs(len(weights), (70_001,))
    expected = sources[0] * weights[0]
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        expected = expected + source * weight
    vectors = torch.stack(sources)
    assert same_bits(sum_of_products(vectors, weights), expected)
    assert same_bits(vectors, torch.stack(sources))


@pytest.mark.parametrize(("weights", "factor"), [((0.3,), 1.0), ((0.3, -0.7), 0.4), ((0.1, 0.2, 0.3), -2.0)])
def test_a_sum_is_added_to_the_base(weights: tuple[float, ...], factor: float) -> None:
    base, deltas = random_inputs(len(weights), (70_001,))
    tile = Tile(base, torch.stack(deltas), 0)
    expected = base + sum_of_products(tile.sources, weights) * factor
    assert same_bits(sum_on_base(tile, weights, factor), expected)
    rows = torch.tensor([factor, 0.25, 3.0], dtype=torch.float64)
    part = Tile(base[:69_999], tile.sources[:, :69_999], 0)
    by_rows = base[:69_999] + (
        sum_of_products(part.sources, weights).view(3, -1) * rows.float().unsqueeze(1)
    ).view(-1)
    assert same_bits(sum_on_base(part, weights, rows), by_rows)


@pytest.mark.parametrize("factor", [0.0, 1.0, -1.0])
def test_where_the_sum_is_0_the_base_keeps_its_bits(factor: float) -> None:
    base = torch.tensor([-0.0, 0.0, 1.0])
    for zero in (0.0, -0.0):
        tile = Tile(base, torch.full((2, 3), zero), 0)
        assert same_bits(sum_on_base(tile, (0.5, -0.5), factor), base)
        assert same_bits(sum_on_base_in_torch(tile, (0.5, -0.5), factor), base)


@settings(deadline=None, max_examples=25)
@given(weights=st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=6))
def test_shares_sum_to_1_or_are_refused(weights: list[float]) -> None:
    given_ = weighted(*weights)
    if check_shares(given_, normalize="normalize") is None:
        found = shares(given_, normalize="normalize")
        assert math.fsum(found) == pytest.approx(1.0, abs=1e-15 * math.fsum(map(abs, found)))
    else:
        assert abs(math.fsum(weights)) <= 1e-8 * math.fsum(map(abs, weights))


Words = NDArray[np.uint16]
STORED_SPECIAL = (0.0, -0.0, 1e-40, -3e-39, 1e-38, 3.3e38, -3.3e38, float("nan"), float("inf"), -float("inf"))
COUNTS = (0, 1, 77, 1023, 16_384, 16_401, BLOCK - 1, BLOCK, 2 * BLOCK + 4099)
STORED_WEIGHTS = (0.3, 0.9, 0.05, 1.25, 0.7, 0.2, 1.0, 0.45, 0.6)
GUARD = 0x1234


@dataclass(frozen=True)
class Trial:
    """A method and its global settings; where they are None, they are drawn."""

    name: str
    values: dict[str, Value] | None
    least: int = 1
    most: int = 9
    has_base: bool = True

    @property
    def method(self) -> Method:
        return method_named(self.name)

    def kernel(self, settings: Settings) -> StoredKernel:
        found = self.method.kernel_with(settings)
        assert isinstance(found, StoredKernel)
        return found

    def settings(self, num_sources: int, seed: int, shape: tuple[int, ...]) -> Settings:
        generator = np.random.default_rng(seed)
        names = {p.name for p in self.method.parameters if p.scope == "source"}
        sources = []
        for weight in STORED_WEIGHTS[:num_sources]:
            if self.values is None:
                weight = float(generator.choice([0.5, 1.0, -0.3]))
            density = float(generator.choice([0.0, 0.2, 0.37, 0.8, 1.0])) if seed % 7 != 6 else 1.0
            given_ = {"weight": weight, "density": density}
            sources.append({name: value for name, value in given_.items() if name in names})
        values = self.values
        if values is None:
            drawn = {
                "normalize": bool(seed % 2),
                "rescale": bool(seed // 2 % 2),
                "lambda": 0.7 if seed % 3 else 1.0,
                "select_topk": (1.0, 0.3, 0.0, 0.05)[seed % 4],
            }
            values = {name: value for name, value in drawn.items() if self.method.parameter(name) is not None}
        return make_settings(self.method, Case(values, tuple(sources)), shape)


COMBINED = (
    Trial("linear", {}, has_base=False),
    Trial("linear", {"normalize": False}, has_base=False),
    Trial("task_arithmetic", {}),
    Trial("task_arithmetic", {"normalize": True}),
    Trial("lines", {"alpha": 0.4, "beta": 0.3}),
    Trial("slerp", {"t": 0.3}, most=1),
    Trial("slerp", {"t": 0.8}, most=1),
    Trial("slerp_delta", {"t": 0.3}, 2, 2),
    Trial("nuslerp", {}, 2, 2),
    Trial("nuslerp", {}, 2, 2, has_base=False),
    Trial("multislerp", {}),
    Trial("multislerp", {}, has_base=False),
    Trial("karcher", {}, has_base=False),
    Trial("model_stock", {}, 2),
    Trial("geometric_median", {}, has_base=False),
    Trial("nearswap", {"t": 0.02}, most=1),
)
SPARSIFIED = tuple(
    Trial(name, None)
    for name in (
        *("ties", "breadcrumbs", "breadcrumbs_ties", "sce"),
        *("dare_linear", "dare_ties", "della", "della_linear"),
    )
)
every_trial = pytest.mark.parametrize("trial", [*COMBINED, *SPARSIFIED], ids=lambda each: each.name)


def stored_inputs(num_inputs: int, count: int, seed: int) -> Stored:
    """Elements near the first input's, some special or the same, at odd places of one array, in any order."""
    generator = np.random.default_rng((seed, num_inputs, count))
    values = generator.standard_normal((num_inputs, count)).astype(np.float32)
    values[1:] = values[:1] + np.float32(0.05) * values[1:]
    values[1:][generator.random((num_inputs - 1, count)) < 0.1] = -0.0
    if seed % 3 == 0:
        chosen = generator.random(values.shape) < 0.01
        values[chosen] = generator.choice(np.array(STORED_SPECIAL, np.float32), int(chosen.sum()))
    if seed % 5 == 0:
        values *= np.float32(1e-38)
    gap = count + 2 * (seed % 4) + 1
    words = np.full(num_inputs * gap + 3, GUARD, np.uint16)
    places = 3 + gap * generator.permutation(num_inputs).astype(np.int64)
    for place, row in zip(places, values, strict=True):
        words[place : place + count] = words_of(torch.from_numpy(row))
    return Stored(words, places, count, 0)


def words_of(values: torch.Tensor) -> Words:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def piece_of(trial: Trial, stored: Stored, first: int, count: int) -> Tile:
    """Some of the elements in float32, as the executor makes them."""
    rows = np.stack([stored.part(first, count).input(index) for index in range(len(stored.places))])
    values = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).float()
    if not trial.has_base:
        return Tile(None, values, first)
    sources = values[1:] - values[:1] if trial.method.takes is Takes.DELTAS else values[1:]
    return Tile(values[0].clone(), sources, first)


def pieces(count: int, step: int) -> Iterator[tuple[int, int]]:
    yield from ((first, min(step, count - first)) for first in range(0, count, step))


def gathered(trial: Trial, given_: Settings, stored: Stored, step: int, *, at_once: bool) -> Any:
    """The state after all passes over tiles of ``step`` elements, in one of the two ways."""
    method, kernel = trial.method, trial.kernel(given_)
    if not kernel.passes(given_):
        return None
    state = kernel.begin(given_, stored.count, CPU)
    if method.sampler is not None and sample_runs(stored.count):
        method.sampler(state, sample_of(piece_of(trial, stored, 0, stored.count)), given_)
    for index in itertools.count():
        for first, count in pieces(stored.count, step):
            if at_once:
                kernel.observe_stored(state, stored.part(first, count), given_, index)
            else:
                kernel.observe(state, piece_of(trial, stored, first, count), given_, index)
        more = kernel.conclude(state, given_, index)
        if not more and index + 1 >= kernel.passes(given_):
            return state
    raise AssertionError


def known(state: Any) -> str:
    """All that the passes of a method found out that selects."""
    if isinstance(state, TrimState):
        found = [selection for pair in state.found for selection in pair or ()]
        return repr([(each.threshold, each.tied_share, each.sum_all, each.sum_kept) for each in found])
    return (
        repr((state.squares.totals, int(state.num_differing), state.cut))
        if isinstance(state, _Statistics)
        else ""
    )


def same_words(left: Words, right: Words) -> bool:
    """The same bits, where one NaN is as good as another."""
    both_nan = ((left & 0x7FFF) > 0x7F80) & ((right & 0x7FFF) > 0x7F80)
    return left.shape == right.shape and bool(((left == right) | both_nan).all())


def assert_same(trial: Trial, given_: Settings, stored: Stored, num_steps: int, cuts: list[float]) -> None:
    """In tiles of several steps, the result in parts that begin anywhere, or at rows."""
    kernel, method = trial.kernel(given_), trial.method
    unit = method.granule(given_) if method.access is Access.ROW else 1
    step = unit * -(-BLOCK // unit)
    words, length = stored.words.copy(), given_.row_length if method.access is Access.ROW else 1
    state = gathered(trial, given_, stored, step, at_once=False)
    parts = [
        kernel.apply(piece_of(trial, stored, *each), given_, state) for each in pieces(stored.count, step)
    ]
    expected = np.concatenate([np.empty(0, np.uint16), *map(words_of, parts)])
    other = gathered(trial, given_, stored, num_steps * step, at_once=True)
    out = np.full(stored.count + 2, GUARD, np.uint16)
    marked, again = kernel.marked(stored, given_, other), np.empty(stored.count, np.uint16)
    bounds = sorted({0, stored.count, *(int(cut * stored.count) // length * length for cut in cuts)})
    for begin, end in itertools.pairwise(bounds):
        part = stored.part(begin, end - begin)
        kernel.apply_stored(part, given_, other, out[1 + begin : 1 + end])
        kernel.apply_stored(marked.part(begin, end - begin), given_, other, again[begin:end])
    assert known(other) == known(state)
    assert same_words(out[1:-1], expected)
    assert same_words(again, expected)
    assert out[0] == out[-1] == GUARD
    assert np.array_equal(stored.words, words)
    kernel.apply_stored(stored.part(0, 0), given_, other, out[:0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("trial", slow_but([*COMBINED, *SPARSIFIED], *COMBINED[::3], *SPARSIFIED[::3]))
@hypothesis_settings(deadline=None, max_examples=10)
@given(data=st.data(), count=st.sampled_from(COUNTS), seed=st.integers(0, 200), tiles=st.integers(1, 3))
def test_stored_tiles_give_the_bits_of_pieces(
    trial: Trial, data: st.DataObject, count: int, seed: int, tiles: int
) -> None:
    # Few numbers, for each of which some loops are compiled anew.
    num_sources = data.draw(
        st.sampled_from([n for n in (1, 3, 9) if trial.least <= n <= trial.most] or [trial.least])
    )
    length = (1, 7, 100, 20_000)[seed % 4] if trial.method.access is Access.ROW else 1
    stored = stored_inputs(num_sources + trial.has_base, count // length * length, seed)
    shape = (stored.count // length, length) if length > 1 else (stored.count,)
    cuts = data.draw(st.lists(st.floats(0, 1), max_size=3))
    assert_same(trial, trial.settings(num_sources, seed, shape), stored, tiles, cuts)


@every_trial
def test_inputs_that_agree_keep_their_bits(trial: Trial) -> None:
    num_sources = min(trial.most, 3)
    one = stored_inputs(1, 4096, 2)
    stored = replace(one, places=one.places[[0] * (num_sources + trial.has_base)])
    given_ = trial.settings(num_sources, 3, (64, 64))
    out = np.empty(4096, np.uint16)
    state = gathered(trial, given_, stored, BLOCK, at_once=True)
    trial.kernel(given_).apply_stored(stored, given_, state, out)
    if trial.values != {"normalize": False}:
        assert np.array_equal(out, one.input(0))


@pytest.mark.parametrize(
    ("name", "values"), [("nuslerp", {"nuslerp_flatten": False}), ("model_stock", {"filter_wise": True})]
)
def test_vectors_within_a_matrix_take_pieces(name: str, values: dict[str, Value]) -> None:
    given_ = Trial(name, values).settings(2, 0, (8, 16))
    assert not isinstance(method_named(name).kernel_with(given_), StoredKernel)
