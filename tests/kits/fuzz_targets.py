"""What raymerge reads of others, each as a function of bytes that take the place of one sound file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.adapter_maker import lora_config, tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama, write_json
from kits.pickle_maker import PICKLE, pickled_twin
from kits.plan_maker import good, planned
from kits.quantised_models import kimi_k2_thinking
from kits.tokenizer_maker import CHATML_CONFIG, bpe
from kits.training_checkpoint import grid, save_chunks

from raymerge.api import plan_for
from raymerge.checkpoints.header import read_header
from raymerge.checkpoints.source import open_checkpoint
from raymerge.documents.fields import FaultError
from raymerge.errors import RecipeError
from raymerge.execute.receipts import Receipt
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.plan import digest
from raymerge.merge_plan.tables import load_plan, save_plan
from raymerge.planner.explain import tensor_lines
from raymerge.publish.record import Ledger
from raymerge.recipe_search.settings import read_settings
from raymerge.recipes.load import draft_recipes, parse_recipes
from raymerge.recipes.search import marked_problems, read_marked
from raymerge.recipes.sweep import draft_sweep
from raymerge.storage.local.store import LocalStore


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    sample: bytes
    read: Callable[[bytes], object]

    @property
    def value(self) -> Any:
        return json.loads(self.sample)


def make_targets(root: Path, names: Sequence[str] = ()) -> dict[str, Target]:
    return {name: _MAKERS[name](root / name.replace(" ", "-")) for name in names or _MAKERS}


def plan_of(data: Mapping[str, Any]) -> None:
    planned(data).plan.require()


def _linear(*models: Path | str, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(model), "parameters": {"weight": 0.5}} for model in models]
    return {"merge_method": "linear", "models": entries, **more}


def _header(root: Path) -> Target:
    place = tiny_llama(root, 0, layers=1, hidden=8, vocab=8) / "model.safetensors"

    def read(data: bytes) -> object:
        place.write_bytes(data)
        with LocalStore(root) as store:
            return read_header(store, place.name, len(data), "1")

    return Target("header", place.read_bytes(), read)


def _index(root: Path) -> Target:
    place = tiny_llama(root, 0, layers=1, hidden=8, vocab=8, files=2) / "model.safetensors.index.json"

    def read(data: bytes) -> object:
        place.write_bytes(data)
        return open_checkpoint(root, "fuzzed")

    return Target("index", place.read_bytes(), read)


def _config(root: Path) -> Target:
    a, b = (tiny_llama(root / name, seed, layers=2, hidden=8, vocab=8) for seed, name in enumerate("ab"))
    return _planned("config", a / "config.json", _linear(a, b))


def _quantisation(root: Path) -> Target:
    model = kimi_k2_thinking(root / "a", 0).root
    return _planned("quantisation", model / "config.json", _linear(model, model))


def _adapter(root: Path) -> Target:
    base = tiny_llama(root / "base", 0, layers=2, hidden=8, vocab=8)
    lora = tiny_lora(root / "lora", read_tensors(base), 1)
    patterns = {"rank_pattern": {"down_proj": 4}, "alpha_pattern": {r"layers\.[01]\.self_attn.q_proj": 8}}
    write_json(lora / "adapter_config.json", lora_config(**patterns))
    return _planned("adapter", lora / "adapter_config.json", _linear(f"{base}+{lora}", base))


def _tokenizers(root: Path) -> dict[str, Any]:
    for seed, name in enumerate("ab"):
        tiny_llama(root / name, seed, layers=1, hidden=8, vocab=8)
        words = ["<s>", "a", "b", "c", "ab", "ac"]
        write_json(
            root / name / "tokenizer.json", bpe(words[: 6 - seed], merges=["a b"], added=["<s>", f"<{name}>"])
        )
        write_json(root / name / "tokenizer_config.json", {**CHATML_CONFIG, "chat_template": "{{ x }}"})
    return _linear(root / "a", root / "b", tokenizer_source="union")


def _tokenizer(root: Path) -> Target:
    recipe = _tokenizers(root)
    return _planned("tokenizer", root / "a" / "tokenizer.json", recipe)


def _tokenizer_config(root: Path) -> Target:
    recipe, place = _tokenizers(root), root / "a" / "tokenizer_config.json"
    decoder = {"0": {"content": "<s>", "special": True}, "6": {"content": "<more>", "special": True}}
    more = {"added_tokens_decoder": decoder, "additional_special_tokens": ["<more>"]}
    write_json(place, {**json.loads(place.read_bytes()), **more})
    return _planned("tokenizer config", place, recipe)


def _planned(name: str, place: Path, recipe: Mapping[str, Any]) -> Target:
    def read(data: bytes) -> object:
        place.write_bytes(data)
        return plan_of(recipe)

    return Target(name, place.read_bytes(), read)


def _recipe(root: Path) -> Target:
    a, b = (tiny_llama(root / name, seed, layers=2, hidden=8, vocab=8) for seed, name in enumerate("ab"))
    text = f"""\
name: first
merge_method: ties
base_model: &base "{a}"
models:
  - model: {b}
    parameters: &all {{weight: [0.2, 1.0], density: 0.5}}
parameters: {{normalize: true, int8_mask: true}}
dtype: bfloat16
---
merge_method: slerp
base_model: first
models: [{{model: first}}, {{model: "{a}"}}]
parameters:
  t: [{{filter: self_attn, value: [0, 0.5, 1]}}, {{value: 0.5}}]
"""
    place = root / "recipe.yml"

    def read(data: bytes) -> object:
        place.write_bytes(data)
        return [merge.plan.require() for merge in plan_for(place, root / "merged")]

    return Target("recipe", text.encode(), read)


def _saved_plan(root: Path) -> Path:
    a, b = (tiny_llama(root / name, seed, layers=1, hidden=8, vocab=8) for seed, name in enumerate("ab"))
    save_plan(good(_linear(a, b)).plan, root / "plan")
    return root / "plan"


def _manifest(root: Path) -> Target:
    return _loaded("manifest", _saved_plan(root) / "manifest.json")


def _table(root: Path) -> Target:
    return _loaded("table", _saved_plan(root) / "inputs.arrow")


def _signed(root: Path) -> Target:
    """A manifest with a digest that fits whatever it says."""
    place = _saved_plan(root) / "manifest.json"
    tables = load_plan(place.parent).tables

    def read(data: bytes) -> object:
        place.write_bytes(data)
        with suppress(ValueError, RecursionError, AttributeError):
            said = {key: value for key, value in json.loads(data).items() if key != "digest"}
            place.write_text(json.dumps({**said, "digest": digest(said, tables)}))
        plan = load_plan(place.parent)
        return plan.expressions, plan.encodings, project(plan, 1 << 30), list(tensor_lines(plan))

    return Target("signed manifest", place.read_bytes(), read)


def _loaded(name: str, place: Path) -> Target:
    def read(data: bytes) -> object:
        place.write_bytes(data)
        return load_plan(place.parent)

    return Target(name, place.read_bytes(), read)


def _ledger(root: Path) -> Target:
    root.mkdir(parents=True)
    place = root / "ledger.jsonl"
    ledger = Ledger(place, {"numerics": {"device": "cpu"}, "versions": []})
    for number in range(2):
        digests = {str(number): "0" * 32}
        errors = {str(number): (0.5, 1.0)}
        ledger.record(Receipt(number, 10, 10, 0.5, "w", digests, encoding_errors=errors))
    ledger.record_files({"model.safetensors": [1, 2, 3]})

    def read(data: bytes) -> object:
        place.write_bytes(data)
        found = Ledger(place, {})
        receipts = found.receipts()
        for number, receipt in receipts.items():
            assert type(number) is int
            assert Receipt.from_json(json.loads(json.dumps(receipt.to_json()))) == receipt
        return Ledger.conditions(place), Ledger.files(place), receipts

    return Target("ledger", place.read_bytes(), read)


def _pickle(root: Path) -> Target:
    model = tiny_llama(root / "plain", 0, layers=1, hidden=8, vocab=8)
    twin = pickled_twin(model, root / "pickled")
    recipe = {"merge_method": "passthrough", "models": [{"model": twin}], "pickled_weights": "read"}
    return _planned("pickle", twin / PICKLE, recipe)


def _chunks(root: Path, name: str, file: str) -> Target:
    tensors = {name: torch.ones(4, 6) for name in ("a.weight", "b.weight")}
    boxes = {"a.weight": grid((4, 6), (2,), (3,))}
    saved = save_chunks(root / "saved", tensors, boxes, entries={"step": 1}, files=1)
    return _planned(name, saved / file, _linear(saved))


def _sweep(root: Path) -> Target:
    sample = {
        "sweep": {
            "w": [0.25, "1e-1"],
            "m": ["linear", "slerp"],
            "n": [True, 2],
            "zip": ["w", "m"],
            "exclude": [{"w": 0.25, "n": 2}],
            "include": [{"w": 3, "m": "ties", "n": False}],
        },
        "outputs": "{m}-{w}-{n}",
        "merge_method": "$m",
        "models": [{"model": "a", "parameters": {"weight": ["$w", 1]}}, {"model": "b"}],
        "parameters": {"normalize": "$n", "weight": "$w"},
    }
    root.mkdir()
    place = root / "sweep.yml"

    def read(data: bytes) -> object:
        place.write_bytes(data)
        draft = draft_sweep(place)
        if draft is None:
            return draft_recipes(place).require()
        outputs = draft.require()
        assert all(parse_recipes(each.text) == each.recipes for each in outputs)
        return outputs

    return Target("sweep", json.dumps(sample).encode(), read)


def _search(root: Path) -> Target:
    sample = {
        "search": {
            "strategy": "tpe",
            "evaluations": 8,
            "round": 4,
            "seed": 1,
            "texts": {"files": ["a.txt", "b.txt"], "length": 16, "tokens": 100},
            "metrics": {"a": -1, "mean": -2.5},
            "stop_early": {"share": 0.25, "keep": 0.5},
        },
        "merge_method": {"search": {"choices": ["linear", "ties"]}},
        "models": [
            {"model": "a", "parameters": {"weight": [{"search": [0, "1e-1"]}, 1]}},
            {"model": "b", "parameters": {"weight": {"search": {"low": 0, "high": 4, "step": 2}}}},
        ],
        "parameters": {"density": {"search": {"low": 0.1, "high": 1, "log": True}}},
    }
    root.mkdir()
    place = root / "search.yml"

    def read(data: bytes) -> object:
        place.write_bytes(data)
        marked = read_marked(place)
        if problems := marked_problems(marked):
            raise RecipeError(problems)
        try:
            settings = read_settings(marked.block, marked.parameters)
        except FaultError as error:
            raise RecipeError(marked.places.problems(list(error.faults))) from error
        candidates = [marked.candidate(values) for values in marked.probes()]
        assert all(parse_recipes(each.text) == each.recipes for each in candidates)
        return settings

    return Target("search", json.dumps(sample).encode(), read)


_MAKERS: Mapping[str, Callable[[Path], Target]] = {
    "header": _header,
    "index": _index,
    "config": _config,
    "quantisation": _quantisation,
    "adapter": _adapter,
    "tokenizer": _tokenizer,
    "tokenizer config": _tokenizer_config,
    "recipe": _recipe,
    "sweep": _sweep,
    "search": _search,
    "manifest": _manifest,
    "signed manifest": _signed,
    "table": _table,
    "ledger": _ledger,
    "pickle": _pickle,
    "chunk metadata": lambda root: _chunks(root, "chunk metadata", ".metadata"),
    "chunks": lambda root: _chunks(root, "chunks", "__0_0.distcp"),
}
TARGETS = tuple(_MAKERS)
