"""What is planned for changed experts: copied bytes, dispositions, config fields, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, sparse_checkpoint, write_checkpoint
from kits.deepseek_headers import V3_CONFIG, deepseek_v3_specs
from kits.marks import one_in
from kits.model_types_decoders import SPARSE
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, refusals
from kits.quantised_models import deepseek_v3
from kits.recipe_maker import one

from raymerge.architectures.expert_fields import (
    ExpertFields,
    Field,
    dense_config,
    dense_counterparts,
    dense_objections,
    expert_fields,
    with_expert_count,
    with_expert_names,
)
from raymerge.architectures.rules import load_rules
from raymerge.checkpoints.header import StoredTensor, TensorSpec
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.planner.inputs.sources import open_models
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock, Numbered, expert_blocks
from raymerge.planner.moe.expert_moves import NewExpert, Origin, regrouped
from raymerge.recipes.load import recipe_from_mapping

HIDDEN, WIDTH = 32, 16
QUANTISED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
BLOCK = "model.layers.{}.block_sparse_moe"


def _config(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    } | more


def _specs(experts: int = 4, *, width: int = WIDTH, dtype: DType = DType.BF16) -> Specs:
    found = {name: spec for name, spec in llama_specs(2).items() if ".mlp." not in name}
    for layer in range(2):
        block = BLOCK.format(layer)
        found[f"{block}.gate.weight"] = (DType.BF16, (experts, HIDDEN))
        for expert in range(experts):
            for word, shape in (("w1", (width, HIDDEN)), ("w3", (width, HIDDEN)), ("w2", (HIDDEN, width))):
                found[f"{block}.experts.{expert}.{word}.weight"] = (dtype, shape)
    return found


def _mixtral(root: Path, specs: Specs | None = None, **config: Any) -> Path:
    return header_checkpoint(root, _specs() if specs is None else specs, _config(**config))


def _dense(root: Path, width: int) -> Path:
    specs = {
        name: (dtype, tuple(width if size == 2 * HIDDEN and ".mlp." in name else size for size in shape))
        for name, (dtype, shape) in llama_specs(2).items()
    }
    return header_checkpoint(root, specs, _config(model_type="llama", num_local_experts=None))


@pytest.mark.parametrize("table", ["fp8", ["fp8"], 7])
@pytest.mark.parametrize("experts", [{"keep": [0, 1]}, {"dense": "mean"}])
def test_a_table_of_quantisation_that_is_none_is_refused(
    table: Any, experts: dict[str, Any], tmp_path: Path
) -> None:
    root = _mixtral(tmp_path / "m", quantization_config=table)
    (problem,) = refusals({"base_model": root, "experts": experts})
    (expected,) = refusals(one(root))
    assert problem == expected


def test_every_tensor_has_its_rule(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m")
    made = good({"base_model": root, "experts": {"keep": [2, 0]}})
    block = BLOCK.format(1)
    kept = made.fate(0, f"{block}.experts.2.w1.weight")
    assert kept == ("copied", "one_source", f"{block}.experts.0.w1.weight")
    assert made.fate(0, f"{block}.experts.1.w1.weight") == ("dropped", "expert_not_kept", "")
    assert made.fate(0, "lm_head.weight") == ("copied", "one_source", "lm_head.weight")
    assert made.reads(f"{block}.experts.1.w2.weight") == [(0, f"{block}.experts.0.w2.weight")]
    assert made.config == _config(num_local_experts=2)
    assert "2 layers have 2 experts each, where there were 4" in made.plan.manifest["notes"]
    assert made.plan.manifest["method"] == "keep experts"


def test_only_experts_are_taken_of_another_model(tmp_path: Path) -> None:
    root, other = _mixtral(tmp_path / "m"), _mixtral(tmp_path / "other")
    made = good({"base_model": root, "experts": {"add": [{"model": other, "experts": [3]}]}})
    block = BLOCK.format(0)
    assert made.reads(f"{block}.experts.4.w1.weight") == [(1, f"{block}.experts.3.w1.weight")]
    assert made.reads(f"{block}.gate.weight") == [(0, f"{block}.gate.weight"), (1, f"{block}.gate.weight")]
    assert made.fate(1, "lm_head.weight") == ("dropped", "only_experts_taken", "")
    twice = good({"base_model": root, "experts": {"add": [{"model": root, "experts": [3]}]}})
    assert twice.reads(f"{block}.experts.4.w1.weight") == [(0, f"{block}.experts.3.w1.weight")]


def _fp8(scale: str = "weight_scale_inv") -> Specs:
    """Experts in block FP8, their scales beside them."""
    specs = _specs(dtype=DType.F8_E4M3)
    scales = {name.replace("weight", scale): (DType.F32, (1, 1)) for name in specs if ".experts." in name}
    return {**specs, **scales}


def test_codes_and_scales_of_quantised_experts_go_together(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m", _fp8(), **QUANTISED)
    made = good({"base_model": root, "experts": {"keep": [3, 1]}})
    block = BLOCK.format(1)
    for leaf in ("weight", "weight_scale_inv"):
        assert made.reads(f"{block}.experts.0.w3.{leaf}") == [(0, f"{block}.experts.3.w3.{leaf}")]
        assert made.fate(0, f"{block}.experts.2.w3.{leaf}")[1] == "expert_not_kept"
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    other = _mixtral(tmp_path / "other", _fp8(), **QUANTISED)
    added = good({"base_model": root, "experts": {"add": [{"model": other}]}})
    assert added.reads(f"{block}.experts.7.w2.weight") == [(1, f"{block}.experts.3.w2.weight")]
    plain, dense = _mixtral(tmp_path / "plain"), _dense(tmp_path / "dense", WIDTH)
    for change in (
        {"merge": [[0, 1], [2, 3]]},
        {"dense": "mean"},
        {"dense": 1},
        {"add": [{"model": plain}]},
        {"add": [{"model": dense, "row_of": 1}]},
    ):
        problems = refusals({"base_model": root, "experts": change})
        assert problems
        assert all("quantised as fp8_block, and recipes that" in problem for problem in problems)
    (problem,) = refusals({"base_model": root, "experts": {"keep": [0, 1]}, "dtype": "bfloat16"})
    assert "quantised as fp8_block, and recipes that" in problem


def _mixed(coded: tuple[int, ...] = (0, 2)) -> Specs:
    """Some experts in block FP8, the others in BF16 without scales."""
    codes = {f".experts.{expert}." for expert in coded}

    def is_coded(name: str) -> bool:
        return any(mark in name for mark in codes)

    plain = {name: spec for name, spec in _specs().items() if not is_coded(name)}
    return plain | {name: spec for name, spec in _fp8().items() if is_coded(name)}


def test_plain_experts_between_quantised_ones_are_copied(tmp_path: Path) -> None:
    root, block = _mixtral(tmp_path / "m", _mixed(), **QUANTISED), BLOCK.format(1)
    made = good({"base_model": root, "experts": {"keep": [1, 2, 3]}})
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    assert [made.dtype(f"{block}.experts.{new}.w1.weight") for new in range(3)] == ["BF16", "F8_E4M3", "BF16"]
    scales = [name for name in made.names() if name.endswith("w1.weight_scale_inv") and block in name]
    assert scales == [f"{block}.experts.1.w1.weight_scale_inv"]
    assert made.reads(scales[0]) == [(0, f"{block}.experts.2.w1.weight_scale_inv")]
    assert made.fate(0, f"{block}.experts.0.w1.weight_scale_inv")[1] == "expert_not_kept"
    merged = good({"base_model": root, "experts": {"merge": [[0], [2], [1, 3]]}})
    assert [merged.dtype(f"{block}.experts.{n}.w2.weight") for n in range(3)] == [
        "F8_E4M3",
        "F8_E4M3",
        "BF16",
    ]
    assert f"{block}.experts.2.w2.weight_scale_inv" not in merged.names()
    problems = refusals({"base_model": root, "experts": {"merge": [[0, 1], [2], [3]]}})
    assert problems
    assert all("quantised as fp8_block, and recipes that" in problem for problem in problems)
    dense = good({"base_model": root, "experts": {"dense": "mean", "of": [1, 3]}})
    assert dense.dtype("model.layers.0.mlp.up_proj.weight") == "BF16"
    kept = good({"base_model": root, "experts": {"keep": [1, 3]}})
    for made, is_quantised in ((dense, False), (kept, False), (merged, True)):
        assert ("quantization_config" in made.config) == is_quantised


def test_experts_are_added_to_mixed_ones_as_they_are(tmp_path: Path) -> None:
    root, block = _mixtral(tmp_path / "m", _mixed(), **QUANTISED), BLOCK.format(0)
    other = _mixtral(tmp_path / "other", _mixed((1,)), **QUANTISED)
    made = good({"base_model": root, "experts": {"add": [{"model": other, "experts": [1, 2]}]}})
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    assert made.reads(f"{block}.experts.4.w3.weight_scale_inv") == [
        (1, f"{block}.experts.1.w3.weight_scale_inv")
    ]
    assert [made.dtype(f"{block}.experts.{new}.w3.weight") for new in (4, 5)] == ["F8_E4M3", "BF16"]
    assert f"{block}.experts.5.w3.weight_scale_inv" not in made.names()


def test_a_quantised_expert_that_lacks_its_scale_is_refused(tmp_path: Path) -> None:
    for number, missing in enumerate(("experts.2.w1.weight_scale_inv", "experts.1.w1.weight")):
        specs = {name: spec for name, spec in _mixed().items() if not name.endswith(missing)}
        root = _mixtral(tmp_path / str(number), specs, **QUANTISED)
        problems = refusals({"base_model": root, "experts": {"keep": [0, 1]}})
        assert any("are stored for others" in each and missing in each for each in problems)


def test_an_expert_that_stands_alone_keeps_its_dtype(tmp_path: Path) -> None:
    wide = f"{BLOCK.format(1)}.experts.2."
    specs = {name: (DType.F32, spec[1]) if name.startswith(wide) else spec for name, spec in _specs().items()}
    root, name = _mixtral(tmp_path / "m", specs), f"{BLOCK.format(1)}.experts.{{}}.w1.weight"
    made = good({"base_model": root, "experts": {"keep": [1, 2]}})
    assert [made.dtype(name.format(new)) for new in range(2)] == ["BF16", "F32"]
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    assert made.fate(0, name.format(2)) == ("copied", "one_source", name.format(1))
    merged = good({"base_model": root, "experts": {"merge": [[0, 2], [3], [1]]}})
    assert [merged.dtype(name.format(new)) for new in range(3)] == ["BF16", "BF16", "BF16"]
    merged = good({"base_model": root, "experts": {"merge": [[2], [0, 3], [1]]}})
    assert [merged.dtype(name.format(new)) for new in range(3)] == ["F32", "BF16", "BF16"]
    added = good({"base_model": tmp_path / "m", "experts": {"add": [{"model": root, "experts": [2, 0]}]}})
    assert [added.dtype(name.format(new)) for new in (4, 5)] == ["F32", "BF16"]
    plain = _mixtral(tmp_path / "plain")
    added = good({"base_model": plain, "experts": {"add": [{"model": root, "experts": [2]}]}})
    assert added.dtype(name.format(4)) == "BF16"


def test_a_fused_layout_that_is_not_known_is_shared_out(tmp_path: Path) -> None:
    specs = {name: spec for name, spec in llama_specs(2).items() if ".mlp." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        specs |= {
            f"{block}.gate.weight": (DType.BF16, (4, HIDDEN)),
            f"{block}.experts.gate_up_proj": (DType.BF16, (4, HIDDEN, HIDDEN)),
            f"{block}.experts.down_proj": (DType.BF16, (4, HIDDEN, HIDDEN)),
        }
    root = header_checkpoint(tmp_path / "m", specs, _config(model_type="unheard_of", intermediate_size=32))
    good({"base_model": root, "experts": {"keep": [1, 3]}})
    good({"base_model": root, "experts": {"merge": [[1, 3], [0, 2]]}})
    other = header_checkpoint(tmp_path / "other", specs, _config(model_type="mixtral", intermediate_size=32))
    (problem,) = refusals({"base_model": root, "experts": {"add": [{"model": other}]}})
    assert "in an order that model_type 'unheard_of' does not tell" in problem


@pytest.mark.slow
def test_deepseek_v3_in_fp8_loses_half_its_experts(tmp_path: Path) -> None:
    config = {**V3_CONFIG, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    root = sparse_checkpoint(tmp_path / "v3", _thin(deepseek_v3_specs()), config | {"num_hidden_layers": 4})
    made = good({"base_model": root, "experts": {"keep": list(range(0, 256, 2))}})
    assert made.config["n_routed_experts"] == 128
    name = "model.layers.4.mlp.experts.127.down_proj.weight_scale_inv"
    assert made.reads(name) == [(0, name.replace("127", "254"))]
    assert made.dtype("model.layers.4.mlp.gate.e_score_correction_bias") == "F32"
    groups = "experts come into other groups than the router knew them in"
    assert not any(note.startswith(groups) for note in made.plan.manifest["notes"])
    first = good({"base_model": root, "experts": {"keep": list(range(128))}})
    assert any(note.startswith(groups) for note in first.plan.manifest["notes"])


def _thin(files: list[list[TensorSpec]]) -> list[list[TensorSpec]]:
    """DeepSeek-V3 with four layers, the last with experts, and its prediction layer."""
    kept: list[TensorSpec] = []
    for spec in (each for file in files for each in file):
        layer = int(spec.name.split(".")[2]) if ".layers." in spec.name else 0
        if layer < 4:
            kept.append(spec)
        elif layer == 61:
            kept.append(TensorSpec(spec.name.replace("layers.61.", "layers.4."), spec.dtype, spec.shape))
    return [kept]


def test_prediction_layers_beside_the_stack_count_after_it(tmp_path: Path) -> None:
    specs = dict(_specs())
    specs |= {
        name.replace("model.layers.0", "mtp.layers.0"): spec
        for name, spec in specs.items()
        if "layers.0." in name
    }
    root = _mixtral(tmp_path / "m", specs)
    made = good({"base_model": root, "experts": {"keep": {"0": [0, 1], "1": [1, 2], "2": [2, 3]}}})
    name = BLOCK.format(0).replace("model", "mtp") + ".experts.0.w1.weight"
    assert made.reads(name) == [(0, name.replace("experts.0", "experts.2"))]
    (problem,) = refusals({"base_model": root, "experts": {"keep": {"0": [0, 1], "1": [1, 2]}}})
    assert "these layers have experts too, and no list here: 2" in problem


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "id": ({"keep": [0, 4]}, "there is no expert 4: {root} has 4, from 0 to 3"),
    "few": ({"keep": [1]}, "num_experts_per_tok is 2, but there would be 1 experts"),
    "layer": ({"keep": {"0": [0, 1]}}, "these layers have experts too, and no list here: 1"),
    "beyond": ({"keep": {"0": [0, 1], "1": [0, 1], "7": [0, 1]}}, "these layers have no experts: 7"),
    "cover": ({"merge": [[0, 1], [2]]}, "these experts are in no group: 3"),
    "covers": ({"merge": {"0": [[0, 1], [2, 3]], "1": [[0, 1], [2]]}}, "these experts are in no group: 3"),
    "all": ({"drop": 4, "scores": "weights"}, "4 experts are to go, and there are 4 in each layer"),
    "row": ({"add": [{"model": "{root}", "row_of": 9}]}, "there is no expert 9"),
    "theirs": ({"add": [{"model": "{root}", "experts": [5]}]}, "there is no expert 5"),
    "dense": ({"dense": 4}, "there is no expert 4"),
    "of": ({"dense": "mean", "of": [0, 4]}, "there is no expert 4"),
    "file": ({"drop": 1, "scores": "nowhere.json"}, "there is no such file of scores"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals(case: str, tmp_path: Path) -> None:
    change, expected = CASES[case]
    root = _mixtral(tmp_path / "m")
    for entry in change.get("add", ()):
        entry["model"] = str(root)
    problems = refusals({"base_model": root, "experts": change})
    assert any(expected.format(root=root) in problem for problem in problems), problems


def test_groups_are_kept_whole(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m", _specs(8), num_local_experts=8, n_group=4, topk_group=2)
    (problem,) = refusals({"base_model": root, "experts": {"keep": [0, 1, 2, 3, 4, 5]}})
    assert "n_group is 4, and 6 experts are not so many equal groups" in problem
    assert "4 or 8" in problem
    (problem,) = refusals({"base_model": root, "experts": {"drop": 3, "scores": "weights"}})
    assert "3 cannot be taken from all alike" in problem


def test_what_has_no_experts_is_refused(tmp_path: Path) -> None:
    dense = header_checkpoint(tmp_path / "d", llama_specs(2), {**_config(), "num_local_experts": 0})
    (problem,) = refusals({"base_model": dense, "experts": {"keep": [0, 1]}})
    assert "has no experts that could be changed" in problem
    counted = header_checkpoint(tmp_path / "c", llama_specs(2), _config())
    (problem,) = refusals({"base_model": counted, "experts": {"keep": [0, 1]}})
    assert "no layer of its text model holds any" in problem


def test_broken_blocks_are_refused(tmp_path: Path) -> None:
    specs = {name: spec for name, spec in _specs().items() if "experts.2.w1" not in name}
    (problem,) = refusals({"base_model": _mixtral(tmp_path / "a", specs), "experts": {"keep": [0, 1]}})
    assert "the config counts 4 experts" in problem
    ignored: dict[str, Any] = {
        "quantization_config": {"quant_method": "x", "ignore": [f"{BLOCK.format(0)}.experts.3.w1"]}
    }
    (problem,) = refusals({"base_model": _mixtral(tmp_path / "e", **ignored), "experts": {"keep": [0, 1]}})
    assert "single out experts by their numbers" in problem


def test_experts_of_another_kind_are_refused(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m")
    wide = _mixtral(tmp_path / "wide", _specs(width=24))
    (problem,) = refusals({"base_model": root, "experts": {"add": [{"model": wide}]}})
    assert "matrices have other shapes than the experts" in problem
    assert "is [24, 32] here and [16, 32] there" in problem
    gelu = _mixtral(tmp_path / "gelu", hidden_act="gelu")
    (problem,) = refusals({"base_model": root, "experts": {"add": [{"model": gelu}]}})
    assert "is gelu, that of" in problem
    dense = _dense(tmp_path / "dense", 64)
    problems = refusals({"base_model": root, "experts": {"add": [{"model": dense, "experts": [0]}]}})
    assert [problem for problem in problems if "which has no router row for its expert" in problem]
    assert [problem for problem in problems if "its feed-forward layers are one expert" in problem]
    problems = refusals({"base_model": root, "experts": {"add": [{"model": dense, "row_of": 0}]}})
    assert any("is [64, 32] here and [16, 32] there" in problem for problem in problems)


def test_experts_in_a_format_that_is_not_read_are_refused_by_its_name(tmp_path: Path) -> None:
    specs = _specs()
    experts = [name for name in specs if ".experts." in name]
    coded: Specs = {name: spec for name, spec in specs.items() if name not in experts}
    for name in experts:
        rows, columns = specs[name][1]
        module = name.removesuffix(".weight")
        coded |= {
            f"{module}.qweight": (DType.I32, (columns // 8, rows)),
            f"{module}.scales": (DType.F16, (1, rows)),
        }
    other = _mixtral(tmp_path / "other", coded, quantization_config={"quant_method": "gptq"})
    (problem,) = refusals({"base_model": _mixtral(tmp_path / "m"), "experts": {"add": [{"model": other}]}})
    assert f"{other}: {len(experts)} tensors are quantised as GPTQ, which raymerge can neither" in problem


def test_biases_of_the_selection_are_needed(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(2)]
    bias: Specs = dict.fromkeys(names, (DType.F32, (4,)))
    mine = {name.replace("block_sparse_moe", "mlp"): spec for name, spec in _specs().items()} | dict(bias)
    root, other = _mixtral(tmp_path / "m", mine), _mixtral(tmp_path / "other")
    (problem,) = refusals({"base_model": root, "experts": {"add": [{"model": other}]}})
    assert "it lacks 2 tensors that the router has a row of for each expert" in problem
    made = good({"base_model": root, "experts": {"add": [{"model": other, "row_of": 3}]}})
    name = names[0]
    assert made.dtype(name) == "F32"
    sizes = [(row["num_elements"], made.reads(name)) for row in made.rows(name)]
    assert [size for size, _ in sizes] == [4, 1, 1, 1, 1]


def _family_config(family: str, layers: int, **more: Any) -> dict[str, Any]:
    said = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        **more,
    }
    return {key: value for key, value in said.items() if value is not None}


def _matrices(head: str) -> Specs:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {f"{head}.{kind}_proj.weight": (DType.BF16, shape) for kind, shape in shapes.items()}


def _layers(layers: int, sparse: range | None = None) -> dict[str, Any]:
    """A model with experts in some layers (all by default), and feed-forward layers in the others."""
    found = {name: spec for name, spec in llama_specs(layers).items() if ".mlp." not in name}
    for layer in range(layers):
        head = f"model.layers.{layer}.mlp"
        if sparse is not None and layer not in sparse:
            found |= _matrices(head)
            continue
        found[f"{head}.gate.weight"] = (DType.BF16, (4, HIDDEN))
        for expert in range(4):
            found |= _matrices(f"{head}.experts.{expert}")
    return found


def _mixture(
    root: Path, family: str = "qwen3_moe", layers: int = 2, sparse: range | None = None, **more: Any
) -> Path:
    return header_checkpoint(root, _layers(layers, sparse), _family_config(family, layers, **more))


def _dense_model(root: Path, layers: int = 2, extra: Specs | None = None, **more: Any) -> Path:
    family = more.pop("family", "qwen3")
    config = _family_config(family, layers, num_local_experts=None, num_experts_per_tok=None, **more)
    return header_checkpoint(root, {**_layers(layers, range(0)), **(extra or {})}, config)


def _problems(base: Path, other: Path, **added: Any) -> list[str]:
    return refusals({"base_model": base, "experts": {"add": [{"model": other, **added}]}})


def test_experts_of_a_deeper_mixture_are_not_left_out(tmp_path: Path) -> None:
    base, deep = _mixture(tmp_path / "m"), _mixture(tmp_path / "deep", layers=5)
    (problem,) = _problems(base, deep)
    assert f"it has experts in 5 layers, and {base} has experts in 2" in problem
    assert "there is no place for those of layers 2, 3, 4" in problem
    assert "experts.add[0].model" in problem
    (problem,) = _problems(deep, base)
    assert "it has experts in 2 layers" in problem
    assert "there are none for layers 2, 3, 4" in problem


def test_layers_of_a_deeper_dense_model_are_not_left_out(tmp_path: Path) -> None:
    base, deep = _mixture(tmp_path / "m"), _dense_model(tmp_path / "deep", 3)
    (problem,) = _problems(base, deep, row_of=0)
    assert "it has feed-forward layers in 3 layers" in problem
    assert "there is no place for those of layer 2" in problem
    assert _problems(base, _dense_model(tmp_path / "same"), row_of=0) == []


def test_the_base_keeps_its_own_feed_forward_layers(tmp_path: Path) -> None:
    base, dense = (_mixture(tmp_path / "m", layers=3, sparse=range(1, 3)), _dense_model(tmp_path / "d", 3))
    made = good({"base_model": base, "experts": {"add": [{"model": dense, "row_of": 0}]}})
    notes = made.plan.manifest["notes"]
    assert f"{base} keeps its feed-forward layers where it has no experts: layer 0" in notes
    assert made.fate(1, "model.layers.0.mlp.up_proj.weight")[1] == "only_experts_taken"
    everywhere = _mixture(tmp_path / "everywhere", layers=3)
    (problem,) = _problems(base, everywhere)
    assert "there is no place for those of layer 0" in problem


def test_what_a_silent_config_means(tmp_path: Path) -> None:
    silent = _mixture(tmp_path / "silent")
    (problem,) = _problems(silent, _mixture(tmp_path / "gelu", hidden_act="gelu"))
    assert f"the activation of {tmp_path / 'gelu'} is gelu, that of {silent} is silu" in problem
    assert _problems(silent, _mixture(tmp_path / "silu", hidden_act="silu")) == []
    gemma = _dense_model(tmp_path / "gemma", family="gemma2", hidden_act="silu", hidden_activation=None)
    (problem,) = _problems(silent, gemma, row_of=0)
    assert "is gelu_pytorch_tanh, that of" in problem
    (problem,) = _problems(silent, _dense_model(tmp_path / "dense", hidden_act="gelu"), row_of=1)
    assert "is gelu, that of" in problem
    unknown = _mixture(tmp_path / "unknown", "unheard_of")
    assert _problems(unknown, _mixture(tmp_path / "relu", hidden_act="relu")) == []


def test_rows_of_another_router_mean_nothing(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m", norm_topk_prob=True)
    other = _mixture(tmp_path / "other", "glm4_moe")
    (problem,) = _problems(base, other)
    assert "makes weights of its scores by sigmoid, and that of" in problem
    assert "by softmax" in problem
    assert "row_of" in problem
    assert _problems(base, other, row_of=1) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ({"norm_topk_prob": True}, {}, "sum to 1 in {base}, and in {other} they do not"),
        ({}, {"norm_topk_prob": True}, "sum to 1 in {other}, and in {base} they do not"),
        (
            {},
            {"routed_scaling_factor": 2.5},
            "{other} multiplies what its experts give by 2.5, and {base} by 1",
        ),
        ({"routed_scaling_factor": 2.5}, {"routed_scaling_factor": 2.5}, None),
        ({"norm_topk_prob": False}, {}, None),
    ],
)
@pytest.mark.parametrize("row_of", [{}, {"row_of": 0}])
def test_experts_are_weighed_as_they_were(
    mine: dict[str, Any], theirs: dict[str, Any], expected: str | None, row_of: dict[str, int], tmp_path: Path
) -> None:
    base, other = _mixture(tmp_path / "m", **mine), _mixture(tmp_path / "o", **theirs)
    problems = _problems(base, other, **row_of)
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert expected.format(base=base, other=other) in problems[0]


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m", "deepseek_v3", layers=2)
    other = _mixture(tmp_path / "o", layers=3, hidden_act="gelu")
    assert len(_problems(base, other)) == 5


def test_how_many_experts_a_token_goes_to_is_told(tmp_path: Path) -> None:
    base, other = _mixture(tmp_path / "m"), _mixture(tmp_path / "o", num_experts_per_tok=1)
    made = good({"base_model": base, "experts": {"add": [{"model": other}]}})
    assert f"{other} sends each token to 1 of its experts, the output to 2" in made.plan.manifest["notes"]


def test_biases_of_added_experts_are_not_left_out(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m")
    biases = {f"model.layers.{n}.mlp.gate_proj.bias": (DType.BF16, (WIDTH,)) for n in range(2)}
    (problem,) = _problems(base, _dense_model(tmp_path / "d", extra=biases), row_of=0)
    assert f"2 tensors of its experts have no place in those of {base}" in problem
    numbered = {f"model.layers.0.mlp.experts.{n}.up_proj.bias": (DType.BF16, (WIDTH,)) for n in range(4)}
    other = header_checkpoint(tmp_path / "o", {**_layers(2), **numbered}, _family_config("qwen3_moe", 2))
    (problem,) = _problems(base, other, experts=[1, 3])
    assert f"2 tensors of its experts have no place in those of {base}" in problem


def test_the_base_itself_is_like_itself(tmp_path: Path) -> None:
    base = _mixture(tmp_path / "m", layers=3, sparse=range(1, 3))
    made = good({"base_model": base, "experts": {"add": [{"model": base, "experts": [1]}]}})
    assert not [note for note in made.plan.manifest["notes"] if "keeps its feed-forward" in note]


E, D, F = 4, 8, 6
Shapes = Mapping[str, tuple[int, ...]]


def _blocks(root: Path, shapes: Shapes, **config: Any) -> tuple[tuple[ExpertBlock, ...], list[str]]:
    specs = {
        name: (DType.I64 if "tid" in name else DType.BF16, shape)
        for name, shape in {"model.layers.0.norm.weight": (D,), **shapes}.items()
    }
    said = {"num_hidden_layers": 1, "num_experts": E, "num_experts_per_tok": 1, "hidden_size": D, **config}
    base = header_checkpoint(root, specs, {"model_type": "qwen3_moe", **said})
    (source,) = open_models(
        recipe_from_mapping({"base_model": str(base), "experts": {"keep": [0]}})
    ).require()
    findings = Findings()
    found = expert_blocks(source, LogicalTensors(source), E, findings)
    return found, [str(problem) for problem in findings.problems()]


def _stacked(block: str = "model.layers.0.mlp") -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.gate.weight": (E, D),
        f"{block}.experts.gate_up_proj": (E, 2 * F, D),
        f"{block}.experts.down_proj": (E, D, F),
    }


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"experts.down_proj": (E + 1, D, F)}, "are not 4 equal shares"),
        ({"experts.down_proj_packed": (77, 1)}, "are not 4 equal shares"),
        ({"gate.weight": (E + 2, D)}, "do not have a row for each of 4 experts"),
        ({"gate.weight": (D, E)}, "do not have a row for each of 4 experts"),
        ({"gate.tid2eid": (64,)}, "do not have a row for each of 4 experts"),
    ],
)
def test_what_is_no_share(more: Shapes, expected: str, tmp_path: Path) -> None:
    shapes = _stacked() | {f"model.layers.0.mlp.{name}": shape for name, shape in more.items()}
    _, problems = _blocks(tmp_path / "m", shapes)
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_router_may_have_norms_and_no_router_may_be_missing(tmp_path: Path) -> None:
    extra = {"model.layers.0.mlp.router.norm.weight": (D,)}
    ((found,), problems) = _blocks(tmp_path / "a", _stacked() | extra)
    assert problems == []
    assert not {*extra} & {*found.names()}
    without = {name: shape for name, shape in _stacked().items() if ".gate.weight" not in name}
    _, problems = _blocks(tmp_path / "b", without)
    assert "have experts and no router" in problems[0]


def test_an_expert_that_is_absent_beside_quantised_ones_is_a_problem(tmp_path: Path) -> None:
    """Of every kind of tensor the same expert is missing, so that no kind tells of it by another."""
    model = deepseek_v3(tmp_path / "whole", 0, ragged=False)
    config = json.loads((model.root / "config.json").read_text())
    kept = {n: t for n, t in read_tensors(model.root).items() if "layers.1.mlp.experts.2." not in n}
    assert len(kept) < len(read_tensors(model.root))
    partial = write_checkpoint(tmp_path / "partial", kept, config)
    change = {"keep": [0, 1, 2, 3]}
    good({"base_model": model.root, "experts": change})
    problems = refusals({"base_model": partial, "experts": change})
    assert any("experts.2." in problem and "stored for others" in problem for problem in problems)


def test_blocks_beside_the_text_are_left_alone(tmp_path: Path) -> None:
    shapes = _stacked() | _stacked("model.visual.blocks.0.mlp") | _stacked("mtp.layers.0.mlp")
    found, problems = _blocks(tmp_path / "m", shapes)
    assert problems == []
    assert [(block.path, block.layer, block.is_mtp) for block in found] == [
        ("model.layers.0.mlp", 0, False),
        ("mtp.layers.0.mlp", 1, True),
    ]


def test_experts_that_come_into_other_groups() -> None:
    kind = Numbered("a.", ".b", {0: StoredTensor("a.0.b", DType.BF16, (3, 5), "file", 1000, 30)})
    block = ExpertBlock("p", "p", 5, 5, False, 8, (), (kind,), (), ())

    def moved(*ids: int) -> list[int]:
        experts = tuple(NewExpert((Origin(0, expert),), (1.0,)) for expert in ids)
        return regrouped({"p": experts}, [block], 2)

    assert moved(0, 1, 4, 5) == []
    assert moved(1, 3, 7, 6) == []
    assert moved(0, 1, 2, 4) == [5]
    assert regrouped({"p": ()}, [block], 1) == []


RULES = load_rules(None)


@pytest.mark.parametrize("kind", one_in(4, SPARSE), ids=lambda kind: kind.name)
def test_every_family_counts_its_experts(kind: Any) -> None:
    config = transformers.AutoConfig.for_model(kind.name, **kind.config).to_dict()
    rules = load_rules(kind.name)
    fields = expert_fields(config, rules)
    assert fields is not None
    assert fields.count.value == 4
    assert fields.chosen is not None
    assert fields.chosen.value <= 4
    made = with_expert_count(config, rules, 3)
    again = expert_fields(made, rules)
    assert again is not None
    assert again.count.value == 3
    assert again.chosen == fields.chosen
    assert with_expert_count(made, rules, 4) == config


@pytest.mark.parametrize(
    ("config", "made"),
    [
        ({"num_local_experts": 8, "num_experts": 8}, {"num_local_experts": 6, "num_experts": 6}),
        ({"ffn_config": {"moe_num_experts": 8, "x": 8}}, {"ffn_config": {"moe_num_experts": 6, "x": 8}}),
        (
            {"num_experts": 1, "text_config": {"num_experts": 8, "hidden_size": 8}},
            {"num_experts": 1, "text_config": {"num_experts": 6, "hidden_size": 8}},
        ),
        ({"num_experts": [8, 8], "moe_topk": [2, 2]}, {"num_experts": [6, 6], "moe_topk": [2, 2]}),
        ({"moe_num_experts": 8, "moe_capacity": [8, 8]}, {"moe_num_experts": 6, "moe_capacity": [6, 6]}),
    ],
)
def test_all_fields_that_count_follow(config: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    before = json.dumps(config)
    assert with_expert_count(config, RULES, 6) == made
    assert json.dumps(config) == before


GROUPED = ExpertFields(Field("n", 8), Field("top_k", 4), Field("n_group", 4), Field("topk_group", 2))


@pytest.mark.parametrize(
    ("fields", "count", "by_pairs", "expected"),
    [
        (
            ExpertFields(Field("n", 8), Field("top_k", 4), None, None),
            3,
            False,
            "top_k is 4, but there would be 3",
        ),
        (GROUPED, 6, False, "6 experts are not so many equal groups"),
        (GROUPED, 4, True, "judged by its 2 best"),
        (GROUPED, 4, False, "2 of 4 groups would hold 2 experts"),
    ],
)
def test_numbers_that_do_not_work(fields: ExpertFields, count: int, by_pairs: bool, expected: str) -> None:
    assert expected in " ".join(fields.objections(count, by_pairs=by_pairs))


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 40),
    chosen=st.integers(1, 8),
    groups=st.integers(1, 6),
    used=st.integers(1, 6),
    by_pairs=st.booleans(),
)
def test_the_nearest_numbers_work(count: int, chosen: int, groups: int, used: int, by_pairs: bool) -> None:
    many = Field("g", groups) if groups > 1 else None
    fields = ExpertFields(Field("n", 16), Field("k", chosen), many, Field("u", used) if many else None)
    nearest = fields.nearest(count, by_pairs=by_pairs)
    assert not any(list(fields.objections(number, by_pairs=by_pairs)) for number in nearest)
    assert count not in nearest
    between = range(min(nearest, default=count) + 1, count)
    if len(nearest) == 2 or (nearest and nearest[0] < count):
        assert all(list(fields.objections(number, by_pairs=by_pairs)) for number in between)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (["lm_head", *(f"a.experts.{n}.up_proj" for n in range(3))], ["lm_head", "a.experts.0.up_proj"]),
        ([f"a.experts.{n}" for n in (2, 0, 1)], ["a.experts.0"]),
        (["re:.*mlp.experts.*", "a.mlp.experts"], ["re:.*mlp.experts.*", "a.mlp.experts"]),
        (["a.mlp.experts.2.up_proj"], None),
        ([f"a.experts.{n}.up_proj" for n in range(4)], None),
        ([r"re:.*experts\.0\..*"], None),
    ],
)
def test_tables_that_name_all_experts_name_those_that_are_left(
    table: list[str], expected: list[str] | None
) -> None:
    for config in (
        {"quantization_config": {"ignore": table}, "x": 1},
        {"text_config": {"compression_config": {"a": {"b": table}}}, "x": 1},
    ):
        found = with_expert_names(config, 3, 1)
        assert found == (None if expected is None else _replaced(config, expected))


def _replaced(value: Any, by: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(each, by) for key, each in value.items()}
    return by if isinstance(value, list) else value


DENSE = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "flex_olmo")


@pytest.mark.parametrize("name", one_in(2, DENSE))
@pytest.mark.parametrize("silent", [False, True])
def test_a_dense_config_means_what_the_mixtures_means(name: str, silent: bool, tmp_path: Path) -> None:
    sparse = transformers.AutoConfig.for_model(name, hidden_size=64, num_attention_heads=4)
    full = json.loads(sparse.to_json_string(use_diff=False))
    said = (
        {key: full[key] for key in ("model_type", "hidden_size", "num_attention_heads")} if silent else full
    )
    family = dense_counterparts().get(said["model_type"])
    assert family is not None
    made = dense_config(said, family, width=77)
    (tmp_path / "config.json").write_text(json.dumps(made))
    dense = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (dense.model_type, dense.architectures) == (family.model_type, [family.architecture])
    assert dense.intermediate_size == 77
    mine, theirs = dense.to_dict(), sparse.to_dict()
    skipped = {
        *("architectures", "model_type", "intermediate_size", "sliding_window", "transformers_version"),
        "_name_or_path",
    }
    differing = {
        key: (mine[key], theirs[key])
        for key in mine.keys() & theirs.keys() - skipped
        if mine[key] != theirs[key] and key not in ("head_dim", "max_window_layers", "dtype", "layer_types")
    }
    assert differing == {}
    assert (mine.get("head_dim") or 16) == (theirs.get("head_dim") or 16)
    assert (mine.get("sliding_window") or None) == (theirs.get("sliding_window") or None)
    assert set(mine.get("layer_types") or ["full_attention"]) == {"full_attention"}


def test_what_a_dense_family_cannot_say() -> None:
    assert "deepseek_v3" not in dense_counterparts()
    assert len(list(dense_objections({"use_sliding_window": True, "qkv_bias": False}))) == 2
    assert not list(dense_objections({"use_sliding_window": True, "layer_types": ["full_attention"]}))
