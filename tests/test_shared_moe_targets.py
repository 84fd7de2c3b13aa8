"""Configs and names of built mixtures against those of the conformance pack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kits.dense_maker import read_dense
from transformers import AutoConfig

from raymerge.architectures.moe_targets import (
    Mixture,
    dense_model,
    expert_names,
    moe_config,
    named_targets,
    refusals,
    router_name,
    shared_gate_name,
    shared_names,
    targets,
)

CASES = {
    "moe-mistral-hidden": ("mistral-base", None, 2, 2, 0, "bfloat16"),
    "moe-mistral-cheap": ("mistral-base", None, 4, 1, 0, None),
    "moe-llama-random": ("llama-base", None, 4, 2, 0, None),
    "moe-qwen2-shared-seven": ("qwen2-base", "qwen", 7, 2, 1, "bfloat16"),
    "moe-qwen3-cheap": ("qwen3-base", None, 2, 2, 0, None),
    "moe-deepseek-shared": ("llama-base", "deepseek", 2, 2, 1, None),
}
# What the pack's own comparison leaves out, and what is no field of the family.
IGNORED = {"transformers_version", "_name_or_path", "use_cache", "output_router_logits", "torch_dtype"}


def read(root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A config as transformers has it."""
    (root / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result: dict[str, Any] = AutoConfig.from_pretrained(root).to_dict()
    return result


@pytest.mark.parametrize("name", CASES)
def test_a_built_mixture_is_what_the_pack_expects(name: str, shared_root: Path, tmp_path: Path) -> None:
    base_name, wanted, num_experts, chosen, num_shared, dtype = CASES[name]
    pack = shared_root / "conformance"
    dense, expected = (read_dense(pack / place) for place in (f"models/{base_name}", f"expected/{name}"))
    base = dense_model(base_name, dense.config, dense.shapes)
    gates = None if wanted == "qwen" else False
    asked = Mixture((base,), (base,) * num_shared, gates, num_experts, 1, "hub")
    known = targets().values() if wanted is None else named_targets(wanted)
    target = next(each for each in known if not refusals(each, base, asked))
    width = base.config["intermediate_size"]
    config = moe_config(
        target,
        dense.config,
        num_experts=num_experts,
        experts_per_token=chosen,
        expert_width=width,
        shared_width=width * num_shared,
        dtype_name=dtype,
    )
    assert config["model_type"] == expected.config["model_type"]
    assert config["architectures"] == expected.config["architectures"]
    if target.name == "deepseek":
        keys = json.loads((pack / f"expected/{name}/check.json").read_text(encoding="utf-8"))[
            "raw_config_keys"
        ]
        assert {key: config[key] for key in keys} == {key: expected.config[key] for key in keys}
        assert config["auto_map"] == expected.config["auto_map"]
        mine = set(expert_names(target, 3, 1).values()) | set(shared_names(target, 3).values())
        assert mine | {router_name(target, 3, "hub")} <= set(expected.tensors)
        return
    found, right = read(tmp_path, config), read(tmp_path, dict(expected.config))
    family = set(AutoConfig.for_model(target.name).to_dict()) - IGNORED
    assert {key: found[key] for key in family} == {key: right[key] for key in family}
    assert router_name(target, 0, "fused") in expected.tensors
    gate = shared_gate_name(target, 0)
    assert gate is None or {gate, *shared_names(target, 0).values()} <= set(expected.tensors)
