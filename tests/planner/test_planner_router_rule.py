"""``router: MODEL`` where the model is listed more than once: its router is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, llama_shapes
from kits.plan_maker import good, header_checkpoint, refusals

from raymerge.dtypes import DType

BLOCK = "model.layers.0.block_sparse_moe"


def _mixtral(root: Path) -> Path:
    """Headers of a mixture of two experts in one layer."""
    config = {**llama_config(layers=1), "model_type": "mixtral", "num_local_experts": 2}
    shapes = {name: shape for name, shape in llama_shapes(config).items() if ".mlp." not in name}
    shapes[f"{BLOCK}.gate.weight"] = (2, 32)
    for expert in range(2):
        for matrix, shape in (("w1", (64, 32)), ("w2", (32, 64)), ("w3", (64, 32))):
            shapes[f"{BLOCK}.experts.{expert}.{matrix}.weight"] = shape
    return header_checkpoint(root, {name: (DType.BF16, shape) for name, shape in shapes.items()}, config)


def _recipe(root: Path, listed: str, router: str) -> dict[str, Any]:
    places = {name: _mixtral(root / name) for name in sorted(set(listed))}
    models = [{"model": places[name], "parameters": {"weight": 0.5}} for name in listed]
    return {"merge_method": "linear", "models": models, "router": places[router]}


@pytest.mark.parametrize("listed", ["ab", "aab", "aba", "abaa"])
def test_the_router_is_that_of_a_model_however_often_it_is_listed(tmp_path: Path, listed: str) -> None:
    made = good(_recipe(tmp_path, listed, "a"))
    assert made.method(f"{BLOCK}.gate.weight") == "copy"
    ((source, _),) = made.reads(f"{BLOCK}.gate.weight")
    assert made.sources[source].name.endswith("a")
    assert len(made.weights(f"{BLOCK}.experts.1.w1.weight")) == len(listed)


def test_a_rule_of_the_recipe_takes_a_model_as_often_as_it_is_listed(tmp_path: Path) -> None:
    data = _recipe(tmp_path, "aab", "a")
    rule = {"role": "norm", "merge_method": "passthrough", "sources": [str(data["models"][0]["model"])]}
    (found,) = {problem.split(":")[1].strip() for problem in refusals({**data, "methods": [rule]})}
    assert found == "methods[0]"
