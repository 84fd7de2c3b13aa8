"""How a mixture of experts is built: granularity, upcycling, gates, trunk and layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml
from kits.recipe_texts import problems, recipe_of

from raymerge.recipes import (
    MethodRule,
    ModelEntry,
    MoeRecipe,
    Scalar,
    canonical,
    parse_recipe,
    recipe_from_mapping,
    references,
)
from raymerge.recipes.moe import Trunk, trunk_recipe

recipe = partial(recipe_of, MoeRecipe)

RANDOM = "base_model: a\ngate_mode: random\nexperts: [{source_model: b}, {source_model: c}]\n"
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs" / "recipes").rglob("moe-*.yml"))


def test_every_key() -> None:
    read = recipe(
        """\
name: mixture
base_model: a
gate_mode: ridge
gate_scale: 2
gate_ridge: 1e-3
granularity: 4
weight_scaling: false
layout: fused
pickled_weights: refuse
experts:
  - {source_model: b, prompt_file: b.txt, reinit_fraction: 0.5, noise_scale: 0.01}
  - {source_model: c+adapter, positive_prompts: [x], reinit_fraction: 1}
trunk:
  merge_method: ties
  models: [{model: b, parameters: {weight: 0.5}}, {model: c}]
  parameters: {weight: 1, density: 0.5}
  methods: [{role: norm, merge_method: passthrough, sources: [b]}]
"""
    )
    assert (read.name, read.gate_scale, read.gate_ridge) == ("mixture", 2.0, 1e-3)
    assert (read.granularity, read.weight_scaling) == (4, False)
    assert (read.layout, read.pickled_weights) == ("fused", "refuse")
    assert [each.reinit_fraction for each in read.experts] == [0.5, 1.0]
    assert read.trunk == Trunk(
        merge_method="ties",
        models=[ModelEntry(model="b", parameters={"weight": 0.5}), ModelEntry(model="c")],
        parameters={"weight": 1, "density": 0.5},
        methods=[MethodRule(role="norm", merge_method="passthrough", sources=["b"])],
    )


def test_a_trunk_may_be_of_all_experts() -> None:
    trunk = recipe(f"{RANDOM}trunk: {{merge_method: linear, parameters: {{weight: 1}}}}\n").trunk
    assert trunk is not None
    assert (trunk.models, trunk.parameters) == ((), {"weight": Scalar(1.0)})


def test_models_of_a_trunk_are_named_behind_the_experts_and_its_rules_last() -> None:
    models, rule = "models: [{model: d}, {model: b}]", "methods: [{role: mlp, sources: [b]}]"
    trunk = f"trunk: {{merge_method: linear, {models}, {rule}}}\n"
    read = recipe(f"{RANDOM}shared_experts: [{{source_model: e}}]\n{trunk}")
    assert [(".".join(map(str, path)), str(each)) for path, each in references(read)] == [
        ("base_model", "a"),
        ("experts.0.source_model", "b"),
        ("experts.1.source_model", "c"),
        ("shared_experts.0.source_model", "e"),
        ("trunk.models.0.model", "d"),
        ("trunk.models.1.model", "b"),
        ("trunk.methods.0.sources.0", "b"),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("granularity: 0", "granularity: 0 is out of range. Write a whole number at least 1."),
        ("layout: fuse", "layout: 'fuse' is not known here. Did you mean 'fused'? Write one of: hub, fused."),
        ("gate_scale: 0", "gate_scale: 0 is not above 0. Write a positive number, like 0.5."),
        ("gate_scale: 1e39", "gate_scale: 1e+39 is out of range. Write a number from 1e-06 to 1000000."),
        (
            "tokenizer_source: union",
            "unknown key 'tokenizer_source'. A mixture has the tokenizer and the vocabulary of its "
            "base_model. Merge vocabularies in a recipe of their own before this one, and name its result as "
            "base_model.",
        ),
        (
            "gate_ridge: 0.1",
            "'gate_ridge' belongs to gate_mode ridge, and gate_mode is random. "
            "Remove it, or write gate_mode: ridge.",
        ),
        (
            "load_in_4bit: true",
            "unknown key 'load_in_4bit'. In mergekit that is the flag --load-in-4bit; it is not needed here, "
            "since the base is run with one layer in memory at a time. Remove the key.",
        ),
        (
            "models: [{model: a}]",
            "unknown key 'models'. Everything but the experts is merged by "
            "'trunk: {merge_method: ..., models: [...]}'.",
        ),
        (
            "merge_method: linear",
            "unknown key 'merge_method'. A recipe with 'experts' builds a mixture of experts and has no "
            "method. Everything but the experts is merged by 'trunk: {merge_method: ..., models: [...]}'.",
        ),
    ],
)
def test_wrong_keys(line: str, expected: str) -> None:
    (told,) = problems(f"{RANDOM}{line}\n")
    assert told.startswith("r.yml:4:")
    assert told.split(": ", 1)[1] == expected


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (
            "noise_scale: -0.1",
            "noise_scale: -0.1 is below 0, and is a standard deviation. Write 0 or more, like 0.01.",
        ),
        ("reinit_fraction: 1.5", "reinit_fraction: 1.5 is not a fraction. Write a number from 0 to 1."),
    ],
)
def test_wrong_keys_of_an_expert(key: str, told: str) -> None:
    text = RANDOM.replace("source_model: b", f"source_model: b, {key}")
    assert problems(text) == [f"r.yml:3:29: {told}"]


TRUNK = """\
base_model: a
gate_mode: random
experts: [{source_model: b}, {source_model: c}]
trunk:
  merge_method: linear
  parameters: {weight: 1}
  models:
    - {model: b, parameters: {weight: 0.5}}
    - model: c
  methods: [{role: norm, sources: [b]}]
"""
WEIGHT = ("parameters", "weight")


@pytest.mark.parametrize(
    ("path", "mark", "words"),
    [
        ((), "4:1", "trunk"),
        (("base_model",), "1:1", "base_model"),
        (("models", 0, *WEIGHT), "8:31", "trunk.models[0].parameters.weight"),
        (("models", 1, *WEIGHT), "6:16", "trunk.parameters.weight"),
        (("methods", 0, "sources", 0), "10:36", "trunk.methods[0].sources[0]"),
    ],
)
def test_places_of_a_trunk_are_those_of_the_mixture(
    path: tuple[str | int, ...], mark: str, words: str
) -> None:
    written, plain = recipe(TRUNK), recipe_from_mapping(yaml.safe_load(TRUNK))
    assert isinstance(plain, MoeRecipe)
    assert trunk_recipe(written, ["weight"]).where(*path) == f"r.yml:{mark}"
    assert trunk_recipe(plain, ["weight"]).where(*path) == f"recipe: {words}"


def test_places_of_a_trunk_that_lists_no_models_or_is_none() -> None:
    text = f"{RANDOM}trunk: {{merge_method: linear, parameters: {{weight: 1}}}}\n"
    listed = trunk_recipe(recipe(text), ["weight"])
    assert listed.where("models", 1) == "r.yml:4:1"
    assert listed.where("models", 1, *WEIGHT) == "r.yml:4:44"
    assert trunk_recipe(recipe(RANDOM), []).where("models", 0) == "r.yml:1:1"
    made = recipe_from_mapping(yaml.safe_load(RANDOM))
    assert isinstance(made, MoeRecipe)
    assert trunk_recipe(made, []).where("models", 0) == "recipe: base_model"


def test_a_gate_that_is_none_is_one_fault() -> None:
    text = RANDOM.replace("random", "rigde") + "gate_ridge: 0.1\nshared_experts: [{source_model: b}]\n"
    (told,) = problems(text)
    assert told.startswith("r.yml:2:1: gate_mode: 'rigde' is not known here. Did you mean 'ridge'?")


@pytest.mark.parametrize(
    "change",
    [
        "layout: fused",
        "granularity: 2",
        "weight_scaling: false",
        "gate_scale: 2",
        "pickled_weights: refuse",
        "trunk: {merge_method: linear}",
        "trunk: {merge_method: linear, parameters: {weight: 1}}",
    ],
)
def test_canonical_sees_every_choice(change: str) -> None:
    assert canonical(recipe(RANDOM)) != canonical(recipe(f"{RANDOM}{change}\n"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_ours_is_a_recipe_of_models_that_are_there(example: Path) -> None:
    read = parse_recipe(example.read_text(encoding="utf-8"))
    assert isinstance(read, MoeRecipe)
    assert all((ROOT / reference.path).is_dir() for _, reference in references(read))
    files = [each.prompt_file for each in read.experts if each.prompt_file is not None]
    assert all((ROOT / file).is_file() for file in files)
