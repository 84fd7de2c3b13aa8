"""Rules of ``methods``: what they hold, and what is refused where."""

from __future__ import annotations

import pytest

from raymerge.errors import RecipeError
from raymerge.recipes import (
    Gradient,
    MethodRule,
    ModelReference,
    Recipe,
    Scalar,
    Selector,
    Subject,
    parse_recipe,
)

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


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("filter: self_attn", Selector("self_attn")),
        ("filter: '*'", Selector("*")),
        ("glob: '*.bias'", Selector(glob="*.bias")),
        ("role: norm", Selector(roles=("norm",))),
        ("layers: 0", Selector(layers=((0, 0),))),
        ("layers: 0..3", Selector(layers=((0, 3),))),
    ],
)
def test_one_key_is_a_selector(text: str, selector: Selector) -> None:
    assert rule(f"{{{text}, merge_method: linear}}").selector == selector


@pytest.mark.parametrize(
    "text",
    ["merge_method: linear", "sources: [a]", "parameters: {weight: 1}", "sources: [a], parameters: {}"],
)
def test_one_change_is_enough(text: str) -> None:
    assert rule(f"{{role: norm, {text}}}").selector == Selector(roles=("norm",))


def test_what_is_not_said_is_the_recipes_own() -> None:
    read = rule("{role: norm, sources: [a]}")
    assert (read.merge_method, read.parameters) == (None, {})
    assert rule("{role: norm, merge_method: linear}").sources == ()


def test_a_selector_is_asked_about_a_tensor() -> None:
    selector = rule("{role: attention, layers: 0..3, merge_method: slerp}").selector
    assert selector.matches(Subject("x", frozenset({"attention"}), 3))
    assert not selector.matches(Subject("x", frozenset({"attention"}), 4))


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
        ("methods: [{role: norm, sources: [], parameters: {}}]", "r.yml:4:11: the rule changes nothing."),
        (
            "methods: [{role: , filter: , merge_method: slerp}]",
            "the rule does not say which tensors it is for",
        ),
        (
            "methods: [slerp]",
            "r.yml:4:11: 'slerp' is a text where a map belongs. Write a map like {role: att",
        ),
        ("methods: {role: norm}", "r.yml:4:1: methods: {'role': 'norm'} is a map; expected a list."),
        (
            "methods: [{role: atention, merge_method: slerp}]",
            "r.yml:4:12: role: 'atention' is not known here. Did you mean 'attention'? Write one of: emb",
        ),
        (
            "methods: [{layers: 9..3, merge_method: slerp}]",
            "r.yml:4:12: layers: the range 9..3 runs backwards. Write 3..9.",
        ),
        ("methods: [{layers: [1, x], merge_method: slerp}]", "r.yml:4:24: 'x' is a text; expected layers."),
        ("methods: [{glob: 3, merge_method: slerp}]", "r.yml:4:12: glob: 3 is a number; expected a text."),
        (
            "methods: [{role: norm, merge_method: 3}]",
            "r.yml:4:24: merge_method: 3 is a number; expected a text.",
        ),
        ("methods: [{role: norm, sources: a}]", "r.yml:4:24: sources: 'a' is a text; expected a list."),
        ("methods: [{role: norm, sources: [a, 3]}]", "r.yml:4:37: 3 is a number; expected a model."),
        ("methods: [{role: norm, parameters: {t: x}}]", "r.yml:4:37: t: 'x' is a text; expected a number."),
        (
            "methods: [{role: norm, merge_method: slerp, roles: mlp}]",
            "r.yml:4:45: unknown key 'roles'. Did you mean 'role'?",
        ),
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


def test_places_of_a_rule() -> None:
    read = parse_recipe(f"{HEAD}methods:\n- role: norm\n  sources: [a, b]\n", "r.yml", exists=lambda _: False)
    assert read.where("methods", 0) == "r.yml:5:3"
    assert read.where("methods", 0, "sources", 1) == "r.yml:6:16"


def test_a_rule_made_from_python() -> None:
    made = MethodRule(role="norm", layers=["0..3"], merge_method="linear", sources=["a"])
    assert made == rule("{role: [norm], layers: 0..3, merge_method: linear, sources: [a]}")
