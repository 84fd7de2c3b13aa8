"""Several merges in one file: references between them, their order, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.recipe_texts import nowhere, problems

from raymerge.errors import RecipeError
from raymerge.recipes import (
    AnyRecipe,
    ModelReference,
    draft_recipes,
    merge_order,
    parse_recipe,
    parse_recipes,
    references,
)

CHAIN = """\
# first the two halves
name: left
merge_method: linear
models: [{model: a}, {model: b}]
---
name: right
merge_method: linear
models: [{model: a}, {model: c}]
---
merge_method: slerp
base_model: left
models: [{model: left}, {model: right}]
parameters: {t: 0.5}
"""


def parse(text: str) -> tuple[AnyRecipe, ...]:
    return parse_recipes(text, "r.yml", exists=nowhere)


def merge(name: str | None, *models: str, base: str | None = None) -> str:
    head = "" if name is None else f"name: {name}\n"
    tail = "" if base is None else f"base_model: {base}\n"
    listed = ", ".join(f"{{model: {model}}}" for model in models)
    return f"---\n{head}merge_method: linear\nmodels: [{listed}]\n{tail}"


def names(recipes: tuple[AnyRecipe, ...]) -> list[str | None]:
    return [recipe.name for recipe in recipes]


def test_several_recipes_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "chain.yml"
    path.write_text(CHAIN, encoding="utf-8")
    left, right, last = draft_recipes(path).require()
    assert (left.name, right.name, last.name) == ("left", "right", None)
    assert "".join((left.text, right.text, last.text)) == CHAIN
    assert right.text.startswith("---\nname: right\n")
    assert last.where("models", 1, "model") == f"{path}:12:26"
    assert parse_recipe(last.text, exists=nowhere) == last
    assert merge_order((left, right, last), exists=nowhere) == (left, right, last)


def test_where_one_recipe_is_expected_several_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chain.yml"
    path.write_text(CHAIN, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(CHAIN, str(path))
    assert str(caught.value) == (
        f"{path}:5:1: a second recipe starts here, the file has 3; one is expected. Give the file to "
        "'raymerge submit', which carries out all of them, or keep one recipe in it."
    )


def test_among_equals_the_order_is_that_of_the_file() -> None:
    parts = [merge("z", "m"), merge("y", "m"), merge("x", "m")]
    for ordered in itertools.permutations(parts):
        text = merge(None, "x", "y", "z") + "".join(ordered)
        expected = [*names(parse(text))[1:], None]
        assert names(merge_order(parse(text), exists=nowhere)) == expected


@pytest.mark.parametrize(
    "body",
    [
        "merge_method: linear\nmodels: [{model: a}]\nbase_model: step",
        "merge_method: linear\nmodels: [{model: {model: {path: step}}}]",
        "merge_method: linear\nmodels: [{model: step+adapter}]",
        "merge_method: linear\nmodels: [{model: a+step}]",
        "merge_method: linear\nslices: [{sources: [{model: step, layer_range: [0, 1]}]}]",
        "merge_method: linear\nslices: [{sources: [{model: a, layer_range: [0, 1]}], base_model: step}]",
        "merge_method: linear\nmodules: {m: {models: [{model: step}]}}",
        "merge_method: linear\nmodules: {m: {slices: [{sources: [{model: step, layer_range: [0, 1]}]}]}}",
        "merge_method: linear\nmodels: [{model: a}]\nmethods: [{role: norm, sources: [step]}]",
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer_source: step",
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer: {source: step}",
        "merge_method: linear\nmodels: [{model: a}]\ntokenizer: {tokens: {x: {source: step}}}",
        "merge_method: linear\nmodels: [{model: a}]\n"
        "tokenizer: {tokens: {x: {source: {kind: model_token, model: step, token: y}}}}",
        "gate_mode: random\nbase_model: step\nexperts: [{source_model: a}, {source_model: b}]",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: step}]",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: b}]\n"
        "shared_experts: [{source_model: step}]",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: b}]\n"
        "trunk: {merge_method: linear, models: [{model: step}]}",
        "gate_mode: random\nbase_model: a\nexperts: [{source_model: a}, {source_model: b}]\n"
        "trunk: {merge_method: linear, methods: [{role: norm, sources: [step]}]}",
        "experts: {dense: 0}\nbase_model: step",
        "base_model: a\nexperts: {add: [{model: step}]}",
        "merge_method: linear\nmodels: [{model: a}]\nrouter: step",
    ],
)
def test_every_place_of_a_model_may_name_a_merge(body: str) -> None:
    recipes = parse(f"{body}\n{merge('step', 'a')}")
    assert names(merge_order(recipes, exists=nowhere)) == ["step", None]
    (found,) = [
        (path, model) for path, model in references(recipes[0]) if "step" in (model.path, model.lora_path)
    ]
    assert recipes[0].where(*found[0]) != recipes[0].where()


@pytest.mark.parametrize(
    "line", ["chat_template: step", "parameters: {step: 1}", "methods: [{filter: step, merge_method: step}]"]
)
def test_other_texts_are_no_merges(line: str) -> None:
    (told,) = problems(f"merge_method: step\nmodels: [{{model: a}}]\n{line}\n{merge('step', 'a')}")
    assert "no other merge uses 'step'" in told


def test_references_are_in_written_order() -> None:
    (read,) = parse(
        """
base_model: base
merge_method: linear
models: [{model: a}, {model: b@v}]
methods: [{role: norm, sources: [b@v, a]}]
tokenizer: {source: c, tokens: {x: {source: {kind: zero}}, y: {source: d}, z: {}}}
"""
    )
    assert list(references(read)) == [
        (("base_model",), ModelReference("base")),
        (("models", 0, "model"), ModelReference("a")),
        (("models", 1, "model"), ModelReference("b", "v")),
        (("methods", 0, "sources", 0), ModelReference("b", "v")),
        (("methods", 0, "sources", 1), ModelReference("a")),
        (("tokenizer", "source"), ModelReference("c")),
        (("tokenizer", "tokens", "y", "source"), ModelReference("d")),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            merge("x", "a") + merge("x", "b") + merge(None, "x"),
            ["r.yml:6:1: the name 'x' was given before, at r.yml:2:1. Give each merge a name of its own."],
        ),
        (
            merge(None, "a") + merge(None, "b") + merge(None, "c"),
            [
                "r.yml:4:1: this merge has no name, and neither has the one at r.yml:1:1. Only one may go",
                "r.yml:7:1: this merge has no name, and neither has the one at r.yml:1:1. Only one may go",
            ],
        ),
        (
            merge("x", "a") + merge(None, "b"),
            ["r.yml:2:1: no other merge uses 'x', but a file has one result, here the one without a name."],
        ),
        (
            merge("x", "a") + merge("y", "b") + merge("z", "c"),
            [
                "r.yml:2:1: no other merge uses 'x', but a file has one result, here 'z'.",
                "r.yml:6:1: no other merge uses 'y', but a file has one result, here 'z'.",
            ],
        ),
        (
            merge("x", "a", "x"),
            ["r.yml:4:23: 'x' uses itself. Name a model that is there before, or rename one"],
        ),
        (
            merge("x", "z") + merge("y", "x") + merge("z", "y") + merge(None, "z"),
            ["the merges need each other: 'x' uses 'z', 'z' uses 'y', 'y' uses 'x'."],
        ),
        (
            merge("p", "q") + merge("q", "p") + merge("r", "r", "q") + merge(None, "r"),
            ["the merges need each other: 'p' uses 'q', 'q' uses 'p'.", "'r' uses itself."],
        ),
        (
            merge("x", "a") + merge(None, "x@main"),
            ["r.yml:7:11: 'x' is a merge of this file and has no revision 'main'. Write 'x' alone."],
        ),
    ],
)
def test_merges_that_do_not_fit_together(text: str, expected: list[str]) -> None:
    told = problems(text)
    assert len(told) == len(expected)
    assert all(words in problem for words, problem in zip(expected, told, strict=True))


def test_a_name_that_is_a_directory_too_means_two_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step").mkdir()
    monkeypatch.chdir(tmp_path)
    text = merge("step", "a") + merge("result", "step")
    with pytest.raises(RecipeError) as caught:
        parse_recipes(text, "r.yml")
    assert str(caught.value) == (
        "r.yml:8:11: 'step' is a merge of this file, and a directory too. "
        "Rename the merge, or write './step' for the directory."
    )
    with pytest.raises(RecipeError, match="and a directory too"):
        merge_order(parse(text))


def test_all_that_is_wrong_in_all_recipes_is_told_at_once() -> None:
    text = merge("x", "a").replace("linear", "3") + "---\n- a list\n" + merge("y", "b") + "wieght: 1\n"
    told = problems(text + merge("z", "z") + merge("z", "x") + merge(None, "a"))
    assert told == [
        "r.yml:3:1: merge_method: 3 is a number; expected a text. Put it in quotes.",
        "r.yml:6:1: a recipe is a map of keys to values. Start with 'merge_method: ...'.",
        told[2],
        "r.yml:15:11: 'z' uses itself. Name a model that is there before, or rename one of the merges.",
        "r.yml:17:1: the name 'z' was given before, at r.yml:13:1. Give each merge a name of its own.",
    ]
    assert told[2].startswith("r.yml:11:1: unknown key 'wieght'.")


def test_a_merge_is_not_called_unused_while_another_cannot_be_read() -> None:
    (told,) = problems(merge("x", "a") + merge(None, "x") + "seed: -1\n")
    assert told.startswith("r.yml:8:1: seed: -1 is out of range.")


GRAPHS = st.integers(2, 7).flatmap(
    lambda size: st.tuples(
        st.permutations(range(size)),
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=12),
    )
)


@settings(deadline=None, max_examples=60)
@given(GRAPHS)
def test_any_graph_of_merges_is_put_in_order(graph: tuple[list[int], list[tuple[int, int]]]) -> None:
    listed, edges = graph
    uses = {index: sorted({low for low, high in edges if low < high == index}) for index in listed}
    unused = sorted(set(listed) - {low for lows in uses.values() for low in lows})
    text = "".join(merge(f"m{index}", "model", *(f"m{low}" for low in uses[index])) for index in listed)
    recipes = merge_order(parse(text + merge(None, "model", *(f"m{low}" for low in unused))), exists=nowhere)
    places = {recipe.name: place for place, recipe in enumerate(recipes)}
    assert places[None] == len(listed)
    assert all(places[f"m{low}"] < places[f"m{index}"] for index in listed for low in uses[index])
