"""What a config says of quantisation is read as transformers and compressed-tensors read it."""

from __future__ import annotations

from typing import Any

import pytest

from raymerge.checkpoints.quantisation.config import Declared, Modules, Scheme
from raymerge.checkpoints.quantisation.encoding import Format
from raymerge.checkpoints.quantisation.formats import read_declared
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR
from raymerge.checkpoints.quantisation.int4 import INT4
from raymerge.checkpoints.quantisation.mxfp4 import MXFP4_ROWS
from raymerge.checkpoints.quantisation.nvfp4 import NVFP4

LAYER = "model.layers.1"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def fp8(*listed: str, key: str = "modules_to_not_convert") -> Modules:
    """What an FP8 config lists as plain."""
    return read_declared([{"quant_method": "fp8", key: list(listed)}]).plain


def ignored(*listed: str) -> Modules:
    """What compressed-tensors lists as plain."""
    return read_declared([{"quant_method": "compressed-tensors", "ignore": list(listed)}]).plain


def groups(**weights: Any) -> Declared:
    """A table of compressed-tensors with one group, some fields of it other than usual."""
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
        ({"type": "int", "num_bits": 4, "strategy": "channel"}, Scheme(INT4, (1, 0))),
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
    (wrong,) = read_declared([{"quant_method": "compressed-tensors", "config_groups": made}]).wrong
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
    assert declared.wrong == ("lists *, which is no regular expression",)
    assert declared.plain.lists("model.gate")


NOT_UNDERSTOOD: dict[str, tuple[dict[str, Any], str]] = {
    "a rotation": (
        {
            "quant_method": "compressed-tensors",
            "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
        },
        "has transform_config, which is not understood",
    ),
    "sparse weights": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        "says in sparsity_config that weights are stored as sparse-24-bitmask",
    ),
    "another way of packing": (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        "gives format as marlin-24, which is not read",
    ),
    "a field of a group": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": WEIGHTS, "order": "odd"}}},
        "has order, which is not understood",
    ),
    "a field of weights": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {**WEIGHTS, "codebook": 1}}},
        },
        "has codebook, which is not understood",
    ),
    "formats by layer": (
        {"quant_method": "fp8", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
        "has quantized_layers, which is not understood",
    ),
    "scales of another kind": ({"quant_method": "fp8", "scale_fmt": "e5m3"}, "gives scale_fmt as e5m3"),
}


@pytest.mark.parametrize("kind", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_told(kind: str) -> None:
    """It may say that numbers mean something else than what codes and scales make of them."""
    table, words = NOT_UNDERSTOOD[kind]
    (wrong,) = read_declared([table]).wrong
    assert words in wrong


@pytest.mark.parametrize("table", ["fp8", [{"quant_method": "fp8"}], 3, True])
def test_what_is_no_table_is_told(table: Any) -> None:
    (wrong,) = read_declared([table]).wrong
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
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_tables_that_are_published_are_understood(model: str) -> None:
    assert read_declared([PUBLISHED[model]]).wrong == ()
