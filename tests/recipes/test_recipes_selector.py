"""Selectors, settings and rules, and recipes that change experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.recipe_texts import nowhere, problems, recipe_of

from raymerge.architectures.rules import Role
from raymerge.documents.fields import Fault, FaultError
from raymerge.recipes.entry import ModelReference
from raymerge.recipes.expert_set import ExpertSetRecipe
from raymerge.recipes.load import canonical, parse_recipe, recipe_from_mapping
from raymerge.recipes.moe import MoeRecipe
from raymerge.recipes.schema import MethodRule, Recipe
from raymerge.recipes.settings import (
    ROLE_NAMES,
    Choice,
    Conditional,
    Gradient,
    Scalar,
    Selector,
    Setting,
    Subject,
    evaluate,
    plain_setting,
    read_layers,
    read_roles,
    read_selector,
    read_setting,
)

Q_PROJ = Subject("model.layers.12.self_attn.q_proj.weight", frozenset({"attention"}), 12)
EXPERT = Subject("model.layers.3.mlp.experts.7.up_proj.weight", frozenset({"expert", "mtp"}), 3)
EMBEDDING = Subject("model.embed_tokens.weight", frozenset({"embedding"}), None)
BARE = Subject("", frozenset(), None)
SUBJECTS = (Q_PROJ, EXPERT, EMBEDDING, BARE)


def faults_in(value: object, reader: Callable[[object], object] = read_setting) -> list[Fault]:
    with pytest.raises(FaultError) as caught:
        reader(value)
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
    first, second = faults_in(["router", "rooter", 7], read_roles)
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
    (fault,) = faults_in(value, read_layers)
    assert fault.path == path
    assert what in fault.what
    assert fault.remedy.startswith(remedy)


def test_all_faults_of_a_selector_come_together() -> None:
    faults: list[Fault] = []
    read_selector({"filter": 1, "glob": True, "role": ["x"], "layers": [1, "b"]}, faults)
    assert [fault.path for fault in faults] == [("filter",), ("glob",), ("role", 0), ("layers", 1)]


ATTENTION = Subject("model.layers.3.self_attn.q_proj.weight", frozenset({"attention"}), 3)
MLP = Subject("model.layers.3.mlp.up_proj.weight", frozenset({"mlp"}), 3)
NORM = Subject("model.layers.3.input_layernorm.weight", frozenset({"norm"}), 3)
FINITE = st.floats(-1e6, 1e6)
SCALARS = FINITE.map(Scalar)
GRADIENTS = st.lists(FINITE, min_size=1, max_size=6).map(lambda values: Gradient(tuple(values)))
SETTING_RANGES = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda ends: (min(ends), max(ends)))
SELECTORS = st.builds(
    Selector,
    st.none() | st.sampled_from(["mlp", "*", "q_proj", ""]),
    st.none() | st.sampled_from(["*.weight", "model.*"]),
    st.sets(st.sampled_from(ROLE_NAMES), max_size=3).map(
        lambda roles: tuple(role for role in ROLE_NAMES if role in roles)
    ),
    st.sets(SETTING_RANGES, max_size=3).map(lambda ranges: tuple(sorted(ranges))),
)
CHOICES = st.builds(Choice, SELECTORS, SCALARS | GRADIENTS)
CONDITIONALS = st.lists(CHOICES, min_size=1, max_size=4).map(lambda rows: Conditional(tuple(rows)))
SETTINGS = SCALARS | GRADIENTS | CONDITIONALS


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        (0.5, Scalar(0.5)),
        (True, Scalar(1.0)),
        ("1e-5", Scalar(1e-5)),
        ([0, 1], Gradient((0.0, 1.0))),
        ((0, "0.5"), Gradient((0.0, 0.5))),
        ([3], Gradient((3.0,))),
        ([{"value": 1}], Conditional((Choice(Selector(), Scalar(1.0)),))),
        (
            [{"filter": "mlp", "value": [0, 1]}, {"value": 0.5}],
            Conditional((Choice(Selector("mlp"), Gradient((0.0, 1.0))), Choice(Selector(), Scalar(0.5)))),
        ),
        # mergekit accepts a single map and then fails on it; here it is a list of one.
        ({"filter": "mlp", "value": 0.3}, Conditional((Choice(Selector("mlp"), Scalar(0.3)),))),
    ],
)
def test_forms(value: object, setting: Setting) -> None:
    assert read_setting(value) == setting
    assert read_setting(setting) is setting


@pytest.mark.parametrize(
    ("values", "t", "expected"),
    [
        ((5.0,), 0.0, 5.0),
        ((0.0, 1.0), 0.25, 0.25),
        ((0.0, 10.0, 0.0), 0.25, 5.0),
        ((0.0, 10.0, 0.0), 0.75, 5.0),
        ((1.0, 0.5, 0.7, 0.3, 0.0), 1 / 3, (1 - (4 / 3 - 1)) * 0.5 + (4 / 3 - 1) * 0.7),
    ],
)
def test_a_gradient_is_straight_between_its_numbers(
    values: tuple[float, ...], t: float, expected: float
) -> None:
    assert evaluate(Gradient(values), MLP, t) == expected


def test_filters_look_for_a_part_of_the_name_and_the_first_match_holds() -> None:
    setting = read_setting(
        [
            {"filter": "self_attn", "value": [0.0, 1.0]},
            {"filter": "mlp", "value": 2},
            {"filter": "layers.3", "value": 3},
        ]
    )
    assert evaluate(setting, ATTENTION, 0.5) == 0.5
    assert evaluate(setting, MLP, 0.5) == 2.0
    assert evaluate(setting, NORM, 0.0) == 3.0


def test_without_a_match_there_is_no_number() -> None:
    assert evaluate(read_setting([{"filter": "mlp", "value": 1}]), ATTENTION, 0.0) is None


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (None, (), "no value"),
        ([], (), "empty"),
        ([1, "x"], (1,), "'x' is a text"),
        ({}, (), "without a value"),
        ([{"filter": "mlp", "vlaue": 1}], (0, "vlaue"), "unknown key 'vlaue'"),
        ([{"filter": 3, "value": 1}], (0, "filter"), "3 is a number"),
        ([{"role": "atention", "value": 1}], (0, "role"), "'atention' is not known here"),
        ([{"value": 1}, 2], (1,), "2 is a number among filters"),
        ([{"value": {"value": 1}}], (0, "value"), "is a map"),
    ],
)
def test_a_fault_has_its_place_within_the_setting(
    value: object, path: tuple[object, ...], words: str
) -> None:
    (fault,) = faults_in(value)
    assert fault.path == path
    assert words in fault.what
    assert fault.remedy


def test_the_remedy_of_a_misspelled_key_is_the_key() -> None:
    (fault,) = faults_in([{"filter": "mlp", "vlaue": 1}])
    assert fault.remedy == "Did you mean 'value'?"
    (fault,) = faults_in([{"zzz": 1, "value": 1}])
    assert fault.remedy == "Keys known here: filter, glob, role, layers, value."


def test_all_faults_come_together() -> None:
    faults = faults_in([{"filter": 1, "value": "x"}, 7, {"value": [1, "y"]}])
    assert [fault.path for fault in faults] == [(0, "filter"), (0, "value"), (1,), (2, "value", 1)]


@settings(deadline=None, max_examples=50)
@given(SETTINGS)
def test_a_setting_survives_being_written_and_read(setting: Setting) -> None:
    assert read_setting(plain_setting(setting)) == setting


HEAD = "merge_method: ties\nbase_model: base\nmodels: [{model: a}, {model: b}]\n"


def rule(text: str) -> MethodRule:
    read = parse_recipe(f"{HEAD}methods: [{text}]\n", exists=lambda _: False)
    assert isinstance(read, Recipe)
    (only,) = read.methods
    return only


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
    (told,) = problems(f"{HEAD}{text}\n")
    assert expected in told


def test_all_that_is_wrong_with_all_rules_is_told_at_once() -> None:
    rules = "methods:\n- {role: x, merge_method: 1}\n- {layers: b, parameters: {t: c}}\n- {}\n"
    told = problems(HEAD + rules)
    assert [problem.split(" ")[0] for problem in told] == [
        *("r.yml:5:4:", "r.yml:5:13:", "r.yml:6:4:", "r.yml:6:28:", "r.yml:7:3:", "r.yml:7:3:")
    ]


recipe = partial(recipe_of, ExpertSetRecipe)


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
            "'drop' needs 'scores' to know which experts go. Add 'scores: weights', 'scores: FILE',",
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


@settings(deadline=None, max_examples=15)
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
