"""Notes of a plan where a known loader would read the result wrongly; the loaders' own code is the judge."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.plan_maker import Specs, good, header_checkpoint
from kits.recipe_maker import linear
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts

from raymerge.dtypes import DType

BLOCK = 128
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
LAYER = "model.layers.0"


def _ceil(size: int) -> int:
    return -(-size // BLOCK)


def _fp8(name: str, *shape: int) -> dict[str, tuple[DType, tuple[int, ...]]]:
    scales = (*shape[:-2], _ceil(shape[-2]), _ceil(shape[-1]))
    return {name: (DType.F8_E4M3, shape), f"{name}_scale_inv": (DType.F32, scales)}


def _notes(root: Path, specs: Specs, loader: str, model_type: str = "llama", **config: Any) -> list[str]:
    ends: Specs = {"model.embed_tokens.weight": (DType.BF16, (8, BLOCK))}
    fields = {"model_type": model_type, "num_hidden_layers": 1, "tie_word_embeddings": True, **config}
    fields |= {"quantization_config": FP8} if any(name.endswith("_inv") for name in specs) else {}
    model = header_checkpoint(root, {**ends, **specs}, {"architectures": ["Model"], **fields})
    notes = good(linear(model, model)).plan.manifest["notes"]
    return [note for note in notes if note.startswith(loader)]


def _as_transformers_reads(rows: int, columns: int) -> torch.Tensor | None:
    """What it decodes of a matrix of ones, each block with a scale of its own; None where it refuses."""
    scales = torch.arange(1.0, 1 + _ceil(rows) * _ceil(columns)).reshape(_ceil(rows), _ceil(columns))
    codes = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    try:
        return Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    except ValueError:
        return None


def _by_definition(rows: int, columns: int) -> torch.Tensor:
    scales = torch.arange(1.0, 1 + _ceil(rows) * _ceil(columns)).reshape(_ceil(rows), _ceil(columns))
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(256, 256), (192, 256), (256, 192), (96, 64), (576, 256), (256, 130), (384, 320), (192, 130)],
)
def test_block_fp8_whose_last_blocks_are_smaller(rows: int, columns: int, tmp_path: Path) -> None:
    seen, notes = _as_transformers_reads(rows, columns), []
    for note in _notes(tmp_path, _fp8(f"{LAYER}.mlp.up_proj.weight", rows, columns), "transformers "):
        assert f"1 tensors ({LAYER}.mlp.up_proj.weight [{rows}, {columns}])" in note
        notes.append(note.split()[1])
    if seen is None:
        assert notes == ["refuses"]
    else:
        assert notes == ([] if torch.equal(seen, _by_definition(rows, columns)) else ["decodes"])


@pytest.mark.sample(5)
@pytest.mark.parametrize("is_stack", [False, True])
@pytest.mark.parametrize("rows", [32, 64, 128, 192, 256, 320])
def test_experts_whose_gate_and_up_are_joined_within_a_block(
    rows: int, is_stack: bool, tmp_path: Path
) -> None:
    block = f"{LAYER}.mlp.experts"
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for expert in range(2):
        for word in ("gate_proj", "up_proj"):
            specs |= {} if is_stack else _fp8(f"{block}.{expert}.{word}.weight", rows, BLOCK)
    specs |= _fp8(f"{block}.gate_up_proj", 2, 2 * rows, BLOCK) if is_stack else {}
    sizes = {"num_experts": 2, "hidden_size": BLOCK, "moe_intermediate_size": rows}
    with torch.device("meta"):
        config = SimpleNamespace(**sizes, hidden_act="silu")
        expected = FP8Experts(config, block_size=(BLOCK, BLOCK)).gate_up_proj_scale_inv.shape[1]
    given = _ceil(2 * rows) if is_stack else 2 * _ceil(rows)
    notes = _notes(tmp_path, specs, "transformers does not load", "qwen3_moe", **sizes)
    assert bool(notes) == (given != expected)
    assert all(f"{1 if is_stack else 4} tensors" in note for note in notes)


HUB = (f"{LAYER}.self_attn.A_log", f"{LAYER}.hc_attn_fn", f"{LAYER}.mlp.experts.0.down_proj.weight")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "is_left_out"),
    [
        *((name, False) for name in HUB),
        (f"{LAYER}.self_attn.forget_gate.A_log", True),
        (f"{LAYER}.attn_hc.fn", True),
        (f"{LAYER}.ffn_hc.scale", True),
        (f"{LAYER}.mlp.experts.down_proj", True),
        (f"{LAYER}.self_attn.conv1d.weight", True),
    ],
)
def test_names_that_sglang_leaves_out(name: str, is_left_out: bool, tmp_path: Path) -> None:
    specs: Specs = {name: (DType.BF16, (2, 8, 8))}
    assert bool(_notes(tmp_path / "a", specs, "SGLang", "glm5_next")) == is_left_out
    assert not _notes(tmp_path / "b", specs, "SGLang", "glm4_moe")
