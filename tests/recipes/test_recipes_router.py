"""Routers and alignment in a recipe that merges mixtures of experts."""

from __future__ import annotations

from functools import partial

import pytest
from kits.recipe_texts import problems, recipe_of

from raymerge.recipes import ModelReference, Recipe, canonical, recipe_from_mapping, references
from raymerge.recipes.schema import Align

recipe = partial(recipe_of, Recipe)

TEXT = "merge_method: linear\nmodels: [{model: a}, {model: b@v+c}]\nbase_model: a\n"


def test_routers_are_merged_and_nothing_is_aligned_unless_it_is_said() -> None:
    assert (recipe(TEXT).router, recipe(TEXT).align) == ("merge", None)
    assert canonical(recipe(f"{TEXT}router: merge\nalign: none\n")) == canonical(recipe(TEXT))


@pytest.mark.parametrize(
    ("written", "router"),
    [
        ("merge", "merge"),
        ("base", "base"),
        ("./base", ModelReference("./base")),
        ("b@v+c", ModelReference("b", "v", "c")),
        ("{model: {path: b, revision: v}}", ModelReference("b", "v")),
    ],
)
def test_a_router_is_a_word_or_a_model(written: str, router: str | ModelReference) -> None:
    read = recipe(f"{TEXT}router: {written}\n")
    assert read.router == router
    assert recipe_from_mapping(dict(read.model_dump(mode="json", exclude_defaults=True))) == read


def test_a_model_whose_router_is_taken_is_named_last() -> None:
    read = recipe(f"router: b@v+c\n{TEXT}tokenizer_source: d\n")
    assert [path for path, _ in references(read)][-2:] == [("tokenizer_source",), ("router",)]
    assert list(references(read))[-1] == (("router",), ModelReference("b", "v", "c"))
    assert all(path != ("router",) for path, _ in references(recipe(f"{TEXT}router: base\n")))


@pytest.mark.parametrize(
    ("written", "align"),
    [
        ("experts", Align(experts=True, neurons=True)),
        ("{experts: true, neurons: false}", Align(experts=True, neurons=False)),
        ("{neurons: false}", Align(experts=True, neurons=False)),
        ("none", None),
    ],
)
def test_alignment(written: str, align: Align | None) -> None:
    read = recipe(f"{TEXT}align: {written}\n")
    assert read.align == align
    assert recipe(read.model_copy().text) == read
    assert Recipe(merge_method="linear", models=[{"model": "a"}], align=align).align == align


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("router: a+b+c", "router: 'a+b+c' names more than one adapter ('+' twice). If the path itself"),
        ("router: {path: a}", "'path' belongs into a map below 'model'. Write {model: {path: a}}."),
        (
            "align: expert",
            "align: 'expert' is not known here. Did you mean 'experts'? "
            "Write experts, none, or a map like {experts: true, neurons: false}.",
        ),
        ("align: {neuron: true}", "unknown key 'neuron'. Did you mean 'neurons'?"),
        (
            "align: {experts: false, neurons: true}",
            "'experts' is false, and neurons are matched within matched experts only. "
            "Remove it, or write 'align: none'.",
        ),
    ],
)
def test_wrong_words(line: str, expected: str) -> None:
    told = problems(f"{TEXT}{line}\n")
    assert any(each.split(": ", 1)[1].startswith(expected) for each in told)
    assert all(each.startswith("r.yml:4:") for each in told)


@pytest.mark.parametrize(("key", "value"), [("router", "base"), ("align", "experts")])
def test_adapters_have_no_routers(key: str, value: str) -> None:
    (told,) = problems(
        f"merge_method: linear\nmodels: [{{model: a}}]\n{key}: {value}\nadapter: {{rank: 4}}\n"
    )
    assert told == (
        f"r.yml:3:1: '{key}' has no meaning beside 'adapter': adapters have no router of their own. "
        f"Remove '{key}', or name models with adapters on them."
    )
