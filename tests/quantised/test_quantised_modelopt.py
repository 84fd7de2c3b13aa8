"""Merges of ModelOpt's checkpoints, in and out, and what their two tables say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import (
    TOKENIZER_FILES,
    llama_config,
    llama_shapes,
    read_config,
    read_tensors,
    write_checkpoint,
)
from kits.float64_merges import linear
from kits.merge_cases import INLINE, merge
from kits.quantised_merges import (
    changed_bytes,
    check_merged,
    check_stored_alike,
    entries,
    merged_values,
    plain_twin,
)
from kits.quantised_models import QuantisedModel, three_formats
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model
from kits.recipe_maker import piece, stack
from kits.tensor_scaled_models import modelopt_llama

from raymerge.api import AuditOptions, audit, plan, verify
from raymerge.checkpoints.source import open_checkpoint

BESIDE = "hf_quant_config.json"


def _beside(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / BESIDE).read_text())
    return found


def _table(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_config(root)["quantization_config"]
    return found


def _check_in_and_out(parents: list[QuantisedModel], tmp_path: Path) -> None:
    """Parts of one and the other, within half a step of the merge in float64, and a model as it was."""
    merge({"merge_method": "linear", "models": entries(parents, (0.3, 0.7))}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents, linear(0.3, 0.7)), parents)
    assert verify(tmp_path / "out").problems == ()
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems
    merge(mean_of(parents[1].root, parents[1].root), tmp_path / "same")
    assert changed_bytes(tmp_path / "same", parents[1].root) == set()


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "MXFP8"])
def test_modelopts_formats_come_out_as_they_went_in(algorithm: str, tmp_path: Path) -> None:
    parents = [modelopt_llama(tmp_path / name, seed, algorithm) for seed, name in enumerate("ab")]
    _check_in_and_out(parents, tmp_path)
    for name in ("config.json", BESIDE):
        assert (tmp_path / "out" / name).read_bytes() == (parents[0].root / name).read_bytes()
    inputs = {name for name in read_tensors(parents[0].root) if name.endswith(".input_scale")}
    stored = [read_tensors(each) for each in (tmp_path / "out", *(parent.root for parent in parents))]
    assert bool(inputs) == (algorithm != "MXFP8")
    assert all(stored[0][name] == max(stored[1][name], stored[2][name]) for name in inputs)


def test_scales_of_inputs_of_another_format_do_not_count(tmp_path: Path) -> None:
    """NVFP4 divides the largest input by 2688, and FP8 by 448."""
    forms = [("a", "NVFP4"), ("b", "FP8"), ("c", "NVFP4")]
    a, b, c = (modelopt_llama(tmp_path / name, seed, form).root for seed, (name, form) in enumerate(forms))
    for models, same in (((a, b, c), (a, c)), ((b, a, c), (b,))):
        out = tmp_path / f"of_{models[0].name}"
        merge(mean_of(*models), out)
        alike, found = [read_tensors(each) for each in same], read_tensors(out)
        scales = [name for name in found if name.endswith(".input_scale")]
        assert scales
        assert all(found[name] == max(each[name] for each in alike) for name in scales)


@pytest.mark.slow
def test_three_formats_of_one_checkpoint_come_out_as_they_went_in(tmp_path: Path) -> None:
    parents = [three_formats(tmp_path / name, seed) for seed, name in enumerate("ab")]
    _check_in_and_out(parents, tmp_path)
    assert (tmp_path / "out" / "config.json").read_bytes() == (parents[0].root / "config.json").read_bytes()


def test_joined_matrices_of_nvfp4_have_one_factor(tmp_path: Path) -> None:
    """Servers take that of the gate for both halves."""
    parents = [modelopt_llama(tmp_path / name, seed, "NVFP4") for seed, name in enumerate("ab")]
    recipe = {"merge_method": "linear", "models": entries(parents, (1, 1))}
    rule = {"filter": "gate_proj", "parameters": {"weight": 40.0, "normalize": False}}
    merge({**recipe, "methods": [rule]}, tmp_path / "out")
    stored, before = read_tensors(tmp_path / "out"), read_tensors(parents[0].root)
    gate, up, down = (f"model.layers.0.mlp.{word}_proj.weight_scale_2" for word in ("gate", "up", "down"))
    assert stored[gate] == stored[up] == before[gate] * 256
    assert stored[down] == before[down]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    return plain_twin(modelopt_llama(root / "a", 1, "MXFP8"), root / "plain").root


Q = "model.layers.0.self_attn.q_proj"
FRESH: Mapping[str, tuple[dict[str, Any], dict[str, torch.dtype]]] = {
    "mxfp8": (
        {"quant_algo": "MXFP8", "group_size": 32},
        {"weight": torch.float8_e4m3fn, "weight_scale": torch.uint8},
    ),
    "nvfp4_modelopt": (
        {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32},
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FRESH)
def test_plain_numbers_become_modelopts_formats(form: str, plain: Path, tmp_path: Path) -> None:
    merge(one_model(plain, out_format=form), tmp_path / "out")
    table, parts = FRESH[form]
    expected = {**table, "quant_method": "modelopt", "kv_cache_scheme": None}
    assert {key: value for key, value in _table(tmp_path / "out").items() if key != "ignore"} == expected
    stored = {name: each for name, each in read_tensors(tmp_path / "out").items() if name.startswith(f"{Q}.")}
    assert {name.removeprefix(f"{Q}."): each.dtype for name, each in stored.items()} == parts
    assert "lm_head" in _table(tmp_path / "out")["ignore"]
    merge(mean_of(tmp_path / "out", tmp_path / "out"), tmp_path / "again")
    assert changed_bytes(tmp_path / "again", tmp_path / "out") == set()


def test_two_of_modelopts_formats_are_listed_by_module(plain: Path, tmp_path: Path) -> None:
    merge(
        one_model(plain, out_format=[{"role": "mlp", "value": "nvfp4_modelopt"}, "mxfp8"]), tmp_path / "out"
    )
    table = _table(tmp_path / "out")
    assert table["quant_algo"] == "MIXED_PRECISION"
    assert table["quantized_layers"][Q] == {"quant_algo": "MXFP8", "group_size": 32}
    up = "model.layers.0.mlp.up_proj"
    assert table["quantized_layers"][up] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert verify(tmp_path / "out").problems == ()
    _add_groups(tmp_path / "out")
    groups = _table(tmp_path / "out")["config_groups"]
    freed = [{"glob": f"{up}.*", "value": "bf16"}, "same"]
    merge(one_model(tmp_path / "out", out_format=freed), tmp_path / "freed")
    freed_table = _table(tmp_path / "freed")
    assert table["quantized_layers"].keys() - freed_table["quantized_layers"].keys() == {up}
    assert up in freed_table["ignore"]
    left = {path for group in freed_table["config_groups"].values() for path in group["targets"]}
    assert left == freed_table["quantized_layers"].keys()
    no_mlp = plan(
        one_model(tmp_path / "out", out_format=[{"role": "mlp", "value": "bf16"}, "same"])
    ).require()
    left_groups = no_mlp.manifest["config"]["quantization_config"]["config_groups"]
    assert left_groups == {"MXFP8": groups["MXFP8"]}
    _list_joined(tmp_path / "out")
    for words, is_listed in (("up_proj", True), ("*_proj", False)):
        freed = [{"glob": f"model.layers.0.mlp.{words}.*", "value": "bf16"}, "same"]
        made = plan(one_model(tmp_path / "out", out_format=freed)).require()
        listed = made.manifest["config"]["quantization_config"]["quantized_layers"]
        assert ("model.layers.0.mlp.gate_up_proj" in listed, Q in listed) == (is_listed, True)


def _add_groups(root: Path) -> None:
    """The same modules as groups, as ModelOpt writes them too."""
    config = read_config(root)
    table, groups = config["quantization_config"], {}
    for path, layer in table["quantized_layers"].items():
        bits = 8 if layer["quant_algo"] == "MXFP8" else 4
        group = {"weights": {"num_bits": bits, "type": "float"}, "targets": []}
        groups.setdefault(layer["quant_algo"], group)["targets"].append(path)
    table["config_groups"] = groups
    (root / "config.json").write_text(json.dumps(config))


def _list_joined(root: Path) -> None:
    """List gate and up under the name of what servers fuse them in."""
    config = read_config(root)
    layers = config["quantization_config"]["quantized_layers"]
    del config["quantization_config"]["config_groups"]
    block = "model.layers.0.mlp"
    layers[f"{block}.gate_up_proj"] = layers.pop(f"{block}.gate_proj")
    del layers[f"{block}.up_proj"]
    (root / "config.json").write_text(json.dumps(config))


def test_a_name_of_nvfp4_means_the_spelling_of_the_base(tmp_path: Path) -> None:
    """What was plain there has no scale of its inputs, which ModelOpt's table promises of all."""
    model = modelopt_llama(tmp_path / "a", 1, "NVFP4").root
    made = plan(one_model(model, out_format="nvfp4")).require()
    assert all(each["disposition"] == "copied" for each in made["dispositions"].to_pylist())
    (problem,) = plan(one_model(model, out_format=[{"role": "head", "value": "nvfp4"}, "same"])).problems
    assert "has a stored scale of its inputs (a static activation scheme), and lm_head has none" in str(
        problem
    )


def test_both_tables_are_changed_or_neither(tmp_path: Path) -> None:
    model = modelopt_llama(tmp_path / "a", 1, "NVFP4").root
    merge(one_model(model, out_format=[{"role": "attention", "value": "bf16"}, "same"]), tmp_path / "part")
    listed = _table(tmp_path / "part")["ignore"]
    assert {"lm_head", Q} <= set(listed)
    before, after = _beside(model), _beside(tmp_path / "part")
    assert after["quantization"].pop("exclude_modules") == listed
    del before["quantization"]["exclude_modules"]
    assert after == before
    assert open_checkpoint(tmp_path / "part", "a").companions.count(BESIDE) == 1
    merge(one_model(model, out_format="bf16"), tmp_path / "plain")
    assert "quantization_config" not in read_config(tmp_path / "plain")
    assert not (tmp_path / "plain" / BESIDE).exists()


def test_what_both_tables_say_beside_weights_is_not_lost(tmp_path: Path) -> None:
    """Of keys and values that are cached in FP4, without scales for them, and of zero points."""
    model = modelopt_llama(tmp_path / "a", 1, "NVFP4").root
    config, beside, fp4 = read_config(model), _beside(model), {**_FP8_CACHE, "num_bits": 4}
    config["quantization_config"]["kv_cache_scheme"] = fp4
    beside["quantization"] |= {"kv_cache_quant_algo": "NVFP4", "has_zero_point": False}
    (model / BESIDE).write_text(json.dumps(beside))
    part = [{"role": "attention", "value": "bf16"}, "same"]
    for is_in_both in (True, False):
        (model / "config.json").write_text(json.dumps(config))
        for form, is_left in ((part, True), ("mxfp8", False)):
            made = plan(one_model(model, out_format=form)).require()
            stated = made.manifest["config"]["quantization_config"].get("kv_cache_scheme")
            assert stated == (fp4 if is_in_both or not is_left else None)
            (row,) = [each for each in made["files"].to_pylist() if each["name"] == BESIDE]
            after = json.loads(row["content"])["quantization"]
            assert (after["kv_cache_quant_algo"], "has_zero_point" in after) == ("NVFP4", is_left)
        config["quantization_config"].pop("kv_cache_scheme", None)
    legacy = modelopt_llama(tmp_path / "b", 1, "FP8", is_legacy=True).root
    quantization = {**_beside(legacy)["quantization"], "kv_cache_quant_algo": "FP8"}
    (legacy / BESIDE).write_text(json.dumps({"quantization": quantization}))
    fresh = plan(one_model(legacy, out_format="int4")).require().manifest["config"]["quantization_config"]
    assert (fresh["quant_method"], fresh["kv_cache_scheme"]) == ("compressed-tensors", _FP8_CACHE)


def test_a_table_that_is_in_the_file_alone_counts(tmp_path: Path) -> None:
    parents = [modelopt_llama(tmp_path / name, seed, "FP8", is_legacy=True) for seed, name in enumerate("ab")]
    merge(mean_of(*parents), tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(parents, linear(1, 1)), parents)
    for name in ("config.json", BESIDE):
        assert (tmp_path / "out" / name).read_bytes() == (parents[0].root / name).read_bytes()
    merge(one_model(parents[0].root, out_format="bf16"), tmp_path / "plain")
    assert not (tmp_path / "plain" / BESIDE).exists()
    merge(stack(piece(parents[0].root, 0, 1), piece(parents[1].root, 0, 1)), tmp_path / "stack")
    assert _beside(tmp_path / "stack") == _beside(parents[0].root)


@pytest.mark.parametrize("is_legacy", [True, False])
def test_a_table_of_cached_keys_and_values_alone_counts(is_legacy: bool, tmp_path: Path) -> None:
    """Its model is plain: the scales are the largest, and weights are merged as those of any model."""
    stored = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    table = {"quant_algo": None, "kv_cache_scheme": _FP8_CACHE, "ignore": [], "quant_method": "modelopt"}
    config = llama_config(layers=1) | ({} if is_legacy else {"quantization_config": table})
    for name, scale in (("a", 0.25), ("b", 0.75)):
        tensors = {each: torch.ones(shape).bfloat16() for each, shape in llama_shapes(config).items()}
        tensors |= {f"model.layers.0.self_attn.{w}_proj.{w}_scale": torch.tensor(scale) for w in "kv"}
        extra = {**TOKENIZER_FILES, BESIDE: json.dumps({"quantization": stored})}
        write_checkpoint(tmp_path / name, tensors, config, extra=extra)
    merge(mean_of(tmp_path / "a", tmp_path / "b"), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", tmp_path / "b") == set()
    for name in ("config.json", BESIDE):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


_FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}


def test_layers_in_another_order_are_listed_under_their_new_numbers(tmp_path: Path) -> None:
    model = modelopt_llama(tmp_path / "a", 1, "MXFP8").root
    config = read_config(model)
    config["quantization_config"] |= {"ignore": ["lm_head", "model.layers.0.extra*"]}
    (model / "config.json").write_text(json.dumps(config))
    made = plan(stack(piece(model, 0, 1), piece(model, 0, 1))).require()
    names = ["lm_head", "model.layers.0.extra*", "model.layers.1.extra*"]
    assert sorted(made.manifest["config"]["quantization_config"]["ignore"]) == names
    (row,) = [each for each in made["files"].to_pylist() if each["name"] == BESIDE]
    assert sorted(json.loads(row["content"])["quantization"]["exclude_modules"]) == names


def test_experts_of_deepseek_v4_become_block_fp8(tmp_path: Path) -> None:
    model = three_formats(tmp_path / "a", 1).root
    made = plan(one_model(model, out_format="fp8_block")).require()
    assert made.manifest["config"]["expert_dtype"] == "fp8"
    plain = plan(one_model(model, out_format="bf16")).require()
    assert {"expert_dtype", "quantization_config"}.isdisjoint(plain.manifest["config"])
    some = plan(one_model(model, out_format=[{"glob": "*.experts.*", "value": "bf16"}, "same"])).require()
    assert {"moe_quant_algo", "quantized_layers"}.isdisjoint(some.manifest["config"]["quantization_config"])
    assert some.manifest["config"]["quantization_config"]["quant_method"] == "fp8"
