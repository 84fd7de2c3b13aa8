"""Configs of stacks whose layers come from models that describe their layers differently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.architectures import load_rules, restack_config
from raymerge.architectures.depth import Parent, count_mtp_layers

FULL, SLIDING = "full_attention", "sliding_attention"
Pieces = list[tuple[dict[str, Any], int, int]]


def _restack(pieces: Pieces, donor: dict[str, Any] | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    names = {id(config): f"model{number}" for number, (config, _, _) in enumerate(pieces)}
    parents = [Parent(names[id(c)], c) for c, start, stop in pieces for _ in range(start, stop)]
    layers = [layer for _, start, stop in pieces for layer in range(start, stop)]
    return restack_config(donor or pieces[0][0], layers, parents=parents)


def stacked(*pieces: tuple[dict[str, Any], int, int], donor: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config of the pieces, where all of it can be said; no parent is changed."""
    before = copy.deepcopy(pieces)
    result, sentences = _restack(list(pieces), donor)
    assert sentences == ()
    assert pieces == before
    return result


def refused(*pieces: tuple[dict[str, Any], int, int]) -> str:
    """The one sentence against the pieces."""
    (sentence,) = _restack(list(pieces))[1]
    return sentence


def of(layers: int, **fields: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, **fields}


def test_lists_of_layer_numbers_of_two_models() -> None:
    a, b = of(3, mlp_only_layers=[0]), of(3, mlp_only_layers=[0, 1])
    assert stacked((a, 0, 1), (b, 1, 3))["mlp_only_layers"] == [0, 1]
    assert stacked((b, 0, 2), (a, 1, 3))["mlp_only_layers"] == [0, 1]
    assert stacked((of(3), 0, 1), (b, 0, 2))["mlp_only_layers"] == [1, 2]
    assert stacked((b, 0, 2), (of(9), 7, 9))["mlp_only_layers"] == [0, 1]


def test_lists_counted_from_one_in_tables() -> None:
    a = of(2, linear_attn_config={"kda_layers": [1], "full_attn_layers": [2]})
    b = of(4, linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4]})
    result = stacked((a, 0, 2), (b, 2, 4))["linear_attn_config"]
    assert result == {"kda_layers": [1, 3], "full_attn_layers": [2, 4]}
    assert "linear_attn_config" not in of(2)
    _, sentences = _restack([(of(2), 0, 2), (b, 2, 4)])
    assert len(sentences) == 2


def test_periods_of_models_of_other_depth() -> None:
    a, b = of(4, sliding_window_pattern=2), of(8, sliding_window_pattern=2)
    result = stacked((a, 0, 4), (b, 4, 8))
    assert result == of(8, sliding_window_pattern=2)


def test_periods_that_differ_become_a_list() -> None:
    a, b = of(4, sliding_window_pattern=2), of(4, sliding_window_pattern=4)
    kinds = stacked((b, 0, 4), (a, 0, 4))["layer_types"]
    assert [layer for layer, kind in enumerate(kinds) if kind == FULL] == [3, 5, 7]
    result = stacked((a, 0, 2), (b, 2, 4))
    assert result == of(4, sliding_window_pattern=2)
    freq = of(4, moe_layer_interval=2), of(4, moe_layer_interval=1)
    assert "which no period gives" in refused((freq[0], 0, 4), (freq[1], 0, 2))


def test_a_period_and_a_list_meet_in_a_list() -> None:
    a = of(4, sliding_window_pattern=2)
    b = of(2, layer_types=[FULL, SLIDING])
    wanted = [SLIDING, FULL, SLIDING]
    assert stacked((a, 0, 2), (b, 1, 2))["layer_types"] == wanted
    assert stacked((b, 1, 2), (a, 1, 3))["layer_types"] == wanted
    listed, period = of(4, moe_layers=[0]), of(4, interleave_moe_layer_step=2)
    assert stacked((listed, 0, 1), (period, 1, 3))["moe_layers"] == [0, 1]
    assert stacked((period, 1, 3), (listed, 0, 1))["moe_layers"] == [0, 2]


def test_a_model_that_does_not_say_what_another_does_is_refused() -> None:
    for key, value in {
        "sliding_window_pattern": 2,
        "first_k_dense_replace": 1,
        "layer_types": ["a"] * 4,
    }.items():
        for pieces in (
            [(of(4, **{key: value}), 0, 2), (of(4), 2, 4)],
            [(of(4), 0, 2), (of(4, **{key: value}), 2, 4)],
        ):
            sentence = refused(*pieces)
            assert key in sentence
            assert "model0" in sentence or "model1" in sentence


def test_a_model_that_does_not_count_its_layers() -> None:
    silent = {"mlp_only_layers": [1], "num_nextn_predict_layers": 1}
    assert stacked((of(2, mlp_only_layers=[0]), 0, 2), (silent, 0, 2))["mlp_only_layers"] == [0, 3]
    assert "kinds" in refused((of(2, kinds=["x", "y"]), 0, 2), ({"kinds": ["x", "y", "z"]}, 0, 2))


def test_strings_and_lists_of_one_entry_a_layer() -> None:
    a, b = (
        of(2, hybrid_override_pattern="M-", kinds=["x", "y"]),
        of(3, hybrid_override_pattern="*M*", kinds=[1, 2, 3]),
    )
    result = stacked((a, 0, 2), (b, 2, 3))
    assert (result["hybrid_override_pattern"], result["kinds"]) == ("M-*", ["x", "y", 3])


def test_the_same_list_in_models_of_other_depth_is_no_list_of_layers() -> None:
    a, b = of(2, sizes=[7, 9]), of(6, sizes=[7, 9])
    assert stacked((a, 0, 2), (b, 4, 6)) == of(4, sizes=[7, 9])
    assert stacked((b, 0, 2), (a, 0, 2)) == of(4, sizes=[7, 9])


def test_counts_at_the_start_of_each_model() -> None:
    a, b = of(4, first_k_dense_replace=1), of(4, first_k_dense_replace=3)
    assert stacked((b, 0, 3), (a, 1, 4))["first_k_dense_replace"] == 3
    assert stacked((a, 0, 1), (b, 0, 4))["first_k_dense_replace"] == 4
    assert "layer 1 is not of that kind and layer 2 is" in refused((a, 0, 2), (b, 2, 4))


def test_the_number_of_the_last_layer_with_experts() -> None:
    a, b = of(4, moe_layer_end_index=3), of(4, moe_layer_end_index=2)
    assert stacked((a, 0, 2), (b, 2, 4))["moe_layer_end_index"] == 2
    assert stacked((b, 0, 3), (a, 2, 4))["moe_layer_end_index"] == 4
    assert "moe_layer_end_index" in refused((b, 2, 4), (a, 2, 4))
    ends = of(4, moe_layer_end_index=-1)
    assert stacked((ends, 0, 4), (ends, 0, 4))["moe_layer_end_index"] == -1


def test_sliding_windows_count_only_where_they_are_used() -> None:
    a, b = (
        of(4, max_window_layers=4, use_sliding_window=False),
        of(6, max_window_layers=2, use_sliding_window=False),
    )
    assert stacked((a, 0, 4), (b, 4, 6))["max_window_layers"] == 6
    used = of(6, max_window_layers=2, use_sliding_window=True)
    assert "use_sliding_window" in refused((a, 0, 2), (used, 4, 6))
    assert stacked((used, 0, 2), (used, 4, 6))["max_window_layers"] == 2


def test_the_form_is_the_donors_and_the_layers_are_the_parents() -> None:
    donor, lead = of(2, layer_types=["x", "x"]), of(2, layer_types=["y", "z"])
    assert stacked((lead, 0, 2), donor=donor)["layer_types"] == ["y", "z"]


def test_prediction_layers_are_those_of_the_last_model() -> None:
    a = of(2, num_nextn_predict_layers=1, mlp_layer_types=["a", "b", "c"], moe_layers=[1, 2])
    b = of(2, num_nextn_predict_layers=0, mlp_layer_types=["d", "e"], moe_layers=[1])
    first = stacked((b, 0, 2), (a, 1, 2))
    assert (first["mlp_layer_types"], first["moe_layers"]) == (["d", "e", "b", "c"], [1, 2, 3])
    last = stacked((a, 0, 2), (b, 1, 2))
    assert (last["mlp_layer_types"], last["moe_layers"]) == (["a", "b", "e"], [1, 2])


@given(
    periods=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    only=st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))),
    cut=st.integers(0, 6),
)
@settings(deadline=None, max_examples=60)
def test_layers_of_two_models_stay_what_they_were(
    periods: tuple[int, int], only: tuple[set[int], set[int]], cut: int
) -> None:
    a, b = (
        of(6, decoder_sparse_step=step, mlp_only_layers=sorted(listed), sliding_window_pattern=step)
        for step, listed in zip(periods, only, strict=True)
    )
    result = stacked((a, 0, cut), (b, cut, 6), (b, 0, 1))
    wanted = [(a, n) for n in range(cut)] + [(b, n) for n in range(cut, 6)] + [(b, 0)]
    for new, (config, old) in enumerate(wanted):
        assert _is_sparse(result, new) == _is_sparse(config, old)
        assert _is_full(result, new) == _is_full(config, old)


def _is_sparse(config: dict[str, Any], layer: int) -> bool:
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def _is_full(config: dict[str, Any], layer: int) -> bool:
    if "layer_types" in config:
        return bool(config["layer_types"][layer] == FULL)
    return (layer + 1) % config["sliding_window_pattern"] == 0


# Names of layers in what is said of quantisation

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


def quantised(layers: int, names: list[str], **fields: Any) -> dict[str, Any]:
    return of(layers, quantization_config={"quant_method": "fp8", "modules_to_not_convert": names, **fields})


def test_names_of_layers_follow_the_layers() -> None:
    config = quantised(3, [Q0, "lm_head", "layers.2"], ignored_layers=["model.layers.0.mlp"])
    result = stacked((config, 1, 3), (config, 0, 1), (config, 0, 1))["quantization_config"]
    moved = [name.replace("0", n, 1) for n in "23" for name in [Q0]]
    assert result["modules_to_not_convert"] == ["layers.1", *moved, "lm_head"]
    assert result["ignored_layers"] == ["model.layers.2.mlp", "model.layers.3.mlp"]
    assert stacked((config, 1, 2))["quantization_config"]["ignored_layers"] == []


def test_names_come_from_the_model_of_the_layer() -> None:
    a, b = quantised(2, [Q0, "lm_head"]), quantised(2, ["lm_head", Q1])
    result = stacked((a, 0, 1), (b, 1, 2), (b, 0, 1))["quantization_config"]
    assert result["modules_to_not_convert"] == [Q0, Q1, "lm_head"]
    assert "modules_to_not_convert" in refused((a, 0, 1), (quantised(2, ["visual"]), 0, 1))
    assert "quant_method, modules_to_not_convert" in refused((a, 0, 1), (of(2), 0, 1))


def test_names_of_other_stacks_and_numbers_that_are_no_layers_stay() -> None:
    names = ["visual.blocks.0.attn", "audio_tower.layers.1.fc1", "vision_tower.encoder.layers.1", "Linear"]
    config = quantised(2, names, weight_block_size=[0, 1])
    assert stacked((config, 1, 2), (config, 0, 1)) == config


def test_tables_by_layer_and_prediction_layers() -> None:
    config = of(
        2,
        num_nextn_predict_layers=1,
        quantization_config={"extra": {Q0: {"bits": 8}, "lm_head": {"bits": 4}}},
    )
    config["quantization_config"]["ignore"] = ["model.layers.2.eh_proj"]
    result = stacked((config, 1, 2), (config, 0, 2))["quantization_config"]
    assert result["extra"] == {Q1: {"bits": 8}, "lm_head": {"bits": 4}}
    assert result["ignore"] == ["model.layers.3.eh_proj"]


def test_tables_in_the_text_section() -> None:
    config = {"text_config": quantised(2, ["language_model.model.layers.0.mlp"])}
    result = stacked((config, 1, 2), (config, 0, 1))
    names = result["text_config"]["quantization_config"]["modules_to_not_convert"]
    assert names == ["language_model.model.layers.1.mlp"]


@pytest.mark.parametrize("pattern", ["re:.*layers.0.*", r"re:model\.layers\.(0|1)\.mlp"])
def test_patterns_of_layer_numbers_are_refused(pattern: str) -> None:
    config = quantised(2, [pattern])
    assert pattern in refused((config, 0, 1), (config, 0, 1))


@pytest.mark.parametrize("pattern", [r"re:model\.layers\.\d+\.mlp", r"re:visual\.blocks\.0", "*lm_head"])
def test_patterns_without_layer_numbers_stay(pattern: str) -> None:
    config = quantised(2, [pattern])
    assert stacked((config, 0, 1), (config, 0, 1))["quantization_config"] == config["quantization_config"]


# Multi-token-prediction layers among names


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["model.layers.0.a", "model.layers.1.a"], 0),
        (["model.layers.1.a", "model.layers.2.enorm.weight", "model.layers.2.b", "model.layers.3.b"], 2),
        (["model.layers.1.a", "mtp.layers.0.a", "mtp.layers.1.a", "mtp.norm.weight"], 2),
        (["model.layers.1.a", "model.mtp_layers.0.a"], 1),
        (["model.layers.1.a", "mtp.norm.weight"], None),
        (["model.layers.1.a", "model.visual.blocks.7.a", "lm_head.weight"], 0),
    ],
)
def test_prediction_layers_are_counted_by_their_names(names: list[str], count: int | None) -> None:
    assert count_mtp_layers(names, {"model.layers"}, 2, load_rules(None)) == count
