"""Mixtures of experts built from dense models, as they are planned: names, fates, sizes, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import llama_config, llama_shapes, write_checkpoint
from kits.plan_maker import Planned, header_checkpoint, llama, planned_merge

from raymerge.dtypes import DType
from raymerge.errors import PlanError
from raymerge.planner.inputs.sources import GateSpec, holdings


def _good(root: Path, data: dict[str, Any]) -> Planned:
    made = planned_merge(root, data)
    made.plan.require()
    held = enumerate(holdings(made.sources))
    assert made.fates() == {(index, name) for index, holding in held for name in holding.tensors}
    return made


def _refusals(root: Path, data: dict[str, Any]) -> list[str]:
    try:
        return [str(problem) for problem in planned_merge(root, data).plan.problems]
    except PlanError as error:
        return [str(problem) for problem in error.problems]


def _mixture(root: Path, **more: Any) -> dict[str, Any]:
    base, one, two = (llama(root / name) for name in ("base", "one", "two"))
    experts = [{"source_model": one}, {"source_model": two}]
    return {"base_model": base, "gate_mode": "random", "experts": experts, **more}


def test_a_mixture_of_two_llamas_is_a_mixtral(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path))
    block = "model.layers.1.block_sparse_moe"
    assert made.reads(f"{block}.experts.1.w1.weight") == [(2, "model.layers.1.mlp.gate_proj.weight")]
    assert made.reads(f"{block}.experts.0.w2.weight") == [(1, "model.layers.1.mlp.down_proj.weight")]
    assert made.reads(f"{block}.experts.0.w3.weight") == [(1, "model.layers.1.mlp.up_proj.weight")]
    assert made.reads(f"{block}.gate.weight") == [(3, "router.1")]
    assert made.dtype(f"{block}.gate.weight") == "BF16"
    assert made.reads("model.layers.1.self_attn.q_proj.weight") == [
        (0, "model.layers.1.self_attn.q_proj.weight")
    ]
    assert not any(".mlp." in name for name in made.names())
    assert made.config["model_type"] == "mixtral"
    assert (made.config["num_local_experts"], made.config["num_experts_per_tok"]) == (2, 2)
    assert made.method(f"{block}.experts.1.w1.weight") == "copy"


def test_every_source_tensor_has_its_reason(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path))
    up = "model.layers.0.mlp.up_proj.weight"
    assert made.fate(1, up) == ("copied", "expert", "model.layers.0.block_sparse_moe.experts.0.w3.weight")
    assert made.fate(0, up)[:2] == ("dropped", "replaced_by_experts")
    assert made.fate(2, "model.layers.0.self_attn.q_proj.weight")[:2] == ("dropped", "only_experts_taken")
    assert made.fate(0, "lm_head.weight")[0] == "copied"
    assert made.fate(3, "router.0")[:2] == ("converted", "stage")


def test_copies_are_read_once_and_written_each(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    data["experts"] = [{"source_model": data["base_model"], "copies": 8, "residual_scale": 0.5}]
    made = _good(tmp_path, data)
    rows = made.plan["rows"].to_pylist()
    name = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    (first,) = made.rows(name.format(0))
    assert first["copy_of"] == -1
    for expert in range(1, 8):
        (row,) = made.rows(name.format(expert))
        assert rows[row["copy_of"]] == first
    assert made.settings(name.format(0))["sources"] == [{"scale": 0.5}]
    assert made.plan["tensors"].num_rows == 3 + 3 * 6 + 3 * 3 * 8 + 3


def test_noise_and_neurons_drawn_anew_differ_from_copy_to_copy(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    data["experts"] = [{"source_model": data["base_model"], "copies": 2, "reinit_fraction": 0.5}]
    made = _good(tmp_path, data)
    keys: dict[int, set[float]] = {}
    for expert in range(2):
        for projection in ("w1", "w2", "w3"):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{projection}.weight"
            (said,) = made.settings(name)["sources"]
            assert made.method(name) == "upcycle"
            assert said["neuron_axis"] == (1 if projection == "w2" else 0)
            keys.setdefault(expert, set()).add(said["neuron_key"])
    assert all(len(each) == 1 for each in keys.values())
    assert keys[0] != keys[1]


def test_granularity_cuts_neurons_and_repeats_router_rows(tmp_path: Path) -> None:
    made = _good(tmp_path, _mixture(tmp_path, granularity=2, experts_per_token=1))
    block = "model.layers.0.block_sparse_moe"
    shapes = dict(zip(made.names(), made.plan["tensors"].column("shape").to_pylist(), strict=True))
    assert shapes[f"{block}.experts.3.w1.weight"] == [32, 32]
    assert shapes[f"{block}.experts.3.w2.weight"] == [32, 32]
    assert shapes[f"{block}.gate.weight"] == [4, 32]
    assert made.config["intermediate_size"] == 32
    assert (made.config["num_local_experts"], made.config["num_experts_per_tok"]) == (4, 2)
    assert made.settings(f"{block}.experts.3.w2.weight")["sources"] == [{"scale": 2.0}]
    assert made.method(f"{block}.experts.1.w1.weight") == "copy"


def test_a_shared_expert_may_be_a_model_that_is_nothing_else(tmp_path: Path) -> None:
    data = _mixture(tmp_path, architecture="qwen")
    other = llama(tmp_path / "other")
    data["shared_experts"] = [{"source_model": other, "residual_scale": 0.1}]
    made = _good(tmp_path, data)
    block = "model.layers.0.mlp"
    shapes = dict(zip(made.names(), made.plan["tensors"].column("shape").to_pylist(), strict=True))
    assert made.reads(f"{block}.shared_expert.up_proj.weight") == [(3, "model.layers.0.mlp.up_proj.weight")]
    assert shapes[f"{block}.shared_expert_gate.weight"] == [1, 32]
    assert shapes[f"{block}.gate.weight"] == [2, 32]
    assert shapes["model.layers.0.self_attn.q_proj.bias"] == [32]
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == [16]


def test_models_that_fit_no_family_are_refused_family_by_family(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    wide = header_checkpoint(
        tmp_path / "wide",
        {name: (DType.BF16, shape) for name, shape in llama_shapes(llama_config(hidden=64)).items()},
        llama_config(hidden=64),
    )
    data["experts"][1]["source_model"] = wide
    (told,) = _refusals(tmp_path, data)
    assert "no family" in told
    assert "wide" in told
    assert "64" in told
    data["experts"][1]["source_model"] = data["base_model"]
    data["shared_experts"] = [{"source_model": data["base_model"], "copies": 1}] * 2
    data["architecture"] = "q"
    found = _refusals(tmp_path, data)
    assert any(each.count("Qwen2-MoE") and "2 shared experts" in each for each in found)
    assert any("Qwen3-MoE" in each for each in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "mixtrall"}, "mixtrall"),
        ({"architecture": "qwen"}, "shared"),
        ({"granularity": 3}, "64"),
    ],
)
def test_what_cannot_be_built_says_why(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert any(words in each for each in _refusals(tmp_path, {**_mixture(tmp_path), **change}))


def test_prompt_files_that_cannot_be_read_are_all_told(tmp_path: Path) -> None:
    data = _mixture(tmp_path, gate_mode="ridge")
    (tmp_path / "empty.txt").write_text(" \n")
    data["experts"][0]["prompt_file"] = tmp_path / "absent.txt"
    data["experts"][1]["prompt_file"] = tmp_path / "empty.txt"
    found = _refusals(tmp_path, data)
    assert any("absent.txt cannot be read" in each for each in found)
    assert any("empty.txt is empty" in each for each in found)


@pytest.mark.parametrize("file", ["~nobody-of-that-name/x.txt"])
def test_a_prompt_file_of_nobodys_home_is_a_problem(tmp_path: Path, file: str) -> None:
    data = _mixture(tmp_path, gate_mode="ridge")
    data["experts"][0]["prompt_file"] = file
    data["experts"][1]["positive_prompts"] = ["text"]
    (found,) = _refusals(tmp_path, data)
    assert f"{file} cannot be read" in found


def test_prompts_change_the_plan_and_not_its_shape(tmp_path: Path) -> None:
    data = _mixture(tmp_path, gate_mode="hidden")
    for number, expert in enumerate(data["experts"]):
        expert["positive_prompts"] = [f"text {number}"]
    first = _good(tmp_path, data)
    data["experts"][0]["positive_prompts"] = ["other text"]
    second = _good(tmp_path, data)
    assert first.plan.digest != second.plan.digest
    assert first.plan["tensors"] == second.plan["tensors"]


def test_mixed_dtypes_are_written_in_the_bases(tmp_path: Path) -> None:
    data = _mixture(tmp_path)
    config = llama_config(dtype=torch.float32)
    tensors = {name: torch.zeros(shape) for name, shape in llama_shapes(config).items()}
    data["experts"][0]["source_model"] = write_checkpoint(tmp_path / "wide", tensors, config)
    made = _good(tmp_path, data)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert (made.dtype(name), made.method(name)) == ("BF16", "passthrough")
    assert made.fate(1, "model.layers.0.mlp.gate_proj.weight")[0] == "converted"


def _qwen2(root: Path, said: dict[str, Any]) -> Path:
    shapes = llama_shapes(llama_config())
    biases = {
        f"model.layers.{n}.self_attn.{p}_proj.bias": (32 if p == "q" else 16,)
        for n in range(3)
        for p in "qkv"
    }
    config = {**llama_config(), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    header_checkpoint(root, {n: (DType.BF16, s) for n, s in {**shapes, **biases}.items()}, config)
    (root / "tokenizer_config.json").write_text(json.dumps(said))
    return root


@pytest.mark.parametrize("said", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", None])
def test_a_tokenizer_is_loaded_as_that_of_the_base(tmp_path: Path, said: str | None) -> None:
    base = _qwen2(tmp_path / "base", {"pad_token": "é", **({"tokenizer_class": said} if said else {})})
    data = {"base_model": base, "gate_mode": "random", "experts": [{"source_model": base, "copies": 2}]}
    made = _good(tmp_path, {**data, "architecture": "qwen2_moe", "shared_experts": [{"source_model": base}]})
    files = {row["name"]: json.loads(row["content"]) for row in made.plan["files"].to_pylist()}
    if said == "PreTrainedTokenizerFast":
        assert files == {"tokenizer_config.json": {"pad_token": "é", "tokenizer_class": "Qwen2Tokenizer"}}
        assert any("names Qwen2Tokenizer" in note for note in made.plan.manifest["notes"])
    else:
        assert not files


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
def test_a_stage_is_another_one_where_the_tokenizer_or_the_config_is(tmp_path: Path, file: str) -> None:
    data = _mixture(tmp_path)
    place = tmp_path / "base" / file
    place.write_text(place.read_text() if place.exists() else "{}")
    before = _good(tmp_path, data).sources[0].prepared[0].stage.digest
    changed = json.loads(place.read_text()) | {"rms_norm_eps": 0.5}
    place.write_text(json.dumps(changed))
    assert _good(tmp_path, data).sources[0].prepared[0].stage.digest != before


def test_a_prompt_file_is_an_ordinary_file_and_its_mark_no_text(tmp_path: Path) -> None:
    data = _mixture(tmp_path, gate_mode="ridge")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfsome text")
    data["experts"][0]["prompt_file"] = tmp_path / "marked.txt"
    for file in ("/dev/zero", "."):
        data["experts"][1]["prompt_file"] = file
        assert any(f"{file} is no ordinary file" in each for each in _refusals(tmp_path, data))
    (tmp_path / "plain.txt").write_text("other text")
    data["experts"][1]["prompt_file"] = tmp_path / "plain.txt"
    spec = _good(tmp_path, data).sources[0].prepared[0].stage.spec
    assert isinstance(spec, GateSpec)
    assert [each.text for each in spec.experts] == ["some text", "other text"]
