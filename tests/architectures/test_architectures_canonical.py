"""Canonical names, and the layouts of fused experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits import family_names as families

from raymerge.architectures import (
    FusedLayout,
    describe,
    fused_layout,
    load_rules,
    logical_name,
    logical_names,
)
from raymerge.checkpoints.views import fused_views

RULES = load_rules(None)
L = "model.layers.3"
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
    long, short = families.gpt2(), families.gpt2("")
    assert [logical_name(n, gpt2) for n in short.names] == [logical_name(n, gpt2) for n in long.names]
    assert logical_name("embeddings.LayerNorm.gamma", bert) == "bert.embeddings.LayerNorm.weight"
    assert logical_name("bert.embeddings.LayerNorm.beta", bert) == "bert.embeddings.LayerNorm.bias"


def test_old_and_new_names_of_a_model_of_text_and_images_meet() -> None:
    old, new = families.llava(), families.llava(new=True)
    assert {logical_name(n, RULES) for n in old.names} == {logical_name(n, RULES) for n in new.names}
    qwen = load_rules("qwen2_vl")
    assert logical_name("model.layers.0.x.w", qwen) == logical_name("model.language_model.layers.0.x.w", qwen)


@pytest.mark.parametrize(
    "make",
    [
        families.llama,
        families.mixtral,
        families.qwen2_moe,
        families.qwen3_next,
        families.deepseek_v3,
        families.gpt_oss,
        families.minimax_m2,
        families.llama4,
        families.granitemoe,
        families.dbrx,
        families.jamba,
        families.hunyuan,
        families.ernie,
        families.phimoe,
        families.gpt2,
        families.bert,
        families.llava,
        families.t5,
    ],
)
def test_no_two_tensors_of_a_checkpoint_share_a_canonical_name(make: Callable[[], families.Family]) -> None:
    family = make()
    rules = load_rules(family.config["model_type"])
    names: list[str] = []
    for name, shape in family.names.items():
        layout = fused_layout(name, shape, family.config, rules)
        names += [logical_name(name, rules)] if layout is None else logical_names(layout)
    assert len(set(names)) == len(names)


def layout_of(family: families.Family, name: str) -> FusedLayout | None:
    return fused_layout(name, family.names[name], family.config, load_rules(family.config["model_type"]))


@pytest.mark.parametrize(
    ("make", "name", "kind", "projections"),
    [
        (
            families.qwen3_5_moe,
            "model.language_model.layers.1.mlp.experts.gate_up_proj",
            "out_in",
            ("gate", "up"),
        ),
        (families.qwen3_5_moe, "model.language_model.layers.1.mlp.experts.down_proj", "out_in", ("down",)),
        (
            families.llama4,
            "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
            "in_out",
            ("gate", "up"),
        ),
        (
            families.llama4,
            "language_model.model.layers.1.feed_forward.experts.down_proj",
            "in_out",
            ("down",),
        ),
        (families.gpt_oss, "model.layers.1.mlp.experts.gate_up_proj", "in_out_interleaved", ("gate", "up")),
        (
            families.gpt_oss,
            "model.layers.1.mlp.experts.gate_up_proj_bias",
            "in_out_interleaved",
            ("gate", "up"),
        ),
        (families.gpt_oss, "model.layers.1.mlp.experts.down_proj", "in_out", ("down",)),
        (families.gpt_oss, "model.layers.1.mlp.experts.down_proj_bias", "out_in", ("down",)),
        (
            families.granitemoe,
            "model.layers.1.block_sparse_moe.input_linear.weight",
            "out_in",
            ("gate", "up"),
        ),
        (families.granitemoe, "model.layers.1.block_sparse_moe.output_linear.weight", "out_in", ("down",)),
        (families.dbrx, "transformer.blocks.1.ffn.experts.mlp.w1", "rows", ("gate",)),
        (families.dbrx, "transformer.blocks.1.ffn.experts.mlp.v1", "rows", ("up",)),
        (families.dbrx, "transformer.blocks.1.ffn.experts.mlp.w2", "rows_transposed", ("down",)),
    ],
)
def test_published_layouts(
    make: Callable[[], families.Family], name: str, kind: str, projections: tuple[str, ...]
) -> None:
    family = make()
    layout = layout_of(family, name)
    assert layout is not None
    assert (layout.kind, layout.projections, layout.num_experts) == (kind, projections, 4)
    assert layout.is_bias == name.endswith("bias")
    assert layout.kind != "unknown"
    views = fused_views(layout.kind, family.names[name], len(projections), layout.num_experts)
    names = logical_names(layout)
    assert len(views) == len(names)
    # Each of them has gate and up [F, d] and down [d, F]; F is 6 and d is 8, but for the square gpt-oss.
    rows = 8 if make is families.gpt_oss else 6
    for view, logical in zip(views, names, strict=True):
        matrix = (8, rows) if ".down_proj." in logical else (rows, 8)
        assert view.shape == (matrix[:1] if layout.is_bias else matrix)


def test_fused_and_separate_experts_have_the_same_names() -> None:
    separate, rules = families.mixtral(), load_rules("mixtral")
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
@settings(deadline=None, max_examples=80)
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
