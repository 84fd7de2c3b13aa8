"""Codes and scales are found by what they are: published layouts whole, other variants by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    look,
)
from kits.plan_maker import Specs, header_checkpoint

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK, fp8_blocks, implied_block
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.dtypes import DType
from raymerge.planner.inputs.quantised import quantised_tensors


@pytest.mark.parametrize("kind", GOOD)
def test_published_layouts_are_found_whole_and_without_a_fault(tmp_path: Path, kind: str) -> None:
    specs, table, (form, shape, block) = GOOD[kind]
    found = look(tmp_path / "a", {**specs, f"{X}.bias": (DType.BF16, (64,))}, table)
    assert not found.faults
    assert not found.unknown
    name = f"{X}.weight" if X in next(iter(specs)) else next(iter(specs)).removesuffix("_blocks")
    assert list(found.tensors) == [name]
    packed = found.tensors[name]
    assert packed.name == name
    assert (packed.packing.format, packed.packing.shape, packed.packing.block) == (form, shape, block)
    assert dict(found.members) == dict.fromkeys(specs, name) == dict.fromkeys(packed.stored, name)
    assert packed.packing.codes_shape == specs[packed.codes][1]
    assert packed.packing.format.code_dtype == specs[packed.codes][0]
    assert (packed.packing.scale_dtype, packed.packing.scales_shape) == specs[packed.scales]


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
        assert found.tensors[f"{X}.weight"].packing.power_of_two is expected
        assert not found.faults


def test_partners_have_names_by_what_they_are(tmp_path: Path) -> None:
    nvfp4 = look(tmp_path / "a", GOOD["NVFP4"][0], compressed(NV)).tensors[f"{X}.weight"]
    assert (nvfp4.tensor_scale, nvfp4.shape_tensor) == (f"{X}.weight_global_scale", None)
    int4 = look(tmp_path / "b", GOOD["Kimi-K2-Thinking"][0], compressed(W4)).tensors[f"{X}.weight"]
    assert (int4.tensor_scale, int4.shape_tensor) == (None, f"{X}.weight_shape")
    fp8 = look(tmp_path / "c", GOOD["per tensor"][0], compressed(TENSOR)).tensors[f"{X}.weight"]
    assert (fp8.tensor_scale, fp8.others) == (f"{X}.weight_scale", (f"{X}.input_scale",))


UNKNOWN: dict[str, tuple[Specs, Mapping[str, Any], str]] = {
    "zero points": (
        {**GOOD["Kimi-K2-Thinking"][0], f"{X}.weight_zero_point": (DType.I32, (1, 2))},
        compressed({**W4, "symmetric": False}),
        "packed integers with zero points",
    ),
    "another order": (
        {**GOOD["Kimi-K2-Thinking"][0], f"{X}.weight_g_idx": (DType.I32, (64,))},
        compressed({**W4, "actorder": "group"}),
        "packed integers in another order of columns (g_idx)",
    ),
    "asymmetric": (
        GOOD["Kimi-K2-Thinking"][0],
        compressed({**W4, "symmetric": False}),
        "packed integers, declared as asymmetric 4-bit int by group",
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
        "gptq",
    ),
    "bitsandbytes": (
        {f"{X}.weight": (DType.U8, (512, 1)), f"{X}.weight.absmax": (DType.U8, (16,))},
        {"quant_method": "bitsandbytes"},
        "bitsandbytes",
    ),
    "FP8 of a method that is not read": (
        {f"{X}.weight": f8(2, 2), f"{X}.weight_scale": f32()},
        {"quant_method": "modelopt"},
        "FP8 with weight_scale",
    ),
    "Mistral's scales": (
        {f"{X}.weight": f8(2, 2), f"{X}.qscale_weight": f32()},
        FP8,
        "FP8 with qscale_weight",
    ),
    "DeepSeek-V4's experts": (
        {f"{X}.weight": (DType.I8, (4, 32)), f"{X}.scale": (DType.F8_E8M0, (4, 2))},
        FP8,
        "FP4 by 32 columns in bytes, as DeepSeek-V4 has it",
    ),
    "ModelOpt's NVFP4": (
        {
            f"{X}.weight": (DType.U8, (4, 16)),
            f"{X}.weight_scale": f8(4, 2),
            f"{X}.weight_scale_2": f32(),
            f"{X}.input_scale": f32(),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "NVFP4 in ModelOpt's names",
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
    assert not found.faults or table["quant_method"] == "compressed-tensors"
    is_read = table["quant_method"] in ("fp8", "compressed-tensors")
    assert set(found.members) == (set(read) if is_read else set())


def test_a_bias_beside_codes_that_are_read_is_plain(tmp_path: Path) -> None:
    specs = {**GOOD["gpt-oss"][0], f"{E}.down_proj_bias": (DType.BF16, (4, 6))}
    config = {"model_type": "gpt_oss", "quantization_config": MX}
    found = quantised_tensors(open_checkpoint(header_checkpoint(tmp_path / "a", specs, config), "a model"))
    assert list(found.tensors) == [f"{E}.down_proj"]
    assert not found.unknown


LEAVES = (
    *("weight", "weight_scale_inv", "weight_scale", "scale", "weight_packed", "weight_shape", "input_scale"),
    *("weight_zero_point", "weight_global_scale", "up_blocks", "up_scales", "up", "up_scale_inv", "qweight"),
)
TABLES = (None, FP8, MX, compressed(W4), compressed(W8, W4), compressed(NV), compressed(BLOCK), {"bits": 4})
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
    checkpoint = Checkpoint("a model", ".", {"x": 1}, tensors, (), (), ())
    found = packed_tensors(checkpoint, [table] if table else [])
    stored = [name for packed in found.tensors.values() for name in packed.stored]
    assert sorted(stored) == sorted(found.members) == sorted(set(stored))
    assert found.unknown.keys().isdisjoint(stored)
    for packed in found.tensors.values():
        assert tensors[packed.codes].shape == packed.packing.codes_shape
        assert tensors[packed.codes].dtype is packed.packing.format.code_dtype


def test_of_a_method_that_is_not_read_nothing_is_found_and_nothing_is_a_fault(tmp_path: Path) -> None:
    specs = {**GOOD["one scale of FP8"][0], "lonely.weight_scale_inv": f32(1, 1)}
    found = look(tmp_path / "a", specs, {"quant_method": "modelopt"})
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


class Counted(Mapping[str, StoredTensor]):
    """Tensors that count how often they are looked at."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self.looks = 0

    def __getitem__(self, name: str) -> StoredTensor:
        self.looks += 1
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        for name in self._tensors:
            self.looks += 1
            yield name

    def __len__(self) -> int:
        return len(self._tensors)


def _looks(experts: int) -> float:
    shapes = {".weight": (DType.F8_E4M3, (256, 256)), ".weight_scale_inv": (DType.F32, (2, 2))}
    tensors = {
        f"{E}.{number}.up_proj{ending}": StoredTensor(f"{E}.{number}.up_proj{ending}", *spec, "f", 0, 0)
        for number in range(experts)
        for ending, spec in shapes.items()
    }
    counted = Counted(tensors)
    table = {**FP8, "modules_to_not_convert": [f"model.layers.{number}.mlp.gate" for number in range(2000)]}
    checkpoint = Checkpoint("a model", ".", {"quantization_config": table}, counted, (), (), ())
    found = packed_tensors(checkpoint, [table])
    assert len(found.tensors) == experts
    assert not found.faults
    return counted.looks / len(tensors)


def test_each_tensor_is_looked_at_a_few_times_however_many_there_are() -> None:
    few, many = _looks(50), _looks(5000)
    assert many <= few <= 16
