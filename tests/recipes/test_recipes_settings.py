"""Settings: forms, evaluation by hand-computed cases, choices by tensor, faults, writing back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.fields import Fault, FaultError
from raymerge.recipes.settings import (
    ROLE_NAMES,
    Choice,
    Conditional,
    Gradient,
    Scalar,
    Selector,
    Setting,
    Subject,
    evaluate,
    plain_setting,
    read_setting,
)

ATTENTION = Subject("model.layers.3.self_attn.q_proj.weight", frozenset({"attention"}), 3)
MLP = Subject("model.layers.3.mlp.up_proj.weight", frozenset({"mlp"}), 3)
NORM = Subject("model.layers.3.input_layernorm.weight", frozenset({"norm"}), 3)
FINITE = st.floats(-1e6, 1e6)
SCALARS = FINITE.map(Scalar)
GRADIENTS = st.lists(FINITE, min_size=1, max_size=6).map(lambda values: Gradient(tuple(values)))
RANGES = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda ends: (min(ends), max(ends)))
SELECTORS = st.builds(
    Selector,
    st.none() | st.sampled_from(["mlp", "*", "q_proj", ""]),
    st.none() | st.sampled_from(["*.weight", "model.*"]),
    st.sets(st.sampled_from(ROLE_NAMES), max_size=3).map(
        lambda roles: tuple(role for role in ROLE_NAMES if role in roles)
    ),
    st.sets(RANGES, max_size=3).map(lambda ranges: tuple(sorted(ranges))),
)
CHOICES = st.builds(Choice, SELECTORS, SCALARS | GRADIENTS)
CONDITIONALS = st.lists(CHOICES, min_size=1, max_size=4).map(lambda rows: Conditional(tuple(rows)))
SETTINGS = SCALARS | GRADIENTS | CONDITIONALS


def faults_in(value: object) -> list[Fault]:
    with pytest.raises(FaultError) as caught:
        read_setting(value)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        (0.5, Scalar(0.5)),
        (True, Scalar(1.0)),
        ("1e-5", Scalar(1e-5)),
        ([0, 1], Gradient((0.0, 1.0))),
        ((0, "0.5"), Gradient((0.0, 0.5))),
        ([3], Gradient((3.0,))),
        ([{"value": 1}], Conditional((Choice(Selector(), Scalar(1.0)),))),
        (
            [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}],
            Conditional((Choice(Selector("mlp"), Gradient((0.0, 1.0))), Choice(Selector(), Scalar(0.5)))),
        ),
        # mergekit accepts a single map and then fails on it; here it is a list of one.
        ({"filter": "mlp", "value": 0.3}, Conditional((Choice(Selector("mlp"), Scalar(0.3)),))),
    ],
)
def test_forms(value: object, setting: Setting) -> None:
    assert read_setting(value) == setting
    assert read_setting(setting) is setting


@pytest.mark.parametrize(
    ("values", "t", "expected"),
    [
        ((5.0,), 0.0, 5.0),
        ((0.0, 1.0), 0.25, 0.25),
        ((0.0, 10.0, 0.0), 0.25, 5.0),
        ((0.0, 10.0, 0.0), 0.75, 5.0),
        ((1.0, 0.5, 0.7, 0.3, 0.0), 1 / 3, (1 - (4 / 3 - 1)) * 0.5 + (4 / 3 - 1) * 0.7),
    ],
)
def test_a_gradient_is_straight_between_its_numbers(
    values: tuple[float, ...], t: float, expected: float
) -> None:
    assert evaluate(Gradient(values), MLP, t) == expected


def test_filters_look_for_a_part_of_the_name_and_the_first_match_holds() -> None:
    setting = read_setting(
        [
            {"filter": "self_attn", "value": [0.0, 1.0]},
            {"filter": "mlp", "value": 2},
            {"filter": "layers.3", "value": 3},
        ]
    )
    assert evaluate(setting, ATTENTION, 0.5) == 0.5
    assert evaluate(setting, MLP, 0.5) == 2.0
    assert evaluate(setting, NORM, 0.0) == 3.0


def test_without_a_match_there_is_no_number() -> None:
    assert evaluate(read_setting([{"filter": "mlp", "value": 1}]), ATTENTION, 0.0) is None


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (None, (), "no value"),
        ([], (), "empty"),
        ([1, "x"], (1,), "'x' is a text"),
        ({}, (), "without a value"),
        ([{"filter": "mlp", "vlaue": 1}], (0, "vlaue"), "unknown key 'vlaue'"),
        ([{"filter": 3, "value": 1}], (0, "filter"), "3 is a number"),
        ([{"role": "atention", "value": 1}], (0, "role"), "'atention' is not known here"),
        ([{"value": 1}, 2], (1,), "2 is a number among filters"),
        ([{"value": {"value": 1}}], (0, "value"), "is a map"),
    ],
)
def test_a_fault_has_its_place_within_the_setting(
    value: object, path: tuple[object, ...], words: str
) -> None:
    (fault,) = faults_in(value)
    assert fault.path == path
    assert words in fault.what
    assert fault.remedy


def test_the_remedy_of_a_misspelled_key_is_the_key() -> None:
    (fault,) = faults_in([{"filter": "mlp", "vlaue": 1}])
    assert fault.remedy == "Did you mean 'value'?"
    (fault,) = faults_in([{"zzz": 1, "value": 1}])
    assert fault.remedy == "Keys known here: filter, glob, role, layers, value."


def test_all_faults_come_together() -> None:
    faults = faults_in([{"filter": 1, "value": "x"}, 7, {"value": [1, "y"]}])
    assert [fault.path for fault in faults] == [(0, "filter"), (0, "value"), (1,), (2, "value", 1)]


@settings(deadline=None, max_examples=100)
@given(SETTINGS)
def test_a_setting_survives_being_written_and_read(setting: Setting) -> None:
    assert read_setting(plain_setting(setting)) == setting
