"""Roles, layers, experts and projections, from the names that families publish."""

from __future__ import annotations

import pytest
from kits import family_names as families

from raymerge.architectures import Role, describe, load_rules, stacks

RULES = load_rules(None)
L = "model.layers.3"


def role(name: str) -> Role:
    return describe(name, RULES).role


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", Role.EMBEDDING),
        ("gpt_neox.embed_in.weight", Role.EMBEDDING),
        ("bert.embeddings.word_embeddings.weight", Role.EMBEDDING),
        ("shared.weight", Role.EMBEDDING),
        ("decoder.embed_tokens.weight", Role.EMBEDDING),
        ("transformer.wpe.weight", Role.OTHER),
        ("lm_head.weight", Role.HEAD),
        ("lm_head.bias", Role.HEAD),
        ("embed_out.weight", Role.HEAD),
        ("transformer.output_layer.weight", Role.HEAD),
        ("cls.predictions.decoder.weight", Role.HEAD),
        ("lm_head.decoder.weight", Role.HEAD),
        ("lm_head.layer_norm.weight", Role.NORM),
        ("proj_out.weight", Role.HEAD),
        ("model.norm.weight", Role.NORM),
        ("transformer.h.0.ln_1.bias", Role.NORM),
        (f"{L}.self_attn.q_norm.weight", Role.NORM),
        (f"{L}.self_attn.indexer.k_norm.bias", Role.NORM),
        ("bert.encoder.layer.1.output.LayerNorm.gamma", Role.NORM),
        ("transformer.blocks.0.norm_attn_norm.norm_1.weight", Role.NORM),
        ("transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", Role.ATTENTION),
        (f"{L}.self_attn.q_proj.weight", Role.ATTENTION),
        (f"{L}.self_attn.indexer.wq_b.weight", Role.ATTENTION),
        ("bert.encoder.layer.1.attention.output.dense.weight", Role.ATTENTION),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", Role.ATTENTION),
        (f"{L}.mlp.gate_proj.weight", Role.MLP),
        (f"{L}.block_sparse_moe.gate_proj.weight", Role.MLP),
        ("bert.encoder.layer.1.intermediate.dense.weight", Role.MLP),
        ("bert.encoder.layer.1.output.dense.weight", Role.MLP),
        (f"{L}.mamba.A_log", Role.OTHER),
    ],
)
def test_roles_of_any_model(name: str, expected: Role) -> None:
    assert role(name) is expected


@pytest.mark.parametrize(
    "name",
    [
        f"{L}.mlp.gate.weight",
        f"{L}.block_sparse_moe.router.layer.weight",
        f"{L}.mlp.router.weight",
        "transformer.blocks.0.ffn.router.layer.weight",
        f"{L}.mlp.router.classifier.weight",
        f"{L}.ffn.gate.weight",
    ],
)
def test_the_routers(name: str) -> None:
    assert role(name) is Role.ROUTER


@pytest.mark.parametrize(
    "name",
    [
        f"{L}.mlp.gate.e_score_correction_bias",
        f"{L}.block_sparse_moe.e_score_correction_bias",
        f"{L}.mlp.expert_bias",
        f"{L}.mlp.gate.expert_bias",
        f"{L}.moe.router_bias",
        f"{L}.ffn.gate.bias",
        f"{L}.mlp.moe_statics.e_score_correction_bias",
        f"{L}.mlp.experts.e_score_correction_bias",
        f"{L}.mlp.router.e_score_correction_bias",
    ],
)
def test_every_name_of_the_selection_bias(name: str) -> None:
    info = describe(name, RULES)
    assert info.role is Role.ROUTER_BIAS
    assert info.is_bias
    assert info.block == name.rsplit(".", 1)[0].removesuffix(".gate").removesuffix(
        ".moe_statics"
    ).removesuffix(".experts").removesuffix(".router")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{L}.mlp.shared_expert_gate.weight", Role.SHARED_EXPERT_GATE),
        (f"{L}.mlp.shared_expert.gate_proj.weight", Role.SHARED_EXPERT),
        (f"{L}.shared_mlp.input_linear.weight", Role.SHARED_EXPERT),
        (f"{L}.mlp.experts.17.gate_proj.weight", Role.EXPERT),
        (f"{L}.mlp.experts.gate_up_proj", Role.EXPERT),
        (f"{L}.block_sparse_moe.input_linear.weight", Role.EXPERT),
        ("transformer.blocks.0.ffn.experts.mlp.v1", Role.EXPERT),
    ],
)
def test_roles_around_experts(name: str, expected: Role) -> None:
    assert role(name) is expected


@pytest.mark.parametrize(
    "name",
    [f"{L}.self_attn.rotary_emb.inv_freq", "transformer.h.0.attn.bias", "bert.embeddings.position_ids"],
)
def test_buffers_that_models_compute_anew(name: str) -> None:
    assert role(name) is Role.BUFFER


@pytest.mark.parametrize(
    ("word", "projection"),
    [
        ("gate_proj", "gate"),
        ("up_proj", "up"),
        ("down_proj", "down"),
        ("w1", "gate"),
        ("w3", "up"),
        ("w2", "down"),
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


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.self_attn.q_proj.weight",
        "model.mtp_layers.0.mlp.up_proj.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.shared_head.head.weight",
        "nextn.embed_tokens.weight",
    ],
)
def test_mtp_by_name(name: str) -> None:
    assert role(name) is Role.MTP


def test_a_deep_vision_tower_is_not_mtp() -> None:
    info = describe("vision_tower.vision_model.encoder.layers.26.layer_norm1.weight", RULES, num_layers=24)
    assert (info.role, info.part, info.layer) == (Role.VISION, Role.NORM, 26)


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.0.norm1.weight",
        "model.visual.merger.mlp.0.weight",
        "multi_modal_projector.linear_1.bias",
    ],
)
def test_the_vision_side(name: str) -> None:
    assert role(name) is Role.VISION


def test_numbers_that_are_no_layers() -> None:
    assert describe("classifier.0.weight", RULES).layer is None
    assert describe("experts.3.w1.weight", RULES).layer is None
    assert describe("experts.3.w1.weight", RULES).expert == 3
    assert describe("experts.3.w1.weight", RULES).block == ""


def test_stacks_say_which_numbers_are_layers() -> None:
    family = families.unheard_of()
    found = stacks(family.names, family.config)
    info = describe("foo.stages.3.w", RULES, stacks=found)
    assert (info.stack, info.layer) == ("foo.stages", 3)
    assert describe("foo.stages.3.w", RULES).layer is None


def test_only_the_main_stack_has_mtp_layers() -> None:
    family = families.llava()
    found = stacks(family.names, family.config)
    tower = describe("vision_tower.vision_model.encoder.layers.3.mlp.fc1.weight", RULES, stacks=found)
    assert (tower.role, tower.layer) == (Role.VISION, 3)
    family = families.whisper()
    found = stacks(family.names, family.config)
    encoder = describe("model.encoder.layers.3.fc1.weight", RULES, stacks=found)
    assert (encoder.role, encoder.layer) == (Role.MLP, 3)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (families.llama, {"mlp": 9, "attention": 12, "norm": 7, "embedding": 1, "head": 1}),
        (families.mixtral, {"expert": 24, "router": 2, "attention": 8, "norm": 5, "embedding": 1, "head": 1}),
        (families.qwen2_moe, {"expert": 24, "shared_expert": 6, "shared_expert_gate": 2, "router": 2}),
        (families.qwen3_moe, {"expert": 24, "router": 2, "norm": 9}),
        (families.qwen3_next, {"mtp": 15, "router": 2, "norm": 7, "attention": 20}),
        (families.qwen3_5_moe, {"expert": 4, "router": 2, "vision": 5}),
        (families.deepseek_v3, {"expert": 24, "router": 2, "router_bias": 2, "shared_expert": 6, "mtp": 35}),
        (families.gpt_oss, {"expert": 8, "router": 4, "attention": 10}),
        (families.minimax_m2, {"expert": 24, "router": 2, "router_bias": 2}),
        (families.llama4, {"expert": 4, "router": 2, "mlp": 6, "shared_expert": 6, "vision": 3}),
        (families.granitemoe, {"expert": 4, "router": 2, "shared_expert": 4, "other": 4}),
        (families.dbrx, {"expert": 6, "router": 2, "norm": 3, "attention": 2, "embedding": 1, "head": 1}),
        (families.jamba, {"expert": 24, "router": 2, "mlp": 6, "other": 6}),
        (families.hunyuan, {"expert": 24, "router": 2, "shared_expert": 6, "norm": 7}),
        (families.ernie, {"expert": 24, "router": 2, "router_bias": 2, "shared_expert": 6}),
        (families.phimoe, {"expert": 24, "router": 2, "head": 2, "norm": 8, "attention": 10}),
        (families.gpt2, {"buffer": 4, "attention": 4, "mlp": 4, "norm": 3, "embedding": 1, "other": 1}),
        (families.bert, {"buffer": 1, "attention": 4, "mlp": 4, "head": 2, "embedding": 1}),
        (families.llava, {"vision": 5, "buffer": 1, "mlp": 6, "head": 1, "embedding": 1}),
        (families.t5, {"embedding": 1, "head": 1, "attention": 4, "mlp": 8, "norm": 5}),
    ],
)
def test_counts_of_roles_by_family(make: object, expected: dict[str, int]) -> None:
    family: families.Family = make()  # type: ignore[operator]
    rules = load_rules(family.config["model_type"])
    found = stacks(family.names, family.config)
    counts: dict[str, int] = {}
    for name in family.names:
        each = describe(name, rules, stacks=found).role.value
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
