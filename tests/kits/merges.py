"""Recipes over tiny checkpoints, in a folder that commands are run in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kits.checkpoint_maker import tiny_llama

MEAN = """\
merge_method: linear
models:
  - model: one
    parameters: {weight: 0.25}
  - model: two
    parameters: {weight: 0.75}
"""
"""The weighted mean of the models ``one`` and ``two``."""

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
"""Four layers: two of ``one``, its first once more, and the last of ``two``."""


def make_models(
    folder: Path,
    names: Sequence[str] = ("one", "two"),
    *,
    hidden: int = 32,
    layers: int = 3,
    tie: bool = False,
) -> Path:
    """Tiny Llamas of these names below ``folder``; returns it."""
    for seed, name in enumerate(names):
        tiny_llama(folder / name, seed, hidden=hidden, layers=layers, tie=tie)
    return folder


def write_recipe(folder: Path, text: str, name: str = "recipe.yml") -> str:
    """Write a recipe; returns its name, as a command run in ``folder`` takes it."""
    (folder / name).write_text(text, encoding="utf-8")
    return name
