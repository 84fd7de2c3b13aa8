"""Which prompts an expert may have, by gate mode, and how many experts it stands for."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
from kits.recipe_texts import problems, recipe_of

from raymerge.errors import RecipeError
from raymerge.recipes import RANDOM_GATES, Expert, MoeRecipe, parse_recipe, recipe_from_mapping
from raymerge.recipes.moe import TEXT_GATES, GateMode

recipe = partial(recipe_of, MoeRecipe)

MODES = get_args(GateMode)
PROMPTED = [mode for mode in MODES if mode not in RANDOM_GATES]


def two(gate: str, first: str, second: str = "positive_prompts: [y]") -> str:
    return (
        f"base_model: a\ngate_mode: {gate}\nexperts:\n"
        f"  - {{source_model: b, {first}}}\n  - {{source_model: c, {second}}}\n"
    )


@pytest.mark.parametrize("gate", TEXT_GATES)
def test_a_file_stands_for_prompts_where_the_gate_learns_from_every_token(gate: str) -> None:
    read = recipe(two(gate, "prompt_file: texts/b.txt"))
    assert [each.prompt_file for each in read.experts] == ["texts/b.txt", None]
    assert read.experts[0].positive_prompts == ()


@pytest.mark.parametrize("gate", [mode for mode in PROMPTED if mode not in TEXT_GATES])
def test_other_gates_read_no_file(gate: str) -> None:
    (told,) = problems(two(gate, "prompt_file: b.txt"))
    assert told == (
        f"r.yml:4:23: gate_mode {gate} reads no 'prompt_file'. "
        "Write one of gate_mode: router_input, centroid, ridge; or remove it and write positive_prompts."
    )


@pytest.mark.parametrize("gate", sorted(RANDOM_GATES))
def test_random_gates_read_no_file_either_and_need_nothing_instead(gate: str) -> None:
    (told,) = problems(two(gate, "prompt_file: b.txt"))
    assert told.endswith("Write one of gate_mode: router_input, centroid, ridge; or remove it.")


def test_ridge_takes_no_negative_prompts() -> None:
    (told,) = problems(two("ridge", "positive_prompts: [x], negative_prompts: [z]"))
    assert told == (
        "r.yml:4:46: negative_prompts: gate_mode ridge learns what is not an expert's from the prompts of "
        "the others. Remove 'negative_prompts'."
    )


@pytest.mark.parametrize("gate", ["cheap_embed", *sorted(RANDOM_GATES)])
def test_held_out_prompts_need_a_run_of_the_base(gate: str) -> None:
    (told,) = problems(two(gate, "positive_prompts: [x], held_out_prompts: [z]"))
    assert told == (
        f"r.yml:4:46: gate_mode {gate} does not run the base, so no 'held_out_prompts' are routed. "
        "Remove them, or choose another gate_mode."
    )


@pytest.mark.parametrize("gate", [mode for mode in PROMPTED if mode != "cheap_embed"])
def test_held_out_prompts_are_kept(gate: str) -> None:
    read = recipe(two(gate, "positive_prompts: [x], held_out_prompts: [z, w]"))
    assert read.experts[0].held_out_prompts == ("z", "w")


def test_held_out_prompts_alone_are_not_enough() -> None:
    (told,) = problems(two("ridge", "held_out_prompts: [x]"))
    assert told.startswith("r.yml:4:5: expert 0 (b) has no positive_prompts, which gate_mode ridge needs.")


def test_one_file_for_all_tells_nobody_apart() -> None:
    (told,) = problems(two("centroid", "prompt_file: t.txt", "prompt_file: t.txt"))
    assert told == (
        "r.yml:3:1: experts 0 (b), 1 (c) all have the same prompts; no router tells them apart. "
        "Give each its own, or write gate_mode: random."
    )


def test_one_model_may_be_every_expert_where_the_prompts_differ() -> None:
    text = "base_model: a\nexperts:\n" + "".join(
        f"  - {{source_model: b, positive_prompts: [{prompt}]}}\n" for prompt in "xyz"
    )
    assert {str(each.source_model) for each in recipe(text).experts} == {"b"}


@pytest.mark.parametrize("gate", PROMPTED)
def test_copies_have_the_same_prompts(gate: str) -> None:
    (told,) = problems(two(gate, "positive_prompts: [x], copies: 3"))
    assert told == (
        "r.yml:4:46: copies: the 3 copies of expert 0 (b) have the same prompts; no router tells them apart. "
        "List the model again with prompts of its own, or write gate_mode: random."
    )


@pytest.mark.parametrize("gate", sorted(RANDOM_GATES))
def test_copies_count_as_experts(gate: str) -> None:
    text = (
        f"base_model: a\ngate_mode: {gate}\nexperts_per_token: 4\nexperts: [{{source_model: b, copies: 4}}]\n"
    )
    assert recipe(text).experts[0].copies == 4
    (told,) = problems(text.replace("per_token: 4", "per_token: 5"))
    assert told == (
        "r.yml:3:1: experts_per_token is 5, but 'experts' has only 4: 0 (b) x 4. "
        "Add experts, or write experts_per_token: 4."
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "0 is out of range. Write a whole number from 1 to 4096."),
        ("4097", "4097 is out of range."),
        ("many", "'many' is not a whole number."),
    ],
)
def test_copies_are_a_number(value: str, words: str) -> None:
    told = problems(f"base_model: a\ngate_mode: random\nexperts: [{{source_model: b, copies: {value}}}]\n")
    assert any(line.startswith(f"r.yml:3:29: copies: {words}") for line in told)


def test_shared_experts_have_no_copies() -> None:
    shared = "shared_experts: [{source_model: b, copies: 2}]\n"
    (told,) = problems(two("hidden", "positive_prompts: [x]") + shared)
    assert told == (
        "r.yml:6:36: 'copies' of a shared expert would all see every token. "
        "Remove it; 'residual_scale' makes a shared expert count for more."
    )
    assert recipe(two("hidden", "positive_prompts: [x]") + shared.replace("2", "1")).shared_experts


def test_shared_experts_need_no_prompts_and_none_that_the_gate_cannot_use() -> None:
    text = two("ridge", "positive_prompts: [x]") + "shared_experts: [{source_model: b}]\n"
    assert recipe(text).shared_experts == (Expert(source_model="b"),)
    wrong = text.replace("{source_model: b}", "{source_model: b, negative_prompts: [x]}")
    (told,) = problems(wrong)
    assert told.startswith("r.yml:6:36: negative_prompts: gate_mode ridge learns")


def test_all_that_is_wrong_with_prompts_comes_at_once() -> None:
    text = two("cheap_embed", "prompt_file: x, held_out_prompts: [u]", "copies: 2, negative_prompts: [v]")
    assert [line.split(": ")[0] for line in problems(text)] == [
        "r.yml:4:23",
        "r.yml:4:39",
        "r.yml:5:5",
        "r.yml:5:23",
    ]


@pytest.mark.parametrize("gate", MODES)
def test_rules_hold_for_plain_values_and_for_made_experts_alike(gate: str) -> None:
    plain: dict[str, Any] = {"source_model": "b", "positive_prompts": ["x"], "copies": 2}
    for expert in (plain, Expert(**plain)):
        data = {"base_model": "a", "gate_mode": gate, "experts": [expert]}
        if gate in RANDOM_GATES:
            assert recipe_from_mapping(data)
            continue
        with pytest.raises(
            RecipeError, match=r"recipe: experts\[0\]\.copies: the 2 copies of expert 0 \(b\)"
        ):
            recipe_from_mapping(data)


def test_an_expert_has_a_source_model_and_no_model() -> None:
    told = problems("base_model: a\ngate_mode: random\nexperts: [{model: b, copies: 2}]\n")
    assert told == [
        "r.yml:3:11: the key 'source_model' is missing or empty. Add it.",
        "r.yml:3:12: unknown key 'model'. An expert's model is its 'source_model'.",
    ]


@pytest.mark.parametrize("other", ["[b, a]", "[a, b, a]"])
def test_prompts_in_another_order_are_the_same(other: str) -> None:
    text = "base_model: m\nexperts:\n- {source_model: x, positive_prompts: [a, b]}\n"
    with pytest.raises(RecipeError, match="all have the same prompts"):
        parse_recipe(f"{text}- {{source_model: y, positive_prompts: {other}}}\n", "r.yml")
