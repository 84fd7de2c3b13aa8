"""The command as a process of its own: on a terminal, and with a reader that leaves."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kits.merges import MEAN, make_models, write_recipe

COMMAND = [sys.executable, "-c", "from raymerge.cli.main import main; main()"]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and the recipe of their mean."""
    place = make_models(tmp_path_factory.mktemp("terminal"))
    write_recipe(place, MEAN)
    return place


def _environment(**more: str) -> dict[str, str]:
    hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    return {key: value for key, value in os.environ.items() if key not in hidden} | more


def _on_a_terminal(folder: Path, *args: str) -> tuple[int, str]:
    """Exit code and everything shown, with a pseudo-terminal as standard output and error."""
    ours, theirs = pty.openpty()
    environment = _environment(TERM="xterm", COLUMNS="80")
    process = subprocess.Popen([*COMMAND, *args], cwd=folder, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(), shown.decode()


@pytest.mark.slow
def test_a_merge_on_a_terminal_is_live_and_leaves_its_summary(folder: Path) -> None:
    code, shown = _on_a_terminal(folder, "submit", "recipe.yml", "-o", "live", "--inline")
    plain = ANSI.sub("", shown)
    assert code == 0, plain
    assert ANSI.search(shown)
    assert "Planning and starting the workers" in plain
    assert "verified: 30 tensors" in plain
    assert plain.index("verified: ") < plain.index("done: live") < plain.index("digest ")
    assert (folder / "live" / "config.json").is_file()


@pytest.mark.slow
def test_a_reader_that_leaves_gets_no_traceback(folder: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    ended = subprocess.run(
        [*COMMAND, "plan", "recipe.yml", "--tensors"],
        cwd=folder, stdout=theirs, stderr=subprocess.PIPE, text=True, env=_environment(), check=False,
    )  # fmt: skip
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
def test_a_terminal_without_unicode_stops_nothing(folder: Path) -> None:
    ended = subprocess.run(
        [*COMMAND, "verify", "nöwhere"],
        cwd=folder, capture_output=True, env=_environment(PYTHONIOENCODING="ascii"), check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.isascii()
    assert b"  -> Check the path." in ended.stderr
