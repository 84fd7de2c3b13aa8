"""Experts move between every two layouts that are published, matrix by matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.checkpoint_maker import write_checkpoint
from kits.expert_models import good_set, submitted
from kits.marks import one_in

from raymerge.architectures.expert_fields import ExpertMeaning
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.inputs.weights import Weights
from raymerge.recipes import recipe_from_mapping

HIDDEN, WIDTH, EXPERTS, LAYERS = 8, 6, 4, 2
Matrices = Mapping[str, torch.Tensor]
"""``gate``, ``up`` ``[EXPERTS, WIDTH, HIDDEN]``, ``down`` ``[EXPERTS, HIDDEN, WIDTH]``, router ``rows``."""


@pytest.fixture(autouse=True)
def layouts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing said against experts of one family in another: here they differ in layout only."""
    monkeypatch.setattr("raymerge.planner.moe.expert_moves.expert_meaning", lambda _: ExpertMeaning())


def _one_by_one(m: Matrices) -> dict[str, torch.Tensor]:
    words = {"gate": "w1", "up": "w3", "down": "w2"}
    found = {"block_sparse_moe.gate.weight": m["rows"]}
    for kind, word in words.items():
        found |= {f"block_sparse_moe.experts.{e}.{word}.weight": m[kind][e] for e in range(len(m[kind]))}
    return found


def _stacked(m: Matrices) -> dict[str, torch.Tensor]:
    return {
        "mlp.gate.weight": m["rows"],
        "mlp.experts.gate_up_proj": torch.cat([m["gate"], m["up"]], dim=1),
        "mlp.experts.down_proj": m["down"],
    }


def _transposed(m: Matrices) -> dict[str, torch.Tensor]:
    return {
        "feed_forward.router.weight": m["rows"],
        "feed_forward.experts.gate_up_proj": torch.cat([m["gate"], m["up"]], dim=1).mT,
        "feed_forward.experts.down_proj": m["down"].mT,
    }


def _interleaved(m: Matrices) -> dict[str, torch.Tensor]:
    pairs = torch.stack([m["gate"], m["up"]], dim=2).flatten(1, 2)
    return {
        "mlp.router.weight": m["rows"],
        "mlp.experts.gate_up_proj": pairs.mT,
        "mlp.experts.down_proj": m["down"].mT,
    }


def _rows(m: Matrices) -> dict[str, torch.Tensor]:
    return {
        "ffn.router.layer.weight": m["rows"],
        "ffn.experts.mlp.w1": m["gate"].flatten(0, 1),
        "ffn.experts.mlp.v1": m["up"].flatten(0, 1),
        "ffn.experts.mlp.w2": m["down"].mT.flatten(0, 1),
    }


def _linears(m: Matrices) -> dict[str, torch.Tensor]:
    return {
        "block_sparse_moe.router.layer.weight": m["rows"],
        "block_sparse_moe.input_linear.weight": torch.cat([m["gate"], m["up"]], dim=1),
        "block_sparse_moe.output_linear.weight": m["down"],
    }


LAYOUTS: dict[str, tuple[str, Callable[[Matrices], dict[str, torch.Tensor]]]] = {
    "one by one": ("mixtral", _one_by_one),
    "stacked": ("mixtral", _stacked),
    "transposed": ("llama4_text", _transposed),
    "interleaved": ("gpt_oss", _interleaved),
    "rows": ("dbrx", _rows),
    "linears": ("granitemoe", _linears),
}


def _matrices(seed: int, experts: int = EXPERTS) -> Sequence[Matrices]:
    """Random matrices of each layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate": (experts, WIDTH, HIDDEN),
        "up": (experts, WIDTH, HIDDEN),
        "down": (experts, HIDDEN, WIDTH),
        "rows": (experts, HIDDEN),
    }
    return [
        {kind: torch.randn(shape, generator=generator) for kind, shape in shapes.items()}
        for _ in range(LAYERS)
    ]


def _config(model_type: str, experts: int) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
    counts = {"num_local_experts": experts, "num_experts_per_tok": 1, "hidden_act": "silu"}
    return {"model_type": model_type, **sizes, **counts}


def _write(root: Path, layout: str, layers: Sequence[Matrices]) -> Path:
    model_type, lay = LAYOUTS[layout]
    tensors = {
        f"model.layers.{layer}.{name}": tensor
        for layer, matrices in enumerate(layers)
        for name, tensor in lay(matrices).items()
    }
    tensors |= {f"model.layers.{layer}.norm.weight": torch.ones(HIDDEN) for layer in range(LAYERS)}
    return write_checkpoint(root, tensors, _config(model_type, len(layers[0]["rows"])))


def _read(root: Path, experts: int) -> Sequence[Matrices]:
    """The matrices of a checkpoint by their canonical names."""
    recipe = recipe_from_mapping({"base_model": str(root), "experts": {"keep": [0]}})
    (source,) = open_sources(recipe)
    with Weights(source) as weights:
        return [
            {
                **{
                    kind: torch.stack(
                        [weights.load(f"{block}.experts.{e}.{kind}_proj.weight") for e in range(experts)]
                    )
                    for kind in ("gate", "up", "down")
                },
                "rows": weights.load(f"{block}.gate.weight"),
            }
            for block in (f"model.layers.{layer}.mlp" for layer in range(LAYERS))
        ]


def _assert_equal(found: Sequence[Matrices], wanted: Sequence[Matrices], *, exact: bool = True) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        for kind, tensor in theirs.items():
            if exact:
                assert torch.equal(mine[kind], tensor), kind
            else:
                torch.testing.assert_close(mine[kind], tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_are_what_they_are_taken_for(layout: str, tmp_path: Path) -> None:
    layers = _matrices(0)
    _assert_equal(_read(_write(tmp_path / "base", layout, layers), EXPERTS), layers)


@pytest.mark.parametrize(("base", "other"), one_in(3, itertools.product(LAYOUTS, LAYOUTS)))
def test_experts_of_any_layout_are_added_to_any(base: str, other: str, tmp_path: Path) -> None:
    mine, theirs = _matrices(0), _matrices(1, experts=3)
    _write(tmp_path / "base", base, mine)
    added = _write(tmp_path / "other", other, theirs)
    out = submitted(tmp_path, "out", {"add": [{"model": str(added), "experts": [2, 0]}]})
    wanted = [
        {kind: torch.cat([tensor, more[kind][[2, 0]]]) for kind, tensor in own.items()}
        for own, more in zip(mine, theirs, strict=True)
    ]
    _assert_equal(_read(out, EXPERTS + 2), wanted)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_merged_and_kept(layout: str, dtype: str | None, tmp_path: Path) -> None:
    layers = _matrices(0)
    _write(tmp_path / "base", layout, layers)
    more = {} if dtype is None else {"dtype": dtype}
    cast = torch.float32 if dtype is None else torch.bfloat16
    kept = submitted(tmp_path, "kept", {"keep": {"0": [3, 1], "1": [0, 2]}}, **more)
    picked = [
        {kind: tensor[ids].to(cast).float() for kind, tensor in own.items()}
        for own, ids in zip(layers, ([3, 1], [0, 2]), strict=True)
    ]
    _assert_equal(_read(kept, 2), picked)
    groups = {"0": [[3, 1, 0], [2]], "1": [[0], [2, 1, 3]]}
    merged = submitted(tmp_path, "merged", {"merge": groups}, **more)
    means = [
        {
            kind: torch.stack([tensor[group].double().mean(0) for group in groups[str(layer)]])
            .to(cast)
            .float()
            for kind, tensor in own.items()
        }
        for layer, own in enumerate(layers)
    ]
    _assert_equal(_read(merged, 2), means, exact=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_itself_can_be_added(layout: str, tmp_path: Path) -> None:
    layers = _matrices(0)
    base = _write(tmp_path / "base", layout, layers)
    change = {
        "add": [{"model": str(base), "experts": [1]}, {"model": str(base), "experts": [0], "row_of": 2}]
    }
    made = good_set({"base_model": base, "experts": change})
    assert {expression.method for expression in made.plan.expressions} == {"copy"}
    wanted = [
        {kind: tensor[[0, 1, 2, 3, 1, 2 if kind == "rows" else 0]] for kind, tensor in own.items()}
        for own in layers
    ]
    _assert_equal(_read(submitted(tmp_path, "out", change), EXPERTS + 2), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_model_is_an_expert_of_any_layout(layout: str, tmp_path: Path) -> None:
    layers, dense = _matrices(0), _matrices(2, experts=1)
    _write(tmp_path / "base", layout, layers)
    tensors = {
        f"model.layers.{layer}.mlp.{kind}_proj.weight": own[kind][0].half()
        for layer, own in enumerate(dense)
        for kind in ("gate", "up", "down")
    }
    root = write_checkpoint(tmp_path / "dense", tensors, _config("mistral", 0))
    out = submitted(tmp_path, "out", {"add": [{"model": str(root), "row_of": 3}]})
    wanted = [
        {
            kind: torch.cat([tensor, tensor[[3]] if kind == "rows" else more[kind].half().float()])
            for kind, tensor in own.items()
        }
        for own, more in zip(layers, dense, strict=True)
    ]
    _assert_equal(_read(out, EXPERTS + 1), wanted)
