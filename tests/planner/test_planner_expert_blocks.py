"""Which tensors hold what for each expert: shares of stacked ones, numbers in names, and what is neither."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, write_checkpoint
from kits.expert_models import good_set, refused_set
from kits.plan_maker import header_checkpoint
from kits.quantised_models import deepseek_v3

from raymerge.architectures import Role
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.moe.expert_blocks import ExpertBlock, Numbered, Stacked, expert_blocks
from raymerge.planner.moe.expert_moves import NewExpert, Origin, regrouped
from raymerge.planner.moe.expert_outputs import Share, fate_of, mean_expression, share_row
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


def test_a_block_and_all_that_belongs_to_it(tmp_path: Path) -> None:
    block = "model.layers.0.mlp"
    shapes = _stacked() | {
        f"{block}.gate.e_score_correction_bias": (E,),
        f"{block}.shared_expert.up_proj.weight": (F, D),
        f"{block}.shared_expert_gate.weight": (1, D),
    }
    ((found,), problems) = _blocks(tmp_path / "m", shapes)
    assert problems == []
    assert (found.path, found.canonical, found.layer, found.is_mtp) == (block, block, 0, False)
    assert found.has_selection_bias
    assert set(found.names()) == {name for name in shapes if "shared" not in name}
    assert set(found.shared) == {name for name in shapes if "shared" in name}
    assert set(found.routers) == {f"{block}.gate.weight", f"{block}.gate.e_score_correction_bias"}
    by_name = {each.tensor.name: each for each in found.stacked}
    assert by_name[f"{block}.experts.down_proj"].share == (D, F)
    assert by_name[f"{block}.gate.weight"].share == (D,)
    assert by_name[f"{block}.gate.e_score_correction_bias"].share == ()
    assert by_name[f"{block}.gate.weight"].is_router
    assert not by_name[f"{block}.experts.down_proj"].is_router


def test_numbers_in_names(tmp_path: Path) -> None:
    block = "model.layers.0.block_sparse_moe"
    shapes = {f"{block}.experts.{e}.{w}.weight": (F, D) for e in range(E) for w in ("w1", "w3", "w2")}
    ((found,), problems) = _blocks(tmp_path / "m", {**shapes, f"{block}.gate.weight": (E, D)})
    assert problems == []
    assert found.canonical == "model.layers.0.mlp"
    assert [each.name(9) for each in found.numbered] == [
        f"{block}.experts.9.{w}.weight" for w in ("w1", "w2", "w3")
    ]
    first = found.numbered[0]
    assert (first.share, first.start(3), first.shape(7), first.is_router) == ((F, D), 0, (F, D), False)


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


@given(st.integers(1, 9), st.integers(1, 9))
def test_shapes_with_another_number_of_experts(before: int, after: int) -> None:
    fused = Stacked(_tensor("a", (before, 3, 5)), Role.EXPERT, (3, 5), False)
    assert fused.shape(before) == fused.tensor.shape
    assert fused.shape(after) == (after, 3, 5)
    rows = Stacked(_tensor("a", (before * 3, 5)), Role.EXPERT, (3, 5), True)
    assert rows.shape(before) == rows.tensor.shape
    assert rows.shape(after) == (after * 3, 5)
    bias = Stacked(_tensor("a", (1, before)), Role.ROUTER_BIAS, (), False)
    assert bias.shape(after) == (1, after)
    assert (fused.start(2), rows.start(2), bias.start(2)) == (30, 30, 2)


def test_shares_are_runs_of_bytes() -> None:
    tensor = _tensor("a", (4, 3, 5))
    one, two = Share(0, tensor, 15, 15), Share(0, tensor, 30, 15)
    read = one.read()
    assert (read.offset, read.nbytes, read.key) == (1030, 30, "file")
    both = one.joined(two)
    assert both is not None
    assert (both.start, both.num_elements) == (15, 30)
    assert two.joined(one) is None
    assert one.joined(Share(1, tensor, 30, 15)) is None
    row, fate = share_row(one, (3, 5), "out", DType.BF16)
    assert (row.expression.is_copy, fate) == (True, fate_of(1, "out", is_copy=True))
    row, fate = share_row(one, (3, 5), "out", DType.F32)
    assert (row.expression.is_copy, fate) == (False, fate_of(1, "out"))
    assert mean_expression((2.0,), DType.F32).method == "passthrough"
    assert mean_expression((2.0, 1.0), DType.F32).method == "linear"


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
