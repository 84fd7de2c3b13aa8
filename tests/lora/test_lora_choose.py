"""Which tensors of which families become factors, and which are saved whole, from names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from raymerge.checkpoints.header import StoredTensor
from raymerge.checkpoints.source import Checkpoint
from raymerge.dtypes import DType
from raymerge.lora.extract import Selection, choose, compare


def checkpoint(
    shapes: Mapping[str, tuple[int, ...]], dtype: DType = DType.BF16, name: str = "m", **config: Any
) -> Checkpoint:
    """A model of which nothing but the header is known."""
    tensors = {
        each: StoredTensor(each, dtype, shape, "model.safetensors", 0, 0) for each, shape in shapes.items()
    }
    return Checkpoint(name, "nowhere", config, tensors, (), (), ())


def forms(base: Checkpoint, **selection: Any) -> dict[str, str]:
    """The form of every tensor."""
    return {name: m.form for m in choose(base, Selection(**selection)) for name in m.tensors}


LLAMA: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (9, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.q_proj.bias": (4,),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.norm.weight": (4,),
    "lm_head.weight": (9, 4),
}


class TestForms:
    def test_a_dense_decoder(self) -> None:
        assert forms(checkpoint(LLAMA, model_type="llama")) == {
            "model.embed_tokens.weight": "whole",
            "model.layers.0.self_attn.q_proj.weight": "linear",
            "model.layers.0.self_attn.q_proj.bias": "bias",
            "model.layers.0.self_attn.q_norm.weight": "whole",
            "model.layers.0.mlp.up_proj.weight": "linear",
            "model.layers.0.input_layernorm.weight": "whole",
            "model.norm.weight": "whole",
            "lm_head.weight": "whole",
        }

    def test_the_rest_can_stay_out(self) -> None:
        chosen = forms(checkpoint(LLAMA, model_type="llama"), rest="skip")
        out = {name for name, form in chosen.items() if form == "out"}
        assert out == {name for name in LLAMA if "norm" in name or name.endswith("bias")}

    @pytest.mark.parametrize(
        ("model_type", "name", "shape", "form"),
        [
            ("deepseek_v3", "model.layers.3.mlp.experts.7.down_proj.weight", (4, 8), "linear"),
            ("deepseek_v3", "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (6, 4), "linear"),
            ("deepseek_v3", "model.layers.3.mlp.gate.weight", (8, 4), "whole"),
            ("deepseek_v3", "model.layers.3.mlp.gate.e_score_correction_bias", (8,), "whole"),
            ("qwen2_moe", "model.layers.3.mlp.shared_expert_gate.weight", (1, 4), "linear"),
            ("mixtral", "model.layers.3.block_sparse_moe.experts.1.w2.weight", (4, 8), "linear"),
            ("qwen3_moe", "model.layers.3.mlp.experts.gate_up_proj", (8, 6, 4), "whole"),
            ("mamba", "backbone.layers.3.mixer.conv1d.weight", (8, 1, 4), "whole"),
            ("t5", "encoder.block.0.layer.0.SelfAttention.q.weight", (4, 4), "linear"),
            ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 2), "whole"),
            ("gpt2", "transformer.h.0.attn.c_attn.weight", (4, 12), "linear"),
            ("llama", "score.weight", (2, 4), "whole"),
            ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (2,), "out"),
        ],
    )
    def test_families(self, model_type: str, name: str, shape: tuple[int, ...], form: str) -> None:
        assert forms(checkpoint({name: shape}, model_type=model_type)) == {name: form}

    def test_a_matrix_with_more_than_a_bias_beside_it_is_saved_whole(self) -> None:
        path = "model.layers.0.mlp.up_proj"
        chosen = forms(checkpoint({f"{path}.weight": (4, 4), f"{path}.gain": (4,)}))
        assert set(chosen.values()) == {"whole"}


class TestSelection:
    @pytest.mark.parametrize(
        ("include", "exclude", "wanted"),
        [
            ((), (), True),
            (("*.v_proj.*",), (), False),
            (("*.v_proj.*", "model.*"), (), True),
            ((), ("*self_attn*",), False),
            (("*.Q_PROJ.*",), (), False),
        ],
    )
    def test_globs(self, include: tuple[str, ...], exclude: tuple[str, ...], wanted: bool) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert Selection(include, exclude).wants(name) == wanted

    def test_a_bias_can_be_excluded_alone(self) -> None:
        chosen = forms(checkpoint(LLAMA), exclude=("*.bias",))
        assert chosen["model.layers.0.self_attn.q_proj.weight"] == "linear"
        assert chosen["model.layers.0.self_attn.q_proj.bias"] == "out"


class TestComparing:
    def problems(self, model: Checkpoint, base: Checkpoint, **selection: Any) -> list[str]:
        chosen = Selection(**selection)
        return [str(problem) for problem in compare(model, base, choose(base, chosen), chosen)]

    def test_codes_saved_whole_are_copied(self) -> None:
        names = {"model.layers.0.mlp.experts.gate_up_proj": (2, 4, 4)}
        assert self.problems(checkpoint(names, DType.U8), checkpoint(names, DType.U8)) == []

    def test_codes_have_no_factors(self) -> None:
        model = checkpoint(LLAMA, DType.F8_E4M3, "tuned")
        found = self.problems(model, checkpoint(LLAMA, name="base"))
        assert len(found) == 2
        assert "is of F8_E4M3, BF16 in base: codes, not plain numbers" in found[0]

    def test_codes_with_scales_are_refused_with_the_way_round(self) -> None:
        q = "model.layers.0.self_attn.q_proj.weight"
        plain = checkpoint(LLAMA, name="base")
        codes = plain.tensors[q]._replace(dtype=DType.F8_E4M3)
        scale = codes._replace(name=f"{q}_scale_inv", dtype=DType.F32, shape=(1, 1))
        coded = replace(plain, name="tuned", tensors={**plain.tensors, q: codes, scale.name: scale})
        (said,) = self.problems(coded, plain)
        assert said.startswith(f"tuned: 1 of its tensors are quantised, such as {q} (fp8_block)")
        assert "raymerge convert MODEL --to bf16 -o OUT" in said
        assert self.problems(coded, coded, exclude=("*.q_proj.*",)) == []

    def test_what_is_left_out_is_not_compared(self) -> None:
        other = {**LLAMA, "model.norm.weight": (5,), "extra.weight": (1,)}
        assert len(self.problems(checkpoint(other), checkpoint(LLAMA))) == 2
        assert self.problems(checkpoint(other), checkpoint(LLAMA), exclude=("model.norm.*", "extra*")) == []
