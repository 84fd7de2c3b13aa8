"""``raymerge verify``: the verdict in words, as JSON and as exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.checkpoint_maker import llama_config, tiny_llama, write_json
from kits.command_line import run_command
from kits.merges import MEAN, make_models, write_recipe


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A checkpoint that raymerge made."""
    make_models(tmp_path)
    recipe = write_recipe(tmp_path, MEAN)
    assert run_command("submit", recipe, "-o", "out", "--inline", cwd=tmp_path).code == 0
    return tmp_path / "out"


def test_a_merged_checkpoint_is_sound_as_its_plan_says(merged: Path) -> None:
    outcome = run_command("verify", "out", cwd=merged.parent)
    assert outcome.code == 0
    assert outcome.text.startswith("out is sound: 30 tensors, ")
    assert "as its plan says" in outcome.text


def test_another_checkpoint_is_verified_without_a_plan(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "model", 0, files=2)
    outcome = run_command("verify", "model", cwd=tmp_path)
    assert outcome.code == 0
    assert "in 2 files; it keeps no plan" in outcome.text


def test_a_truncated_checkpoint_is_not_sound(merged: Path) -> None:
    weights = merged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    outcome = run_command("verify", "out", cwd=merged.parent)
    assert outcome.code == 2
    assert "out is NOT SOUND: 1 problem." in outcome.text
    assert "model.safetensors" in outcome.text
    assert "→" in outcome.text


def test_a_changed_config_is_not_sound(merged: Path) -> None:
    write_json(merged / "config.json", llama_config() | {"vocab_size": 65})
    outcome = run_command("verify", "out", cwd=merged.parent)
    assert outcome.code == 2
    assert "problems." in outcome.text
    assert "vocab_size is 65" in outcome.text


def test_the_verdict_as_json(merged: Path) -> None:
    outcome = run_command("verify", "out", "--json", cwd=merged.parent)
    verdict = json.loads(outcome.text)
    assert outcome.code == 0
    assert verdict["sound"] is True
    assert (verdict["tensors"], verdict["files"], verdict["problems"]) == (30, 1, [])


def test_a_bad_verdict_as_json(tmp_path: Path) -> None:
    outcome = run_command("verify", "nowhere", "--json", cwd=tmp_path)
    verdict = json.loads(outcome.text)
    assert outcome.code == 2
    assert verdict["sound"] is False
    assert verdict["problems"][0]["where"] == "nowhere"
