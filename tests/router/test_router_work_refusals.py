"""Stages of router rows that are refused, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import read_tensors, write_json
from kits.gate_stages import (
    SPECIAL,
    VOCABULARY,
    WIDTH,
    expert,
    make,
    reading_base,
    stage_of,
    text,
    three_experts,
)
from kits.layer_streams import open_base
from safetensors.torch import save_file

from raymerge.errors import NonFiniteError, PlanError
from raymerge.planner.inputs.sources import ExpertPrompts, Source
from raymerge.stages.router import gate_work

PROMPTED = ("hidden", "hidden_last", "hidden_avg", "router_input", "centroid", "ridge", "cheap_embed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return reading_base(tmp_path_factory.mktemp("base") / "model")


def problems_of(stage_mode: str, base: Source, experts: list[ExpertPrompts]) -> str:
    with pytest.raises(PlanError) as raised:
        gate_work(stage_of(base, stage_mode, experts)).check()
    return str(raised.value)


@pytest.mark.parametrize("mode", PROMPTED)
def test_an_expert_without_texts_is_refused_with_all_others(base: Source, *, mode: str) -> None:
    bare = ExpertPrompts("expert 1 (models/code)", negative=(text(7),))
    said = problems_of(mode, base, [three_experts()[0], bare, ExpertPrompts("expert 2")])
    assert said.count("needs text") == 2
    assert said.startswith("recipe.yml:3:1: expert 1 (models/code) has no positive_prompts")
    assert "gate_mode: random" in said


def test_ridge_that_cannot_be_solved_says_so(tmp_path: Path, base: Source) -> None:
    # Enough tokens, but all alike.
    same = [expert("a", *[text(4)] * WIDTH), expert("b", *[text(4)] * WIDTH)]
    with pytest.raises(PlanError, match="do not determine ridge's rows") as raised:
        make(stage_of(base, "ridge", same, penalty=0.0), tmp_path)
    assert "gate_ridge" in str(raised.value)


def test_rows_that_are_too_large_for_float32_say_so(tmp_path: Path, base: Source) -> None:
    with pytest.raises(PlanError, match="too large for float32 with gate_scale 1e\\+60") as raised:
        make(stage_of(base, "hidden", three_experts(), scale=1e60), tmp_path)
    assert "gate_scale: 1.0" in str(raised.value)


def test_a_base_that_cannot_be_run_is_refused_with_its_prompts(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "base")
    write_json(tmp_path / "base" / "config.json", dict(base.checkpoint.config) | {"model_type": "unheard"})
    said = problems_of(
        "hidden", open_base(tmp_path / "base"), [expert("a", text(*[3] * 9999)), expert("b", text(3))]
    )
    assert "unheard" in said
    assert "10000 tokens long" in said


def test_cheap_embed_wants_an_embedding_of_the_router_s_width(tmp_path: Path) -> None:
    base = reading_base(tmp_path / "base")
    tensors = read_tensors(tmp_path / "base")
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCABULARY, WIDTH // 2)
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    said = problems_of("cheap_embed", open_base(base.checkpoint.root), list(three_experts()))
    assert f"[64, 16], and the router's rows have {WIDTH} elements" in said


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg", "centroid", "ridge", "cheap_embed"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, *, mode: str) -> None:
    reading_base(tmp_path / "base")
    tensors = read_tensors(tmp_path / "base")
    tensors["model.embed_tokens.weight"][SPECIAL + 4, 2] = float("nan")
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    experts = [expert("a", text(SPECIAL + 4)), expert("b", text(9, 8))]
    with pytest.raises(NonFiniteError, match="NaN or infinity in layer 0"):
        make(stage_of(open_base(tmp_path / "base"), mode, experts), tmp_path / "made")
