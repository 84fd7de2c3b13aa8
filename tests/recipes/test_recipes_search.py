"""Marks of a recipe: what is searched for, the plain recipe of each choice of values, and wrong marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.errors import RecipeError
from raymerge.recipes.load import parse_recipe
from raymerge.recipes.search import MarkedRecipe, marked_problems, read_marked, read_marked_mapping

TEXT = """\
# Which weights?
search:
  evaluations: 5    # and no more
  command: ./evaluate {model}
merge_method: {search: {choices: [ties, task_arithmetic]}}
base_model: base
models:
  - model: one
    parameters:
      weight: &shared {search: [0, 1]}   # as for two
      density:
        search: {low: 0.25, high: 1, step: 0.25}
  - model: two
    parameters: {weight: *shared}
dtype: bfloat16
"""


def _marked(tmp_path: Path, text: str) -> MarkedRecipe:
    path = tmp_path / "marked.yml"
    path.write_text(text)
    return read_marked(path, exists=lambda _: False)


def _refused(tmp_path: Path, text: str) -> list[str]:
    return [str(each).removeprefix(f"{tmp_path}/") for each in marked_problems(_marked(tmp_path, text))]


def test_a_candidate_is_the_recipe_with_values_in_place_of_marks(tmp_path: Path) -> None:
    marked = _marked(tmp_path, TEXT)
    assert [each.name for each in marked.parameters] == [
        "merge_method",
        "models[0].weight",
        "models[0].density",
    ]
    values = {"merge_method": "ties", "models[0].weight": 1e-05, "models[0].density": 0.5}
    candidate = marked.candidate(values)
    assert (
        candidate.text
        == """\
# Which weights?
merge_method: ties
base_model: base
models:
  - model: one
    parameters:
      weight: &shared 1.0e-05   # as for two
      density:
        0.5
  - model: two
    parameters: {weight: *shared}
dtype: bfloat16
"""
    )
    assert parse_recipe(candidate.text, exists=lambda _: False) == candidate.recipes[0]


def test_values_of_a_range_are_spread_over_it_and_over_its_steps(tmp_path: Path) -> None:
    text = TEXT.replace("[0, 1]", "{low: 0.001, high: 1, log: true}").replace(
        "low: 0.25, high: 1, step: 0.25", "low: 1, high: 7, step: 2"
    )
    _, logarithmic, stepped = (each.space for each in _marked(tmp_path, text).parameters)
    units = (0.0, 0.3, 0.6, 0.9, 1.0)
    assert [stepped.at(unit) for unit in units] == [1, 3, 5, 7, 7]  # type: ignore[union-attr]
    assert [logarithmic.at(1 / 3), logarithmic.at(2 / 3)] == [0.01, 0.1]  # type: ignore[union-attr]


def test_a_mapping_has_marks_as_a_text_has() -> None:
    model = {"model": "one", "parameters": {"weight": {"search": [0, 1]}}}
    marked = read_marked_mapping({"search": {}, "merge_method": "linear", "models": [model]})
    (recipe,) = marked.candidate({"models[0].weight": 0.25}).recipes
    assert recipe.models[0].parameters["weight"].value == 0.25  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        (
            "[0, 1]",
            "[1, 0]",
            "marked.yml:10:24: search: the range from 1 to 0 holds nothing to search. "
            "Write the smaller number first.",
        ),
        (
            "{low: 0.25, high: 1, step: 0.25}",
            "0.5",
            "marked.yml:12:9: search: 0.5 says no values to search among. Write {search: [0, 1]}, "
            "{search: {low: 0, high: 1, step: 0.25}} or {search: {choices: [a, b]}}.",
        ),
        (
            "low: 0.25, high: 1",
            "low: 0.25, hight: 1",
            "marked.yml:12:29: unknown key 'hight'. Did you mean 'high'?",
        ),
    ],
)
def test_wrong_marks_are_refused_where_they_stand(
    tmp_path: Path, written: str, instead: str, message: str
) -> None:
    (problem,) = _refused(tmp_path, TEXT.replace(written, instead))
    assert problem.startswith(message)


def test_what_is_wrong_with_one_choice_is_known_before(tmp_path: Path) -> None:
    choices = "dtype: {search: {choices: [bfloat16, float32, flot16]}}"
    (problem,) = _refused(tmp_path, TEXT.replace("dtype: bfloat16", choices))
    assert problem.startswith(
        "marked.yml:15:1: dtype: 'flot16' is not a dtype to merge to. Did you mean 'float16'?"
    )


def test_a_marked_recipe_is_no_plain_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"m\.yml:2:1: 'search' stands for many recipes to choose from"):
        parse_recipe(TEXT, "m.yml")
    without = TEXT.replace(TEXT[TEXT.index("search:") : TEXT.index("merge_method")], "")
    with pytest.raises(RecipeError) as refused:
        parse_recipe(without, "m.yml")
    assert len(refused.value.problems) == 4
    assert str(refused.value.problems[0]) == (
        "m.yml:2:1: merge_method: this stands for a value to search for, and nothing says how to search. "
        "Write the value, or add 'search' at the top of the recipe."
    )


def test_only_the_last_merge_of_a_file_is_searched_for(tmp_path: Path) -> None:
    first = "name: mid\nmerge_method: linear\nmodels: [{model: a}, {model: b}]\n---\n"
    marked = _marked(tmp_path, first + TEXT.replace("model: two", "model: mid"))
    assert marked_problems(marked) == ()
    text = marked.candidate(next(marked.probes())).text
    assert text.startswith(first)
    with pytest.raises(RecipeError, match="'search' stands in a merge that is not the last of the file"):
        _marked(tmp_path, f"{TEXT}name: mid\n---\nmerge_method: linear\nmodels: [{{model: mid}}]\n")
