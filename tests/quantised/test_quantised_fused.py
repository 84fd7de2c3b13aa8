"""Stacks of experts in block FP8: projections that share blocks of scales, and matrices stored [in, out]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kits.checkpoint_maker import read_tensors, write_checkpoint
from kits.merge_cases import merge
from kits.plan_maker import good, header_checkpoint, refusals
from kits.quantised_merges import changed_bytes
from kits.quantised_numbers import Values, e4m3_values, fp8_blocks

from raymerge.api import conversion, plan, verify
from raymerge.dtypes import DType

HIDDEN, WIDTH, EXPERTS = 128, 96, 2
"""Gate ends at row 96 of 192, which is within the first block of 128 rows."""
BLOCK = "model.layers.0.mlp.experts"
SHAPES = {
    f"{BLOCK}.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
    f"{BLOCK}.down_proj": (EXPERTS, HIDDEN, WIDTH),
}
OUT_IN, IN_OUT = "qwen3_moe", "qwen3_vl_moe"
"""Families that store experts [out, in], and transposed."""
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CONFIG = {
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
}


class Model(NamedTuple):
    """A checkpoint and what its experts mean."""

    root: Path
    family: str
    values: Mapping[str, Values]


def _numbers(family: str, seed: int) -> dict[str, Values]:
    random = np.random.default_rng(seed)
    made = {name: random.standard_normal(shape) * 0.05 for name, shape in SHAPES.items()}
    return (
        {name: np.ascontiguousarray(each.swapaxes(1, 2)) for name, each in made.items()}
        if (family == IN_OUT)
        else made
    )


def _rest() -> dict[str, torch.Tensor]:
    gate, norm = torch.ones(EXPERTS, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16()
    return {"model.layers.0.mlp.gate.weight": gate, "model.norm.weight": norm}


def _coded(root: Path, family: str, seed: int) -> Model:
    tensors, values = _rest(), {}
    for name, numbers in _numbers(family, seed).items():
        experts = [fp8_blocks(expert, "F32") for expert in numbers]
        codes = torch.stack([each.codes.view(torch.uint8) for each in experts])
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.stack([each.scales for each in experts])
        values[name] = np.stack([each.values for each in experts])
    config = {**CONFIG, "model_type": family, "quantization_config": FP8}
    return Model(write_checkpoint(root, tensors, config), family, values)


def _plain(root: Path, family: str, seed: int, *, alone: bool = False) -> Model:
    """The same in bfloat16, stacked or one expert by one."""
    tensors, values = _rest(), {}
    for name, numbers in _numbers(family, seed).items():
        stack = torch.from_numpy(numbers).bfloat16()
        values[name] = stack.double().numpy()
        if not alone:
            tensors[name] = stack
            continue
        words = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, matrix in enumerate(stack if family == OUT_IN else stack.mT):
            for word, part in zip(words, matrix.chunk(len(words)), strict=True):
                tensors[f"{BLOCK}.{expert}.{word}.weight"] = part.contiguous()
    return Model(write_checkpoint(root, tensors, {**CONFIG, "model_type": family}), family, values)


@pytest.fixture(scope="module", params=[OUT_IN, IN_OUT])
def parents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    root, family = tmp_path_factory.mktemp("parents"), request.param
    return _coded(root / "a", family, 1), _coded(root / "b", family, 2)


def _linear(*models: Model, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(each.root), "parameters": {"weight": 0.5}} for each in models]
    return {"merge_method": "linear", "models": entries, **more}


def _check_codes(root: Path, wanted: Mapping[str, Values]) -> None:
    """Each number is within half a code of what is wanted."""
    found = read_tensors(root)
    for name, values in wanted.items():
        codes, scales = found[name], found[f"{name}_scale_inv"]
        assert scales.shape == (EXPERTS, -(-values.shape[1] // 128), -(-values.shape[2] // 128))
        rows, columns = values.shape[1:]
        spread = scales.double().numpy().repeat(128, 1).repeat(128, 2)[:, :rows, :columns]
        have = e4m3_values()[codes.view(torch.uint8).numpy()] * spread
        assert np.all(np.abs(have - values) <= (np.abs(values) / 16 + spread / 1024) * (1 + 1e-5)), name


def _mean(one: Model, other: Model) -> dict[str, Values]:
    return {name: (values + other.values[name]) / 2 for name, values in one.values.items()}


def test_a_merge_is_the_merge_of_what_the_parents_mean(parents: tuple[Model, Model], tmp_path: Path) -> None:
    merge(_linear(*parents), tmp_path / "out")
    _check_codes(tmp_path / "out", _mean(*parents))
    assert verify(tmp_path / "out").problems == ()


def test_a_model_merged_with_itself_is_itself(parents: tuple[Model, Model], tmp_path: Path) -> None:
    twin = _coded(tmp_path / "twin", parents[0].family, 1)
    merge(_linear(parents[0], twin), tmp_path / "out")
    assert changed_bytes(tmp_path / "out", parents[0].root) == set()


@pytest.mark.parametrize("alone", [False, True])
def test_a_plain_parent_meets_a_quantised_one(
    alone: bool, parents: tuple[Model, Model], tmp_path: Path
) -> None:
    plain = _plain(tmp_path / "plain", parents[0].family, 3, alone=alone)
    merge(_linear(parents[0], plain), tmp_path / "codes")
    _check_codes(tmp_path / "codes", _mean(parents[0], plain))
    merge(_linear(plain, parents[0]), tmp_path / "plainly")
    found = read_tensors(tmp_path / "plainly")
    assert found.keys() == read_tensors(plain.root).keys()
    down = _mean(plain, parents[0])[f"{BLOCK}.down_proj"][1]
    have = found[f"{BLOCK}.1.down_proj.weight"] if alone else found[f"{BLOCK}.down_proj"][1]
    wanted = down.T if alone and plain.family == IN_OUT else down
    assert np.allclose(have.double().numpy(), wanted, rtol=2**-8, atol=1e-7)


def test_it_is_converted_both_ways(parents: tuple[Model, Model], tmp_path: Path) -> None:
    one = parents[0]
    merge(conversion(one.root, "bf16"), tmp_path / "plain")
    found = read_tensors(tmp_path / "plain")
    assert not any(name.endswith("_scale_inv") for name in found)
    for name, values in one.values.items():
        assert torch.equal(found[name], torch.from_numpy(values).float().bfloat16()), name
    back = conversion(tmp_path / "plain", "fp8_block")
    if one.family == IN_OUT:
        (refused,) = plan(back).problems
        assert "loaders take experts in it that lie [experts, out, in]" in refused.what
        return
    merge(back, tmp_path / "codes")
    _check_codes(tmp_path / "codes", {name: found[name].double().numpy() for name in one.values})


CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}


def _turned(root: Path, grid: Callable[[int, int], tuple[int, int]], table: Mapping[str, Any] = FP8) -> Path:
    """Experts [E, 256, 2 * 384] and [E, 384, 256] in FP8 with scales of these shapes."""
    sizes = {"model_type": IN_OUT, "hidden_size": 256, "moe_intermediate_size": 384}
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.norm.weight": (DType.BF16, (256,)),
        "model.layers.0.mlp.gate.weight": (DType.BF16, (EXPERTS, 256)),
    }
    ending, dtype = ("_scale_inv", DType.F32) if table is FP8 else ("_scale", DType.BF16)
    for word, (rows, columns) in {"gate_up_proj": (256, 768), "down_proj": (384, 256)}.items():
        specs[f"{BLOCK}.{word}"] = (DType.F8_E4M3, (EXPERTS, rows, columns))
        specs[f"{BLOCK}.{word}{ending}"] = (dtype, (EXPERTS, *grid(rows, columns)))
    return header_checkpoint(root, specs, {**CONFIG, **sizes, "quantization_config": table})


def _mean_of(*roots: Path, **more: Any) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": root} for root in roots], **more} | {
        "parameters": {"weight": 1}
    }


@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_scales_of_the_transposed_matrices_are_told_and_copied(strategy: str, tmp_path: Path) -> None:
    is_block = strategy == "block"
    grid = (
        (lambda rows, columns: (columns // 128, rows // 128))
        if is_block
        else (lambda _, columns: (1, columns))
    )
    roots = [_turned(tmp_path / name, grid, FP8 if is_block else CHANNELS) for name in "ab"]
    said = refusals(_mean_of(*roots))
    form = f"fp8_{strategy} with scales of the transposed matrices"
    assert len(said) == 2
    assert all(
        f"4 tensors are quantised as {form}, which raymerge can neither combine" in each for each in said
    )
    assert all("merge_method: passthrough" in each for each in said)
    (refused,) = {problem.what.split(",")[0] for problem in plan(conversion(roots[0], "bf16")).problems}
    assert form in refused
    copied = good({"merge_method": "passthrough", "models": [{"model": roots[0]}]})
    assert {expression.method for expression in copied.plan.expressions} == {"copy"}
