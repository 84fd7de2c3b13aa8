"""Roles and canonical names of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.family_names import FAMILIES, Family

from raymerge.architectures.roles import (
    FusedLayout,
    describe,
    fused_layout,
    logical_name,
    logical_names,
    stacks,
)
from raymerge.architectures.rules import Role, load_rules
from raymerge.checkpoints.views import fused_views

RULES = load_rules(None)
L = "model.layers.3"


ROLES: Mapping[Role, tuple[str, ...]] = {
    Role.EMBEDDING: (
        *("model.embed_tokens.weight", "gpt_neox.embed_in.weight", "transformer.embeddings.weight"),
        *("rwkv.embeddings.weight", "transformer.tokens_embed.weight", "transformer.w.weight"),
        *("model.language_model.shared.weight", "led.shared.weight"),
        *("bert.embeddings.word_embeddings.weight", "shared.weight", "decoder.embed_tokens.weight"),
    ),
    Role.OTHER: (*("transformer.wpe.weight", f"{L}.mamba.A_log"),),
    Role.HEAD: (
        *("lm_head.weight", "lm_head.bias", "embed_out.weight", "transformer.output_layer.weight"),
        *("cls.predictions.decoder.weight", "lm_head.decoder.weight", "proj_out.weight", "decoder.bias"),
        *("output_projection.weight", "decoder.weight", "predictions.decoder.weight", "lm_loss.bias"),
        *("head.decoder.weight", "generator_lm_head.weight", "lm_head.out_proj.weight"),
        "pred_layer.proj.weight",
    ),
    Role.NORM: (
        *("lm_head.layer_norm.weight", "model.norm.weight", "transformer.h.0.ln_1.bias"),
        *(f"{L}.self_attn.q_norm.weight", f"{L}.self_attn.indexer.k_norm.bias"),
        "bert.encoder.layer.1.output.LayerNorm.gamma",
        "transformer.blocks.0.norm_attn_norm.norm_1.weight",
    ),
    Role.ATTENTION: (
        *("transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", f"{L}.self_attn.q_proj.weight"),
        *(f"{L}.self_attn.indexer.wq_b.weight", "bert.encoder.layer.1.attention.output.dense.weight"),
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "model.decoder.layers.0.self_attn.out_proj.weight",
    ),
    Role.MLP: (
        *(f"{L}.mlp.gate_proj.weight", f"{L}.block_sparse_moe.gate_proj.weight"),
        *("bert.encoder.layer.1.intermediate.dense.weight", "bert.encoder.layer.1.output.dense.weight"),
    ),
    Role.ROUTER: (
        *(f"{L}.mlp.gate.weight", f"{L}.block_sparse_moe.router.layer.weight"),
        *(f"{L}.mlp.router.weight", "transformer.blocks.0.ffn.router.layer.weight"),
        *(f"{L}.mlp.router.classifier.weight", f"{L}.ffn.gate.weight"),
    ),
    Role.SHARED_EXPERT_GATE: (f"{L}.mlp.shared_expert_gate.weight",),
    Role.SHARED_EXPERT: (
        *(f"{L}.mlp.shared_expert.gate_proj.weight", f"{L}.shared_mlp.input_linear.weight"),
    ),
    Role.EXPERT: (
        *(f"{L}.mlp.experts.17.gate_proj.weight", f"{L}.mlp.experts.gate_up_proj"),
        *(f"{L}.block_sparse_moe.input_linear.weight", "transformer.blocks.0.ffn.experts.mlp.v1"),
    ),
    Role.BUFFER: (
        *(f"{L}.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.bias"),
        "bert.embeddings.position_ids",
    ),
    Role.MTP: (
        *("mtp.layers.0.self_attn.q_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"),
        *("model.layers.61.eh_proj.weight", "model.layers.61.shared_head.head.weight"),
        "nextn.embed_tokens.weight",
    ),
    Role.VISION: (
        *("visual.blocks.0.norm1.weight", "model.visual.merger.mlp.0.weight"),
        *("multi_modal_projector.linear_1.bias", "vision.position_embeddings.weight"),
        "model.connector.modality_projection.proj.weight",
    ),
}
"""Names of tensors of any model, by their roles; buffers are computed anew by the models."""


@pytest.mark.parametrize(
    ("name", "expected"), [(name, role) for role, names in ROLES.items() for name in names]
)
def test_roles_of_any_model(name: str, expected: Role) -> None:
    assert describe(name, RULES).role is expected


@pytest.mark.parametrize(
    "name",
    [
        *(f"{L}.mlp.gate.e_score_correction_bias", f"{L}.block_sparse_moe.e_score_correction_bias"),
        *(f"{L}.mlp.expert_bias", f"{L}.mlp.gate.expert_bias", f"{L}.moe.router_bias", f"{L}.ffn.gate.bias"),
        *(f"{L}.mlp.moe_statics.e_score_correction_bias", f"{L}.mlp.experts.e_score_correction_bias"),
        f"{L}.mlp.router.e_score_correction_bias",
    ],
)
def test_every_name_of_the_selection_bias(name: str) -> None:
    info = describe(name, RULES)
    assert info.role is Role.ROUTER_BIAS
    assert info.is_bias
    assert info.block == re.sub(r"(\.(gate|moe_statics|experts|router))?\.\w+$", "", name)


@pytest.mark.parametrize(
    ("word", "projection"),
    [
        *(("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")),
        *(("w1", "gate"), ("w3", "up"), ("w2", "down")),
    ],
)
@pytest.mark.parametrize("leaf", ["weight", "bias", "weight_scale_inv", "weight_packed"])
def test_projections_of_experts(word: str, projection: str, leaf: str) -> None:
    info = describe(f"{L}.mlp.experts.12.{word}.{leaf}", RULES)
    assert (info.layer, info.expert, info.projection) == (3, 12, projection)
    assert info.block == f"{L}.mlp"
    assert info.stack == "model.layers"
    assert info.is_bias == (leaf == "bias")


@pytest.mark.parametrize(
    ("rest", "projection", "is_bias"),
    [
        ("mlp.experts.gate_up_proj", "gate_up", False),
        ("mlp.experts.gate_up_proj_bias", "gate_up", True),
        ("block_sparse_moe.input_linear.weight", "gate_up", False),
        ("ffn.experts.mlp.v1", "up", False),
        ("mlp.gate.weight", None, False),
    ],
)
def test_projections_of_fused_tensors(rest: str, projection: str | None, is_bias: bool) -> None:
    info = describe(f"{L}.{rest}", RULES)
    assert (info.expert, info.projection, info.is_bias) == (None, projection, is_bias)


def test_layers_from_the_number_of_layers_on_are_mtp() -> None:
    inside = describe("model.layers.60.mlp.gate.e_score_correction_bias", RULES, num_layers=61)
    beyond = describe("model.layers.61.mlp.gate.e_score_correction_bias", RULES, num_layers=61)
    assert inside.role is inside.part is Role.ROUTER_BIAS
    assert (beyond.role, beyond.part) == (Role.MTP, Role.ROUTER_BIAS)
    assert beyond.block == "model.layers.61.mlp"


def test_a_deep_vision_tower_is_not_mtp() -> None:
    info = describe("vision_tower.vision_model.encoder.layers.26.layer_norm1.weight", RULES, num_layers=24)
    assert (info.role, info.part, info.layer) == (Role.VISION, Role.NORM, 26)


def test_numbers_that_are_no_layers() -> None:
    assert describe("classifier.0.weight", RULES).layer is None
    assert describe("experts.3.w1.weight", RULES).layer is None
    assert describe("experts.3.w1.weight", RULES).expert == 3
    assert describe("experts.3.w1.weight", RULES).block == ""


def test_stacks_say_which_numbers_are_layers() -> None:
    family = FAMILIES["unheard of"]
    found = stacks(family.names, family.config)
    info = describe("foo.stages.3.w", RULES, stacks=found)
    assert (info.stack, info.layer) == ("foo.stages", 3)
    assert describe("foo.stages.3.w", RULES).layer is None


def test_only_the_main_stack_has_mtp_layers() -> None:
    family = FAMILIES["llava"]
    found = stacks(family.names, family.config)
    tower = describe("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", RULES, stacks=found)
    assert (tower.role, tower.layer) == (Role.VISION, 3)
    family = FAMILIES["whisper"]
    found = stacks(family.names, family.config)
    encoder = describe("model.encoder.layers.3.fc1.weight", RULES, stacks=found)
    assert (encoder.role, encoder.layer) == (Role.MLP, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_next", {"mtp": 15, "router": 2, "norm": 7, "attention": 20}),
        ("qwen3_5_moe", {"expert": 4, "router": 2, "vision": 5}),
        ("deepseek_v3", {"expert": 24, "router": 2, "router_bias": 2, "shared_expert": 6, "mtp": 35}),
        ("llama4", {"expert": 4, "router": 2, "mlp": 6, "shared_expert": 6, "vision": 3}),
        ("hunyuan", {"expert": 24, "router": 2, "shared_expert": 6, "norm": 7}),
        ("ernie", {"expert": 24, "router": 2, "router_bias": 2, "shared_expert": 6}),
        ("phimoe", {"expert": 24, "router": 2, "head": 2, "norm": 8, "attention": 10}),
        ("llava", {"vision": 5, "buffer": 1, "mlp": 6, "head": 1, "embedding": 1}),
    ],
)
def test_counts_of_roles_by_family(name: str, expected: dict[str, int]) -> None:
    family = FAMILIES[name]
    rules = load_rules(family.config["model_type"])
    found = stacks(family.names, family.config)
    counts: dict[str, int] = {}
    for each in (describe(tensor, rules, stacks=found).role.value for tensor in family.names):
        counts[each] = counts.get(each, 0) + 1
    assert {key: counts.get(key, 0) for key in expected} == expected
    assert sum(counts.values()) == len(family.names)


@pytest.mark.parametrize("model_type", ["../general", "families/general", "", "llama4\n"])
def test_a_model_type_leads_to_no_other_file(model_type: str) -> None:
    rules = load_rules(model_type)
    assert (rules.fused, rules.roles, rules.renames) == (RULES.fused, RULES.roles, RULES.renames)


def test_a_text_part_has_the_rules_of_its_family() -> None:
    assert load_rules("llama4_text").fused == load_rules("llama4").fused != RULES.fused
    assert load_rules("qwen3_5_moe_text").is_out_in
    assert not load_rules("foonet").is_out_in


SIZES = {"hidden_size": 8, "moe_intermediate_size": 6}


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        (f"{L}.block_sparse_moe.experts.3.w1.weight", f"{L}.mlp.experts.3.gate_proj.weight"),
        (
            f"{L}.block_sparse_moe.experts.3.w3.weight_scale_inv",
            f"{L}.mlp.experts.3.up_proj.weight_scale_inv",
        ),
        (f"{L}.feed_forward.experts.3.up_proj.weight", f"{L}.mlp.experts.3.up_proj.weight"),
        ("layers.3.ffn.experts.3.w2.weight", "layers.3.mlp.experts.3.down_proj.weight"),
        (f"{L}.block_sparse_moe.gate.weight", f"{L}.mlp.gate.weight"),
        (f"{L}.mlp.router.weight", f"{L}.mlp.gate.weight"),
        (f"{L}.block_sparse_moe.router.layer.weight", f"{L}.mlp.gate.weight"),
        (f"{L}.block_sparse_moe.e_score_correction_bias", f"{L}.mlp.gate.e_score_correction_bias"),
        (f"{L}.mlp.expert_bias", f"{L}.mlp.gate.e_score_correction_bias"),
        (f"{L}.block_sparse_moe.gate_proj.weight", f"{L}.mlp.gate_proj.weight"),
        (f"{L}.feed_forward.gate_proj.weight", f"{L}.feed_forward.gate_proj.weight"),
        (f"{L}.self_attn.q_proj.weight", f"{L}.self_attn.q_proj.weight"),
        (
            "language_model.model.layers.0.mlp.up_proj.weight",
            "model.language_model.layers.0.mlp.up_proj.weight",
        ),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("experts.3.w1.weight", "experts.3.gate_proj.weight"),
    ],
)
def test_canonical_names(stored: str, canonical: str) -> None:
    assert logical_name(stored, RULES) == canonical
    assert logical_name(stored, RULES, info=describe(stored, RULES)) == canonical
    assert logical_name(canonical, RULES) == canonical


def test_names_of_gpt2_and_bert_with_and_without_the_inner_model() -> None:
    gpt2, bert = load_rules("gpt2"), load_rules("bert")
    long, short = FAMILIES["gpt2"], FAMILIES["gpt2 without its prefix"]
    assert [logical_name(n, gpt2) for n in short.names] == [logical_name(n, gpt2) for n in long.names]
    assert logical_name("embeddings.LayerNorm.gamma", bert) == "bert.embeddings.LayerNorm.weight"
    assert logical_name("bert.embeddings.LayerNorm.beta", bert) == "bert.embeddings.LayerNorm.bias"


def test_old_and_new_names_of_a_model_of_text_and_images_meet() -> None:
    old, new = FAMILIES["llava"], FAMILIES["new llava"]
    assert {logical_name(n, RULES) for n in old.names} == {logical_name(n, RULES) for n in new.names}
    qwen = load_rules("qwen2_vl")
    assert logical_name("model.layers.0.x.w", qwen) == logical_name("model.language_model.layers.0.x.w", qwen)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_tensors_of_a_checkpoint_share_a_canonical_name(family: str) -> None:
    config, names_of_it = FAMILIES[family]
    rules = load_rules(config["model_type"])
    names: list[str] = []
    for name, shape in names_of_it.items():
        layout = fused_layout(name, shape, config, rules)
        names += [logical_name(name, rules)] if layout is None else logical_names(layout)
    assert len(set(names)) == len(names)


def layout_of(family: Family, name: str) -> FusedLayout | None:
    return fused_layout(name, family.names[name], family.config, load_rules(family.config["model_type"]))


QWEN, LLAMA4 = (
    "model.language_model.layers.1.mlp.experts",
    "language_model.model.layers.1.feed_forward.experts",
)
OSS, GRANITE = "model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe"
DBRX = "transformer.blocks.1.ffn.experts.mlp"


@pytest.mark.parametrize(
    ("family_name", "name", "kind", "projections"),
    [
        ("qwen3_5_moe", f"{QWEN}.gate_up_proj", "out_in", ("gate", "up")),
        ("qwen3_5_moe", f"{QWEN}.down_proj", "out_in", ("down",)),
        ("llama4", f"{LLAMA4}.gate_up_proj", "in_out", ("gate", "up")),
        ("llama4", f"{LLAMA4}.down_proj", "in_out", ("down",)),
        ("gpt_oss", f"{OSS}.gate_up_proj", "in_out_interleaved", ("gate", "up")),
        ("gpt_oss", f"{OSS}.gate_up_proj_bias", "in_out_interleaved", ("gate", "up")),
        ("gpt_oss", f"{OSS}.down_proj", "in_out", ("down",)),
        ("gpt_oss", f"{OSS}.down_proj_bias", "out_in", ("down",)),
        ("granitemoe", f"{GRANITE}.input_linear.weight", "out_in", ("gate", "up")),
        ("granitemoe", f"{GRANITE}.output_linear.weight", "out_in", ("down",)),
        ("dbrx", f"{DBRX}.w1", "rows", ("gate",)),
        ("dbrx", f"{DBRX}.v1", "rows", ("up",)),
        ("dbrx", f"{DBRX}.w2", "rows_transposed", ("down",)),
    ],
)
def test_published_layouts(family_name: str, name: str, kind: str, projections: tuple[str, ...]) -> None:
    family = FAMILIES[family_name]
    layout = layout_of(family, name)
    assert layout is not None
    assert (layout.kind, layout.projections, layout.num_experts) == (kind, projections, 4)
    assert layout.is_bias == name.endswith("bias")
    assert layout.kind != "unknown"
    views = fused_views(layout.kind, family.names[name], len(projections), layout.num_experts)
    names = logical_names(layout)
    assert len(views) == len(names)
    # Each of them has gate and up [F, d] and down [d, F]; F is 6 and d is 8, but for the square gpt-oss.
    rows = 8 if family_name == "gpt_oss" else 6
    for view, logical in zip(views, names, strict=True):
        matrix = (8, rows) if ".down_proj." in logical else (rows, 8)
        assert view.shape == (matrix[:1] if layout.is_bias else matrix)


def test_fused_and_separate_experts_have_the_same_names() -> None:
    separate, rules = FAMILIES["mixtral"], load_rules("mixtral")
    block = "model.layers.1.mlp.experts"
    fused = fused_layout(f"{block}.gate_up_proj", (4, 12, 8), separate.config, rules)
    down = fused_layout(f"{block}.down_proj", (4, 8, 6), separate.config, rules)
    assert fused is not None
    assert down is not None
    stored = "model.layers.1.block_sparse_moe.experts"
    alone = {logical_name(name, rules) for name in separate.names if name.startswith(stored)}
    assert {*logical_names(fused), *logical_names(down)} == alone


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{L}.mlp.experts.3.gate_proj.weight", (6, 8)),
        (f"{L}.mlp.shared_experts.gate_up_proj.weight", (12, 8)),
        (f"{L}.shared_mlp.input_linear.weight", (12, 8)),
        (f"{L}.mlp.experts.gate_up_proj_blocks", (4, 12, 1, 16)),
        (f"{L}.mlp.experts.gate_up_proj_scales", (4, 12, 1)),
    ],
)
def test_what_is_not_fused(name: str, shape: tuple[int, ...]) -> None:
    assert fused_layout(name, shape, SIZES, load_rules("gpt_oss")) is None


def kind_of(
    word: str, shape: tuple[int, ...], config: Mapping[str, object], model_type: str | None = None
) -> str:
    layout = fused_layout(f"{L}.mlp.experts.{word}", shape, config, load_rules(model_type))
    assert layout is not None
    return layout.kind


def test_sizes_tell_an_unknown_family_only_without_doubt() -> None:
    assert kind_of("gate_up_proj", (4, 12, 8), SIZES) == "out_in"
    assert kind_of("down_proj", (4, 8, 6), SIZES) == "out_in"
    assert kind_of("down_proj", (4, 6, 8), SIZES) == "in_out"
    # (in, out) pairs lie side by side or take turns; square matrices lie anyhow; other sizes fit nothing.
    assert kind_of("gate_up_proj", (4, 8, 12), SIZES) == "unknown"
    assert kind_of("gate_up_proj", (4, 8, 8), {"hidden_size": 8, "moe_intermediate_size": 4}) == "unknown"
    assert kind_of("down_proj", (4, 8, 8), {"hidden_size": 8, "moe_intermediate_size": 8}) == "unknown"
    assert kind_of("down_proj", (4, 9, 6), SIZES) == "unknown"
    assert kind_of("gate_up_proj", (4, 12, 8), {}) == "unknown"
    assert kind_of("gate_up_proj_bias", (4, 12), SIZES) == "unknown"
    assert kind_of("down_proj_bias", (4, 8), SIZES) == "out_in"


def test_a_family_decides_square_matrices_and_silent_configs() -> None:
    assert kind_of("down_proj", (4, 8, 8), {"hidden_size": 8, "intermediate_size": 8}, "gpt_oss") == "in_out"
    assert kind_of("gate_up_proj", (4, 12, 8), {}, "qwen3_moe") == "out_in"
    assert kind_of("gate_up_proj", (4, 8, 12), {}, "gpt_oss") == "in_out_interleaved"


def test_sizes_that_contradict_the_family_win_where_they_leave_no_doubt() -> None:
    assert kind_of("gate_up_proj", (4, 12, 8), SIZES, "qwen3_vl_moe") == "out_in"
    assert kind_of("gate_up_proj", (4, 8, 12), SIZES, "qwen3_moe") == "unknown"
    assert kind_of("gate_up_proj", (4, 9, 9), SIZES, "qwen3_moe") == "unknown"


@pytest.mark.parametrize(("word", "shape"), [("gate_up_proj", (4, 13, 8)), ("gate_up_proj", (0, 12, 8))])
def test_shapes_that_fit_no_layout_are_unknown(word: str, shape: tuple[int, ...]) -> None:
    assert kind_of(word, shape, {}, "qwen3_moe") == "unknown"


def test_flattened_rows_need_the_number_of_experts() -> None:
    rules = load_rules("dbrx")
    layout = fused_layout("transformer.blocks.0.ffn.experts.mlp.w1", (24, 8), {}, rules)
    assert layout is not None
    assert (layout.kind, layout.num_experts) == ("unknown", 1)
    layout = fused_layout("x.ffn.experts.mlp.w1", (25, 8), {"ffn_config": {"moe_num_experts": 4}}, rules)
    assert layout is not None
    assert layout.kind == "unknown"


@given(
    experts=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    model_type=st.sampled_from(["llama4", "gpt_oss", "qwen3_moe", "foonet"]),
    flipped=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_a_known_layout_always_fits_its_shape(
    experts: int, sizes: tuple[int, int], model_type: str, flipped: bool
) -> None:
    rows, hidden = sizes
    config = {"hidden_size": hidden, "moe_intermediate_size": rows}
    shape = (experts, hidden, 2 * rows) if flipped else (experts, 2 * rows, hidden)
    layout = fused_layout(f"{L}.mlp.experts.gate_up_proj", shape, config, load_rules(model_type))
    assert layout is not None
    if layout.kind != "unknown":
        views = fused_views(layout.kind, shape, 2, layout.num_experts)
        assert {view.shape for view in views} == {(rows, hidden)}
