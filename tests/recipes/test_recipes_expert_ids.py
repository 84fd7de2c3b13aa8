"""Numbers of experts: lists, groups, and either of them layer by layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.documents.fields import Fault, FaultError
from raymerge.recipes.expert_set import (
    PerLayer,
    plain_per_layer,
    read_groups,
    read_id,
    read_ids,
    read_per_layer,
)

IDS = st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True)


def faults(read: Callable[[object], object], value: object) -> list[Fault]:
    with pytest.raises(FaultError) as caught:
        read(value)
    assert all(fault.what.endswith(".") and fault.remedy.endswith(".") for fault in caught.value.faults)
    return list(caught.value.faults)


def by_ids(value: object) -> PerLayer[tuple[int, ...]]:
    return read_per_layer(read_ids, value)


def by_groups(value: object) -> PerLayer[tuple[tuple[int, ...], ...]]:
    return read_per_layer(read_groups, value)


def test_an_expert_is_a_whole_number() -> None:
    assert [read_id(value) for value in (0, 7, "7", 3.0)] == [0, 7, 7, 3]
    assert faults(read_id, -1) == [Fault((), "-1 is below expert 0.", "Experts count from 0.")]
    (fault,) = faults(read_id, True)
    assert fault.what == "true is a yes-or-no value; expected the number of one expert."


def test_a_list_keeps_its_order() -> None:
    assert read_ids([5, 0, "2"]) == (5, 0, 2)
    assert read_groups([[3, 1], [0], (2, 4)]) == ((3, 1), (0,), (2, 4))


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        (3, (), "3 is a number; expected a list of experts."),
        ("0, 1", (), "'0, 1' is a text; expected a list of experts."),
        ([], (), "the list is empty."),
        ([0, 1, 0], (2,), "expert 0 was listed before."),
        ([0, "x"], (1,), "'x' is a text; expected the number of one expert."),
        ([0, [1]], (1,), "[1] is a list; expected the number of one expert."),
        ([1.5], (0,), "1.5 is a number; expected the number of one expert."),
    ],
)
def test_lists_that_are_none(value: object, path: tuple[int, ...], what: str) -> None:
    (fault,) = faults(read_ids, value)
    assert (fault.path, fault.what) == (path, what)


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        (3, (), "3 is a number; expected groups of experts."),
        ([], (), "the list is empty."),
        ([0, 1], (0,), "0 is a number; expected a list of experts."),
        ([[0], []], (1,), "the list is empty."),
        ([[0, 1], [2, 1]], (1, 1), "expert 1 was listed before."),
        ([[0, 0]], (0, 1), "expert 0 was listed before."),
    ],
)
def test_groups_that_are_none(value: object, path: tuple[int, ...], what: str) -> None:
    fault = faults(read_groups, value)[0]
    assert (fault.path, fault.what) == (path, what)


def test_every_wrong_item_is_told() -> None:
    assert [fault.path for fault in faults(read_ids, [-1, 0, "x", 2.5])] == [(0,), (2,), (3,)]
    assert [fault.path for fault in faults(read_groups, [[0, "x"], 3, [1, 1]])] == [(0, 1), (1,), (2, 1)]


def test_one_list_holds_for_all_layers() -> None:
    kept = by_ids([4, 2])
    assert kept == PerLayer((4, 2))
    assert (kept.num_experts, kept.at(0), kept.at(99)) == (2, (4, 2), (4, 2))


def test_layer_by_layer() -> None:
    kept = by_ids({"10": [0, 1], 3: [2, 5]})
    assert kept == PerLayer(None, ((3, (2, 5)), (10, (0, 1))))
    assert (kept.num_experts, kept.at(3), kept.at(10), kept.at(4)) == (2, (2, 5), (0, 1), None)


def test_groups_layer_by_layer_may_differ_in_size_but_not_in_number() -> None:
    merged = by_groups({0: [[0, 1, 2], [3]], 1: [[0], [1, 2, 3]]})
    assert merged.num_experts == 2
    (fault,) = faults(by_groups, {0: [[0, 1], [2]], 1: [[0, 1, 2]]})
    assert fault == Fault(
        ("1",),
        "the list of layer '1' is 1 long, that of layer '0' 2.",
        "Make all equally long: the config has one number of experts for all layers.",
    )


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        ({}, (), "the map is empty."),
        ({"x": [0]}, ("x",), "'x' is a text; expected the number of one layer."),
        ({-1: [0]}, ("-1",), "-1 is below layer 0."),
        ({"3": [0], 3: [1]}, ("3",), "layer '3' was given before."),
        ({"3": 4}, ("3",), "4 is a number; expected a list of experts."),
        ({"3": [0, 0]}, ("3", 1), "expert 0 was listed before."),
        ({"3": None}, ("3",), "null is empty; expected a list of experts."),
        ({"3": {"4": [0]}}, ("3",), "{'4': [0]} is a map; expected a list of experts."),
    ],
)
def test_maps_that_are_none(value: object, path: tuple[str | int, ...], what: str) -> None:
    (fault,) = faults(by_ids, value)
    assert (fault.path, fault.what) == (path, what)


def test_every_layer_is_looked_at() -> None:
    told = faults(by_ids, {"a": [0], "1": [0, 0], "2": [1], "3": [1, 2], "4": "x"})
    assert [fault.path for fault in told] == [("a",), ("1", 1), ("3",), ("4",)]


@settings(deadline=None, max_examples=50)
@given(IDS | st.integers(1, 4).flatmap(
    lambda size: st.dictionaries(
        st.integers(0, 90),
        st.lists(st.integers(0, 40), min_size=size, max_size=size, unique=True),
        min_size=1,
        max_size=4,
    )
))  # fmt: skip
def test_lists_survive_being_written_and_read(value: object) -> None:
    read = by_ids(value)
    assert by_ids(plain_per_layer(read)) == read
    assert by_ids(read) is read


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(6)), st.lists(st.integers(1, 5), max_size=3, unique=True))
def test_any_division_into_groups_survives_being_written_and_read(order: list[int], cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 6]
    groups = [order[start:end] for start, end in pairwise(bounds)]
    for value in (groups, {"7": groups}):
        read = by_groups(value)
        assert by_groups(plain_per_layer(read)) == read
        assert read.num_experts == len(groups)


def test_what_was_read_is_frozen_hashable_and_can_be_sent_to_a_worker() -> None:
    kept = by_ids({3: [2, 5]})
    assert hash(kept) == hash(by_ids({"3": (2, 5)}))
    assert pickle.loads(pickle.dumps(kept)) == kept
    with pytest.raises(AttributeError):
        kept.everywhere = (1,)  # type: ignore[misc]
