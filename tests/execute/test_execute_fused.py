"""Bytes read of experts in fused stacks, which are many matrices: by the plan, and by a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import sparse_checkpoint
from kits.fused_headers import GPT_OSS_CONFIG, MAVERICK_CONFIG, gpt_oss_120b_specs, maverick_specs
from kits.marks import slow_but
from kits.plan_maker import same_needs
from kits.recipe_maker import deltas, linear, slerp
from kits.segment_bench import Bench, make_bench

from raymerge.api import read_recipe
from raymerge.checkpoints.header import TensorSpec
from raymerge.planner.explain import Explanation, explain
from raymerge.planner.inputs.sources import open_models

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
OSS = {
    **GPT_OSS_CONFIG,
    **SIZES,
    "num_hidden_layers": 1,
    "hidden_size": 512,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_local_experts": 64,
}
TEXT = {"hidden_size": 128, "intermediate_size": 192, "intermediate_size_mlp": 256, "vocab_size": 512}
LLAMA4 = {**MAVERICK_CONFIG, "text_config": {**MAVERICK_CONFIG["text_config"], **SIZES, **TEXT}}
MODELS: Mapping[str, tuple[list[TensorSpec], Mapping[str, Any]]] = {
    "interleaved codes": (gpt_oss_120b_specs(OSS), OSS),
    "transposed numbers": (maverick_specs(LLAMA4), LLAMA4),
}
LANES = 2
BUDGET = 40 << 20


def _parents(root: Path, specs: Sequence[TensorSpec], config: Mapping[str, Any]) -> list[str]:
    return [str(sparse_checkpoint(root / name, [specs], config)) for name in "abc"]


def _recipe(method: str, parents: Sequence[str]) -> dict[str, Any]:
    if method in ("linear", "slerp"):
        return linear(*parents[:2]) if method == "linear" else slerp(*parents[:2], t=0.4)
    return deltas(method, *parents)


def _explained(bench: Bench, recipe: Mapping[str, Any]) -> Explanation:
    return explain(bench.plan, open_models(read_recipe(recipe)).require(), bench.projection)


def _read_bytes(bench: Bench) -> int:
    return sum(bench.runner.run(segment).read_bytes for segment in bench.segments)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "method"),
    slow_but(
        product(MODELS, ("linear", "ties", "della")),
        *product(MODELS, ("linear",)),
        ("transposed numbers", "ties"),
    ),
)
def test_a_stack_that_no_lane_holds_is_read_once(model: str, method: str, tmp_path: Path) -> None:
    specs, config = MODELS[model]
    recipe = _recipe(method, _parents(tmp_path, specs, config))
    bench = make_bench(recipe, tmp_path / "out", budget=BUDGET, lanes=LANES)
    num_parents = len(bench.plan.manifest["sources"])
    stack = max(spec.nbytes for spec in specs)
    assert num_parents * stack > bench.projection.lane.budget
    explained, stored = _explained(bench, recipe), num_parents * sum(spec.nbytes for spec in specs)
    assert (explained.again, explained.read_bytes, _read_bytes(bench)) == ((), stored, stored)
    assert same_needs(bench.plan) > len(specs)


def test_what_is_read_again_is_what_the_plan_says(tmp_path: Path) -> None:
    """Embedding and head do not fit a lane, and have no matrices to be taken apart into."""
    config = {**LLAMA4, "text_config": {**LLAMA4["text_config"], "vocab_size": 65_536}}
    specs = maverick_specs(config)
    recipe = _recipe("slerp", _parents(tmp_path, specs, config))
    bench = make_bench(recipe, tmp_path / "out", budget=BUDGET, lanes=LANES)
    explained, large = _explained(bench, recipe), 2 * 65_536 * 128
    (again,) = explained.again
    assert (again.method, again.times, again.tensors) == ("slerp", 1, 2)
    assert again.nbytes == 2 * 2 * large
    assert again.example.startswith("language_model.")
    assert _read_bytes(bench) == explained.read_bytes + again.nbytes
