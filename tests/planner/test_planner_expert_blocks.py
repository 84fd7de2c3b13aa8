"""Which tensors hold what for each expert: shares of stacked ones, numbers in names, and what is neither."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import read_tensors, write_checkpoint
from kits.expert_models import good_set, refused_set
from kits.plan_maker import header_checkpoint
from kits.quantised_models import deepseek_v3

from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock, Numbered, expert_blocks
from raymerge.planner.moe.expert_moves import NewExpert, Origin, regrouped
from raymerge.recipes import recipe_from_mapping

E, D, F = 4, 8, 6
Shapes = Mapping[str, tuple[int, ...]]


def _blocks(root: Path, shapes: Shapes, **config: Any) -> tuple[tuple[ExpertBlock, ...], list[str]]:
    """The blocks of a checkpoint, and what was found wrong."""
    specs = {
        name: (DType.I64 if "tid" in name else DType.BF16, shape)
        for name, shape in {"model.layers.0.norm.weight": (D,), **shapes}.items()
    }
    said = {"num_hidden_layers": 1, "num_experts": E, "num_experts_per_tok": 1, "hidden_size": D, **config}
    base = header_checkpoint(root, specs, {"model_type": "qwen3_moe", **said})
    (source,) = open_sources(recipe_from_mapping({"base_model": str(base), "experts": {"keep": [0]}}))
    findings = Findings()
    found = expert_blocks(source, LogicalTensors(source), E, findings)
    return found, [str(problem) for problem in findings.problems()]


def _stacked(block: str = "model.layers.0.mlp") -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.gate.weight": (E, D),
        f"{block}.experts.gate_up_proj": (E, 2 * F, D),
        f"{block}.experts.down_proj": (E, D, F),
    }


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"experts.down_proj": (E + 1, D, F)}, "are not 4 equal shares"),
        ({"experts.down_proj_packed": (77, 1)}, "are not 4 equal shares"),
        ({"gate.weight": (E + 2, D)}, "do not have a row for each of 4 experts"),
        ({"gate.weight": (D, E)}, "do not have a row for each of 4 experts"),
        ({"gate.tid2eid": (64, 2)}, "do not have a row for each of 4 experts"),
    ],
)
def test_what_is_no_share(more: Shapes, expected: str, tmp_path: Path) -> None:
    shapes = _stacked() | {f"model.layers.0.mlp.{name}": shape for name, shape in more.items()}
    _, problems = _blocks(tmp_path / "m", shapes)
    assert len(problems) == 1
    assert expected in problems[0]


def test_a_router_may_have_norms_and_no_router_may_be_missing(tmp_path: Path) -> None:
    extra = {"model.layers.0.mlp.router.norm.weight": (D,)}
    ((found,), problems) = _blocks(tmp_path / "a", _stacked() | extra)
    assert problems == []
    assert not {*extra} & {*found.names()}
    without = {name: shape for name, shape in _stacked().items() if ".gate.weight" not in name}
    _, problems = _blocks(tmp_path / "b", without)
    assert "have experts and no router" in problems[0]


def test_an_expert_that_is_absent_beside_quantised_ones_is_a_problem(tmp_path: Path) -> None:
    """Of every kind of tensor the same expert is missing, so that no kind tells of it by another."""
    model = deepseek_v3(tmp_path / "whole", 0, ragged=False)
    config = json.loads((model.root / "config.json").read_text())
    kept = {n: t for n, t in read_tensors(model.root).items() if "layers.1.mlp.experts.2." not in n}
    assert len(kept) < len(read_tensors(model.root))
    partial = write_checkpoint(tmp_path / "partial", kept, config)
    change = {"keep": [0, 1, 2, 3]}
    good_set({"base_model": model.root, "experts": change})
    problems = refused_set({"base_model": partial, "experts": change})
    assert any("experts.2." in problem and "stored for others" in problem for problem in problems)


def test_blocks_beside_the_text_are_left_alone(tmp_path: Path) -> None:
    shapes = _stacked() | _stacked("model.visual.blocks.0.mlp") | _stacked("mtp.layers.0.mlp")
    found, problems = _blocks(tmp_path / "m", shapes)
    assert problems == []
    assert [(block.path, block.layer, block.is_mtp) for block in found] == [
        ("model.layers.0.mlp", 0, False),
        ("mtp.layers.0.mlp", 1, True),
    ]


def _tensor(name: str, shape: tuple[int, ...], offset: int = 1000) -> StoredTensor:
    size = 2
    for side in shape:
        size *= side
    return StoredTensor(name, DType.BF16, shape, "file", offset, size)


def test_experts_that_come_into_other_groups() -> None:
    kind = Numbered("a.", ".b", {0: _tensor("a.0.b", (3, 5))})
    block = ExpertBlock("p", "p", 5, 5, False, 8, (), (kind,), (), ())

    def moved(*ids: int) -> list[int]:
        experts = tuple(NewExpert((Origin(0, expert),), (1.0,)) for expert in ids)
        return regrouped({"p": experts}, [block], 2)

    assert moved(0, 1, 4, 5) == []
    assert moved(1, 3, 7, 6) == []
    assert moved(0, 1, 2, 4) == [5]
    assert regrouped({"p": ()}, [block], 1) == []
