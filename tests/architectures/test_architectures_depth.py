"""Layers: counted, stacked, tied, and what configs say of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.family_names import FAMILIES, Family

from raymerge.architectures.depth import Parent, count_mtp_layers, restack_config
from raymerge.architectures.roles import (
    Stack,
    TiedPair,
    declared_tie,
    describe,
    module_finder,
    rename_layer,
    stacks,
    tied_pair,
)
from raymerge.architectures.rules import load_rules

FULL, SLIDING = "full_attention", "sliding_attention"
ORDERS = st.lists(st.integers(0, 7), min_size=1, max_size=12)


def of(layers: int, **fields: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, **fields}


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
    vision = of(3, out_indices=[0, 1, 2])
    text = of(3, layer_types=["a", "b", "c"])
    config = {"num_hidden_layers": 3, "text_config": text, "vision_config": vision}
    result = restacked(config, [2, 0])
    assert result["text_config"] == of(2, layer_types=["c", "a"])
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
    mtp = of(2, moe_layers=[1, 2])
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
    config = of(4, first_k_dense_replace=1)
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
    config = of(4, moe_layer_interval=2)
    assert restacked(config, [0, 1, 2, 3, 2, 3])["moe_layer_interval"] == 2
    assert restacked(config, [1, 3])["moe_layer_interval"] == 1
    assert restacked(config, [0, 2, 1])["moe_layer_interval"] == 3
    assert restacked(config, [0, 2])["moe_layer_interval"] == 3


def test_a_period_that_nothing_can_stand_in_for() -> None:
    _, sentences = restack_config(of(6, moe_layer_interval=2), [1, 0, 3])
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
    llama4 = of(4, interleave_moe_layer_step=2)
    assert restacked(llama4, [1, 1, 0])["moe_layers"] == [0, 1]
    gemma = of(6, sliding_window_pattern=3)
    assert restacked(gemma, [2, 0, 5, 5])["layer_types"] == [FULL, SLIDING, FULL, FULL]
    qwen_next = of(4, full_attention_interval=4)
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
    assert restacked(of(3, sliding_window_pattern=value), [2, 0]) == of(2, sliding_window_pattern=value)


def test_what_cannot_follow_is_said() -> None:
    _, sentences = restack_config(of(4, num_kv_shared_layers=2), [0, 1])
    assert len(sentences) == 1
    assert "num_kv_shared_layers" in sentences[0]
    assert restack_config(of(4, num_kv_shared_layers=0), [0, 1])[1] == ()
    _, sentences = restack_config({"hidden_size": 4}, [0, 1])
    assert "number of layers" in sentences[0]
    _, sentences = restack_config({"num_layers": 4, "is_encoder_decoder": True}, [0, 1])
    assert "encoder" in sentences[0]


def sparse_by(config: dict[str, Any], layer: int) -> bool:
    """Which layers have experts, as Qwen's models read their config."""
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


@given(layers=ORDERS, step=st.integers(1, 4), only=st.sets(st.integers(0, 7)))
@settings(deadline=None, max_examples=30)
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
@settings(deadline=None, max_examples=30)
def test_periods_say_the_truth_or_a_sentence_does(
    layers: list[int], period: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, period - 1))
    config = {"num_hidden_layers": 8, "attn_layer_period": period, "attn_layer_offset": offset}
    result, sentences = restack_config(config, layers)
    wanted = [has_attention(config, old) for old in layers]
    assert bool(sentences) != ([has_attention(result, new) for new in range(len(layers))] == wanted)


@pytest.mark.parametrize(
    ("name", "main", "others"),
    [
        ("gpt2", ("transformer.h", 2), {}),
        ("llava", ("language_model.model.layers", 2), {"vision_tower.vision_model.encoder.layers": 4}),
        (
            "new llava",
            ("model.language_model.layers", 2),
            {"model.vision_tower.vision_model.encoder.layers": 4},
        ),
        ("qwen3_5_moe", ("model.language_model.layers", 2), {"model.visual.blocks": 3}),
        ("t5", ("decoder.block", 2), {"encoder.block": 2}),
        ("deepseek_v3", ("model.layers", 3), {}),
        ("qwen3_next", ("model.layers", 2), {"mtp.layers": 1}),
        ("unheard of", ("foo.stages", 4), {}),
    ],
)
def test_stacks_of_families(name: str, main: tuple[str, int], others: dict[str, int]) -> None:
    family = FAMILIES[name]
    found = stacks(family.names, family.config)
    assert [(s.prefix, s.num_layers) for s in found if s.is_main] == [main]
    assert {s.prefix: s.num_layers for s in found if not s.is_main} == others


def test_layers_beyond_the_count_must_be_mtp() -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(6)]
    assert stacks(names, {"num_hidden_layers": 4}) == (Stack("model.layers", 6, False),)
    assert stacks(names, of(4, num_nextn_predict_layers=2)) == (Stack("model.layers", 4, True),)
    assert stacks(names, {"num_hidden_layers": 8}) == (Stack("model.layers", 6, False),)


def test_mtp_layers_are_known_by_their_names_alone() -> None:
    names = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.eh_proj.weight",
        "model.layers.1.enorm.weight",
    ]
    assert stacks(names, {"num_hidden_layers": 1}) == (Stack("model.layers", 1, True),)


def test_a_silent_config_leaves_the_only_stack() -> None:
    names = ["m.layers.0.w", "m.layers.1.w", "vision_tower.layers.0.w", "proj.0.w", "proj.1.w"]
    assert [s.prefix for s in stacks(names, {}) if s.is_main] == ["m.layers"]
    assert not any(s.is_main for s in stacks([*names, "n.layers.0.w"], {}))


def test_loose_numbers_are_no_stack() -> None:
    assert stacks(["classifier.0.weight", "classifier.2.weight", "experts.0.w", "experts.1.w"], {}) == ()


def test_two_decoders_of_the_same_depth_leave_no_main_one() -> None:
    names = [f"{side}.layers.{n}.w" for side in ("a", "b") for n in range(2)]
    assert not any(s.is_main for s in stacks(names, {"num_hidden_layers": 2}))


@given(
    prefix=st.sampled_from(["model.layers", "transformer.h", "", "a.b.c"]),
    old=st.integers(0, 999),
    new=st.integers(0, 999),
    rest=st.sampled_from(["w", "mlp.experts.7.w1.weight", "layer.1.x"]),
)
@settings(deadline=None, max_examples=20)
def test_renaming_changes_the_layer_number_only(prefix: str, old: int, new: int, rest: str) -> None:
    dotted = f"{prefix}." if prefix else ""
    renamed = rename_layer(f"{dotted}{old}.{rest}", prefix, new)
    assert renamed == f"{dotted}{new}.{rest}"
    assert rename_layer(renamed, prefix, old) == f"{dotted}{old}.{rest}"


@pytest.mark.parametrize("name", ["other.layers.0.w", "model.layersx.0.w"])
def test_renaming_outside_the_stack_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"model\.layers"):
        rename_layer(name, "model.layers", 1)


def modules_of(family: Family) -> dict[str, str]:
    found = stacks(family.names, family.config)
    return {name: module_finder(family.config, found)(name) for name in family.names}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "deepseek_v3", "dbrx", "unheard of"])
def test_models_without_parts_are_one_module(name: str) -> None:
    assert set(modules_of(FAMILIES[name]).values()) == {"default"}


@pytest.mark.parametrize("new", [False, True])
def test_modules_of_llava(new: bool) -> None:
    head = "model." if new else ""
    found = modules_of(FAMILIES["new llava" if new else "llava"])
    assert found["lm_head.weight" if new else "language_model.lm_head.weight"] == "text_decoder"
    assert found[f"{head}multi_modal_projector.linear_1.weight"] == "multi_modal_projector"
    assert found[f"{head}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] == "vision_tower"
    assert set(found.values()) == {"text_decoder", "vision_tower", "multi_modal_projector"}


def test_modules_of_llama4_and_qwen() -> None:
    found = modules_of(FAMILIES["llama4"])
    assert set(found.values()) == {"text_decoder", "vision_model", "multi_modal_projector"}
    found = modules_of(FAMILIES["qwen3_5_moe"])
    assert found["model.visual.merger.linear_fc1.weight"] == "multi_modal_projector"
    assert found["model.visual.patch_embed.proj.weight"] == "vision_tower"
    assert found["model.language_model.embed_tokens.weight"] == found["lm_head.weight"] == "text_decoder"


def test_modules_of_encoder_decoders() -> None:
    found = modules_of(FAMILIES["t5"])
    assert found["shared.weight"] == "shared"
    assert found["lm_head.weight"] == "decoder"
    assert found["encoder.block.1.layer.0.layer_norm.weight"] == "encoder"
    found = modules_of(FAMILIES["whisper"])
    assert found["model.encoder.layers.3.fc1.weight"] == "encoder"
    assert found["proj_out.weight"] == found["model.decoder.embed_tokens.weight"] == "decoder"


def test_a_vision_stack_makes_parts_though_the_config_is_silent() -> None:
    names = ["model.layers.0.w", "visual.blocks.0.w"]
    found = stacks(names, {"num_hidden_layers": 1})
    assert [*map(module_finder({}, found), names)] == ["text_decoder", "vision_tower"]


@pytest.mark.parametrize("number", ["9" * 5000, "0\u0663", "\u0663"])
def test_numbers_that_no_model_counts_by_are_no_layers(number: str) -> None:
    names = ["model.layers.0.w", "model.layers.1.w", f"model.layers.{number}.w"]
    (stack,) = stacks(names, {"num_hidden_layers": 2})
    assert stack.num_layers == 2
    assert describe(names[2], load_rules(None)).layer is None


@pytest.mark.parametrize(
    ("name", "head", "embedding", "declared"),
    [
        ("llama", "lm_head.weight", "model.embed_tokens.weight", None),
        ("granitemoe", "lm_head.weight", "model.embed_tokens.weight", True),
        ("gpt2 without its prefix", "lm_head.weight", "wte.weight", None),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight", None),
        ("new llava", "lm_head.weight", "model.language_model.embed_tokens.weight", None),
        ("whisper", "proj_out.weight", "model.decoder.embed_tokens.weight", None),
    ],
)
def test_pairs_of_families(name: str, head: str, embedding: str, declared: bool | None) -> None:
    family = FAMILIES[name]
    assert tied_pair(family.names, family.config) == TiedPair(head, embedding, declared)


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["gpt_neox.embed_in.weight", "embed_out.weight"], ("embed_out.weight", "gpt_neox.embed_in.weight")),
        (["roberta.embeddings.word_embeddings.weight"], ("lm_head.decoder.weight",) * 1),
        (["model.decoder.embed_tokens.weight", "lm_head.weight"], ("lm_head.weight",)),
        (["embeddings.word_embeddings.weight"], ("cls.predictions.decoder.weight",)),
        (["x.embed_tokens.weight", "y.lm_head.weight"], ("y.lm_head.weight", "x.embed_tokens.weight")),
    ],
)
def test_pairs_by_table_and_by_role(names: list[str], pair: tuple[str, ...]) -> None:
    found = tied_pair(names, {})
    assert found is not None
    assert (found.head, found.embedding)[: len(pair)] == pair


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.3.embed_tokens.weight", "lm_head.weight"],
        ["a.embed_tokens.weight", "b.embed_tokens.weight"],
        ["x.embed_tokens.weight", "y.lm_head.weight", "z.lm_head.weight"],
    ],
)
def test_no_pair_where_it_would_be_a_guess(names: list[str]) -> None:
    assert tied_pair(names, {"tie_word_embeddings": True}) is None


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({"tie_word_embeddings": None, "llm_config": {"tie_word_embeddings": True}}, True),
        ({"thinker_config": {"text_config": {"tie_word_embeddings": True}}}, True),
    ],
)
def test_what_a_config_declares(config: dict[str, object], declared: bool | None) -> None:
    assert declared_tie(config) is declared


def test_a_head_and_an_embedding_of_two_spellings_are_a_pair() -> None:
    """As transformers saves DeepSeek-V4: the embedding by its own name, the head by the Hub's."""
    names = ["model.embed_tokens.weight", "head.weight", "model.layers.0.attn.wq_a.weight"]
    pair = TiedPair("head.weight", "model.embed_tokens.weight", False)
    assert tied_pair(names, {"model_type": "deepseek_v4", "tie_word_embeddings": False}) == pair
    assert tied_pair(names[:1], {}) == TiedPair("lm_head.weight", "model.embed_tokens.weight", None)


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
@settings(deadline=None, max_examples=30)
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
        assert sparse_by(result, new) == sparse_by(config, old)
        assert _is_full(result, new) == _is_full(config, old)


def _is_full(config: dict[str, Any], layer: int) -> bool:
    if "layer_types" in config:
        return bool(config["layer_types"][layer] == FULL)
    return (layer + 1) % config["sliding_window_pattern"] == 0


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
