"""How problems are told: mergekit's flags, all of them at once, in plain sentences."""

from __future__ import annotations

from typing import Any

import pytest
from kits.recipe_texts import problems

from raymerge.errors import RecipeError
from raymerge.recipes import parse_recipe, recipe_from_mapping
from raymerge.recipes.schema import FLAG_ADVICE

HEAD = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n"


def problem(text: str) -> str:
    (only,) = problems(text)
    return only


@pytest.mark.parametrize("flag", sorted(FLAG_ADVICE))
@pytest.mark.parametrize("spelling", ["{}", "--{}"])
def test_a_flag_of_mergekit_gets_its_own_sentence(flag: str, spelling: str) -> None:
    key = spelling.format(flag.replace("_", "-") if spelling.startswith("--") else flag)
    told = problem(f'{HEAD}"{key}": true\n')
    assert f"unknown key '{key}'." in told
    assert f"--{flag.replace('_', '-')}" in told
    assert f"'{flag}'?" in told or key == flag


def test_clone_tensor_is_told_clone_tensors_and_that_it_is_not_needed() -> None:
    assert problem(f"{HEAD}clone_tensor: true\n") == (
        "r.yml:3:1: unknown key 'clone_tensor'. Did you mean 'clone_tensors'? In mergekit that is the flag "
        "--clone-tensors; it is not needed here, since every tensor gets its own bytes. Remove the key."
    )
    assert "Did you mean" not in problem(f"{HEAD}clone_tensors: true\n")


def test_flags_that_became_fields_name_the_field() -> None:
    assert "write 'shard_size: 5GB'" in problem(f"{HEAD}out_shard_size: 5B\n")
    assert "write 'seed: 7'" in problem(f"{HEAD}random_seed: 3\n")


def test_all_problems_of_a_recipe_come_at_once_in_the_order_of_the_text() -> None:
    told = problems(
        """merge_method: ties
clone_tensor: true
dtype: int64
models:
  - model: a+b+c
    parameters: {weight: abc, gamma: [1, x]}
  - just/a/path
slices:
  - sources: [{model: a, layer_range: [3, 1]}]
seed: -1
seed: 2
5: 3
"""
    )
    places = [line.split(": ")[0] for line in told]
    assert places == [f"r.yml:{mark}" for mark in (
        "2:1", "3:1", "5:5", "6:18", "6:42", "7:5", "8:1", "9:26", "10:1", "11:1", "12:1",
    )]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"merge_method": "x", "models": [1, {"model": []}, {"model": "a", "parameters": {1: 2}}]},
        {"merge_method": "x", "slices": [{"sources": {"a": 1}}], "duplicates": [], "dtype": {}},
        {"merge_method": "x", "modules": {"a": {"models": 3}, 4: {}}, "tokenizer": {"tokens": [1]}},
        {"experts": [{"source_model": None, "positive_prompts": [1], "noise_scale": "x"}], "gate_mode": 3},
        {"experts": {"keep": object(), "drop": [], "merge": "x", "add": [3], "dense": {}, "of": 1}},
    ],
)
def test_messages_are_sentences_and_free_of_the_machinery(data: dict[str, Any]) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping(data)
    for line in str(caught.value).splitlines():
        assert line.startswith("recipe")
        for word in ("pydantic", "http", "Input should", "validation", "type=", "ctx", "Traceback"):
            assert word not in line


@pytest.mark.parametrize("text", ['"\\ud800": 1\n', 'merge_method: "\\udfff"\n'])
def test_half_a_character_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(RecipeError, match=r"r\.yml:1:1"):
        parse_recipe(text, "r.yml")
