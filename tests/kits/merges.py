"""Recipes over tiny checkpoints, for commands that are run in a folder and for merges in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import read_tensors, tiny_llama

import raymerge

MEAN = """\
merge_method: linear
models:
  - model: one
    parameters: {weight: 0.25}
  - model: two
    parameters: {weight: 0.75}
"""

STACK = """\
merge_method: passthrough
slices:
  - sources:
      - {model: one, layer_range: [0, 2]}
  - sources:
      - {model: one, layer_range: [0, 1]}
  - sources:
      - {model: two, layer_range: [2, 3]}
"""


def make_models(folder: Path, names: Sequence[str] = ("one", "two"), *, layers: int = 3) -> Path:
    for seed, name in enumerate(names):
        tiny_llama(folder / name, seed, layers=layers)
    return folder


def write_recipe(folder: Path, text: str, name: str = "recipe.yml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def mean_of(*models: object, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(each), "parameters": {"weight": 1}} for each in models]
    return {"merge_method": "linear", "models": entries, **more}


def merge_here(recipe: Mapping[str, Any], out: Path, **options: Any) -> dict[str, torch.Tensor]:
    plain = json.loads(json.dumps(recipe, default=str))
    return read_tensors(raymerge.submit(plain, out, raymerge.RunOptions(inline=True, **options)).output)


def check_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=3e-6, atol=3e-7)
