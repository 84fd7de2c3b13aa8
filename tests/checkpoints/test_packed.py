"""Quantised tensors found by names, shapes and configs, and what is at fault with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.checkpoint_maker import write_checkpoint
from kits.packed_headers import (
    BLOCK,
    CHANNEL,
    FP8,
    GOOD,
    MX,
    NV,
    TENSOR,
    W4,
    W8,
    E,
    X,
    compressed,
    f8,
    f32,
    fault,
    look,
)
from kits.plan_maker import Specs, header_checkpoint

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.compressed_tensors import COMPRESSED_TENSORS
from raymerge.checkpoints.quantisation.config import Declared, Modules, Scheme
from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.checkpoints.quantisation.formats import packed_tensors, read_declared
from raymerge.checkpoints.quantisation.fp8 import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP8,
    fp8_blocks,
    implied_block,
)
from raymerge.checkpoints.quantisation.int4 import INT4, INT4_CHANNEL
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4_BYTES, MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4, NVFP4_MODELOPT
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.dtypes import DType
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.storage.local.store import LocalStore


@pytest.mark.parametrize("kind", GOOD)
def test_published_layouts_are_found_whole_and_without_a_fault(tmp_path: Path, kind: str) -> None:
    specs, table, (form, shape, block) = GOOD[kind]
    found = look(tmp_path / "a", {**specs, f"{X}.bias": (DType.BF16, (64,))}, table)
    assert not found.faults
    assert not found.unknown
    name = f"{X}.weight" if X in next(iter(specs)) else next(iter(specs)).removesuffix("_blocks")
    assert list(found.tensors) == [name]
    packed = found.tensors[name]
    spec = packed.quant_spec
    assert packed.name == name
    assert (spec.format, spec.shape, spec.block) == (form, shape, block)
    assert dict(found.members) == dict.fromkeys(specs, name) == dict.fromkeys(packed.stored, name)
    assert (spec.format.code_dtype, spec.codes_shape) == specs[packed.codes]
    assert (spec.scale_dtype, spec.scales_shape) == specs[packed.scales]


def test_scales_are_powers_of_two_by_their_dtype_or_by_what_the_config_says(tmp_path: Path) -> None:
    for number, (dtype, said, expected) in enumerate(
        [
            (DType.F32, None, False),
            (DType.F32, "float", False),
            (DType.F32, "ue8m0", True),
            (DType.U8, "ue8m0", True),
            (DType.F8_E8M0, None, True),
        ]
    ):
        table = {**FP8, "scale_fmt": said} if said else FP8
        specs: Specs = {f"{X}.weight": f8(256, 256), f"{X}.weight_scale_inv": (dtype, (2, 2))}
        found = look(tmp_path / str(number), specs, table)
        assert found.tensors[f"{X}.weight"].quant_spec.power_of_two is expected
        assert not found.faults


def test_partners_have_names_by_what_they_are(tmp_path: Path) -> None:
    nvfp4 = look(tmp_path / "a", GOOD["NVFP4"][0], compressed(NV)).tensors[f"{X}.weight"]
    assert (nvfp4.tensor_scale, nvfp4.shape_tensor) == (f"{X}.weight_global_scale", None)
    int4 = look(tmp_path / "b", GOOD["Kimi-K2-Thinking"][0], compressed(W4)).tensors[f"{X}.weight"]
    assert (int4.tensor_scale, int4.shape_tensor) == (None, f"{X}.weight_shape")
    fp8 = look(tmp_path / "c", GOOD["per tensor"][0], compressed(TENSOR)).tensors[f"{X}.weight"]
    assert (fp8.tensor_scale, fp8.others) == (f"{X}.weight_scale", (f"{X}.input_scale",))


UNKNOWN: dict[str, tuple[Specs, Mapping[str, Any], str]] = {
    "another order": (
        {**GOOD["Kimi-K2-Thinking"][0], f"{X}.weight_g_idx": (DType.I32, (64,))},
        compressed({**W4, "actorder": "group"}),
        "packed integers in another order of columns (g_idx)",
    ),
    "INT8 with zero points of inputs": (
        {**GOOD["INT8 per channel"][0], f"{X}.input_zero_point": (DType.I8, (1,))},
        compressed({**W8, "strategy": "channel"}),
        "INT8 with stored zero points of inputs",
    ),
    "INT8": (GOOD["Kimi-K2-Thinking"][0], compressed(W8), "packed integers, declared as 8-bit int by group"),
    "blocks of [out, in] beside [in, out]": (
        {f"{E}.gate_up_proj": f8(4, 256, 768), f"{E}.gate_up_proj_scale_inv": f32(4, 6, 2)},
        FP8,
        "fp8_block with scales of the transposed matrices",
    ),
    "channels of [out, in] beside [in, out]": (
        {f"{E}.gate_up_proj": f8(4, 256, 768), f"{E}.gate_up_proj_scale": f32(4, 1, 768)},
        compressed(CHANNEL),
        "fp8_channel with scales of the transposed matrices",
    ),
    "an algorithm that is not read": (
        GOOD["DeepSeek-V3, ragged rows"][0],
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {X: "FP8_PB_WO"}},
        "modelopt (FP8_PB_WO)",
    ),
    "wider codes": (
        {f"{X}.weight_packed": (DType.I64, (6, 8)), f"{X}.weight_scale": (DType.BF16, (6, 2))},
        compressed(W4),
        "I64 in weight_packed",
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_variants_that_are_not_read_are_named_and_no_fault(tmp_path: Path, kind: str) -> None:
    specs, table, form = UNKNOWN[kind]
    found = look(tmp_path / "a", specs, table)
    assert dict(found.unknown) == dict.fromkeys(specs, form)
    assert not found.tensors
    assert not found.faults


REFUSED: dict[str, tuple[Specs, Mapping[str, Any], str]] = {
    "GPTQ": (
        {f"{X}.qweight": (DType.I32, (4, 32)), f"{X}.scales": (DType.F16, (1, 32))},
        {"quant_method": "gptq"},
        "GPTQ",
    ),
    "bitsandbytes": (
        {f"{X}.weight": (DType.U8, (512, 1)), f"{X}.weight.absmax": (DType.U8, (16,))},
        {"quant_method": "bitsandbytes"},
        "bitsandbytes in 4 bits (NF4 or FP4)",
    ),
    "FP8 of a method that is not read": (
        {f"{X}.weight": f8(2, 2), f"{X}.weight_scale": f32()},
        {"quant_method": "quark"},
        "Quark",
    ),
    "Mistral's scales": (
        {f"{X}.weight": f8(2, 2), f"{X}.qscale_weight": f32()},
        FP8,
        "FP8 with qscale_weight",
    ),
    "integers of 8 bits": (
        {f"{X}.weight": (DType.I8, (4, 32)), f"{X}.weight_scale": f32(4, 1)},
        FP8,
        "int8_channel",
    ),
    "NVFP4 of inputs that are scaled": (
        {**GOOD["NVFP4 of ModelOpt"][0], f"{X}.pre_quant_scale": (DType.BF16, (64,))},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4 of inputs that are scaled first (pre_quant_scale)",
    ),
    "a variant of a format that is read": UNKNOWN["INT8"],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_beside_what_is_read_the_rest_is_named_and_plain_numbers_are_not(tmp_path: Path, kind: str) -> None:
    specs, table, form = REFUSED[kind]
    plain: Specs = {f"{X}.bias": (DType.BF16, (4,)), f"{E}.bias": (DType.BF16, (4,)), "norm": f32(4)}
    read = {name.replace(X, f"{E}.0.x"): spec for name, spec in GOOD["fused experts"][0].items()}
    root = header_checkpoint(
        tmp_path / "a", {**specs, **plain, **read}, {"model_type": "x", "quantization_config": table}
    )
    found = quantised_tensors(open_checkpoint(root, "a model"))
    assert {name: found.unknown[name] for name in specs} == dict.fromkeys(specs, form)
    assert found.unknown.keys() - specs.keys() <= {f"{X}.bias"} | read.keys()
    assert not found.faults or table["quant_method"] in ("compressed-tensors", "modelopt")
    is_read = table["quant_method"] in ("fp8", "compressed-tensors", "modelopt")
    assert set(found.members) == (set(read) if is_read else set())


def test_a_bias_beside_codes_that_are_read_is_plain(tmp_path: Path) -> None:
    specs = {**GOOD["gpt-oss"][0], f"{E}.down_proj_bias": (DType.BF16, (4, 6))}
    config = {"model_type": "gpt_oss", "quantization_config": MX}
    found = quantised_tensors(open_checkpoint(header_checkpoint(tmp_path / "a", specs, config), "a model"))
    assert list(found.tensors) == [f"{E}.down_proj"]
    assert not found.unknown


LEAVES = (
    "weight_scale_2",
    *("weight", "weight_scale_inv", "weight_scale", "scale", "weight_packed", "weight_shape", "input_scale"),
    *("weight_zero_point", "weight_global_scale", "up_blocks", "up_scales", "up", "up_scale_inv", "qweight"),
)
NVIDIA = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
TABLES = (
    None,
    FP8,
    MX,
    compressed(W4),
    compressed(W8, W4),
    compressed(NV),
    compressed(BLOCK),
    {"bits": 4},
    NVIDIA,
)
DTYPES = (DType.F8_E4M3, DType.F32, DType.BF16, DType.U8, DType.I8, DType.I32, DType.I64, DType.F8_E8M0)


@given(
    st.dictionaries(
        st.sampled_from([f"x.{leaf}" for leaf in LEAVES]),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.sampled_from([1, 2, 16, 64, 0]), max_size=4)),
    ),
    st.sampled_from(TABLES),
)
def test_whatever_lies_together_is_found_or_told_and_nothing_twice(
    specs: dict[str, tuple[DType, list[int]]], table: Mapping[str, Any] | None
) -> None:
    tensors = {
        name: StoredTensor(name, dtype, tuple(shape), "f", 0, 0) for name, (dtype, shape) in specs.items()
    }
    checkpoint = Checkpoint("a model", ".", tensors, (), {"x": 1}, (), ())
    found = packed_tensors(checkpoint, [table] if table else [])
    stored = [name for packed in found.tensors.values() for name in packed.stored]
    assert sorted(stored) == sorted(found.members) == sorted(set(stored))
    assert found.unknown.keys().isdisjoint(stored)
    for packed in found.tensors.values():
        assert tensors[packed.codes].shape == packed.quant_spec.codes_shape
        assert tensors[packed.codes].dtype is packed.quant_spec.format.code_dtype


def test_of_a_method_that_is_not_read_nothing_is_found_and_nothing_is_a_fault(tmp_path: Path) -> None:
    specs = {**GOOD["one scale of FP8"][0], "lonely.weight_scale_inv": f32(1, 1)}
    found = look(tmp_path / "a", specs, {"quant_method": "quark"})
    assert found == QuantisedWeights({}, {}, {}, ())


def test_plain_tensors_with_the_names_of_scales_are_left_alone(tmp_path: Path) -> None:
    specs: Specs = {
        "model.norm.scale": (DType.BF16, (8,)),
        "model.attn.k_scale": f32(1),
        "model.gate_scales": (DType.BF16, (8,)),
        "model.table_blocks": (DType.U8, (8, 8)),
        "model.x.weight_scale": f32(1),
    }
    assert look(tmp_path / "a", specs) == QuantisedWeights({}, {}, {}, ())
    del specs["model.x.weight_scale"]
    codes = {f"{X}.weight": f8(2, 2), f"{X}.weight_scale_inv": f32(1, 1)}
    assert list(look(tmp_path / "b", {**specs, **codes}, FP8).members) == list(codes)


@given(st.integers(1, 700), st.integers(1, 300))
def test_an_implied_block_gives_the_grid_and_a_power_of_two_is_preferred(size: int, block: int) -> None:
    count = -(-size // block)
    found = implied_block(size, count)
    assert -(-size // found) == count
    if block & (block - 1) == 0 and block <= size:
        assert found == block


def test_blocks_that_a_config_names_go_before_those_that_a_grid_implies() -> None:
    assert list(fp8_blocks((200, 64), (2, 1), [(128, 128)])) == [
        (FP8_BLOCK, (128, 128)),
        (FP8_BLOCK, (128, 64)),
    ]
    assert next(fp8_blocks((200, 64), (2, 1), [(100, 64)])) == (FP8_BLOCK, (100, 64))


LAYER = "model.layers.1"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def fp8(*listed: str, key: str = "modules_to_not_convert") -> Modules:
    """What an FP8 config lists as plain."""
    return read_declared([{"quant_method": "fp8", key: list(listed)}]).plain


def ignored(*listed: str) -> Modules:
    """What compressed-tensors lists as plain."""
    return read_declared([{"quant_method": "compressed-tensors", "ignore": list(listed)}]).plain


def groups(**weights: Any) -> Declared:
    group = {"weights": {**WEIGHTS, **weights}}
    return read_declared([{"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}])


def test_of_several_tables_the_first_counts() -> None:
    assert read_declared([{"quant_method": "mxfp4"}, {"quant_method": "fp8"}]).method == "mxfp4"


@pytest.mark.parametrize(
    ("table", "method", "is_read"),
    [
        ({"quant_method": "gptq"}, "gptq", False),
        ({"config_groups": {}}, "compressed-tensors", True),
        ({"bits": 4}, "a method without a name", False),
        ({"quant_method": "q" * 500}, "q" * 60, False),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ", False),
    ],
)
def test_methods_that_are_not_read_are_named(table: dict[str, Any], method: str, is_read: bool) -> None:
    declared = read_declared([table])
    assert (declared.method, declared.is_read, declared.schemes) == (method, is_read, ())


@pytest.mark.parametrize(
    ("weights", "scheme"),
    [
        ({}, Scheme(FP8_TENSOR, None)),
        ({"strategy": "channel"}, Scheme(FP8_CHANNEL, None)),
        ({"strategy": "block", "block_structure": "64x32"}, Scheme(FP8_BLOCK, (64, 32))),
        ({"strategy": "group", "group_size": 32}, Scheme(FP8_BLOCK, (1, 32))),
        ({"strategy": None, "group_size": -1}, Scheme(FP8_CHANNEL, None)),
        ({"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}, Scheme(INT4, (1, 32))),
        ({"type": "int", "num_bits": 4, "strategy": "channel"}, Scheme(INT4_CHANNEL, None)),
        ({"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, Scheme(NVFP4, None)),
        ({"num_bits": 4, "strategy": "group", "group_size": 32}, Scheme(MXFP4_ROWS, None)),
        ({"actorder": "weight"}, Scheme(FP8_TENSOR, None)),
    ],
)
def test_groups_are_read(weights: dict[str, Any], scheme: Scheme) -> None:
    declared = groups(**weights)
    assert (declared.schemes, declared.others) == ((scheme,), ())


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"symmetric": False}, "asymmetric 8-bit float by tensor"),
        ({"actorder": "group"}, "8-bit float by tensor, in another order of columns"),
        ({"type": "int", "num_bits": 4}, "4-bit int by tensor"),
        ({"strategy": "block"}, "8-bit float by block"),
        ({"num_bits": [1]}, "[1]-bit float by tensor"),
    ],
)
def test_groups_that_are_not_read_are_put_in_words(weights: dict[str, Any], words: str) -> None:
    declared = groups(**weights)
    assert (declared.schemes, declared.others) == ((), (words,))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (f"{LAYER}.self_attn.q_proj", INT4),
        (f"{LAYER}.mlp.up_proj", FP8_CHANNEL),
        # A path counts before patterns, and these before classes, whichever comes first.
        (f"{LAYER}.self_attn.o_proj", FP8_CHANNEL),
        (f"{LAYER}.attention.q_proj", FP8_TENSOR),
        ("x.model.layers.1.mlp.up_proj", FP8_TENSOR),
    ],
)
def test_groups_speak_of_their_targets(module: str, expected: Format) -> None:
    made = {
        "class": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 8}},
        "pattern": {
            "targets": ["re:.*self_attn.*"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            "input_activations": None,
        },
        "path": {
            "targets": [f"{LAYER}.self_attn.o_proj", r"re:model\.layers\.\d+\.mlp\."],
            "weights": {**WEIGHTS, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "dynamic": True},
        },
    }
    declared = read_declared([{"quant_method": "compressed-tensors", "config_groups": made}])
    said = declared.of(module)
    assert said is not None
    assert [scheme.format for scheme in said.schemes] == [expected]
    assert said.scales_inputs is (expected == FP8_TENSOR)
    del made["class"]
    of_named = read_declared([{"quant_method": "compressed-tensors", "config_groups": made}]).of(module)
    assert (of_named is None) is (expected == FP8_TENSOR)


def test_a_target_that_is_no_regular_expression_is_told() -> None:
    made = {"a": {"targets": ["re:*"], "weights": WEIGHTS}}
    (wrong,) = read_declared([{"quant_method": "compressed-tensors", "config_groups": made}]).contradictions
    assert "*, which is no regular expression" in wrong


@pytest.mark.parametrize(
    ("listed", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("gate", f"{LAYER}.mlp.gate", True),
        ("gate", f"{LAYER}.mlp.gate_proj", False),
        # transformers takes this one, others do not: not certain.
        ("up_proj", f"{LAYER}.mlp.gate_up_proj", False),
        (f"{LAYER}.self_attn", f"{LAYER}.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.11.mlp", False),
        ("model.layers.*.self_attn", f"{LAYER}.self_attn.q_proj", True),
        ("model.layers.*.mlp.gate", f"{LAYER}.mlp.gate_proj", False),
        ("self_attn.*", f"{LAYER}.self_attn.q_proj", False),
    ],
)
def test_modules_not_to_convert_are_paths_ends_of_paths_or_patterns(
    listed: str, module: str, expected: bool
) -> None:
    assert fp8(listed).lists(module) is expected
    assert fp8("other", listed, "(model|x).y").lists(module) is expected
    assert fp8(listed, key="ignored_layers").lists(module) is expected


@pytest.mark.parametrize(
    ("listed", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("gate", f"{LAYER}.mlp.gate", False),
        (f"{LAYER}.self_attn", f"{LAYER}.self_attn.q_proj", False),
        ("re:.*self_attn.*", f"{LAYER}.self_attn.q_proj", True),
        ("re:self_attn", f"{LAYER}.self_attn.q_proj", False),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", f"{LAYER}.mlp.up_proj", True),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", f"{LAYER}.mlp.experts.3.up_proj", False),
        ("re:(?i).*SELF_ATTN", f"{LAYER}.self_attn.q_proj", True),
        (r"re:.*\.(q)_proj\.\1", f"{LAYER}.self_attn.q_proj.q", True),
    ],
)
def test_what_compressed_tensors_ignores_are_whole_paths_or_patterns(
    listed: str, module: str, expected: bool
) -> None:
    assert ignored(listed).lists(module) is expected
    # Beside others, groups have other numbers.
    assert ignored(r"re:(other)\.(one)", listed, r"re:(?P<a>last)").lists(module) is expected


def test_patterns_that_are_none_are_told_and_the_others_hold() -> None:
    declared = read_declared([{"quant_method": "compressed-tensors", "ignore": ["re:*", "re:.*gate"]}])
    assert declared.contradictions == ("lists *, which is no regular expression",)
    assert declared.plain.lists("model.gate")


NOT_UNDERSTOOD: dict[str, tuple[dict[str, Any], str]] = {
    "a rotation": (
        {
            "quant_method": "compressed-tensors",
            "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
        },
        "has transform_config",
    ),
    "sparse weights": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "says in sparsity_config that weights are stored as sparse-24-bitmask",
    ),
    "another way of quantisation spec": (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        "gives format as marlin-24",
    ),
    "a field of a group": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": WEIGHTS, "order": "odd"}}},
        "has order",
    ),
    "a field of weights": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {**WEIGHTS, "codebook": 1}}},
        },
        "has codebook",
    ),
    "experts of another kind": ({"quant_method": "fp8", "expert_dtype": "fp6"}, "gives expert_dtype as fp6"),
    "inputs that are scaled first": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True},
        "has pre_quant_scale",
    ),
    "scales of another kind": ({"quant_method": "fp8", "scale_fmt": "e5m3"}, "gives scale_fmt as e5m3"),
}


@pytest.mark.parametrize("kind", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_told(kind: str) -> None:
    """It may say that numbers mean something else than what codes and scales make of them."""
    table, words = NOT_UNDERSTOOD[kind]
    declared = read_declared([table])
    assert (declared.not_understood, declared.contradictions) == ((words,), ())


def in_groups(layers: Mapping[str, str], bits: int, targets: list[str]) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": "float"}, "targets": targets}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": dict(layers),
        "config_groups": {"one": group},
    }


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"quant_method": "fp8", "quantized_layers": ["a"]}, "gives quantized_layers as ['a']"),
        ({"quant_method": "modelopt"}, "names no quant_algo"),
        (
            in_groups({"a.b": "FP8"}, 8, ["a.b", "a.c"]),
            "has a.c in one of config_groups (8 bits), and with no algorithm in quantized_layers",
        ),
        (
            in_groups({"a.b": "NVFP4"}, 8, ["a.b"]),
            "has a.b in one of config_groups (8 bits), and with NVFP4 in quantized_layers",
        ),
    ],
)
def test_fields_that_cannot_be_true_are_told(table: dict[str, Any], words: str) -> None:
    declared = read_declared([table])
    assert (declared.not_understood, declared.contradictions) == ((), (words,))


@pytest.mark.parametrize("table", ["fp8", [{"quant_method": "fp8"}], 3, True])
def test_what_is_no_table_is_told(table: Any) -> None:
    (wrong,) = read_declared([table]).contradictions
    assert wrong.endswith("not a table of fields")


_ARGS = {"actorder": None, "block_structure": [128, 128], "dynamic": False, "group_size": None, "num_bits": 8}
_ARGS |= {"observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "block"}
_ARGS |= {"symmetric": True, "type": "float", "zp_dtype": None}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llm-compressor": {
        "config_groups": {
            "config_group_0": {
                "format": "float-quantized",
                "input_activations": {**_ARGS, "dynamic": True},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": _ARGS,
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": 1.89,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    },
    "an older one": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ARGS}},
        "format": "naive-quantized",
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "registry_requires_subclass": False},
        "transform_config": {"config_groups": {}},
    },
    "DeepSeek-V4.1": {
        "activation_scheme": "dynamic",
        "expert_dtype": "fp4",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
    },
    "MiniMax-M2": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "ignored_layers": ["gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "Ministral-3": {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower"],
        "quant_method": "fp8",
        "weight_block_size": None,
    },
    "gpt-oss": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "NVIDIA's NVFP4": {
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
                "targets": ["Linear"],
                "weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
            }
        },
        "ignore": ["lm_head", "model.layers.0.self_attn*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    },
    "NVIDIA's DeepSeek-V4": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "moe_quant_algo": "NVFP4",
        "quant_method": "fp8",
        "quantized_layers": {"layers.3.ffn.experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16}},
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def test_no_module_has_no_table_of_groups() -> None:
    assert COMPRESSED_TENSORS.fresh_table({}, None) is None


@pytest.mark.parametrize("model", PUBLISHED)
def test_tables_that_are_published_are_understood(model: str) -> None:
    declared = read_declared([PUBLISHED[model]])
    assert (declared.not_understood, declared.contradictions) == ((), ())


ONE_LEFT: dict[str, tuple[Specs, Mapping[str, Any] | None, list[str]]] = {
    "FP8 codes": ({f"{X}.weight": f8(2, 2)}, FP8, [f"{X}.weight F8_E4M3[2, 2]", f"no {X}.weight_scale_inv"]),
    "fused codes": ({f"{E}.gate_up_proj": f8(2, 2, 2)}, FP8, [f"no {E}.gate_up_proj_scale_inv"]),
    "FP8 scales": ({f"{X}.weight_scale_inv": f32(1, 1)}, None, [f"{X}.weight_scale_inv", f"no {X}.weight."]),
    "FP8 scales beside plain numbers": (
        {f"{X}.weight": (DType.BF16, (2, 2)), f"{X}.weight_scale_inv": f32(1, 1)},
        None,
        [f"{X}.weight_scale_inv F32[1, 1]", f"{X}.weight BF16[2, 2] in model.safetensors is no codes"],
    ),
    "scales by V4's name": ({f"{X}.scale": (DType.F8_E8M0, (1, 1))}, FP8, [f"{X}.scale", f"no {X}.weight."]),
    "blocks": ({f"{E}.up_blocks": (DType.U8, (2, 2, 1, 16))}, MX, [f"{E}.up_blocks", f"no {E}.up_scales"]),
    "INT4 codes": (
        {f"{X}.weight_packed": (DType.I32, (2, 4))},
        compressed(W4),
        [f"{X}.weight_packed I32[2, 4]", f"no {X}.weight_scale"],
    ),
    "INT4 without its zero points": (
        {name: spec for name, spec in GOOD["INT4 with zero points"][0].items() if "zero" not in name},
        compressed({**W4, "symmetric": False}),
        [f"{X}.weight_packed I32[12, 8]", f"no {X}.weight_zero_point"],
    ),
    "an INT4 shape": ({f"{X}.weight_shape": (DType.I64, (2,))}, compressed(W4), [f"no {X}.weight_packed"]),
    "DeepSeek-V4's experts": (
        {f"{X}.weight": (DType.I8, (4, 32))},
        {**FP8, "expert_dtype": "fp4"},
        [f"{X}.weight I8[4, 32]", f"no {X}.scale"],
    ),
    "ModelOpt's NVFP4 without its factor": (
        {f"{X}.weight": (DType.U8, (2, 8)), f"{X}.weight_scale": f8(2, 1)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        [f"{X}.weight U8[2, 8]", f"no {X}.weight_scale_2"],
    ),
    "ModelOpt's factor": (
        {f"{X}.weight_scale_2": f32()},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        [f"{X}.weight_scale_2 F32[]", f"no {X}.weight."],
    ),
    "NVFP4 without the scale of the whole": (
        {f"{X}.weight_packed": (DType.U8, (2, 8)), f"{X}.weight_scale": f8(2, 1)},
        compressed(NV),
        [f"{X}.weight_packed U8[2, 8]", f"no {X}.weight_global_scale"],
    ),
}


@pytest.mark.parametrize("kind", ONE_LEFT)
def test_one_part_without_the_other_is_a_fault_that_names_both(tmp_path: Path, kind: str) -> None:
    specs, table, parts = ONE_LEFT[kind]
    found = look(tmp_path / "a", specs, table)
    text = fault(found)
    assert all(part in text for part in parts), text
    assert text.startswith("a model: ")
    assert "model.safetensors" in text
    assert not found.tensors


def test_a_scale_of_another_dtype_or_of_two_names_is_a_fault(tmp_path: Path) -> None:
    both: Specs = {f"{X}.weight": f8(2, 2), f"{X}.weight_scale_inv": f32(1, 1), f"{X}.weight_scale": f32(1)}
    text = fault(look(tmp_path / "a", both, FP8))
    assert f"several scales: {X}.weight_scale_inv and {X}.weight_scale." in text
    integers: Specs = {f"{X}.weight": f8(2, 2), f"{X}.weight_scale_inv": (DType.F64, (1, 1))}
    assert "cannot be read: fp8_block has scales of" in fault(look(tmp_path / "b", integers, FP8))


def test_codes_and_plain_numbers_of_one_name_are_a_fault(tmp_path: Path) -> None:
    specs = {**GOOD["Kimi-K2-Thinking"][0], f"{X}.weight": (DType.BF16, (6, 64))}
    found = look(tmp_path / "a", specs, compressed(W4))
    assert f"holds the numbers of {X}.weight, and so does {X}.weight BF16[6, 64]" in fault(found)


def test_what_else_belongs_to_a_tensor_must_be_what_readers_take(tmp_path: Path) -> None:
    int4 = {**GOOD["Kimi-K2-Thinking"][0], f"{X}.weight_shape": (DType.I64, (3,))}
    assert f"{X}.weight_shape I64[3] in" in fault(look(tmp_path / "a", int4, compressed(W4)))
    zeros = {**GOOD["INT4 with zero points"][0], f"{X}.weight_zero_point": (DType.I32, (12, 2))}
    text = fault(look(tmp_path / "c", zeros, compressed({**W4, "symmetric": False})))
    assert f"{X}.weight_zero_point I32[12, 2] in model.safetensors is no I32[2, 2]" in text
    nvfp4 = {**GOOD["NVFP4"][0], f"{X}.weight_global_scale": f32(6, 1)}
    text = fault(look(tmp_path / "b", nvfp4, compressed(NV)))
    assert f"{X}.weight_global_scale F32[6, 1] in model.safetensors is no F32 of 1 elements" in text


MISFITS: dict[str, tuple[Specs, Mapping[str, Any]]] = {
    "another stack": ({f"{E}.up": f8(4, 128, 128), f"{E}.up_scale_inv": f32(3, 1, 1)}, FP8),
    "one scale for a stack": ({f"{E}.up": f8(4, 128, 128), f"{E}.up_scale_inv": f32()}, FP8),
    "no matrix": ({f"{X}.weight": f8(256), f"{X}.weight_scale_inv": f32(2)}, FP8),
    "MXFP4": ({f"{E}.up_blocks": (DType.U8, (4, 2, 1, 16)), f"{E}.up_scales": (DType.U8, (4, 2, 2))}, MX),
    "NVFP4 by 32 columns": (
        {f"{X}.weight": (DType.U8, (6, 32)), f"{X}.weight_scale": f8(6, 2)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "DeepSeek-V4's experts": (
        {f"{X}.weight": (DType.I8, (4, 32)), f"{X}.scale": (DType.F8_E8M0, (4, 4))},
        FP8,
    ),
    "other rows": (
        {f"{X}.weight_packed": (DType.I32, (6, 8)), f"{X}.weight_scale": (DType.BF16, (5, 2))},
        compressed(W4),
    ),
    "no rows": (
        {f"{X}.weight_packed": (DType.I32, ()), f"{X}.weight_scale": (DType.BF16, ())},
        compressed(W4),
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_grid_that_fits_no_blocks_is_a_fault_that_names_both_shapes(tmp_path: Path, kind: str) -> None:
    specs, table = MISFITS[kind]
    text = fault(look(tmp_path / "a", specs, table))
    for name, (dtype, shape) in specs.items():
        assert f"{name} {dtype.value}{list(shape)} in model.safetensors" in text
    assert "do not fit together" in text


CONTRADICTIONS: dict[str, tuple[Specs, Mapping[str, Any] | None, list[str]]] = {
    "other blocks": (
        {f"{X}.weight": f8(256, 256), f"{X}.weight_scale_inv": f32(4, 4)},
        FP8,
        ["fp8_block in blocks of 64x64", "says fp8 (fp8_block with blocks of 128x128)"],
    ),
    "nothing declared": (
        {f"{X}.weight": f8(256, 256), f"{X}.weight_scale_inv": f32(2, 2)},
        None,
        ["fp8_block in blocks of 128x128", "config.json has no quantization_config"],
    ),
    "another method": (GOOD["gpt-oss"][0], FP8, ["mxfp4 in blocks of 1x32", "says fp8"]),
    "experts that are said to be FP8": (
        GOOD["DeepSeek-V4's experts"][0],
        {**FP8, "expert_dtype": "fp8"},
        ["mxfp4 in blocks of 1x32", "says fp8 (fp8_block with blocks of 128x128)"],
    ),
    "another algorithm": (
        GOOD["NVFP4 of ModelOpt"][0],
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        ["ModelOpt nvfp4 in blocks of 1x16", "says modelopt (fp8_tensor)"],
    ),
    "another algorithm for a layer": (
        GOOD["NVFP4 of ModelOpt"][0],
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {X: "MXFP8"}},
        ["ModelOpt nvfp4 in blocks of 1x16", "says modelopt (mxfp8)"],
    ),
    "listed by a glob": (
        GOOD["NVFP4 of ModelOpt"][0],
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.0.m*"]},
        [f"{X}.weight U8[6, 32]", f"lists {X} as not quantised"],
    ),
    "other groups": (
        GOOD["Kimi-K2-Thinking"][0],
        compressed({**W4, "group_size": 128}),
        ["int4 in blocks of 1x32", "says compressed-tensors (int4 with blocks of 1x128)"],
    ),
    "all plain": (
        {f"{X}.weight": (DType.BF16, (2, 2)), f"{X}.bias": f32(2)},
        FP8,
        ["says that weights are quantised by fp8", "no tensor is: all are BF16, F32"],
    ),
    "listed as plain": (
        GOOD["gpt-oss"][0],
        {**MX, "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.experts"]},
        [f"{E}.down_proj_blocks", f"lists {E}.down_proj as not quantised"],
    ),
    "not to be read": (
        GOOD["gpt-oss"][0],
        {**MX, "modules_to_not_convert": ["(("]},
        ["lists ((, which is no"],
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_config_and_tensors_that_disagree_are_told_with_both_facts(tmp_path: Path, kind: str) -> None:
    specs, table, parts = CONTRADICTIONS[kind]
    text = fault(look(tmp_path / "a", specs, table))
    assert all(part in text for part in parts), text


def test_what_needs_no_codes_is_no_contradiction(tmp_path: Path) -> None:
    plain: Specs = {f"{X}.weight": (DType.BF16, (2, 2))}
    assert not look(tmp_path / "a", plain).faults
    assert not look(tmp_path / "b", plain, compressed()).faults
    assert not look(tmp_path / "c", plain, compressed(W4, format="dense")).faults
    other_codes: Specs = {f"{X}.weight": (DType.I8, (4, 32)), f"{X}.scale": (DType.F8_E8M0, (4, 2))}
    assert not look(tmp_path / "e", other_codes, FP8).faults


def test_a_single_file_has_no_config_to_disagree_with(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        header_checkpoint(tmp_path / "a", GOOD["DeepSeek-V3, ragged rows"][0], {"x": 1}), "a model"
    )
    raw = Checkpoint("a model", checkpoint.root, checkpoint.tensors, checkpoint.files, {}, (), ())
    found = packed_tensors(raw, [])
    assert list(found.tensors) == [f"{X}.weight"]
    assert not found.faults


@pytest.mark.parametrize("said", [[0, 128], [128], "128x128", [True, 128], [-1, 1], {}, [1.5, 2]])
def test_a_block_size_that_is_none_is_told(tmp_path: Path, said: Any) -> None:
    specs = GOOD["DeepSeek-V3, ragged rows"][0]
    assert "gives weight_block_size as" in fault(
        look(tmp_path / "a", specs, {**FP8, "weight_block_size": said})
    )


def test_alike_faults_are_told_once_with_their_number(tmp_path: Path) -> None:
    specs = {f"model.layers.{number}.weight": f8(2, 2) for number in range(12)}
    text = fault(look(tmp_path / "a", specs, FP8))
    assert "model.layers.0.weight" in text
    assert "So it is with 11 more tensors." in text


def _with_shape(root: Path, *shape: int) -> QuantisedWeights:
    """What is found of a matrix of 4 rows of 38 integers, which says that it has this shape."""
    table = compressed({**W4, "strategy": "channel", "group_size": None})
    tensors = {
        f"{X}.weight_packed": torch.zeros(4, 38, dtype=torch.int32),
        f"{X}.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16),
        f"{X}.weight_shape": torch.tensor(shape),
    }
    write_checkpoint(root, tensors, {"model_type": "llama", "quantization_config": table})
    return packed_tensors(open_checkpoint(root, "a model"), [table])


def test_a_stored_shape_is_that_of_the_numbers(tmp_path: Path) -> None:
    found = _with_shape(tmp_path / "full", 4, 304)
    assert (found.faults, found.tensors[f"{X}.weight"].quant_spec.shape) == ((), (4, 304))
    padded = _with_shape(tmp_path / "padded", 4, 300)
    spec = padded.tensors[f"{X}.weight"].quant_spec
    assert (padded.faults, spec.logical_shape, spec.shape, spec.padding) == ((), (4, 300), (4, 304), 4)


@pytest.mark.parametrize("shape", [(4, 296), (4, 305), (5, 304), (5, 300), (-4, 304), (304, 4)])
def test_a_stored_shape_that_the_codes_have_not_is_a_fault(tmp_path: Path, shape: tuple[int, int]) -> None:
    text = fault(_with_shape(tmp_path / "a", *shape))
    assert f"{X}.weight_shape says {list(shape)}" in text
    assert f"{X}.weight_packed I32[4, 38] in model.safetensors holds" in text


@pytest.mark.parametrize(("columns", "groups", "most"), [(4096, 128, 70), (4096, 1, 400), (4100, 1, 400)])
def test_shapes_of_a_large_model_are_read_only_where_they_tell_something(
    columns: int, groups: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lies between matrices, so that it takes a request of its own."""
    rows, experts = 32, 300
    table = compressed({**W4, "strategy": "group" if groups > 1 else "channel"})
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for number in range(experts):
        module = f"model.layers.0.mlp.experts.{number}.up_proj"
        specs[f"{module}.weight_packed"] = (DType.I32, (rows, -(-columns // 8)))
        specs[f"{module}.weight_scale"] = (DType.BF16, (rows, groups))
        specs[f"{module}.weight_shape"] = (DType.I32, (2,))
    root = header_checkpoint(tmp_path / "a", specs, {"model_type": "llama", "quantization_config": table})
    shape = rows.to_bytes(4, "little") + columns.to_bytes(4, "little")
    for tensor in open_checkpoint(root, "a").tensors.values():
        if tensor.name.endswith("_shape"):
            with (root / tensor.key).open("r+b") as file:
                file.seek(tensor.offset)
                file.write(shape)
    places: list[tuple[str, int]] = []
    read = LocalStore.read

    def counted(store: LocalStore, key: str, offset: int, nbytes: int) -> bytes:
        places.append((key, offset))
        return read(store, key, offset, nbytes)

    monkeypatch.setattr(LocalStore, "read", counted)
    found = packed_tensors(open_checkpoint(root, "a"), [table])
    assert len(places) <= most
    assert not found.faults
    assert {each.quant_spec.logical_shape for each in found.tensors.values()} == {(rows, columns)}
    assert (len(found.tensors), dict(found.unknown)) == (experts, {})


LAYERS = {
    "model.layers.0.mlp.experts.1.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.mlp.gate_up_proj": {"quant_algo": "MXFP8", "group_size": 32},
    "model.layers.0.self_attn": {"quant_algo": "FP8"},
}


@pytest.mark.parametrize(
    ("module", "form"),
    [
        ("mlp.experts.1.up_proj", NVFP4_MODELOPT),
        ("mlp.up_proj", MXFP8),
        ("self_attn.q_proj", FP8_TENSOR),
        ("mlp.experts.2.up_proj", None),
        ("mlp.down_proj", None),
    ],
)
def test_modules_are_listed_by_themselves_as_fused_or_by_what_they_are_in(
    module: str, form: Format | None
) -> None:
    table = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}
    found = read_declared([table]).of(f"model.layers.0.{module}")
    # That of stacks is left open, and not said.
    assert (found and [each.format for each in found.schemes if each.is_stated]) == (form and [form])


def test_one_checkpoint_may_hold_three_formats(tmp_path: Path) -> None:
    """NVIDIA's DeepSeek-V4: experts quantised once more, those of the next-token layer as they were."""
    modules = {"layers.3.ffn.experts.0.w1": "NVFP4 of ModelOpt", "layers.3.attn.wq_a": "DeepSeek-V4"}
    modules |= {"mtp.0.ffn.experts.0.w1": "DeepSeek-V4's experts"}
    stored = [(module, GOOD[kind][0]) for module, kind in modules.items()]
    specs: Specs = {name.replace(X, module): each[name] for module, each in stored for name in each}
    layers = {"layers.3.ffn.experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16}}
    table = {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4", "quantized_layers": layers}
    found = look(tmp_path / "a", specs, table)
    assert (found.faults, dict(found.unknown)) == ((), {})
    forms = [found.tensors[f"{module}.weight"].quant_spec.format for module in modules]
    assert forms == [NVFP4_MODELOPT, FP8_BLOCK, MXFP4_BYTES]
    wrong = {**table, "quantized_layers": {**layers, "mtp.0.ffn.experts.0.w1": "NVFP4"}}
    text = fault(look(tmp_path / "b", specs, wrong))
    assert "mtp.0.ffn.experts.0.w1.weight I8[4, 32]" in text
    assert "is mxfp4 in blocks of 1x32, but config.json says fp8 (ModelOpt nvfp4)" in text
    of_experts = {**table, "quantized_layers": None, "moe_quant_algo": "NVFP4"}
    assert look(tmp_path / "c", specs, of_experts).faults == ()


@pytest.mark.parametrize("beside", [{}, {"text_config": {"num_hidden_layers": 1}}], ids=["top", "nested"])
def test_what_experts_are_is_said_beside_the_table(beside: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "x", "expert_dtype": "fp8", "quantization_config": FP8, **beside}
    root = header_checkpoint(tmp_path / "a", GOOD["DeepSeek-V4's experts"][0], config)
    (problem,) = quantised_tensors(open_checkpoint(root, "a model")).faults
    assert "mxfp4 in blocks of 1x32, but config.json says fp8 (fp8_block" in str(problem)


def test_modelopts_file_beside_the_config_counts_where_that_has_no_table(tmp_path: Path) -> None:
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    beside = {"producer": {"name": "modelopt"}, "quantization": quantization}
    specs = GOOD["NVFP4 of ModelOpt"][0]

    def found(name: str, **config: Any) -> QuantisedWeights:
        root = header_checkpoint(tmp_path / name, specs, {"model_type": "llama", **config})
        (root / "hf_quant_config.json").write_text(json.dumps(beside))
        return quantised_tensors(open_checkpoint(root, "a model"))

    alone = found("a")
    assert (list(alone.tensors), alone.faults) == ([f"{X}.weight"], ())
    same = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    assert found("b", quantization_config=same).faults == ()
    fp4 = {"num_bits": 4, "type": "float", "dynamic": False}
    quantization |= {"kv_cache_quant_algo": "NVFP4"}
    assert found("e", quantization_config=same | {"kv_cache_scheme": fp4}).faults == ()
    text = fault(found("f", quantization_config={**same, "kv_cache_scheme": None}))
    assert "hf_quant_config.json says kv_cache_quant_algo NVFP4, and config.json null" in text
    quantization |= {"exclude_modules": ["model.layers.0.m*"]}
    text = fault(found("g", quantization_config=same))
    assert f"but hf_quant_config.json lists {X} as not quantised. Mend hf_quant_config.json" in text
    quantization |= {"exclude_modules": ["lm_head"]}
    text = fault(found("c", quantization_config={**same, "quant_algo": "W4A16_NVFP4"}))
    assert "hf_quant_config.json says quant_algo NVFP4, and config.json W4A16_NVFP4" in text
    quantization |= {"quant_algo": "nvfp4", "kv_cache_quant_algo": "none", "group_size": 32}
    plain_cache = {**same, "kv_cache_scheme": None}
    assert found("h", quantization_config=plain_cache).faults == ()
    for number, sized in enumerate(
        ({"group_size": 16}, {"config_groups": {"a": {"weights": {"group_size": 16}}}})
    ):
        text = fault(found(f"i{number}", quantization_config={**plain_cache, **sized}))
        assert "hf_quant_config.json says group_size 32, and config.json 16" in text
    quantization |= {"kv_cache_quant_algo": "NVFP4", "group_size": None}
    quantization |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": {X: {"quant_algo": "NVFP4"}}}
    mixed = {**same, "quant_algo": "MIXED_PRECISION", "quantized_layers": {f"{X}2": {"quant_algo": "NVFP4"}}}
    assert "has other quantized_layers than config.json" in fault(found("d", quantization_config=mixed))
