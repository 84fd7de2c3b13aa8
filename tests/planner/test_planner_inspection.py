"""What a checkpoint holds, told from names, shapes and config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from kits.family_names import Family, llama

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint, WeightFile
from raymerge.dtypes import DType
from raymerge.planner.inspection import Inspection, inspect_checkpoint

Shapes = Mapping[str, tuple[int, ...]]


def _checkpoint(
    shapes: Shapes, config: Mapping[str, Any], *, dtypes: Mapping[str, DType] | None = None
) -> Checkpoint:
    """A checkpoint that exists as headers only."""
    tensors = {}
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, DType.BF16)
        plain = StoredTensor(name, dtype, shape, "model.safetensors", 0, 0)
        tensors[name] = plain._replace(nbytes=dtype.nbytes(plain.num_elements))
    file = WeightFile("model.safetensors", sum(t.nbytes for t in tensors.values()), "0", "0")
    return Checkpoint("model", "model", config, tensors, (file,), ("tokenizer.json",), ("a note",))


def _inspected(
    shapes: Shapes, config: Mapping[str, Any], *, dtypes: Mapping[str, DType] | None = None
) -> Inspection:
    return inspect_checkpoint(_checkpoint(shapes, config, dtypes=dtypes))


def _dense() -> Family:
    return llama()


def _moe(layers: int = 2) -> dict[str, tuple[int, ...]]:
    names = dict(llama(layers).names)
    for layer in range(layers):
        names = {name: shape for name, shape in names.items() if f"layers.{layer}.mlp." not in name}
    return names


def _per_expert(count: int = 4) -> dict[str, tuple[int, ...]]:
    names = _moe()
    for layer in range(2):
        block = f"model.layers.{layer}.mlp"
        names[f"{block}.gate.weight"] = (count, 8)
        for expert in range(count):
            names |= {f"{block}.experts.{expert}.{p}_proj.weight": (6, 8) for p in ("gate", "up")}
            names[f"{block}.experts.{expert}.down_proj.weight"] = (8, 6)
    return names


def test_a_dense_model_is_told_by_role_dtype_and_layers() -> None:
    family = _dense()
    found = _inspected(family.names, family.config)
    assert (found.model_type, found.tensors) == ("llama", len(family.names))
    assert [group.name for group in found.roles] == ["embedding", "head", "norm", "attention", "mlp"]
    assert [(group.name, group.tensors) for group in found.dtypes] == [("BF16", len(family.names))]
    assert [(s.prefix, s.num_layers, s.is_main) for s in found.stacks] == [("model.layers", 3, True)]
    assert (found.experts, found.quantised, found.declared_quantisation) == ((), (), None)
    assert (found.shared_expert_layers, found.mtp_layers) == (0, 0)


def test_every_tensor_and_byte_is_in_one_role_and_one_dtype() -> None:
    family = _dense()
    found = _inspected(family.names, family.config, dtypes={"model.norm.weight": DType.F32})
    for groups in (found.roles, found.dtypes):
        assert sum(group.tensors for group in groups) == found.tensors
        assert sum(group.nbytes for group in groups) == found.nbytes
    assert [group.name for group in found.dtypes] == ["BF16", "F32"]


@pytest.mark.parametrize("declared", [True, False, None])
@pytest.mark.parametrize("stored", [True, False])
def test_a_tie_is_told_as_declared_and_as_stored(declared: bool | None, stored: bool) -> None:
    family = _dense()
    names = {name: shape for name, shape in family.names.items() if stored or name != "lm_head.weight"}
    config = family.config | ({} if declared is None else {"tie_word_embeddings": declared})
    tie = _inspected(names, config).tie
    assert tie is not None
    assert (tie.head, tie.embedding) == ("lm_head.weight", "model.embed_tokens.weight")
    assert (tie.declared, tie.stored) == (declared, stored)


def test_experts_one_by_one_are_counted() -> None:
    found = _inspected(_per_expert(), {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8})
    (layout,) = found.experts
    assert (layout.kind, layout.num_experts, layout.layers, layout.tensors) == ("per_expert", (4,), 2, 24)
    assert layout.nbytes == 24 * 48 * 2


def test_layers_with_unequal_numbers_of_experts_are_told() -> None:
    names = _per_expert()
    names = {name: shape for name, shape in names.items() if "layers.1.mlp.experts.3" not in name}
    found = _inspected(names, {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8})
    assert found.experts[0].num_experts == (3, 4)


def test_fused_experts_are_told_by_their_kind() -> None:
    names = _moe()
    for layer in range(2):
        names[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (4, 12, 8)
        names[f"model.layers.{layer}.mlp.experts.down_proj"] = (4, 8, 6)
    config = {"model_type": "someone", "num_hidden_layers": 2, "hidden_size": 8, "moe_intermediate_size": 6}
    (layout,) = _inspected(names, config).experts
    assert (layout.kind, layout.num_experts, layout.layers) == ("out_in", (4,), 2)


def test_fused_experts_that_cannot_be_told_are_unknown() -> None:
    names = _moe() | {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8)}
    (layout,) = _inspected(names, {"model_type": "someone", "num_hidden_layers": 2}).experts
    assert layout.kind == "unknown"


def test_codes_of_fused_experts_are_not_taken_for_matrices() -> None:
    block = "model.layers.0.mlp.experts.gate_up_proj"
    names = _moe() | {f"{block}_blocks": (4, 12, 1, 16), f"{block}_scales": (4, 12, 1)}
    codes = {f"{block}_blocks": DType.U8, f"{block}_scales": DType.U8}
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    found = _inspected(names, config, dtypes=codes)
    assert [(layout.kind, layout.num_experts) for layout in found.experts] == [
        ("codes of fused experts", (4,))
    ]
    (group,) = found.quantised
    assert (group.name, group.block, group.scales, group.tensors) == ("mxfp4", (1, 32), "U8", 2)
    assert group.bits_per_weight == 4.25
    assert found.declared_quantisation == "mxfp4"


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
        ({"quantization_config": {"bits": 4}}, "of unnamed kind"),
        ({"quantization_config": {}}, None),
        ({"quantization_config": None}, None),
    ],
)
def test_a_declared_quantisation_is_named(config: dict[str, Any], declared: str | None) -> None:
    family = _dense()
    assert _inspected(family.names, family.config | config).declared_quantisation == declared
