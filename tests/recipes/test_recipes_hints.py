"""What messages say to write instead leads to a recipe that is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from raymerge.errors import Problem, RecipeError
from raymerge.recipes import AnyRecipe, ModelReference, MoeRecipe, Recipe, recipe_from_mapping

LINEAR: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 1}}],
}


def refused(data: dict[str, Any]) -> Problem:
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping(data)
    (problem,) = caught.value.problems
    return problem


def read(data: dict[str, Any]) -> AnyRecipe:
    return recipe_from_mapping(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "bfloat16"), ("out_dtype", "float32"), ("seed", 42), ("tokenizer_source", "union")],
)
@pytest.mark.parametrize("where", ["recipe", "model", "beside"])
def test_keys_of_the_recipe_below_the_top(key: str, value: object, where: str) -> None:
    data = copy.deepcopy(LINEAR)
    entry = data["models"][1]
    place = {"recipe": data.setdefault("parameters", {}), "model": entry["parameters"], "beside": entry}[
        where
    ]
    place[key] = value
    problem = refused(data)
    assert f"'{key}' is a key of the" in problem.what
    assert problem.remedy == "Move it to the top of the recipe."
    data[key] = place.pop(key)
    assert read(data) == read({**LINEAR, key: value})


@pytest.mark.parametrize("source", [None, "base"])
def test_a_multiple_for_the_vocabulary_at_the_top_or_among_parameters(source: str | None) -> None:
    tokenizer = {} if source is None else {"tokenizer_source": source, "base_model": "a"}
    for misplaced in ({"pad_to_multiple_of": 64}, {"parameters": {"pad_to_multiple_of": 64}}):
        problem = refused({**LINEAR, **tokenizer, **misplaced})
        assert "tokenizer: {source: union, pad_to_multiple_of: 64}" in problem.remedy
        assert "takes the place of 'tokenizer_source'" in problem.remedy
    followed = {
        **LINEAR,
        "base_model": "a",
        "tokenizer": {"source": source or "union", "pad_to_multiple_of": 64},
    }
    recipe = read(followed)
    assert isinstance(recipe, Recipe)
    assert recipe.tokenizer is not None


def test_revisions_beside_a_model_or_at_the_top() -> None:
    data = copy.deepcopy(LINEAR)
    data["models"][0]["revision"] = "v1"
    assert "'model: PATH@REVISION'" in refused(data).remedy
    assert "'model: PATH@REVISION'" in refused({**LINEAR, "revision": "v1"}).remedy
    del data["models"][0]["revision"]
    data["models"][0]["model"] = "a@v1"
    recipe = read(data)
    assert isinstance(recipe, Recipe)
    assert recipe.models[0].model == ModelReference("a", "v1")


def test_the_revision_of_an_expert() -> None:
    experts = [{"source_model": name, "positive_prompts": [name]} for name in "ab"]
    data: dict[str, Any] = {"base_model": "a", "experts": experts}
    experts[0]["revision"] = "v1"
    assert "'source_model: PATH@REVISION'" in refused(data).remedy
    del experts[0]["revision"]
    experts[0]["source_model"] = "a@v1"
    recipe = read(data)
    assert isinstance(recipe, MoeRecipe)
    assert recipe.experts[0].source_model == ModelReference("a", "v1")
