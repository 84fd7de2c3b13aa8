"""Stages in ``raymerge plan`` and in a dry run: what they take, and what stands in their way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.command_line import Outcome, run_command
from kits.gate_stages import reading_base
from kits.golden import check_golden
from kits.merges import write_recipe
from kits.permuted_experts import MIXTRAL, make_model, moved, store

ALIGN = """\
merge_method: linear
models:
  - {model: {model: one, override_architecture: Mixture}, parameters: {weight: 0.5}}
  - {model: {model: two, override_architecture: Mixture}, parameters: {weight: 0.5}}
align: experts
"""
MIXTURE = """\
base_model: base
gate_mode: hidden
experts:
  - {source_model: base, positive_prompts: ["w3 w4 w5"]}
  - {source_model: other, positive_prompts: ["w13 w14 w15"]}
"""
CHAIN = """\
name: left
merge_method: linear
models: [{model: base, parameters: {weight: 0.5}}, {model: other, parameters: {weight: 0.5}}]
---
base_model: left
gate_mode: hidden
experts:
  - {source_model: left, positive_prompts: ["w3 w4 w5"]}
  - {source_model: other, positive_prompts: ["w13 w14 w15"]}
"""


@pytest.fixture
def mixtures(tmp_path: Path) -> Path:
    """Two mixtures of experts, of which the second is the first in another order."""
    model = make_model(MIXTRAL, 1)
    store(tmp_path / "one", model, MIXTRAL)
    store(tmp_path / "two", moved(model, MIXTRAL, 2), MIXTRAL)
    return tmp_path


@pytest.fixture
def readers(tmp_path: Path) -> Path:
    """Two dense models with tokenizers."""
    reading_base(tmp_path / "base")
    reading_base(tmp_path / "other", seed=2)
    return tmp_path


def _plan(folder: Path, text: str, *args: str, memory: str = "1GiB") -> Outcome:
    recipe = write_recipe(folder, text)
    return run_command("plan", recipe, "--memory", memory, *args, cwd=folder, env={"COLUMNS": "80"})


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_with_a_stage_reads_as_it_was_looked_at(mixtures: Path) -> None:
    before = sorted(mixtures.rglob("*"))
    outcome = _plan(mixtures, ALIGN)
    assert outcome.code == 0
    assert max(map(len, outcome.text.splitlines())) <= 80
    check_golden("plan-align", outcome.text)
    assert sorted(mixtures.rglob("*")) == sorted([*before, mixtures / "recipe.yml"])


def test_what_a_stage_lacks_is_a_problem_of_the_plan(readers: Path) -> None:
    for path in (readers / "base").glob("tokenizer*"):
        path.unlink()
    outcome = _plan(readers, MIXTURE)
    assert outcome.code == 2
    text = _squeezed(outcome.text)
    assert "router rows (hidden) ? ? ? ?" in text
    assert "1 problem in the way" in text
    assert "tokenizer" in text
    found = json.loads(_plan(readers, MIXTURE, "--json").text)
    assert [stage["units"] for stage in found["stages"]] == [None]
    assert len(found["problems"]) == 1


def test_of_a_stage_over_the_result_of_a_merge_nothing_is_known_yet(readers: Path) -> None:
    outcome = _plan(readers, CHAIN)
    assert outcome.code == 0, outcome.text
    assert "router rows (hidden) ? ? ? ?" in _squeezed(outcome.text)


def test_a_dry_run_tells_the_same(mixtures: Path) -> None:
    recipe = write_recipe(mixtures, ALIGN)
    args = ("submit", recipe, "-o", "out", "--dry-run", "--inline", "--memory")
    outcome = run_command(*args, "1GiB", cwd=mixtures)
    assert outcome.code == 0, outcome.text
    assert "stage before" in outcome.text
    event = json.loads(run_command(*args, "1GiB", "--json", cwd=mixtures).text)
    assert [stage["units"] for stage in event["stages"]] == [2]
    refused = run_command(*args, "64MiB", cwd=mixtures)
    assert refused.code == 2
    assert "too little for aligning" in _squeezed(refused.text)
    assert not (mixtures / "out").exists()
