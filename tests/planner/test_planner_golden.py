"""Whole plans as text, compared line by line: what a change of the planner does to a merge is seen in a diff.

``RAYMERGE_UPDATE_GOLDEN=1 pytest tests/planner/test_planner_golden.py`` writes the texts anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, read_tensors, tiny_llama, write_checkpoint
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, plan_text

from raymerge.dtypes import DType

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plans"
Data = Mapping[str, Any]


def _llama(root: Path, extra: Specs | None = None, **config: Any) -> Path:
    specs = {**llama_specs(2, hidden=8, tie=bool(config.get("tie_word_embeddings"))), **(extra or {})}
    return header_checkpoint(root, specs, {**llama_config(layers=2, hidden=8), **config})


def _piece(*models: Path, layers: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"sources": [{"model": model, "layer_range": list(layers)} for model in models], **more}


def _models(*roots: Path) -> list[dict[str, Any]]:
    return [{"model": root} for root in roots]


def _mean_of_two(root: Path) -> Data:
    """Also another dtype, a file limit, and a recomputed buffer."""
    buffer: Specs = {"model.layers.0.self_attn.rotary_emb.inv_freq": (DType.F32, (4,))}
    norm: Specs = {"model.norm.weight": (DType.F32, (8,))}
    a, b = _llama(root / "a", norm), _llama(root / "b", {**norm, **buffer})
    data = {"merge_method": "linear", "models": _models(a, b), "parameters": {"weight": 1}}
    return {**data, "dtype": "float16", "shard_size": 2000}


def _stack(root: Path) -> Data:
    a, b = _llama(root / "a", layer_types=["x", "y"]), _llama(root / "b", layer_types=["x", "y"])
    slices = [_piece(a, layers=(0, 2)), _piece(b, layers=(1, 2)), _piece(a, layers=(1, 2))]
    return {"merge_method": "passthrough", "base_model": b, "slices": slices}


def _slerp(root: Path) -> Data:
    a, b = _llama(root / "a"), _llama(root / "b")
    t = [{"filter": "self_attn", "value": [0, 1]}, {"filter": "mlp", "value": [1, 0]}, {"value": 0.5}]
    return {
        "merge_method": "slerp",
        "base_model": a,
        "slices": [_piece(a, b, layers=(0, 2))],
        "parameters": {"t": t},
    }


def _ties(root: Path) -> Data:
    base, a, b = (_llama(root / name) for name in ("base", "a", "b"))
    entries = _models(a, b)
    entries[0]["parameters"] = {"weight": 0.5, "density": [0.25, 0.75]}
    return {
        "merge_method": "ties",
        "base_model": base,
        "models": entries,
        "parameters": {"weight": 1, "density": 0.5, "int8_mask": True},
    }


def _experts(root: Path) -> Data:
    """Interleaved columns in the base, one tensor an expert in the fine-tune."""
    e, f, d = 2, 3, 4
    rest: Specs = {"model.embed_tokens.weight": (DType.BF16, (8, d)), "lm_head.weight": (DType.BF16, (8, d))}
    block = "model.layers.0.{}.experts"
    fused: Specs = {
        "model.layers.0.mlp.router.weight": (DType.BF16, (e, d)),
        f"{block.format('mlp')}.gate_up_proj": (DType.BF16, (e, d, 2 * f)),
        f"{block.format('mlp')}.down_proj": (DType.BF16, (e, f, d)),
    }
    alone = {
        f"{block.format('block_sparse_moe')}.{expert}.{word}.weight": (DType.BF16, shape)
        for expert in range(e)
        for word, shape in (("w1", (f, d)), ("w2", (d, f)), ("w3", (f, d)))
    }
    alone["model.layers.0.block_sparse_moe.gate.weight"] = (DType.BF16, (e, d))
    fields = {"num_hidden_layers": 1, "num_local_experts": e, "hidden_size": d, "intermediate_size": f}
    base = header_checkpoint(root / "base", {**rest, **fused}, {**fields, "model_type": "gpt_oss"})
    tuned = header_checkpoint(root / "tuned", {**rest, **alone}, {**fields, "model_type": "mixtral"})
    named = {"model": str(tuned), "override_architecture": "Any"}
    return {
        "merge_method": "dare_linear",
        "base_model": {"model": str(base), "override_architecture": "Any"},
        "models": [{"model": named}],
        "parameters": {"weight": 0.5, "density": 0.5},
        "seed": 7,
    }


def _modules(root: Path) -> Data:
    vision: Specs = {
        "model.visual.blocks.0.attn.qkv.weight": (DType.BF16, (4, 4)),
        "model.visual.merger.mlp.weight": (DType.BF16, (4, 4)),
    }
    text = {
        name.replace("model.", "model.language_model.", 1): s for name, s in llama_specs(2, hidden=8).items()
    }
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Some"],
        "text_config": {"num_hidden_layers": 2},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
    }
    a, b = (header_checkpoint(root / name, {**text, **vision}, config) for name in "ab")
    pieces = [_piece(a, b, layers=(1, 2)), _piece(b, a, layers=(0, 2), parameters={"weight": 2})]
    modules = {"text_decoder": {"slices": pieces}, "vision_tower": {"models": _models(b)}}
    return {"merge_method": "linear", "modules": modules, "parameters": {"weight": 1}}


def _quantised(root: Path) -> Data:
    """Codes with their scales, a router's bias, and a layer that predicts further tokens."""
    specs: dict[str, tuple[DType, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (DType.BF16, (8, 4)),
        "model.norm.weight": (DType.BF16, (4,)),
        "lm_head.weight": (DType.BF16, (8, 4)),
        "model.layers.2.eh_proj.weight": (DType.BF16, (4, 8)),
    }
    for layer in range(3):
        weight = f"model.layers.{layer}.mlp.experts.0.up_proj.weight"
        specs[weight] = (DType.F8_E4M3, (4, 4))
        specs[f"{weight}_scale_inv"] = (DType.F32, (1, 1))
        specs[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = (DType.F32, (1,))
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    }
    a = header_checkpoint(root / "a", specs, config)
    slices = [_piece(a, layers=(0, 2)), _piece(a, layers=(0, 1))]
    return {"merge_method": "passthrough", "slices": slices}


def _cut_tie(root: Path) -> Data:
    tied = tiny_llama(root / "tied", 1, layers=1, hidden=8, tie=True)
    own = tiny_llama(root / "own", 2, layers=1, hidden=8)
    tensors = {**read_tensors(tied), "lm_head.weight": read_tensors(tied)["model.embed_tokens.weight"]}
    twice = write_checkpoint(root / "twice", tensors, llama_config(layers=1, hidden=8, tie=True))
    data = {"merge_method": "linear", "models": _models(tied, own, twice), "parameters": {"weight": 1}}
    return {**data, "parameters": {"weight": 1, "normalize": False}}


def _odds_and_ends(root: Path) -> Data:
    """Missing, extra and integer tensors, and a base that only gives names."""
    integers: Specs = {"model.positions": (DType.I64, (2,))}
    base = _llama(root / "base", integers)
    a = _llama(root / "a", {**integers, "model.more.weight": (DType.BF16, (2,))})
    specs = llama_specs(2, hidden=8)
    kept = {name: spec for name, spec in specs.items() if name != "model.norm.weight"}
    b = header_checkpoint(root / "b", kept, llama_config(layers=2, hidden=8))
    entries = _models(a, b)
    for entry in entries:
        entry["parameters"] = {"weight": 1}
    policies = {"missing_tensors": "copy_base", "extra_tensors": "drop"}
    return {"merge_method": "linear", "base_model": base, "models": entries, **policies}


RECIPES: Mapping[str, Callable[[Path], Data]] = {
    "cut-tie": _cut_tie,
    "experts": _experts,
    "mean-of-two": _mean_of_two,
    "modules": _modules,
    "odds-and-ends": _odds_and_ends,
    "quantised": _quantised,
    "slerp": _slerp,
    "stack": _stack,
    "ties": _ties,
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_plan_is_what_it_was(tmp_path: Path, name: str) -> None:
    text = plan_text(good(RECIPES[name](tmp_path)))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RAYMERGE_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_every_golden_plan_has_its_recipe() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECIPES)
