"""``raymerge diff``: the table, JSON and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.checkpoint_maker import llama_config, write_json
from kits.command_line import run_command
from kits.merges import make_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def test_equal_checkpoints_exit_with_0(folder: Path) -> None:
    outcome = run_command("diff", "one", "one", cwd=folder)
    assert outcome.code == 0
    assert outcome.text.startswith("A = one and B = one are equal, byte by byte.")
    assert "attention     12" in outcome.text
    assert "config.json" not in outcome.text


def test_checkpoints_that_differ_exit_with_2_and_a_table(folder: Path, tmp_path: Path) -> None:
    make_models(tmp_path)
    write_json(tmp_path / "two" / "config.json", llama_config() | {"rope_theta": 5.0})
    (tmp_path / "two" / "tokenizer.json").unlink()
    outcome = run_command("diff", "one", "two", cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.text.startswith("A = one and B = two differ.")
    for said in ("rel. error", "and 20 tensors more; --json lists all", "rope_theta  absent  5.0", "only a"):
        assert said in outcome.text


def test_the_comparison_as_json(folder: Path) -> None:
    outcome = run_command("diff", "one", "two", "--json", cwd=folder)
    found = json.loads(outcome.text)
    assert outcome.code == 2
    assert (found["equal"], len(found["tensors"])) == (False, 30)
    assert {tensor["status"] for tensor in found["tensors"]} == {"different"}
    assert found["companions"]["tokenizer.json"] == "equal"


def test_threads_are_checked(folder: Path) -> None:
    outcome = run_command("diff", "one", "two", "--threads", "0", cwd=folder)
    assert outcome.code == 2
    assert "0 threads cannot compare anything" in outcome.text
