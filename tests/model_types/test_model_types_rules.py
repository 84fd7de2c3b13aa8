"""The naming rules that single families need, on names and configs alone."""

from __future__ import annotations

from typing import Any

import pytest

from raymerge.architectures import Role, describe, load_rules, module_of, restack_config, stacks

BERT_LAYER = "encoder.layer.{}.attention.self.query.weight"


def layers(pattern: str, count: int) -> list[str]:
    """Names of one tensor in each layer."""
    return [pattern.format(number) for number in range(count)]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("output_projection.weight", Role.HEAD),
        ("decoder.weight", Role.HEAD),
        ("decoder.bias", Role.HEAD),
        ("predictions.decoder.weight", Role.HEAD),
        ("head.decoder.weight", Role.HEAD),
        ("generator_lm_head.weight", Role.HEAD),
        ("lm_head.out_proj.weight", Role.HEAD),
        ("pred_layer.proj.weight", Role.HEAD),
        ("lm_loss.bias", Role.HEAD),
        ("model.decoder.layers.0.self_attn.out_proj.weight", Role.ATTENTION),
        ("rwkv.embeddings.weight", Role.EMBEDDING),
        ("transformer.embeddings.weight", Role.EMBEDDING),
        ("transformer.tokens_embed.weight", Role.EMBEDDING),
        ("transformer.w.weight", Role.EMBEDDING),
        ("model.language_model.shared.weight", Role.EMBEDDING),
        ("led.shared.weight", Role.EMBEDDING),
        ("vision.position_embeddings.weight", Role.VISION),
        ("model.connector.modality_projection.proj.weight", Role.VISION),
    ],
)
def test_roles_of_names_outside_the_layers(name: str, role: Role) -> None:
    assert describe(name, load_rules(None)).role is role


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("led.encoder.layers.0.fc1.weight", "encoder"),
        ("led.decoder.layers.0.fc1.weight", "decoder"),
        ("led.shared.weight", "shared"),
        ("lm_head.weight", "decoder"),
    ],
)
def test_modules_below_the_name_of_an_inner_model(name: str, module: str) -> None:
    names = [*layers("led.encoder.layers.{}.fc1.weight", 2), *layers("led.decoder.layers.{}.fc1.weight", 2)]
    config = {"model_type": "led", "encoder_layers": 2, "decoder_layers": 2}
    assert module_of(name, config, stacks(names, config)) == module


def test_a_connector_is_the_projector() -> None:
    config = {"model_type": "idefics3", "text_config": {"num_hidden_layers": 2}}
    found = stacks(layers("model.text_model.layers.{}.mlp.up_proj.weight", 2), config)
    name = "model.connector.modality_projection.proj.weight"
    assert module_of(name, config, found) == "multi_modal_projector"


def test_a_vision_encoder_on_its_own_has_a_main_stack() -> None:
    found = stacks(layers(f"vit.{BERT_LAYER}", 2), {"model_type": "vit", "num_hidden_layers": 2})
    assert [(stack.prefix, stack.is_main) for stack in found] == [("vit.encoder.layer", True)]


def test_a_vision_tower_beside_text_has_none() -> None:
    names = [*layers(f"vit.{BERT_LAYER}", 2), *layers("model.layers.{}.mlp.up_proj.weight", 2)]
    found = stacks(names, {"num_hidden_layers": 2})
    assert [(stack.prefix, stack.is_main) for stack in found] == [
        ("vit.encoder.layer", False),
        ("model.layers", True),
    ]


def test_groups_of_shared_layers_are_counted_as_layers() -> None:
    name = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"
    config = {"model_type": "albert", "num_hidden_layers": 12, "num_hidden_groups": 1}
    (stack,) = stacks([name], config)
    assert (stack.prefix, stack.num_layers, stack.is_main) == ("albert.encoder.albert_layer_groups", 1, True)
    after, sentences = restack_config(config, [0, 0])
    assert (after["num_hidden_groups"], after["num_hidden_layers"], sentences) == (2, 12, ())


def test_a_list_of_kinds_counts_the_layers_where_no_field_does() -> None:
    config = {"layers_block_type": ["mamba", "attention", "mlp"], "mtp_layers_block_type": ["a", "b", "c"]}
    after, sentences = restack_config(config, [2, 0])
    assert after == {**config, "layers_block_type": ["mlp", "mamba"]}
    assert sentences == ()


@pytest.mark.parametrize(
    ("config", "order", "after"),
    [
        (
            {"attention_layers": ["g", "l", "g", "l"], "attention_types": [[["g", "l"], 2]]},
            [0, 0, 3],
            {"attention_layers": ["g", "g", "l"], "attention_types": [[["g", "g", "l"], 1]]},
        ),
        (
            {"attention_layers": ["g", "l", "g", "l"], "attention_types": [[["g", "l"], 2]]},
            [2, 1, 0, 3],
            {"attention_layers": ["g", "l", "g", "l"], "attention_types": [[["g", "l"], 2]]},
        ),
        ({"hybrid_layer_ids": [1, 3]}, [1, 0], {"hybrid_layer_ids": [0]}),
    ],
)
def test_kinds_of_layers_follow(config: dict[str, Any], order: list[int], after: dict[str, Any]) -> None:
    found, sentences = restack_config({"num_hidden_layers": 4, **config}, order)
    assert found == {"num_hidden_layers": len(order), **after}
    assert sentences == ()


def test_shared_blocks_allow_no_other_order() -> None:
    config = {"num_hidden_layers": 4, "num_mem_blocks": 2}
    (sentence,) = restack_config(config, [0, 1])[1]
    assert "num_mem_blocks is 2" in sentence
    assert restack_config(config, [0, 1, 2, 3])[1] == ()


def test_a_family_adds_to_the_general_rules_and_takes_their_place() -> None:
    general, albert = load_rules(None), load_rules("albert")
    assert albert.depth.counts == ("num_hidden_groups",)
    assert albert.depth.index_lists == general.depth.index_lists
    assert load_rules("bert-generation").ties[1:] == general.ties
    assert load_rules("../bert-generation").ties == general.ties
