"""Rules of ``methods``: what they hold, and what is refused where."""

from __future__ import annotations

import pytest

from raymerge.errors import RecipeError
from raymerge.recipes import Gradient, MethodRule, ModelReference, Recipe, Scalar, Selector, parse_recipe

HEAD = "merge_method: ties\nbase_model: base\nmodels: [{model: a}, {model: b}]\n"


def rule(text: str) -> MethodRule:
    read = parse_recipe(f"{HEAD}methods: [{text}]\n", exists=lambda _: False)
    assert isinstance(read, Recipe)
    (only,) = read.methods
    return only


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(HEAD + text, "r.yml", exists=lambda _: False)
    assert all(problem.remedy for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


def test_a_whole_rule() -> None:
    read = rule(
        """{
    filter: weight, glob: 'model.*', role: [router, attention], layers: ['10..20', 3],
    merge_method: slerp, sources: [a, b@v1], parameters: {t: [0, 1], weight: 0.5}}"""
    )
    assert read.selector == Selector("weight", "model.*", ("attention", "router"), ((3, 3), (10, 20)))
    assert read.merge_method == "slerp"
    assert read.sources == (ModelReference("a"), ModelReference("b", "v1"))
    assert read.parameters == {"t": Gradient((0.0, 1.0)), "weight": Scalar(0.5)}


@pytest.mark.parametrize("text", ["sources: [a]", "parameters: {weight: 1}"])
def test_one_change_is_enough(text: str) -> None:
    assert rule(f"{{role: norm, {text}}}").selector == Selector(roles=("norm",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "methods: [{merge_method: slerp}]",
            "r.yml:4:11: the rule does not say which tensors it is for. Add one of: filter, glob, role",
        ),
        (
            "methods: [{role: norm}]",
            "r.yml:4:11: the rule changes nothing. Add one of: merge_method, sources",
        ),
        (
            "methods: [slerp]",
            "r.yml:4:11: 'slerp' is a text where a map belongs. Write a map like {role: att",
        ),
        (
            "methods: [{role: atention, merge_method: slerp}]",
            "r.yml:4:12: role: 'atention' is not known here. Did you mean 'attention'? Write one of: emb",
        ),
        (
            "methods: [{layers: 9..3, merge_method: slerp}]",
            "r.yml:4:12: layers: the range 9..3 runs backwards. Write 3..9.",
        ),
        ("methods: [{layers: [1, x], merge_method: slerp}]", "r.yml:4:24: 'x' is a text; expected layers."),
        ("methods: [{role: norm, sources: [a, 3]}]", "r.yml:4:37: 3 is a number; expected a model."),
    ],
)
def test_a_bad_rule(text: str, expected: str) -> None:
    (told,) = problems(f"{text}\n")
    assert expected in told


def test_all_that_is_wrong_with_all_rules_is_told_at_once() -> None:
    told = problems("methods:\n- {role: x, merge_method: 1}\n- {layers: b, parameters: {t: c}}\n- {}\n")
    assert [problem.split(" ")[0] for problem in told] == [
        "r.yml:5:4:",
        "r.yml:5:13:",
        "r.yml:6:4:",
        "r.yml:6:28:",
        "r.yml:7:3:",
        "r.yml:7:3:",
    ]
