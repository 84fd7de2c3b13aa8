"""Selectors: what they match, how they are read, refused and written back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.architectures import Role
from raymerge.documents.fields import Fault, FaultError
from raymerge.recipes.settings import (
    ROLE_NAMES,
    Selector,
    Subject,
    plain_selector,
    read_layers,
    read_roles,
    read_selector,
)

Q_PROJ = Subject("model.layers.12.self_attn.q_proj.weight", frozenset({"attention"}), 12)
EXPERT = Subject("model.layers.3.mlp.experts.7.up_proj.weight", frozenset({"expert", "mtp"}), 3)
EMBEDDING = Subject("model.embed_tokens.weight", frozenset({"embedding"}), None)
BARE = Subject("", frozenset(), None)
SUBJECTS = (Q_PROJ, EXPERT, EMBEDDING, BARE)

RANGES = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (min(ends), max(ends)))
LAYERS = st.lists(RANGES, min_size=1, max_size=4)


def faults_of_layers(value: object) -> list[Fault]:
    with pytest.raises(FaultError) as caught:
        read_layers(value)
    return list(caught.value.faults)


def test_the_roles_are_those_of_the_architectures() -> None:
    assert tuple(role.value for role in Role) == ROLE_NAMES


@pytest.mark.parametrize(
    ("selector", "matched"),
    [
        (Selector(), [True, True, True, True]),
        (Selector("self_attn"), [True, False, False, False]),
        (Selector("SELF_ATTN"), [False, False, False, False]),
        (Selector(glob="*.weight"), [True, True, True, False]),
        (Selector(glob="*.WEIGHT"), [False, False, False, False]),
        (Selector(glob="model.layers.?.*"), [False, True, False, False]),
        (Selector(glob="model.layers.[0-9][0-9].*"), [True, False, False, False]),
        (Selector(roles=("attention",)), [True, False, False, False]),
        (Selector(roles=("mtp", "embedding")), [False, True, True, False]),
        (Selector(layers=((3, 12),)), [True, True, False, False]),
        (Selector(layers=((0, 3), (12, 20))), [True, True, False, False]),
        (Selector("weight", "model.*", ("expert",), ((0, 5),)), [False, True, False, False]),
        (Selector("bias", "model.*", ("expert",), ((0, 5),)), [False, False, False, False]),
        (Selector("weight", "model.*", ("expert",), ((4, 5),)), [False, False, False, False]),
    ],
)
def test_all_that_is_given_must_hold(selector: Selector, matched: list[bool]) -> None:
    assert [selector.matches(subject) for subject in SUBJECTS] == matched


@pytest.mark.parametrize(
    ("value", "roles"),
    [(("router", "embedding"), ("embedding", "router")), (["mlp", "attention", "mlp"], ("attention", "mlp"))],
)
def test_roles_have_one_order(value: object, roles: tuple[str, ...]) -> None:
    assert read_roles(value) == roles


def test_a_role_that_there_is_not() -> None:
    with pytest.raises(FaultError) as caught:
        read_roles(["router", "rooter", 7])
    first, second = caught.value.faults
    assert (first.path, first.what) == ((1,), "'rooter' is not known here.")
    assert first.remedy.startswith("Did you mean 'router'? Write one of: embedding, head, norm,")
    assert (second.path, second.what) == ((2,), "7 is not known here.")


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (10, ((10, 10),)),
        ("10..20", ((10, 20),)),
        ([30, "0..3"], ((0, 3), (30, 30))),
        ([4, "4", "4..4"], ((4, 4),)),
        ((1, 2), ((1, 1), (2, 2))),
    ],
)
def test_layers(value: object, layers: tuple[tuple[int, int], ...]) -> None:
    assert read_layers(value) == layers


@pytest.mark.parametrize(
    ("value", "path", "what", "remedy"),
    [
        ("20..10", (), "the range 20..10 runs backwards.", "Write 10..20."),
        (-1, (), "-1 is below layer 0.", "Layers count from 0."),
        ("10-20", (), "'10-20' is a text; expected layers.", "Write a layer like 10"),
        (1.5, (), "1.5 is a number; expected layers.", "Write a layer like 10"),
        ([], (), "the list is empty.", "Write a layer like 10"),
        ([3, [4, 5]], (1,), "[4, 5] is a list; expected layers.", "Write a layer like 10"),
    ],
)
def test_layers_that_are_none(value: object, path: tuple[int, ...], what: str, remedy: str) -> None:
    (fault,) = faults_of_layers(value)
    assert fault.path == path
    assert what in fault.what
    assert fault.remedy.startswith(remedy)


@settings(deadline=None, max_examples=100)
@given(LAYERS, st.integers(0, 60))
def test_a_layer_matches_if_some_range_holds_it(ranges: list[tuple[int, int]], layer: int) -> None:
    selector = Selector(layers=read_layers([f"{first}..{last}" for first, last in ranges]))
    subject = Subject("x", frozenset(), layer)
    assert selector.matches(subject) is (
        layer in {n for first, last in ranges for n in range(first, last + 1)}
    )


@settings(deadline=None, max_examples=100)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "filter": st.text("ab*", max_size=3),
            "glob": st.text("ab*?", max_size=3),
            "role": st.sampled_from(ROLE_NAMES) | st.lists(st.sampled_from(ROLE_NAMES), min_size=1),
            "layers": st.integers(0, 99) | st.just("5..6") | st.just(["1..2", 7]),
        },
    )
)
def test_a_selector_survives_being_written_and_read(data: dict[str, object]) -> None:
    faults: list[Fault] = []
    selector = read_selector(data, faults)
    assert faults == []
    assert set(plain_selector(selector)) == set(data)
    assert read_selector(plain_selector(selector), faults) == selector


def test_all_faults_of_a_selector_come_together() -> None:
    faults: list[Fault] = []
    read_selector({"filter": 1, "glob": True, "role": ["x"], "layers": [1, "b"]}, faults)
    assert [fault.path for fault in faults] == [("filter",), ("glob",), ("role", 0), ("layers", 1)]
