"""Every method of the table through the kit; and the kit on methods that lie."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from kits.method_kit import Case, MethodKit, kit_of, method_named
from numpy.typing import NDArray

from raymerge.methods import (
    BLOCK,
    Access,
    Block,
    Expected,
    Kernel,
    LogicalTensor,
    Method,
    Settings,
    Stored,
    Tile,
    methods,
)
from raymerge.methods.reference import elementwise


def _sources(*weights: float, density: float = 1.0) -> tuple[dict[str, float], ...]:
    return tuple({"weight": weight, "density": density} for weight in weights)


class TestLinear(MethodKit):
    name = "linear"
    cases = (
        Case(sources=({"weight": 0.5}, {"weight": 0.3}, {"weight": -0.2})),
        Case({"normalize": False}, ({"weight": 0.5}, {"weight": 0.7}), fixes_equal_inputs=False),
        Case(sources=({"weight": 0.3},)),
        Case({"normalize": False}, ({"weight": 1.0},)),
    )


class TestPassthrough(MethodKit):
    name = "passthrough"
    may_alias = True
    cases = (
        Case(),
        Case(sources=({"scale": 1.0},)),
        Case(sources=({"scale": 0.3},), fixes_equal_inputs=False),
    )


class TestTaskArithmetic(MethodKit):
    name = "task_arithmetic"
    cases = (
        Case(sources=_sources(0.5, 0.3, -0.2)),
        Case({"normalize": True, "lambda": 0.7}, _sources(0.5, 0.3)),
        Case({"normalize": True}, _sources(0.5, -0.5)),
        Case(sources=_sources(1.0)),
    )


class TestSlerp(MethodKit):
    name = "slerp"
    cases = (Case({"t": 0.4}), Case({"t": 0.0}), Case({"t": 1.3}))


class TestTies(MethodKit):
    name = "ties"
    cases = (
        Case(sources=_sources(0.5, 0.3, 0.4, density=0.3)),
        Case({"normalize": False, "rescale": True}, _sources(1.0, -0.5, density=0.1)),
        Case({"lambda": 1.5}, (*_sources(0.5, density=0.5), *_sources(0.3))),
        Case(sources=_sources(0.5, 0.3)),
        Case(sources=_sources(1.0, density=0.0)),
    )


class TestDareLinear(MethodKit):
    name = "dare_linear"
    cases = (
        Case(sources=_sources(0.5, 0.3, -0.2, density=0.4)),
        Case({"rescale": False, "normalize": True, "lambda": 2.0}, _sources(0.5, 0.3, density=0.7)),
        Case(sources=(*_sources(0.5, density=0.0), *_sources(0.3))),
    )


class TestDareTies(MethodKit):
    name = "dare_ties"
    cases = (
        Case(sources=_sources(0.5, 0.3, 0.4, density=0.4)),
        Case({"normalize": True, "rescale": False}, _sources(0.5, -0.3, density=0.7)),
        Case(sources=(*_sources(0.5, density=0.5), *_sources(0.3))),
    )


def _named_in_files() -> set[str]:
    """Methods with cases of their own, looked up in the text of all files."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_methods_*.py")]
    return {name for text in texts for name in re.findall(r'^    name = "(\w+)"$', text, re.MULTILINE)}


for _name in methods().keys() - _named_in_files():
    globals()[f"Test_{_name}"] = kit_of(methods()[_name])


class _TileMean(Kernel):
    """Depends on how the tensor is cut."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0] - tile.sources[0].mean()


class _Overwriting(Kernel):
    """Writes into its input."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0].mul_(0.5)


class _Swallowing(Kernel):
    """Loses what is not finite."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return torch.nan_to_num(tile.sources[0] * 1.0, 0.0, 0.0, 0.0)


class _Dropping(Kernel):
    """Drops what is below an absolute threshold."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0] * (tile.sources[0].abs() > 1e-8)


class _Greedy(Kernel):
    """Takes more memory than it says."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0].double().mul_(1.0).float()


class _GreedyInNumpy(Kernel):
    """Takes it where torch does not see."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        doubled = tile.sources[0].numpy().astype(np.float64)
        return torch.from_numpy(doubled.astype(np.float32))


@numba.njit(nogil=True)
def _copy_by_doubles(values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    doubled = values.astype(np.float64)
    for i in range(out.size):
        out[i] = doubled[i]


class _GreedyInLoop(Kernel):
    """Takes it in a compiled loop."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        out = torch.empty_like(tile.sources[0])
        _copy_by_doubles(tile.sources[0].numpy(), out.numpy())
        return out

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: NDArray[np.uint16]) -> bool:
        out[:] = np.zeros(5 * out.size)[: out.size]
        return True


class _FirstCounts(Kernel):
    """Sees the sources in their order."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0] * 1.0


class _Forgetful(Kernel):
    """Gives another answer each time."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0] + torch.rand(1)


class _BaseReader(Kernel):
    """Looks at the weights behind the deltas."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        base = tile.require_base()
        return base + tile.sources[0] * base


class _Halved(Kernel):
    """Computes something else than the reference."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.sources[0] * (0.5 + 2.0**-17) + tile.sources[1] * 0.5


def _by_torch(tensor: LogicalTensor, block: Block) -> Expected:
    total = torch.from_numpy(block.sources).sum(0).numpy()
    return Expected(total, np.ones(len(total)))


class _Liar(MethodKit):
    """Two sources, all else as declared for ``linear``."""

    cases = (Case(sources=({"weight": 0.5}, {"weight": 0.3})),)

    def __init__(self, method: Method) -> None:
        self._method = method

    def method(self) -> Method:
        return self._method


_Liar.name = "linear"

LIES = [
    ("linear", _TileMean(), "test_any_tiling_gives_the_same_bits"),
    ("linear", _TileMean(), "test_smallest_tiles_give_the_same_bits"),
    ("linear", _Overwriting(), "test_tiles_are_not_written_to"),
    ("linear", _FirstCounts(), "test_order_of_sources"),
    ("linear", _Forgetful(), "test_twice_the_same"),
    ("linear", _TileMean(), "test_equal_inputs_are_left_alone"),
    ("linear", _Halved(), "test_kernel_and_reference_agree"),
    ("task_arithmetic", _BaseReader(), "test_deltas_are_all_it_knows_of_the_sources"),
]


@pytest.mark.parametrize(("like", "kernel", "test"), LIES)
def test_the_kit_finds_lies(like: str, kernel: Kernel, test: str) -> None:
    honest = method_named(like)
    with pytest.raises(AssertionError):
        getattr(_Liar(replace(honest, kernel=kernel)), test)()


def test_the_kit_finds_a_reference_that_computes_with_torch() -> None:
    honest = method_named("linear")
    with pytest.raises(AssertionError, match="computes with torch"):
        _Liar(replace(honest, reference=elementwise(_by_torch))).test_kernel_and_reference_agree()


def test_the_kit_finds_swallowed_nan() -> None:
    honest = method_named("linear")
    with pytest.raises(AssertionError):
        _Liar(replace(honest, kernel=_Swallowing())).test_what_is_not_finite_reaches_the_result(float("nan"))


GREEDY: list[Kernel] = [_Greedy(), _GreedyInNumpy(), _GreedyInLoop()]


@pytest.mark.parametrize("kernel", GREEDY)
def test_the_kit_finds_hidden_memory(kernel: Kernel) -> None:
    honest = method_named("linear")
    with pytest.raises(AssertionError):
        _Liar(replace(honest, kernel=kernel)).test_memory_stays_within_the_declaration((3, BLOCK))


def test_the_kit_finds_hidden_memory_of_stored_elements() -> None:
    honest = method_named("linear")
    liar = _Liar(replace(honest, kernel=_GreedyInLoop()))
    with pytest.raises(AssertionError):
        liar.test_stored_memory_stays_within_the_declaration((3, BLOCK))


def test_the_kit_finds_an_absolute_threshold() -> None:
    honest = method_named("linear")
    with pytest.raises(AssertionError):
        _Liar(replace(honest, kernel=_Dropping())).test_no_threshold_is_absolute(-60)


def test_the_kit_finds_a_false_identity() -> None:
    honest = method_named("linear")
    with pytest.raises(AssertionError):
        _Liar(replace(honest, identity=lambda _: 1)).test_identity_tells_the_truth()


def test_the_kit_cuts_where_the_access_class_allows() -> None:
    honest = method_named("linear")
    settings = Settings(values={}, sources=({},), shape=(2, 3, 4))
    steps = {access: replace(honest, access=access).granule(settings) for access in Access}
    assert steps == {Access.ELEMENT: 1, Access.ROW: 64, Access.TENSOR: BLOCK, Access.MATRIX: 24}
