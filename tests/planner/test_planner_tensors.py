"""One tensor at a time: dtypes, buffers, integers, missing and extra ones, and what becomes of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config
from kits.plan_maker import Specs, good, header_checkpoint, llama_specs, planned, refusals

from raymerge.dtypes import DType

NORM = "model.norm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
POSITIONS = "model.positions"


def _model(root: Path, extra: Specs | None = None, *, without: tuple[str, ...] = (), **config: Any) -> Path:
    specs = {**llama_specs(2), **(extra or {})}
    kept = {name: spec for name, spec in specs.items() if name not in without}
    return header_checkpoint(root, kept, {**llama_config(layers=2), **config})


def _linear(*models: Path, **more: Any) -> dict[str, Any]:
    entries = [{"model": model} for model in models]
    return {"merge_method": "linear", "models": entries, "parameters": {"weight": 1}, **more}


def test_without_a_dtype_every_tensor_keeps_the_lead_s(tmp_path: Path) -> None:
    a = _model(tmp_path / "a", {NORM: (DType.F32, (32,)), "lm_head.weight": (DType.F16, (64, 32))})
    b = _model(tmp_path / "b", {"model.embed_tokens.weight": (DType.F32, (64, 32))})
    made = good(_linear(a, b))
    dtypes = [made.dtype(name) for name in (NORM, "lm_head.weight", "model.embed_tokens.weight")]
    assert dtypes == ["F32", "F16", "BF16"]
    assert made.config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_a_dtype_replaces_the_main_one_and_keeps_what_is_float32_on_purpose(tmp_path: Path, key: str) -> None:
    a, b = (_model(tmp_path / name, {NORM: (DType.F32, (32,))}) for name in "ab")
    made = good(_linear(a, b, **{key: "float16"}))
    assert made.dtype("lm_head.weight") == "F16"
    assert made.dtype(NORM) == "F32"
    assert made.config["torch_dtype"] == "float16"


def test_a_router_s_selection_bias_stays_float32_in_a_float32_model(tmp_path: Path) -> None:
    specs = {name: (DType.F32, shape) for name, (_, shape) in llama_specs(2).items()}
    a = header_checkpoint(tmp_path / "a", {**specs, BIAS: (DType.F32, (4,))}, llama_config(layers=2))
    made = good(_linear(a, a, dtype="bfloat16"))
    assert made.dtype(BIAS) == "F32"
    assert made.dtype(NORM) == "BF16"


def test_a_scaled_source_is_merged_and_an_unscaled_one_copied(tmp_path: Path) -> None:
    scale = [{"filter": "norm", "value": 2}, {"value": 1}]
    entry = {"model": _model(tmp_path / "a"), "parameters": {"scale": scale}}
    made = good({"merge_method": "passthrough", "models": [entry]})
    assert (made.method(NORM), made.fate(0, NORM)[:2]) == ("passthrough", ("merged", "method"))
    assert (made.method("lm_head.weight"), made.fate(0, "lm_head.weight")[0]) == ("copy", "copied")


def test_integers_are_kept_from_the_lead(tmp_path: Path) -> None:
    extra = {POSITIONS: (DType.I64, (1, 4))}
    a, b, c = _model(tmp_path / "a", extra), _model(tmp_path / "b", extra), _model(tmp_path / "c")
    made = good(_linear(a, b, c, dtype="float16"))
    assert (made.method(POSITIONS), made.dtype(POSITIONS)) == ("copy", "I64")
    assert made.fate(0, POSITIONS) == ("copied", "copied_from_lead", POSITIONS)
    assert made.fate(1, POSITIONS) == ("dropped", "lead_has_it", POSITIONS)


def test_recomputed_buffers_are_kept_from_the_lead_or_left_out(tmp_path: Path) -> None:
    extra = {INV_FREQ: (DType.F32, (4,))}
    a, b = _model(tmp_path / "a", extra), _model(tmp_path / "b", extra)
    plain = _model(tmp_path / "plain")
    made = good(_linear(a, b, dtype="float16"))
    assert (made.method(INV_FREQ), made.dtype(INV_FREQ)) == ("copy", "F32")
    assert not made.plan["tensors"].to_pylist()[made.names().index(INV_FREQ)]["check_finite"]
    made = good(_linear(plain, b))
    assert INV_FREQ not in made.names()
    assert made.fate(1, INV_FREQ) == ("dropped", "recomputed_buffer", "")
    good(_linear(a, plain))


def test_a_missing_tensor_is_refused_or_copied_from_the_base(tmp_path: Path) -> None:
    a, b, c = _model(tmp_path / "a"), _model(tmp_path / "b", without=(NORM,)), _model(tmp_path / "c")
    (problem,) = refusals(_linear(a, b, c))
    assert f"{b}: it lacks 1 tensors that {a} has and that the recipe merges: {NORM}." in problem
    assert "missing_tensors: copy_base" in problem
    kept = {"missing_tensors": "copy_base", "base_model": a}
    made = good(_linear(a, b, c, **kept))
    assert made.reads(NORM) == [(0, NORM)]
    assert made.fate(0, NORM) == ("copied", "only_in_base", NORM)
    assert made.fate(2, NORM) == ("dropped", "only_in_base", NORM)
    assert len(made.reads("lm_head.weight")) == 3
    made = good(_linear(a, b, c, **kept, dtype="float32"))
    assert made.fate(0, NORM) == ("converted", "only_in_base", NORM)


def test_an_extra_tensor_is_refused_or_left_out(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.q_proj.bias": (DType.BF16, (32,))}
    a, b = _model(tmp_path / "a"), _model(tmp_path / "b", extra)
    (problem,) = refusals(_linear(a, b))
    assert f"{b}: 1 of its tensors have no place in the output, since {a} lacks them" in problem
    assert "extra_tensors: drop" in problem
    made = good(_linear(a, b, extra_tensors="drop"))
    assert made.fate(1, "model.layers.1.self_attn.q_proj.bias") == ("dropped", "extra_dropped", "")


def test_everything_wrong_with_the_tensors_is_said_at_once(tmp_path: Path) -> None:
    a = _model(tmp_path / "a")
    b = _model(
        tmp_path / "b",
        {
            "model.layers.1.mlp.up_proj.weight": (DType.BF16, (16, 32)),
            "model.more.weight": (DType.BF16, (1,)),
        },
        without=(NORM, "model.layers.0.mlp.up_proj.weight"),
    )
    c = _model(tmp_path / "c", {"model.layers.0.mlp.up_proj.weight": (DType.F8_E5M2, (64, 32))})
    made = planned(_linear(a, b, c))
    words = ("other shapes", "no place in the output", "lacks 2 tensors", "F8_E5M2 without a scale")
    problems = [str(problem) for problem in made.plan.problems]
    assert len(problems) == len(words)
    for word in words:
        assert any(word in problem for problem in problems)


def test_a_plan_with_problems_still_accounts_for_all_but_what_has_no_place(tmp_path: Path) -> None:
    a = _model(tmp_path / "a")
    b = _model(tmp_path / "b", {"model.more.weight": (DType.BF16, (1,))}, without=(NORM,))
    made = planned(_linear(a, b))
    everything = {(s.index, name) for s in made.sources for name in s.checkpoint.tensors}
    assert everything - made.fates() == {(1, "model.more.weight")}


def test_empty_tensors_and_scalars_are_made(tmp_path: Path) -> None:
    extra = {"model.none.weight": (DType.BF16, (0, 3)), "model.one.weight": (DType.BF16, ())}
    made = good(_linear(_model(tmp_path / "a", extra), _model(tmp_path / "b", extra)))
    (row,) = made.rows("model.none.weight")
    assert (row["nbytes"], row["num_elements"]) == (0, 0)
    (row,) = made.rows("model.one.weight")
    assert (row["nbytes"], row["num_elements"]) == (2, 1)
