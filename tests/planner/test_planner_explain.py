"""The account of a plan: numbers that add up, and every tensor with what it is made of."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import llama_config, read_tensors, write_checkpoint
from kits.merges import MEAN, STACK, make_models

from raymerge.errors import Problem
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.plan import Plan
from raymerge.planner.explain import Explanation, config_changes, explain, tensor_lines
from raymerge.planner.inputs.sources import Source, open_sources
from raymerge.planner.merges import build_plan
from raymerge.recipes import Recipe, parse_recipe

BUDGET = 1 << 30


def _planned(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, tuple[Source, ...]]:
    monkeypatch.chdir(folder)
    recipe = parse_recipe(text)
    assert isinstance(recipe, Recipe)
    sources = open_sources(recipe)
    return build_plan(recipe, sources, version="test"), sources


def _explained(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Explanation:
    plan, sources = _planned(folder, text, monkeypatch)
    return explain(plan, sources, project(plan, BUDGET))


def test_a_mean_reads_both_and_writes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _explained(make_models(tmp_path), MEAN, monkeypatch)
    one, two = found.sources
    assert (one.name, one.gives_config, two.gives_config) == ("one", True, False)
    assert (one.tensors, one.dtypes) == (30, ("BF16",))
    assert found.read_bytes == one.nbytes + two.nbytes
    assert found.output.tensors == 30
    assert found.output.shards == ("model.safetensors",)
    assert found.written_bytes == found.output.nbytes > one.nbytes
    assert (found.duplicates.tensors, found.duplicates.examples, found.config_changes) == (0, (), ())
    assert [(d.source, d.disposition, d.rule, d.tensors, d.nbytes) for d in found.dispositions] == [
        (0, "merged", "method", 30, one.nbytes),
        (1, "merged", "method", 30, two.nbytes),
    ]


@pytest.mark.parametrize("text", [MEAN, STACK])
def test_every_source_tensor_and_byte_is_accounted_for(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _explained(make_models(tmp_path), text, monkeypatch)
    tensors: Counter[int] = Counter()
    nbytes: Counter[int] = Counter()
    for line in found.dispositions:
        tensors[line.source] += line.tensors
        nbytes[line.source] += line.nbytes
    assert [tensors[index] for index in range(2)] == [source.tensors for source in found.sources]
    assert [nbytes[index] for index in range(2)] == [source.nbytes for source in found.sources]


def test_a_repeated_layer_is_a_duplicate_and_changes_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _explained(make_models(tmp_path), STACK, monkeypatch)
    layer = [("model.layers.2.input_layernorm.weight", "model.layers.0.input_layernorm.weight")]
    assert found.duplicates.tensors == 9
    assert list(found.duplicates.examples[:1]) == layer
    assert len(found.duplicates.examples) == 5
    assert found.duplicates.policy == "keep"
    changes = {change.key: (change.before, change.after) for change in found.config_changes}
    assert changes["num_hidden_layers"] == ("3", "4")
    assert found.read_bytes == sum(d.nbytes for d in found.dispositions if d.disposition == "copied")


def test_what_is_dropped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _explained(make_models(tmp_path), STACK, monkeypatch)
    dropped = [line for line in found.dispositions if line.disposition == "dropped"]
    assert {(line.source, line.rule) for line in dropped} == {(0, "outside_slices"), (1, "outside_slices")}
    assert all(1 <= len(line.examples) <= 5 for line in dropped)
    assert all(not line.examples for line in found.dispositions if line.disposition != "dropped")


def test_problems_of_the_plan_and_of_the_options_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_models(tmp_path)
    tensors = read_tensors(folder / "two")
    tensors["model.norm.weight"] = torch.ones(33, dtype=torch.bfloat16)
    write_checkpoint(folder / "two", tensors, llama_config())
    plan, sources = _planned(folder, MEAN, monkeypatch)
    extra = Problem("--memory", "it is too little.", "Give more.")
    found = explain(plan, sources, project(plan, BUDGET), problems=[extra])
    assert found.problems == (*plan.problems, extra)
    assert "model.norm.weight" in str(found.problems[0])


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["a", "b"])
CONFIGS = st.recursive(
    st.dictionaries(st.sampled_from("pqr"), SCALARS | st.lists(st.integers(0, 3), max_size=3), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("pqr"), inner, max_size=3),
    max_leaves=6,
)


@given(before=CONFIGS, after=CONFIGS)
@settings(deadline=None, max_examples=100)
def test_the_config_changes_lead_from_one_config_to_the_other(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    changed = copy.deepcopy(before)
    for change in config_changes(before, after):
        *path, last = change.key.split(".")
        section = changed
        for key in path:
            section = section[key]
        if change.after is None:
            del section[last]
        else:
            section[last] = json.loads(change.after)
    assert changed == after


def test_tensors_come_in_file_order_with_what_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = _planned(make_models(tmp_path), MEAN, monkeypatch)
    lines = list(tensor_lines(plan))
    assert len(lines) == len(plan["tensors"])
    assert [line.name for line in lines[:2]] == [
        "lm_head.weight", "model.embed_tokens.weight",
    ]  # fmt: skip
    first = lines[0]
    assert (first.dtype, first.shape, first.nbytes) == ("BF16", (64, 32), 4096)
    assert (first.shard, first.disposition, first.sources) == ("model.safetensors", "merged", (0, 1))
    assert first.expressions[0].startswith("read(sources) linear")
    assert json.loads(json.dumps(first.to_json()))["shape"] == [64, 32]


def test_tensors_are_copied_or_converted_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_models(tmp_path)
    copied, _ = _planned(folder, STACK, monkeypatch)
    assert {(line.disposition, line.expressions) for line in tensor_lines(copied)} == {
        ("copied", ("read copy",))
    }
    converted, _ = _planned(folder, f"{STACK}dtype: float16\n", monkeypatch)
    assert {line.disposition for line in tensor_lines(converted)} == {"converted"}
