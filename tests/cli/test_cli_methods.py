"""``raymerge methods``: the table, one method, and names that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.command_line import run_command

from raymerge.methods import methods


def test_the_table_lists_every_method(tmp_path: Path) -> None:
    outcome = run_command("methods", cwd=tmp_path)
    assert outcome.code == 0
    for name, method in methods().items():
        (line,) = (line for line in outcome.text.splitlines() if line.startswith(f"{name} "))
        assert method.base.value in line
        assert method.access.value in line
        assert method.summary in line


@pytest.mark.parametrize("name", list(methods()))
def test_a_method_shows_its_parameters(name: str, tmp_path: Path) -> None:
    outcome = run_command("methods", name, cwd=tmp_path)
    assert outcome.code == 0
    method = methods()[name]
    assert method.summary in outcome.text
    for parameter in method.parameters:
        (line,) = (line for line in outcome.text.splitlines() if line.startswith(f"{parameter.name} "))
        assert parameter.doc in line
        assert ("required" in line) == parameter.required
        assert ("changes nothing" in line) == (not parameter.effective)


@pytest.mark.parametrize(("name", "meant"), [("tise", "ties")])
def test_an_unknown_method_is_answered_with_the_nearest(name: str, meant: str, tmp_path: Path) -> None:
    outcome = run_command("methods", name, cwd=tmp_path)
    assert outcome.code == 2
    assert f"Did you mean '{meant}'?" in outcome.text
