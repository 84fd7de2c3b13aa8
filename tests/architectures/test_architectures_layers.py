"""Layer stacks, the main one among them, and renumbering."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import family_names as families

from raymerge.architectures import Stack, describe, load_rules, module_of, rename_layer, stacks


@pytest.mark.parametrize(
    ("make", "main", "others"),
    [
        (families.gpt2, ("transformer.h", 2), {}),
        (families.llava, ("language_model.model.layers", 2), {"vision_tower.vision_model.encoder.layers": 4}),
        (
            lambda: families.llava(new=True),
            ("model.language_model.layers", 2),
            {"model.vision_tower.vision_model.encoder.layers": 4},
        ),
        (families.qwen3_5_moe, ("model.language_model.layers", 2), {"model.visual.blocks": 3}),
        (families.t5, ("decoder.block", 2), {"encoder.block": 2}),
        (families.deepseek_v3, ("model.layers", 3), {}),
        (families.qwen3_next, ("model.layers", 2), {"mtp.layers": 1}),
        (families.unheard_of, ("foo.stages", 4), {}),
    ],
)
def test_stacks_of_families(
    make: Callable[[], families.Family], main: tuple[str, int], others: dict[str, int]
) -> None:
    family = make()
    found = stacks(family.names, family.config)
    assert [(s.prefix, s.num_layers) for s in found if s.is_main] == [main]
    assert {s.prefix: s.num_layers for s in found if not s.is_main} == others


def test_layers_beyond_the_count_must_be_mtp() -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(6)]
    assert stacks(names, {"num_hidden_layers": 4}) == (Stack("model.layers", 6, False),)
    assert stacks(names, {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}) == (
        Stack("model.layers", 4, True),
    )
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
@settings(deadline=None, max_examples=40)
def test_renaming_changes_the_layer_number_only(prefix: str, old: int, new: int, rest: str) -> None:
    dotted = f"{prefix}." if prefix else ""
    renamed = rename_layer(f"{dotted}{old}.{rest}", prefix, new)
    assert renamed == f"{dotted}{new}.{rest}"
    assert rename_layer(renamed, prefix, old) == f"{dotted}{old}.{rest}"


@pytest.mark.parametrize("name", ["other.layers.0.w", "model.layersx.0.w"])
def test_renaming_outside_the_stack_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"model\.layers"):
        rename_layer(name, "model.layers", 1)


def modules_of(family: families.Family) -> dict[str, str]:
    found = stacks(family.names, family.config)
    return {name: module_of(name, family.config, found) for name in family.names}


@pytest.mark.parametrize(
    "make",
    [families.llama, families.gpt2, families.bert, families.deepseek_v3, families.dbrx, families.unheard_of],
)
def test_models_without_parts_are_one_module(make: Callable[[], families.Family]) -> None:
    assert set(modules_of(make()).values()) == {"default"}


@pytest.mark.parametrize("new", [False, True])
def test_modules_of_llava(new: bool) -> None:
    head = "model." if new else ""
    found = modules_of(families.llava(new=new))
    assert found["lm_head.weight" if new else "language_model.lm_head.weight"] == "text_decoder"
    assert found[f"{head}multi_modal_projector.linear_1.weight"] == "multi_modal_projector"
    assert found[f"{head}vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] == "vision_tower"
    assert set(found.values()) == {"text_decoder", "vision_tower", "multi_modal_projector"}


def test_modules_of_llama4_and_qwen() -> None:
    found = modules_of(families.llama4())
    assert set(found.values()) == {"text_decoder", "vision_model", "multi_modal_projector"}
    found = modules_of(families.qwen3_5_moe())
    assert found["model.visual.merger.linear_fc1.weight"] == "multi_modal_projector"
    assert found["model.visual.patch_embed.proj.weight"] == "vision_tower"
    assert found["model.language_model.embed_tokens.weight"] == found["lm_head.weight"] == "text_decoder"


def test_modules_of_encoder_decoders() -> None:
    found = modules_of(families.t5())
    assert found["shared.weight"] == "shared"
    assert found["lm_head.weight"] == "decoder"
    assert found["encoder.block.1.layer.0.layer_norm.weight"] == "encoder"
    found = modules_of(families.whisper())
    assert found["model.encoder.layers.3.fc1.weight"] == "encoder"
    assert found["proj_out.weight"] == found["model.decoder.embed_tokens.weight"] == "decoder"


def test_a_vision_stack_makes_parts_though_the_config_is_silent() -> None:
    names = ["model.layers.0.w", "visual.blocks.0.w"]
    found = stacks(names, {"num_hidden_layers": 1})
    assert [module_of(name, {}, found) for name in names] == ["text_decoder", "vision_tower"]


@pytest.mark.parametrize("number", ["9" * 5000, "0\u0663", "\u0663"])
def test_numbers_that_no_model_counts_by_are_no_layers(number: str) -> None:
    names = ["model.layers.0.w", "model.layers.1.w", f"model.layers.{number}.w"]
    (stack,) = stacks(names, {"num_hidden_layers": 2})
    assert stack.num_layers == 2
    assert describe(names[2], load_rules(None)).layer is None
