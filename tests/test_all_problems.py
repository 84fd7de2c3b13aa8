"""All problems at once: independent mistakes of every stage are reported by one run, each once, and nothing
that is a mere consequence of them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kits.adapter_maker import tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.command_line import run_command
from safetensors.torch import save_file

import raymerge
from raymerge.errors import Problem, UserError

Data = dict[str, Any]

RECIPES: Mapping[str, list[Data]] = {
    name: list(yaml.safe_load_all(text))
    for name, text in {
        "ties": """
merge_method: ties
base_model: base
models:
- {model: a, parameters: {weight: 0.5, density: 0.5}}
- {model: b, parameters: {weight: 0.5, density: 0.5}}
- {model: c, parameters: {weight: 0.5, density: 0.5}}
parameters: {normalize: true}
dtype: bfloat16
""",
        "slices": """
merge_method: linear
slices:
- sources:
  - {model: a, layer_range: [0, 2], parameters: {weight: 0.5}}
  - {model: b, layer_range: [0, 2], parameters: {weight: 0.5}}
- sources: [{model: b, layer_range: [1, 2], parameters: {weight: 0.5}}]
base_model: a
dtype: bfloat16
""",
        "adapted": """
merge_method: dare_ties
base_model: base
models:
- {model: base+lora, parameters: {weight: 0.5, density: 0.5}}
- {model: b, parameters: {weight: 0.5, density: 0.5}}
dtype: bfloat16
""",
        "mixture": """
base_model: base
gate_mode: random
experts: [{source_model: a}, {source_model: b}, {source_model: c}]
trunk: {merge_method: linear, parameters: {weight: 0.5}}
dtype: bfloat16
""",
        "chain": """
name: step
merge_method: linear
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
dtype: bfloat16
---
merge_method: ties
base_model: base
models:
- {model: step, parameters: {weight: 0.5, density: 0.5}}
- {model: c, parameters: {weight: 0.5, density: 0.5}}
dtype: bfloat16
""",
        "adapters": """
merge_method: linear
models:
- {model: lora, parameters: {weight: 0.5}}
- {model: lora2, parameters: {weight: 0.5}}
- {model: lora3, parameters: {weight: 0.5}}
adapter: {rank: 4}
dtype: bfloat16
""",
    }.items()
}


@dataclass(frozen=True)
class Mistake:
    """Something wrong that can be put into a recipe."""

    stage: str
    """What finds it."""
    make: Callable[[list[Data]], bool]
    """Changes the documents of a recipe; False where it has no place there."""
    words: str
    """A pattern of the problem that reports it, and no other."""


def _blocks(data: Any, key: str) -> Iterator[Data]:
    """Every map that has a key, in written order."""
    if isinstance(data, list):
        for each in data:
            yield from _blocks(each, key)
    elif isinstance(data, dict):
        if key in data:
            yield data
        for each in data.values():
            yield from _blocks(each, key)


def _changed(key: str, change: Callable[[Data], object], number: int = 0) -> Callable[[list[Data]], bool]:
    def make(documents: list[Data]) -> bool:
        found = list(_blocks(documents, key))
        if len(found) <= number:
            return False
        change(found[number])
        return True

    return make


def _renamed(key: str, wrong: str, number: int = 0) -> Callable[[list[Data]], bool]:
    def change(block: Data) -> None:
        pairs = [(wrong if each == key else each, value) for each, value in block.items()]
        block.clear()
        block.update(pairs)

    return _changed(key, change, number)


def _model(name: str) -> Callable[[list[Data]], bool]:
    """Another model in the place of the last that is not the base or another merge."""

    def make(documents: list[Data]) -> bool:
        key = "source_model" if "experts" in documents[-1] else "model"
        found = [each for each in _blocks(documents, key) if each[key] in ("b", "c", "lora3")]
        if len(found) < (2 if name == "wide" else 1):
            return False
        found[0 if name == "wide" else -1][key] = name
        return True

    return make


def _with_rule(documents: list[Data]) -> bool:
    target = documents[-1].get("trunk", documents[-1])
    if "merge_method" not in target or "adapter" in target:
        return False
    target["methods"] = [{"filter": "no_such_tensor", "merge_method": "linear", "parameters": {"weight": 1}}]
    return True


MISTAKES = {
    "unknown key": Mistake("schema", lambda d: not d[-1].update(banana=3), "unknown key 'banana'"),
    "misspelt key": Mistake("schema", _renamed("dtype", "dtpye"), "unknown key 'dtpye'"),
    "value of another kind": Mistake(
        "schema", lambda d: not d[0].update(seed="many"), "'many' is not a whole number"
    ),
    "value like another": Mistake(
        "schema", lambda d: not d[-1].update(duplicates="kep"), "'kep' is not known"
    ),
    "misspelt block": Mistake("schema", _renamed("parameters", "parmeters"), "unknown key 'parmeters'"),
    "misspelt parameter": Mistake(
        "parameters", _renamed("weight", "wieght", 1), "'wieght' is not a parameter"
    ),
    "density of 1.5": Mistake("values", _changed("density", lambda b: b.update(density=1.5), 1), "is 1.5"),
    "weight that is a text": Mistake(
        "values", _changed("weight", lambda b: b.update(weight="x")), "'x' is a text"
    ),
    "absent model": Mistake("models", _model("nowhere"), "nowhere"),
    "broken header": Mistake("headers", _model("broken"), "broken"),
    "rule without tensors": Mistake("plan", _with_rule, "matches no tensor"),
    "another shape": Mistake("plan", _model("wide"), "wide: .*other shapes"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    base = tiny_llama(root / "base", 0)
    for number, name in enumerate("abc", 1):
        tiny_llama(root / name, number, base=base)
    for number, name in enumerate(("lora", "lora2", "lora3"), 1):
        tiny_lora(root / name, read_tensors(base), number)
    wide = tiny_llama(root / "wide", 5, base=base)
    tensors = read_tensors(wide)
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(33, dtype=torch.bfloat16)
    broken = tiny_llama(root / "broken", 6, base=base)
    for each in wide.glob("*.safetensors*"):
        each.unlink()
    save_file(tensors, wide / "model.safetensors")
    for each in broken.glob("*.safetensors"):
        each.write_bytes(each.read_bytes()[:100])
    return root


def _reported(documents: list[Data], root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(root)
    path = root / "recipe.yml"
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    problems: tuple[Problem, ...] = ()
    try:
        if "adapter" in documents[0]:
            raymerge.merge_adapters("recipe.yml", root / "out")
        else:
            raymerge.plan_all("recipe.yml")[-1].require()
    except UserError as error:
        problems = error.problems
    return [f"{each.where}: {each.what}" for each in problems]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RECIPES)
def test_every_mistake_is_reported_once_whatever_others_there_are(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _reported(RECIPES[name], models, monkeypatch) == []
    fitting = [key for key in MISTAKES if MISTAKES[key].make(copy.deepcopy(RECIPES[name]))]
    assert len(fitting) > 5
    wrong: dict[tuple[str, ...], list[str]] = {}
    # What reading finds is found alone in one recipe, and among others in all.
    alone = [key for key in fitting if name == "ties" or MISTAKES[key].stage not in ("schema", "values")]
    some = [tuple(fitting[start::step]) for step in (1, 2) for start in range(step)]
    for chosen in (*((each,) for each in alone), *some):
        documents = copy.deepcopy(RECIPES[name])
        made = [key for key in chosen if MISTAKES[key].make(documents)]
        found = _reported(documents, models, monkeypatch)
        counts = [sum(bool(re.search(MISTAKES[key].words, each)) for each in found) for key in made]
        if counts != [1] * len(made) or len(found) != len(made) or found != sorted(found, key=_line):
            wrong[tuple(made)] = found
    assert wrong == {}


def _line(problem: str) -> float:
    place = re.match(r"recipe.yml:(\d+)", problem)
    return int(place[1]) if place else float("inf")


@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_the_commands_report_all_and_show_no_plan(verb: str, models: Path) -> None:
    documents = copy.deepcopy(RECIPES["ties"])
    chosen = ["unknown key", "misspelt parameter", "density of 1.5", "absent model"]
    assert all(MISTAKES[key].make(documents) for key in chosen)
    (models / "wrong.yml").write_text(yaml.safe_dump_all(documents, sort_keys=False))
    outcome = run_command(verb, "wrong.yml", "-o", "out", cwd=models)
    assert outcome.code == 2
    for key in chosen:
        assert len(re.findall(MISTAKES[key].words, outcome.text)) >= 1
    assert "0 tensors" not in outcome.text
    listed = run_command("plan", "wrong.yml", "--json", cwd=models)
    assert len(json.loads(listed.text)["problems"]) == len(chosen)


def test_what_is_lost_in_reading_hides_no_other_place(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = copy.deepcopy(RECIPES["slices"])
    documents[0]["slices"][0]["sources"].insert(0, {"model": "a@b@c", "layer_range": [0, 2]})
    documents[0]["slices"][0]["sources"][2]["parameters"] = {"wieght": 1}
    documents[0]["slices"][1]["sources"][0]["layer_range"] = [2, 0]
    documents[0]["slices"].append({"sources": [{"model": "nowhere", "layer_range": [0, 1]}]})
    found = _reported(documents, models, monkeypatch)
    places = (models / "recipe.yml").read_text().splitlines()
    lines = [places[int(_line(each)) - 1].strip() for each in found]
    assert lines == ["- model: a@b@c", "wieght: 1", "layer_range:", "- model: nowhere"]


@pytest.mark.parametrize(
    "text",
    ["trunk: {merge_method: linear, model: [a]}", "missing_tensors: copy_bse", "merge_method: 3", "dtpye: x"],
)
def test_a_guess_is_no_reason_for_further_problems(
    text: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mixture" if text.startswith("trunk") else "slices"
    documents = copy.deepcopy(RECIPES[name])
    documents[0] |= yaml.safe_load(text)
    assert len(_reported(documents, models, monkeypatch)) == 1
