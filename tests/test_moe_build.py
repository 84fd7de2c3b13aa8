"""Mixtures of experts built for real: bytes of experts, equality with the dense model, loading, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama

import raymerge
from raymerge.errors import PlanError
from raymerge.runtime.options import RunOptions

BLOCK = "model.layers.1.block_sparse_moe"
MLP = "model.layers.1.mlp"


def _submit(root: Path, data: dict[str, Any], name: str = "out") -> Path:
    plain = json.loads(json.dumps(data, default=str))
    raymerge.submit(plain, root / name, RunOptions(inline=True))
    return root / name


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parents")
    base = tiny_llama(root / "base", 0, dtype=torch.float32, scale=0.3)
    made = {n: tiny_llama(root / n, i, base=base, dtype=torch.float32) for i, n in enumerate("abc", 1)}
    return {"base": base, **made}


def _experts(parents: dict[str, Path], *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"source_model": parents[name], **more} for name in names]


def _logits(model: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        model, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits: torch.Tensor = loaded(tokens).logits
        assert loaded.generate(tokens, max_new_tokens=2, do_sample=False).shape == (2, 14)
    return logits


def test_experts_are_the_models_own_bytes(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {"base_model": parents["base"], "gate_mode": "random", "experts": _experts(parents, "a", "b")}
    made, one = read_tensors(_submit(tmp_path, recipe)), read_tensors(parents["b"])
    assert torch.equal(made[f"{BLOCK}.experts.1.w1.weight"], one[f"{MLP}.gate_proj.weight"])
    assert torch.equal(made[f"{BLOCK}.experts.1.w2.weight"], one[f"{MLP}.down_proj.weight"])
    assert torch.equal(made["lm_head.weight"], read_tensors(parents["base"])["lm_head.weight"])
    gate = made[f"{BLOCK}.gate.weight"]
    assert gate.shape == (2, 32)
    assert not torch.equal(gate, made["model.layers.0.block_sparse_moe.gate.weight"])


@pytest.mark.parametrize("architecture", ["mixtral", "granitemoe", "glm4_moe"])
def test_copies_of_a_dense_model_are_that_model(
    tmp_path: Path, parents: dict[str, Path], architecture: str
) -> None:
    recipe: dict[str, Any] = {
        "base_model": parents["base"],
        "gate_mode": "uniform_random",
        "architecture": architecture,
        "experts": _experts(parents, "base", copies=4),
    }
    if architecture == "glm4_moe":
        recipe["shared_experts"] = _experts(parents, "base", residual_scale=0.0)
    made = _submit(tmp_path, recipe)
    torch.testing.assert_close(_logits(made), _logits(parents["base"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_pieces_of_an_expert_chosen_together_are_the_dense_model(
    tmp_path: Path, parents: dict[str, Path], layout: str
) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "granularity": 4,
        "experts_per_token": 1,
        "layout": layout,
        "experts": _experts(parents, "base", copies=2),
    }
    made = _submit(tmp_path, recipe)
    torch.testing.assert_close(_logits(made), _logits(parents["base"]), rtol=1e-4, atol=1e-4)


def test_the_fused_layout_is_the_hub_layout_stacked(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "experts": _experts(parents, "a", "b", noise_scale=0.1, reinit_fraction=0.25),
    }
    hub = read_tensors(_submit(tmp_path, recipe))
    fused = read_tensors(_submit(tmp_path, {**recipe, "layout": "fused"}, "fused"))
    w = [[hub[f"{BLOCK}.experts.{e}.w{n}.weight"] for n in (1, 3, 2)] for e in range(2)]
    assert torch.equal(fused[f"{MLP}.experts.gate_up_proj"], torch.stack([torch.cat(e[:2]) for e in w]))
    assert torch.equal(fused[f"{MLP}.experts.down_proj"], torch.stack([e[2] for e in w]))
    assert torch.equal(fused[f"{MLP}.gate.weight"], hub[f"{BLOCK}.gate.weight"])
    rest = {name for name in hub if "block_sparse_moe" not in name}
    assert all(torch.equal(hub[name], fused[name]) for name in rest)


def test_noise_scale_and_residual_scale(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "experts": _experts(parents, "a", copies=2, noise_scale=0.5, residual_scale=0.25),
    }
    made, one = read_tensors(_submit(tmp_path, recipe)), read_tensors(parents["a"])
    up = [made[f"{BLOCK}.experts.{e}.w3.weight"] - one[f"{MLP}.up_proj.weight"] for e in range(2)]
    down = made[f"{BLOCK}.experts.0.w2.weight"] / 0.25 - one[f"{MLP}.down_proj.weight"]
    assert all(abs(float(noise.std()) - 0.5) < 0.03 for noise in (*up, down))
    assert not torch.equal(up[0], up[1])


def test_neurons_are_drawn_anew_as_wholes(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "experts": _experts(parents, "a", "b", reinit_fraction=0.25),
    }
    made, one = read_tensors(_submit(tmp_path, recipe)), read_tensors(parents["a"])
    gate = (made[f"{BLOCK}.experts.0.w1.weight"] != one[f"{MLP}.gate_proj.weight"]).any(1)
    up = (made[f"{BLOCK}.experts.0.w3.weight"] != one[f"{MLP}.up_proj.weight"]).any(1)
    down = (made[f"{BLOCK}.experts.0.w2.weight"] != one[f"{MLP}.down_proj.weight"]).any(0)
    assert int(gate.sum()) == 16
    assert torch.equal(gate, up)
    assert torch.equal(gate, down)


def test_the_seven_and_one_qwen2_of_random_gates(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "architecture": "qwen",
        "experts": _experts(parents, "a", "b", "c", "a", "b", "c", "a"),
        "shared_experts": _experts(parents, "base", residual_scale=0.1),
    }
    made = _submit(tmp_path / "absent" / "deeper", recipe)
    tensors = read_tensors(made)
    assert tensors[f"{MLP}.shared_expert_gate.weight"].shape == (1, 32)
    assert tensors[f"{MLP}.gate.weight"].shape == (7, 32)
    assert not tensors["model.layers.0.self_attn.v_proj.bias"].any()
    _logits(made)


def test_a_trunk_is_the_mean_of_the_models(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "trunk": {"merge_method": "linear", "parameters": {"weight": 1}},
        "experts": _experts(parents, "a", "b"),
    }
    made = read_tensors(_submit(tmp_path, recipe))
    a, b = (read_tensors(parents[name]) for name in "ab")
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(made[name], (a[name] + b[name]) / 2)
    assert torch.equal(made[f"{BLOCK}.experts.0.w1.weight"], a[f"{MLP}.gate_proj.weight"])


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(
    tmp_path: Path, parents: dict[str, Path]
) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "experts": _experts(parents, "a", "b", noise_scale=0.1),
    }
    first, again = (read_tensors(_submit(tmp_path, recipe, name)) for name in ("one", "two"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = read_tensors(_submit(tmp_path, {**recipe, "seed": 1}, "three"))
    assert not torch.equal(first[f"{BLOCK}.gate.weight"], other[f"{BLOCK}.gate.weight"])
    assert not torch.equal(first[f"{BLOCK}.experts.0.w1.weight"], other[f"{BLOCK}.experts.0.w1.weight"])


def test_steps_are_removed_and_the_report_is_kept(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {"base_model": parents["base"], "gate_mode": "random", "experts": _experts(parents, "a", "b")}
    made = _submit(tmp_path, recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list((made / "raymerge").rglob("*router*"))


def test_a_merge_of_a_result_may_be_an_expert(tmp_path: Path, parents: dict[str, Path]) -> None:
    models = [{"model": str(parents[name]), "parameters": {"weight": 1}} for name in "ab"]
    mean = {"name": "mean", "merge_method": "linear", "models": models}
    built = {
        "base_model": "mean",
        "gate_mode": "random",
        "experts": [{"source_model": "mean"}, {"source_model": str(parents["c"])}],
    }
    raymerge.submit([mean, built], tmp_path / "out", RunOptions(inline=True))
    a, b = (read_tensors(parents[name]) for name in "ab")
    name = f"{MLP}.up_proj.weight"
    torch.testing.assert_close(
        read_tensors(tmp_path / "out")[f"{BLOCK}.experts.0.w3.weight"], (a[name] + b[name]) / 2
    )


def test_no_family_is_an_error_before_anything_is_written(tmp_path: Path, parents: dict[str, Path]) -> None:
    recipe = {
        "base_model": parents["base"],
        "gate_mode": "random",
        "architecture": "qwen3",
        "experts": _experts(parents, "a", "b"),
    }
    with pytest.raises(PlanError, match="Qwen3-MoE"):
        _submit(tmp_path, recipe)
    assert not list(tmp_path.iterdir())
