"""Layers of quantised models in another order: codes and scales move together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits.checkpoint_maker import read_tensors
from kits.marks import slow_but
from kits.merge_cases import merge
from kits.quantised_merges import MAKERS, config_of, read_numbers, same_bytes

from raymerge.api import verify

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def _slices(*ranges: tuple[Path, int, int]) -> dict[str, Any]:
    slices = [
        {"sources": [{"model": str(root), "layer_range": [first, stop]}]} for root, first, stop in ranges
    ]
    return {"merge_method": "passthrough", "slices": slices}


@pytest.mark.parametrize("kind", slow_but(MAKERS, "DeepSeek-V3 F32", "Kimi-K2-Thinking", "gpt-oss"))
def test_a_stack_moves_codes_with_their_scales(kind: str, tmp_path: Path) -> None:
    one, other = (MAKERS[kind](tmp_path / name, seed) for seed, name in enumerate("ab"))
    recipe = _slices((one.root, 0, 2), (other.root, 1, 2), (one.root, 1, 2))
    merge({**recipe, "shard_size": 200_000}, tmp_path / "out")
    assert config_of(tmp_path / "out") == {**config_of(one.root), "num_hidden_layers": 4, **_types(one.root)}
    # The layer for further tokens goes behind the last.
    origins = {0: (one, 0), 1: (one, 1), 2: (other, 1), 3: (one, 1), 4: (one, 2)}
    stored = {model.root: read_tensors(model.root) for model in (one, other)}
    found = read_tensors(tmp_path / "out")
    wanted = {name: tensor for name, tensor in stored[one.root].items() if not _LAYER.match(name)}
    for layer, (model, own) in origins.items():
        head = f"model.layers.{own}."
        for name, tensor in stored[model.root].items():
            if name.startswith(head):
                wanted[f"model.layers.{layer}.{name.removeprefix(head)}"] = tensor
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in wanted.items())
    verdict = verify(tmp_path / "out")
    assert verdict.problems == ()
    assert verdict.against_plan
    assert verdict.files > 1


def _types(root: Path) -> dict[str, Any]:
    """``layer_types`` of the stack, where the family has it."""
    types = config_of(root).get("layer_types")
    return {"layer_types": [types[0], types[1], types[1], types[1]]} if types else {}


def test_merged_layers_in_a_stack_are_encoded_under_their_new_names(tmp_path: Path) -> None:
    one, other = (MAKERS["DeepSeek-V3 F32"](tmp_path / name, seed) for seed, name in enumerate("ab"))
    sources = [{"model": str(model.root), "layer_range": [1, 2]} for model in (one, other)]
    slices = [
        {"sources": [{"model": str(model.root), "layer_range": [0, 2]} for model in (one, other)]},
        {"sources": sources},
    ]
    merge({"merge_method": "linear", "parameters": {"weight": 0.5}, "slices": slices}, tmp_path / "out")
    assert verify(tmp_path / "out").problems == ()
    found = read_numbers(tmp_path / "out")
    for name in one.quantised:
        if not name.startswith("model.layers.1."):
            continue
        mean = (one.values[name] + other.values[name]) / 2
        for number in (1, 2):
            have = found[name.replace(".1.", f".{number}.", 1)]
            assert np.all(np.abs(have.values - mean) <= have.steps / 2 * (1 + 1e-5))
