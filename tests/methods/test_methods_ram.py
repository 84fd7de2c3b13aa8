"""ram and ramplus_tl, against the definition in float64 and cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from kits.method_kit import Case, MethodKit, make_settings, merge, method_named, random_inputs

from raymerge.methods import Value

SHAPE = (37, 101)
NAMES = ["ram", "ramplus_tl"]


def run(
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


def test_by_hand() -> None:
    """Unique to the first: 1; unique to the second: 2; shared: (2 + 4) / 2; below epsilon: nothing."""
    base = torch.full((4,), 10.0)
    first, second = torch.tensor([1.0, 0.0, 2.0, 0.25]), torch.tensor([0.0, 2.0, 4.0, 0.0])
    sources = [base + first, base + second]
    assert run("ram", base, sources, epsilon=0.5).tolist() == [11.0, 12.0, 13.0, 10.0]
    # One shared and one unique element each: a ratio of 1, of which alpha lets 0.5 count.
    enlarged = run("ramplus_tl", base, sources, epsilon=0.5, r=0.5, alpha=0.5)
    assert enlarged.tolist() == [11.25, 12.5, 13.0, 10.0]


def test_each_source_has_its_own_gain() -> None:
    """First: two unique, one shared, ratio 0.5; second: one shared only."""
    base = torch.zeros(3)
    sources = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 3.0])]
    assert run("ramplus_tl", base, sources, r=1.0, alpha=9.0).tolist() == [1.5, 1.5, 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_epsilon_is_the_users_own_number(name: str) -> None:
    """It is absolute: deltas and epsilon scaled alike give a merged delta scaled alike."""
    base, (first, second) = random_inputs(2, SHAPE)
    deltas = [first - base, second - base]
    large = run(name, torch.zeros(SHAPE), deltas, epsilon=2.0**-5)
    small = run(name, torch.zeros(SHAPE), [delta * 2.0**-20 for delta in deltas], epsilon=2.0**-25)
    assert torch.equal(small * 2.0**20, large)
    nothing = run(name, torch.zeros(SHAPE), [delta * 2.0**-20 for delta in deltas])
    assert not bool(nothing.any())
