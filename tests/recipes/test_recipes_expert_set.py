"""Recipes that change the experts of one checkpoint, and how the three kinds of recipes are told apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.recipe_texts import nowhere, problems, recipe_of

from raymerge.recipes import (
    AddedExpert,
    ExpertChange,
    ExpertSetRecipe,
    MoeRecipe,
    Recipe,
    canonical,
    merge_order,
    parse_recipe,
    parse_recipes,
    recipe_from_mapping,
)
from raymerge.recipes.expert_set import PerLayer

recipe = partial(recipe_of, ExpertSetRecipe)


def change(text: str) -> ExpertChange:
    return recipe(f"base_model: m\nexperts: {text}\n").experts


def test_keep() -> None:
    assert change("{keep: [3, 0]}").keep == PerLayer((3, 0))
    assert change("{keep: {1: [0, 1], 2: [2, 5]}}").keep == PerLayer(None, ((1, (0, 1)), (2, (2, 5))))


def test_merge() -> None:
    assert change("{merge: [[0, 2], [1, 3]]}").merge == PerLayer(((0, 2), (1, 3)))
    read = change("{merge: {4: [[0], [1, 2]]}, scores: weights}")
    assert (read.merge, read.scores) == (PerLayer(None, ((4, ((0,), (1, 2))),)), "weights")


def test_add() -> None:
    read = change("{add: [{model: x, experts: [1, 4]}, {model: y, row_of: 0}, {model: z+adapter}]}")
    assert read.add == (
        AddedExpert(model="x", experts=[1, 4]),
        AddedExpert(model="y", row_of=0),
        AddedExpert(model="z+adapter"),
    )
    assert (read.add[0].experts, read.add[0].row_of, read.add[2].experts) == ((1, 4), None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{}",
            "experts: nothing says what becomes of the experts. Fill one of: keep, drop, merge, add, dense.",
        ),
        (
            "{keep: [0], dense: 0}",
            "'keep' and 'dense' are both given. Keep one of: keep, drop, merge, add, dense. One merge may",
        ),
        ("{keep: [0, 3, 0]}", "expert 0 was listed before. Name each expert once."),
        ("{keep: [-1]}", "-1 is below expert 0. Experts count from 0."),
        (
            "{keep: {1: [0, 1], 2: [0]}}",
            "the list of layer '2' is 1 long, that of layer '1' 2. Make all equally long",
        ),
        (
            "{keep: {first: [0]}}",
            "'first' is a text; expected the number of one layer. Write a whole number; layers",
        ),
        (
            "{drop: 2}",
            "'drop' needs 'scores' to know which experts go. Add 'scores: weights' or 'scores: FILE',",
        ),
        ("{drop: 0, scores: weights}", "drop: 0 is out of range. Write a whole number at least 1."),
        (
            "{drop: [0, 1], scores: weights}",
            "[0, 1] is a list; 'drop' is how many experts go, those with the lowest scores. Write a number, "
            "or list below 'keep' the experts that stay.",
        ),
        ("{merge: [0, 1]}", "0 is a number; expected a list of experts."),
        ("{merge: [[0, 1], [1, 2]]}", "expert 1 was listed before. Name each expert once."),
        ("{add: [{source_model: x}]}", "unknown key 'source_model'. Here the key is 'model'."),
        (
            "{dense: concat}",
            "dense: 'concat' is not known here. Did you mean 'concatenated'? Write mean, concatenated or the "
            "number of an expert.",
        ),
        (
            "{dense: 1, of: [1]}",
            "'of' chooses the experts of 'dense: mean' and 'dense: concatenated' only. Remove",
        ),
        (
            "{keep: [1], scores: weights}",
            "'scores' has no meaning beside 'keep'. Remove it, or write 'drop' or",
        ),
        ("{keeps: [1]}", "unknown key 'keeps'. Did you mean 'keep'?"),
        (
            "{source_model: a}",
            "unknown key 'source_model'. Experts of a mixture that is to be built are a list:",
        ),
    ],
)
def test_wrong_changes(text: str, expected: str) -> None:
    told = problems(f"base_model: m\nexperts: {text}\n")
    assert any(line.split(": ", 1)[1].startswith(expected) for line in told), told
    assert all(line.startswith("r.yml:2:") for line in told)


@pytest.mark.parametrize("text", ["{dense: concat, of: [1]}", "{keep: []}", "{drop: x, scores: weights}"])
def test_one_cause_is_one_fault(text: str) -> None:
    assert len(problems(f"base_model: m\nexperts: {text}\n")) == 1


def test_all_that_is_wrong_comes_at_once_in_the_order_of_the_text() -> None:
    told = problems(
        """\
model: m
experts:
  keep:
    3: [0, 0]
    x: [1, 2]
  drop: 1
  of: [2]
gate_mode: ridge
merge_method: linear
"""
    )
    places = [line.split(": ")[0] for line in told]
    assert places == [
        f"r.yml:{mark}" for mark in ("1:1", "1:1", "4:12", "5:5", "6:3", "6:3", "7:3", "8:1", "9:1")
    ]
    assert "r.yml:1:1: unknown key 'model'. Here the key is 'base_model'." in told
    assert any("A map of 'experts' changes the experts of one checkpoint. To build" in line for line in told)
    assert any("give it a name, and name it as base_model" in line for line in told)


def test_the_three_kinds_are_told_apart_by_experts() -> None:
    kinds = {
        "merge_method: linear\nmodels: [{model: a}]\n": Recipe,
        "base_model: a\ngate_mode: random\nexperts: [{source_model: a, copies: 2}]\n": MoeRecipe,
        "base_model: a\nexperts: {dense: 0}\n": ExpertSetRecipe,
    }
    for text, kind in kinds.items():
        assert type(parse_recipe(text, exists=nowhere)) is kind
        assert type(recipe_from_mapping(yaml.safe_load(text), exists=nowhere)) is kind


@pytest.mark.parametrize(("value", "what"), [("8", "a number"), ("", "empty")])
def test_experts_that_are_neither_are_told_both_forms(value: str, what: str) -> None:
    (told,) = problems(f"base_model: a\nexperts: {value}\nmerge_method: linear\n")
    assert told.startswith(f"r.yml:2:1: 'experts' is {what}")
    assert told.endswith(
        "Write a list to build a mixture of experts from dense models: experts: [{source_model: PATH}, ...]; "
        "or a map to change the experts of one: experts: {keep: [0, 1]}."
    )


CHANGES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"keep": [0, 2]},
        {"keep": {"3": [0, 2], 5: [1, 4]}},
        {"drop": 2, "scores": "weights"},
        {"merge": [[0, 1], [2]]},
        {"merge": {2: [[0, 1], [2]]}, "scores": "file.json"},
        {"add": [{"model": "x@v", "experts": [3]}, {"model": "y", "row_of": 1}]},
        {"dense": 0},
        {"dense": "mean", "of": [1, 0]},
    ]
)


@settings(deadline=None, max_examples=60)
@given(CHANGES, CHANGES, st.sampled_from(["keep", "share"]))
def test_a_recipe_without_a_text_writes_one_that_says_the_same(
    one: dict[str, Any], other: dict[str, Any], duplicates: str
) -> None:
    made, second = (
        recipe_from_mapping({"base_model": "m", "experts": each, "duplicates": duplicates}, exists=nowhere)
        for each in (one, other)
    )
    again = recipe(made.text)
    assert again == made
    assert canonical(again) == canonical(made)
    assert (canonical(made) == canonical(second)) == (one == other)


def test_canonical_sees_the_order_of_experts_and_not_that_of_layers() -> None:
    assert canonical(recipe("base_model: m\nexperts: {keep: [0, 1]}\n")) != canonical(
        recipe("base_model: m\nexperts: {keep: [1, 0]}\n")
    )
    assert canonical(recipe("base_model: m\nexperts: {keep: {1: [0], 2: [1]}}\n")) == canonical(
        recipe("base_model: m\nexperts: {keep: {'2': [1], '1': [0]}}\n")
    )


def test_a_mixture_is_built_merged_and_pruned_in_one_file() -> None:
    text = """\
base_model: both
experts: {drop: 1, scores: weights}
---
name: built
base_model: a
gate_mode: random
experts: [{source_model: a}, {source_model: b}, {source_model: c}]
---
name: both
merge_method: linear
base_model: built
models: [{model: built}, {model: trained}]
router: built
"""
    recipes = parse_recipes(text, "r.yml", exists=nowhere)
    assert [type(each) for each in recipes] == [ExpertSetRecipe, MoeRecipe, Recipe]
    assert [each.name for each in merge_order(recipes, exists=nowhere)] == ["built", "both", None]
