"""The Dockerfiles keep to a few rules: what they start from, whom they run as, what gets into them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cluster" / "docker"
FILES = sorted(each.name for each in FOLDER.glob("Dockerfile.*") if not each.name.endswith(".dockerignore"))


def _instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (FOLDER / name).read_text(encoding="utf-8"))
    lines = [line.strip() for line in text.splitlines()]
    return [tuple(line.split(None, 1)) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def _constraint(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


@pytest.mark.parametrize("name", FILES)
def test_it_starts_from_one_release_of_ray(name: str) -> None:
    (base,) = (rest for word, rest in _instructions(name) if word == "FROM")
    assert re.fullmatch(rf"rayproject/ray:{re.escape(_constraint('ray'))}-py311-(cpu|gpu)", base)


@pytest.mark.parametrize("name", FILES)
def test_it_installs_the_torch_that_is_tested(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert f"torch=={_constraint('torch')}" in text
    assert text.count("--no-cache-dir") == text.count("pip install") == 2


@pytest.mark.parametrize("name", FILES)
def test_it_runs_as_nobody_special_under_a_process_that_reaps(name: str) -> None:
    found = _instructions(name)
    users = [rest for word, rest in found if word == "USER"]
    # By number: otherwise Kubernetes cannot tell that it is not root.
    assert users[-1] == "1000:100"
    after = [word for word, _ in found[len(found) - 1 - [word for word, _ in found][::-1].index("USER") :]]
    assert "ENTRYPOINT" in after
    (entry,) = (rest for word, rest in found if word == "ENTRYPOINT")
    # Also where another process is the first one, as with `docker run --init`.
    assert entry.startswith('["/usr/bin/tini", "-s"')


@pytest.mark.parametrize("name", FILES)
def test_nothing_foreign_and_no_secret_gets_in(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    words = {word for word, _ in _instructions(name)}
    assert "ADD" not in words
    assert not re.search(r"curl|wget|https?://", text)
    assert not re.search(r"(?i)(token|password|secret_key|access_key)\s*=", text)
    ignored = (FOLDER / f"{name}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {part for word, rest in _instructions(name) if word == "COPY" for part in rest.split()[1:-1]}
    assert copied == kept
    assert all((ROOT / each).exists() for each in kept)


def test_the_extras_that_it_installs_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in FILES:
        (wanted,) = re.findall(r'"\.\[([\w,]+)\]"', (FOLDER / name).read_text(encoding="utf-8"))
        assert set(wanted.split(",")) <= set(extras["optional-dependencies"])
