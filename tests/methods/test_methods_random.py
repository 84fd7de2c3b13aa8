"""Methods that draw at random: numbers by name, and what is dropped."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.method_kit import (
    FEW_BYTES,
    Case,
    MethodKit,
    make_settings,
    merge,
    method_named,
    random_inputs,
    run,
    same_bits,
    settings_for,
    sources_of,
    threads,
)
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Settings, Tile, Value, dare, keep_mask, normal, random_key, uniform
from raymerge.methods import reduce as reduce_module
from raymerge.methods.dare import _factors
from raymerge.methods.della import _ranks, _sparsify, _sparsify_in_torch
from raymerge.methods.random import (
    _points,
    _write_numbers,
    chance_of,
    keep_factors,
    limit_of,
    limits_of,
    write_numbers,
)
from raymerge.methods.task_arithmetic import merge_factors_in_torch

CPU = torch.device("cpu")
MANY = 1 << 20
WORD = 1 << 64

GOLDEN_KEY = 4517192690449279934
GOLDEN_START = "1011000010001011101010111001100110100110001001101110001111101111"
GOLDEN_FAR = "0000000000010000010100101100000001000100011010110011100000000010"


def plain_hash(key: int, index: int) -> int:
    """The definition in Python's own integers, without the last xor."""
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"raymerge word").digest()
    state = (index * 0x9E3779B97F4A7C15 + key) % WORD
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state + int.from_bytes(digest, "little")) % WORD
    return (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD


def plain_number(key: int, index: int) -> int:
    state = plain_hash(key, index // 2)
    state ^= state >> 31
    return state >> 32 if index % 2 else state % (1 << 32)


def plain_keep(key: int, index: int, density: float) -> bool:
    return plain_number(key, index) < density * 2**32


def numbers(key: int, start: int, count: int) -> torch.Tensor:
    return write_numbers(key, start, out=torch.empty(count, dtype=torch.int32))


def as_text(mask: torch.Tensor) -> str:
    return "".join("01"[value] for value in mask.tolist())


@settings(deadline=None, max_examples=25)
@given(key=st.integers(0, 2**64 - 1), start=st.integers(0, 2**45), density=st.floats(0.001, 0.999))
def test_mask_follows_its_definition(key: int, start: int, density: float) -> None:
    mask = keep_mask(key, start, 20, density, CPU)
    assert mask.tolist() == [plain_keep(key, start + offset, density) for offset in range(20)]


def test_masks_never_change() -> None:
    """Frozen: another text here means other bytes in every DARE merge ever published."""
    key = random_key(42, "model.layers.0.mlp.up_proj.weight", 1)
    assert key == GOLDEN_KEY
    assert as_text(keep_mask(key, 0, 64, 0.5, CPU)) == GOLDEN_START
    assert as_text(keep_mask(key, 2**33 + 5, 64, 0.25, CPU)) == GOLDEN_FAR


@settings(deadline=None, max_examples=25)
@given(key=st.integers(0, 2**64 - 1), start=st.integers(0, 2**45), count=st.integers(0, 50))
def test_numbers_follow_their_definition(key: int, start: int, count: int) -> None:
    expected = [plain_number(key, start + offset) - 2**31 for offset in range(count)]
    assert numbers(key, start, count).tolist() == expected
    assert _write_numbers(key, start, torch.empty(count, dtype=torch.int32)).tolist() == expected


@settings(deadline=None, max_examples=25)
@given(
    key=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**45),
    count=st.integers(0, 300),
    density=st.one_of(st.floats(0, 1), st.sampled_from([2.0**-32, 2.0**-40, 1 - 2.0**-33, 1 - 2.0**-32])),
)
def test_factors_follow_the_mask(key: int, start: int, count: int, density: float) -> None:
    mask = keep_mask(key, start, count, density, CPU)
    factors = keep_factors(key, start, density, 1 / 3, out=torch.empty(count))
    assert same_bits(factors, mask * torch.tensor(1 / 3))


@pytest.mark.parametrize(
    ("density", "limit"),
    [
        (0.0, 0),
        (-0.5, 0),
        (5e-324, 1),
        (2.0**-32, 1),
        (1.5 * 2.0**-32, 2),
        (0.25, 2**30),
        (1 - 2.0**-32, 2**32 - 1),
        (1 - 2.0**-33, 2**32),
        (1.0, 2**32),
        (7.0, 2**32),
    ],
)
def test_densities_are_rounded_up(density: float, limit: int) -> None:
    """Hence one that is not 0 never keeps nothing at all."""
    assert limit_of(density) == limit
    assert chance_of(density) == limit / 2**32
    assert limits_of(torch.tensor([density], dtype=torch.float64)).tolist() == [limit]


def test_an_element_is_kept_from_its_own_number_on() -> None:
    number = plain_number(3, 77)
    for density, kept in ((number, False), (number + 1e-3, True), (number + 1, True)):
        assert bool(keep_mask(3, 77, 1, density / 2**32, CPU)) == kept


def test_keys_tell_seed_tensor_and_source_apart() -> None:
    keys = {
        random_key(seed, tensor, source)
        for seed in (0, 1, 11, -1)
        for tensor in ("a", "b", "1/a", "é")
        for source in (0, 1, 11)
    }
    assert len(keys) == 4 * 4 * 3
    assert all(0 <= key < 2**64 for key in keys)


PLAIN = NormalDist()

GOLDEN_UNIFORM = [12997285, 5009966, 3510748, 1513253]
GOLDEN_NORMAL = [0.7544103264808655, -0.5283815860748291, -0.8090022802352905, -1.339543342590332]

Draw = Callable[[int, int, int, torch.device], torch.Tensor]
DRAWS: tuple[Draw, ...] = (
    normal,
    uniform,
    lambda key, start, count, device: keep_mask(key, start, count, 0.4, device).float(),
)


def plain_word(key: int, index: int) -> int:
    """The hash as an unsigned number with its top bit flipped."""
    return (plain_hash(key, index) + WORD // 2) % WORD


@settings(deadline=None, max_examples=25)
@given(key=st.integers(0, WORD - 1), start=st.integers(0, 2**45))
def test_uniform_follows_its_definition(key: int, start: int) -> None:
    found = uniform(key, start, 20, CPU).tolist()
    assert found == [(plain_word(key, start + offset) >> 40) / 2**24 for offset in range(20)]


@settings(deadline=None, max_examples=25)
@given(key=st.integers(0, WORD - 1), start=st.integers(0, 2**45))
def test_normal_follows_its_definition(key: int, start: int) -> None:
    points = [((plain_word(key, start + offset) >> 12) + 0.5) / 2**52 for offset in range(20)]
    expected = torch.tensor([PLAIN.inv_cdf(point) for point in points])
    torch.testing.assert_close(normal(key, start, 20, CPU), expected, rtol=2e-7, atol=1e-12)


def test_numbers_never_change() -> None:
    """Frozen: other numbers here mean other bytes in every output that was made with them."""
    key = random_key(42, "model.layers.0.mlp.up_proj.weight", 0)
    assert [int(number * 2**24) for number in uniform(key, 2**33 + 5, 4, CPU).tolist()] == GOLDEN_UNIFORM
    assert normal(key, 2**33 + 5, 4, CPU).tolist() == pytest.approx(GOLDEN_NORMAL, rel=1e-6)


@pytest.mark.parametrize("draw", DRAWS)
@settings(deadline=None, max_examples=15)
@given(start=st.integers(0, 2**40), cuts=st.lists(st.integers(0, 40_000), max_size=4))
def test_any_split_gives_the_same_numbers(draw: Draw, start: int, cuts: list[int]) -> None:
    bounds = sorted({0, *cuts, 40_000})
    parts = [draw(9, start + begin, end - begin, CPU) for begin, end in itertools.pairwise(bounds)]
    assert same_bits(torch.cat(parts), draw(9, start, 40_000, CPU))


@pytest.mark.parametrize("draw", DRAWS)
def test_chunks_and_threads_do_not_show(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(3, 11, MANY, CPU)
    with threads(2):
        assert same_bits(draw(3, 11, MANY, CPU), whole)
    monkeypatch.setattr(reduce_module, "_LONGEST_CPU_CHUNK", reduce_module.PIECE)
    assert same_bits(draw(3, 11, MANY, CPU), whole)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("count", [300, BLOCK, 9 * BLOCK])
def test_temporaries_stay_small(draw: Draw, count: int) -> None:
    with AllocationMeter() as meter:
        numbers = draw(5, 3, count, CPU)
    assert meter.peak_bytes <= numbers.nbytes + 4 * 1.5 * max(count, BLOCK) + FEW_BYTES


@pytest.mark.parametrize("word", [-(1 << 63), (1 << 63) - 1, -1, 0, 1 << 11, -(1 << 12)])
def test_every_hash_gives_a_finite_number(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest hash and the largest are the tails; those about 0 the middle."""
    monkeypatch.setattr("raymerge.methods.random.hashed", lambda _, words: words.fill_(word))
    points, shares = _points(1, 0, 3, CPU), uniform(1, 0, 3, CPU)
    point = ((word >> 12) + 0.5) / 2**52 + 0.5
    assert 0 < point < 1
    assert points.tolist() == [point] * 3
    numbers = torch.special.ndtri(points)
    assert numbers.tolist() == pytest.approx([PLAIN.inv_cdf(point)] * 3)
    assert float(numbers.abs().max()) <= 8.21
    assert shares.tolist() == [((word >> 40) + 2**23) / 2**24] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same() -> None:
    """Uniform numbers to the last bit, normal ones as near as the two libraries are."""
    gpu = torch.device("cuda")
    for start in (0, 2**33 + 5):
        for draw in DRAWS[1:]:
            assert torch.equal(draw(5, start, MANY, gpu).cpu(), draw(5, start, MANY, CPU))
        torch.testing.assert_close(
            normal(5, start, MANY, gpu).cpu(), normal(5, start, MANY, CPU), rtol=3e-7, atol=1e-12
        )
        whole = normal(5, start, MANY, gpu)
        parts = (normal(5, start, 100_003, gpu), normal(5, start + 100_003, MANY - 100_003, gpu))
        assert same_bits(torch.cat(parts).cpu(), whole.cpu())


NAMES = ["dare_linear", "dare_ties"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, math.inf, -math.inf, math.nan]
DENSITIES = [0.0, 1e-12, 2.0**-32, 0.3, 0.5, 1 - 2.0**-32, 1.0]
elements = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))


def dare_settings(name: str, *sources: Mapping[str, Value], **values: Value) -> Settings:
    return make_settings(method_named(name), Case(values, sources))


def apply(name: str, tile: Tile, settings: Settings) -> torch.Tensor:
    return method_named(name).kernel_with(settings).apply(tile, settings, None)


def drawn_rows(data: st.DataObject, count: int, length: int) -> torch.Tensor:
    numbers = data.draw(st.lists(elements, min_size=count * length, max_size=count * length))
    return torch.tensor(numbers, dtype=torch.float32).view(count, length)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(deadline=None, max_examples=30)
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
    settings = dare_settings(name, *sources, rescale=rescale, normalize=normalize)
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
    settings = dare_settings("dare_linear", {"weight": 1.0, "density": density})
    tile = Tile(torch.zeros(1000), torch.ones(1, 1000), 0)
    assert not bool(apply("dare_linear", tile, settings).any())
    monkeypatch.setattr(dare, "keep_factors", lambda *given, out: out.fill_(given[-1]))
    assert set(_factors(tile, settings)[0].tolist()) == {2.0**32}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_nan_reaches_the_result_even_where_it_is_dropped(name: str, density: float) -> None:
    settings = dare_settings(name, {"weight": 1.0, "density": density})
    tile = Tile(torch.zeros(500), torch.full((1, 500), math.nan), 9)
    assert bool(apply(name, tile, settings).isnan().all())


Array = NDArray[np.float64]
SHAPE = (37, 101)
DELLA = ["della", "della_linear"]


class TestDella(MethodKit):
    name = "della"
    cases = (
        Case(sources=sources_of(0.5, 0.3, 0.4, density=0.4, epsilon=0.2)),
        Case({"normalize": False, "rescale": False}, sources_of(0.5, -0.3, density=0.7)),
        Case({"lambda": 1.5}, (*sources_of(0.5, density=0.5), *sources_of(0.3))),
        Case(sources=sources_of(1.0, density=0.0)),
        Case(sources=sources_of(1.0)),
    )


class TestDellaLinear(MethodKit):
    name = "della_linear"
    cases = (
        Case(sources=sources_of(0.5, 0.3, -0.2, density=0.4, epsilon=0.2)),
        Case({"normalize": True, "rescale": False}, sources_of(0.5, 0.3, density=0.7)),
        Case(sources=(*sources_of(0.5, density=0.5, epsilon=0.0), *sources_of(0.3))),
        # A table for each of them, and not all at once.
        Case(sources=tuple(source for d in range(2, 8) for source in sources_of(0.2, density=d / 10))),
    )


def chances_of(delta: Array, density: float, epsilon: float) -> Array:
    """The paper's: linear in the rank within the row; ranks by counting, element by element."""
    rows = np.abs(delta).reshape(-1, delta.shape[-1])
    columns = rows.shape[1]
    if columns == 1:
        return np.full(delta.shape, density)
    ranks = np.zeros_like(rows)
    for column in range(columns):
        own = rows[:, column : column + 1]
        earlier_equal = (rows[:, :column] == own).sum(axis=1)
        ranks[:, column] = (rows < own).sum(axis=1) + earlier_equal
    low = density - epsilon
    return np.asarray(low + 2 * epsilon * ranks / (columns - 1)).reshape(delta.shape)


def uniforms(key: int, count: int) -> Array:
    """The random number of each element, from 0 to 1: what its chance must be above."""
    numbers = write_numbers(key, 0, out=torch.empty(count, dtype=torch.int32))
    return (numbers.double().numpy() + 2.0**31) / 2.0**32


@pytest.mark.parametrize(("density", "epsilon"), [(0.5, 0.1), (0.6, 0.3), (0.3, 0.0)])
@pytest.mark.parametrize("shape", [(40,), (4, 10), (2, 4, 5), (40, 1), ()])
def test_masks_follow_the_definition(density: float, epsilon: float, shape: tuple[int, ...]) -> None:
    base, [source] = random_inputs(1, shape)
    case = Case({"rescale": False}, sources_of(1.0, density=density, epsilon=epsilon))
    settings = settings_for("della_linear", case, shape)
    kept = merge(method_named("della_linear"), settings, base, [source]) != base
    delta = (source - base).double().numpy().reshape(shape or (1,))
    numbers = uniforms(settings.keys[0], delta.size).reshape(delta.shape)
    assert np.array_equal(kept.numpy().reshape(delta.shape), numbers < chances_of(delta, density, epsilon))


def test_by_hand() -> None:
    """Density 0.5 and epsilon 0.25 over three elements: chances 0.25, 0.5 and 0.75, factors 4, 2 and 4/3."""
    base = torch.zeros(400, 3)
    row = torch.tensor([3.0, -1.0, 2.0])
    case = Case({"normalize": False}, sources_of(1.0, density=0.5, epsilon=0.25))
    result = run("della", case, base, [row.expand(400, 3)])
    large, small, middle = (set(column.tolist()) for column in result.unbind(dim=1))
    assert (large, small, middle) == ({0.0, 4.0}, {-0.0, -4.0}, {0.0, 4.0})
    shares = (result != 0).double().mean(dim=0)
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.25, 0.5]).double(), rtol=0, atol=0.08)


def test_equal_magnitudes_rank_by_index() -> None:
    delta = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]).repeat(4000, 1)
    case = Case({"rescale": False}, sources_of(1.0, density=0.5, epsilon=0.4))
    shares = (run("della_linear", case, torch.zeros(4000, 5), [delta]) != 0).double().mean(dim=0)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]).double(), rtol=0, atol=0.04)


@pytest.mark.parametrize(
    ("density", "epsilon", "fits"),
    [
        (0.5, 0.15, True),
        (0.9, 0.15, False),
        (0.85, 0.15, False),
        (0.1, 0.15, False),
        (0.15, 0.15, False),
        (0.0, 0.5, True),
        (1.0, 0.5, True),
        (0.5, 0.0, True),
    ],
)
@pytest.mark.parametrize("name", DELLA)
def test_chances_must_be_chances(name: str, density: float, epsilon: float, fits: bool) -> None:
    sources = (*sources_of(1.0), *sources_of(1.0, density=density, epsilon=epsilon))
    sentence = method_named(name).check(settings_for(name, Case(sources=sources), SHAPE))
    assert (sentence is None) == fits


def test_the_objection_says_what_is_wrong() -> None:
    case = Case(sources=sources_of(1.0, density=0.9, epsilon=0.15))
    assert method_named("della").check(settings_for("della", case, SHAPE)) == (
        "density 0.9 and epsilon 0.15 give chances from 0.75 to 1.05, which must lie between 0 and 1"
    )


def in_both_forms(delta: torch.Tensor, length: int, *, density: float, epsilon: float) -> list[torch.Tensor]:
    """The factors of the rows by the compiled form and by torch's."""
    sources = sources_of(1.0, density=density, epsilon=epsilon)
    settings = settings_for("della", Case(sources=sources), (delta.numel() // length, length))
    ranks = _ranks(density, epsilon, settings, CPU)
    found = [torch.empty(delta.numel()) for _ in range(2)]
    for factors, sparsify in zip(found, (_sparsify, _sparsify_in_torch), strict=True):
        write_numbers(11, 7, out=factors.view(torch.int32))
        sparsify(delta, ranks, factors)
    return found


@hypothesis_settings(deadline=None, max_examples=30)
@given(data=st.data(), length=st.integers(1, 70), num_rows=st.integers(0, 5))
def test_both_forms_of_della_give_the_same_bits(data: st.DataObject, length: int, num_rows: int) -> None:
    value = st.one_of(st.sampled_from([*SPECIAL, 1e-38, -3e38, -math.nan]), st.floats(width=32))
    size = length * num_rows
    delta = torch.tensor(data.draw(st.lists(value, min_size=size, max_size=size)), dtype=torch.float32)
    compiled, plain = in_both_forms(delta, length, density=0.5, epsilon=0.45)
    assert same_bits(compiled, plain)


@pytest.mark.parametrize("length", [1000, 4096, 50_000])
@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_both_forms_give_the_same_bits_of_long_rows(length: int, epsilon: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base, [source] = random_inputs(1, (3, length), dtype)
        delta = (source - base).flatten()
        compiled, plain = in_both_forms(delta, length, density=0.6, epsilon=epsilon)
        assert same_bits(compiled, plain)


@pytest.mark.parametrize(
    ("chance", "number", "factor"), [(1e-12, -(2**31), 2.0**32), (1 - 2.0**-34, 2**31 - 1, 1.0)]
)
def test_the_smallest_chance_is_made_up_for_and_the_largest_keeps_everything(
    chance: float, number: int, factor: float
) -> None:
    """A chance below 2**-32 is as good as 2**-32, and so is the factor."""
    settings = settings_for("della", Case(sources=sources_of(1.0, density=0.5)), (1, 4))
    ranks = _ranks(chance, 0.0, settings, CPU)
    assert ranks.bitwise_right_shift(32).tolist() == [number] * 4
    assert ranks.to(torch.int32).view(torch.float32).tolist() == [factor] * 4


BREADCRUMBS = ["breadcrumbs", "breadcrumbs_ties"]


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


def test_breadcrumbs_by_hand() -> None:
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


@pytest.mark.parametrize("name", BREADCRUMBS)
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


def test_of_equal_elements_the_right_share_stays() -> None:
    """All elements tie at both thresholds: a tenth goes at the top, half stays, all over the tensor."""
    count = 4 * BLOCK
    case = Case(sources=sources_of(1.0, density=0.5, gamma=0.1))
    result = run("breadcrumbs", case, torch.zeros(count), [torch.ones(count)])
    assert float(result.double().mean()) == pytest.approx(0.5, abs=0.005)
    assert float((result.view(4, -1).mean(dim=1) - 0.5).abs().max()) < 0.01


def test_streams_once_when_nothing_is_dropped() -> None:
    for name in [*BREADCRUMBS, "ties"]:
        method = method_named(name)
        whole = make_settings(method, Case(sources=sources_of(0.5, 0.5)))
        mixed = make_settings(method, Case(sources=(*sources_of(0.5), *sources_of(0.5, density=0.9))))
        assert (method.kernel.passes(whole), method.kernel.passes(mixed)) == (0, 1)
