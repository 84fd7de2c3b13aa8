"""What is kept of compiled loops holds for the sources as they are, those of other files too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymerge import kernels

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
    source = Path(kernels.__file__).with_name("jit.py").read_text(encoding="utf-8")
    for name, text in (
        ("__init__", ""),
        ("jit", source),
        ("outer", _CALLER.format(package="loops")),
        ("inner", _INNER.format(package="loops", factor=factor)),
    ):
        path = folder / f"{name}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _run(root: Path, code: str = _RUN, **environment: str) -> list[int]:
    """What the loop gives, and how often it came from the disk.

    Python's own cache is off: it takes two sources of one length, written within one second,
    for the same.
    """
    fixed = {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code.format(package="loops")],
        env={**os.environ, **fixed, **environment},
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


def _kept(root: Path) -> list[Path]:
    return sorted((root / "loops" / "__pycache__").glob("*.nbc"))


@pytest.mark.slow
def test_nothing_of_older_sources_is_kept(tmp_path: Path) -> None:
    counts = []
    for factor in (2, 3, 2):
        _package(tmp_path, factor)
        _run(tmp_path)
        counts.append(len(_kept(tmp_path)))
    assert len(set(counts)) == 1


_FULL = """
import errno, pathlib
def full(self, data):
    raise OSError(errno.ENOSPC, "no space")
pathlib.Path.write_bytes = full
"""


@pytest.mark.slow
def test_a_write_that_fails_costs_nothing_but_time(tmp_path: Path) -> None:
    """Above all it leads no later process to what an older release had left."""
    _package(tmp_path, 2)
    _run(tmp_path)
    _package(tmp_path, 3)
    assert _run(tmp_path, _FULL + _RUN) == [31, 0]
    assert _run(tmp_path) == [31, 0]
    assert _run(tmp_path) == [31, 1]


@pytest.mark.slow
def test_a_file_that_is_not_whole_is_compiled_anew(tmp_path: Path) -> None:
    _package(tmp_path, 2)
    _run(tmp_path)
    for path in _kept(tmp_path):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    assert _run(tmp_path) == [21, 0]
    assert _run(tmp_path) == [21, 1]


@pytest.mark.slow
def test_each_combination_of_types_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Also where two processes saw nothing there, and both wrote."""
    _package(tmp_path, 2)
    for text, wanted in (("10", 21), ("10.0", 21), ("numpy.float32(10)", 21)):
        code = f"import numpy\nfrom {{package}}.outer import outer\nprint(int(outer({text})))"
        assert _run(tmp_path, code) == [wanted]
    assert len([path for path in _kept(tmp_path) if path.name.startswith("outer")]) == 3


_NOWHERE = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
"""


@pytest.mark.slow
def test_without_a_directory_to_keep_it_in_it_is_compiled_each_time(tmp_path: Path) -> None:
    _package(tmp_path, 2)
    for _ in range(2):
        assert _run(tmp_path, _NOWHERE + _RUN) == [21, 0]


_COMPILER = """
import sys
from {package}.outer import outer
print(outer(10), int("numba.np.arraymath" in sys.modules), int("scipy.linalg" in sys.modules))
print(int(outer(10.0)), sum(outer.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_what_is_kept_runs_without_the_compiler(tmp_path: Path) -> None:
    """Types of which nothing is kept are compiled by the same process, after all."""
    _package(tmp_path, 2)
    assert _run(tmp_path) == [21, 0]
    assert _run(tmp_path, _COMPILER) == [21, 0, 0, 21, 1]


_ARRAYS = """
import numpy, sys
from {package}.array import mean
print(int(mean(numpy.arange(5.0)).sum()), sum(mean.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_what_is_kept_may_make_arrays(tmp_path: Path) -> None:
    """They come from what numba's own code has ready in memory."""
    _package(tmp_path, 2)
    (tmp_path / "loops" / "array.py").write_text(
        "import numpy\nfrom loops.jit import compiled\n\n@compiled\n"
        "def mean(x):\n    made = numpy.empty_like(x)\n    made[:] = x.mean()\n    return made\n"
    )
    assert _run(tmp_path, _ARRAYS) == [10, 0]
    assert _run(tmp_path, _ARRAYS) == [10, 1]
