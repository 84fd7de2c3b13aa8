"""Config fields that count experts, and the configs of dense models made of mixtures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.model_types_decoders import SPARSE

from raymerge.architectures import load_rules
from raymerge.architectures.expert_fields import (
    ExpertFields,
    Field,
    dense_config,
    dense_counterparts,
    dense_objections,
    expert_fields,
    with_expert_count,
    with_expert_names,
)

RULES = load_rules(None)


@pytest.mark.parametrize("kind", SPARSE, ids=lambda kind: kind.name)
def test_every_family_counts_its_experts(kind: Any) -> None:
    config = transformers.AutoConfig.for_model(kind.name, **kind.config).to_dict()
    rules = load_rules(kind.name)
    fields = expert_fields(config, rules)
    assert fields is not None
    assert fields.count.value == 4
    assert fields.chosen is not None
    assert fields.chosen.value <= 4
    made = with_expert_count(config, rules, 3)
    again = expert_fields(made, rules)
    assert again is not None
    assert again.count.value == 3
    assert again.chosen == fields.chosen
    assert with_expert_count(made, rules, 4) == config


@pytest.mark.parametrize(
    ("config", "made"),
    [
        ({"num_local_experts": 8, "num_experts": 8}, {"num_local_experts": 6, "num_experts": 6}),
        ({"ffn_config": {"moe_num_experts": 8, "x": 8}}, {"ffn_config": {"moe_num_experts": 6, "x": 8}}),
        (
            {"num_experts": 1, "text_config": {"num_experts": 8, "hidden_size": 8}},
            {"num_experts": 1, "text_config": {"num_experts": 6, "hidden_size": 8}},
        ),
        ({"num_experts": [8, 8], "moe_topk": [2, 2]}, {"num_experts": [6, 6], "moe_topk": [2, 2]}),
        ({"moe_num_experts": 8, "moe_capacity": [8, 8]}, {"moe_num_experts": 6, "moe_capacity": [6, 6]}),
    ],
)
def test_all_fields_that_count_follow(config: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    before = json.dumps(config)
    assert with_expert_count(config, RULES, 6) == made
    assert json.dumps(config) == before


def test_a_dense_config_counts_none() -> None:
    assert expert_fields({"hidden_size": 8, "num_experts": 0}, RULES) is None
    assert with_expert_count({"hidden_size": 8}, RULES, 2) == {"hidden_size": 8}
    fields = expert_fields({"num_experts": 4, "n_group": 1, "topk_group": 1}, RULES)
    assert fields is not None
    assert (fields.num_groups, fields.groups, fields.used_groups) == (1, None, None)


GROUPED = ExpertFields(Field("n", 8), Field("top_k", 4), Field("n_group", 4), Field("topk_group", 2))


@pytest.mark.parametrize(
    ("fields", "count", "by_pairs", "expected"),
    [
        (
            ExpertFields(Field("n", 8), Field("top_k", 4), None, None),
            3,
            False,
            "top_k is 4, but there would be 3",
        ),
        (GROUPED, 6, False, "6 experts are not so many equal groups"),
        (GROUPED, 4, True, "judged by its 2 best"),
        (GROUPED, 4, False, "2 of 4 groups would hold 2 experts"),
    ],
)
def test_numbers_that_do_not_work(fields: ExpertFields, count: int, by_pairs: bool, expected: str) -> None:
    assert expected in " ".join(fields.objections(count, by_pairs=by_pairs))


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 40),
    chosen=st.integers(1, 8),
    groups=st.integers(1, 6),
    used=st.integers(1, 6),
    by_pairs=st.booleans(),
)
def test_the_nearest_numbers_work(count: int, chosen: int, groups: int, used: int, by_pairs: bool) -> None:
    many = Field("g", groups) if groups > 1 else None
    fields = ExpertFields(Field("n", 16), Field("k", chosen), many, Field("u", used) if many else None)
    nearest = fields.nearest(count, by_pairs=by_pairs)
    assert not any(list(fields.objections(number, by_pairs=by_pairs)) for number in nearest)
    assert count not in nearest
    between = range(min(nearest, default=count) + 1, count)
    if len(nearest) == 2 or (nearest and nearest[0] < count):
        assert all(list(fields.objections(number, by_pairs=by_pairs)) for number in between)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (["lm_head", *(f"a.experts.{n}.up_proj" for n in range(3))], ["lm_head", "a.experts.0.up_proj"]),
        ([f"a.experts.{n}" for n in (2, 0, 1)], ["a.experts.0"]),
        (["re:.*mlp.experts.*", "a.mlp.experts"], ["re:.*mlp.experts.*", "a.mlp.experts"]),
        (["a.mlp.experts.2.up_proj"], None),
        ([f"a.experts.{n}.up_proj" for n in range(4)], None),
        ([r"re:.*experts\.0\..*"], None),
    ],
)
def test_tables_that_name_all_experts_name_those_that_are_left(
    table: list[str], expected: list[str] | None
) -> None:
    for config in (
        {"quantization_config": {"ignore": table}, "x": 1},
        {"text_config": {"compression_config": {"a": {"b": table}}}, "x": 1},
    ):
        found = with_expert_names(config, 3, 1)
        assert found == (None if expected is None else _replaced(config, expected))


def _replaced(value: Any, by: list[str]) -> Any:
    """The same with another list in place of the only one."""
    if isinstance(value, dict):
        return {key: _replaced(each, by) for key, each in value.items()}
    return by if isinstance(value, list) else value


DENSE = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "flex_olmo")


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("silent", [False, True])
def test_a_dense_config_means_what_the_mixtures_means(name: str, silent: bool, tmp_path: Path) -> None:
    sparse = transformers.AutoConfig.for_model(name, hidden_size=64, num_attention_heads=4)
    full = json.loads(sparse.to_json_string(use_diff=False))
    said = (
        {key: full[key] for key in ("model_type", "hidden_size", "num_attention_heads")} if silent else full
    )
    family = dense_counterparts().get(said["model_type"])
    assert family is not None
    made = dense_config(said, family, width=77)
    (tmp_path / "config.json").write_text(json.dumps(made))
    dense = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (dense.model_type, dense.architectures) == (family.model_type, [family.architecture])
    assert dense.intermediate_size == 77
    mine, theirs = dense.to_dict(), sparse.to_dict()
    skipped = {
        "architectures",
        "model_type",
        "intermediate_size",
        "sliding_window",
        "transformers_version",
        "_name_or_path",
    }
    differing = {
        key: (mine[key], theirs[key])
        for key in mine.keys() & theirs.keys() - skipped
        if mine[key] != theirs[key] and key not in ("head_dim", "max_window_layers", "dtype", "layer_types")
    }
    assert differing == {}
    assert (mine.get("head_dim") or 16) == (theirs.get("head_dim") or 16)
    assert (mine.get("sliding_window") or None) == (theirs.get("sliding_window") or None)
    assert set(mine.get("layer_types") or ["full_attention"]) == {"full_attention"}


def test_what_a_dense_family_cannot_say() -> None:
    assert "deepseek_v3" not in dense_counterparts()
    assert len(list(dense_objections({"use_sliding_window": True, "qkv_bias": False}))) == 2
    assert not list(dense_objections({"use_sliding_window": True, "layer_types": ["full_attention"]}))
