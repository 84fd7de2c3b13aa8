"""What the declarations say: parameters, checks, identities, the table and its documentation."""

from __future__ import annotations

import pickle

import pytest
import torch
from kits.method_kit import Case, make_settings, method_named
from kits.method_table import DOCUMENT, with_table

from raymerge.methods import Parameter, Settings, Tile, Value, methods


def settings_of(name: str, *sources: dict[str, Value], **values: Value) -> Settings:
    return make_settings(method_named(name), Case(values, sources))


# The table --------------------------------------------------------------------------------------------


def test_methods_travel_between_processes() -> None:
    for method in methods().values():
        assert pickle.loads(pickle.dumps(method)).name == method.name


# Parameters -------------------------------------------------------------------------------------------

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


# Settings and tiles -----------------------------------------------------------------------------------


def test_a_method_with_a_base_refuses_a_tile_without() -> None:
    tile = Tile(None, torch.ones(1, 3), 0)
    with pytest.raises(ValueError, match="needs the base's elements"):
        method_named("task_arithmetic").kernel.apply(
            tile, settings_of("task_arithmetic", {"weight": 1.0}), None
        )


# Checks and identities --------------------------------------------------------------------------------


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


def test_documentation_has_the_table() -> None:
    """``make format`` writes it."""
    assert DOCUMENT.read_text() == with_table(DOCUMENT.read_text(), methods().values())
