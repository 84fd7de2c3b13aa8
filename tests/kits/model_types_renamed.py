"""Families that transformers holds by other names than the Hub's, cut down: one entry a family."""

from __future__ import annotations

from typing import Any

from kits.checkpoint_maker import fields
from kits.model_types import ModelType, image, model_type, text
from kits.model_types_decoders import DECODER, EXPERTS, LATENT

_GROUPS = "n_group: 1, topk_group: 1"
_ROUTED: dict[str, Any] = EXPERTS | fields(f"n_routed_experts: 4, n_shared_experts: 1, {_GROUPS}")
_DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_INDEXED: dict[str, Any] = LATENT | fields("index_topk: 4, index_head_dim: 8, index_n_heads: 2")
_TURNS = fields("layer_types: [linear_attention, full_attention, linear_attention]")
_LINEAR = fields("linear_head_dim: 8, linear_num_heads: 4, linear_conv_kernel_dim: 4")
_DELTA = fields(
    "linear_key_head_dim: 8, linear_value_head_dim: 8, linear_num_key_heads: 4, linear_num_value_heads: 4"
)
_PATCHES = (
    "depth: 2, hidden_size: 32, num_heads: 4, intermediate_size: 48, out_hidden_size: 32, patch_size: 8, "
    "image_size: 16, spatial_merge_size: 2, temporal_patch_size: 2"
)
_IMAGES = "image_token_id: 63, video_token_id: 62, tie_word_embeddings: false"
_FOUR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_SECOND = "first_k_dense_replace: 1"


def _text(line: str, *parts: dict[str, Any], more: str = "") -> ModelType:
    config = dict(DECODER)
    for part in parts:
        config |= part
    return model_type(line, text, more=more, **config)


def _seeing(
    line: str, name: str, text_part: dict[str, Any], vision: str, *, more: str = _IMAGES
) -> ModelType:
    parts = {"text_config": {**DECODER, "model_type": name, **text_part}, "vision_config": fields(vision)}
    return model_type(line, text, more=more, **parts)


_TOWER = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
_IMAGE = _TOWER + "image_size: 16, patch_size: 8"
_SOUND = fields(
    _TOWER + "head_dim: 8, num_mel_bins: 8, max_source_positions: 10, max_position_embeddings: 10"
)


def _hearing(line: str, audio: str, text_name: str) -> ModelType:
    parts = {
        "text_config": {**DECODER, "model_type": text_name},
        "audio_config": {**_SOUND, "model_type": audio},
    }
    return model_type(line, text, more="audio_token_id: 63, tie_word_embeddings: false", **parts)


RENAMED = (
    _text("hy_v3 HYV3ForCausalLM", EXPERTS, _DENSE_FIRST, more="num_experts: 4, num_shared_experts: 1"),
    _text(
        "laguna LagunaForCausalLM",
        EXPERTS,
        _DENSE_FIRST,
        more="num_experts: 4, shared_expert_intermediate_size: 24, sliding_window: 4",
    ),
    _text(
        "mimo_v2_flash MiMoV2FlashForCausalLM",
        _ROUTED,
        _DENSE_FIRST,
        more="v_head_dim: 8, sliding_window: 4, "
        "layer_types: [full_attention, sliding_attention, full_attention]",
    ),
    _text(
        "nemotron_h NemotronHForCausalLM",
        _ROUTED,
        more="layers_block_type: [mamba, attention, moe, mlp], mamba_num_heads: 4, mamba_head_dim: 8, "
        "ssm_state_size: 8, n_groups: 1, chunk_size: 4, moe_shared_expert_intermediate_size: 24, "
        "num_hidden_layers: 4",
    ),
    _text(
        "deepseek_v4 DeepseekV4ForCausalLM",
        _ROUTED,
        more="num_key_value_heads: 1, head_dim: 16, q_lora_rank: 16, o_groups: 2, o_lora_rank: 8, "
        "index_n_heads: 2, index_head_dim: 8, index_topk: 4, hc_mult: 2, sliding_window: 4, "
        "partial_rotary_factor: 0.25, num_hidden_layers: 4, num_nextn_predict_layers: 0, "
        "layer_types: [sliding_attention, compressed_sparse_attention, heavily_compressed_attention, "
        "compressed_sparse_attention], mlp_layer_types: [hash_moe, moe, moe, moe]",
    ),
    _text(
        "kimi_linear KimiLinearForCausalLM",
        EXPERTS,
        LATENT,
        _DENSE_FIRST,
        _TURNS,
        _LINEAR,
        more="num_local_experts: 4, q_lora_rank: null",
    ),
    _seeing(
        "glm5_next Glm5NextForConditionalGeneration",
        "glm5_next_text",
        _ROUTED
        | _INDEXED
        | _DENSE_FIRST
        | _LINEAR
        | _TURNS
        | {"qk_rope_head_dim": 0, "hc_mult": 2, "index_kpool": 2},
        _PATCHES + ", projection_intermediate_size: 48",
    ),
    _seeing(
        "kimi_k25 Kimi_K25ForConditionalGeneration",
        "deepseek_v3",
        _ROUTED | LATENT | fields(_SECOND),
        "patch_size: 8, pos_emb_height: 4, pos_emb_width: 4, pos_emb_time: 2, num_attention_heads: 4, "
        "num_hidden_layers: 2, hidden_size: 32, intermediate_size: 48",
        more=_IMAGES + ", projection_hidden_size: 32",
    ),
    _seeing(
        "mistral_large4 MistralLarge4ForConditionalGeneration",
        "mistral_large4_text",
        _ROUTED | _INDEXED | fields(_SECOND),
        "model_type: pixtral, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
        "num_attention_heads: 4, image_size: 16, patch_size: 8, head_dim: 8",
        more="image_token_index: 63",
    ),
    _seeing(
        "qwen3_5_moe Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text",
        EXPERTS | _TURNS | _DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 24},
        _PATCHES + ", num_position_embeddings: 16, deepstack_visual_indexes: [0]",
    ),
    _seeing(
        "minimax_m3_vl MiniMaxM3SparseForConditionalGeneration",
        "minimax_m3_vl_text",
        _DENSE_FIRST
        | fields(
            "num_local_experts: 4, num_experts_per_tok: 2, dense_intermediate_size: 48, index_head_dim: 8, "
            "shared_intermediate_size: 24, index_n_heads: 2, rotary_dim: 8, "
            "layer_types: [full_attention, minimax_m3_sparse, full_attention]"
        ),
        "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
        "image_size: 16, patch_size: 8",
        more="image_token_index: 63, video_token_index: 62",
    ),
    _seeing(
        "step3p7 Step3p7ForConditionalGeneration",
        "step3p5",
        EXPERTS
        | _DENSE_FIRST
        | fields("num_local_experts: 4, n_routed_experts: 4, share_expert_dim: 24, sliding_window: 4"),
        "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
        "image_size: 16, patch_size: 8, mlp_ratio: 1.5, max_position_embeddings: 4",
        more="image_token_id: 63",
    ),
    _text(
        "exaone_moe ExaoneMoeForCausalLM",
        EXPERTS,
        more=_SECOND + f", num_experts: 4, num_shared_experts: 1, {_GROUPS}, sliding_window: 4",
    ),
    _text("solar_open SolarOpenForCausalLM", _ROUTED, more=_SECOND),
    _text("dots1 Dots1ForCausalLM", _ROUTED, more=_SECOND),
    _text(
        "afmoe AfmoeForCausalLM",
        EXPERTS,
        more=f"num_experts: 4, num_shared_experts: 1, num_dense_layers: 1, sliding_window: 4, {_GROUPS}",
    ),
    _text("glm4_moe_lite Glm4MoeLiteForCausalLM", _ROUTED, LATENT, more=_SECOND),
    _text("glm_moe_dsa GlmMoeDsaForCausalLM", _ROUTED, _INDEXED, more=_SECOND),
    _text("deepseek_v32 DeepseekV32ForCausalLM", _ROUTED, _INDEXED, more=_SECOND),
    _text("cohere2_moe Cohere2MoeForCausalLM", _FOUR, more="first_k_dense_replace: 1, sliding_window: 4"),
    _text(
        "longcat_flash LongcatFlashForCausalLM",
        LATENT,
        more="n_routed_experts: 4, zero_expert_num: 2, moe_topk: 2, expert_ffn_hidden_size: 24, "
        "ffn_hidden_size: 48, num_layers: 2, num_hidden_layers: 4",
    ),
    _text("axk1 AXK1ForCausalLM", _ROUTED, LATENT, more=_SECOND),
    _text("axk2 AXK2ForCausalLM", _ROUTED, LATENT, more=_SECOND),
    _text(
        "bailing_hybrid BailingHybridForCausalLM",
        EXPERTS,
        LATENT,
        more=_SECOND + f", num_experts: 4, num_shared_experts: 1, {_GROUPS}",
    ),
    _text("flint FlintForCausalLM", EXPERTS, more="num_experts: 4, n_routed_experts: 4"),
    _text("kolibri1 Kolibri1ForCausalLM", EXPERTS, more="num_experts: 4, n_routed_experts: 4"),
    _text("mellum MellumForCausalLM", EXPERTS, more="num_experts: 4"),
    _text("hy_v4 HYV4ForCausalLM", _ROUTED),
    _text("olmo_hybrid OlmoHybridForCausalLM", _TURNS, _DELTA),
    model_type("deit DeiTForImageClassification", image, more=_IMAGE),
    model_type("dinov2_with_registers Dinov2WithRegistersForImageClassification", image, more=_IMAGE),
    *(
        _seeing(
            f"{name} {architecture}ForConditionalGeneration",
            "llama",
            {},
            "model_type: clip_vision_model, " + _IMAGE,
            more="image_token_index: 63, tie_word_embeddings: false",
        )
        for name, architecture in (
            ("llava_next_video", "LlavaNextVideo"),
            ("llava_onevision", "LlavaOnevision"),
        )
    ),
    _hearing("voxtral VoxtralForConditionalGeneration", "voxtral_encoder", "llama"),
    _hearing(
        "voxtral_realtime VoxtralRealtimeForConditionalGeneration",
        "voxtral_realtime_encoder",
        "voxtral_realtime_text",
    ),
    _hearing("audioflamingo3 AudioFlamingo3ForConditionalGeneration", "audioflamingo3_encoder", "qwen2"),
    _hearing("musicflamingo MusicFlamingoForConditionalGeneration", "audioflamingo3_encoder", "qwen2"),
    _hearing("glmasr GlmAsrForConditionalGeneration", "glmasr_encoder", "llama"),
)
