"""Recipes that build a mixture of experts."""

from __future__ import annotations

from functools import partial

import pytest
from kits.recipe_texts import problems, recipe_of

from raymerge.dtypes import DType
from raymerge.recipes import Expert, ModelReference, MoeRecipe, canonical

recipe = partial(recipe_of, MoeRecipe)

TWO = """\
base_model: models/base
gate_mode: hidden
experts:
  - source_model: models/code
    positive_prompts: ["def area(width, height):"]
  - source_model: models/med
    positive_prompts: ["The patient reports mild pain."]
"""


def test_defaults() -> None:
    read = recipe(TWO)
    assert read.base_model == ModelReference("models/base")
    assert read.experts[1] == Expert(
        source_model="models/med", positive_prompts=["The patient reports mild pain."]
    )
    assert (read.gate_mode, read.experts_per_token, read.shared_experts) == ("hidden", 2, ())
    assert (read.architecture, read.dtype, read.seed, read.duplicates) == (None, None, 0, "keep")
    assert read.text == TWO
    assert read.where("experts", 1) == "r.yml:6:5"


def test_every_key() -> None:
    read = recipe(
        """
base_model: a
gate_mode: cheap_embed
experts_per_token: 1
architecture: qwen
dtype: bfloat16
seed: 3
shard_size: 1GB
duplicates: share
experts:
  - source_model: b
    positive_prompts: [x, y]
    negative_prompts: [z]
    noise_scale: 0.1
    residual_scale: "1e-1"
shared_experts:
  - source_model: c
    residual_scale: 0.25
"""
    )
    (expert,) = read.experts
    assert (expert.positive_prompts, expert.negative_prompts) == (("x", "y"), ("z",))
    assert (expert.noise_scale, expert.residual_scale) == (0.1, 0.1)
    assert read.shared_experts[0].residual_scale == 0.25
    assert (read.architecture, read.dtype, read.seed) == ("qwen", DType.BF16, 3)
    assert (read.shard_size, read.duplicates) == (10**9, "share")


@pytest.mark.parametrize(
    "gate", ["hidden", "hidden_last", "hidden_avg", "cheap_embed", "router_input", "centroid", "ridge"]
)
def test_other_gates_need_prompts_for_every_expert(gate: str) -> None:
    text = TWO.replace("gate_mode: hidden", f"gate_mode: {gate}")
    assert recipe(text).gate_mode == gate
    cut = text.replace('    positive_prompts: ["The patient reports mild pain."]\n', "")
    (told,) = problems(cut)
    some = "some, or a prompt_file" if gate in ("router_input", "centroid", "ridge") else "some"
    assert told == (
        f"r.yml:6:5: expert 1 (models/med) has no positive_prompts, which gate_mode {gate} needs. "
        f"Give it {some}, or write gate_mode: random."
    )


def test_the_default_gate_needs_prompts_too() -> None:
    told = problems("base_model: a\nexperts: [{source_model: b}, {source_model: c, positive_prompts: []}]\n")
    assert [line.split(" has no")[0] for line in told] == [
        "r.yml:2:11: expert 0 (b)",
        "r.yml:2:30: expert 1 (c)",
    ]


def test_too_few_experts_name_the_experts_and_the_remedy() -> None:
    text = "base_model: a\ngate_mode: random\nexperts_per_token: 3\n"
    text += "experts: [{source_model: b}, {source_model: c}]\n"
    assert problems(text) == [
        "r.yml:3:1: experts_per_token is 3, but 'experts' has only 2: 0 (b), 1 (c). "
        "Add experts, or write experts_per_token: 2."
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [("0", "0 is out of range"), ("-1", "-1 is out of range"), ("x", "not a whole number")],
)
def test_experts_per_token_is_at_least_one(value: str, words: str) -> None:
    (told,) = problems(f"{TWO}experts_per_token: {value}\n")
    assert told.startswith("r.yml:8:1: experts_per_token: ")
    assert words in told


def test_the_same_prompts_for_all_are_refused() -> None:
    (told,) = problems(TWO.replace('["The patient reports mild pain."]', '["def area(width, height):"]'))
    assert told.startswith("r.yml:3:1: experts 0 (models/code), 1 (models/med) all have the same prompts")


def test_negative_prompts_can_tell_experts_apart() -> None:
    same = TWO.replace('["The patient reports mild pain."]', '["def area(width, height):"]')
    assert recipe(f"{same}    negative_prompts: [x]\n").experts[1].negative_prompts == ("x",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gate_mode: random\n", "r.yml:1:1: the key 'experts' is missing or empty. Add it."),
        ("gate_mode: random\n", "r.yml:1:1: the key 'base_model' is missing or empty. Add it."),
        ("base_model: a\nexperts: []\n", "r.yml:2:1: 'experts' is empty."),
        (
            "base_model: a\nexperts: x\ngate_mode: random\n",
            "r.yml:2:1: experts: 'x' is a text; expected a list.",
        ),
        (
            f"{TWO}merge_method: linear\n",
            "r.yml:8:1: unknown key 'merge_method'. A recipe with 'experts' builds",
        ),
        (f"{TWO}clone_tensor: 1\n", "r.yml:8:1: unknown key 'clone_tensor'. Did you mean 'clone_tensors'?"),
        (
            f"{TWO}experts_per_tok: 1\n",
            "r.yml:8:1: unknown key 'experts_per_tok'. Did you mean 'experts_per_token'?",
        ),
        (
            TWO.replace("hidden", "hiden"),
            "r.yml:2:1: gate_mode: 'hiden' is not known here. Did you mean 'hidden'?",
        ),
        (
            TWO.replace("positive_prompts", "positive_promps", 1),
            "r.yml:5:5: unknown key 'positive_promps'. Did you",
        ),
        (TWO.replace('["def', '[5, "def'), "r.yml:5:24: 5 is a number; expected a text."),
        (f"{TWO}  - 3\n", "r.yml:8:5: 3 is a number where a map belongs. Write a map like {source_model"),
        (f"{TWO}    noise_scale: x\n", "r.yml:8:5: noise_scale: 'x' is a text; expected a number."),
        (f"{TWO}dtype: int8\n", "r.yml:8:1: dtype: 'int8' holds whole numbers only"),
    ],
)
def test_bad_recipes(text: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(text))


def test_an_unknown_gate_is_the_only_fault_of_experts_without_prompts() -> None:
    assert (
        len(problems("base_model: a\ngate_mode: best\nexperts: [{source_model: b}, {source_model: c}]\n"))
        == 1
    )


def test_canonical_sees_prompts_and_sources() -> None:
    assert canonical(recipe(TWO)) == canonical(recipe(f"# said again\n{TWO}seed: 0\n"))
    for changed in (TWO.replace("area", "size"), TWO.replace("models/code", "models/other")):
        assert canonical(recipe(TWO)) != canonical(recipe(changed))


def test_the_method_of_a_mixture_may_be_called_moe() -> None:
    read = recipe(f"{TWO}merge_method: moe\n")
    assert read == recipe(TWO)
    (note,) = read.notes
    assert "'merge_method: moe' has no effect" in note
    (problem,) = problems("merge_method: moe\nmodels: [{model: a}]\nexperts: {keep: [0]}\nbase_model: a\n")[
        :1
    ]
    assert "unknown key 'merge_method'" in problem
