"""Mixtures of experts built for real: bytes of experts, equality with the dense model, loading, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import LLAMA_TARGETS, peft_merge, tiny_lora
from kits.checkpoint_maker import read_tensors, tiny_llama
from kits.dense_maker import load_whole, make_dense
from kits.marks import slow_but

import raymerge
from raymerge.options import RunOptions
from raymerge.planner.moe import build

BLOCK = "model.layers.1.block_sparse_moe"
MLP = "model.layers.1.mlp"


Parents = dict[str, Path]


def _built(root: Path, base: Path, experts: list[dict[str, Any]], name: str = "out", **more: Any) -> Path:
    """A mixture with random gates, unless something else is said."""
    data = {"base_model": base, "gate_mode": "random", "experts": experts, **more}
    raymerge.submit(json.loads(json.dumps(data, default=str)), root / name, RunOptions(inline=True))
    return root / name


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Parents:
    root = tmp_path_factory.mktemp("parents")
    base = tiny_llama(root / "base", 0, dtype=torch.float32, scale=0.3)
    made = {n: tiny_llama(root / n, i, base=base, dtype=torch.float32) for i, n in enumerate("abc", 1)}
    return {"base": base, **made}


def _experts(parents: Parents, *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"source_model": parents[name], **more} for name in names]


def _logits(model: Path) -> torch.Tensor:
    loaded, report = load_whole(model)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        logits: torch.Tensor = loaded(tokens).logits
        assert loaded.generate(tokens, max_new_tokens=2, do_sample=False).shape == (2, 14)
    return logits


@pytest.mark.parametrize("layout", slow_but(["hub", "fused"], "hub"))
def test_pieces_of_an_expert_chosen_together_are_the_dense_model(
    tmp_path: Path, parents: Parents, layout: str
) -> None:
    more = {"granularity": 4, "experts_per_token": 1, "layout": layout}
    made = _built(tmp_path, parents["base"], _experts(parents, "base", copies=2), **more)
    torch.testing.assert_close(_logits(made), _logits(parents["base"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("granularity", slow_but([1, 2], 2))
def test_weights_that_do_not_sum_to_1_are_made_up_for_where_the_router_has_no_preferences(
    tmp_path: Path, granularity: int
) -> None:
    dense = make_dense("deepseek_v2", tmp_path / "dense").root
    experts, shared = [{"source_model": dense, "copies": 4}], [{"source_model": dense, "residual_scale": 0}]
    more = {"architecture": "deepseek_v2", "granularity": granularity, "shared_experts": shared}
    made = _built(tmp_path, dense, experts, gate_scale=1e-6, **more)
    torch.testing.assert_close(_logits(made), _logits(dense), rtol=1e-4, atol=1e-4)
    assert json.loads((made / "config.json").read_text())["norm_topk_prob"] is False
    plain = _built(tmp_path, dense, experts, "plain", gate_scale=1e-6, weight_scaling=False, **more)
    assert not torch.allclose(_logits(plain), _logits(dense), rtol=1e-2, atol=1e-2)


def test_columns_are_taken_a_few_rows_at_a_time(
    tmp_path: Path, parents: Parents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_RUN_BYTES", 5 * 64 * 4)
    more = {"granularity": 4, "weight_scaling": False, "dtype": "float32"}
    made = read_tensors(_built(tmp_path, parents["base"], _experts(parents, "a", "b"), **more))
    down = torch.cat([made[f"{BLOCK}.experts.{e}.w2.weight"] for e in range(4, 8)], 1)
    assert torch.equal(down, read_tensors(parents["b"])[f"{MLP}.down_proj.weight"])


def test_shared_experts_lie_side_by_side_with_what_adapters_add(
    tmp_path: Path, parents: Parents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_RUN_BYTES", 5 * 128 * 4)
    base = read_tensors(parents["b"])
    adapter = tiny_lora(tmp_path / "adapter", base, 1)
    models = (f"{parents['b']}+{adapter}", parents["c"])
    shared = [{"source_model": each, "residual_scale": 0.5} for each in models]
    more = {"architecture": "glm4_moe", "shared_experts": shared}
    made = read_tensors(_built(tmp_path, parents["base"], _experts(parents, "a", "b"), **more))
    changed, other = peft_merge(base, adapter), read_tensors(parents["c"])
    name = f"{MLP}.down_proj.weight"
    assert "down_proj" in LLAMA_TARGETS
    assert not torch.equal(changed[name], base[name])
    down = made[f"{MLP}.shared_experts.down_proj.weight"]
    torch.testing.assert_close(down, torch.cat([changed[name].float(), other[name]], 1) / 2)
    up = made[f"{MLP}.shared_experts.up_proj.weight"]
    assert torch.equal(up[64:], other[f"{MLP}.up_proj.weight"])


def test_a_shared_expert_without_more_words_gives_what_transformers_loads(
    tmp_path: Path, parents: Parents
) -> None:
    shared = _experts(parents, "c")
    made = _built(tmp_path, parents["base"], _experts(parents, "a", "b"), shared_experts=shared)
    assert json.loads((made / "config.json").read_text())["model_type"] == "qwen2_moe"
    _logits(made)


def test_the_fused_layout_is_the_hub_layout_stacked_and_another_seed_gives_others(
    tmp_path: Path, parents: Parents
) -> None:
    experts = _experts(parents, "a", "b", noise_scale=0.1, reinit_fraction=0.25)
    hub, fused = (
        read_tensors(_built(tmp_path, parents["base"], experts, each, layout=each))
        for each in ("hub", "fused")
    )
    w = [[hub[f"{BLOCK}.experts.{e}.w{n}.weight"] for n in (1, 3, 2)] for e in range(2)]
    assert torch.equal(fused[f"{MLP}.experts.gate_up_proj"], torch.stack([torch.cat(e[:2]) for e in w]))
    assert torch.equal(fused[f"{MLP}.experts.down_proj"], torch.stack([e[2] for e in w]))
    assert torch.equal(fused[f"{MLP}.gate.weight"], hub[f"{BLOCK}.gate.weight"])
    rest = {name for name in hub if "block_sparse_moe" not in name}
    assert all(torch.equal(hub[name], fused[name]) for name in rest)
    other = read_tensors(_built(tmp_path, parents["base"], experts, "seed", seed=1))
    assert not torch.equal(hub[f"{BLOCK}.gate.weight"], other[f"{BLOCK}.gate.weight"])
    assert not torch.equal(hub[f"{BLOCK}.experts.0.w1.weight"], other[f"{BLOCK}.experts.0.w1.weight"])


def test_noise_scale_and_residual_scale(tmp_path: Path, parents: Parents) -> None:
    experts = _experts(parents, "a", copies=2, noise_scale=0.5, residual_scale=0.25)
    made, one = read_tensors(_built(tmp_path, parents["base"], experts)), read_tensors(parents["a"])
    up = [made[f"{BLOCK}.experts.{e}.w3.weight"] - one[f"{MLP}.up_proj.weight"] for e in range(2)]
    down = made[f"{BLOCK}.experts.0.w2.weight"] / 0.25 - one[f"{MLP}.down_proj.weight"]
    assert all(abs(float(noise.std()) - 0.5) < 0.03 for noise in (*up, down))
    assert not torch.equal(up[0], up[1])


def test_neurons_are_drawn_anew_as_wholes(tmp_path: Path, parents: Parents) -> None:
    experts = _experts(parents, "a", "b", reinit_fraction=0.25)
    made, one = read_tensors(_built(tmp_path, parents["base"], experts)), read_tensors(parents["a"])
    gate = (made[f"{BLOCK}.experts.0.w1.weight"] != one[f"{MLP}.gate_proj.weight"]).any(1)
    up = (made[f"{BLOCK}.experts.0.w3.weight"] != one[f"{MLP}.up_proj.weight"]).any(1)
    down = (made[f"{BLOCK}.experts.0.w2.weight"] != one[f"{MLP}.down_proj.weight"]).any(0)
    assert int(gate.sum()) == 16
    assert torch.equal(gate, up)
    assert torch.equal(gate, down)


def test_a_trunk_is_the_mean_of_the_models(tmp_path: Path, parents: Parents) -> None:
    trunk = {"merge_method": "linear", "parameters": {"weight": 1}}
    made = read_tensors(_built(tmp_path, parents["base"], _experts(parents, "a", "b"), trunk=trunk))
    a, b = (read_tensors(parents[name]) for name in "ab")
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(made[name], (a[name] + b[name]) / 2)
    assert torch.equal(made[f"{BLOCK}.experts.0.w1.weight"], a[f"{MLP}.gate_proj.weight"])


def test_a_merge_of_a_result_may_be_an_expert(tmp_path: Path, parents: Parents) -> None:
    models = [{"model": str(parents[name]), "parameters": {"weight": 1}} for name in "ab"]
    mean = {"name": "mean", "merge_method": "linear", "models": models}
    experts = [{"source_model": "mean"}, {"source_model": str(parents["c"])}]
    built = {"base_model": "mean", "gate_mode": "random", "experts": experts}
    raymerge.submit([mean, built], tmp_path / "out", RunOptions(inline=True))
    a, b = (read_tensors(parents[name]) for name in "ab")
    name = f"{MLP}.up_proj.weight"
    torch.testing.assert_close(
        read_tensors(tmp_path / "out")[f"{BLOCK}.experts.0.w3.weight"], (a[name] + b[name]) / 2
    )
