"""MethodKit over every method, a toy method, and what a method declares."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from kits.merge_cases import INLINE, default_recipe, make_family, merge, recipes
from kits.method_kit import Case, MethodKit, kit_of, make_settings, method_named
from kits.method_table import COPIED_DOCUMENT, DOCUMENT, with_copied_formats, with_table
from numpy.typing import NDArray

from raymerge.api import AuditOptions, audit
from raymerge.methods import (
    BLOCK,
    Access,
    BaseUse,
    Block,
    Expected,
    Kernel,
    LogicalTensor,
    Method,
    Parameter,
    Settings,
    Stored,
    StoredKernel,
    Takes,
    Tile,
    Value,
    methods,
    table,
)
from raymerge.methods.reference import combination, elementwise


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


class _GreedyInLoop(StoredKernel):
    """Takes it in a compiled loop."""

    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        out = torch.empty_like(tile.sources[0])
        _copy_by_doubles(tile.sources[0].numpy(), out.numpy())
        return out

    def apply_stored(self, stored: Stored, settings: Settings, state: None, out: NDArray[np.uint16]) -> None:
        out[:] = np.zeros(5 * out.size)[: out.size]


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
    pytest.param("linear", _TileMean(), "test_any_tiling_gives_the_same_bits", marks=pytest.mark.slow),
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
    with pytest.raises(AssertionError, match="computes with torch"):
        _liar(reference=elementwise(_by_torch)).test_kernel_and_reference_agree()


def _liar(**said: Any) -> _Liar:
    return _Liar(replace(method_named("linear"), **said))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "find",
    [
        lambda: _liar(kernel=_Swallowing()).test_what_is_not_finite_reaches_the_result(float("nan")),
        *(
            lambda kernel=kernel: _liar(kernel=kernel).test_memory_stays_within_the_declaration((3, BLOCK))
            for kernel in (_Greedy(), _GreedyInNumpy(), _GreedyInLoop())
        ),
        lambda: _liar(kernel=_GreedyInLoop()).test_stored_memory_stays_within_the_declaration((3, BLOCK)),
        lambda: _liar(kernel=_Dropping()).test_no_threshold_is_absolute(-60),
        lambda: _liar(identity=lambda _: 1).test_identity_tells_the_truth(),
    ],
)
def test_the_kit_finds_what_is_lost_held_cut_off_or_falsely_declared(find: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        find()


def test_the_kit_cuts_where_the_access_class_allows() -> None:
    honest = method_named("linear")
    settings = Settings(values={}, sources=({},), shape=(2, 3, 4))
    steps = {access: replace(honest, access=access).granule(settings) for access in Access}
    assert steps == {Access.ELEMENT: 1, Access.ROW: 64, Access.TENSOR: BLOCK, Access.MATRIX: 24}


class _PullKernel(Kernel):
    def apply(self, tile: Tile, settings: Settings, state: None) -> torch.Tensor:
        return tile.require_base() + settings.number("pull") * tile.sources.mean(0)


def _reference(tensor: LogicalTensor, block: Block) -> Expected:
    return combination(block, [tensor.settings.number("pull") / tensor.num_sources] * tensor.num_sources)


TOY = Method(
    name="toy",
    summary="The base pulled towards the mean of the sources.",
    paper="-",
    access=Access.ELEMENT,
    base=BaseUse.REQUIRED,
    takes=Takes.DELTAS,
    kernel=_PullKernel(),
    reference=elementwise(_reference),
    parameters=(Parameter("pull", "float", "global", "How far", required=True, minimum=0.25),),
    scratch=2.0,
)
TestToy = kit_of(TOY)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_METHODS", {**methods(), "toy": TOY})


def test_a_line_of_the_table_is_all_that_a_method_needs(registered: None, tmp_path: Path) -> None:
    family = make_family(tmp_path / "family")
    assert recipes(family)["toy"] == default_recipe(family, TOY)
    merge(default_recipe(family, TOY), tmp_path / "out")
    assert not audit(tmp_path / "out", AuditOptions(1.0), INLINE).num_problems
    row = f"| `toy` | {TOY.summary} | element | required | `pull` (required) | - |"
    assert row in with_table(DOCUMENT.read_text(), methods().values())


def test_an_audit_finds_an_element_that_a_toy_method_did_not_make(registered: None, tmp_path: Path) -> None:
    merge(default_recipe(make_family(tmp_path / "family"), TOY), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    said = str(audit(tmp_path / "out", AuditOptions(1.0), INLINE).problems)
    assert "recomputed from the sources" in said


def settings_of(name: str, *sources: dict[str, Value], **values: Value) -> Settings:
    return make_settings(method_named(name), Case(values, sources))


def test_methods_travel_between_processes() -> None:
    for method in methods().values():
        assert pickle.loads(pickle.dumps(method)).name == method.name


NUMBER = Parameter("t", "float", "global", "a number")
FRACTION = Parameter("density", "float", "source", "a fraction", minimum=0.0, maximum=1.0)
SWITCH = Parameter("normalize", "bool", "global", "a switch")
COUNT = Parameter("max_iter", "int", "global", "a count", minimum=1)
CEILING = Parameter("r", "float", "global", "a limit", maximum=2)


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        (NUMBER, 0.5, 0.5),
        (NUMBER, -3, -3.0),
        (NUMBER, True, 1.0),
        (FRACTION, 0, 0.0),
        (FRACTION, 1, 1.0),
        (SWITCH, 1.0, True),
        (SWITCH, 0.0, False),
        (SWITCH, True, True),
        (COUNT, 5.0, 5),
        (CEILING, -7.5, -7.5),
    ],
)
def test_coerce(parameter: Parameter, value: float, expected: float) -> None:
    result = parameter.coerce(value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        (SWITCH, 0.5, "normalize must be true or false, is 0.5"),
        (COUNT, 5.5, "max_iter must be a whole number, is 5.5"),
        (COUNT, 0.0, "max_iter must be at least 1, is 0.0"),
        (FRACTION, 1.5, "density must be between 0 and 1, is 1.5"),
        (FRACTION, -0.1, "density must be between 0 and 1, is -0.1"),
        (CEILING, 3.0, "r must be at most 2, is 3.0"),
        (NUMBER, float("nan"), "t must be a finite number, is nan"),
        (SWITCH, float("inf"), "normalize must be a finite number, is inf"),
    ],
)
def test_coerce_refuses(parameter: Parameter, value: float, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.") + "$"):
        parameter.coerce(value)


def test_a_method_with_a_base_refuses_a_tile_without() -> None:
    tile = Tile(None, torch.ones(1, 3), 0)
    with pytest.raises(ValueError, match="needs the base's elements"):
        method_named("task_arithmetic").kernel.apply(
            tile, settings_of("task_arithmetic", {"weight": 1.0}), None
        )


@pytest.mark.parametrize(
    ("weights", "normalize", "fits"),
    [
        ((0.5, 0.5), True, True),
        ((1e-30, 1e-30), True, True),
        ((1.0, -1.0 + 1e-9), True, False),
        ((1.0, -1.0 + 1e-7), True, True),
        ((0.0, 0.0), True, False),
        ((0.1, 0.2, -0.3), True, False),
        ((1.0, -1.0), True, False),
        ((1.0, -1.0), False, True),
        ((0.0,), False, True),
    ],
)
def test_weights_that_cancel_cannot_be_normalised(
    weights: tuple[float, ...], normalize: bool, fits: bool
) -> None:
    given_ = settings_of("linear", *({"weight": w} for w in weights), normalize=normalize)
    sentence = method_named("linear").check(given_)
    expected = None if fits else "the weights sum to 0, so they cannot be normalised"
    assert sentence == expected


@pytest.mark.parametrize(
    ("name", "sources", "values", "expected"),
    [
        ("passthrough", [{}], {}, 0),
        ("passthrough", [{"scale": 1.0}], {}, 0),
        ("passthrough", [{"scale": 0.5}], {}, None),
        ("passthrough", [{"scale": 0.0}], {}, None),
        ("linear", [{"weight": 0.3}], {}, 0),
        ("linear", [{"weight": 0.0}], {}, None),
        ("linear", [{"weight": 0.3}], {"normalize": False}, None),
        ("linear", [{"weight": 1.0}], {"normalize": False}, 0),
        ("linear", [{"weight": 1.0}, {"weight": 0.0}], {}, None),
        ("task_arithmetic", [{"weight": 1.0}], {}, None),
        ("slerp", [{}], {"t": 1.0}, None),
    ],
)
def test_identity(
    name: str, sources: list[dict[str, Value]], values: dict[str, Value], expected: int | None
) -> None:
    assert method_named(name).identity(settings_of(name, *sources, **values)) == expected


def test_passthrough_without_a_scale_copies_nothing() -> None:
    source = torch.ones(4)
    kernel = method_named("passthrough").kernel
    result = kernel.apply(Tile(None, source.unsqueeze(0), 0), settings_of("passthrough", {}), None)
    assert result.data_ptr() == source.data_ptr()


def test_documentation_has_the_tables() -> None:
    """``make format`` writes them."""
    assert DOCUMENT.read_text() == with_table(DOCUMENT.read_text(), methods().values())
    text = COPIED_DOCUMENT.read_text()
    assert "| GPTQ |" in text
    assert text == with_copied_formats(text)
