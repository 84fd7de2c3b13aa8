"""Merges of quantised models, and what their configs say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint
from kits.marks import slow_but
from kits.merge_cases import Family, merge, recipes
from kits.packed_headers import W4, compressed
from kits.plan_maker import Specs, header_checkpoint, llama_config, llama_specs
from kits.quantised_merges import (
    MAKERS,
    changed_bytes,
    check_merged,
    check_stored_alike,
    entries,
    linear,
    merge_cases,
    merged_values,
    read_numbers,
)
from kits.quantised_models import QuantisedModel
from kits.quantised_numbers import int4

import raymerge
from raymerge.api import plan
from raymerge.dtypes import DType
from raymerge.methods import methods

METHODS = tuple(methods())

_SOME = ("linear", "slerp", "ties", "dare_ties", "nuslerp", "model_stock", "passthrough")
SELF_MERGED = {
    "gpt-oss": METHODS,
    "Kimi-K2-Thinking": _SOME,
    "DeepSeek-V3 F32": _SOME,
    "DeepSeek-V3 U8": _SOME,
}
"""What is merged with itself, and by which methods."""


@pytest.fixture(scope="module", params=slow_but(MAKERS, "Kimi-K2-Thinking", "DeepSeek-V3 F32"))
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[QuantisedModel]:
    """A base and two more of its kind."""
    root = tmp_path_factory.mktemp("parents")
    return [MAKERS[request.param](root / name, seed) for seed, name in enumerate(("base", "one", "two"))]


@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
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


@pytest.mark.parametrize("kind", slow_but(SELF_MERGED, "Kimi-K2-Thinking", "DeepSeek-V3 F32"))
def test_a_model_merged_with_itself_is_itself(kind: str, tmp_path: Path) -> None:
    """To the last byte of codes and scales."""
    same = [MAKERS[kind](tmp_path / f"same{number}", 1).root for number in range(4)]
    asked_of = recipes(Family(same[0], tuple(same[1:])))
    for method in SELF_MERGED[kind]:
        # The stack is another model, an expert is changed, and linear's recipe asks for another dtype.
        asked = {key: value for key, value in asked_of[method].items() if key != "dtype"}
        if method in ("passthrough", "upcycle"):
            asked = {"merge_method": method, "models": [{"model": str(same[1])}]}
        merge(asked, tmp_path / method)
        check_stored_alike(tmp_path / method, same[0])
        assert changed_bytes(tmp_path / method, same[0]) == set(), method


def _role(name: str) -> str:
    for role, words in {"expert": (".experts.",), "attention": (".self_attn.",)}.items():
        if any(word in name for word in words) and "layernorm" not in name:
            return role
    return "other"


@pytest.mark.parametrize("role", ["expert", "attention"])
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


@pytest.mark.parametrize("role", ["expert", "attention"])
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


@pytest.mark.parametrize(("columns", "group"), [(304, 304), (288, 96), (1024, 512)])
def test_groups_of_any_size_are_merged(columns: int, group: int, tmp_path: Path) -> None:
    """Neither a divisor nor a multiple of what tiles are cut by."""
    parents = [_grouped(tmp_path / name, seed, columns, group) for seed, name in enumerate("ab")]
    models = [
        {"model": str(each.root), "parameters": {"weight": w}}
        for each, w in zip(parents, (1, 3), strict=True)
    ]
    merge({"merge_method": "linear", "models": models}, tmp_path / "out")
    check_stored_alike(tmp_path / "out", parents[0].root)
    check_merged(tmp_path / "out", merged_values(parents, linear(1, 3)), parents)
    found = raymerge.audit(
        tmp_path / "out", raymerge.AuditOptions(sample=1.0), raymerge.RunOptions(inline=True)
    )
    assert not found.num_problems


_HIDDEN = 64
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_INT8 = {**_INT4, "num_bits": 8}
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
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for name, (dtype, shape) in llama_specs(2, hidden=_HIDDEN).items():
        stored = attention if "self_attn" in name else mlp if ".mlp." in name else None
        found = {name: (dtype, shape)} if stored is None else stored(name.removesuffix(".weight"), *shape)
        specs.update(found)
    config = llama_config(layers=2, hidden=_HIDDEN)
    said = {} if table is None else {"quantization_config": dict(table)}
    return header_checkpoint(root, {**specs, **(more or {})}, {**config, **said})


def _table(
    *groups: tuple[str, Mapping[str, Any]], form: str = "mixed-precision", **more: Any
) -> dict[str, Any]:
    made = {
        f"group_{number}": {"targets": [target], "weights": dict(weights)}
        for number, (target, weights) in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": made,
        "ignore": ["lm_head"],
        **more,
    }


def _planned(model: Path, out_format: Any) -> tuple[Any, str]:
    """The table of a conversion, and what is wrong with it."""
    models = [{"model": str(model)}]
    made = raymerge.plan({"merge_method": "passthrough", "models": models, "out_format": out_format})
    said = " ".join(f"{each.what} {each.remedy}" for each in made.problems)
    return made.manifest["config"].get("quantization_config"), said


def _part(role: str, value: str, rest: str = "same") -> list[Any]:
    return [{"role": role, "value": value}, rest]


def test_tables_of_unread_formats_stay_where_what_is_copied_is_all(tmp_path: Path) -> None:
    model = _model(tmp_path / "gptq", _plain, _gptq, _GPTQ)
    assert _planned(model, "same") == (_GPTQ, "")
    said = _planned(model, _part("attention", "fp8_block"))[1]
    assert "24 tensors would be copied as gptq (such as model.layers.0.mlp.down_proj.g_idx)" in said
    assert "stored as fp8_block (such as model.layers.0.self_attn.k_proj)" in said


def test_wider_integers_keep_the_table_that_tells_of_them(tmp_path: Path) -> None:
    table = _table((_ATTENTION, _CHANNEL), (_MLP, _INT8))
    model = _model(tmp_path / "wide", _channel, _packed, table)
    assert _planned(model, "same") == (table, "")
    freed, said = _planned(model, _part("attention", "bf16"))
    assert said == ""
    assert freed["config_groups"] == table["config_groups"]
    assert "model.layers.1.self_attn.q_proj" in freed["ignore"]
    said = _planned(model, _part("attention", "int4"))[1]
    assert "would be copied as packed integers, declared as 8-bit int by group (such as " in said
    assert "stored as int4 (such as model.layers.0.self_attn.k_proj)" in said


def test_integers_are_as_wide_as_the_group_of_their_module_says(tmp_path: Path) -> None:
    model = _model(tmp_path / "two", _packed, _packed, _table((_ATTENTION, _INT8), (_MLP, _INT4)))
    names = {group.name: group.tensors for group in raymerge.inspect(model).quantised}
    assert names == {"int4": 18, "packed integers, declared as 8-bit int by group": 24}


def test_integers_that_no_group_names_are_not_taken_for_narrow_ones(tmp_path: Path) -> None:
    table = _table(("re:x.*self_attn.*", _INT8), ("re:x.*mlp.*", _INT4))
    (group,) = raymerge.inspect(_model(tmp_path / "two", _packed, _packed, table)).quantised
    assert group.name == "packed integers, declared as 8-bit int by group"


def test_groups_that_speak_of_other_modules_make_way(tmp_path: Path) -> None:
    table = _table((_ATTENTION, _CHANNEL), (_MLP, _INT4))
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
    table = _table((_MLP, _INT4), form="pack-quantized")
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
def test_the_scheme_of_keys_and_values_stays_with_their_scales(has_scales: bool, tmp_path: Path) -> None:
    more: Specs = {
        f"model.layers.{layer}.self_attn.{each}_scale": (DType.F32, (1,)) for layer in (0, 1) for each in "kv"
    }
    table = _table(("Linear", _CHANNEL), form="float-quantized", kv_cache_scheme=_CACHE)
    model = _model(tmp_path / "cache", _channel, _channel, table, more if has_scales else None)
    fresh, said = _planned(model, "int4")
    assert said == ""
    assert fresh["format"] == "pack-quantized"
    assert fresh["kv_cache_scheme"] == (_CACHE if has_scales else None)


_STORED: dict[str, tuple[Parts, Mapping[str, Any] | None]] = {
    "block": (_block, _FP8),
    "channel": (_channel, _table(("Linear", _CHANNEL), form="float-quantized")),
    "plain": (_plain, None),
}


def _stack(tmp_path: Path, *kinds: str, **more: Any) -> tuple[Any, str]:
    """Two layers of each, in this order."""
    slices = []
    for kind in kinds:
        parts, table = _STORED[kind]
        model = _model(tmp_path / kind, parts, parts, table)
        slices.append({"sources": [{"model": str(model), "layer_range": [0, 2]}]})
    made = raymerge.plan({"merge_method": "passthrough", "slices": slices, **more})
    said = " ".join(f"{each.what} {each.remedy}" for each in made.problems)
    return made.manifest["config"].get("quantization_config"), said


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


def test_blocks_of_two_sizes_are_refused_together(tmp_path: Path) -> None:
    slices = []
    for size in (128, 32):
        table = {**_FP8, "weight_block_size": [size, size]}
        model = _model(tmp_path / str(size), partial(_block, size=size), _plain, table)
        slices.append({"sources": [{"model": str(model), "layer_range": [0, 2]}]})
    made = raymerge.plan({"merge_method": "passthrough", "slices": slices})
    said = " ".join(each.what for each in made.problems)
    assert "as fp8_block in blocks of 128x128 (such as model.layers.0.self_attn.k_proj)" in said
    assert "as fp8_block in blocks of 32x32 (such as model.layers.2.self_attn.k_proj)" in said


def test_a_stack_of_two_formats_is_refused_with_a_remedy_that_helps(tmp_path: Path) -> None:
    said = _stack(tmp_path, "block", "channel")[1]
    assert "as fp8_block (such as model.layers.0.mlp.down_proj)" in said
    assert "as fp8_channel (such as model.layers.2.mlp.down_proj)" in said
    assert "such as 'out_format: fp8_block'" in said
