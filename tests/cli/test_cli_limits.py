"""Limits of the system that a command runs into: it says which, and its exit code says whether to go on."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kits.command_line import WIDE
from kits.control_group import process_group
from kits.merges import make_models, write_recipe

_RECIPE = """
merge_method: linear
models: [{model: one}, {model: two}]
parameters: {weight: 0.5}
dtype: float32
"""
_DROP_BOUNDING, _PRIVILEGES = 24, (21, 24)
"""Of prctl; and the capabilities that the limit on processes does not hold for."""
_NOBODY_ELSE = 54_321
"""A user without any process, so that only those of the test count."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's limits are set by root alone")


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """Two models and their recipe, where every user may write."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_models(Path(name))
        write_recipe(folder, _RECIPE)
        folder.chmod(0o777)
        yield folder


def _run(
    folder: Path, *args: str, limit: Callable[[], object] | None = None, stdout: str | None = None
) -> tuple[int, str]:
    """Exit code and what was printed on standard error, of a command in a process of its own."""
    with open(stdout or os.devnull, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "raymerge.cli", *args],
            cwd=folder,
            env={**os.environ, **WIDE, "OMP_NUM_THREADS": "1"},
            preexec_fn=limit,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert "Traceback" not in done.stderr
    assert "bug in raymerge" not in done.stderr
    return done.returncode, done.stderr


def _file_limit(nbytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def _process_limit(count: int) -> Callable[[], None]:
    def limit() -> None:
        for each in _PRIVILEGES:
            ctypes.CDLL(None).prctl(_DROP_BOUNDING, each, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
        os.setresuid(_NOBODY_ELSE, 0, 0)

    return limit


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        pytest.param(["--version"], marks=pytest.mark.slow),
        pytest.param(["methods"], marks=pytest.mark.slow),
        pytest.param(["plan", "recipe.yml", "--json"], marks=pytest.mark.slow),
    ],
)
def test_a_full_standard_output(args: list[str], models: Path) -> None:
    code, said = _run(models, *args, stdout="/dev/full")
    assert code == 3
    assert "what is printed here cannot be written: No space left on device. Free space" in said


@pytest.mark.slow
def test_a_merge_whose_standard_output_is_full_goes_on_by_the_same_command(models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", "full", "--inline")
    code, said = _run(models, *args, stdout="/dev/full")
    assert (code, "cannot be written" in said) == (3, True)
    assert _run(models, *args)[0] == 0


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", "limited")
    code, said = _run(models, *args, "--inline", limit=_file_limit(50_000))
    assert code == 3
    assert "model.safetensors.part: is larger than a file may be here: this process may write 50000" in said
    assert "ulimit -f" in said
    assert "Free space" not in said
    code, said = _run(models, *args, limit=_file_limit(50_000))
    assert code == 2
    assert "ray: an embedded Ray writes a file of 209715200 bytes, and this process may write 50000" in said
    assert _run(models, *args, "--inline")[0] == 0


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_limit_on_processes(count: int, models: Path) -> None:
    args = ("submit", "recipe.yml", "-o", f"threads-{count}", "--inline")
    code, said = _run(models, *args, limit=_process_limit(count))
    assert code == 3
    assert "no further thread or process may be started here: a limit of the user (ulimit -u)" in said
    assert "the same command goes on" in said.lower()


@pytest.mark.slow
@needs_root
def test_a_limit_on_processes_that_ray_cannot_start_within(models: Path) -> None:
    code, said = _run(models, "submit", "recipe.yml", "-o", "none", limit=_process_limit(60))
    assert code == 2
    assert "ray: an embedded Ray starts more than 128 threads, and no more than" in said
    assert "give --inline" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "flags", "code", "expected"),
    [
        (2, ["--inline"], 3, "the same command goes on"),
        (4, ["--inline"], 3, "the same command goes on"),
        (60, [], 2, "ray: an embedded ray starts more than 128 threads, and no more than"),
    ],
)
def test_a_container_s_limit_on_processes(
    count: int, flags: list[str], code: int, expected: str, models: Path
) -> None:
    args = ("submit", "recipe.yml", "-o", f"group-{count}", *flags)
    with process_group(count) as group:
        if group is None:
            pytest.skip("a control group is made by root alone, and not in every container")
        found, said = _run(models, *args, limit=lambda: group.write_text(str(os.getpid())))
    assert found == code
    assert "of the container (pids.max)" in said
    assert expected in said.lower()
