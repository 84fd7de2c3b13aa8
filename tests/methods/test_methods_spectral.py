"""iso_c and tsv_m, against float64 references that take other ways to the same numbers.

The references of iso_c use no singular value decomposition: orthogonal factors come from Newton's iteration.
That of tsv_m follows the paper step by step with full decompositions, where the kernel uses Gram matrices.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kits.memory_meter import AllocationMeter
from kits.method_kit import Case, MethodKit, make_settings, method_named, random_inputs, run, sources_of
from numpy.typing import NDArray

from raymerge.methods import BLOCK, Tile

Array = NDArray[np.float64]
BOTH = ["iso_c", "tsv_m"]


def merged_delta(name: str, deltas: list[Array], case: Case | None = None) -> Array:
    """What a method makes of deltas, on a base of zeros."""
    sources = [torch.from_numpy(delta).float() for delta in deltas]
    case = case or Case(sources=({},) * len(deltas))
    return run(name, case, torch.zeros(sources[0].shape), sources).double().numpy()


def weighted_deltas(
    base: torch.Tensor, sources: list[torch.Tensor], weights: tuple[float, ...]
) -> list[Array]:
    """``w d`` of each source; deltas as the executor takes them, subtracted in float32."""
    return [w * (source - base).double().numpy() for w, source in zip(weights, sources, strict=True)]


def orthonormal(rows: int, columns: int, seed: int) -> Array:
    """A random matrix with orthonormal columns."""
    found = np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, columns)))[0]
    return np.asarray(found, dtype=np.float64)


def spectrum(values: list[float], rows: int, columns: int, seed: int) -> Array:
    """A random matrix with these singular values, and zeros for the rest."""
    rank = len(values)
    return np.asarray(
        (orthonormal(rows, rank, seed) * np.array(values)) @ orthonormal(columns, rank, seed + 1).T
    )


class TestIsoC(MethodKit):
    name = "iso_c"
    scales = False
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"lambda": 0.6}, sources_of(0.5, -0.3)),
        Case(sources=({},)),
    )


class TestTsvM(MethodKit):
    name = "tsv_m"
    scales = False
    cases = (
        Case(sources=sources_of(1.0, 1.0, 1.0)),
        Case({"lambda": 0.6}, sources_of(0.5, -0.3)),
        Case(sources=({},)),
    )


# iso_c ------------------------------------------------------------------------------------------------


def newton_factor(square: Array) -> Array:
    """The orthogonal polar factor of a regular matrix: the mean of it and its inverse transpose, repeated."""
    factor = square / np.linalg.norm(square)
    for _ in range(100):
        factor = (factor + np.linalg.inv(factor).T) / 2
    return np.asarray(factor)


def iso_reference(left: Array, right: Array) -> Array:
    """Iso-C of ``left @ right.T``, both of full column rank: ``H = Q' A`` has the singular values."""
    (of_left, left_core), (of_right, right_core) = np.linalg.qr(left), np.linalg.qr(right)
    core = left_core @ right_core.T
    factor = newton_factor(core)
    mean = np.trace(factor.T @ core) / core.shape[0]
    return np.asarray(mean * (of_left @ factor @ of_right.T))


def test_iso_c_by_hand() -> None:
    """(3, 1) and (4, 2) become their means; a rotation keeps its directions."""
    assert merged_delta("iso_c", [np.diag([3.0, 1.0])]) == pytest.approx(np.diag([2.0, 2.0]))
    turned = np.array([[0.0, 4.0, 0.0], [-2.0, 0.0, 0.0]])
    expected = np.array([[0.0, 3.0, 0.0], [-3.0, 0.0, 0.0]])
    assert merged_delta("iso_c", [turned]) == pytest.approx(expected)
    assert merged_delta("iso_c", [turned / 2, turned / 2]) == pytest.approx(expected)


@pytest.mark.parametrize("rank", [1, 3, 11])
@pytest.mark.parametrize("shape", [(30, 30), (20, 50)])
def test_iso_c_gives_no_direction_to_what_is_not_there(rank: int, shape: tuple[int, int]) -> None:
    """An adapter's delta has few directions. Its float32 elements are not of exact rank, and need not be."""
    generator = np.random.default_rng(5)
    left, right = (generator.standard_normal((side, rank)) for side in shape)
    result = merged_delta("iso_c", [left @ right.T])
    reference = iso_reference(left, right)
    np.testing.assert_allclose(result, reference, atol=2e-5 * float(np.abs(reference).max()))
    values = np.linalg.svd(result, compute_uv=False)
    np.testing.assert_allclose(values[:rank], values[0], rtol=1e-5)
    assert float(values[rank:].max()) < 1e-5 * values[0]


def test_iso_c_keeps_small_directions() -> None:
    """A singular value of 1e-5 of the largest is data, and its direction counts as much as the others."""
    matrix = spectrum([1.0, 1e-5], 16, 16, seed=9)
    values = np.linalg.svd(merged_delta("iso_c", [matrix]), compute_uv=False)
    assert float(values[1]) == pytest.approx(float(values[0]), rel=1e-5)


# tsv_m ------------------------------------------------------------------------------------------------


def _procrustes(matrix: Array) -> Array:
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vt)


def test_tsv_m_by_hand() -> None:
    """Directions at 0 and 45 degrees are turned to -22.5 and 67.5, the nearest that are orthogonal."""
    one, other = np.array([[2.0, 0.0], [0.0, 0.0]]), np.full((2, 2), 0.5)
    near, far = (np.array([math.cos(a), math.sin(a)]) for a in (-math.pi / 8, 3 * math.pi / 8))
    expected = 2 * np.outer(near, near) + np.outer(far, far)
    assert merged_delta("tsv_m", [one, other]) == pytest.approx(expected, rel=1e-6)


def test_tsv_m_of_equal_deltas_is_their_leading_part() -> None:
    """A set of vectors that is no basis has no nearest orthonormal set; on its span it has."""
    for copies in (2, 3, 4):
        matrix = spectrum([8.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.3, 0.2, 0.1, 0.05], 15, 12, seed=2)
        u, s, vt = np.linalg.svd(matrix.astype(np.float32).astype(np.float64), full_matrices=False)
        count = 12 // copies
        leading = (u[:, :count] * s[:count]) @ vt[:count]
        result = merged_delta("tsv_m", [matrix] * copies)
        np.testing.assert_allclose(result, leading, rtol=1e-5, atol=1e-6)


def test_tsv_m_takes_no_direction_from_a_source_that_changed_nothing() -> None:
    matrix = spectrum([8.0, 4.0, 2.0, 1.0], 4, 4, seed=6)
    u, s, vt = np.linalg.svd(matrix)
    leading = (u[:, :2] * s[:2]) @ vt[:2]
    for pair in ([matrix, np.zeros((4, 4))], [np.zeros((4, 4)), matrix]):
        np.testing.assert_allclose(merged_delta("tsv_m", pair), leading, rtol=1e-5, atol=1e-6)


def test_tsv_m_takes_no_direction_from_an_adapter_beyond_its_rank() -> None:
    """Of rank 1 where 4 were allowed: the other source's directions are as if there were but one of this."""
    generator = np.random.default_rng(8)
    adapter = np.outer(generator.standard_normal(8), generator.standard_normal(8))
    matrix = generator.standard_normal((8, 8))
    (u, s, vt), (others_u, others_s, others_vt) = map(np.linalg.svd, (adapter, matrix))
    left = _procrustes(np.concatenate([u[:, :1], others_u[:, :4]], axis=1))
    right = _procrustes(np.concatenate([vt[:1], others_vt[:4]]))
    expected = (left * np.concatenate([s[:1], others_s[:4]])) @ right
    np.testing.assert_allclose(merged_delta("tsv_m", [adapter, matrix]), expected, rtol=1e-4, atol=1e-5)


# Both -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_equal_singular_values_leave_no_choice_to_the_library(name: str) -> None:
    """Any basis of the space of equal singular values is as good as any other, and none shows."""
    hadamard = np.array([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    for matrix in (np.eye(5), hadamard, 0.25 * hadamard, np.kron(hadamard, hadamard)):
        assert merged_delta(name, [matrix]) == pytest.approx(matrix, abs=1e-6)


def test_equal_singular_values_below_the_cut_leave_no_choice_either() -> None:
    left, right = orthonormal(8, 4, 1), orthonormal(8, 4, 2)
    one = 3.0 * left[:, :2] @ right[:, :2].T
    other = 2.0 * left[:, 2:] @ right[:, 2:].T
    np.testing.assert_allclose(merged_delta("tsv_m", [one, other]), one + other, atol=2e-6)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("shape", [(), (1,), (40,)])
def test_vectors_take_the_mean_of_the_deltas(name: str, shape: tuple[int, ...]) -> None:
    base, sources = random_inputs(3, shape)
    weights = (0.5, 1.0, -0.2)
    mean = np.mean(weighted_deltas(base, sources, weights), axis=0)
    result = run(name, Case({"lambda": 2.0}, sources_of(*weights)), base, sources)
    expected = base.double().numpy() + 2 * mean
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", BOTH)
def test_a_convolution_is_the_matrix_of_its_output_channels(name: str) -> None:
    base, sources = random_inputs(2, (8, 3, 2, 2))
    case = Case(sources=sources_of(1.0, 0.5))
    flat = run(name, case, base.view(8, 12), [source.view(8, 12) for source in sources])
    assert torch.equal(run(name, case, base, sources).view(8, 12), flat)


@hypothesis_settings(deadline=None, max_examples=20)
@given(
    name=st.sampled_from(BOTH),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    exponent=st.integers(-40, 10),
)
def test_deltas_of_another_size_give_the_same_merge(
    name: str, rows: int, columns: int, exponent: int
) -> None:
    """No threshold is absolute: deltas times a power of two give the merged delta times that power."""
    deltas = [source.double().numpy() * 2.0**-8 for source in random_inputs(2, (rows, columns))[1]]
    plain, factor = merged_delta(name, deltas), 2.0**exponent
    scaled = merged_delta(name, [delta * factor for delta in deltas]) / factor
    np.testing.assert_allclose(scaled, plain, rtol=1e-4, atol=1e-6 * float(np.abs(plain).max()))


@pytest.mark.parametrize(
    ("name", "weights"), [("iso_c", (0.0, 0.0)), ("iso_c", (1.0, -1.0)), ("tsv_m", (0.0, 0.0))]
)
def test_deltas_that_come_to_nothing_leave_the_base(name: str, weights: tuple[float, float]) -> None:
    base, sources = random_inputs(1, (6, 6))
    result = run(name, Case(sources=sources_of(*weights)), base, [sources[0], sources[0]])
    assert torch.equal(result, base)


def test_opposite_deltas_cancel_in_tsv_m() -> None:
    """They share their directions but for the sign, and each direction counts once."""
    matrix = spectrum([2.0, 1.0], 6, 6, seed=1)
    assert float(np.abs(merged_delta("tsv_m", [matrix, -matrix])).max()) < 1e-6


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("shape", "num_sources"), [((400, 400), 3), ((260, 520), 1)])
def test_memory_of_matrices(name: str, shape: tuple[int, int], num_sources: int) -> None:
    """The kit's shapes are long and flat; decompositions cost most where sides are equal."""
    method = method_named(name)
    settings = make_settings(method, Case(sources=({},) * num_sources), shape)
    base, sources = random_inputs(num_sources, shape)
    tile = Tile(base.flatten(), torch.stack([(source - base).flatten() for source in sources]), 0)
    assert base.numel() > BLOCK
    with AllocationMeter() as meter:
        result = method.kernel.apply(tile, settings, None)
    assert meter.peak_bytes <= 4 * base.numel() * method.scratch + result.nbytes
