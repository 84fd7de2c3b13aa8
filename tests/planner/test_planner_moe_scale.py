"""A mixture of the true size, planned from headers: Mixtral-8x22B made of a dense model of 22 billion."""

from __future__ import annotations

import time
from pathlib import Path

from kits.checkpoint_maker import llama_config, llama_shapes
from kits.plan_maker import header_checkpoint

from raymerge.dtypes import DType
from raymerge.planner.planned import plan_merges
from raymerge.recipes import recipe_from_mapping

TENSORS, BILLIONS = 1_739, 140.621
"""Tensors and parameters of the published Mixtral-8x22B."""


def _dense(root: Path) -> Path:
    config = llama_config(layers=56, hidden=6144, vocab=32_000) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 16_384,
        "sliding_window": None,
    }
    return header_checkpoint(root, {n: (DType.BF16, s) for n, s in llama_shapes(config).items()}, config)


def test_a_mixtral_8x22b_is_planned_whole(tmp_path: Path) -> None:
    base, other = _dense(tmp_path / "base"), _dense(tmp_path / "other")
    asked = {
        "base_model": str(base),
        "gate_mode": "random",
        "experts": [
            {"source_model": str(base), "copies": 4, "noise_scale": 0.01},
            {"source_model": str(other), "copies": 4},
        ],
    }
    began = time.monotonic()
    (merge,) = plan_merges([recipe_from_mapping(asked)], tmp_path / "steps", version="0")
    print(f"Mixtral-8x22B of dense models: planned in {time.monotonic() - began:.1f} s")
    merge.plan.require()
    assert len(merge.plan["tensors"]) == TENSORS
    parameters = sum(merge.plan["tensors"].column("nbytes").to_pylist()) / DType.BF16.nbytes(1)
    assert round(parameters / 1e9, 3) == BILLIONS
