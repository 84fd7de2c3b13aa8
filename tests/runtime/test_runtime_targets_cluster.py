"""The target cluster: workers that join while others work, and addresses that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits.command_line import run_command
from kits.merge_cases import make_family, recipes


def test_a_head_node_that_does_not_answer_is_told_with_the_way_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that other tests have connected to a cluster would stay connected.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(make_family(tmp_path / "models"))["linear"]))
    outcome = run_command("submit", str(recipe), "-o", "out", "--address", "127.0.0.1:9", cwd=tmp_path)
    assert outcome.code == 2
    assert "no Ray cluster can be reached there" in outcome.text
    assert "--address http://HEAD:8265" in outcome.text
