"""mergekit, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

VERSION = "0.1.5"
METHODS = ("linear", "slerp", "ties", "dare_ties", "passthrough", "moe")
SLOW = ("ties", "dare_ties")

_OPTIONS = (
    "--lazy-unpickle", "--async-write", "--write-threads", "2", "--no-copy-tokenizer",
    "--no-write-model-card", "-j", "2",
)  # fmt: skip
"""Its fastest on two cores; nothing but weights and config is written."""
_DRIVER = Path(__file__).with_name("peer_run.py")


def install(place: Path, constraints: Path) -> Path:
    mark = place / f".mergekit-{VERSION}"
    if not mark.is_file():
        for command in install_commands(place, constraints):
            subprocess.run(command, check=True)
        mark.touch()
    return interpreter(place)


def install_commands(place: Path, constraints: Path) -> list[list[str]]:
    """What makes the environment: torch first, so that the pinned build is what mergekit finds installed."""
    pip = [str(interpreter(place)), "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
    pinned = [*pip, "-c", str(constraints)]
    venv = [sys.executable, "-m", "venv", str(place)]
    return [venv, [*pinned, "torch"], [*pinned, f"mergekit=={VERSION}"]]


def interpreter(place: Path) -> Path:
    return place / "bin" / "python"


def command(python: Path, method: str, recipe: Path) -> Callable[[Path], Sequence[str]]:
    program = "moe" if method == "moe" else "yaml"
    return lambda output: [str(python), str(_DRIVER), program, str(recipe), str(output), *_OPTIONS]
