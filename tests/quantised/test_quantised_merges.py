"""Merges of quantised models, also by one scale a matrix, and what their configs say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, tiny_llama, write_checkpoint
from kits.float64_merges import Merge, linear, slerp
from kits.marks import slow_but
from kits.memory_meter import AllocationMeter
from kits.merge_cases import INLINE, Family, digests, merge, recipes
from kits.packed_headers import W4, W8, compressed
from kits.plan_maker import Specs, header_checkpoint, llama_config, llama_specs
from kits.quantised_merges import (
    MAKERS,
    Maker,
    changed_bytes,
    check_merged,
    check_stored_alike,
    entries,
    merge_cases,
    merged_values,
    plain_twin,
    read_numbers,
)
from kits.quantised_models import QuantisedModel
from kits.quantised_numbers import Values, int4
from kits.recipe_maker import linear as mean_of
from kits.recipe_maker import one as one_model
from kits.recipe_maker import piece, stack
from kits.segment_bench import Bench, counted_buffers, make_bench, tiles_of
from kits.tensor_scaled_models import EXPERTS, JOINED, ODD, fp8_llama, fp8_mixture, nvfp4_llama
from safetensors.torch import load_file, save_file

import raymerge
from raymerge.api import AuditOptions, audit, plan, submit, verify
from raymerge.dtypes import DType
from raymerge.errors import NonFiniteError
from raymerge.events import Event, SegmentDone, Started
from raymerge.merge_plan import segments
from raymerge.merge_plan.jobs import Jobs
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.plan import input_bytes
from raymerge.methods import methods
from raymerge.options import RunOptions
from raymerge.planner.explain import explain
from raymerge.planner.inputs.sources import open_models
from raymerge.recipes.load import parse_recipe

SCALED_MAKERS: Mapping[str, Maker] = {"FP8": fp8_llama, "NVFP4": nvfp4_llama}

_SOME = ("linear", "slerp", "ties", "dare_ties", "nuslerp", "model_stock", "passthrough")
SELF_MERGED = {
    "gpt-oss": tuple(methods()),
    "Kimi-K2-Thinking": ("linear", "slerp", "ties", "model_stock", "passthrough"),
    "DeepSeek-V3 F32": ("linear", "ties", "passthrough"),
    "DeepSeek-V3 U8": _SOME,
    "three formats": ("linear", "ties", "passthrough"),
    "FP8": ("linear", "slerp", "ties", "nuslerp"),
    "NVFP4": ("linear", "slerp", "ties", "nuslerp"),
}
"""What is merged with itself, and by which methods."""


def _three(make: Maker, root: Path) -> list[QuantisedModel]:
    return [make(root / name, seed) for seed, name in enumerate(("base", "one", "two"))]


@pytest.fixture(scope="module", params=slow_but(MAKERS, "Kimi-K2-Thinking", "DeepSeek-V3 F32"))
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    return _three(MAKERS[request.param], tmp_path_factory.mktemp("parents"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", slow_but(["linear", "slerp", "ties"], "linear", "ties"))
def test_a_merge_is_the_merge_of_what_the_parents_mean(
    method: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Each number is the nearest that codes with the scale of its block can be."""
    recipe, count, expected = merge_cases(parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents[:count], expected), parents)


def test_what_is_checked_with_is_right(parents: list[QuantisedModel]) -> None:
    """The parents mean what they were made to mean, and a merge that is a little off would be noticed."""
    base = parents[0]
    found = read_numbers(base.root)
    assert found.keys() == base.values.keys()
    for name, numbers in found.items():
        assert (numbers.values == base.values[name]).all(), name
    own = merged_values([base], linear(1))
    check_merged(base.root, own, parents)
    name = min(base.quantised)
    off = {**own, name: own[name] * 1.3}
    with pytest.raises(AssertionError):
        check_merged(base.root, off, parents)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", slow_but(SELF_MERGED, "Kimi-K2-Thinking", "DeepSeek-V3 F32", *SCALED_MAKERS))
def test_a_model_merged_with_itself_is_itself(kind: str, tmp_path: Path) -> None:
    """To the last byte of codes and of all scales."""
    same = [{**MAKERS, **SCALED_MAKERS}[kind](tmp_path / f"same{number}", 1).root for number in range(4)]
    asked_of = recipes(Family(same[0], tuple(same[1:])))
    for method in SELF_MERGED[kind]:
        # The stack is another model, an expert is changed, and linear's recipe asks for another dtype.
        asked = {key: value for key, value in asked_of[method].items() if key != "dtype"}
        if method in ("passthrough", "upcycle"):
            asked = {**one_model(same[1]), "merge_method": method}
        merge(asked, tmp_path / method)
        check_stored_alike(tmp_path / method, same[0])
        assert changed_bytes(tmp_path / method, same[0]) == set(), method


def _role(name: str) -> str:
    for role, words in {"expert": (".experts.",), "attention": (".self_attn.",)}.items():
        if any(word in name for word in words) and "layernorm" not in name:
            return role
    return "other"


@pytest.mark.sample(1)
@pytest.mark.parametrize("role", slow_but(["expert", "attention"], "expert"))
def test_what_no_rule_touches_keeps_its_bytes(
    role: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    base, one, _ = parents
    recipe = {
        "merge_method": "linear",
        "models": entries([base, one], (1, 0)),
        "methods": [{"role": role, "parameters": {"weight": 0.5}}],
    }
    merge(recipe, tmp_path / "out")
    check_stored_alike(tmp_path / "out", base.root)
    changed = changed_bytes(tmp_path / "out", base.root)
    assert {_role(name) for name in changed} == {role}
    touched = [name for name in base.values if _role(name) == role]
    mean, own = (merged_values(models, linear(*[1] * len(models))) for models in ([base, one], [base]))
    check_merged(tmp_path / "out", {**own, **{name: mean[name] for name in touched}}, parents)


@pytest.mark.sample(1)
@pytest.mark.parametrize("role", slow_but(["expert", "attention"], "attention"))
def test_what_a_rule_takes_from_one_parent_is_its_bytes(
    role: str, parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Codes and scales are copied, and not made anew; all else is merged."""
    base, one, _ = parents
    recipe = {
        "merge_method": "linear",
        "models": entries([base, one], (0.5, 0.5)),
        "methods": [{"role": role, "merge_method": "passthrough", "sources": [str(one.root)]}],
    }
    merge(recipe, tmp_path / "out")
    check_stored_alike(tmp_path / "out", base.root)
    foreign = changed_bytes(tmp_path / "out", one.root)
    assert not {name for name in foreign if _role(name) == role}
    fates = plan(recipe)["dispositions"].to_pylist()
    copied = {fate["name"] for fate in fates if fate["source"] == 1 and fate["disposition"] == "copied"}
    assert copied == {name for name in read_tensors(base.root) if _role(name) == role}
    mean, own = merged_values([base, one], linear(1, 1)), merged_values([one], linear(1))
    expected = {name: (own if _role(name) == role else mean)[name] for name in base.values}
    check_merged(tmp_path / "out", expected, parents)


def _grouped(root: Path, seed: int, columns: int, group: int) -> QuantisedModel:
    """A tiny Llama with one matrix of so many columns in INT4, whose groups have so many."""
    module, plain = "model.layers.0.mlp.up_proj", tiny_llama(root / "plain", seed)
    tensors, values = dict(read_tensors(plain)), {n: e.values for n, e in read_numbers(plain).items()}
    rows = len(tensors.pop(f"{module}.weight"))
    coded = int4(np.random.default_rng(seed).normal(size=(rows, columns)), group)
    tensors |= {f"{module}.weight_packed": coded.codes, f"{module}.weight_scale": coded.scales}
    tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns])
    size = {"strategy": "channel", "group_size": None} if group == columns else {"group_size": group}
    table = compressed({**W4, **size}, ignore=[f"re:(?!{module})"])
    config = json.loads((plain / "config.json").read_text())
    write_checkpoint(root / "packed", tensors, {**config, "quantization_config": table})
    values[f"{module}.weight"] = coded.values
    return QuantisedModel(root / "packed", values, frozenset({f"{module}.weight"}))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("columns", "group"), slow_but([(304, 304), (288, 96), (1024, 512)], (304, 304), (288, 96))
)
def test_groups_of_any_size_are_merged(columns: int, group: int, tmp_path: Path) -> None:
    """Neither a divisor nor a multiple of what tiles are cut by."""
    parents = [_grouped(tmp_path / name, seed, columns, group) for seed, name in enumerate("ab")]
    merge({"merge_method": "linear", "models": entries(parents, (1, 3))}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents, linear(1, 3)), parents)
    assert not audit(tmp_path / "out", AuditOptions(1.0), INLINE).num_problems


_HIDDEN = 64
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_ATTENTION, _MLP = "re:.*self_attn.*", "re:.*mlp.*"
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}

Parts = Callable[[str, int, int], Specs]


def _plain(module: str, rows: int, columns: int) -> Specs:
    return {f"{module}.weight": (DType.BF16, (rows, columns))}


def _channel(module: str, rows: int, columns: int) -> Specs:
    scale = {f"{module}.weight_scale": (DType.BF16, (rows, 1))}
    return {f"{module}.weight": (DType.F8_E4M3, (rows, columns)), **scale}


def _block(module: str, rows: int, columns: int, size: int = 128) -> Specs:
    grid = (-(-rows // size), -(-columns // size))
    scale = {f"{module}.weight_scale_inv": (DType.F32, grid)}
    return {f"{module}.weight": (DType.F8_E4M3, (rows, columns)), **scale}


def _static(module: str, rows: int, columns: int) -> Specs:
    scales = {f"{module}.{name}": (DType.F32, (1,)) for name in ("weight_scale", "input_scale")}
    return {f"{module}.weight": (DType.F8_E4M3, (rows, columns)), **scales}


def _packed(module: str, rows: int, columns: int) -> Specs:
    return {
        f"{module}.weight_packed": (DType.I32, (rows, columns // 8)),
        f"{module}.weight_scale": (DType.BF16, (rows, columns // 32)),
        f"{module}.weight_shape": (DType.I64, (2,)),
    }


def _gptq(module: str, rows: int, columns: int) -> Specs:
    return {
        f"{module}.qweight": (DType.I32, (columns // 8, rows)),
        f"{module}.qzeros": (DType.I32, (1, rows // 8)),
        f"{module}.scales": (DType.F16, (1, rows)),
        f"{module}.g_idx": (DType.I32, (columns,)),
    }


def _model(
    root: Path, attention: Parts, mlp: Parts, table: Mapping[str, Any] | None, more: Specs | None = None
) -> Path:
    """A tiny Llama whose matrices of attention and feed-forward layers are stored so."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = dict(more or {})
    for name, (dtype, shape) in llama_specs(2, hidden=_HIDDEN).items():
        stored = attention if "self_attn" in name else mlp if ".mlp." in name else None
        specs |= {name: (dtype, shape)} if stored is None else stored(name.removesuffix(".weight"), *shape)
    quantisation = {} if table is None else {"quantization_config": dict(table)}
    return header_checkpoint(root, specs, {**llama_config(layers=2, hidden=_HIDDEN), **quantisation})


def _table(
    *groups: tuple[str, Mapping[str, Any]], form: str = "mixed-precision", **more: Any
) -> dict[str, Any]:
    made = {
        f"group_{number}": {"targets": [target], "weights": dict(weights)}
        for number, (target, weights) in enumerate(groups)
    }
    table = {"quant_method": "compressed-tensors", "format": form, "config_groups": made}
    return {**table, "ignore": ["lm_head"], **more}


def _planned(model: Path, out_format: Any) -> tuple[Any, str]:
    return _table_and_faults(one_model(model, out_format=out_format))


def _table_and_faults(recipe: dict[str, Any]) -> tuple[Any, str]:
    """The quantisation table of an output, and what is wrong with it."""
    made = plan(recipe)
    faults = " ".join(f"{each.what} {each.remedy}" for each in made.problems)
    return made.manifest["config"].get("quantization_config"), faults


def _part(role: str, value: str, rest: str = "same") -> list[Any]:
    return [{"role": role, "value": value}, rest]


def test_tables_of_unread_formats_stay_where_what_is_copied_is_all(tmp_path: Path) -> None:
    model = _model(tmp_path / "gptq", _plain, _gptq, _GPTQ)
    assert _planned(model, "same") == (_GPTQ, "")
    said = _planned(model, _part("attention", "fp8_block"))[1]
    assert "24 tensors would be copied as GPTQ (such as model.layers.0.mlp.down_proj.g_idx)" in said
    assert "stored as fp8_block (such as model.layers.0.self_attn.k_proj)" in said


def test_wider_integers_keep_the_table_that_tells_of_them(tmp_path: Path) -> None:
    table = _table((_ATTENTION, _CHANNEL), (_MLP, W8))
    model = _model(tmp_path / "wide", _channel, _packed, table)
    assert _planned(model, "same") == (table, "")
    freed, said = _planned(model, _part("attention", "bf16"))
    assert said == ""
    assert freed["config_groups"] == table["config_groups"]
    assert "model.layers.1.self_attn.q_proj" in freed["ignore"]
    said = _planned(model, _part("attention", "int4"))[1]
    assert "would be copied as packed integers, declared as 8-bit int by group (such as " in said
    assert "stored as int4 (such as model.layers.0.self_attn.k_proj)" in said


@pytest.mark.parametrize(
    ("attention", "mlp", "forms"),
    [
        (_ATTENTION, _MLP, {"int4": 18, "packed integers, declared as 8-bit int by group": 24}),
        ("re:x.*self_attn.*", "re:x.*mlp.*", {"packed integers, declared as 8-bit int by group": 42}),
    ],
    ids=["named", "not named"],
)
def test_integers_are_as_wide_as_the_group_of_their_module_says(
    attention: str, mlp: str, forms: Mapping[str, int], tmp_path: Path
) -> None:
    """Those that no group names are not taken for narrow ones."""
    model = _model(tmp_path / "two", _packed, _packed, _table((attention, W8), (mlp, W4)))
    assert {group.name: group.tensors for group in raymerge.inspect(model).quantised} == forms


def test_groups_that_speak_of_other_modules_make_way(tmp_path: Path) -> None:
    table = _table((_ATTENTION, _CHANNEL), (_MLP, W4))
    model = _model(tmp_path / "mixed", _channel, _packed, table)
    assert _planned(model, "same") == (table, "")
    swapped = _planned(model, [*_part("attention", "int4")[:1], *_part("mlp", "fp8_channel")])[1]
    assert "as int4 (such as model.layers.0.self_attn.k_proj)" in swapped
    assert "as fp8_channel (such as model.layers.0.mlp.down_proj)" in swapped
    assert "Choose one format" in swapped
    fresh, said = _planned(model, "int4")
    assert said == ""
    (group,) = fresh["config_groups"].values()
    assert (group["targets"], group["weights"]["num_bits"]) == (["Linear"], 4)
    assert fresh["format"] == "pack-quantized"


def test_what_no_group_names_gets_a_table_that_does(tmp_path: Path) -> None:
    table = _table((_MLP, W4), form="pack-quantized")
    model = _model(tmp_path / "part", _plain, _packed, table)
    assert _planned(model, "same") == (table, "")
    fresh, said = _planned(model, "int4")
    assert said == ""
    assert [group["targets"] for group in fresh["config_groups"].values()] == [["Linear"]]


def test_scales_of_inputs_are_for_all_matrices_or_none(tmp_path: Path) -> None:
    table = {**_STATIC, "modules_to_not_convert": ["self_attn"]}
    model = _model(tmp_path / "static", _plain, _static, table)
    assert _planned(model, "same") == (table, "")
    said = _planned(model, "fp8_tensor")[1]
    assert "model.layers.0.mlp.down_proj has a stored scale of its inputs" in said
    assert "model.layers.0.self_attn.k_proj has none" in said
    assert "'out_format: fp8_block'" in said
    fresh, said = _planned(model, "fp8_block")
    assert (fresh["activation_scheme"], said) == ("dynamic", "")


@pytest.mark.parametrize("has_scales", [True, False])
def test_the_scheme_of_keys_and_values_stays_as_the_donor_has_it(has_scales: bool, tmp_path: Path) -> None:
    """Without stored scales a server caches with a scale of 1."""
    more: Specs = {
        f"model.layers.{layer}.self_attn.{each}_scale": (DType.F32, (1,)) for layer in (0, 1) for each in "kv"
    }
    table = _table(("Linear", _CHANNEL), form="float-quantized", kv_cache_scheme=_CACHE)
    model = _model(tmp_path / "cache", _channel, _channel, table, more if has_scales else None)
    fresh, said = _planned(model, "int4")
    assert said == ""
    assert fresh["format"] == "pack-quantized"
    assert fresh["kv_cache_scheme"] == _CACHE
    assert _planned(model, "fp8_block")[0]["kv_cache_scheme"] == _CACHE


_STORED: dict[str, tuple[Parts, Mapping[str, Any] | None]] = {
    "block": (_block, _FP8),
    "channel": (_channel, _table(("Linear", _CHANNEL), form="float-quantized")),
    "plain": (_plain, None),
    "small blocks": (partial(_block, size=32), {**_FP8, "weight_block_size": [32, 32]}),
}


def _stack(tmp_path: Path, *kinds: str, **more: Any) -> tuple[Any, str]:
    """Two layers of each, in this order."""
    models = [
        _model(tmp_path / kind, parts, parts, table) for kind in kinds for parts, table in [_STORED[kind]]
    ]
    return _table_and_faults(stack(*(piece(model, 0, 2) for model in models), **more))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kinds", [("block", "plain"), ("plain", "block"), ("block", "channel")], ids=str)
def test_layers_that_were_quantised_differently_stack_in_one_format(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    assert _stack(tmp_path / "1", *kinds, out_format="bf16") == (None, "")
    assert _stack(tmp_path / "2", *kinds, dtype="bfloat16") == (None, "")
    table, said = _stack(tmp_path / "3", *kinds, out_format="fp8_block")
    assert said == ""
    assert (table["quant_method"], table["weight_block_size"]) == ("fp8", [128, 128])
    table, said = _stack(tmp_path / "4", *kinds, out_format="int4")
    assert said == ""
    assert table["format"] == "pack-quantized"


@pytest.mark.parametrize("kinds", [("block", "plain"), ("plain", "block")], ids=str)
def test_plain_layers_of_a_stack_are_listed(kinds: tuple[str, str], tmp_path: Path) -> None:
    table, said = _stack(tmp_path, *kinds)
    assert said == ""
    plain = 2 * kinds.index("plain")
    listed = set(table["modules_to_not_convert"])
    assert f"model.layers.{plain}.mlp.up_proj" in listed
    assert f"model.layers.{2 - plain}.mlp.up_proj" not in listed


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        ("channel", ("fp8_block", "fp8_channel")),
        ("small blocks", ("fp8_block in blocks of 128x128", "fp8_block in blocks of 32x32")),
    ],
)
def test_a_stack_of_two_formats_is_refused_with_a_remedy_that_helps(
    kind: str, forms: tuple[str, str], tmp_path: Path
) -> None:
    said = _stack(tmp_path, "block", kind)[1]
    for layer, form in zip((0, 2), forms, strict=True):
        assert f"as {form} (such as model.layers.{layer}.mlp.down_proj)" in said
    assert "such as 'out_format: fp8_block'" in said


@pytest.fixture(scope="module", params=SCALED_MAKERS)
def scaled_parents(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[QuantisedModel]:
    return _three(SCALED_MAKERS[request.param], tmp_path_factory.mktemp("parents"))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """Two with fused experts, of which each matrix holds gate and up."""
    root = tmp_path_factory.mktemp("mixtures")
    return [fp8_mixture(root / name, seed) for seed, name in enumerate("ab")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
def test_a_merge_with_one_scale_is_the_merge_of_what_the_parents_mean(
    method: str, scaled_parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """Each number is the nearest that codes with its scales can be."""
    recipe, count, expected = merge_cases(scaled_parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", scaled_parents[0].root)
    check_merged(tmp_path / "out", merged_values(scaled_parents[:count], expected), scaled_parents)
    assert verify(tmp_path / "out").problems == ()


def _inputs(root: Path) -> dict[str, float]:
    """The scale of the inputs of every matrix, of NVFP4 what they are divided by."""
    stored = read_tensors(root)
    return {name: float(stored[name]) for name in stored if re.search(r"\.input_(global_)?scale$", name)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", slow_but(["linear", "ties"], "ties"))
def test_scales_of_inputs_are_those_of_the_largest(
    method: str, scaled_parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """One that is too small cuts off what is larger. What is divided by one has the smallest."""
    recipe, count, _ = merge_cases(scaled_parents)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    before = [_inputs(parent.root) for parent in scaled_parents[:count]]
    most = min if next(iter(before[0])).endswith("global_scale") else max
    expected = {name: most(each[name] for each in before) for name in before[0]}
    assert len(expected) == 7
    assert any(each != expected for each in before)
    assert _inputs(tmp_path / "out") == expected
    (note,) = [
        each for each in plan({"merge_method": method, **recipe}).manifest["notes"] if "inputs" in each
    ]
    assert note.startswith("7 scales of inputs and of cached keys and values are not merged as weights")
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def test_what_is_joined_has_the_scale_of_the_largest_inputs(tmp_path: Path) -> None:
    """Also where a rule takes one of the joined matrices from one parent alone."""
    one, other = (fp8_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    block = "model.layers.0.mlp"
    _edit(one.root, {f"{block}.{word}_proj.input_scale": torch.tensor([3.0]) for word in ("gate", "up")})
    _edit(other.root, {f"{block}.{word}_proj.input_scale": torch.tensor([5.0]) for word in ("gate", "up")})
    rule = {"glob": "*.up_proj.*", "merge_method": "passthrough", "sources": [str(one.root)]}
    merge({**mean_of(one, other), "methods": [rule]}, tmp_path / "out")
    found = _inputs(tmp_path / "out")
    assert (found[f"{block}.gate_proj.input_scale"], found[f"{block}.up_proj.input_scale"]) == (5.0, 5.0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["linear", "ties", "passthrough"])
def test_scales_of_cached_keys_and_values_are_no_weights(method: str, tmp_path: Path) -> None:
    models = [fp8_llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for number, model in enumerate(models):
        config = read_config(model.root)
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        (model.root / "config.json").write_text(json.dumps(config))
        scales = {"k": (0.5, 0.25, 2.0)[number], "v": 1.0 - number / 4}
        _add(model.root, {f"{_SCALED_CACHE}.{word}_scale": scale for word, scale in scales.items()})
    recipe = one_model(models[1]) if method == "passthrough" else merge_cases(models)[method][0]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    have = [float(found[f"{_SCALED_CACHE}.{word}_scale"]) for word in "kv"]
    assert have == {"passthrough": [0.25, 0.75], "linear": [0.5, 1.0], "ties": [2.0, 1.0]}[method]


_SCALED_CACHE = "model.layers.0.self_attn"
_WORDS = (
    *("self_attn.o_proj.output_scale", "self_attn.qkv_proj.output_scale", "mlp.down_proj.output_scale"),
    *("self_attn.prob_output_scale", "mlp.act_scale", "mlp.experts.down_proj_input_scale"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [*SCALED_MAKERS.values(), None])
def test_no_scale_that_quantisers_write_of_what_is_computed_is_a_weight(
    make: Maker | None, tmp_path: Path
) -> None:
    """The same words in a model that declares no quantisation are weights, which are merged."""
    models = [(make or fp8_llama)(tmp_path / name, seed) for seed, name in enumerate("ab")]
    if make is None:
        models = [plain_twin(model, tmp_path / f"{model.root.name} plain") for model in models]
    for model, scale in zip(models, (0.5, 2.0), strict=True):
        _add(model.root, {f"model.layers.0.{word}": scale for word in _WORDS})
        _add(model.root, {"model.layers.0.mlp.output_global_scale": scale, "model.norm.layer_scale": scale})
    merge(mean_of(*models), tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    expected = dict.fromkeys(_WORDS, 2.0) | {"mlp.output_global_scale": 0.5}
    expected = dict.fromkeys(expected, 1.25) if make is None else expected
    assert {word: float(found[f"model.layers.0.{word}"]) for word in expected} == expected
    assert float(found["model.norm.layer_scale"]) == 1.25


def test_no_scale_stays_where_all_became_plain(tmp_path: Path) -> None:
    """Nothing would declare it, and another merge would take it for a weight."""
    models = [fp8_llama(tmp_path / name, seed).root for seed, name in enumerate("ab")]
    scale = "model.layers.0.self_attn.k_proj.k_scale"
    for model, value in zip(models, (0.25, 0.75), strict=True):
        _add(model, {scale: value})
    merge(mean_of(*models), tmp_path / "same")
    assert read_tensors(tmp_path / "same")[scale] == 0.75
    merge(mean_of(*models, out_format="bf16"), tmp_path / "plain")
    assert not [name for name in read_tensors(tmp_path / "plain") if name.endswith("scale")]
    assert verify(tmp_path / "plain").problems == ()


def _add(root: Path, scales: Mapping[str, float]) -> None:
    """Add scales to a checkpoint, in its first file."""
    index_file, file = root / "model.safetensors.index.json", "model.safetensors"
    if index_file.exists():
        index = json.loads(index_file.read_text())
        file = min(index["weight_map"].values())
        index["weight_map"] |= dict.fromkeys(scales, file)
        index_file.write_text(json.dumps(index))
    added = {name: torch.tensor(value) for name, value in scales.items()}
    save_file({**load_file(root / file), **added}, root / file, metadata={"format": "pt"})


def _edit(root: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give tensors of a checkpoint other numbers."""
    for file in root.glob("*.safetensors"):
        held = load_file(file)
        save_file({**held, **{n: tensors[n] for n in held if n in tensors}}, file, metadata={"format": "pt"})


def test_what_one_parent_gives_is_its_bytes(scaled_parents: list[QuantisedModel], tmp_path: Path) -> None:
    base, one, _ = scaled_parents
    rule = {"role": "mlp", "merge_method": "passthrough", "sources": [str(one.root)]}
    merge({**mean_of(base, one), "methods": [rule]}, tmp_path / "out")
    foreign = changed_bytes(tmp_path / "out", one.root)
    assert not {name for name in foreign if ".mlp." in name}
    assert {name for name in foreign if ".self_attn." in name}


_ODD = f"model.layers.0.self_attn.{ODD}"


def _divisors(root: Path) -> dict[str, float]:
    stored = read_tensors(root)
    return {name: float(each) for name, each in stored.items() if name.endswith(".weight_global_scale")}


@pytest.mark.parametrize("method", slow_but(["linear", "ties"], "ties"))
def test_what_shares_a_scale_of_nvfp4_shares_it_afterwards(method: str, tmp_path: Path) -> None:
    """Otherwise servers that join q, k and v, or gate and up, would take the scale of one for all."""
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    merge({"merge_method": method, **merge_cases(models)[method][0]}, tmp_path / "out")
    before, after = _divisors(models[0].root), _divisors(tmp_path / "out")
    assert len({after[name] for name in after if any(word in name for word in JOINED)}) == 1
    assert {name for name in before if before[name] != after[name]} == {f"{_ODD}.weight_global_scale"}
    assert after[f"{_ODD}.weight_global_scale"] == 16 * before[f"{_ODD}.weight_global_scale"]


def _scaled(model: QuantisedModel, word: str, factor: float) -> None:
    """Make the numbers of a matrix so many times as large, by its one scale alone."""
    name = f"model.layers.0.{word}"
    scale = read_tensors(model.root)[f"{name}.weight_global_scale"]
    _edit(model.root, {f"{name}.weight_global_scale": scale / factor})
    values: dict[str, Any] = dict(model.values)
    values[f"{name}.weight"] = values[f"{name}.weight"] * factor
    object.__setattr__(model, "values", values)


@pytest.mark.parametrize(
    ("word", "method"),
    [("mlp.gate_proj", "linear"), *slow_but([("mlp.up_proj", "ties")]), ("self_attn.k_proj", "slerp")],
)
def test_a_matrix_that_outgrows_its_scale_takes_what_it_is_joined_with_along(
    word: str, method: str, tmp_path: Path
) -> None:
    """A server that takes the scale of one for all of them reads the same numbers."""
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for model in models[1:]:
        _scaled(model, word, 64.0)
    recipe, count, expected = merge_cases(models)[method]
    merge({"merge_method": method, **recipe}, tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models[:count], expected), models)
    after = {name.removeprefix("model.layers.0."): each for name, each in _divisors(tmp_path / "out").items()}
    before = _divisors(models[0].root)[f"model.layers.0.{word}.weight_global_scale"]
    for group in (("mlp.gate_proj", "mlp.up_proj"), tuple(f"self_attn.{each}_proj" for each in "qkv")):
        scales = {after[f"{each}.weight_global_scale"] for each in group}
        assert len(scales) == 1
        assert (scales != {before}) == (word in group)
    assert not audit(tmp_path / "out", AuditOptions(1.0, seed=3), INLINE).problems


def test_what_is_read_again_for_a_shared_scale_is_in_the_plan(tmp_path: Path) -> None:
    """At most so much: rows of one group that lie in one segment are looked at together."""
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    recipe = {"merge_method": "linear", "models": entries(models, (1, 1))}
    events: list[Event] = []
    submit(recipe, tmp_path / "out", options=INLINE, on_event=events.append)
    made = plan(recipe)
    said = explain(made, open_models(parse_recipe(json.dumps(recipe))).require(), project(made, 1 << 30))
    read = sum(each.read_bytes for each in events if isinstance(each, SegmentDone))
    assert input_bytes(made).sum() < read <= said.read_bytes


def test_copies_of_two_parents_are_encoded_under_one_scale(tmp_path: Path) -> None:
    """Each would come with a scale of its own."""
    one, other = (nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    for word in ("q_proj", "k_proj", "v_proj"):
        _scaled(other, f"self_attn.{word}", 64.0)
    rule = {"glob": "*.k_proj.*", "merge_method": "passthrough", "sources": [str(other.root)]}
    recipe = {"merge_method": "linear", "models": entries([one, other], (1, 0)), "methods": [rule]}
    merge(recipe, tmp_path / "out")
    after = _divisors(tmp_path / "out")
    attention = {each for name, each in after.items() if re.search(r"\.[qkv]_proj\.", name)}
    assert len(attention) == 1
    found = read_numbers(tmp_path / "out")["model.layers.0.self_attn.k_proj.weight"]
    assert np.array_equal(found.values, other.values["model.layers.0.self_attn.k_proj.weight"])
    rule["sources"] = [str(one.root)]
    merge(recipe, tmp_path / "same")
    assert not changed_bytes(tmp_path / "same", one.root) - _inputs(one.root).keys()


def test_a_scale_of_nvfp4_that_no_longer_serves_is_divided_by_a_power_of_16(tmp_path: Path) -> None:
    models = [nvfp4_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    twice = {"merge_method": "linear", "models": entries(models, (1, 1)), "parameters": {"normalize": False}}
    merge(twice, tmp_path / "out")
    check_merged(tmp_path / "out", merged_values(models, lambda pair: np.stack(pair).sum(0)[None]), models)
    before, after = _divisors(models[0].root), _divisors(tmp_path / "out")
    del before[f"{_ODD}.weight_global_scale"]
    assert {name: after[name] for name in before} == {name: scale / 16 for name, scale in before.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_lead", [True, False])
def test_it_merges_with_bfloat16(is_lead: bool, scaled_parents: list[QuantisedModel], tmp_path: Path) -> None:
    twin = plain_twin(scaled_parents[1], tmp_path / "twin")
    models = [scaled_parents[0], twin] if is_lead else [twin, scaled_parents[0]]
    merge(mean_of(*models), tmp_path / "out")
    assert ("quantization_config" in read_config(tmp_path / "out")) == is_lead
    check_merged(tmp_path / "out", merged_values(models, linear(1, 1)), models)


def test_numbers_become_codes_where_the_lead_has_codes(
    scaled_parents: list[QuantisedModel], tmp_path: Path
) -> None:
    """What comes from a parent in bfloat16 has no scale that could be kept."""
    base, twin = scaled_parents[0], plain_twin(scaled_parents[1], tmp_path / "twin")
    rule = {"role": "mlp", "merge_method": "passthrough", "sources": [str(twin.root)]}
    merge({**mean_of(base, twin), "methods": [rule]}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", base.root)
    own, mean = merged_values([twin], linear(1)), merged_values([base, twin], linear(1, 1))
    expected = {name: (own if ".mlp." in name else mean)[name] for name in base.values}
    check_merged(tmp_path / "out", expected, [base, twin])


def _experts(values: Values, name: str) -> list[Values]:
    """The matrices of fused experts: gate and up, or down."""
    halves = 2 if name.endswith("gate_up_proj") else 1
    return [part for expert in values for part in np.split(expert, halves)]


@pytest.mark.parametrize(("method", "expected"), [("linear", linear(0.5, 0.5)), ("slerp", slerp(0.4))])
def test_each_fused_matrix_has_its_own_scale(
    method: str, expected: Merge, mixtures: list[QuantisedModel], tmp_path: Path
) -> None:
    one, other = mixtures
    slerped = {"base_model": str(one.root), "models": [{"model": str(other.root)}], "parameters": {"t": 0.4}}
    merge(mean_of(one, other) if method == "linear" else {"merge_method": "slerp", **slerped}, tmp_path / "o")
    check_stored_alike(tmp_path / "o", one.root)
    found, stored = read_numbers(tmp_path / "o"), read_tensors(tmp_path / "o")
    for name in one.quantised:
        assert len(set(stored[f"{name}_scale"].flatten().tolist())) == EXPERTS
        pairs = zip(_experts(one.values[name], name), _experts(other.values[name], name), strict=True)
        wanted = [expected(pair)[0] for pair in pairs]
        have, steps = (_experts(part, name) for part in (found[name].values, found[name].steps))
        for mean, values, step in zip(wanted, have, steps, strict=True):
            assert np.all(np.abs(mean - values) <= step / 2 * (1 + 1e-4) + 1e-7), name


def test_fused_matrices_are_converted_part_by_part(mixtures: list[QuantisedModel], tmp_path: Path) -> None:
    merge(one_model(mixtures[0], dtype="bfloat16"), tmp_path / "out")
    found = read_tensors(tmp_path / "out")
    for name, values in mixtures[0].values.items():
        assert torch.equal(found[name], torch.from_numpy(values).float().bfloat16()), name


_SIZES = {f"model.layers.0.mlp.{word}_proj.weight": (256, 512) for word in ("gate", "up")}
_SIZES["model.norm.weight"] = (32,)
_TIGHT, _WIDE = 1 << 20, 64 << 20
_OBJECTS = 128 << 10
"""Bytes of Python's own objects, which are counted too."""


@pytest.fixture(scope="module", params=SCALED_MAKERS)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """Parents with a matrix that a small lane does not hold."""
    make = partial(fp8_llama if request.param == "FP8" else nvfp4_llama, shapes=_SIZES)
    return _three(make, tmp_path_factory.mktemp("large"))


def _made(recipe: Mapping[str, Any], root: Path, budget: int) -> tuple[Bench, int]:
    """A bench that was run, and the most tiles that one of its rows has."""
    bench = make_bench(recipe, root, budget=budget)
    ops = [op for segment in bench.segments for op in Jobs(bench.plan).ops(segment)]
    for segment in bench.segments:
        bench.runner.run(segment)
    tiles = [tile.op.index for tile in tiles_of(ops, bench.projection.lane.budget)]
    return bench, max(map(tiles.count, tiles))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["ties", "itself"])
def test_tiles_change_no_byte(name: str, large: list[QuantisedModel], tmp_path: Path) -> None:
    """The one scale is that of the whole matrix: it is chosen before the first code is made."""
    itself = mean_of(large[0], large[0])
    recipe = itself if name == "itself" else {"merge_method": name, **merge_cases(large)[name][0]}
    whole, one = _made(recipe, tmp_path / "whole", _WIDE)
    tiled, several = _made(recipe, tmp_path / "tiled", _TIGHT)
    assert (one, several > 1) == (1, True)
    assert dict(whole.written()) == dict(tiled.written())
    if name == "itself":
        tensors = read_tensors(large[0].root).items()
        stored = {key: bytes(each.view(-1).view(torch.uint8).numpy()) for key, each in tensors}
        assert {key: bytes(each) for key, each in tiled.written()} == stored


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", slow_but(["linear", "ties"], "ties"))
def test_no_more_is_in_use_than_was_stated(name: str, large: list[QuantisedModel], tmp_path: Path) -> None:
    recipe = {"merge_method": name, **merge_cases(large)[name][0]}
    for budget in (_WIDE, _TIGHT):
        # Once unmeasured: what is compiled when it is first needed is no part of what was stated.
        bench, _ = _made(recipe, tmp_path / f"{budget}", budget)
        with counted_buffers() as buffers, AllocationMeter() as meter:
            for segment in bench.segments:
                bench.runner.run(segment)
        assert meter.peak_bytes + buffers.most <= bench.projection.peak + _OBJECTS


@pytest.mark.sample(1)
def test_threads_and_segments_change_no_byte(
    scaled_parents: list[QuantisedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"merge_method": "ties", **merge_cases(scaled_parents)["ties"][0]}
    merge(recipe, tmp_path / "one", RunOptions(inline=True, threads=1))
    monkeypatch.setattr(segments, "_segment_target", lambda _: 1)
    merge(recipe, tmp_path / "two", RunOptions(inline=True, threads=2))
    assert {f: d for f, d in digests(tmp_path / "one").items() if f.endswith(".safetensors")} == {
        f: d for f, d in digests(tmp_path / "two").items() if f.endswith(".safetensors")
    }


@pytest.mark.slow
def test_a_scale_that_a_power_cut_took_is_made_again(
    scaled_parents: list[QuantisedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in another segment's bytes than the one that makes it."""
    monkeypatch.setattr(segments, "_segment_target", lambda _: 1)
    recipe = mean_of(*scaled_parents[:2])
    merge(recipe, tmp_path / "whole")
    done = 0

    def abort(event: Event) -> None:
        nonlocal done
        done += isinstance(event, SegmentDone)
        if done == 12:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        submit(recipe, tmp_path / "out", INLINE, on_event=abort)
    (staging,) = tmp_path.glob(".out.raymerge-*")
    lines = (staging / "raymerge" / "ledger.jsonl").read_text().splitlines()[1:]
    made = {int(row) for line in lines for row in json.loads(line)["receipt"]["digests"]}
    rows, shards = plan(recipe)["ops"].to_pylist(), plan(recipe)["shards"].column("name").to_pylist()
    scale = next(rows[row["tensor_scale"]] for row in rows if row["tensor_scale"] in made)
    with (staging / f"{shards[scale['shard']]}.part").open("r+b") as file:
        file.seek(scale["offset"])
        file.write(b"lost")
    merged = merge(recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments == len(lines) - 1
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_blamed(value: float, tmp_path: Path) -> None:
    models = [fp8_llama(tmp_path / name, seed, shapes=_SIZES) for seed, name in enumerate("ab")]
    name = "model.layers.0.mlp.up_proj.weight_scale"
    (file,) = [each for each in sorted(models[1].root.glob("*.safetensors")) if name in load_file(each)]
    save_file({**load_file(file), name: torch.tensor([value])}, file, metadata={"format": "pt"})
    data = file.read_bytes()
    byte = data.index(torch.tensor([value]).numpy().tobytes())
    with pytest.raises(NonFiniteError, match=rf"here first at byte {byte} of {file.name}"):
        merge(mean_of(*models), tmp_path / "out")
