"""Sums and combinations of bfloat16 as it is stored give the bits that pieces in float32 give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.method_kit import Case, make_settings
from numpy.typing import NDArray

from raymerge.methods import (
    BLOCK,
    BaseUse,
    Method,
    Settings,
    Stored,
    StoredKernel,
    Takes,
    Tile,
    Value,
    find_method,
)
from raymerge.methods.gram import Gram
from raymerge.methods.sums import stored_sum_of_products, stored_sum_on_base

Words = NDArray[np.uint16]

MANY = st.integers(1, 9)
ONE = st.just(1)
TWO = st.just(2)
SHARES = (0.3, 0.9, 0.05, 1.25, 0.7, 0.2, 1.0, 0.45, 0.6)


@dataclass(frozen=True)
class Trial:
    """A method, its settings, and how many sources it takes."""

    name: str
    counts: st.SearchStrategy[int]
    case: Case
    has_base: bool

    def settings(self, num_sources: int, num_elements: int) -> Settings:
        given_ = {"weight": 0.0} if "weight" in self.case.sources[0] else {}
        sources = tuple({**given_, **({"weight": w} if given_ else {})} for w in SHARES[:num_sources])
        return make_settings(self.method, Case(self.case.values, sources), (num_elements,))

    @property
    def method(self) -> Method:
        found = find_method(self.name)
        assert found is not None
        return found


def trial(
    name: str, counts: st.SearchStrategy[int], *, base: bool = True, weight: bool = True, **values: Value
) -> Trial:
    return Trial(name, counts, Case(values, ({"weight": 1.0} if weight else {},)), base)


TRIALS = (
    trial("linear", MANY, base=False),
    trial("linear", MANY, base=False, normalize=False),
    trial("task_arithmetic", MANY),
    trial("task_arithmetic", MANY, normalize=True),
    trial("slerp_delta", TWO, weight=False, t=0.8),
    trial("lines", MANY, alpha=0.4, beta=0.3),
    trial("slerp", ONE, weight=False, t=0.3),
    trial("slerp", ONE, weight=False, t=0.8),
    trial("slerp_delta", TWO, weight=False, t=0.3),
    trial("nuslerp", TWO),
    trial("nuslerp", TWO, base=False),
    trial("multislerp", MANY),
    trial("multislerp", MANY, base=False),
    trial("karcher", MANY, base=False, weight=False),
    trial("model_stock", st.integers(2, 9), weight=False),
    trial("geometric_median", MANY, base=False),
    trial("nearswap", ONE, weight=False, t=0.02),
)
NAMED = [pytest.param(each, id=f"{each.name}-{index}") for index, each in enumerate(TRIALS)]

SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80], dtype=np.uint16
)
"""Zeros, denormals, the largest numbers, ones."""
NOT_FINITE = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1], dtype=np.uint16)


def some_words(count: int, length: int, seed: int, *, finite: bool) -> Words:
    """bfloat16 ``[count, length]``: numbers near those of the first row, and all kinds of special ones."""
    random = np.random.default_rng(seed)
    first = random.standard_normal(length, dtype=np.float32)
    rows = first + np.float32(0.05) * random.standard_normal((count, length), dtype=np.float32)
    rows[0] = first
    words: Words = (rows.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    for places in (words, words[:, : length // 2]):
        if places.size:
            chosen = random.integers(0, places.shape[1], size=(count, 1 + places.shape[1] // 50))
            np.put_along_axis(places, chosen, random.choice(SPECIAL, size=chosen.shape), axis=1)
    if not finite and length:
        words[random.integers(0, count, 4), random.integers(0, length, 4)] = NOT_FINITE
    return words


def stored_in_one_buffer(words: Words, seed: int) -> Stored:
    """The rows at odd places, in no order, with something else in between."""
    count, length = words.shape
    random = np.random.default_rng(seed)
    memory = random.integers(0, 1 << 16, size=count * (length + 9) + 5, dtype=np.uint16)
    places = 1 + random.permutation(count).astype(np.int64) * (length + 9) + random.integers(0, 8, count)
    for place, row in zip(places, words, strict=True):
        memory[place : place + length] = row
    return Stored(memory, places, length, 0)


def tile_of(words: Words, method: Method, begin: int, end: int, *, has_base: bool) -> Tile:
    """A piece in float32, as the executor makes it."""
    rows = torch.from_numpy(words[:, begin:end].astype(np.int32)).bitwise_left_shift(16).view(torch.float32)
    if not has_base:
        return Tile(None, rows, begin)
    deltas = rows[1:] - rows[0] if method.takes is Takes.DELTAS else rows[1:]
    return Tile(rows[0], deltas, begin)


def rounded(values: torch.Tensor) -> Words:
    """To bfloat16, by torch."""
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def cuts_of(length: int, step: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise((*range(0, length, step), length))


def by_pieces(each: Trial, settings: Settings, words: Words) -> Words:
    """The result in pieces of a block."""
    kernel, length, state = each.method.kernel, words.shape[1], None
    cut = list(cuts_of(length, BLOCK)) if length else []
    tiles = [tile_of(words, each.method, *bounds, has_base=each.has_base) for bounds in cut]
    if kernel.passes(settings):
        state = kernel.begin(settings, length, torch.device("cpu"))
        for tile in tiles:
            kernel.observe(state, tile, settings, 0)
        kernel.conclude(state, settings, 0)
    parts = [rounded(kernel.apply(tile, settings, state)) for tile in tiles]
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def as_stored(each: Trial, settings: Settings, stored: Stored, step: int, parts: Sequence[int]) -> Words:
    """The result of stored tiles of ``step`` elements, put together from parts that begin anywhere."""
    kernel, state = each.method.kernel, None
    assert isinstance(kernel, StoredKernel)
    if kernel.passes(settings):
        state = kernel.begin(settings, stored.count, torch.device("cpu"))
        observe_all(kernel, state, settings, stored, step)
        kernel.conclude(state, settings, 0)
    out = np.full(stored.count, 0x1234, np.uint16)
    for begin, end in itertools.pairwise(sorted({0, stored.count, *parts})):
        target = out[begin:end]
        assert kernel.apply_stored(stored.part(begin, end - begin), settings, state, target)
    return out


def observe_all(kernel: StoredKernel, state: Any, settings: Settings, stored: Stored, step: int) -> None:
    for begin, end in cuts_of(stored.count, step) if stored.count else ():
        assert kernel.observe_stored(state, stored.part(begin, end - begin), settings, 0)


def same_words(left: Words, right: Words) -> bool:
    """Equality of bits in which any NaN equals any other."""
    both_nan = ((left & 0x7FFF) > 0x7F80) & ((right & 0x7FFF) > 0x7F80)
    return left.shape == right.shape and bool(np.all((left == right) | both_nan))


# Methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", NAMED)
@hypothesis_settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_stored_tiles_give_the_bits_of_pieces(each: Trial, data: st.DataObject) -> None:
    num_sources = data.draw(each.counts)
    length = data.draw(st.sampled_from([0, 1, 15, 1023, 1025, 16_385, BLOCK - 1, BLOCK, 2 * BLOCK + 4099]))
    seed, finite = data.draw(st.integers(0, 1 << 20)), data.draw(st.integers(0, 3)) > 0
    step = data.draw(st.sampled_from([BLOCK, 2 * BLOCK]))
    parts = data.draw(st.lists(st.integers(0, length), max_size=3))
    words = some_words(num_sources + each.has_base, length, seed, finite=finite)
    settings, stored = each.settings(num_sources, length), stored_in_one_buffer(words, seed)
    before = stored.words.copy()
    assert same_words(as_stored(each, settings, stored, step, parts), by_pieces(each, settings, words))
    assert np.array_equal(stored.words, before)


@pytest.mark.parametrize("each", NAMED)
def test_inputs_that_agree_keep_their_bits(each: Trial) -> None:
    num_sources = {"slerp": 1, "nearswap": 1, "slerp_delta": 2, "nuslerp": 2}.get(each.name, 3)
    row = np.concatenate([SPECIAL[:6], SPECIAL[8:], some_words(1, 3000, 5, finite=True)[0]])
    row[(row & 0x7FFF) > 0x7000] = 0x8000
    words = np.stack([row] * (num_sources + each.has_base))
    settings = each.settings(num_sources, row.size)
    found = as_stored(each, settings, stored_in_one_buffer(words, 1), BLOCK, ())
    if each.case.values.get("normalize", True):
        assert np.array_equal(found, row)
    else:
        assert same_words(found, by_pieces(each, settings, words))


@pytest.mark.parametrize("each", NAMED)
def test_a_part_of_no_elements_says_that_stored_tiles_are_taken(each: Trial) -> None:
    num_sources = {"slerp": 1, "nearswap": 1, "slerp_delta": 2, "nuslerp": 2}.get(each.name, 3)
    words = some_words(num_sources + each.has_base, 40, 3, finite=True)
    settings = each.settings(num_sources, 40)
    whole = stored_in_one_buffer(words, 3)
    assert as_stored(each, settings, whole, BLOCK, ()).shape == (40,)
    assert as_stored(each, settings, whole.part(7, 0), BLOCK, ()).shape == (0,)


@pytest.mark.parametrize("each", NAMED)
def test_trials_have_the_base_that_the_method_asks_for(each: Trial) -> None:
    assert each.method.base is BaseUse.OPTIONAL or each.has_base == (each.method.base is BaseUse.REQUIRED)


@pytest.mark.parametrize("name", ["linear", "task_arithmetic", "lines", "nearswap"])
def test_a_method_without_statistics_takes_none(name: str) -> None:
    method = find_method(name)
    assert method is not None
    kernel = method.kernel
    assert isinstance(kernel, StoredKernel)
    stored = stored_in_one_buffer(some_words(2, 10, 1, finite=True), 1)
    assert not kernel.observe_stored(None, stored, make_settings(method, Case()), 0)


@pytest.mark.parametrize(
    ("name", "values"), [("nuslerp", {"nuslerp_flatten": False}), ("model_stock", {"filter_wise": True})]
)
def test_vectors_within_a_matrix_take_pieces(name: str, values: dict[str, bool]) -> None:
    method = find_method(name)
    assert method is not None
    kernel = method.kernel
    assert isinstance(kernel, StoredKernel)
    settings = make_settings(method, Case(values, ({"weight": 1.0},) * 2), (8, 16))
    stored = stored_in_one_buffer(some_words(3, 128, 1, finite=True), 1)
    out = np.full(128, 0x1234, np.uint16)
    assert not kernel.observe_stored(None, stored, settings, 0)
    assert not kernel.apply_stored(stored, settings, None, out)
    assert np.all(out == 0x1234)


# Sums and products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_products_are_added_in_the_same_order(count: int, cut: int) -> None:
    words = some_words(count + 1, 3 * BLOCK + 301, count, finite=True)
    # The largest numbers' products would hide all others.
    words[(words & 0x7FFF) > 0x5000] = 0
    stored = stored_in_one_buffer(words, count)
    rows = torch.from_numpy(words.astype(np.int32)).bitwise_left_shift(16).view(torch.float32)
    of_differences, of_all = Gram(count), Gram(count + 1)
    found_differences, found_all = Gram(count), Gram(count + 1)
    of_differences.add(rows[1:], rows[0])
    of_all.add(rows, None)
    for begin, end in cuts_of(stored.count, cut):
        found_differences.add_stored(stored.part(begin, end - begin))
        found_all.add_stored(stored.part(begin, end - begin))
    assert np.array_equal(found_differences.products, of_differences.products)
    assert np.array_equal(found_all.products, of_all.products)
    assert all(math.isfinite(product) for product in of_all.products[:, 0])


def test_products_of_nothing() -> None:
    gram = Gram(0)
    gram.add_stored(stored_in_one_buffer(some_words(1, 50, 1, finite=True), 1))
    assert gram.norms() == []


def test_counts_must_match() -> None:
    stored = stored_in_one_buffer(some_words(3, 10, 1, finite=True), 1)
    out = np.empty(10, np.uint16)
    with pytest.raises(ValueError, match="3 vectors need as many coefficients, are given 2"):
        stored_sum_of_products(stored, (1.0, 2.0), out)
    with pytest.raises(ValueError, match="2 vectors need as many coefficients, are given 3"):
        stored_sum_on_base(stored, (1.0, 2.0, 3.0), out)
