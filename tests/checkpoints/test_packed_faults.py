"""What is incomplete, fits together in no way or contradicts the config is told with both facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.packed_headers import FP8, GOOD, MX, NV, W4, E, X, compressed, f8, f32, fault, look
from kits.plan_maker import Specs, header_checkpoint

from raymerge.checkpoints.quantisation.detect import QuantisedWeights
from raymerge.checkpoints.quantisation.formats import packed_tensors
from raymerge.checkpoints.source import Checkpoint, open_checkpoint
from raymerge.dtypes import DType
from raymerge.storage.local.store import LocalStore

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
    "an INT4 shape": ({f"{X}.weight_shape": (DType.I64, (2,))}, compressed(W4), [f"no {X}.weight_packed"]),
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
    nvfp4 = {**GOOD["NVFP4"][0], f"{X}.weight_global_scale": f32(6, 1)}
    text = fault(look(tmp_path / "b", nvfp4, compressed(NV)))
    assert f"{X}.weight_global_scale F32[6, 1] in model.safetensors is no F32 of 1 elements" in text


MISFITS: dict[str, tuple[Specs, Mapping[str, Any]]] = {
    "another stack": ({f"{E}.up": f8(4, 128, 128), f"{E}.up_scale_inv": f32(3, 1, 1)}, FP8),
    "one scale for a stack": ({f"{E}.up": f8(4, 128, 128), f"{E}.up_scale_inv": f32()}, FP8),
    "no matrix": ({f"{X}.weight": f8(256), f"{X}.weight_scale_inv": f32(2)}, FP8),
    "MXFP4": ({f"{E}.up_blocks": (DType.U8, (4, 2, 1, 16)), f"{E}.up_scales": (DType.U8, (4, 2, 2))}, MX),
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
    assert not look(tmp_path / "d", plain, {"quant_method": "gptq"}).faults
    other_codes: Specs = {f"{X}.weight": (DType.I8, (4, 32)), f"{X}.scale": (DType.F8_E8M0, (4, 2))}
    assert not look(tmp_path / "e", other_codes, FP8).faults


def test_a_single_file_has_no_config_to_disagree_with(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        header_checkpoint(tmp_path / "a", GOOD["DeepSeek-V3, ragged rows"][0], {"x": 1}), "a model"
    )
    raw = Checkpoint("a model", checkpoint.root, {}, checkpoint.tensors, checkpoint.files, (), ())
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


# The shape that is stored beside packed integers


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
    assert (found.faults, found.tensors[f"{X}.weight"].packing.shape) == ((), (4, 304))
    padded = _with_shape(tmp_path / "padded", 4, 300)
    assert (padded.faults, dict(padded.tensors)) == ((), {})
    assert set(padded.unknown.values()) == {"packed codes with 4 unused ones at the end of each row"}
    assert len(padded.unknown) == 3


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
    assert len(found.tensors) == (experts if columns % 8 == 0 else 0)
    assert len(found.unknown) == (0 if columns % 8 == 0 else 3 * experts)
