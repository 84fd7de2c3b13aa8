"""Methods on arcs between models, and those that seek a middle."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.method_kit import (
    FEW_BYTES,
    Case,
    MethodKit,
    merge,
    method_named,
    random_inputs,
    run,
    same_bits,
    settings_for,
    sources_of,
)
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Access, BaseUse, Method, Value

SHAPE = (37, 101)
FLAT: dict[str, Value] = {}
ROWS: dict[str, Value] = {"nuslerp_flatten": False}
COLUMNS: dict[str, Value] = {"nuslerp_flatten": False, "nuslerp_row_wise": True}
MODES = [FLAT, ROWS, COLUMNS]


class TestNuslerp(MethodKit):
    name = "nuslerp"
    cases = (
        Case(FLAT, sources_of(1.0, -1.0)),
        Case(FLAT, sources_of(0.0, 2.0)),
        Case(FLAT, sources_of(-0.5, 2.0)),
        Case(ROWS, sources_of(0.7, 0.3)),
    )


class TestNuslerpWithoutABase(MethodKit):
    name = "nuslerp"
    cases = tuple(Case(values, sources_of(0.7, 0.3)) for values in (FLAT, ROWS))

    def method(self) -> Method:
        return replace(method_named("nuslerp"), base=BaseUse.UNUSED)


class TestNuslerpOfRowsAndColumns(MethodKit):
    name = "nuslerp"
    cases = (Case(ROWS, sources_of(1.0, -1.0)), Case(COLUMNS, sources_of(-0.5, 2.0)))


def test_nuslerp_by_hand() -> None:
    first, second = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[0.0, 4.0], [0.0, 3.0]])
    rows = run("nuslerp", Case(ROWS, sources_of(1.0, 1.0)), None, [first, second])
    torch.testing.assert_close(rows, torch.tensor([[math.sqrt(2), 2 * math.sqrt(2)], [0.0, 3.0]]))
    columns = run("nuslerp", Case(COLUMNS, sources_of(1.0, 1.0)), None, [first.T, second.T])
    torch.testing.assert_close(columns, rows.T)


@pytest.mark.parametrize("shape", [(40,), (1,), ()])
def test_nuslerp_of_a_vector_is_the_same_in_every_mode(shape: tuple[int, ...]) -> None:
    base, sources = random_inputs(2, shape)
    results = [run("nuslerp", Case(values, sources_of(0.6, 0.4)), base, sources) for values in MODES]
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", [(6, 3, 5), (1, 4, 5_000), (4, 3, 2, 2), (0, 3, 4)])
def test_nuslerp_along_the_first_of_many_dimensions(shape: tuple[int, ...]) -> None:
    base, sources = random_inputs(2, shape)
    result = run("nuslerp", Case(COLUMNS, sources_of(0.6, 0.4)), base, sources)
    as_matrix = [tensor.reshape(shape[0], math.prod(shape[1:])) for tensor in (base, *sources)]
    expected = run("nuslerp", Case(COLUMNS, sources_of(0.6, 0.4)), as_matrix[0], as_matrix[1:])
    assert same_bits(result, expected.reshape(shape))


def test_nuslerp_takes_what_its_vectors_need() -> None:
    method = method_named("nuslerp")
    found = {
        (index, len(shape)): (method.access_with(given_), method.kernel_with(given_).passes(given_))
        for index, values in enumerate(MODES)
        for shape in ((5,), (5, 6), (5, 6, 7))
        for given_ in [settings_for("nuslerp", Case(values, sources_of(1, 1)), shape)]
    }
    one, row = (Access.TENSOR, 1), (Access.ROW, 0)
    assert [found[0, dims] for dims in (1, 2, 3)] == [one, one, one]
    assert [found[1, dims] for dims in (1, 2, 3)] == [one, row, row]
    assert [found[2, dims] for dims in (1, 2, 3)] == [one, (Access.ROW, 1), (Access.MATRIX, 0)]


@pytest.mark.parametrize("values", MODES)
def test_nuslerp_ends_at_either_source_to_the_last_bit(values: dict[str, Value]) -> None:
    base, sources = random_inputs(2, SHAPE)
    for start in (None, base):
        assert same_bits(run("nuslerp", Case(values, sources_of(1.0, 0.0)), start, sources), sources[0])
        assert same_bits(run("nuslerp", Case(values, sources_of(0.0, 0.4)), start, sources), sources[1])


@pytest.mark.parametrize("values", MODES)
def test_nuslerp_of_opposite_tensors_is_the_straight_line(values: dict[str, Value]) -> None:
    """mergekit divides by the sine of nearly pi: what it writes is rounding."""
    _, [source] = random_inputs(1, SHAPE)
    result = run("nuslerp", Case(values, sources_of(0.75, 0.25)), None, [source, -3 * source])
    assert bool(result.abs().max() < 1e-6)
    result = run("nuslerp", Case(values, sources_of(0.75, 0.25)), None, [source, -source])
    torch.testing.assert_close(result, 0.5 * source)


def test_nuslerp_of_vectors_of_zeros() -> None:
    _, [source] = random_inputs(1, SHAPE)
    zero = torch.zeros(SHAPE)
    case = Case(ROWS, sources_of(0.5, 0.5))
    torch.testing.assert_close(run("nuslerp", case, None, [zero, source]), source * math.sqrt(0.5))
    assert same_bits(run("nuslerp", case, None, [zero, zero]), zero)


@pytest.mark.parametrize(("weights", "t"), [((1e-9, 3e-9), 0.75), ((1.0, -1.0), 0.5), ((0.0, 0.0), 0.5)])
def test_nuslerp_weights_count_by_their_ratio(weights: tuple[float, float], t: float) -> None:
    _, sources = random_inputs(2, SHAPE)
    expected = run("nuslerp", Case(sources=sources_of(1 - t, t)), None, sources)
    torch.testing.assert_close(run("nuslerp", Case(sources=sources_of(*weights)), None, sources), expected)


@pytest.mark.slow
@pytest.mark.parametrize("values", [ROWS, COLUMNS])
@pytest.mark.parametrize("shape", [(BLOCK, 1), pytest.param((2, BLOCK // 2, 1), marks=pytest.mark.slow)])
def test_the_numbers_of_many_vectors_stay_within_the_declaration(
    shape: tuple[int, ...], values: dict[str, Value]
) -> None:
    """In tensors and in Python's objects, which the kit's meter does not see."""
    method, case = method_named("nuslerp"), Case(values, sources_of(0.7, 0.3))
    settings = settings_for("nuslerp", case, shape)
    base, sources = random_inputs(2, shape)
    nbytes, columns = (
        4 * base.numel(),
        settings.row_length if method.kernel_with(settings).passes(settings) else 0,
    )
    scratch = method.scratch * max(nbytes, 4 * BLOCK) + 2 * columns * method.state_bytes_per_column
    # ``merge`` makes four tensors: the matrix of both sources, the tile's result, what results are joined to.
    with AllocationMeter() as tensors:
        merge(method, settings, base, sources)
    tracemalloc.start()
    merge(method, settings, base, sources)
    objects = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tensors.peak_bytes - 4 * nbytes + objects <= scratch + FEW_BYTES
    assert objects < 4 * BLOCK * 2


class TestMultislerp(MethodKit):
    name = "multislerp"
    cases = (
        Case(sources=sources_of(0.5, 0.3, 0.4)),
        Case({"normalize_weights": False}, sources_of(0.5, 0.9), fixes_equal_inputs=True),
        Case({"eps": 1e-5}, sources_of(0.7, 0.4, -0.2, 0.1)),
        Case(sources=sources_of(0.3)),
        Case({"normalize_weights": False}, sources_of(0.3)),
    )


class TestMultislerpWithoutABase(MethodKit):
    name = "multislerp"
    cases = (
        Case(sources=sources_of(0.5, 0.3, 0.4)),
        Case({"normalize_weights": False}, sources_of(0.5, 0.9), fixes_equal_inputs=False),
        Case(sources=sources_of(0.3)),
    )

    def method(self) -> Method:
        return replace(method_named("multislerp"), base=BaseUse.UNUSED)


def test_multislerp_by_hand() -> None:
    """Directions (1, 0) and (0, 1) have the mean direction (1, 1); norms 2 and 4 have the mean 3."""
    sources = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    result = run("multislerp", Case(sources=sources_of(1.0, 1.0)), None, sources)
    torch.testing.assert_close(result, torch.full((2,), 3 / math.sqrt(2)))


def test_multislerp_of_one_changed_among_unchanged() -> None:
    base, [source] = random_inputs(1, SHAPE)
    result = run("multislerp", Case(sources=sources_of(1.0, 1.0, 2.0)), base, [base, base, source])
    torch.testing.assert_close(result, base + 0.5 * (source - base))


def test_multislerp_of_directions_that_cancel_is_the_weighted_sum() -> None:
    square = [torch.tensor(v) for v in ([1.0, 0.0], [-2.0, 0.0], [0.0, 3.0], [0.0, -4.0])]
    result = run("multislerp", Case({"normalize_weights": False}, sources_of(1, 1, 1, 1)), None, square)
    assert result.tolist() == [-1.0, -1.0]


def test_multislerp_weights_that_cancel_cannot_be_normalised() -> None:
    method = method_named("multislerp")
    cancelling = sources_of(1.0, -1.0)
    assert method.check(settings_for("multislerp", Case(sources=cancelling))) == (
        "the weights sum to 0, so they cannot be normalised"
    )
    assert method.check(settings_for("multislerp", Case({"normalize_weights": False}, cancelling))) is None
    assert method.check(settings_for("multislerp", Case(sources=sources_of(0.0)))) is None


class TestKarcher(MethodKit):
    name = "karcher"
    cases = (
        Case(sources=({}, {}, {})),
        Case({"max_iter": 100, "tol": 1e-9}, ({}, {})),
        Case({"max_iter": 0}, ({}, {})),
        Case(sources=({},)),
    )


def test_karcher_by_hand() -> None:
    """Of two directions the middle one; of three on a circle at 0, 30 and 90 degrees the one at 40."""
    sources = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    torch.testing.assert_close(
        run("karcher", Case(sources=({}, {})), None, sources), torch.full((2,), 3 / math.sqrt(2))
    )
    degrees = [torch.tensor([math.cos(math.radians(a)), math.sin(math.radians(a))]) for a in (0, 30, 90)]
    expected = torch.tensor([math.cos(math.radians(40)), math.sin(math.radians(40))])
    torch.testing.assert_close(run("karcher", Case(sources=({},) * 3), None, degrees), expected)


def test_karcher_of_a_tensor_and_zeros_is_half_the_tensor() -> None:
    _, [source] = random_inputs(1, SHAPE)
    result = run("karcher", Case(sources=({}, {})), None, [source, torch.zeros(SHAPE)])
    torch.testing.assert_close(result, 0.5 * source)


def test_karcher_of_zeros_is_zeros() -> None:
    zeros = torch.zeros(SHAPE)
    assert same_bits(run("karcher", Case(sources=({}, {}, {})), None, [zeros] * 3), zeros)


def test_karcher_of_opposite_tensors_takes_the_first() -> None:
    _, [source] = random_inputs(1, SHAPE)
    result = run("karcher", Case(sources=({}, {})), None, [source, -3 * source])
    torch.testing.assert_close(result, 2 * source)


class TestSlerpDelta(MethodKit):
    name = "slerp_delta"
    is_symmetric = False
    cases = (
        Case({"t": 0.4}, ({}, {})),
        Case({"t": 1.3, "lambda": 0.5}, ({}, {})),
        Case({"t": 0.0}, ({}, {})),
    )


def test_slerp_delta_by_hand() -> None:
    base = torch.tensor([1.0, 1.0])
    sources = [base + torch.tensor([2.0, 0.0]), base + torch.tensor([0.0, 4.0])]
    result = run("slerp_delta", Case({"t": 1 / 3, "lambda": 2.0}, ({}, {})), base, sources)
    torch.testing.assert_close(result, base + 2 * torch.tensor([math.sqrt(3), 2.0]))


def test_slerp_delta_of_deltas_on_one_line() -> None:
    base, [source] = random_inputs(1, SHAPE)
    delta = source - base
    same = run("slerp_delta", Case({"t": 0.3}, ({}, {})), base, [source, source])
    torch.testing.assert_close(same, source)
    opposite = run("slerp_delta", Case({"t": 0.25}, ({}, {})), torch.zeros(SHAPE), [delta, -delta])
    torch.testing.assert_close(opposite, 0.5 * delta)


Array = NDArray[np.float64]


def arrays(*tensors: torch.Tensor) -> list[Array]:
    return [tensor.double().numpy() for tensor in tensors]


class TestGeometricMedian(MethodKit):
    name = "geometric_median"
    cases = (
        Case(sources=({}, {}, {})),
        Case({"tol": 1e-10, "max_iter": 500}, sources_of(0.5, 0.3, 0.4, 0.2)),
        Case({"max_iter": 0}, sources_of(1.0, 2.0, 2.5)),
        Case(sources=({}, {})),
        Case(sources=sources_of(3.0, 1.0, 1.0)),
        Case(sources=sources_of(0.2)),
    )


def cost(point: Array, points: list[Array], weights: tuple[float, ...]) -> float:
    return sum(w * float(np.linalg.norm(p - point)) for p, w in zip(points, weights, strict=True))


@settings(deadline=None, max_examples=13)
@given(
    weights=st.lists(st.floats(0.1, 2.0), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    doubled=st.booleans(),
)
def test_no_point_nearby_is_better(weights: list[float], seed: int, doubled: bool) -> None:
    random = np.random.default_rng(seed)
    points = [random.standard_normal(3).astype(np.float32).astype(np.float64) for _ in weights]
    if doubled:
        points[-1] = points[0]
    sources = [torch.from_numpy(point).float() for point in points]
    case = Case({"max_iter": 5000, "tol": 1e-12}, sources_of(*weights))
    [found] = arrays(run("geometric_median", case, None, sources))
    least = cost(found, points, tuple(weights))
    others = [found + step * random.standard_normal(3) for step in (1e-3, 1e-2, 0.1) for _ in range(20)]
    assert min(cost(other, points, tuple(weights)) for other in [*others, *points]) > least - 1e-5


def test_geometric_median_by_hand() -> None:
    """The corners of a square have their median in the middle, three of an equilateral triangle likewise; in
    a triangle with an angle above 120 degrees it is that corner."""
    square = [torch.tensor(v) for v in ([0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0])]
    assert run("geometric_median", Case(sources=({},) * 4), None, square).tolist() == [1.0, 1.0]
    triangle = [torch.tensor(v) for v in ([0.0, 0.0], [2.0, 0.0], [1.0, math.sqrt(3)])]
    middle = run("geometric_median", Case(sources=({},) * 3), None, triangle)
    torch.testing.assert_close(middle, torch.tensor([1.0, 1 / math.sqrt(3)]))
    flat = [torch.tensor(v) for v in ([-4.0, 1.0], [0.0, 0.5], [5.0, 1.0])]
    assert same_bits(run("geometric_median", Case(sources=({},) * 3), None, flat), flat[1])


def test_geometric_median_of_two_is_the_heavier_or_the_middle() -> None:
    _, sources = random_inputs(2, SHAPE)
    assert same_bits(run("geometric_median", Case(sources=sources_of(1, 1.01)), None, sources), sources[1])
    assert same_bits(run("geometric_median", Case(sources=sources_of(1.2, 1)), None, sources), sources[0])
    middle = run("geometric_median", Case(sources=sources_of(0.7, 0.7)), None, sources)
    torch.testing.assert_close(middle, (sources[0] + sources[1]) / 2)


def test_geometric_median_is_the_tensor_that_most_sources_are_to_the_last_bit() -> None:
    _, [source, other] = random_inputs(2, SHAPE)
    source[4, 5] = -0.0
    most = [source, other, source]
    assert same_bits(run("geometric_median", Case(sources=({},) * 3), None, most), source)


def test_geometric_median_steps_away_from_a_source_by_what_pulls_more_than_its_weight() -> None:
    """One step from the mean, which is the last point to the last bit (Vardi and Zhang, PNAS 97, 2000)."""
    points = np.array([[-4.0, 0.0], [2.0, 1.0], [2.0, -1.0], [0.0, 0.0]])
    sources = [torch.tensor(point, dtype=torch.float32) for point in points]
    case = Case({"max_iter": 1, "tol": 0.0}, sources_of(1.25, 1.25, 1.25, 0.25))
    [found] = arrays(run("geometric_median", case, None, sources))
    inverse = 1.25 / np.linalg.norm(points[:3], axis=1)
    pull = inverse @ points[:3]
    kept_back = 0.25 / np.linalg.norm(pull)
    assert 0.2 < kept_back < 0.4
    np.testing.assert_allclose(found, (1 - kept_back) * pull / inverse.sum(), rtol=1e-6, atol=1e-6)


def test_geometric_median_counts_weights_by_their_ratio_and_drops_those_of_zero() -> None:
    _, sources = random_inputs(3, SHAPE)
    plain = run("geometric_median", Case(sources=sources_of(0.5, 0.4, 0.3)), None, sources)
    scaled = run("geometric_median", Case(sources=sources_of(2.0, 1.6, 1.2)), None, sources)
    torch.testing.assert_close(scaled, plain)
    without = run("geometric_median", Case(sources=sources_of(0.5, 0.0, 0.5)), None, sources)
    torch.testing.assert_close(without, (sources[0] + sources[2]) / 2)


def test_geometric_median_needs_a_weight() -> None:
    method = method_named("geometric_median")
    assert method.check(settings_for("geometric_median", Case(sources=sources_of(0.0, 0.0)))) == (
        "all weights are 0, so there is nothing to be near to"
    )
    assert method.check(settings_for("geometric_median", Case(sources=sources_of(0.0, 0.1)))) is None
    assert method.identity(settings_for("geometric_median", Case(sources=sources_of(0.1)))) == 0
    assert method.identity(settings_for("geometric_median", Case(sources=({}, {})))) is None


BY_ROWS: dict[str, Value] = {"filter_wise": True}


class TestModelStock(MethodKit):
    name = "model_stock"
    cases = (Case(sources=({}, {}, {})), Case(sources=({}, {})), Case(BY_ROWS, ({}, {}, {})))


class TestModelStockOfRows(MethodKit):
    """Shapes and tilings of a method that takes rows."""

    name = "model_stock"
    cases = (Case(BY_ROWS, ({}, {}, {})), Case(BY_ROWS, ({},) * 5))

    def method(self) -> Method:
        return replace(method_named("model_stock"), access=Access.ROW)


def test_model_stock_by_hand() -> None:
    """A cosine of 0.6 gives t = 1.2 / 1.6 = 0.75; rows of cosine 1 and 0 give t = 1 and 0."""
    base = torch.tensor([1.0, 1.0])
    sources = [base + torch.tensor([1.0, 0.0]), base + torch.tensor([3.0, 4.0])]
    torch.testing.assert_close(
        run("model_stock", Case(sources=({}, {})), base, sources), torch.tensor([2.5, 2.5])
    )
    rows = torch.ones(2, 2)
    matrices = [rows + torch.tensor([[1.0, 1.0], [1.0, 0.0]]), rows + torch.tensor([[3.0, 3.0], [0.0, 5.0]])]
    result = run("model_stock", Case(BY_ROWS, ({}, {})), rows, matrices)
    torch.testing.assert_close(result, torch.tensor([[3.0, 3.0], [1.0, 1.0]]))


def test_model_stock_takes_what_its_angles_need() -> None:
    method = method_named("model_stock")
    for values, shape, access, passes in (
        ({}, (5, 6), Access.TENSOR, 1),
        (BY_ROWS, (5, 6), Access.ROW, 0),
        (BY_ROWS, (2, 5, 6), Access.ROW, 0),
        (BY_ROWS, (6,), Access.TENSOR, 1),
        (BY_ROWS, (), Access.TENSOR, 1),
    ):
        given_ = settings_for("model_stock", Case(values, ({}, {})), shape)
        assert (method.access_with(given_), method.kernel_with(given_).passes(given_)) == (access, passes)


@pytest.mark.parametrize("shape", [(40,), (1,), ()])
def test_model_stock_of_a_vector_is_the_same_in_both_modes(shape: tuple[int, ...]) -> None:
    base, sources = random_inputs(3, shape)
    plain = run("model_stock", Case({}, ({},) * 3), base, sources)
    assert same_bits(run("model_stock", Case(BY_ROWS, ({},) * 3), base, sources), plain)


@pytest.mark.parametrize("values", [{}, BY_ROWS])
def test_model_stock_of_unchanged_tensors_is_the_base(values: dict[str, Value]) -> None:
    base, [source] = random_inputs(1, SHAPE)
    case = Case(values, ({}, {}, {}))
    assert torch.equal(run("model_stock", case, base, [base] * 3), base)
    assert torch.equal(run("model_stock", case, base, [base, base, source]), base)


@pytest.mark.parametrize("values", [{}, BY_ROWS])
def test_model_stock_of_deltas_that_cancel_is_the_base(values: dict[str, Value]) -> None:
    """At the pole, where mergekit divides by what rounding leaves of 0."""
    base, [source] = random_inputs(1, SHAPE)
    turn = [torch.tensor([math.cos(a), math.sin(a)]) for a in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)]
    star = [direction.expand(5, 2) for direction in turn]
    result = run("model_stock", Case(values, ({},) * 3), torch.zeros(5, 2), star)
    assert not bool(result.any())
    delta = source - base
    opposite = run("model_stock", Case(values, ({}, {})), torch.zeros(SHAPE), [delta, -delta])
    assert not bool(opposite.any())


class TestNearswap(MethodKit):
    name = "nearswap"
    scales = False
    cases = (Case({"t": 0.01}), Case({"t": 0.0}), Case({"t": 5.0}), Case({"t": 3e-7}), Case({"t": -1.0}))


def test_nearswap_by_hand() -> None:
    base, source = torch.tensor([1.0, 1.0, 1.0, -2.0]), torch.tensor([1.25, 2.0, -3.0, -2.0])
    result = run("nearswap", Case({"t": 0.5}), base, [source])
    assert result.tolist() == [1.25, 1.5, 0.5, -2.0]


def test_nearswap_gives_either_end_to_the_last_bit() -> None:
    base, [source] = random_inputs(1, SHAPE)
    base[1, 1], source[1, 1] = -0.0, -0.0
    assert same_bits(run("nearswap", Case({"t": 1e6}), base, [source]), source)
    for t in (0.0, -3.0):
        assert same_bits(run("nearswap", Case({"t": t}), base, [source]), base)
    for t in (0.0, 1e-9, 0.01, 3.0):
        assert torch.equal(run("nearswap", Case({"t": t}), base, [base]), base)
