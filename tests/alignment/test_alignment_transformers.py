"""A real model with its experts in another model's order loads strictly and computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.model_parents import load_as_strictly, save
from kits.model_types import ModelType
from kits.model_types_decoders import SPARSE

import raymerge

CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "granitemoehybrid": {},
    "dbrx": {},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
}
KINDS = [kind for kind in SPARSE if kind.name in CHANGES]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_are_those_of_the_model_in_its_own_order(tmp_path: Path, kind: ModelType) -> None:
    one, two = (kind.build(seed, **CHANGES[kind.name]) for seed in (1, 2))
    save(one, tmp_path / "one")
    state = save(two, tmp_path / "two")
    _, info = kind.load(tmp_path / "two")
    models = [
        {"model": str(tmp_path / "one"), "parameters": {"weight": 0.0}},
        {"model": str(tmp_path / "two"), "parameters": {"weight": 1.0}},
    ]
    recipe = {"merge_method": "linear", "align": "experts", "models": models}
    raymerge.submit(recipe, tmp_path / "out", raymerge.RunOptions(inline=True))
    moved = load_as_strictly(kind, tmp_path / "out", info)
    experts = [name for name in state if "expert" in name and state[name].dim() > 1]
    found = moved.state_dict()
    assert any(not torch.equal(found[name], state[name]) for name in experts)
    assert all(torch.equal(found[name], state[name]) for name in state if "attn" in name)
    torch.testing.assert_close(kind.run(moved), kind.run(two), rtol=1e-4, atol=1e-5)
