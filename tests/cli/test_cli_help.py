"""Help and usage: quick, light, and a sentence for every wrong call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kits.command_line import run_command

VERBS = ("submit", "convert", "plan", "verify", "inspect", "methods", "extract-lora")
HEAVY = ("torch", "ray", "pyarrow", "numpy", "yaml", "transformers", "raymerge.api", "raymerge.recipes")
OF_TYPER = "pydantic"
"""typer reads the options of a single verb with it; the library's own models must not be what loads it."""
REPORT_HEAVY = """
import contextlib, json, sys
from raymerge.cli.main import main
heavy, calls = json.loads(sys.stdin.read())
for call in calls:
    sys.argv = ["raymerge", *call]
    with contextlib.suppress(SystemExit):
        main()
print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("heavy", "calls"),
    [((*HEAVY, OF_TYPER), [["--version"], ["--help"]]), (HEAVY, [[verb, "--help"] for verb in VERBS])],
)
def test_help_imports_nothing_heavy(heavy: tuple[str, ...], calls: list[list[str]]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY],
        input=json.dumps([heavy, calls]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stderr) == []
    assert ended.stdout.count("raymerge") >= len(calls)


def test_help_lists_every_verb(tmp_path: Path) -> None:
    outcome = run_command("--help", cwd=tmp_path)
    assert outcome.code == 0
    assert all(verb in outcome.text for verb in VERBS)
    assert "\x1b" not in outcome.text


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    from importlib.metadata import version

    outcome = run_command("--version", cwd=tmp_path)
    assert (outcome.code, outcome.text) == (0, f"raymerge {version('raymerge')}\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("submit",), "RECIPE"),
        (("submit", "recipe.yml", "--wrokers", "2"), "--wrokers"),
        (("sumbit", "recipe.yml"), "submit"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_sentence(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    outcome = run_command(*args, cwd=tmp_path)
    assert outcome.code == 2
    assert said in outcome.text
    assert "Traceback" not in outcome.text
