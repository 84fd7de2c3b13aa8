"""dare_linear and dare_ties: the loop that makes masks as it goes, and what makes up for dropped elements."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.method_kit import Case, make_settings, method_named, same_bits

from raymerge.methods import Settings, Tile, Value, dare
from raymerge.methods.dare import _factors
from raymerge.methods.task_arithmetic import merge_factors_in_torch

NAMES = ["dare_linear", "dare_ties"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, math.inf, -math.inf, math.nan]
DENSITIES = [0.0, 1e-12, 2.0**-32, 0.3, 0.5, 1 - 2.0**-32, 1.0]
elements = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


def settings_for(name: str, *sources: Mapping[str, Value], **values: Value) -> Settings:
    return make_settings(method_named(name), Case(values, sources))


def apply(name: str, tile: Tile, settings: Settings) -> torch.Tensor:
    return method_named(name).kernel.apply(tile, settings, None)


def drawn_rows(data: st.DataObject, count: int, length: int) -> torch.Tensor:
    numbers = data.draw(st.lists(elements, min_size=count * length, max_size=count * length))
    return torch.tensor(numbers, dtype=torch.float32).view(count, length)


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    densities=st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=4),
    length=st.integers(0, 40),
    start=st.integers(0, 2**40),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_both_forms_give_the_same_bits(
    name: str, data: st.DataObject, densities: list[float], length: int, start: int, flags: tuple[bool, bool]
) -> None:
    inputs = drawn_rows(data, len(densities) + 1, length + 3)
    # Rows that do not lie side by side.
    tile = Tile(inputs[0, :length].clone(), inputs[1:, :length], start)
    sources = ({"weight": data.draw(st.sampled_from([0.5, -0.7, 0.0])), "density": d} for d in densities)
    rescale, normalize = flags
    settings = settings_for(name, *sources, rescale=rescale, normalize=normalize)
    factors = _factors(tile, settings)
    plain = merge_factors_in_torch(tile, settings, factors, elect=name == "dare_ties")
    found = apply(name, tile, settings)
    where_both = found.isnan() & plain.isnan()
    assert same_bits(found.masked_fill(where_both, 0.0), plain.masked_fill(where_both, 0.0))


@pytest.mark.parametrize("density", [1e-300, 1e-12, 2.0**-32])
def test_a_tiny_density_makes_up_for_what_it_keeps_in_fact(
    density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element in 2**32, by a factor of 2**32, so that the expected delta stays the whole one."""
    settings = settings_for("dare_linear", {"weight": 1.0, "density": density})
    tile = Tile(torch.zeros(1000), torch.ones(1, 1000), 0)
    assert not bool(apply("dare_linear", tile, settings).any())
    monkeypatch.setattr(dare, "keep_factors", lambda *given, out: out.fill_(given[-1]))
    assert set(_factors(tile, settings)[0].tolist()) == {2.0**32}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_nan_reaches_the_result_even_where_it_is_dropped(name: str, density: float) -> None:
    settings = settings_for(name, {"weight": 1.0, "density": density})
    tile = Tile(torch.zeros(500), torch.full((1, 500), math.nan), 9)
    assert bool(apply(name, tile, settings).isnan().all())
