"""What names mean is found out once for sources that are alike, and never taken over by others."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.plan_maker import header_checkpoint, llama, llama_specs, make_recipe

from raymerge.architectures import Role, describe
from raymerge.dtypes import DType
from raymerge.planner.findings import Findings
from raymerge.planner.inputs.source import Source
from raymerge.planner.inputs.sources import open_sources
from raymerge.planner.matching.input_resolver import InputResolver
from raymerge.planner.matching.logical import LogicalTensors, open_logical

Q = "model.layers.1.self_attn.q_proj.weight"


def _sources(*roots: Path) -> tuple[Source, ...]:
    return open_sources(
        make_recipe({"merge_method": "linear", "models": [{"model": root} for root in roots]})
    )


def _assert_described(source: Source, tensors: LogicalTensors) -> None:
    assert tensors.infos == {
        name: describe(name, source.rules, stacks=source.stacks) for name in source.checkpoint.tensors
    }


def test_sources_that_are_alike_share_what_is_known_of_names(tmp_path: Path) -> None:
    sources = _sources(llama(tmp_path / "a"), llama(tmp_path / "b"))
    one, two = open_logical(sources, Findings())
    assert one.infos[Q] is two.infos[Q]
    _assert_described(sources[1], two)


def test_a_name_that_only_the_second_has_is_looked_at(tmp_path: Path) -> None:
    extra = {**llama_specs(), "model.odd_norm.weight": (DType.BF16, (4,))}
    config = _sources(a := llama(tmp_path / "a"))[0].checkpoint.config
    sources = _sources(a, header_checkpoint(tmp_path / "b", extra, config))
    one, two = open_logical(sources, Findings())
    assert "model.odd_norm.weight" not in one.infos
    assert two.part("model.odd_norm.weight") is Role.NORM
    _assert_described(sources[1], two)


def test_sources_with_other_stacks_share_nothing(tmp_path: Path) -> None:
    sources = _sources(
        llama(tmp_path / "a"), llama(tmp_path / "b", layers=2), llama(tmp_path / "c", layers=2)
    )
    one, two, three = open_logical(sources, Findings())
    assert one.infos[Q] is not two.infos[Q]
    assert two.infos[Q] is three.infos[Q]
    for source, tensors in zip(sources, (one, two, three), strict=True):
        _assert_described(source, tensors)


def test_sources_of_another_family_share_nothing(tmp_path: Path) -> None:
    sources = _sources(llama(tmp_path / "a"), llama(tmp_path / "b", model_type="gpt_oss"))
    one, two = open_logical(sources, Findings())
    assert one.infos[Q] is not two.infos[Q]
    _assert_described(sources[1], two)


@pytest.mark.parametrize("word", ["gate_up_proj", "down_proj"])
def test_a_tensor_of_several_experts_is_not_alone(tmp_path: Path, word: str) -> None:
    name = f"model.layers.0.mlp.experts.{word}"
    specs = {**llama_specs(1), name: (DType.BF16, (2, 16, 16))}
    config = {"architectures": ["OddForCausalLM"], "model_type": "odd", "hidden_size": 16}
    (source,) = _sources(header_checkpoint(tmp_path / "a", specs, config))
    (tensors,) = open_logical([source], Findings())
    assert not tensors.is_alone(name)
    assert tensors.is_alone("model.norm.weight")
    resolver = InputResolver([source], [tensors])
    assert resolver.find(0, "model.norm.weight", "another.name") == resolver.find(
        0, "model.norm.weight", "model.norm.weight"
    )
    assert resolver.find(0, "absent.weight", "absent.weight") is None
