"""What is kept of compiled loops holds for the sources as they are, those of other files too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from raymerge import compiled

_CALLER = """
from {package}.jit import compiled
from {package}.inner import inner

@compiled
def outer(x):
    return inner(x) + 1
"""
_INNER = """
from {package}.jit import compiled

@compiled
def inner(x):
    return x * {factor}
"""
_RUN = "from {package}.outer import outer\nprint(outer(10), sum(outer.stats.cache_hits.values()))"


def _package(root: Path, factor: int) -> None:
    """A package with a loop that calls one of another file, and raymerge's way to compile them."""
    folder = root / "loops"
    folder.mkdir(exist_ok=True)
    source = Path(compiled.__file__).with_name("jit.py").read_text(encoding="utf-8")
    for name, text in (
        ("__init__", ""),
        ("jit", source),
        ("outer", _CALLER.format(package="loops")),
        ("inner", _INNER.format(package="loops", factor=factor)),
    ):
        path = folder / f"{name}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _run(root: Path) -> list[int]:
    """What the loop gives, and how often it came from the disk."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(package="loops")],
        env={**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


def test_a_change_in_another_file_is_compiled_anew(tmp_path: Path) -> None:
    _package(tmp_path, 2)
    assert _run(tmp_path) == [21, 0]
    assert _run(tmp_path) == [21, 1]
    _package(tmp_path, 3)
    assert _run(tmp_path) == [31, 0]
    assert _run(tmp_path) == [31, 1]
