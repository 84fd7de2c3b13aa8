"""DeepSeek-V4 and V4.1 by their names on the Hub, from headers: roles, layers, experts, tables of experts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import read_config, read_tensors, write_checkpoint, write_json
from kits.deepseek_v4_headers import (
    FLASH_NUM_TENSORS,
    SMALL_CONFIG,
    V41_CONFIG,
    Experts,
    flash_specs,
    small_v4,
    v4_shapes,
)
from kits.packed_headers import GOOD, X
from kits.plan_maker import good, header_checkpoint, planned_merge, refusals
from kits.recipe_maker import linear, one, piece, stack

import raymerge
from raymerge.architectures.roles import NameReader, logical_name, module_finder, stacks
from raymerge.architectures.rules import quantisation_tables, rules_of
from raymerge.dtypes import DType

TABLE = "layers.0.ffn.gate.tid2eid"
CONFIGS = {"V4": SMALL_CONFIG, "V4.1": V41_CONFIG}
EXPERTS: tuple[Experts, ...] = ("fp4", "fp8")


def test_the_names_are_those_of_the_published_model() -> None:
    """Its index counts 69,187 tensors and 159.6 GB."""
    specs = [spec for file in flash_specs() for spec in file]
    assert len(specs) == len({spec.name for spec in specs}) == FLASH_NUM_TENSORS
    assert round(sum(spec.nbytes for spec in specs) / 1e9, 1) == 159.6


def _reader(config: Mapping[str, Any]) -> tuple[list[str], NameReader]:
    names = [name for name, _ in v4_shapes(config)]
    return names, NameReader(rules_of(config), stacks=stacks(names, config))


@pytest.mark.parametrize("version", CONFIGS)
def test_every_tensor_has_its_role(version: str) -> None:
    names, reader = _reader(CONFIGS[version])
    found = Counter(reader.describe(name).role.value for name in names)
    layers, mtp = (3, 1) if version == "V4" else (3, 2)
    assert found["embedding"] == found["head"] == 1
    assert found["expert"] == layers * 4 * 3
    assert found["shared_expert"] == layers * 3
    assert found["router"] == layers + (1 if version == "V4" else 0)
    assert found["router_bias"] == (2 if version == "V4" else 2 * layers)
    assert found["mtp"] == sum(name.startswith("mtp.") for name in names) > mtp * 3 * 2
    assert found["vision"] == sum(name.startswith(("vision.", "aligner.", "image_")) for name in names)
    others = {name for name in names if reader.describe(name).role.value == "other"}
    assert all("hc_" in name or ".engram." in name for name in others)
    parts = {name: reader.describe(name) for name in names if name.startswith("mtp.0.ffn.experts.1.")}
    assert [(each.part.value, each.expert, each.projection) for each in parts.values()] == [
        ("expert", 1, projection) for projection in ("gate", "down", "up")
    ]


def test_both_selection_biases_have_names_of_their_own() -> None:
    names, reader = _reader(V41_CONFIG)
    rules = rules_of(V41_CONFIG)
    logical = [logical_name(name, rules, info=reader.describe(name)) for name in names]
    assert len(set(logical)) == len(names)
    assert "layers.0.mlp.gate.e_score_correction_bias" in logical


def test_the_aligner_is_a_module_beside_the_text() -> None:
    names, _ = _reader(V41_CONFIG)
    module = module_finder(V41_CONFIG, stacks(names, V41_CONFIG))
    beside = {name: module(name) for name in names if module(name) != "text_decoder"}
    assert beside.keys() == {name for name in names if name.startswith(("vision.", "aligner.", "image_"))}
    assert set(beside.values()) == {"vision_tower", "multi_modal_projector"}


@pytest.mark.parametrize("version", CONFIGS)
def test_a_merge_accounts_for_everything_and_keeps_float32(version: str, tmp_path: Path) -> None:
    a, b = (small_v4(tmp_path / name, CONFIGS[version]) for name in "ab")
    made = good(linear(a, b))
    assert made.config == read_config(a)
    plain = good(linear(a, b, dtype="bfloat16"))
    for name in ("hc_head_fn", "layers.1.hc_ffn_scale", "mtp.0.attn.attn_sink", "layers.2.ffn.gate.bias"):
        assert made.method(name) == plain.method(name) == "linear"
        assert made.dtype(name) == plain.dtype(name) == "F32"
    assert plain.dtype("layers.0.ffn.experts.0.w1.weight") == "BF16"
    assert plain.dtype("mtp.0.ffn.experts.0.w1.weight") == "BF16"


def _with_entry(root: Path, number: int) -> Path:
    """Write a number into the first byte of the table of the first layer."""
    path = next(root.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    data[8 + size + header[TABLE]["data_offsets"][0]] = number
    path.write_bytes(data)
    return root


def test_a_table_of_experts_is_copied_where_all_have_the_same(tmp_path: Path) -> None:
    a, b = (small_v4(tmp_path / name) for name in "ab")
    made = good(linear(a, b))
    assert made.method(TABLE) == "copy"
    assert made.dtype(TABLE) == "I32"
    assert made.fate(1, TABLE) == ("dropped", "lead_has_it", TABLE)
    assert made.method("layers.0.ffn.gate.weight") == "linear"


def test_tables_that_differ_are_refused_unless_one_model_gives_the_routers(tmp_path: Path) -> None:
    a, b = small_v4(tmp_path / "a"), _with_entry(small_v4(tmp_path / "b"), 3)
    (said,) = refusals(linear(a, b))
    assert said.startswith(f"{b}: 1 tables that give tokens their experts are not those of {a}")
    assert "router: base" in said
    made = good(linear(a, b, router=str(b)))
    assert made.reads(TABLE) == [(1, TABLE)]
    assert good(linear(a, b, base_model=str(a), router="base")).reads(TABLE) == [(0, TABLE)]


NUMBERS = {name: torch.tensor([numbers] * 64) for name, numbers in (("a", [1, 0]), ("b", [1, 2]))}
MODULE_TABLE = "model.layers.0.mlp.gate.tid2eid"


def _with_table(root: Path, table: torch.Tensor | None, name: str = TABLE) -> Path:
    """A small V4 with this table, under this name; None for none."""
    tensors = {key: value for key, value in read_tensors(small_v4(root)).items() if key != TABLE}
    return write_checkpoint(root, tensors | ({} if table is None else {name: table}), read_config(root))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dtype"), [(TABLE, torch.int64), (MODULE_TABLE, torch.int32)])
def test_tables_are_compared_by_numbers_in_either_spelling(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    a = _with_table(tmp_path / "a", NUMBERS["a"].int())
    same = _with_table(tmp_path / "same", NUMBERS["a"].to(dtype), name)
    other = _with_table(tmp_path / "b", NUMBERS["b"].to(dtype), name)
    made = good(linear(a, same))
    assert made.reads(TABLE) == [(0, TABLE)]
    assert made.fate(1, name) == ("dropped", "lead_has_it", TABLE)
    (compared, differing) = (
        [each for each in raymerge.diff(a, root).tensors if "tid2eid" in each.name] for root in (same, other)
    )
    assert [each.status for each in compared] == (["same_numbers"] if dtype is torch.int64 else [])
    assert all((each.stored_a[:3], each.stored_b[:3]) == ("I32", "I64") for each in compared)
    assert [(each.status, each.relative_error) for each in differing] == [("different", None)]
    (said,) = refusals(linear(a, other))
    assert said.startswith(f"{other}: 1 tables that give tokens their experts are not those of {a}")
    rule = {"role": ["expert", "router"], "merge_method": "passthrough", "sources": [str(other)]}
    for recipe in (linear(a, other, router=str(other)), linear(a, other, methods=[rule])):
        made = good(recipe)
        assert made.reads(TABLE) == [(1, name)]
        assert made.dtype(TABLE) == {torch.int32: "I32", torch.int64: "I64"}[dtype]


def test_a_model_without_a_table_gives_no_router(tmp_path: Path) -> None:
    a, bare = small_v4(tmp_path / "a"), _with_table(tmp_path / "b", None)
    for recipe in (linear(a, bare), linear(a, bare, router=str(bare))):
        (said,) = refusals(recipe)
        assert said.startswith(f"{bare}: it lacks 1 tables that give tokens their experts")
    assert good(linear(a, bare, router=str(a))).reads(TABLE) == [(0, TABLE)]


def test_experts_of_one_model_beside_a_merge_of_the_rest(tmp_path: Path) -> None:
    a, b = (small_v4(tmp_path / name) for name in "ab")
    rule = {"role": ["expert", "router", "router_bias"], "merge_method": "passthrough", "sources": [str(b)]}
    made = good(linear(a, b, methods=[rule]))
    for name in made.names():
        if ".ffn.experts." in name or ".ffn.gate." in name:
            assert made.method(name) == "copy", name
            assert made.reads(name) == [(1, name)], name
        elif not name.endswith(".scale"):
            assert made.method(name) == "linear", name


def test_another_vocabulary_is_refused_for_its_table(tmp_path: Path) -> None:
    a = small_v4(tmp_path / "a")
    b = small_v4(tmp_path / "b", {**SMALL_CONFIG, "vocab_size": 60})
    (said,) = refusals(linear(a, b, embedding_sizes="common", router=str(a)))
    assert TABLE in said
    assert "would not have the same tokens" in said


def test_layers_move_with_their_tables_and_ratios(tmp_path: Path) -> None:
    a, b = (small_v4(tmp_path / name) for name in "ab")
    made = good(stack(piece(a, 0, 2), piece(b, 1, 3)))
    assert made.config["num_hidden_layers"] == 4
    assert made.config["compress_ratios"] == [0, 4, 4, 128, 0]
    assert made.config["num_hash_layers"] == 1
    assert made.config["num_nextn_predict_layers"] == 1
    assert made.reads("mtp.0.e_proj.scale") == [(1, "mtp.0.e_proj.scale")]
    (said,) = refusals(stack(piece(a, 1, 2), piece(a, 0, 1)))
    assert "num_hash_layers" in said


def test_layers_of_v41_that_share_stay_where_they_are(tmp_path: Path) -> None:
    root = small_v4(tmp_path / "a", V41_CONFIG)
    said = refusals(stack(piece(root, 0, 2)))
    assert [each.split("slices: ")[1].split(" is ")[0] for each in said] == [
        "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids",
    ]  # fmt: skip


def _changed(root: Path, **change: Any) -> dict[str, Any]:
    return {"base_model": str(root), "experts": change}


def test_experts_are_added_behind_those_that_tables_name(tmp_path: Path) -> None:
    a, b = (small_v4(tmp_path / name) for name in "ab")
    made = planned_merge(tmp_path, _changed(a, add=[{"model": str(b), "experts": [2]}]))
    assert not made.plan.problems
    assert made.config["n_routed_experts"] == 5
    assert made.reads("layers.0.ffn.experts.4.w1.scale") == [(1, "layers.0.ffn.experts.2.w1.scale")]
    assert made.reads("mtp.0.ffn.experts.4.w2.weight") == [(1, "mtp.0.ffn.experts.2.w2.weight")]
    assert made.method(TABLE) == "copy"


def test_experts_that_tables_name_are_not_left_out(tmp_path: Path) -> None:
    root = small_v4(tmp_path / "a")
    (said,) = refusals(_changed(root, keep=[0, 1]))
    assert said.startswith(f"{root}: 1 tables give tokens experts that would be gone")
    assert TABLE in said
    assert "'merge'" in said


def test_tables_follow_experts_to_their_new_numbers(tmp_path: Path) -> None:
    root = small_v4(tmp_path / "a", experts="bf16")
    moved = good(_changed(root, keep=[2, 0, 1, 3]))
    merged = good(_changed(root, merge=[[1, 3], [0], [2]]))
    for made, numbers in ((moved, [1, 2, 0, 3]), (merged, [1, 0, 2, 0])):
        (row,) = made.rows(TABLE)
        expression = made.plan.expressions[row["expression"]]
        assert (expression.method, expression.cast.value) == ("renumber", "I32")
        assert json.loads(expression.settings)["numbers"] == numbers
        assert made.fate(0, TABLE) == ("converted", "renumbered", TABLE)
    assert good(_changed(root, keep=[0, 1, 2, 3])).method(TABLE) == "copy"


def test_a_table_with_experts_that_are_not_there_is_refused(tmp_path: Path) -> None:
    root = _with_entry(small_v4(tmp_path / "a"), 4)
    (said,) = refusals(_changed(root, keep=[1, 0, 2, 3]))
    assert "1 tables name experts that are not there" in said


def test_experts_of_v41_change_and_those_for_further_tokens_stay(tmp_path: Path) -> None:
    root = small_v4(tmp_path / "a", V41_CONFIG)
    made = good(_changed(root, keep=[3, 1, 0]))
    assert made.config["text_config"]["n_routed_experts"] == 3
    assert made.config["text_config"]["dspark_n_routed_experts"] == 2
    for name, kept in (("w1.weight", 3), ("w1.scale", 3)):
        old = f"layers.2.ffn.experts.{kept}.{name}"
        assert made.reads(f"layers.2.ffn.experts.0.{name}") == [(0, old)]
    assert sum(name.startswith("mtp.") for name in made.names()) == sum(
        name.startswith("mtp.") for name in made.sources[0].checkpoint.tensors
    )
    for bias in ("bias", "bias_vl"):
        assert len(made.rows(f"layers.1.ffn.gate.{bias}")) == 3
    assert (
        "layers that predict further tokens keep experts of their own, 2 each" in made.plan.manifest["notes"]
    )


def test_a_dtype_beside_the_text_alone_is_kept_there(tmp_path: Path) -> None:
    root = small_v4(tmp_path / "a", V41_CONFIG)
    config = read_config(root)
    assert "torch_dtype" not in config
    config["text_config"]["torch_dtype"] = "bfloat16"
    write_json(root / "config.json", config)
    made = good(one(root, dtype="float16"))
    assert made.config["text_config"]["torch_dtype"] == "float16"
    assert "dtype" not in made.config


@pytest.mark.parametrize("version", CONFIGS)
def test_what_publishers_leave_plain_stays_so_in_fp8(version: str, tmp_path: Path) -> None:
    """As compressors do, though they are of attention."""
    root = small_v4(tmp_path / "a", CONFIGS[version], experts="fp8")
    made = good(one(root, out_format="fp8_block"))
    assert {made.method(name) for name in made.names()} == {"copy"}
    assert made.config == read_config(root)


@pytest.mark.parametrize("version", CONFIGS)
def test_experts_change_their_format_with_what_the_config_says_of_them(version: str, tmp_path: Path) -> None:
    """There and back: codes in bytes beside FP8 are told of by ``expert_dtype`` alone."""
    roots = {experts: small_v4(tmp_path / experts, CONFIGS[version], experts=experts) for experts in EXPERTS}
    name = "layers.1.ffn.experts.0.w1.weight"
    for asked, experts in (("fp8_block", "fp8"), ([{"role": "expert", "value": "mxfp4"}, "same"], "fp4")):
        made = good(one(roots["fp4" if experts == "fp8" else "fp8"], out_format=asked))
        assert made.dtype(name) == {"fp8": "F8_E4M3", "fp4": "I8"}[experts]
        assert made.dtype(name.replace("weight", "scale")) == "F8_E8M0"
        assert quantisation_tables(made.config)[0]["expert_dtype"] == experts
    plain = good(one(roots["fp4"], out_format="bf16")).config
    assert "expert_dtype" not in {**plain, **plain.get("text_config", {})}


def test_experts_of_an_unlisted_family_stay_in_their_own_layout(tmp_path: Path) -> None:
    root = small_v4(tmp_path / "a", {**SMALL_CONFIG, "model_type": "nobody_knows"}, experts="fp4")
    made = good(one(root, out_format=[{"role": "expert", "value": "mxfp4"}, "same"]))
    assert {made.method(name) for name in made.names()} == {"copy"}


def test_experts_in_two_formats_have_no_config(tmp_path: Path) -> None:
    """Loaders go by ``expert_dtype`` alone, which is one for layers and ``mtp``."""
    roots = {experts: small_v4(tmp_path / experts, experts=experts) for experts in EXPERTS}
    mtp = [{"role": "mtp", "value": "mxfp4"}, "same"]
    one_layer = [{"glob": "layers.1.ffn.experts.*.weight", "value": "fp8_block"}, "same"]
    stacked = stack(piece(roots["fp8"], 0, 2), piece(roots["fp4"], 1, 3))
    for recipe in (one(roots["fp8"], out_format=mtp), one(roots["fp4"], out_format=one_layer), stacked):
        (said,) = refusals(recipe)
        assert "experts would be stored as" in said
        assert "'expert_dtype' in config.json" in said
    every = [{"role": "expert", "value": "mxfp4"}, "same"]
    for recipe in (one(roots["fp8"], out_format=every), {**stacked, "out_format": every}):
        made = good(recipe)
        assert {made.dtype(name) for name in made.names() if name.endswith(".experts.0.w1.weight")} == {"I8"}
        assert made.config["expert_dtype"] == "fp4"


@pytest.mark.parametrize(("kind", "has_powers"), [("Kimi-K3", True), ("Kimi-K2-Thinking", False)])
def test_fp8_of_mxfp4_has_scales_that_are_powers_of_two(kind: str, has_powers: bool, tmp_path: Path) -> None:
    """So nothing is lost; of INT4, whose scales are any numbers, it has the finest."""
    specs, table, _ = GOOD[kind]
    specs = {**specs, "model.norm.weight": (DType.BF16, (64,))}
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": table}
    made = good(one(header_checkpoint(tmp_path / "a", specs, config), out_format="fp8_block"))
    fresh = made.config["quantization_config"]
    assert (fresh["quant_method"], fresh.get("scale_fmt")) == ("fp8", "ue8m0" if has_powers else None)
    assert made.dtype(f"{X}.weight_scale_inv") == "F32"
