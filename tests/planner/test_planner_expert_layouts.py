"""Experts move between every two layouts that are published, matrix by matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.expert_models import submitted
from kits.marks import one_in
from kits.permuted_experts import (
    DBRX,
    FUSED,
    GPT_OSS,
    GRANITE,
    LLAMA4,
    MIXTRAL,
    WIDTH,
    Tensors,
    make_model,
    store,
)

from raymerge.architectures.expert_fields import ExpertMeaning
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.inputs.weights import Weights
from raymerge.recipes import recipe_from_mapping

EXPERTS, LAYERS, KINDS = 4, 2, ("gate", "up", "down")
LAYOUTS = {
    "one by one": MIXTRAL,
    "stacked": replace(FUSED, name="mixtral"),
    "transposed": replace(LLAMA4, name="llama4_text", shared=""),
    "interleaved": replace(GPT_OSS, is_biased=False),
    "rows": DBRX,
    "linears": replace(GRANITE, name="granitemoe", shared=""),
}
Layers = Sequence[Sequence[Tensors]]
"""For each layer its experts: ``gate``, ``up``, ``down``, and the router's ``row``."""


@pytest.fixture(autouse=True)
def layouts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of one family are accepted by another: here they differ in layout only."""
    monkeypatch.setattr("raymerge.planner.moe.expert_moves.expert_meaning", lambda _: ExpertMeaning())


def _experts(load: Callable[[str], torch.Tensor], count: int) -> Layers:
    """Experts by the canonical names of their matrices."""
    blocks = [f"model.layers.{layer}.mlp" for layer in range(LAYERS)]
    return [
        [
            {kind: load(f"{block}.experts.{each}.{kind}_proj.weight") for kind in KINDS}
            | {"row": load(f"{block}.gate.weight")[each]}
            for each in range(count)
        ]
        for block in blocks
    ]


def _write(root: Path, layout: str, seed: int = 0, experts: int = EXPERTS) -> Layers:
    """Write a random model; returns its experts."""
    family = replace(LAYOUTS[layout], experts=experts)
    model = make_model(family, seed, dtype=torch.float32)
    store(root, model, family, num_experts_per_tok=1)
    return _experts(model.__getitem__, experts)


def _read(root: Path, experts: int) -> Layers:
    recipe = recipe_from_mapping({"base_model": str(root), "experts": {"keep": [0]}})
    (source,) = open_sources(recipe)
    with Weights(source) as weights:
        return _experts(weights.load, experts)


def _assert_equal(found: Layers, wanted: Layers, *, exact: bool = True) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.keys() == other.keys()
            for kind, tensor in other.items():
                torch.testing.assert_close(one[kind], tensor, **tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_are_what_they_are_taken_for(layout: str, tmp_path: Path) -> None:
    layers = _write(tmp_path / "base", layout)
    _assert_equal(_read(tmp_path / "base", EXPERTS), layers)


@pytest.mark.parametrize(("base", "other"), one_in(3, itertools.product(LAYOUTS, LAYOUTS)))
def test_experts_of_any_layout_are_added_to_any(base: str, other: str, tmp_path: Path) -> None:
    mine = _write(tmp_path / "base", base)
    theirs = _write(tmp_path / "other", other, 1, experts=3)
    out = submitted(tmp_path, "out", {"add": [{"model": str(tmp_path / "other"), "experts": [2, 0]}]})
    wanted = [[*own, more[2], more[0]] for own, more in zip(mine, theirs, strict=True)]
    _assert_equal(_read(out, EXPERTS + 2), wanted)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_merged_and_kept(layout: str, dtype: str | None, tmp_path: Path) -> None:
    layers = _write(tmp_path / "base", layout)
    more = {} if dtype is None else {"dtype": dtype}
    cast = torch.float32 if dtype is None else torch.bfloat16

    def mean(experts: Sequence[Tensors]) -> Tensors:
        return {
            kind: torch.stack([each[kind] for each in experts]).double().mean(0).to(cast).float()
            for kind in experts[0]
        }

    kept = submitted(tmp_path, "kept", {"keep": {"0": [3, 1], "1": [0, 2]}}, **more)
    wanted = [[mean([own[i]]) for i in ids] for own, ids in zip(layers, ([3, 1], [0, 2]), strict=True)]
    _assert_equal(_read(kept, 2), wanted)
    groups = {"0": [[3, 1, 0], [2]], "1": [[0], [2, 1, 3]]}
    merged = submitted(tmp_path, "merged", {"merge": groups}, **more)
    wanted = [
        [mean([own[i] for i in group]) for group in groups[str(layer)]] for layer, own in enumerate(layers)
    ]
    _assert_equal(_read(merged, 2), wanted, exact=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_model_is_an_expert_of_any_layout(layout: str, tmp_path: Path) -> None:
    layers, dense = _write(tmp_path / "base", layout), _write(tmp_path / "one", "one by one", 2, experts=1)
    tensors = {
        f"model.layers.{layer}.mlp.{kind}_proj.weight": expert[kind].half()
        for layer, (expert,) in enumerate(dense)
        for kind in KINDS
    }
    config = {
        "model_type": "mistral",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "hidden_act": "silu",
    }
    root = write_checkpoint(tmp_path / "dense", tensors, config)
    out = submitted(tmp_path, "out", {"add": [{"model": str(root), "row_of": 3}]})
    wanted = [
        [*own, {kind: expert[kind].half().float() for kind in KINDS} | {"row": own[3]["row"]}]
        for own, (expert,) in zip(layers, dense, strict=True)
    ]
    _assert_equal(_read(out, EXPERTS + 1), wanted)
