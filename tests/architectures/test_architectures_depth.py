"""Configs that follow when layers are taken out, repeated or put in another order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymerge.architectures import restack_config

ORDERS = st.lists(st.integers(0, 7), min_size=1, max_size=12)


def restacked(
    config: dict[str, Any], layers: list[int], *, dense: list[bool] | None = None
) -> dict[str, Any]:
    """The new config, where all of it can be said; the old one is left alone."""
    before = copy.deepcopy(config)
    result, sentences = restack_config(config, layers, dense=dense)
    assert sentences == ()
    assert config == before
    return result


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_layers"])
def test_the_number_of_layers(key: str) -> None:
    assert restacked({key: 4, "hidden_size": 4}, [0, 1, 1, 2, 2, 3]) == {key: 6, "hidden_size": 4}


def test_the_text_section_and_the_top_beside_it() -> None:
    vision = {"num_hidden_layers": 3, "out_indices": [0, 1, 2]}
    text = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}
    config = {"num_hidden_layers": 3, "text_config": text, "vision_config": vision}
    result = restacked(config, [2, 0])
    assert result["text_config"] == {"num_hidden_layers": 2, "layer_types": ["c", "a"]}
    assert result["num_hidden_layers"] == 2
    assert result["vision_config"] == vision


def test_lists_of_one_entry_a_layer() -> None:
    config = {
        "num_hidden_layers": 3,
        "layer_types": ["full", "sliding", "full"],
        "no_rope_layers": [1, 0, 1],
        "block_configs": [{"n": 0}, {"n": 1}, {"n": 2}],
        "architectures": ["A", "B", "C"],
        "eos_token_id": [1, 2, 3],
        "begin_suppress_tokens": [1, 2, 3],
        "rope_scaling": {"mrope_section": [1, 2, 3]},
        "other": [1, 2],
    }
    result = restacked(config, [2, 2, 0, 1])
    assert result["layer_types"] == ["full", "full", "full", "sliding"]
    assert result["no_rope_layers"] == [1, 1, 1, 0]
    assert result["block_configs"] == [{"n": 2}, {"n": 2}, {"n": 0}, {"n": 1}]
    for key in ("architectures", "eos_token_id", "begin_suppress_tokens", "rope_scaling", "other"):
        assert result[key] == config[key]


def test_entries_of_mtp_layers_stay_behind() -> None:
    config = {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "mlp_layer_types": ["dense", "sparse", "mtp"],
    }
    assert restacked(config, [1, 0, 1])["mlp_layer_types"] == ["sparse", "dense", "sparse", "mtp"]


def test_lists_of_layer_numbers() -> None:
    config = {"num_hidden_layers": 4, "mlp_only_layers": [0, 3], "decoder_sparse_step": 1}
    assert restacked(config, [3, 1, 0, 0])["mlp_only_layers"] == [0, 2, 3]
    kimi = {"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}}
    result = restacked(kimi, [3, 1, 3])["linear_attn_config"]
    assert result == {"kda_layers": [2], "full_attn_layers": [1, 3]}
    mtp = {"num_hidden_layers": 2, "moe_layers": [1, 2]}
    assert restacked(mtp, [1, 1, 0])["moe_layers"] == [0, 1, 3]


def test_leading_dense_layers() -> None:
    config = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "moe_layer_freq": 1}
    assert restacked(config, [0, 1, 2, 3, 3, 4])["first_k_dense_replace"] == 2
    assert restacked(config, [0, 2, 3])["first_k_dense_replace"] == 1
    assert restacked(config, [0, 1, 1, 0, 4])["first_k_dense_replace"] == 4
    assert restacked(config, [2, 3])["first_k_dense_replace"] == 0
    assert restacked(config, [0, 1, 0, 1, 1, 0])["first_k_dense_replace"] == 6
    assert restacked(config, [2, 3, 4], dense=[True, False, False])["first_k_dense_replace"] == 1


def test_dense_layers_behind_sparse_ones_cannot_be_said() -> None:
    config = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    result, sentences = restack_config(config, [0, 1, 0, 2])
    assert result["num_hidden_layers"] == 4
    assert result["first_k_dense_replace"] == 1
    (sentence,) = sentences
    assert "first_k_dense_replace" in sentence
    assert "layer 1" in sentence
    assert "layer 2" in sentence


def test_sliding_windows_from_some_layer_on() -> None:
    config = {"num_hidden_layers": 4, "max_window_layers": 2, "use_sliding_window": True}
    assert restacked(config, [0, 1, 1, 2])["max_window_layers"] == 3
    assert restack_config(config, [2, 0])[1] != ()
    unused = {**config, "use_sliding_window": False}
    assert restacked(unused, [2, 0])["max_window_layers"] == 2
    assert restacked({**unused, "max_window_layers": 4}, [0, 1])["max_window_layers"] == 2
    assert restacked({**config, "max_window_layers": 70}, [0, 1])["max_window_layers"] == 70


def test_the_last_layer_with_experts() -> None:
    config = {
        "num_hidden_layers": 4,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 1,
    }
    result = restacked(config, [0, 1, 2, 2, 3])
    assert (result["moe_layer_start_index"], result["moe_layer_end_index"]) == (1, 4)


def test_periods_that_still_hold_or_change() -> None:
    config = {"num_hidden_layers": 4, "moe_layer_interval": 2}
    assert restacked(config, [0, 1, 2, 3, 2, 3])["moe_layer_interval"] == 2
    assert restacked(config, [1, 3])["moe_layer_interval"] == 1
    assert restacked(config, [0, 2, 1])["moe_layer_interval"] == 3
    assert restacked(config, [0, 2])["moe_layer_interval"] == 3


def test_a_period_that_nothing_can_stand_in_for() -> None:
    _, sentences = restack_config({"num_hidden_layers": 6, "moe_layer_interval": 2}, [1, 0, 3])
    (sentence,) = sentences
    assert "moe_layer_interval is 2" in sentence
    assert "[0, 2]" in sentence


def test_periods_with_an_offset_move_it() -> None:
    config = {"num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4}
    config |= {"expert_layer_period": 2, "expert_layer_offset": 1}
    result = restacked(config, [1, 2, 3, 4, 5, 6])
    assert (result["attn_layer_period"], result["attn_layer_offset"]) == (8, 3)
    assert (result["expert_layer_period"], result["expert_layer_offset"]) == (2, 0)
    assert len(restack_config(config, [4, 5, 7, 4, 4, 7])[1]) == 2


def test_lists_stand_in_for_broken_periods() -> None:
    qwen = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    result = restacked(qwen, [1, 1, 0, 3])
    assert (result["decoder_sparse_step"], result["mlp_only_layers"]) == (1, [2, 3])
    llama4 = {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}
    assert restacked(llama4, [1, 1, 0])["moe_layers"] == [0, 1]
    gemma = {"num_hidden_layers": 6, "sliding_window_pattern": 3}
    assert restacked(gemma, [2, 0, 5, 5])["layer_types"] == [
        "full_attention",
        "sliding_attention",
        "full_attention",
        "full_attention",
    ]
    qwen_next = {"num_hidden_layers": 4, "full_attention_interval": 4}
    assert restacked(qwen_next, [0, 3, 1])["full_attention_interval"] == 2
    assert restacked(qwen_next, [3, 0])["layer_types"] == ["full_attention", "linear_attention"]


def test_lists_override_periods() -> None:
    words = ["linear_attention", "full_attention"]
    config = {"num_hidden_layers": 2, "full_attention_interval": 2, "layer_types": words}
    result = restacked(config, [1, 0, 0])
    assert result["full_attention_interval"] == 2
    assert result["layer_types"] == [words[1], words[0], words[0]]
    listed = {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "moe_layers": [1, 3]}
    assert restacked(listed, [3, 0, 0])["moe_layers"] == [0]


@pytest.mark.parametrize("value", [True, 0])
def test_periods_of_other_kinds_are_left_alone(value: object) -> None:
    assert restacked({"num_hidden_layers": 3, "sliding_window_pattern": value}, [2, 0]) == {
        "num_hidden_layers": 2,
        "sliding_window_pattern": value,
    }


def test_what_cannot_follow_is_said() -> None:
    _, sentences = restack_config({"num_hidden_layers": 4, "num_kv_shared_layers": 2}, [0, 1])
    assert len(sentences) == 1
    assert "num_kv_shared_layers" in sentences[0]
    assert restack_config({"num_hidden_layers": 4, "num_kv_shared_layers": 0}, [0, 1])[1] == ()
    _, sentences = restack_config({"hidden_size": 4}, [0, 1])
    assert "number of layers" in sentences[0]
    _, sentences = restack_config({"num_layers": 4, "is_encoder_decoder": True}, [0, 1])
    assert "encoder" in sentences[0]


def sparse_by(config: dict[str, Any], layer: int) -> bool:
    """Which layers have experts, as Qwen's models read their config."""
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


@given(layers=ORDERS, step=st.integers(1, 4), only=st.sets(st.integers(0, 7)))
@settings(deadline=None, max_examples=60)
def test_sparse_layers_stay_sparse(layers: list[int], step: int, only: set[int]) -> None:
    config = {"num_hidden_layers": 8, "decoder_sparse_step": step, "mlp_only_layers": sorted(only)}
    result = restacked(config, layers)
    assert [sparse_by(result, new) for new in range(len(layers))] == [
        sparse_by(config, old) for old in layers
    ]


def has_attention(config: dict[str, Any], layer: int) -> bool:
    """Which layers attend, as Jamba reads its config."""
    return bool(layer % config["attn_layer_period"] == config["attn_layer_offset"])


@given(layers=ORDERS, period=st.integers(1, 5), data=st.data())
@settings(deadline=None, max_examples=60)
def test_periods_say_the_truth_or_a_sentence_does(
    layers: list[int], period: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, period - 1))
    config = {"num_hidden_layers": 8, "attn_layer_period": period, "attn_layer_offset": offset}
    result, sentences = restack_config(config, layers)
    wanted = [has_attention(config, old) for old in layers]
    assert bool(sentences) != ([has_attention(result, new) for new in range(len(layers))] == wanted)
