"""The page on the recipe language: its examples are recipes, and it leaves no key out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from raymerge.documents.positions import MAX_DEPTH, MAX_DOCUMENTS, MAX_NODES, MAX_TEXT_BYTES
from raymerge.recipe_search.settings import read_settings
from raymerge.recipes.expert_set import AddedExpert, ExpertChange, ExpertSetRecipe
from raymerge.recipes.load import canonical, parse_recipes
from raymerge.recipes.moe import Expert, GateMode, MoeRecipe, Trunk
from raymerge.recipes.order import AnyRecipe, merge_order
from raymerge.recipes.schema import AdapterOutput, MethodRule, Recipe
from raymerge.recipes.search import read_marked_mapping
from raymerge.recipes.settings import ROLE_NAMES, SELECTOR_KEYS
from raymerge.recipes.sweep import draft_sweep_mapping
from raymerge.recipes.training_run import RunFiles

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

SWEEP = re.compile("^(sweep|checkpoints):", re.MULTILINE)


def section(title: str) -> str:
    found = re.search(rf"^##+ {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def completed(example: str) -> str:
    """The example with what it leaves out because it is not about that."""
    if re.search(r"^experts:", example, re.MULTILINE):
        return example
    if "merge_method" not in example:
        example += "merge_method: linear\n"
    if not re.search(r"^(models|slices|modules):", example, re.MULTILINE):
        example += "models: [{model: a}]\n"
    return example


def read(example: str) -> tuple[AnyRecipe, ...]:
    if example.startswith("search:"):
        marked = read_marked_mapping(yaml.safe_load(example), exists=lambda _: False)
        assert read_settings(marked.block, marked.parameters).evaluations
        return marked.candidate(next(marked.probes())).recipes
    steps = [f"step-{number}" for number in range(100000, 200001, 5000)]
    sweep = (
        draft_sweep_mapping(yaml.safe_load(example), files=RunFiles(lambda _: steps))
        if SWEEP.search(example)
        else None
    )
    if sweep is not None:
        return sweep.require()[-1].recipes
    return parse_recipes(completed(example), "example.yml", exists=lambda _: False)


def example_with(words: str) -> Recipe:
    (found,) = [example for example in EXAMPLES if words in example]
    (recipe,) = read(found)
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[0])
def test_an_example_is_a_recipe(example: str) -> None:
    recipes = merge_order(read(example), exists=lambda _: False)
    assert all(canonical(recipe) for recipe in recipes)
    assert len(recipes) == example.count("\n---\n") + 1


def test_there_is_an_example_of_every_part() -> None:
    shown = "".join(EXAMPLES)
    parts = ("models", "slices", "modules", "parameters", "methods", "adapter", "name", *SELECTOR_KEYS[::2])
    assert [part for part in parts if f"{part}:" not in shown] == []


@pytest.mark.parametrize("key", Recipe.model_fields)
def test_every_key_of_a_recipe_is_in_the_first_table(key: str) -> None:
    assert any(f"`{key}`" in line.split("|")[1] for line in section("Top level").splitlines() if "|" in line)


def test_every_key_of_a_selector_of_a_rule_and_of_an_adapter_is_told() -> None:
    assert all(f"| `{key}` |" in section("Selectors") for key in SELECTOR_KEYS)
    own = set(MethodRule.model_fields) - set(SELECTOR_KEYS)
    assert all(f"- `{key}`:" in section("Another method for some tensors") for key in own)
    assert all(f"| `{key}` |" in section("Adapters") for key in AdapterOutput.model_fields)


def rows(title: str) -> dict[str, str]:
    """What the last column of a section's tables says of each key; the first table that has it counts."""
    told: dict[str, str] = {}
    for line in section(title).splitlines():
        cells = line.split("|")[1:-1]
        for key in re.findall(r"`(\w+)`", cells[0]) if cells else ():
            told.setdefault(key, cells[-1].strip())
    return told


def test_every_key_of_a_mixture_to_build_is_told() -> None:
    told = rows("Building a mixture of experts")
    assert set(told) >= {*MoeRecipe.model_fields, *Expert.model_fields, *get_args(GateMode)}
    assert all(f"`{key}`" in section("The trunk") for key in Trunk.model_fields)


def test_the_defaults_of_a_mixture_that_are_told_hold() -> None:
    told = rows("Building a mixture of experts")
    (recipe,) = read(next(example for example in EXAMPLES if "gate_mode: hidden" in example))
    defaults = ("experts_per_token", "gate_mode", "gate_scale", "gate_ridge", "granularity", "layout")
    values = {key: getattr(recipe, key) for key in defaults}
    assert {key: told[key].strip("`") for key in defaults} == {
        key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in values.items()
    }


def test_every_key_of_a_change_of_experts_is_told() -> None:
    told = rows("Changing the experts of a checkpoint")
    assert set(told) >= {*ExpertChange.model_fields, *AddedExpert.model_fields}
    page = section("Changing the experts of a checkpoint")
    assert all(f"`{key}`" in page for key in ExpertSetRecipe.model_fields)


def test_the_roles_are_told() -> None:
    told = re.search(r"^Roles are (.*?)\.", section("Selectors"), re.MULTILINE | re.DOTALL)
    assert told is not None
    assert tuple(re.findall(r"`(\w+)`", told[1])) == ROLE_NAMES


def test_the_defaults_that_are_told_hold() -> None:
    recipe = example_with("override_architecture")
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \|$", section("Top level"), re.MULTILINE))
    assert set(table) >= {
        *("missing_tensors", "extra_tensors", "embedding_sizes", "pickled_weights", "duplicates")
    }
    assert {key: getattr(recipe, key) for key in table} == table


def test_the_limits_that_are_told_hold() -> None:
    assert section("Limits").strip() == (
        f"{MAX_TEXT_BYTES // 2**20} MiB of text and {MAX_DOCUMENTS} documents a file; "
        f"{MAX_NODES:,} values after aliases are expanded and {MAX_DEPTH} levels a recipe."
    )


def test_the_example_of_rules_says_what_its_remarks_say() -> None:
    attention, norm, mlp = example_with("layers: [0..3, 28..31]").methods
    assert [str(source) for source in (*attention.sources, *norm.sources)] == ["code", "base"]
    assert mlp.merge_method is None
    assert mlp.selector.layers == ((0, 3), (28, 31))


def test_the_example_of_adapters() -> None:
    assert example_with("adapter:").adapter == AdapterOutput(rank=32, energy=0.99)
