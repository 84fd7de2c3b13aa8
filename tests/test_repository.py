"""The repository keeps the promises that its README and its working rules make."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import raymerge
from raymerge.methods import methods
from raymerge.recipes.settings import OUT_FORMATS

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
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
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
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = _names(_files(".md"))


@dataclass(frozen=True, slots=True)
class Module:
    """What the checks of the package look at in one file."""

    imported: list[tuple[str, tuple[str, ...]]]
    names: set[str]
    long_functions: list[str]
    prints: bool


@pytest.fixture(scope="module")
def modules() -> Mapping[str, Module]:
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts): _module(path) for path in MODULES}
    return {name.removesuffix(".__init__"): module for name, module in found.items()}


def _module(path: Path) -> Module:
    module = Module([], set(), [], prints=False)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
        module.names.add(str(name or ""))
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module.imported.append((node.module, tuple(each.name for each in node.names)))
        elif isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
            module.long_functions.append(node.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print":
            module = replace(module, prints=True)
    return module


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


def test_the_recipe_language_lists_every_format_of_an_output() -> None:
    lines = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines()
    (line,) = (each for each in lines if each.startswith("| `out_format` |"))
    assert set(OUT_FORMATS) <= set(re.findall(r"`(\w+)`", line))


def test_every_method_has_a_recipe_of_its_name() -> None:
    assert {Path(recipe).stem for recipe in RECIPES} == set(methods())


@pytest.mark.parametrize("recipe", [*RECIPES, *MIXTURES, "configs/quickstart/recipe.yml"])
def test_a_recipe_of_ours_plans(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    raymerge.plan_all(recipe)


def test_a_sweep_of_ours_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = raymerge.plan_sweep("configs/recipes/sweeps/weights.yml")
    assert [each.output.name for each in planned] == [f"slerp-t0.{number}" for number in range(1, 10)]
    assert not any(merge.plan.problems for each in planned for merge in each.merges)


def test_a_search_of_ours_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = raymerge.plan_search("configs/recipes/searches/weights.yml")
    assert [each.name for each in planned.search.marked.parameters] == [
        f"models[{n}].weight" for n in range(3)
    ]


def test_folders_stay_small() -> None:
    """At most 25 files, but for the table of methods, which has one file an entry."""
    counts = Counter(path.parent for path in MODULES)
    assert {folder.name for folder, count in counts.items() if count > 25} <= {"methods"}


def test_no_two_modules_import_each_other_in_a_circle(modules: Mapping[str, Module]) -> None:
    """Imports that only type checkers follow count, and those within functions."""
    packages = {
        ".".join(path.relative_to(ROOT).parent.parts) for path in MODULES if path.name == "__init__.py"
    }
    # A package that passes on the names of its modules is imported with each of them.
    graph = {
        name: {
            submodule if (submodule := f"{origin}.{each}") in modules else origin
            for origin, names in module.imported
            if origin in modules
            for each in names
        }
        - {name}
        - packages
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


BANNED = (
    *("assemblies", "assembler", "assembly", "band", "bands", "fate", "fates", "packing", "packings"),
    *("anatomy", "blame", "carrier", "carriers", "commission", "crew", "genre", "hollow", "proving"),
    *("pulse", "shop", "supplies", "supply", "team", "thinned", "treatment", "treatments", "varied"),
    "workshop",
)
"""Words of a private language, for which docs/concepts.md has others."""


def test_names_are_words_of_the_field(modules: Mapping[str, Module]) -> None:
    found = set[str]()
    for path, module in modules.items():
        names = {path.rpartition(".")[2], *module.names}
        words = {re.sub("([a-z])([A-Z])", r"\1_\2", name).lower() for name in names}
        found |= {f"{path}: {word}" for each in words for word in each.split("_") if word in BANNED}
    assert found == set()


def test_functions_stay_small_and_do_not_print(modules: Mapping[str, Module]) -> None:
    long = {path: module.long_functions for path, module in modules.items() if module.long_functions}
    prints = [path for path, each in modules.items() if each.prints and not path.startswith("raymerge.cli")]
    assert (long, prints) == ({}, [])


def test_one_module_asks_torch_for_gpus() -> None:
    """What is not asked there would be asked of one vendor's GPUs alone."""
    vendors = re.compile(r"\btorch\.(cuda|xpu|accelerator|get_device_module)\b|\.is_cuda\b|\.cuda\(")
    # The facts of a node are asked by code that is sent there, by itself.
    assert [path.name for path in MODULES if vendors.search(_text(path))] == ["devices.py", "node_facts.py"]


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _files()
        for match in [MACHINE_PATHS.search(_text(path)) or REGISTRY_HOSTS.search(_text(path))]
        if match
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_resolves(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    targets = [link.split("#")[0] for link in LINK.findall(text) if "://" not in link]
    assert [target for target in targets if target and not ((ROOT / page).parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_of_a_page_is_ours_and_can_be_read_aloud(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for says, target in IMAGE.findall(text):
        assert len(says.split()) >= 8, f"{target} says too little"
        picture = ((ROOT / page).parent / target).read_text(encoding="utf-8")
        # Whoever reads the page offline, or in the dark, sees it too.
        assert not re.search(r"url\(|@import|<image|<script", picture.replace("url(#", ""))
        assert "prefers-color-scheme" in picture or "terminal" in picture


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", (ROOT / page).read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "raymerge", ROOT / "tests")
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def test_the_differences_from_mergekit_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w./-]+\.py)`", text))
    assert named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
