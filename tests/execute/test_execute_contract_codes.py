"""What is in use while codes are decoded and made stays within what was stated: the memory contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.memory_meter import AllocationMeter
from kits.segment_bench import Bench, counted_buffers, make_bench

from raymerge.api import plan
from raymerge.checkpoints.quantisation.encoding import usual_quant_spec
from raymerge.checkpoints.quantisation.formats import codec_of
from raymerge.checkpoints.quantisation.fp8 import FP8_BLOCK
from raymerge.merge_plan.memory import SMALLEST_BUDGET, project

MIB = 1 << 20
ROWS, COLUMNS = 2048, 4096
TABLE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
OBJECTS = 128 << 10
"""Bytes of Python's own objects, which are counted too."""


def _model(root: Path, seed: int, *, is_packed: bool) -> Path:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.02
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if not is_packed:
        return write_checkpoint(root, {**tensors, name: values.bfloat16()}, config)
    packing = usual_quant_spec(FP8_BLOCK, (ROWS, COLUMNS))
    codes, scales = codec_of(FP8_BLOCK).encode(packing, values)
    tensors[name] = codes.view(torch.float8_e4m3fn).view(ROWS, COLUMNS)
    tensors[f"{name}_scale_inv"] = scales.view(torch.float32).view(packing.grid)
    return write_checkpoint(root, tensors, {**config, "quantization_config": TABLE})


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Merges of a matrix that the smallest lane does not hold, from codes, into codes, or both."""
    root = tmp_path_factory.mktemp("codes")
    one, two = (_model(root / f"fp8-{seed}", seed, is_packed=True) for seed in (1, 2))
    plain, other = (_model(root / f"bf16-{seed}", seed, is_packed=False) for seed in (3, 4))

    def merge(method: str, *models: Path, **more: Any) -> dict[str, Any]:
        each = {"parameters": {"weight": 0.5}}
        base = {} if method == "linear" else {"base_model": str(models[0])}
        named = models if method == "linear" else models[1:]
        return {"merge_method": method, **base, "models": [{"model": str(m), **each} for m in named], **more}

    found = {
        "codes": merge("linear", one, two),
        "codes with numbers": merge("linear", one, plain),
        "ties of codes": merge("ties", one, two, plain),
        "slerp of codes": {
            "merge_method": "slerp",
            "base_model": str(one),
            "models": [{"model": str(two)}],
            "parameters": {"t": 0.4},
        },
        "to numbers": merge("linear", one, two, out_format="bf16"),
        "to codes": merge("linear", plain, other, out_format="fp8_block"),
    }
    # Loops are compiled when a segment is first made; that is no part of what is measured.
    for name, recipe in found.items():
        _made(make_bench(recipe, root / f"any {name}", budget=64 * MIB))
    return found


@pytest.mark.parametrize(
    "name", ["codes", "codes with numbers", "ties of codes", "slerp of codes", "to numbers", "to codes"]
)
def test_codes_have_no_more_in_use_than_was_stated(
    name: str, recipes: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    """Buffers, pieces, codes and temporaries of one lane: in the smallest tiles, and in larger ones."""
    least = project(plan(recipes[name]).require(), SMALLEST_BUDGET).least_budget
    for number, budget in enumerate((least, least + 24 * MIB)):
        bench = make_bench(recipes[name], tmp_path / f"{number}", budget=budget)
        with counted_buffers(with_pieces=True) as buffers, AllocationMeter() as meter:
            _made(bench)
        assert 0 < bench.projection.peak <= budget
        assert meter.peak_bytes + buffers.most <= bench.projection.peak + OBJECTS


def _made(bench: Bench) -> Bench:
    for segment in bench.segments:
        bench.runner.run(segment)
    return bench
