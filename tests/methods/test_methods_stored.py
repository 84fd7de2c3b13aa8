"""Tiles of bfloat16 as it is stored give the bits that pieces in float32 give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.marks import slow_but
from kits.method_kit import CPU, Case, make_settings, method_named
from numpy.typing import NDArray

from raymerge.methods import (
    BLOCK,
    Access,
    Method,
    Settings,
    Stored,
    Takes,
    Tile,
    Value,
    sample_of,
    sample_runs,
)
from raymerge.methods.sce import _Statistics
from raymerge.methods.trim import TrimState

Words = NDArray[np.uint16]
SPECIAL = (0.0, -0.0, 1e-40, -3e-39, 1e-38, 3.3e38, -3.3e38, float("nan"), float("inf"), -float("inf"))
COUNTS = (0, 1, 77, 1023, 16_384, 16_401, BLOCK - 1, BLOCK, 2 * BLOCK + 4099)
WEIGHTS = (0.3, 0.9, 0.05, 1.25, 0.7, 0.2, 1.0, 0.45, 0.6)
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

    def settings(self, num_sources: int, seed: int, shape: tuple[int, ...]) -> Settings:
        generator = np.random.default_rng(seed)
        names = {p.name for p in self.method.parameters if p.scope == "source"}
        sources = []
        for weight in WEIGHTS[:num_sources]:
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
        "ties",
        "breadcrumbs",
        "breadcrumbs_ties",
        "sce",
        "dare_linear",
        "dare_ties",
        "della",
        "della_linear",
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
        values[chosen] = generator.choice(np.array(SPECIAL, np.float32), int(chosen.sum()))
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
    method, kernel = trial.method, trial.method.kernel
    if not kernel.passes(given_):
        return None
    state = kernel.begin(given_, stored.count, CPU)
    if method.sampler is not None and sample_runs(stored.count):
        method.sampler(state, sample_of(piece_of(trial, stored, 0, stored.count)), given_)
    for index in itertools.count():
        for first, count in pieces(stored.count, step):
            if at_once:
                assert kernel.observe_stored(state, stored.part(first, count), given_, index)
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
    return repr((state.squares, state.num_differing, state.cut)) if isinstance(state, _Statistics) else ""


def same_words(left: Words, right: Words) -> bool:
    """The same bits, where one NaN is as good as another."""
    both_nan = ((left & 0x7FFF) > 0x7F80) & ((right & 0x7FFF) > 0x7F80)
    return left.shape == right.shape and bool(((left == right) | both_nan).all())


def assert_same(trial: Trial, given_: Settings, stored: Stored, num_steps: int, cuts: list[float]) -> None:
    """In tiles of several steps, the result in parts that begin anywhere, or at rows."""
    kernel, method = trial.method.kernel, trial.method
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
    bounds = sorted({0, stored.count, *(int(cut * stored.count) // length * length for cut in cuts)})
    for begin, end in itertools.pairwise(bounds):
        part = stored.part(begin, end - begin)
        assert kernel.apply_stored(part, given_, other, out[1 + begin : 1 + end])
    assert known(other) == known(state)
    assert same_words(out[1:-1], expected)
    assert out[0] == out[-1] == GUARD
    assert np.array_equal(stored.words, words)
    assert kernel.apply_stored(stored.part(0, 0), given_, other, out[:0])


@pytest.mark.parametrize("trial", slow_but([*COMBINED, *SPARSIFIED], *COMBINED[::3], *SPARSIFIED[::3]))
@hypothesis_settings(deadline=None, max_examples=12)
@given(data=st.data(), count=st.sampled_from(COUNTS), seed=st.integers(0, 200), tiles=st.integers(1, 3))
def test_stored_tiles_give_the_bits_of_pieces(
    trial: Trial, data: st.DataObject, count: int, seed: int, tiles: int
) -> None:
    # Few numbers, for each of which some loops are compiled anew.
    num_sources = data.draw(st.sampled_from([n for n in (1, 2, 3, 9) if trial.least <= n <= trial.most]))
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
    assert trial.method.kernel.apply_stored(stored, given_, state, out)
    if trial.values != {"normalize": False}:
        assert np.array_equal(out, one.input(0))


@pytest.mark.parametrize(
    ("name", "values"), [("nuslerp", {"nuslerp_flatten": False}), ("model_stock", {"filter_wise": True})]
)
def test_vectors_within_a_matrix_take_pieces(name: str, values: dict[str, Value]) -> None:
    kernel, given_ = method_named(name).kernel, Trial(name, values).settings(2, 0, (8, 16))
    stored, out = stored_inputs(3, 128, 1), np.full(128, GUARD, np.uint16)
    assert not kernel.observe_stored(None, stored, given_, 0)
    assert not kernel.apply_stored(stored, given_, None, out)
    assert np.all(out == GUARD)
