"""Codes and their scales are found by what they are, declared or not, and named by what declares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, refusals

from raymerge.dtypes import DType
from raymerge.planner.inputs.quantised import quantised_formats
from raymerge.planner.inputs.sources import open_reference
from raymerge.recipes import ModelReference

Q = "model.layers.0.self_attn.q_proj"

FORMATS: dict[str, Specs] = {
    "hqq": {"W_q": (DType.U8, (16, 32)), "scale": (DType.F16, (1, 64)), "zero": (DType.F16, (1, 64))},
    "quanto": {"weight._data": (DType.I8, (32, 32)), "weight._scale": (DType.F16, (32, 1))},
    "vptq": {
        "indices": (DType.I32, (8, 8)),
        "centroids.weight": (DType.BF16, (8, 8)),
        "weight_scale": (DType.BF16, (32,)),
        "weight_bias": (DType.BF16, (32,)),
    },
    "aqlm": {
        "codes": (DType.I16, (8, 8, 1)),
        "codebooks": (DType.F16, (1, 8, 1, 8)),
        "scales": (DType.F16, (8, 1, 1, 1)),
    },
    "eetq": {"weight": (DType.I8, (32, 32)), "weight_scales": (DType.F16, (32,))},
    "bitnet": {"weight": (DType.U8, (8, 32)), "weight_scale": (DType.BF16, (1,))},
    "gptq": {
        "qweight": (DType.I32, (4, 32)),
        "qzeros": (DType.I32, (1, 4)),
        "scales": (DType.F16, (1, 32)),
        "g_idx": (DType.I32, (32,)),
        "bias": (DType.F16, (32,)),
    },
    "awq": {"qweight": (DType.I32, (32, 4)), "qzeros": (DType.I32, (1, 4)), "scales": (DType.F16, (1, 32))},
    "bitsandbytes": {
        "weight": (DType.U8, (512, 1)),
        "weight.absmax": (DType.U8, (16,)),
        "weight.nested_absmax": (DType.F32, (1,)),
        "weight.quant_map": (DType.F32, (16,)),
        "weight.quant_state.bitsandbytes__nf4": (DType.U8, (80,)),
    },
}


def _model(root: Path, extra: Specs, **config: Any) -> Path:
    specs = {name: spec for name, spec in llama_specs(1).items() if not name.startswith(Q)}
    return header_checkpoint(root, {**specs, **extra}, {**llama_config(layers=1), **config})


def _formats(root: Path, extra: Specs, **config: Any) -> dict[str, str]:
    return dict(quantised_formats(open_reference(ModelReference(str(_model(root, extra, **config))))))


def _in_q(specs: Specs) -> Specs:
    return {f"{Q}.{leaf}": spec for leaf, spec in specs.items()}


def _linear(*models: Path) -> dict[str, Any]:
    entries = [{"model": model} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 0.5}}


@pytest.mark.parametrize("method", FORMATS)
def test_a_declared_format_is_refused_whole_and_by_its_own_name(tmp_path: Path, method: str) -> None:
    config = {"quantization_config": {"quant_method": method}}
    a, b = (_model(tmp_path / each, _in_q(FORMATS[method]), **config) for each in "ab")
    problems = refusals(_linear(a, b))
    assert len(problems) == 2
    count = len(FORMATS[method])
    assert all(f"{count} tensors are quantised as {method}," in problem for problem in problems)
    good({"merge_method": "passthrough", "models": [{"model": a}]})


@pytest.mark.parametrize("method", FORMATS)
def test_a_format_that_nobody_declares_is_refused_whole_all_the_same(tmp_path: Path, method: str) -> None:
    found = _formats(tmp_path / "a", _in_q(FORMATS[method]))
    inside = _in_q(FORMATS[method])
    if method == "bitsandbytes":
        # The state's path is one deeper, and only a declaration says what it belongs to.
        inside = {name: spec for name, spec in inside.items() if "quant_state" not in name}
    assert found.keys() == inside.keys()


@pytest.mark.parametrize("section", ["text_config", "compression_config"])
def test_a_declaration_counts_wherever_it_stands(tmp_path: Path, section: str) -> None:
    table = {"quant_method": "hqq"}
    config = {"text_config": {"quantization_config": table}} if section == "text_config" else {section: table}
    assert set(_formats(tmp_path / "a", _in_q(FORMATS["hqq"]), **config).values()) == {"hqq"}


PLAIN: dict[str, Specs] = {
    "positions of BERT": {
        "bert.embeddings.position_ids": (DType.I64, (1, 8)),
        "bert.embeddings.scale": (DType.BF16, (8,)),
    },
    "a mask": {"model.attn_block.mask": (DType.BOOL, (8, 8)), "model.attn_block.gain": (DType.BF16, (8,))},
    "a counter": {
        "model.bn.num_batches_tracked": (DType.I64, ()),
        "model.bn.running_mean": (DType.BF16, (8,)),
    },
    "DeepSeek-V4's experts by token": {
        "layers.0.ffn.gate.tid2eid": (DType.I64, (32, 2)),
        "layers.0.ffn.gate.weight": (DType.BF16, (4, 8)),
    },
    "a long counter": {"model.bn.seen": (DType.I64, (4,)), "model.bn.running_mean": (DType.BF16, (8,))},
    "integers alone": {"model.table.index": (DType.I32, (4, 4))},
    "a name alone": {"x.scales": (DType.F32, (2,))},
}


@pytest.mark.parametrize("kind", PLAIN)
def test_integers_that_are_no_codes_stay_copied_from_the_lead(tmp_path: Path, kind: str) -> None:
    a, b = (_model(tmp_path / each, PLAIN[kind]) for each in "ab")
    made = good(_linear(a, b))
    for name, (dtype, _) in PLAIN[kind].items():
        assert made.method(name) == ("linear" if dtype.is_mergeable else "copy")


@pytest.mark.parametrize(
    "kind", ["positions of BERT", "a mask", "a counter", "a long counter", "DeepSeek-V4's experts by token"]
)
def test_nor_are_they_codes_where_something_else_is_declared_quantised(tmp_path: Path, kind: str) -> None:
    assert not _formats(tmp_path / "a", PLAIN[kind], quantization_config={"quant_method": "hqq"})


def test_a_plain_stack_of_experts_beside_a_quantised_one_stays_plain(tmp_path: Path) -> None:
    block = "model.layers.0.mlp.experts"
    extra: Specs = {
        f"{block}.down_proj_blocks": (DType.U8, (2, 8, 4)),
        f"{block}.down_proj_scales": (DType.U8, (2, 8)),
        f"{block}.down_proj_bias": (DType.BF16, (2, 8)),
        f"{block}.gate_up_proj": (DType.BF16, (2, 8, 8)),
    }
    found = _formats(tmp_path / "a", extra)
    assert found == {name: "MXFP4" for name in extra if "gate_up" not in name}


@pytest.mark.parametrize(
    ("extra", "form"),
    [
        ({"weight_packed": (DType.U8, (2, 2)), "weight_global_scale": (DType.F32, (1,))}, "NVFP4"),
        ({"weight": (DType.F8_E4M3, (2, 2)), "weight_scale": (DType.F32, ())}, "FP8 with weight_scale"),
        ({"weight": (DType.F8_E4M3, (2, 2)), "qscale_weight": (DType.F32, ())}, "FP8 with qscale_weight"),
        ({"weight": (DType.I8, (2, 2)), "SCB": (DType.F32, (2,))}, "bitsandbytes"),
    ],
)
def test_names_that_only_one_format_uses_tell_more_than_the_declaration(
    tmp_path: Path, extra: Specs, form: str
) -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert _formats(tmp_path / "a", _in_q(extra), **config) == dict.fromkeys(_in_q(extra), form)


def test_scales_without_their_codes_count_where_the_config_declares_a_quantisation(tmp_path: Path) -> None:
    extra: Specs = {f"{Q}.input_scale": (DType.F32, (1,))}
    found = _formats(tmp_path / "a", extra, quantization_config={"quant_method": "some"})
    assert found == {f"{Q}.input_scale": "some"}
    assert _formats(tmp_path / "b", extra, quantization_config={"x": 1}) == {
        f"{Q}.input_scale": "a format that has no name"
    }
