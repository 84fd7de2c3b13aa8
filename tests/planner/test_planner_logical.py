"""What names mean is found out once for sources that are alike, and never taken over by others."""

from __future__ import annotations

from pathlib import Path

from kits.plan_maker import header_checkpoint, llama, llama_specs, make_recipe

from raymerge.architectures import Role, describe
from raymerge.dtypes import DType
from raymerge.errors import Findings
from raymerge.planner.inputs.sources import Source, open_sources
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


def test_a_name_that_only_the_second_has_is_looked_at(tmp_path: Path) -> None:
    extra = {**llama_specs(), "model.odd_norm.weight": (DType.BF16, (4,))}
    config = _sources(a := llama(tmp_path / "a"))[0].checkpoint.config
    sources = _sources(a, header_checkpoint(tmp_path / "b", extra, config))
    one, two = open_logical(sources, Findings())
    assert "model.odd_norm.weight" not in one.infos
    assert two.part("model.odd_norm.weight") is Role.NORM
    _assert_described(sources[1], two)


def test_sources_with_other_stacks_or_of_another_family_share_nothing(tmp_path: Path) -> None:
    sources = _sources(
        llama(tmp_path / "a"),
        llama(tmp_path / "b", layers=2),
        llama(tmp_path / "c", layers=2),
        llama(tmp_path / "d", model_type="gpt_oss"),
    )
    found = open_logical(sources, Findings())
    assert len({id(tensors.infos[Q]) for tensors in found}) == 3
    for source, tensors in zip(sources, found, strict=True):
        _assert_described(source, tensors)
