"""Mixtures of experts made dense: loaded strictly, and equal to the mixture that weighs all experts alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kits.checkpoint_maker import read_tensors
from kits.expert_models import save, sparse, submitted
from kits.model_types import ModelType
from kits.plan_maker import refusals
from kits.silence import small_and_silent  # noqa: F401

FAMILIES = {
    "mixtral": "MistralForCausalLM",
    "qwen2_moe": "Qwen2ForCausalLM",
    "qwen3_moe": "Qwen3ForCausalLM",
    "granitemoe": "GraniteForCausalLM",
    "flex_olmo": "Olmo2ForCausalLM",
}


def _saved(root: Path, kind: ModelType, *, fused: bool = False, **changes: Any) -> torch.nn.Module:
    """A mixture whose router gives every expert the same, and whose shared experts' gates give a half."""
    model = kind.build(1, num_experts_per_tok=4, **changes)
    for name, tensor in model.state_dict().items():
        if name.endswith((".gate.weight", "router.weight", "shared_expert_gate.weight")):
            tensor.zero_()
    return save(model, root / "base", fused=fused)


def _loaded(name: str, root: Path) -> torch.nn.Module:
    model, info = getattr(transformers, FAMILIES[name]).from_pretrained(root, output_loading_info=True)
    assert not any(info.values()), info
    found: torch.nn.Module = model.eval()
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "fused"), [(name, bool(n % 2)) for n, name in enumerate(FAMILIES)])
def test_experts_side_by_side_are_the_mixture(name: str, fused: bool, tmp_path: Path) -> None:
    kind = sparse(name)
    more = {"norm_topk_prob": True} if "norm_topk_prob" in dir(kind.build(0).config) else {}
    model = _saved(tmp_path, kind, fused=fused, **more)
    dense = _loaded(name, submitted(tmp_path, "out", {"dense": "concatenated"}))
    torch.testing.assert_close(kind.run(dense), kind.run(model), rtol=1e-5, atol=1e-5)
    ids = kind.inputs()["input_ids"]
    assert dense.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2  # type: ignore[operator]


Take = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "fused", "change", "take"),
    [
        ("mixtral", False, {"dense": 2}, lambda experts: experts[2]),
        ("qwen2_moe", True, {"dense": 2}, lambda experts: experts[2]),
        ("mixtral", True, {"dense": "mean"}, lambda experts: experts.mean(0)),
        ("qwen2_moe", False, {"dense": "mean", "of": [3, 1]}, lambda experts: experts[[3, 1]].mean(0)),
    ],
)
def test_one_or_the_mean_of_several(
    name: str, fused: bool, change: Mapping[str, Any], take: Take, tmp_path: Path
) -> None:
    kind = sparse(name)
    state = _saved(tmp_path, kind, fused=fused).state_dict()
    made = _loaded(name, submitted(tmp_path, "out", change)).state_dict()
    for layer in range(3):
        block = f"model.layers.{layer}.mlp"
        gate, up = state[f"{block}.experts.gate_up_proj"].chunk(2, dim=1)
        expected = {"gate": take(gate), "up": take(up), "down": take(state[f"{block}.experts.down_proj"])}
        if name == "qwen2_moe":
            shared = {p: state[f"{block}.shared_expert.{p}_proj.weight"] for p in expected}
            shared["up"] = shared["up"] / 2
            expected = {p: torch.cat([expected[p], shared[p]], dim=int(p == "down")) for p in expected}
        for projection, tensor in expected.items():
            torch.testing.assert_close(made[f"{block}.{projection}_proj.weight"], tensor)


def test_wide_layers_are_made_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = sparse("qwen2_moe")
    _saved(tmp_path, kind)
    whole = read_tensors(submitted(tmp_path, "whole", {"dense": "concatenated"}))
    monkeypatch.setattr("raymerge.planner.moe.expert_outputs._RUN_ELEMENTS", 700)
    cut = read_tensors(submitted(tmp_path, "cut", {"dense": "concatenated"}))
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())
    mean = read_tensors(submitted(tmp_path, "mean", {"dense": "mean", "of": [0, 1]}))
    state = read_tensors(tmp_path / "base")
    name = "model.layers.1.mlp.{}.down_proj.weight"
    experts = [state[name.format(f"experts.{e}")] for e in (0, 1)]
    both = torch.cat([(experts[0] + experts[1]) / 2, state[name.format("shared_expert")]], dim=1)
    torch.testing.assert_close(mean["model.layers.1.mlp.down_proj.weight"], both)


def test_dense_layers_between_must_be_as_wide(tmp_path: Path) -> None:
    kind = sparse("qwen3_moe")
    _saved(tmp_path, kind, mlp_only_layers=[1], moe_intermediate_size=12)
    # Dense layers are 48 wide: four experts of 12 side by side.
    data: dict[str, Any] = {"base_model": tmp_path / "base", "experts": {"dense": "concatenated"}}
    assert refusals(data) == []
    _loaded("qwen3_moe", submitted(tmp_path, "out", data["experts"]))
    (problem,) = refusals({**data, "experts": {"dense": 0}})
    assert "model.layers.1.mlp.gate_proj.weight is 48 wide" in problem
    assert "become 12 wide" in problem


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "olmoe", "dbrx"])
def test_families_without_a_dense_one_are_refused(name: str, tmp_path: Path) -> None:
    save(sparse(name).build(1), tmp_path / "base")
    (problem,) = refusals({"base_model": tmp_path / "base", "experts": {"dense": "mean"}})
    assert f"'{name}'" in problem
    assert "mixtral, qwen2_moe" in problem


def test_what_becomes_of_every_tensor(tmp_path: Path) -> None:
    kind = sparse("qwen2_moe")
    _saved(tmp_path, kind)
    out = submitted(tmp_path, "out", {"dense": 1})
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert not {key for key in config if "expert" in key or "router" in key or "moe" in key}
