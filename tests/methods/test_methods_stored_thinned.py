"""Methods that select, elect and draw, on bfloat16 as it is stored: the bits of going piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.method_kit import CPU, Case, make_settings, method_named
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Access, Method, Settings, Tile, sample_of
from raymerge.methods.gather import sample_runs
from raymerge.methods.method import Stored, StoredKernel
from raymerge.methods.sce import _Statistics
from raymerge.methods.trim import Selections

SPECIAL = (0.0, -0.0, 1e-40, -3e-39, 1e-38, 3.3e38, -3.3e38, float("nan"), float("inf"), -float("inf"))
COUNTS = (0, 1, 77, 16_384, 16_401, BLOCK, 2 * BLOCK + 4099)
GUARD = 0x1234
METHODS = (
    "ties",
    "breadcrumbs",
    "breadcrumbs_ties",
    "sce",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
)
some = settings(deadline=None, max_examples=20)


def kernel_of(method: Method) -> StoredKernel:
    assert isinstance(method.kernel, StoredKernel)
    return method.kernel


def case_of(method: Method, num_sources: int, seed: int) -> Case:
    """Settings that differ from source to source, or are those that need nothing to be found."""
    generator = np.random.default_rng(seed)
    globals_, sources = {p.name for p in method.parameters if p.scope == "global"}, []
    for _ in range(num_sources):
        density = float(generator.choice([0.0, 0.2, 0.37, 0.8, 1.0]))
        weight = float(generator.choice([0.5, 1.0, -0.3]))
        sources.append({"weight": weight, "density": 1.0 if seed % 7 == 6 else density})
    values = {
        "normalize": bool(seed % 2),
        "rescale": bool(seed // 2 % 2),
        "lambda": 0.7 if seed % 3 else 1.0,
        "select_topk": (1.0, 0.3, 0.0, 0.05)[seed % 4],
    }
    given_ = {} if method.name == "sce" else dict(enumerate(sources))
    return Case(
        {name: value for name, value in values.items() if name in globals_},
        tuple(given_.get(index, {}) for index in range(num_sources)),
    )


def stored_inputs(num_sources: int, count: int, seed: int) -> Stored:
    """Base and sources near it, some elements special or the base's own, at odd places of one array."""
    generator = np.random.default_rng((seed, num_sources, count))
    values = generator.standard_normal((1 + num_sources, count)).astype(np.float32)
    values[1:] = values[:1] + np.float32(0.05) * values[1:]
    values[1:][generator.random((num_sources, count)) < 0.1] = -0.0
    if seed % 3 == 0:
        chosen = generator.random(values.shape) < 0.01
        values[chosen] = generator.choice(np.array(SPECIAL, np.float32), int(chosen.sum()))
    if seed % 5 == 0:
        values *= np.float32(1e-38)
    gap = count + 2 * (seed % 4) + 1
    words = np.full((1 + num_sources) * gap + 3, GUARD, np.uint16)
    places = 3 + gap * generator.permutation(1 + num_sources).astype(np.int64)
    for place, row in zip(places, values, strict=True):
        words[place : place + count] = words_of(torch.from_numpy(row))
    return Stored(words, places, count, 0)


def words_of(values: torch.Tensor) -> NDArray[np.uint16]:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def piece_of(stored: Stored, first: int, count: int) -> Tile:
    """Some of the elements as the other way of computing has them."""
    rows = [stored.words[place + first : place + first + count] for place in stored.places]
    patterns = torch.from_numpy(np.stack(rows).view(np.int16).copy())
    values = patterns.view(torch.bfloat16).float()
    return Tile(values[0].clone(), values[1:] - values[:1], stored.start + first)


def shape_of(method: Method, count: int, length: int) -> tuple[int, ...]:
    return (count // length, length) if method.access is Access.ROW else (count,)


def pieces(count: int, step: int) -> Iterator[tuple[int, int]]:
    yield from ((first, min(step, count - first)) for first in range(0, count, step))


def gathered(method: Method, given_: Settings, stored: Stored, step: int, *, at_once: bool) -> Any:
    """The state after all passes over tiles of ``step`` elements, in one of the two ways."""
    kernel = method.kernel
    if not kernel.passes(given_):
        return None
    state = kernel.begin(given_, stored.count, CPU)
    if method.sampler is not None and sample_runs(stored.count):
        method.sampler(state, sample_of(piece_of(stored, 0, stored.count)), given_)
    for index in itertools.count():
        for first, count in pieces(stored.count, step):
            if at_once:
                assert kernel_of(method).observe_stored(state, stored.part(first, count), given_, index)
            else:
                kernel.observe(state, piece_of(stored, first, count), given_, index)
        more = kernel.conclude(state, given_, index)
        if not more and index + 1 >= kernel.passes(given_):
            return state
    raise AssertionError


def known(state: Any) -> str:
    """All that the passes found out."""
    if isinstance(state, Selections):
        found = [selection for pair in state.found for selection in pair or ()]
        return repr([(each.threshold, each.tied_share, each.sum_all, each.sum_kept) for each in found])
    if isinstance(state, _Statistics):
        return repr((state.squares, state.num_differing, state.cut))
    assert state is None
    return ""


def by_pieces(method: Method, given_: Settings, stored: Stored, step: int) -> tuple[str, NDArray[np.uint16]]:
    state = gathered(method, given_, stored, step, at_once=False)
    tiles = (piece_of(stored, *piece) for piece in pieces(stored.count, step))
    results = [words_of(method.kernel.apply(tile, given_, state)) for tile in tiles]
    return known(state), np.concatenate([np.empty(0, np.uint16), *results])


def at_once(
    method: Method, given_: Settings, stored: Stored, step: int, bounds: list[int]
) -> tuple[str, NDArray[np.uint16]]:
    """What the stored way gives in tiles of ``step`` elements, the result in parts between ``bounds``."""
    state = gathered(method, given_, stored, step, at_once=True)
    out = np.full(stored.count + 2, GUARD, np.uint16)
    for begin, end in itertools.pairwise(bounds):
        part = stored.part(begin, end - begin)
        assert kernel_of(method).apply_stored(part, given_, state, out[1 + begin : 1 + end])
    assert out[0] == out[-1] == GUARD
    return known(state), out[1:-1]


def same_words(left: NDArray[np.uint16], right: NDArray[np.uint16]) -> bool:
    """The same bits, where one NaN is as good as another."""
    both_nan = ((left & 0x7FFF) > 0x7F80) & ((right & 0x7FFF) > 0x7F80)
    return left.shape == right.shape and bool(((left == right) | both_nan).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@some
@given(
    num_sources=st.integers(1, 9),
    count=st.sampled_from(COUNTS),
    seed=st.integers(0, 200),
    tile=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_stored_tiles_give_the_bits_of_pieces(
    name: str, num_sources: int, count: int, seed: int, tile: int, cuts: list[float]
) -> None:
    method = method_named(name)
    length = (1, 7, 100, 20_000)[seed % 4] if method.access is Access.ROW else 1
    stored = stored_inputs(num_sources, count // length * length, seed)
    given_ = make_settings(method, case_of(method, num_sources, seed), shape_of(method, stored.count, length))
    step = method.granule(given_) if method.access is Access.ROW else BLOCK
    step *= -(-BLOCK // step)
    wanted = by_pieces(method, given_, stored, step)
    bounds = sorted({0, stored.count, *(int(cut * stored.count) // length * length for cut in cuts)})
    words, found = stored.words.copy(), at_once(method, given_, stored, tile * step, bounds)
    assert found[0] == wanted[0]
    assert same_words(found[1], wanted[1])
    assert np.array_equal(stored.words, words)


@pytest.mark.parametrize("name", METHODS)
def test_a_part_of_no_elements_shows_that_it_can(name: str) -> None:
    method = method_named(name)
    given_ = make_settings(method, case_of(method, 2, 1), (16, 20))
    stored = stored_inputs(2, 320, 1)
    state = gathered(method, given_, stored, BLOCK, at_once=True)
    assert kernel_of(method).apply_stored(stored.part(0, 0), given_, state, np.empty(0, np.uint16))


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_nothing_is_observed_where_there_are_no_passes(name: str) -> None:
    method = method_named(name)
    given_ = make_settings(method, case_of(method, 2, 1), (16, 20))
    assert not kernel_of(method).observe_stored(None, stored_inputs(2, 320, 1), given_, 0)


@pytest.mark.parametrize("name", METHODS)
def test_where_nothing_differs_the_base_stays(name: str) -> None:
    method = method_named(name)
    base = stored_inputs(1, 4096, 2)
    stored = replace(base, places=base.places[[0, 0, 0]])
    given_ = make_settings(method, case_of(method, 2, 3), (64, 64))
    state = gathered(method, given_, stored, BLOCK, at_once=True)
    out = np.empty(4096, np.uint16)
    assert kernel_of(method).apply_stored(stored, given_, state, out)
    assert np.array_equal(out, stored.words[base.places[0] : base.places[0] + 4096])
