"""The trunk of a mixture: rules, vocabularies and misspelt parameters, as they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kits.checkpoint_maker import llama_config, llama_shapes
from kits.plan_maker import header_checkpoint, llama, planned_merge

from raymerge.dtypes import DType
from raymerge.errors import Problem

LINEAR: dict[str, Any] = {"merge_method": "linear", "parameters": {"weight": 0.5}}


def _mixture(root: Path, trunk: dict[str, Any], **more: Any) -> dict[str, Any]:
    base, one, two = (llama(root / name) for name in ("base", "one", "two"))
    experts = [{"source_model": one}, {"source_model": two}]
    return {"base_model": base, "gate_mode": "random", "experts": experts, "trunk": trunk, **more}


def _problems(root: Path, trunk: dict[str, Any]) -> tuple[Problem, ...]:
    return planned_merge(root, _mixture(root, trunk)).plan.problems


def _rule(root: Path, **selector: Any) -> dict[str, Any]:
    return {
        **LINEAR,
        "methods": [{**selector, "merge_method": "passthrough", "sources": [str(root / "one")]}],
    }


def test_a_rule_of_the_trunk_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, _rule(tmp_path, filter="self_atn"))
    assert problem.where == "recipe: trunk.methods[0]"
    assert "matches no tensor" in problem.what


@pytest.mark.parametrize("selector", [{"role": "mlp"}, {"filter": "down_proj"}, {"glob": "*.2.mlp.*"}])
def test_a_rule_about_what_experts_replace_is_refused(tmp_path: Path, selector: dict[str, Any]) -> None:
    (problem,) = _problems(tmp_path, _rule(tmp_path, **selector))
    assert "matches only feed-forward tensors, such as model.layers." in problem.what
    assert "attention" in problem.remedy


def test_a_rule_about_a_whole_layer_is_used_for_the_rest_of_it(tmp_path: Path) -> None:
    made = planned_merge(tmp_path, _mixture(tmp_path, _rule(tmp_path, layers=[0])))
    made.plan.require()
    assert made.method("model.layers.0.self_attn.q_proj.weight") == "copy"
    assert made.method("model.layers.1.self_attn.q_proj.weight") == "linear"


def _with_rows(root: Path, rows: int) -> Path:
    config = {**llama_config(), "vocab_size": rows}
    specs = {name: (DType.BF16, shape) for name, shape in llama_shapes(config).items()}
    return header_checkpoint(root, specs, config)


def test_another_vocabulary_in_the_trunk_has_a_remedy_that_a_mixture_has(tmp_path: Path) -> None:
    data = _mixture(tmp_path, LINEAR)
    data["experts"][1]["source_model"] = _with_rows(tmp_path / "longer", 70)
    (problem,) = planned_merge(tmp_path, data).plan.problems
    assert problem.where.endswith("longer")
    assert "2 of its tensors have 70 rows" in problem.what
    assert "lm_head.weight; model.embed_tokens.weight" in problem.what
    assert "embedding_sizes" not in problem.remedy
    assert "'models'" in problem.remedy


def test_another_vocabulary_is_none_of_the_trunks_business_where_it_takes_no_part(tmp_path: Path) -> None:
    data = _mixture(tmp_path, {**LINEAR, "models": [{"model": tmp_path / "one"}]})
    data["experts"][1]["source_model"] = _with_rows(tmp_path / "longer", 70)
    planned_merge(tmp_path, data).plan.require()


def test_a_rule_may_leave_the_vocabulary_to_one_model(tmp_path: Path) -> None:
    rules = [
        {"role": role, "merge_method": "passthrough", "sources": [str(tmp_path / "one")]}
        for role in ("embedding", "head")
    ]
    data = _mixture(tmp_path, {**LINEAR, "methods": rules})
    data["experts"][1]["source_model"] = _with_rows(tmp_path / "longer", 70)
    made = planned_merge(tmp_path, data)
    made.plan.require()
    assert made.reads("model.embed_tokens.weight") == [(1, "model.embed_tokens.weight")]


def test_a_misspelt_parameter_is_one_problem_at_its_place(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, {"merge_method": "linear", "parameters": {"wieght": 0.5}})
    assert problem.where == "recipe: trunk.parameters.wieght"
    assert "Did you mean 'weight'?" in problem.remedy


def test_prompts_that_random_gates_do_not_read_are_told(tmp_path: Path) -> None:
    data = _mixture(tmp_path, LINEAR)
    silent = planned_merge(tmp_path, data).plan.manifest["notes"]
    data["experts"][0]["negative_prompts"] = ["text"]
    told = "prompts are not read by gate_mode random"
    assert told in planned_merge(tmp_path, data).plan.manifest["notes"]
    assert told not in silent


def test_the_stage_has_a_name_that_no_merge_can_have(tmp_path: Path) -> None:
    names = []
    for more in ({}, {"name": "mixture"}):
        (source, *_) = planned_merge(tmp_path, _mixture(tmp_path, LINEAR, **more)).sources
        names += [each.stage.name for each in source.prepared]
    assert names == ["@router", "@router-mixture"]
