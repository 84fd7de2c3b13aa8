"""Recipes that build a mixture of experts."""

from __future__ import annotations

from functools import partial

import pytest
from kits.recipe_texts import problems, recipe_of

from raymerge.dtypes import DType
from raymerge.recipes import MoeRecipe, canonical

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


def test_negative_prompts_can_tell_experts_apart() -> None:
    same = TWO.replace('["The patient reports mild pain."]', '["def area(width, height):"]')
    assert recipe(f"{same}    negative_prompts: [x]\n").experts[1].negative_prompts == ("x",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gate_mode: random\n", "r.yml:1:1: the key 'experts' is missing or empty. Add it."),
        ("gate_mode: random\n", "r.yml:1:1: the key 'base_model' is missing or empty. Add it."),
        (
            "base_model: a\nexperts: x\ngate_mode: random\n",
            "r.yml:2:1: experts: 'x' is a text; expected a list.",
        ),
        (
            f"{TWO}merge_method: linear\n",
            "r.yml:8:1: unknown key 'merge_method'. A recipe with 'experts' builds",
        ),
        (TWO.replace('["def', '[5, "def'), "r.yml:5:24: 5 is a number; expected a text."),
        (f"{TWO}  - 3\n", "r.yml:8:5: 3 is a number where a map belongs. Write a map like {source_model"),
    ],
)
def test_bad_recipes(text: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in problems(text))


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
