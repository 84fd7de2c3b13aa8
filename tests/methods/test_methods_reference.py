"""Each method against its own float64 reference over many settings, and against cases worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from kits.method_kit import (
    Case,
    assert_as_expected,
    expected_of,
    make_settings,
    merge,
    method_named,
    random_inputs,
    run,
    sources_of,
)

from raymerge.methods import BLOCK, Value, keep_mask

CPU = torch.device("cpu")
SHAPE = (37, 101)


def assert_agrees(name: str, case: Case, base: torch.Tensor, sources: list[torch.Tensor]) -> None:
    method = method_named(name)
    settings = replace(make_settings(method, case, sources[0].shape), position=0.25)
    result = merge(method, settings, base, sources)
    assert_as_expected(result, expected_of(method, settings, base, sources))


# Kernels and references -------------------------------------------------------------------------------

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


# Linear, passthrough, slerp ---------------------------------------------------------------------------


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


# The task-arithmetic family ---------------------------------------------------------------------------


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


def test_dare_keeps_the_expected_delta() -> None:
    """The reason for 1/density: over many elements the mean delta stays."""
    base = torch.zeros(1 << 20)
    for density in (0.1, 0.5, 0.9):
        case = Case(sources=sources_of(1.0, density=density))
        mean = float(run("dare_linear", case, base, [base + 1.0]).double().mean())
        assert abs(mean - 1.0) < 5 * math.sqrt((1 / density - 1) / (1 << 20))
