"""JSON Schema of recipes and profiles: it accepts what readers accept, and refuses what is wrong by form."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from kits.command_line import run_command
from recipes.test_recipes_guide import EXAMPLES, completed

import raymerge
from raymerge.deploy.profiles import profile_schema
from raymerge.errors import UserError
from raymerge.planner.recipe_schema import recipe_schema
from raymerge.recipe_search.settings import SEARCH_GRAMMAR
from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.sweep import draft_sweep_mapping

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
CONFIGS = ROOT / "configs"
RECIPES = [*sorted((CONFIGS / "recipes").rglob("*.yml")), CONFIGS / "quickstart" / "recipe.yml"]
PROFILES = sorted((CONFIGS / "run").glob("*.yml"))
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)
PACK = SHARED / "conformance"

BY_HEADERS = {
    "layers-out-of-range", "missing-model-path", "missing-shard", "mixed-families", "nan-weights",
    "path-traversal", "shape-mismatch", "truncated-safetensors",
}  # fmt: skip
"""Bad recipes of the pack that only the models' files tell."""
BY_COMPARISON = {"moe-too-few-experts", "reversed-layer-range", "unequal-slice-lengths"}
"""Those that are wrong by two numbers of the recipe, which JSON Schema cannot compare."""


@cache
def recipes() -> Draft202012Validator:
    schema = recipe_schema(SEARCH_GRAMMAR)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def complaints(document: object) -> list[str]:
    return [error.message for error in recipes().iter_errors(document)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("document", ["recipe", "profile"])
def test_the_schemas_that_examples_name_are_what_the_command_prints(document: str) -> None:
    printed = run_command("schema", document, cwd=ROOT)
    assert printed.code == 0
    assert printed.text == (CONFIGS / "schemas" / f"{document}.json").read_text(encoding="utf-8")


@pytest.mark.sample(14)
@pytest.mark.parametrize("path", [*RECIPES, *PROFILES], ids=lambda path: path.stem)
def test_examples_are_accepted_by_the_schema_that_they_name(path: Path) -> None:
    (named,) = MODELINE.findall(path.read_text(encoding="utf-8"))
    schema = json.loads((path.parent / named).read_text(encoding="utf-8"))
    for document in documents(path):
        assert not list(Draft202012Validator(schema).iter_errors(document))


@pytest.mark.slow
def test_examples_of_the_documentation_are_accepted() -> None:
    for example in EXAMPLES:
        whole = example if re.search("^(sweep|checkpoints):", example, re.MULTILINE) else completed(example)
        for document in yaml.safe_load_all(whole):
            weights = {"parameters": {"weight": 1}} if document.get("merge_method") == "linear" else {}
            assert not complaints({**weights, **document}), whole


@pytest.mark.skipif(not PACK.is_dir(), reason="needs the conformance pack beside the repository")
def test_the_conformance_pack_is_accepted_but_for_what_is_wrong_by_form() -> None:
    for path in sorted((PACK / "recipes").glob("*.yml")):
        assert not complaints(*documents(path)), path
    bad = {path.parent.name: complaints(*documents(path)) for path in (PACK / "bad").glob("*/recipe.yml")}
    assert {name for name, refused in bad.items() if not refused} == BY_HEADERS | BY_COMPARISON


@pytest.mark.sample(1)
@pytest.mark.parametrize("folder", ["recipes-in-use", "behaviour"])
def test_recipes_in_use_are_accepted_where_they_are_read(folder: str) -> None:
    place = SHARED / folder
    if not place.is_dir():
        pytest.skip(f"needs {folder} beside the repository")
    expected = place / "expect.json"
    refused = json.loads(expected.read_text(encoding="utf-8")) if expected.is_file() else {}
    for path in sorted((place / "recipes").glob("*.yml")):
        if refused.get(path.name, {}).get("expect") != "refuse":
            assert not any(map(complaints, documents(path))), path


BASE, CODE, FRENCH = (f"configs/quickstart/models/{name}" for name in ("base", "code", "french"))
TIES: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": BASE,
    "models": [{"model": CODE, "parameters": {"weight": 0.5, "density": [0, 1]}}],
}
SLICES: dict[str, Any] = {
    "merge_method": "slerp",
    "slices": [
        {
            "sources": [{"model": CODE, "layer_range": [0, 2]}, {"model": FRENCH, "layer_range": [0, 2]}],
            "base_model": CODE,
            "parameters": {"t": [{"role": "mlp", "layers": "0..1", "value": [0, 1]}, {"value": 0.5}]},
        }
    ],
    "methods": [{"filter": "norm", "merge_method": "passthrough", "sources": [CODE]}],
    "out_format": [{"role": "attention", "value": "bf16"}, "same"],
    "tokenizer": {"source": "union", "tokens": {"a": {"source": {"kind": "zero"}, "force": True}}},
    "dtype": "bfloat16",
    "shard_size": "5GB",
}
MIXTURE: dict[str, Any] = {
    "base_model": BASE,
    "gate_mode": "hidden",
    "experts": [
        {"source_model": CODE, "positive_prompts": ["a"]},
        {"source_model": FRENCH, "positive_prompts": ["$b"]},
    ],
    "trunk": {"merge_method": "linear", "parameters": {"weight": 1}},
}
CHANGED: dict[str, Any] = {"base_model": BASE, "experts": {"keep": {"0": [1, 2], "1": [0, 1]}}}
SWEEP: dict[str, Any] = {
    "sweep": {"t": [0.1, 0.2], "m": [CODE, FRENCH], "zip": True},
    "outputs": "merged-{t}",
    "merge_method": "slerp",
    "base_model": BASE,
    "models": [{"model": "$m"}],
    "parameters": {"t": {"value": "$t"}},
}
SEARCH: dict[str, Any] = {
    "search": {
        "strategy": "tpe",
        "evaluations": 4,
        "metrics": {"mean": -1},
        "stop_early": {"share": 0.5, "keep": 0.5},
        "texts": {"files": ["configs/quickstart/texts/valid-code.txt"], "length": 32},
    },
    "merge_method": {"search": {"choices": ["linear", "task_arithmetic"]}},
    "base_model": {"search": {"choices": [BASE, FRENCH]}},
    "models": [{"model": CODE, "parameters": {"weight": [{"search": [0, 1]}, 1]}}],
    "parameters": {"normalize": {"search": {"choices": [True, False]}}},
    "seed": {"search": {"low": 1, "high": 9, "step": 2}},
}
WHOLE = (TIES, SLICES, MIXTURE, CHANGED, SWEEP, SEARCH)
MARK = {"search": [0, 1]}
VALUES = (None, True, 0, -1, 7.5, "4", "no", "$t", [], {}, MARK, {"a": 1}, [{"value": 1}], "1e-5")


def paths(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    held = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in held:
        yield (*path, step)
        yield from paths(each, (*path, step))


def changed(document: Any, path: tuple[Any, ...], value: object) -> Any:
    changed = copy.deepcopy(document)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return changed


def is_sound(document: Any) -> bool:
    """Whether raymerge would merge it."""
    try:
        if "search" in document:
            return not raymerge.plan_search(document).merges[-1].plan.problems
        sweep = draft_sweep_mapping(document)
        outputs = () if sweep is None else sweep.require()
        recipes = [output.recipes[-1] for output in outputs] or [recipe_from_mapping(document)]
        return not any(raymerge.plan(each).problems for each in recipes)
    except UserError:
        return False


@pytest.mark.sample(1)
@pytest.mark.parametrize("document", WHOLE, ids=["ties", "slices", "mixture", "experts", "sweep", "search"])
def test_what_the_schema_refuses_raymerge_refuses(document: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert not complaints(document)
    number = refused = 0
    for at, path in enumerate(paths(document)):
        for value in (VALUES[(at + step) % len(VALUES)] for step in (0, 3, 5, 8, 10)):
            number += 1
            wrong = changed(document, path, value)
            if not recipes().is_valid(wrong):
                refused += 1
                assert not is_sound(wrong), (path, value)
    assert refused > number / 3


@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        (TIES, ("models", 0, "parameters", "density"), 1.5),
        (TIES, ("models", 0, "parameters", "normalize"), True),
        (TIES, ("models",), [{"model": CODE}, {"model": FRENCH}]),
        (TIES, ("base_model",), None),
        (TIES, ("slices",), SLICES["slices"]),
        (TIES, ("models", 0, "parameters", "weight"), "$w"),
        (SLICES, ("slices", 0, "sources", 0, "layer_range"), [0]),
        (SLICES, ("methods", 0), {"filter": "norm"}),
        (SLICES, ("methods", 0, "role"), "atention"),
        (SLICES, ("out_format", 1), "fp9"),
        (SLICES, ("tokenizer_source",), "union"),
        (MIXTURE, ("gate_mode",), "ridge-y"),
        (MIXTURE, ("experts", 0, "positive_prompts"), []),
        (MIXTURE, ("trunk", "parameters", "wieght"), 1),
        (CHANGED, ("experts", "drop"), 1),
        (SWEEP, ("sweep", "t"), []),
        (SWEEP, ("sweep",), None),
        (TIES, ("models", 0, "parameters", "weight"), MARK),
        (SWEEP, ("search",), SEARCH["search"]),
        (SEARCH, ("search",), {}),
        (SEARCH, ("search", "strategy"), "annealing"),
        (SEARCH, ("search", "command"), "run {model}"),
        (SEARCH, ("search", "texts", "lenght"), 32),
        (SEARCH, ("seed",), {"search": [1]}),
        (SEARCH, ("seed", "search", "choices"), [1, 2]),
    ],
)
def test_what_is_wrong_by_form_is_refused(document: Any, path: tuple[Any, ...], value: object) -> None:
    assert complaints(changed(document, path, value))


def test_profiles_are_refused_by_form() -> None:
    profiles = Draft202012Validator(profile_schema())
    whole = documents(CONFIGS / "run" / "kubernetes-gpu.yml")[0]
    assert profiles.is_valid(whole)
    for path, value in (
        (("target",), "slurm"),
        (("run", "workers"), 0),
        (("run", "device"), "gpu"),
        (("run", "wokers"), 1),
        (("kubernetes",), None),
        (("kubernetes", "workers", 0, "memory"), "16 gigabytes"),
        (("kubernetes", "volumes", 0, "host_path"), "/mnt/other"),
    ):
        assert not profiles.is_valid(changed(whole, path, value)), path
