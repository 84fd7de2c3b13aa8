"""Mixtures of the true size, planned from headers: Mixtral-8x22B made of a dense model of 22 billion, and
parents whose experts lie in fused stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, llama_shapes, sparse_checkpoint
from kits.fused_headers import (
    GPT_OSS_CONFIG,
    GPT_OSS_NUM_TENSORS,
    MAVERICK_CONFIG,
    gpt_oss_120b_specs,
    maverick_specs,
)
from kits.plan_maker import good, header_checkpoint

from raymerge.checkpoints.header import TensorSpec, shard_names, split_into_shards
from raymerge.dtypes import DType
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.plan import input_bytes
from raymerge.planner.matching import logical
from raymerge.planner.merges import plan_merges
from raymerge.recipes import recipe_from_mapping

pytestmark = pytest.mark.slow

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


USUAL_BUDGET = 512 << 20
"""Bytes that a worker on one machine may use, where the user does not say."""
FUSED: Mapping[str, tuple[list[TensorSpec], Mapping[str, Any]]] = {
    "gpt-oss-120b": (gpt_oss_120b_specs(), GPT_OSS_CONFIG),
    "Maverick": (maverick_specs(), MAVERICK_CONFIG),
}


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """Three checkpoints of each model, whose data is a hole."""
    assert len(FUSED["gpt-oss-120b"][0]) == GPT_OSS_NUM_TENSORS
    root = tmp_path_factory.mktemp("fused")
    found: dict[str, list[str]] = {}
    for model, (specs, config) in FUSED.items():
        files = split_into_shards(specs, 20 << 30)
        made = [
            sparse_checkpoint(root / model / n, files, config, names=shard_names(len(files))) for n in "abc"
        ]
        found[model] = [str(path) for path in made]
    return found


def _recipe(method: str, base: str, *others: str) -> dict[str, Any]:
    if method == "linear":
        models = [{"model": path, "parameters": {"weight": 0.5}} for path in (base, *others)]
        return {"merge_method": method, "models": models}
    models = [{"model": path, "parameters": {"weight": 0.5, "density": 0.5}} for path in others]
    return {"merge_method": method, "base_model": base, "models": models}


@pytest.mark.parametrize("model", list(FUSED))
@pytest.mark.parametrize(
    "method", ["linear", "ties", "della"], ids=["element by element", "matrix by matrix", "row by row"]
)
def test_fused_stacks_are_read_once_and_with_the_usual_memory(
    parents: Mapping[str, list[str]], model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[object] = []
    blocks = logical.blocks

    def noted(*asked: Any) -> Any:
        looked_up.append(asked)
        return blocks(*asked)

    monkeypatch.setattr(logical, "blocks", noted)
    plan = good(_recipe(method, *parents[model])).plan
    specs = FUSED[model][0]
    assert input_bytes(plan).sum() == 3 * sum(spec.nbytes for spec in specs)
    assert project(plan, USUAL_BUDGET).shortage() is None
    # Once for a stack of each parent, not once for each of its experts.
    assert len(looked_up) <= 3 * len([spec for spec in specs if ".experts." in spec.name])
    # A row for each expert where one is needed by itself, and else no more than a run is cut into.
    num_made = sum(each < 0 for each in plan["rows"].column("made_with").to_pylist())
    cut = plan["segments"].num_rows + len(specs)
    assert num_made <= (cut if method == "linear" else 30_000)
