"""What is planned for changed experts: copied bytes, dispositions, and every refusal by its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import V3_CONFIG, deepseek_v3_specs, sparse_checkpoint
from kits.expert_models import good_set, refused_set
from kits.plan_maker import Specs, header_checkpoint, llama_specs, refusals

from raymerge.checkpoints.header import TensorSpec
from raymerge.dtypes import DType

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


def _specs(experts: int = 4, *, width: int = WIDTH, dtype: DType = DType.BF16, layers: int = 2) -> Specs:
    found = {name: spec for name, spec in llama_specs(layers).items() if ".mlp." not in name}
    for layer in range(layers):
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
    (problem,) = refused_set({"base_model": root, "experts": experts})
    (expected,) = refusals({"merge_method": "passthrough", "models": [{"model": root}]})
    assert problem == expected


def test_every_tensor_has_its_rule(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m")
    made = good_set({"base_model": root, "experts": {"keep": [2, 0]}})
    block = BLOCK.format(1)
    assert made.fate(0, f"{block}.experts.2.w1.weight") == (
        "copied",
        "one_source",
        f"{block}.experts.0.w1.weight",
    )
    assert made.fate(0, f"{block}.experts.1.w1.weight") == ("dropped", "expert_not_kept", "")
    assert made.fate(0, "lm_head.weight") == ("copied", "one_source", "lm_head.weight")
    assert made.reads(f"{block}.experts.1.w2.weight") == [(0, f"{block}.experts.0.w2.weight")]
    assert made.config == _config(num_local_experts=2)
    assert "2 layers have 2 experts each, where there were 4" in made.plan.manifest["notes"]
    assert made.plan.manifest["method"] == "keep experts"


def test_only_experts_are_taken_of_another_model(tmp_path: Path) -> None:
    root, other = _mixtral(tmp_path / "m"), _mixtral(tmp_path / "other")
    made = good_set({"base_model": root, "experts": {"add": [{"model": other, "experts": [3]}]}})
    block = BLOCK.format(0)
    assert made.reads(f"{block}.experts.4.w1.weight") == [(1, f"{block}.experts.3.w1.weight")]
    assert made.reads(f"{block}.gate.weight") == [(0, f"{block}.gate.weight"), (1, f"{block}.gate.weight")]
    assert made.fate(1, "lm_head.weight") == ("dropped", "only_experts_taken", "")
    twice = good_set({"base_model": root, "experts": {"add": [{"model": root, "experts": [3]}]}})
    assert twice.reads(f"{block}.experts.4.w1.weight") == [(0, f"{block}.experts.3.w1.weight")]


def _fp8(scale: str = "weight_scale_inv") -> Specs:
    """Experts in block FP8, their scales beside them."""
    specs = _specs(dtype=DType.F8_E4M3)
    scales = {name.replace("weight", scale): (DType.F32, (1, 1)) for name in specs if ".experts." in name}
    return {**specs, **scales}


def test_codes_and_scales_of_quantised_experts_go_together(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m", _fp8(), **QUANTISED)
    made = good_set({"base_model": root, "experts": {"keep": [3, 1]}})
    block = BLOCK.format(1)
    for leaf in ("weight", "weight_scale_inv"):
        assert made.reads(f"{block}.experts.0.w3.{leaf}") == [(0, f"{block}.experts.3.w3.{leaf}")]
        assert made.fate(0, f"{block}.experts.2.w3.{leaf}")[1] == "expert_not_kept"
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    other = _mixtral(tmp_path / "other", _fp8(), **QUANTISED)
    added = good_set({"base_model": root, "experts": {"add": [{"model": other}]}})
    assert added.reads(f"{block}.experts.7.w2.weight") == [(1, f"{block}.experts.3.w2.weight")]
    plain, dense = _mixtral(tmp_path / "plain"), _dense(tmp_path / "dense", WIDTH)
    for change in (
        {"merge": [[0, 1], [2, 3]]},
        {"dense": "mean"},
        {"dense": 1},
        {"add": [{"model": plain}]},
        {"add": [{"model": dense, "row_of": 1}]},
    ):
        problems = refused_set({"base_model": root, "experts": change})
        assert problems
        assert all("quantised as fp8_block, and recipes that" in problem for problem in problems)
    (problem,) = refused_set({"base_model": root, "experts": {"keep": [0, 1]}, "dtype": "bfloat16"})
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
    made = good_set({"base_model": root, "experts": {"keep": [1, 2, 3]}})
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    assert [made.dtype(f"{block}.experts.{new}.w1.weight") for new in range(3)] == ["BF16", "F8_E4M3", "BF16"]
    scales = [name for name in made.names() if name.endswith("w1.weight_scale_inv") and block in name]
    assert scales == [f"{block}.experts.1.w1.weight_scale_inv"]
    assert made.reads(scales[0]) == [(0, f"{block}.experts.2.w1.weight_scale_inv")]
    assert made.fate(0, f"{block}.experts.0.w1.weight_scale_inv")[1] == "expert_not_kept"
    merged = good_set({"base_model": root, "experts": {"merge": [[0], [2], [1, 3]]}})
    assert [merged.dtype(f"{block}.experts.{n}.w2.weight") for n in range(3)] == [
        "F8_E4M3",
        "F8_E4M3",
        "BF16",
    ]
    assert f"{block}.experts.2.w2.weight_scale_inv" not in merged.names()
    problems = refused_set({"base_model": root, "experts": {"merge": [[0, 1], [2], [3]]}})
    assert problems
    assert all("quantised as fp8_block, and recipes that" in problem for problem in problems)
    dense = good_set({"base_model": root, "experts": {"dense": "mean", "of": [1, 3]}})
    assert dense.dtype("model.layers.0.mlp.up_proj.weight") == "BF16"
    kept = good_set({"base_model": root, "experts": {"keep": [1, 3]}})
    for made, is_quantised in ((dense, False), (kept, False), (merged, True)):
        assert ("quantization_config" in made.config) == is_quantised


def test_experts_are_added_to_mixed_ones_as_they_are(tmp_path: Path) -> None:
    root, block = _mixtral(tmp_path / "m", _mixed(), **QUANTISED), BLOCK.format(0)
    other = _mixtral(tmp_path / "other", _mixed((1,)), **QUANTISED)
    made = good_set({"base_model": root, "experts": {"add": [{"model": other, "experts": [1, 2]}]}})
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
        problems = refused_set({"base_model": root, "experts": {"keep": [0, 1]}})
        assert any("are stored for others" in each and missing in each for each in problems)


def test_an_expert_that_stands_alone_keeps_its_dtype(tmp_path: Path) -> None:
    wide = f"{BLOCK.format(1)}.experts.2."
    specs = {name: (DType.F32, spec[1]) if name.startswith(wide) else spec for name, spec in _specs().items()}
    root, name = _mixtral(tmp_path / "m", specs), f"{BLOCK.format(1)}.experts.{{}}.w1.weight"
    made = good_set({"base_model": root, "experts": {"keep": [1, 2]}})
    assert [made.dtype(name.format(new)) for new in range(2)] == ["BF16", "F32"]
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    assert made.fate(0, name.format(2)) == ("copied", "one_source", name.format(1))
    merged = good_set({"base_model": root, "experts": {"merge": [[0, 2], [3], [1]]}})
    assert [merged.dtype(name.format(new)) for new in range(3)] == ["BF16", "BF16", "BF16"]
    merged = good_set({"base_model": root, "experts": {"merge": [[2], [0, 3], [1]]}})
    assert [merged.dtype(name.format(new)) for new in range(3)] == ["F32", "BF16", "BF16"]
    added = good_set({"base_model": tmp_path / "m", "experts": {"add": [{"model": root, "experts": [2, 0]}]}})
    assert [added.dtype(name.format(new)) for new in (4, 5)] == ["F32", "BF16"]
    plain = _mixtral(tmp_path / "plain")
    added = good_set({"base_model": plain, "experts": {"add": [{"model": root, "experts": [2]}]}})
    assert added.dtype(name.format(4)) == "BF16"


def test_stacked_codes_are_shared_out(tmp_path: Path) -> None:
    specs = {name: spec for name, spec in llama_specs(2).items() if ".mlp." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        specs |= {
            f"{block}.router.weight": (DType.BF16, (4, HIDDEN)),
            f"{block}.router.bias": (DType.BF16, (4,)),
            f"{block}.experts.gate_up_proj_blocks": (DType.U8, (4, 2 * WIDTH, 1, 16)),
            f"{block}.experts.gate_up_proj_scales": (DType.U8, (4, 2 * WIDTH, 1)),
            f"{block}.experts.gate_up_proj_bias": (DType.BF16, (4, 2 * WIDTH)),
            f"{block}.experts.down_proj_blocks": (DType.U8, (4, HIDDEN, 1, 16)),
            f"{block}.experts.down_proj_scales": (DType.U8, (4, HIDDEN, 1)),
            f"{block}.experts.down_proj_bias": (DType.BF16, (4, HIDDEN)),
        }
    config = _config(model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    root = header_checkpoint(tmp_path / "m", specs, config)
    made = good_set({"base_model": root, "experts": {"keep": [1, 3]}})
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    reads = [read for row in made.rows(name) for read in made.inputs(row)]
    first = made.sources[0].checkpoint.tensors[name].offset
    assert [(r["offset"] - first, r["nbytes"]) for r in reads] == [(512, 512), (1536, 512)]
    assert {expression.method for expression in made.plan.expressions} == {"copy"}


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
    good_set({"base_model": root, "experts": {"keep": [1, 3]}})
    good_set({"base_model": root, "experts": {"merge": [[1, 3], [0, 2]]}})
    other = header_checkpoint(tmp_path / "other", specs, _config(model_type="mixtral", intermediate_size=32))
    (problem,) = refused_set({"base_model": root, "experts": {"add": [{"model": other}]}})
    assert "in an order that model_type 'unheard_of' does not tell" in problem


@pytest.mark.slow
def test_deepseek_v3_in_fp8_loses_half_its_experts(tmp_path: Path) -> None:
    config = {**V3_CONFIG, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
    root = sparse_checkpoint(tmp_path / "v3", _thin(deepseek_v3_specs()), config | {"num_hidden_layers": 4})
    made = good_set({"base_model": root, "experts": {"keep": list(range(0, 256, 2))}})
    assert made.config["n_routed_experts"] == 128
    name = "model.layers.4.mlp.experts.127.down_proj.weight_scale_inv"
    assert made.reads(name) == [(0, name.replace("127", "254"))]
    assert made.dtype("model.layers.4.mlp.gate.e_score_correction_bias") == "F32"
    groups = "experts come into other groups than the router knew them in"
    assert not any(note.startswith(groups) for note in made.plan.manifest["notes"])
    first = good_set({"base_model": root, "experts": {"keep": list(range(128))}})
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
    made = good_set({"base_model": root, "experts": {"keep": {"0": [0, 1], "1": [1, 2], "2": [2, 3]}}})
    name = BLOCK.format(0).replace("model", "mtp") + ".experts.0.w1.weight"
    assert made.reads(name) == [(0, name.replace("experts.0", "experts.2"))]
    (problem,) = refused_set({"base_model": root, "experts": {"keep": {"0": [0, 1], "1": [1, 2]}}})
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
    problems = refused_set({"base_model": root, "experts": change})
    assert any(expected.format(root=root) in problem for problem in problems), problems


def test_groups_are_kept_whole(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m", _specs(8), num_local_experts=8, n_group=4, topk_group=2)
    (problem,) = refused_set({"base_model": root, "experts": {"keep": [0, 1, 2, 3, 4, 5]}})
    assert "n_group is 4, and 6 experts are not so many equal groups" in problem
    assert "4 or 8" in problem
    (problem,) = refused_set({"base_model": root, "experts": {"drop": 3, "scores": "weights"}})
    assert "3 cannot be taken from all alike" in problem


def test_what_has_no_experts_is_refused(tmp_path: Path) -> None:
    dense = header_checkpoint(tmp_path / "d", llama_specs(2), {**_config(), "num_local_experts": 0})
    (problem,) = refused_set({"base_model": dense, "experts": {"keep": [0, 1]}})
    assert "has no experts that could be changed" in problem
    counted = header_checkpoint(tmp_path / "c", llama_specs(2), _config())
    (problem,) = refused_set({"base_model": counted, "experts": {"keep": [0, 1]}})
    assert "no layer of its text model holds any" in problem


def test_broken_blocks_are_refused(tmp_path: Path) -> None:
    specs = {name: spec for name, spec in _specs().items() if "experts.2.w1" not in name}
    (problem,) = refused_set({"base_model": _mixtral(tmp_path / "a", specs), "experts": {"keep": [0, 1]}})
    assert "the config counts 4 experts" in problem
    ignored: dict[str, Any] = {
        "quantization_config": {"quant_method": "x", "ignore": [f"{BLOCK.format(0)}.experts.3.w1"]}
    }
    (problem,) = refused_set({"base_model": _mixtral(tmp_path / "e", **ignored), "experts": {"keep": [0, 1]}})
    assert "single out experts by their numbers" in problem


def test_experts_of_another_kind_are_refused(tmp_path: Path) -> None:
    root = _mixtral(tmp_path / "m")
    wide = _mixtral(tmp_path / "wide", _specs(width=24))
    (problem,) = refused_set({"base_model": root, "experts": {"add": [{"model": wide}]}})
    assert "matrices have other shapes than the experts" in problem
    assert "is [24, 32] here and [16, 32] there" in problem
    gelu = _mixtral(tmp_path / "gelu", hidden_act="gelu")
    (problem,) = refused_set({"base_model": root, "experts": {"add": [{"model": gelu}]}})
    assert "is gelu, that of" in problem
    dense = _dense(tmp_path / "dense", 64)
    problems = refused_set({"base_model": root, "experts": {"add": [{"model": dense, "experts": [0]}]}})
    assert [problem for problem in problems if "which has no router row for its expert" in problem]
    assert [problem for problem in problems if "its feed-forward layers are one expert" in problem]
    problems = refused_set({"base_model": root, "experts": {"add": [{"model": dense, "row_of": 0}]}})
    assert any("is [64, 32] here and [16, 32] there" in problem for problem in problems)


def test_biases_of_the_selection_are_needed(tmp_path: Path) -> None:
    bias = {
        f"{BLOCK.format(n).replace('block_sparse_moe', 'mlp')}.gate.e_score_correction_bias": (
            DType.F32,
            (4,),
        )
        for n in range(2)
    }
    mine = {name.replace("block_sparse_moe", "mlp"): spec for name, spec in _specs().items()} | bias
    root, other = _mixtral(tmp_path / "m", mine), _mixtral(tmp_path / "other")
    (problem,) = refused_set({"base_model": root, "experts": {"add": [{"model": other}]}})
    assert "it lacks 2 tensors that the router has a row of for each expert" in problem
    made = good_set({"base_model": root, "experts": {"add": [{"model": other, "row_of": 3}]}})
    name = next(iter(bias))
    assert made.dtype(name) == "F32"
    sizes = [(row["num_elements"], made.reads(name)) for row in made.rows(name)]
    assert [size for size, _ in sizes] == [4, 1, 1, 1, 1]
