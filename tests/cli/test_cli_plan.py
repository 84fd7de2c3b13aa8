"""``raymerge plan``: what it prints at 80 columns, as JSON, and when something stands in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import llama_config, read_tensors, write_checkpoint
from kits.command_line import Outcome, run_command
from kits.golden import check_golden
from kits.merges import MEAN, STACK, make_models, write_recipe

TIES = """\
merge_method: ties
base_model: one
models:
  - model: two
    parameters: {weight: 1.0, density: 0.5}
dtype: float16
parameters: {int8_mask: true}
"""


def _plan(folder: Path, text: str, *args: str, columns: str = "80") -> Outcome:
    recipe = write_recipe(folder, text)
    return run_command("plan", recipe, "--memory", "1GiB", *args, cwd=folder, env={"COLUMNS": columns})


def _misshapen(folder: Path) -> Path:
    """Models of which the second has two tensors of other shapes."""
    make_models(folder)
    tensors = read_tensors(folder / "two")
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        tensors[name] = torch.ones(33, dtype=torch.bfloat16)
    return write_checkpoint(folder / "two", tensors, llama_config()).parent


@pytest.mark.parametrize(("name", "text"), [("plan-mean", MEAN), ("plan-stack", STACK), ("plan-ties", TIES)])
def test_a_plan_reads_as_it_was_looked_at(name: str, text: str, tmp_path: Path) -> None:
    outcome = _plan(make_models(tmp_path), text)
    assert outcome.code == 0
    assert max(map(len, outcome.text.splitlines())) <= 80
    assert "\x1b" not in outcome.text
    check_golden(name, outcome.text)


def test_the_tensors_of_a_plan_read_as_they_were_looked_at(tmp_path: Path) -> None:
    outcome = _plan(make_models(tmp_path, layers=1), MEAN, "--tensors")
    check_golden("plan-mean-tensors", outcome.text)


def test_problems_come_last_and_are_exit_2(tmp_path: Path) -> None:
    outcome = _plan(_misshapen(tmp_path), MEAN)
    assert outcome.code == 2
    check_golden("plan-problems", outcome.text)


def test_the_json_of_a_plan_with_problems_holds_sources_and_problems(tmp_path: Path) -> None:
    outcome = _plan(_misshapen(tmp_path), MEAN, "--json")
    found = json.loads(outcome.text)
    assert outcome.code == 2
    assert found["problems"][0]["where"] == "two"
    assert "2 tensors have other shapes" in found["problems"][0]["what"]
    assert len(found["sources"]) == 2
    assert found.keys() == {"recipe", "sources", "problems"}


def test_without_a_plan_the_json_is_an_error_event(tmp_path: Path) -> None:
    make_models(tmp_path, ["one"])
    outcome = _plan(tmp_path, MEAN, "--json")
    event = json.loads(outcome.text)
    assert (outcome.code, event["event"], event["exit_code"]) == (2, "error", 2)
    assert "two" in event["problems"][0]["where"]


def test_too_little_memory_is_told_with_the_least_that_works(tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), MEAN)
    outcome = run_command("plan", recipe, "--memory", "1MiB", cwd=tmp_path)
    assert outcome.code == 2
    assert "--memory" in outcome.text
    assert "The smallest budget that works is" in outcome.text
    assert "Plan of recipe.yml" in outcome.text


@pytest.mark.parametrize("size", ["lots", ""])
def test_a_memory_that_is_no_size_is_refused(size: str, tmp_path: Path) -> None:
    recipe = write_recipe(make_models(tmp_path), MEAN)
    outcome = run_command("plan", recipe, f"--memory={size}", cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.text.startswith("--memory: ")
    assert "4GiB" in outcome.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: (folder / "other.yml").touch(), "no such file"),
        (lambda folder: (folder / "recipe.yml").write_text("merge_method: [\n"), "recipe.yml:"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(make: object, said: str, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    outcome = run_command("plan", "recipe.yml", cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.text.startswith("recipe.yml")
    assert said in outcome.text
    assert "Traceback" not in outcome.text


def test_corrected_yaml_keeps_its_lines_in_a_narrow_terminal(tmp_path: Path) -> None:
    make_models(tmp_path, ["one"], layers=3)
    make_models(tmp_path, ["two"], layers=4)
    text = (
        "merge_method: linear\nslices:\n  - sources:\n"
        "      - {model: one, layer_range: [0, 3], parameters: {weight: 1}}\n"
        "      - {model: two, layer_range: [0, 4], parameters: {weight: 1}}\n"
    )
    outcome = _plan(tmp_path, text, columns="40")
    assert outcome.code == 2
    assert any(line.strip().startswith("- sources") for line in outcome.text.splitlines())
