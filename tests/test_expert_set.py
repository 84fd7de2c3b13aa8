"""The experts of real layouts changed end to end: loaded strictly, equal to the edit done in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import lora_config, write_adapter
from kits.checkpoint_maker import read_tensors
from kits.expert_models import (
    averaged,
    is_of_experts,
    picked,
    same_experts,
    save,
    sparse,
    submitted,
    write_model,
)
from kits.marks import one_in
from kits.model_types import ModelType
from kits.model_types_decoders import SPARSE
from kits.silence import small_and_silent  # noqa: F401
from safetensors.torch import save_file

from raymerge.api import submit
from raymerge.errors import PlanError
from raymerge.options import RunOptions


def _loaded(kind: ModelType, root: Path) -> torch.nn.Module:
    model, info = kind.load(root)
    assert not any(info.values()), info
    return model


def _like(model: torch.nn.Module) -> torch.nn.Module:
    return type(model)(model.config)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", one_in(3, SPARSE), ids=lambda kind: kind.name)
def test_experts_of_every_family_are_kept_and_merged(kind: ModelType, tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", kind, 1)
    assert any(is_of_experts(name, tensor) for name, tensor in model.state_dict().items())

    kept = _loaded(kind, submitted(tmp_path, "kept", {"keep": [3, 0, 2]}))
    expected = same_experts(model, picked(3, 0, 2), into=_like(kept))
    assert torch.equal(kind.run(kept), kind.run(expected))
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in kept.state_dict().items())

    merged = _loaded(kind, submitted(tmp_path, "merged", {"merge": [[0, 2], [3, 1]]}))
    means = same_experts(model, averaged({0: 1, 2: 1}, {1: 1, 3: 1}), into=_like(merged))
    torch.testing.assert_close(kind.run(merged), kind.run(means), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(kind.run(merged), kind.run(model), atol=1e-3)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_mean_is_weighted_by_scores(name: str, tmp_path: Path) -> None:
    kind = sparse(name)
    model = write_model(tmp_path / "base", kind, 1)
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({str(layer): [1, 2.5, 3, 0.5] for layer in range(3)}))
    change = {"merge": [[2, 0], [1, 3]], "scores": str(scores)}
    merged = _loaded(kind, submitted(tmp_path, "out", change))
    means = same_experts(model, averaged({2: 3, 0: 1}, {1: 2.5, 3: 0.5}), into=_like(merged))
    torch.testing.assert_close(kind.run(merged), kind.run(means), rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe", "dbrx", "deepseek_v3", "ernie4_5_moe"])
def test_experts_are_added_in_other_layouts(name: str, tmp_path: Path) -> None:
    kind = sparse(name)
    mine, theirs = (write_model(tmp_path / role, kind, seed) for seed, role in enumerate(("base", "other")))
    change = {"add": [{"model": str(tmp_path / "other"), "experts": [1, 3], "row_of": 2}]}
    made = _loaded(kind, submitted(tmp_path, "out", change))
    others = theirs.state_dict()
    state = {}
    for key, tensor in mine.state_dict().items():
        if not is_of_experts(key, tensor):
            state[key] = tensor
            continue
        rows = tensor.view(4, -1) if tensor.shape != (1, 4) else tensor.view(4, 1)
        is_expert = ".experts." in key or "_linear." in key
        more = others[key].view(rows.shape)[[1, 3]] if is_expert else rows[[2, 2]]
        wanted = made.state_dict()[key].shape
        state[key] = torch.cat([rows, more]).view(wanted)
    expected = _like(made)
    expected.load_state_dict(state, strict=True)
    assert torch.equal(kind.run(made), kind.run(expected.eval()))


def _with_prediction(root: Path, kind: ModelType, **changes: Any) -> torch.nn.Module:
    """A bf16 checkpoint with biases in float32, and one more layer that predicts a further token."""
    model = save(kind.build(1, **changes), root)
    stored = read_tensors(root)
    last = {k.replace("layers.2.", "layers.3."): v + 1 for k, v in stored.items() if ".layers.2." in k}
    last |= {f"model.layers.3.{n}.weight": torch.ones(32) for n in ("enorm", "hnorm", "shared_head.norm")}
    tensors = {**stored, **last, "model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    tensors = {k: v.float() if "bias" in k else v.bfloat16() for k, v in tensors.items()}
    save_file(tensors, root / "model.safetensors")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(
        json.dumps({**config, "num_nextn_predict_layers": 1, "dtype": "bfloat16"})
    )
    return model


def test_prediction_layers_biases_and_groups_follow(tmp_path: Path) -> None:
    kind = sparse("deepseek_v3")
    _with_prediction(tmp_path / "base", kind, n_routed_experts=8, n_group=2, topk_group=1)
    scores = {"1": [8, 1, 7, 6, 5, 4, 3, 2], "2": [1] * 8, "3": [1, 2, 3, 4, 9, 8, 7, 6.5]}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    out = submitted(tmp_path, "out", {"drop": 2, "scores": str(tmp_path / "scores.json")})
    made, base = read_tensors(out), read_tensors(tmp_path / "base")
    # Of each group of four one goes; of equal scores that with the higher number.
    left = {1: [0, 2, 3, 4, 5, 6], 2: [0, 1, 2, 4, 5, 6], 3: [1, 2, 3, 4, 5, 6]}
    for layer, ids in left.items():
        block = f"model.layers.{layer}.mlp"
        for name in ("gate.weight", "gate.e_score_correction_bias"):
            assert torch.equal(made[f"{block}.{name}"], base[f"{block}.{name}"][ids])
            assert made[f"{block}.{name}"].dtype == base[f"{block}.{name}"].dtype
        assert made[f"{block}.gate.e_score_correction_bias"].dtype is torch.float32
        for new, old in enumerate(ids):
            name = "experts.{}.down_proj.weight"
            assert torch.equal(made[f"{block}.{name.format(new)}"], base[f"{block}.{name.format(old)}"])
        assert f"{block}.experts.6.up_proj.weight" not in made
        shared = f"{block}.shared_experts.up_proj.weight"
        assert torch.equal(made[shared], base[shared])
    assert torch.equal(made["model.layers.3.eh_proj.weight"], base["model.layers.3.eh_proj.weight"])
    config = json.loads((out / "config.json").read_text())
    assert (config["n_routed_experts"], config["num_nextn_predict_layers"]) == (6, 1)
    kind.run(kind.load(out)[0])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_scores_from_weights_drop_the_smallest(name: str, tmp_path: Path) -> None:
    kind = sparse(name)
    model = kind.build(1)
    sizes = [0.5, 2.0, 0.1, 1.0]
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if is_of_experts(key, tensor) and (".experts." in key or "_linear." in key):
                tensor.view(4, -1).mul_(torch.tensor(sizes)[:, None])
    save(model, tmp_path / "base")
    made = _loaded(kind, submitted(tmp_path, "out", {"drop": 2, "scores": "weights"}))
    expected = same_experts(model, picked(1, 3), into=_like(made))
    assert torch.equal(kind.run(made), kind.run(expected))


def test_the_result_of_a_merge_can_be_changed(tmp_path: Path) -> None:
    kind = sparse("mixtral")
    model = write_model(tmp_path / "base", kind, 1)
    merge = {
        "name": "merged",
        "merge_method": "linear",
        "models": [{"model": str(tmp_path / "base"), "parameters": {"weight": 1}}],
    }
    change: dict[str, Any] = {"base_model": "merged", "experts": {"keep": [2, 1]}}
    submit([merge, change], tmp_path / "out", RunOptions(inline=True))
    made = _loaded(kind, tmp_path / "out")
    assert torch.equal(kind.run(made), kind.run(same_experts(model, picked(2, 1), into=_like(made))))
    change["experts"] = {"drop": 1, "scores": "weights"}
    with pytest.raises(PlanError, match="this model is not made yet"):
        submit([merge, change], tmp_path / "other", RunOptions(inline=True))


def test_another_dtype_leaves_biases_of_the_selection(tmp_path: Path) -> None:
    kind = sparse("deepseek_v3")
    write_model(tmp_path / "base", kind, 1)
    made = read_tensors(submitted(tmp_path, "out", {"keep": [0, 1, 3]}, dtype="bfloat16"))
    dtypes = {"bias" in name: tensor.dtype for name, tensor in made.items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_expert_in_another_dtype_loses_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "base", sparse("mixtral"), 1)
    whole, name = read_tensors(tmp_path / "base"), "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    stored = {key: tensor if key == name.format(2) else tensor.bfloat16() for key, tensor in whole.items()}
    save_file(stored, tmp_path / "base" / "model.safetensors")
    for out, change in (("kept", {"keep": [1, 2]}), ("merged", {"merge": [[1], [2], [0, 3]]})):
        made = read_tensors(submitted(tmp_path, out, change))
        assert made[name.format(1)].dtype is torch.float32
        assert torch.equal(made[name.format(1)], stored[name.format(2)])
        assert made[name.format(0)].dtype is torch.bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_what_an_adapter_adds_goes_with_its_expert(fused: bool, tmp_path: Path) -> None:
    kind = sparse("mixtral")
    save(kind.build(1), tmp_path / "model", fused=fused)
    stored = read_tensors(tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    factors: dict[str, torch.Tensor] = {}
    modules = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.block_sparse_moe.gate": (4, 32)}
    if not fused:
        modules["model.layers.1.block_sparse_moe.experts.3.w2"] = (32, 48)
    else:
        modules = {name.replace("block_sparse_moe", "mlp"): shape for name, shape in modules.items()}
    deltas = {}
    for module, (rows, columns) in modules.items():
        down, up = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
        factors |= {
            f"base_model.model.{module}.lora_A.weight": down,
            f"base_model.model.{module}.lora_B.weight": up,
        }
        deltas[f"{module}.weight"] = 2 * up @ down
    write_adapter(
        tmp_path / "adapter", factors, lora_config(target_modules=[m.split(".")[-1] for m in modules])
    )
    both = f"{tmp_path / 'model'}+{tmp_path / 'adapter'}"
    change = {"keep": [3, 1]}
    made = read_tensors(submitted(tmp_path, "out", change, base_model=both))
    merged = {name: tensor + deltas.get(name, 0) for name, tensor in stored.items()}
    save_file(merged, tmp_path / "model" / "model.safetensors")
    whole = read_tensors(submitted(tmp_path, "whole", change, base_model=str(tmp_path / "model")))
    assert made.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(made[name], tensor, rtol=1e-5, atol=1e-5)
