"""Output that equals other output: what a plan knows of it, and what the digests of its bytes tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.merges import MEAN, STACK, make_models

from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.report import DuplicateGroup, equal_tensors, found_duplicates, planned_duplicates
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.merges import build_plan
from raymerge.recipes import Recipe, parse_recipe

NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.2.input_layernorm.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of three layers."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def plan_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans the recipe of a text over the models."""
    monkeypatch.chdir(folder)

    def planned(text: str) -> Plan:
        recipe = parse_recipe(text)
        assert isinstance(recipe, Recipe)
        return build_plan(recipe, open_sources(recipe), version="test")

    return planned


def _row_of(plan: Plan, name: str) -> int:
    number = plan["tensors"].column("name").to_pylist().index(name)
    return plan["rows"].column("tensor").to_pylist().index(number)


def _digests(plan: Plan, same: Mapping[str, str] | None = None) -> dict[int, str]:
    """A digest of its own for each row that is made; those named have the ones given."""
    copies = plan["rows"].column("copy_of").to_pylist()
    found = {row: f"digest {row}" for row, copy in enumerate(copies) if copy < 0}
    return found | {_row_of(plan, name): digest for name, digest in (same or {}).items()}


# What a plan knows


def test_a_layer_used_three_times_is_one_group_of_two(plan_of: Any) -> None:
    once = "  - sources: [{model: one, layer_range: [0, 1]}]\n"
    found = planned_duplicates(plan_of(f"merge_method: passthrough\nslices:\n{once * 3}"))
    sizes = {group.pattern: group.tensors for group in found.groups}
    assert sizes["model.layers.*.self_attn.q_proj.weight"] == 2
    assert set(sizes.values()) == {2}


# What the bytes tell


def test_what_the_plan_knew_is_not_found_again(plan_of: Any) -> None:
    """Layer 2 is layer 0 once more; the last one is of another model."""
    plan = plan_of(STACK)
    assert equal_tensors(plan, _digests(plan)) == ()
    other = "model.layers.3.input_layernorm.weight"
    found = equal_tensors(plan, _digests(plan, {NORMS[0]: "same", other: "same"}))
    assert found == (DuplicateGroup("model.layers.*.input_layernorm.weight", 1, 64),)
    told = found_duplicates(plan, _digests(plan, {NORMS[0]: "same", other: "same"}), shared_bytes=7)
    assert (told.planned, told.shared_bytes, told.unforeseen) == (planned_duplicates(plan), 7, found)


@given(classes=st.lists(st.integers(0, 3), min_size=30, max_size=30))
@settings(deadline=None, max_examples=20)
def test_all_but_the_first_of_each_kind_are_counted(folder: Path, classes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recipe = parse_recipe(MEAN)
        assert isinstance(recipe, Recipe)
        plan = build_plan(recipe, open_sources(recipe), version="test")
    assert len(plan["rows"]) == len(plan["tensors"]) == 30
    found = equal_tensors(plan, {row: str(kind) for row, kind in enumerate(classes)})
    assert sum(group.tensors for group in found) == 30 - len(set(classes))
    sizes = plan["tensors"].column("nbytes").to_pylist()
    numbers = plan["rows"].column("tensor").to_pylist()
    kinds = {number: classes[row] for row, number in enumerate(numbers)}
    first = {kind: min(number for number in kinds if kinds[number] == kind) for kind in set(classes)}
    wanted = sum(sizes[number] for number in kinds if first[kinds[number]] != number)
    assert sum(group.nbytes for group in found) == wanted
