"""``raymerge verify``: the load level and replay in words, as JSON and as exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.checkpoint_maker import llama_config, write_json
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and their merge ``out``."""
    root = make_models(tmp_path_factory.mktemp("merged"))
    recipe = write_recipe(root, MEAN)
    assert run_command("submit", recipe, "-o", "out", "--inline", cwd=root).code == 0
    return root


def test_a_checkpoint_that_loads(folder: Path) -> None:
    outcome = run_command("verify", "out", "--level", "load", cwd=folder)
    assert outcome.code == 0
    assert outcome.text.startswith("out loads.\nLlamaForCausalLM of transformers ")
    assert "it was loaded and run, with " in outcome.text


def test_more_than_the_memory_is_not_loaded(folder: Path) -> None:
    outcome = run_command("verify", "out", "--level", "load", "--memory", "16MiB", cwd=folder)
    assert outcome.code == 0
    assert "only names and shapes were compared" in outcome.text


def test_a_checkpoint_that_does_not_load(folder: Path, tmp_path: Path) -> None:
    make_models(tmp_path, ("one",))
    write_json(tmp_path / "one" / "config.json", llama_config(layers=4))
    outcome = run_command("verify", "one", "--level", "load", "--json", cwd=tmp_path)
    verdict = json.loads(outcome.text)
    assert (outcome.code, verdict["sound"], verdict["ran"]) == (2, False, False)
    assert "would be random" in verdict["problems"][0]["what"]


def test_a_record_that_holds(folder: Path) -> None:
    outcome = run_command("verify", "out", "--replay", cwd=folder)
    assert outcome.code == 0
    assert outcome.text.startswith("out is what its record says.\nplan ")
    assert "2 sources, 30 tensors" in outcome.text


def test_a_record_that_does_not_hold(folder: Path) -> None:
    outcome = run_command("verify", "out", "--replay", "--source", "one=two/absent", cwd=folder)
    assert outcome.code == 2
    assert "out IS NOT WHAT ITS RECORD SAYS: 1 problem." in outcome.text
    assert "two/absent" in outcome.text


def test_a_replay_beside_another_level_is_refused(folder: Path) -> None:
    outcome = run_command("verify", "out", "--replay", "--level", "audit", cwd=folder)
    assert outcome.code == 2
    assert "so is --level audit." in outcome.text
    assert "Give one after the other." in outcome.text
