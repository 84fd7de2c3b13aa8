"""breadcrumbs and breadcrumbs_ties, against sorting in float64 and cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from kits.method_kit import Case, MethodKit, make_settings, method_named, random_inputs, run, sources_of

from raymerge.methods import BLOCK

NAMES = ["breadcrumbs", "breadcrumbs_ties"]


class TestBreadcrumbs(MethodKit):
    name = "breadcrumbs"
    cases = (
        Case(sources=sources_of(0.5, 0.3, -0.2, density=0.6, gamma=0.1)),
        Case({"rescale": True, "normalize": True}, sources_of(0.5, 0.3, density=0.9, gamma=0.3)),
        Case({"lambda": 1.5}, (*sources_of(0.5, density=0.5, gamma=0.0), *sources_of(0.3))),
        Case(sources=sources_of(1.0, density=0.0)),
    )


class TestBreadcrumbsTies(MethodKit):
    name = "breadcrumbs_ties"
    cases = (
        Case(sources=sources_of(0.5, 0.3, 0.4, density=0.6, gamma=0.1)),
        Case({"rescale": True, "normalize": True}, sources_of(1.0, -0.5, density=0.2, gamma=0.05)),
        Case(sources=(*sources_of(0.5, density=0.5), *sources_of(0.3))),
    )


# Against the definition -------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Of eight elements density 0.5 keeps four, after the two that gamma 0.25 drops."""
    base = torch.full((8,), 10.0)
    delta = torch.tensor([8.0, -1.0, 5.0, -7.0, 2.0, -3.0, 4.0, 6.0])
    case = Case(sources=sources_of(1.0, density=0.5, gamma=0.25))
    assert run("breadcrumbs", case, base, [base + delta]).tolist() == [10, 10, 15, 10, 10, 7, 14, 16]
    whole = Case({"rescale": True}, sources_of(1.0, density=0.5, gamma=0.25))
    result = run("breadcrumbs", whole, torch.zeros(8), [delta])
    assert result.tolist() == [0, 0, 10, 0, 0, -6, 8, 12]


def test_ties_by_hand() -> None:
    """The second delta's outlier does not vote."""
    base = torch.zeros(4)
    first, second = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([-9.0, -3.0, 2.0, 1.0])
    case = Case(sources=sources_of(1.0, 1.0, density=0.75, gamma=0.25))
    assert run("breadcrumbs_ties", case, base, [first, second]).tolist() == [1.0, -3.0, 5.0, 1.0]


# What mergekit gets wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "gamma"), [(32, 0.01), (99, 0.01), (4000, 0.0), (1, 0.5)])
def test_without_an_outlier_to_drop_the_largest_stay(name: str, count: int, gamma: float) -> None:
    """Among them every norm of a model narrower than 100."""
    base, [source] = random_inputs(1, (count,))
    case = Case(sources=sources_of(1.0, density=0.9, gamma=gamma))
    kept = run(name, case, base, [source]) != base
    assert int(kept.sum()) == math.floor(0.9 * count)
    if count > 1:
        assert bool(kept[(source - base).abs().argmax()])


def test_nothing_to_rescale_stays_nothing() -> None:
    case = Case({"rescale": True}, sources_of(1.0, density=0.5, gamma=0.25))
    base = torch.ones(16)
    outlier = torch.zeros(16)
    outlier[3] = 5.0
    assert torch.equal(run("breadcrumbs", case, base, [base + outlier]), base)


# Ties -------------------------------------------------------------------------------------------------


def test_of_equal_elements_the_right_share_stays() -> None:
    """All elements tie at both thresholds: a tenth goes at the top, half stays, all over the tensor."""
    count = 4 * BLOCK
    case = Case(sources=sources_of(1.0, density=0.5, gamma=0.1))
    result = run("breadcrumbs", case, torch.zeros(count), [torch.ones(count)])
    assert float(result.double().mean()) == pytest.approx(0.5, abs=0.005)
    assert float((result.view(4, -1).mean(dim=1) - 0.5).abs().max()) < 0.01


def test_streams_once_when_nothing_is_dropped() -> None:
    for name in [*NAMES, "ties"]:
        method = method_named(name)
        whole = make_settings(method, Case(sources=sources_of(0.5, 0.5)))
        mixed = make_settings(method, Case(sources=(*sources_of(0.5), *sources_of(0.5, density=0.9))))
        assert (method.kernel.passes(whole), method.kernel.passes(mixed)) == (0, 1)
