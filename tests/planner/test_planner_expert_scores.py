"""Scores of experts: read from files, computed from weights, and every refusal by its sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import write_checkpoint
from kits.expert_models import refused_set
from safetensors.torch import save_file

from raymerge.planner.expert_blocks import expert_blocks
from raymerge.planner.expert_moves import Mover
from raymerge.planner.findings import Findings
from raymerge.planner.logical import LogicalTensors
from raymerge.planner.saliency import Scores, read_scores
from raymerge.planner.sources import open_sources
from raymerge.recipes import ExpertSetRecipe, recipe_from_mapping

LAYERS, EXPERTS = 2, 4
BLOCK = "model.layers.{}.mlp"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 1,
}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(LAYERS):
        block = BLOCK.format(layer)
        found[f"{block}.gate.weight"] = torch.randn(EXPERTS, 8, generator=generator)
        for expert in range(EXPERTS):
            for kind, shape in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6))):
                tensor = torch.randn(shape, generator=generator) * (1 + (expert * 7 + layer) % 4)
                found[f"{block}.experts.{expert}.{kind}_proj.weight"] = tensor.bfloat16()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return write_checkpoint(tmp_path_factory.mktemp("scores") / "base", _tensors(), CONFIG)


def _recipe(base: Path, change: dict[str, Any]) -> ExpertSetRecipe:
    recipe = recipe_from_mapping({"base_model": str(base), "experts": change})
    assert isinstance(recipe, ExpertSetRecipe)
    return recipe


def _scores(base: Path, said: str) -> Scores:
    recipe = _recipe(base, {"drop": 1, "scores": said})
    (source,) = open_sources(recipe)
    blocks = expert_blocks(source, LogicalTensors(source), EXPERTS, Findings())
    return read_scores(recipe, source, blocks)


def test_sizes_of_weights(base: Path) -> None:
    found, tensors = _scores(base, "weights"), _tensors()
    for layer in range(LAYERS):
        for expert, score in enumerate(found[BLOCK.format(layer)]):
            head = f"{BLOCK.format(layer)}.experts.{expert}"
            gate, up, down = (
                float(tensors[f"{head}.{kind}_proj.weight"].double().norm())
                for kind in ("gate", "up", "down")
            )
            assert math.isclose(score, down * math.sqrt(gate**2 + up**2), rel_tol=1e-12)


def test_files_of_all_forms(base: Path, tmp_path: Path) -> None:
    values = {BLOCK.format(layer): (1.0, 0.25, 3.0, float(layer)) for layer in range(LAYERS)}
    by_layer = {str(layer): list(values[BLOCK.format(layer)]) for layer in range(LAYERS)}
    (tmp_path / "a.json").write_text(json.dumps({**by_layer, "comment": "of no layer"}))
    (tmp_path / "b.json").write_text(json.dumps({path: list(row) for path, row in values.items()}))
    save_file({key: torch.tensor(row) for key, row in by_layer.items()}, tmp_path / "c.safetensors")
    save_file(
        {path: torch.tensor(row, dtype=torch.bfloat16) for path, row in values.items()},
        tmp_path / "d.safetensors",
    )
    for name in ("a.json", "b.json", "c.safetensors", "d.safetensors"):
        assert _scores(base, str(tmp_path / name)) == values


REFUSED = {
    "no-json": ("{", "is not JSON"),
    "list": ("[1, 2]", "is no map of layers"),
    "layer": ('{"0": [1, 2, 3, 4]}', "there are no scores for layer 1 (model.layers.1.mlp)"),
    "short": ('{"0": [1, 2, 3, 4], "1": [1, 2]}', "has 4 experts, and 2 scores"),
    "nan": ('{"0": [1, 2, 3, NaN], "1": [1, 2, 3, 4]}', "hold NaN or infinity"),
    "text": ('{"0": ["a", 2, 3, 4], "1": [1, 2, 3, 4]}', "there are no scores for layer 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, base: Path, tmp_path: Path) -> None:
    text, expected = REFUSED[case]
    (tmp_path / "scores.json").write_text(text)
    change = {"drop": 1, "scores": str(tmp_path / "scores.json")}
    (problem,) = refused_set({"base_model": base, "experts": change})
    assert expected in problem
    assert "experts.scores" in problem


def test_weights_of_a_mean(base: Path, tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    change = {"merge": [[0, 1], [2, 3]], "scores": str(scores)}
    scores.write_text(json.dumps({"0": [1, -1, 3, 4], "1": [1, 2, 3, 4]}))
    (problem,) = refused_set({"base_model": base, "experts": change})
    assert "the lowest score of layer 0 (model.layers.0.mlp) is -1" in problem
    scores.write_text(json.dumps({"0": [0, 0, 3, 4], "1": [0, 2, 3, 4]}))
    (problem,) = refused_set({"base_model": base, "experts": change})
    assert "the scores of experts 0, 1 in layer 0 are all 0" in problem
    scores.write_text(json.dumps({"0": [0, 1, 3, 4], "1": [0, 2, 3, 4]}))
    assert refused_set({"base_model": base, "experts": change}) == []


def test_matrices_that_cannot_be_told_apart(tmp_path: Path) -> None:
    tensors = {name.replace("down_proj", "other"): tensor for name, tensor in _tensors().items()}
    root = write_checkpoint(tmp_path / "base", tensors, CONFIG)
    (problem,) = refused_set({"base_model": root, "experts": {"drop": 1, "scores": "weights"}})
    assert "cannot be told apart" in problem


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS), min_size=2, max_size=2),
    drop=st.integers(1, 3),
)
def test_those_with_the_lowest_scores_go(rows: list[list[int]], drop: int, base: Path) -> None:
    recipe = _recipe(base, {"drop": drop, "scores": "weights"})
    sources = open_sources(recipe)
    blocks = expert_blocks(sources[0], LogicalTensors(sources[0]), EXPERTS, Findings())
    mover = Mover(recipe, sources, blocks, Findings())
    scores = {block.path: tuple(map(float, row)) for block, row in zip(blocks, rows, strict=True)}
    for block, experts in mover.moves(scores).items():
        kept = [expert.origins[0].expert for expert in experts]
        assert kept == sorted(kept, key=lambda expert: expert or 0)
        gone = set(range(EXPERTS)) - set(kept)
        row = scores[block]
        assert len(gone) == drop
        assert all(
            (row[one], -one) <= (row[other], -other) for one in gone for other in kept if other is not None
        )
