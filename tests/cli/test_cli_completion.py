"""Completion: what shells are told while somebody types, at once and without loading what merges."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kits.command_line import run_command

from raymerge.deploy.targets import TARGETS
from raymerge.methods import methods
from raymerge.recipes.settings import OUT_FORMATS


def _completed(line: str, folder: Path) -> list[str]:
    """What bash is told where the cursor stands behind the line."""
    words = line.split()
    asking = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - (not line.endswith(" ")))}
    outcome = run_command(cwd=folder, env={**asking, "_RAYMERGE_COMPLETE": "complete_bash"})
    assert outcome.code == 0, outcome.text
    return outcome.text.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raymerge meth", ["methods"]),
        ("raymerge methods ", list(methods())),
        ("raymerge methods dar", ["dare_linear", "dare_ties"]),
        ("raymerge convert model --to ", list(OUT_FORMATS)),
        ("raymerge verify out --level ", ["structure", "audit", "load"]),
        ("raymerge submit recipe.yml --target ", list(TARGETS)),
        ("raymerge submit recipe.yml --device c", ["cpu", "cuda"]),
        ("raymerge status run --fol", []),
        ("raymerge logs run --fol", ["--follow"]),
        ("raymerge cluster render --kind ", ["rayjob", "raycluster"]),
        ("raymerge transplant model --approximation o", ["omp"]),
        ("raymerge completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_a_line_is_completed(line: str, expected: list[str], tmp_path: Path) -> None:
    assert _completed(line, tmp_path) == expected


def test_recipes_are_the_yaml_files_and_else_the_shell_is_left_to_it(tmp_path: Path) -> None:
    for name in ("one.yml", "two.yaml", "other.txt", "below/three.yml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert _completed("raymerge plan ", tmp_path) == ["one.yml", "two.yaml"]
    assert _completed("raymerge submit o", tmp_path) == ["one.yml"]
    assert _completed("raymerge plan below/", tmp_path) == ["below/three.yml"]
    assert _completed("raymerge plan --profile t", tmp_path) == ["two.yaml"]
    assert _completed("raymerge plan be", tmp_path) == []
    assert _completed("raymerge plan nowhere/", tmp_path) == []


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    command = tmp_path / "raymerge"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m raymerge.cli "$@"\n')
    command.chmod(0o755)
    typed = (
        "COMP_WORDS=(raymerge methods tie) COMP_CWORD=2; _raymerge_completion raymerge; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-ec", f'eval "$(raymerge completion bash)"; {typed}'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ties\n", done.stderr


@pytest.mark.parametrize(("shell", "answer"), [("zsh", '"ties"'), ("fish", "ties")])
def test_other_shells_are_told_in_their_own_way(shell: str, answer: str, tmp_path: Path) -> None:
    script = run_command("completion", shell, cwd=tmp_path)
    assert script.code == 0
    assert f"_RAYMERGE_COMPLETE=complete_{shell}" in script.text
    asking = {"_TYPER_COMPLETE_ARGS": "raymerge methods tie", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    outcome = run_command(cwd=tmp_path, env={**asking, "_RAYMERGE_COMPLETE": f"complete_{shell}"})
    assert answer in outcome.text


def test_completing_loads_nothing_that_merges() -> None:
    asking = {"COMP_WORDS": "raymerge methods t", "COMP_CWORD": "2", "_RAYMERGE_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "raymerge.cli"],
        env={**os.environ, **asking},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert loaded.isdisjoint({"torch", "ray", "transformers", "numba", "pyarrow", "numpy", "scipy"})
    assert done.stdout.split() == ["task_arithmetic", "ties", "tsv_m"]
