"""The repository keeps the promises that its README and its working rules make."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import raymerge
from raymerge.methods import methods

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "raymerge"
FOLDERS = (".ci", "cluster", "configs", "docs", "raymerge", "tests")
FOREIGN = ROOT / "configs" / "quickstart" / "texts"
MAX_FUNCTION_LINES = 60

# Put together from parts, so that this file does not contain what it looks for.
MACHINE_PATHS = re.compile(
    r"(?<![\w.])/(?:" + "|".join(("work", "root", "opt/pypi", "opt/wheels")) + r")\b/?"
)
REGISTRY_HOSTS = re.compile(
    "|".join(("pythonhosted" + r"\.org", "pypi" + r"\.org/simple", "extra-" + "index-url"))
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _files(*suffixes: str) -> Iterator[Path]:
    """The repository's own files, at the top and under ``FOLDERS``; all of them without suffixes."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted([*ROOT.iterdir(), *below]):
        skipped = "__pycache__" in path.parts or FOREIGN in path.parents or path.name == ".git"
        ours = path.is_file() and not skipped
        if ours and (not suffixes or path.suffix in suffixes):
            yield path


def _names(paths: Iterator[Path] | list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


RECIPES = _names(sorted((ROOT / "configs" / "recipes").glob("*.yml")))
MIXTURES = _names(sorted((ROOT / "configs" / "recipes" / "moe").glob("*.yml")))
MODULES = _names(sorted(PACKAGE.rglob("*.py")))
PAGES = _names(_files(".md"))


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def _functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _text(path: Path) -> str:
    """The file as text; empty for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_the_readme_names_two_commands_and_both_are_make_targets() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^make (\w+)$", readme, re.MULTILINE))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {"quickstart", "test"}
    assert named <= targets


def test_the_makefile_parses_and_continuous_integration_calls_it() -> None:
    planned = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m pytest" in planned.stdout.rstrip().splitlines()[-1]
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").rstrip().endswith("make test")


def test_every_method_has_a_recipe_of_its_name() -> None:
    assert {Path(recipe).stem for recipe in RECIPES} == set(methods())


@pytest.mark.parametrize("recipe", [*RECIPES, *MIXTURES, "configs/quickstart/recipe.yml"])
def test_a_recipe_of_ours_plans(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    raymerge.plan(recipe)


def test_folders_stay_small() -> None:
    """At most 25 files, but for the table of methods, which has one file an entry."""
    counts = Counter(Path(module).parent for module in MODULES)
    assert {str(folder) for folder, count in counts.items() if count > 25} <= {"raymerge/methods"}


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    """Imports that only type checkers follow count, and those within functions."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in names.items()}
    imports = {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    # A package that passes on the names of its modules is imported with each of them.
    graph = {name: {each for each in found if each not in packages} for name, found in imports.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            submodules = [f"{node.module}.{each.name}" for each in node.names]
            yield from (name if name in modules else str(node.module) for name in submodules)


BANNED = (
    *("anatomy", "blame", "carrier", "carriers", "commission", "crew", "genre", "hollow", "proving"),
    *("pulse", "supplies", "supply", "treatment", "treatments", "workshop"),
)
"""Words of a private language, for which docs/concepts.md has others."""


def test_names_are_words_of_the_field() -> None:
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
            words = re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1_\2", str(name or path.stem)).lower())
            found.update(f"{path.relative_to(ROOT)}: {word}" for word in words if word in BANNED)
    assert found == {}


def test_functions_stay_small() -> None:
    long = [
        f"{module}: {function.name} ({function.end_lineno - function.lineno + 1} lines)"
        for module in MODULES
        for function in _functions(module)
        if function.end_lineno is not None and function.end_lineno - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_library_code_does_not_print() -> None:
    calls = [
        (module, node)
        for module in MODULES
        if not module.startswith("raymerge/cli/")
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Call)
    ]
    prints = [
        f"{module}:{call.lineno}"
        for module, call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]
    assert prints == []


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _files()
        for match in [MACHINE_PATHS.search(_text(path)) or REGISTRY_HOSTS.search(_text(path))]
        if match
    ]
    assert found == []


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_resolves(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    targets = [link.split("#")[0] for link in LINK.findall(text) if "://" not in link]
    assert [target for target in targets if target and not ((ROOT / page).parent / target).exists()] == []


def test_the_differences_from_mergekit_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w./-]+\.py)`", text))
    assert named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
