"""Each method against float64 formulas written down anew, and against cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kits.method_kit import Case, make_settings, merge, random_inputs
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Method, Settings, Value, find_method, keep_mask

Array = NDArray[np.float64]
CPU = torch.device("cpu")
SHAPE = (37, 101)


def method_named(name: str) -> Method:
    method = find_method(name)
    assert method is not None
    return method


def run(name: str, case: Case, base: torch.Tensor | None, sources: list[torch.Tensor]) -> torch.Tensor:
    method = method_named(name)
    return merge(method, make_settings(method, case, sources[0].shape), base, sources)


def check(name: str, case: Case, reference: Array, base: torch.Tensor, sources: list[torch.Tensor]) -> None:
    result = run(name, case, base, sources).double().numpy()
    np.testing.assert_allclose(result, reference, rtol=2e-6, atol=2e-7)


def sources_of(*weights: float, **others: Value) -> tuple[dict[str, Value], ...]:
    return tuple({"weight": weight, **others} for weight in weights)


def in_float64(base: torch.Tensor, sources: list[torch.Tensor]) -> tuple[Array, list[Array]]:
    """Base, and the deltas as the executor takes them: subtracted in float32."""
    return base.double().numpy(), [(source - base).double().numpy() for source in sources]


# Linear, passthrough, slerp ---------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weights", [(0.5, 0.3, -0.2), (1.0,), (2.0, 2.0), (0.1, 0.2, 0.3, 0.4)])
def test_linear(normalize: bool, weights: tuple[float, ...]) -> None:
    base, sources = random_inputs(len(weights), SHAPE)
    total = sum(w * s.double().numpy() for w, s in zip(weights, sources, strict=True))
    reference = total / sum(weights) if normalize else total
    case = Case({"normalize": normalize}, sources_of(*weights))
    check("linear", case, reference, base, sources)


def test_linear_by_hand() -> None:
    sources = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 4.0, -0.5])]
    mean = run("linear", Case(sources=sources_of(1.0, 3.0)), None, sources)
    assert mean.tolist() == [2.5, 2.5, -0.25]
    total = run("linear", Case({"normalize": False}, sources_of(0.5, -1.0)), None, sources)
    assert total.tolist() == [-2.5, -5.0, 0.75]


@pytest.mark.parametrize("scale", [None, 1.0, 0.5, -2.0, 0.0])
def test_passthrough(scale: float | None) -> None:
    _, [source] = random_inputs(1, SHAPE)
    result = run("passthrough", Case(sources=({"scale": scale},)), None, [source])
    assert torch.equal(result, source if scale is None else source * scale)


def slerp_reference(t: float, v0: Array, v1: Array) -> Array:
    n0, n1 = float(np.linalg.norm(v0)), float(np.linalg.norm(v1))
    u0, u1 = (v0 / n0 if n0 > 1e-8 else v0), (v1 / n1 if n1 > 1e-8 else v1)
    d = float(np.sum(u0 * u1))
    if abs(d) > 0.9995:
        return (1 - t) * v0 + t * v1
    theta0 = np.arccos(d)
    theta = theta0 * t
    s1 = np.sin(theta) / np.sin(theta0)
    return np.sin(theta0 - theta) / np.sin(theta0) * v0 + s1 * v1


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0, -0.3, 1.4])
@pytest.mark.parametrize("distance", [1.0, 0.2, 0.001])
def test_slerp(t: float, distance: float) -> None:
    base, [noise] = random_inputs(1, SHAPE)
    source = base + distance * 20 * (noise - base)
    reference = slerp_reference(t, base.double().numpy(), source.double().numpy())
    check("slerp", Case({"t": t}), reference, base, [source])


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


def consensus_reference(terms: list[Array], weights: tuple[float, ...]) -> tuple[Array, Array]:
    """Agreeing sum and its divisor."""
    sign = np.where(sum(terms) >= 0, 1.0, -1.0)
    agrees = [np.sign(term) == sign for term in terms]
    merged = sum(term * mask for term, mask in zip(terms, agrees, strict=True))
    divisor = sum(w * mask for w, mask in zip(weights, agrees, strict=True))
    return np.asarray(merged), np.where(divisor == 0, 1.0, divisor)


def family_reference(base: Array, thinned: list[Array], case: Case, settings: Settings, elect: bool) -> Array:
    weights = settings.per_source("weight")
    terms = [w * delta for w, delta in zip(weights, thinned, strict=True)]
    if elect:
        merged, divisor = consensus_reference(terms, weights)
    else:
        total = sum(weights)
        merged, divisor = np.asarray(sum(terms)), np.asarray(1.0 if abs(total) < 1e-8 else total)
    if settings.flag("normalize"):
        merged = merged / divisor
    return base + merged * settings.number("lambda")


def l1_gain(delta: Array, kept: Array) -> float:
    whole, rest = float(np.abs(delta).sum()), float(np.abs(kept).sum())
    return 1.0 if min(whole, rest) < 1e-7 else whole / rest


WEIGHTS = [(0.6, 0.3, 0.5), (1.0, -0.4), (0.5, -0.5), (0.7,)]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("values", [{}, {"normalize": True}, {"lambda": 0.5, "rescale": True}])
def test_task_arithmetic(weights: tuple[float, ...], values: dict[str, Value]) -> None:
    base, sources = random_inputs(len(weights), SHAPE)
    case = Case(values, sources_of(*weights, density=0.3))
    settings = make_settings(method_named("task_arithmetic"), case)
    start, deltas = in_float64(base, sources)
    check("task_arithmetic", case, family_reference(start, deltas, case, settings, False), base, sources)


def test_task_arithmetic_by_hand() -> None:
    base = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sources = [base + torch.tensor([1.0, 0.0, -2.0, 4.0]), base + torch.tensor([0.5, 2.0, 1.0, 4.0])]
    case = Case({"lambda": 2.0}, sources_of(0.5, 0.25))
    assert run("task_arithmetic", case, base, sources).tolist() == [2.25, 3.0, 1.5, 10.0]
    mean = Case({"normalize": True}, sources_of(1.0, 3.0))
    assert run("task_arithmetic", mean, base, sources).tolist() == [1.625, 3.5, 3.25, 8.0]
    cancelling = Case({"normalize": True}, sources_of(1.0, -1.0))
    assert run("task_arithmetic", cancelling, base, sources).tolist() == [1.5, 0.0, 0.0, 4.0]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    "values", [{}, {"normalize": False}, {"rescale": True, "lambda": -0.5}, {"int8_mask": True}]
)
def test_ties(weights: tuple[float, ...], density: float, values: dict[str, Value]) -> None:
    base, sources = random_inputs(len(weights), SHAPE)
    case = Case(values, sources_of(*weights, density=density))
    settings = make_settings(method_named("ties"), case)
    start, deltas = in_float64(base, sources)
    thinned = [_largest(delta, density) for delta in deltas]
    if settings.flag("rescale"):
        thinned = [kept * l1_gain(delta, kept) for delta, kept in zip(deltas, thinned, strict=True)]
    check("ties", case, family_reference(start, thinned, case, settings, True), base, sources)


def _largest(delta: Array, density: float) -> Array:
    count = math.floor(density * delta.size)
    if count == 0:
        return np.zeros_like(delta)
    cut = np.sort(np.abs(delta), axis=None)[-count]
    return np.where(np.abs(delta) >= cut, delta, 0.0)


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


def test_ties_streams_once_when_nothing_is_trimmed() -> None:
    method = method_named("ties")
    whole = make_settings(method, Case(sources=sources_of(0.5, 0.5)))
    mixed = make_settings(method, Case(sources=(*sources_of(0.5), *sources_of(0.5, density=0.9))))
    assert method.kernel.passes(whole) == 0
    assert method.kernel.passes(mixed) == 1


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("values", [{}, {"normalize": True, "lambda": 0.5}, {"rescale": False}])
def test_dare(name: str, weights: tuple[float, ...], density: float, values: dict[str, Value]) -> None:
    base, sources = random_inputs(len(weights), SHAPE)
    case = Case(values, sources_of(*weights, density=density))
    settings = make_settings(method_named(name), case)
    start, deltas = in_float64(base, sources)
    gain = 1 / density if settings.flag("rescale") and density > 0 else 1.0
    masks = [
        keep_mask(key, 0, base.numel(), density, CPU).view(SHAPE).double().numpy() for key in settings.keys
    ]
    thinned = [delta * mask * gain for delta, mask in zip(deltas, masks, strict=True)]
    reference = family_reference(start, thinned, case, settings, name == "dare_ties")
    check(name, case, reference, base, sources)


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


def test_dare_draws_by_place_in_the_tensor_not_by_place_in_the_tile() -> None:
    method = method_named("dare_linear")
    case = Case(sources=sources_of(1.0, density=0.5))
    settings = make_settings(method, case)
    base, source = torch.zeros(1000), torch.ones(1000)
    whole = merge(method, settings, base, [source])
    assert torch.equal(merge(method, settings, base, [source], cuts=(1, 500, 501)), whole)
    assert not torch.equal(whole[:500], whole[500:])
