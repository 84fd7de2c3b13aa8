"""Encoders, encoder-decoders, and models of text and images or sound, cut down: one entry a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from kits.checkpoint_maker import fields
from kits.model_types import (
    IMAGE,
    LAYERS,
    VOCAB,
    Inputs,
    ModelType,
    image,
    image_in_text,
    model_type,
    patches_in_text,
    seq2seq,
    sound,
    spectrogram,
    text,
    text_beside_image,
)
from kits.model_types_decoders import DECODER, EXPERTS, TOKENS

_ENCODER = TOKENS | fields(
    f"vocab_size: {VOCAB}, hidden_size: 32, intermediate_size: 48, num_hidden_layers: {LAYERS}, "
    "num_attention_heads: 4, max_position_embeddings: 64"
)
_SIDES = TOKENS | fields(
    f"vocab_size: {VOCAB}, d_model: 32, encoder_layers: {LAYERS}, decoder_layers: {LAYERS}, "
    "encoder_attention_heads: 4, decoder_attention_heads: 4, encoder_ffn_dim: 48, decoder_ffn_dim: 48, "
    "max_position_embeddings: 64, decoder_start_token_id: 2"
)
_T5 = fields(
    f"vocab_size: {VOCAB}, d_model: 32, d_kv: 8, d_ff: 48, num_layers: {LAYERS}, num_heads: 4, "
    "decoder_start_token_id: 0"
)
_VISION: dict[str, Any] = fields(
    "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "image_size: 16, patch_size: 8, num_channels: 3"
)
_WAVE: dict[str, Any] = fields(
    "conv_dim: [8, 8], conv_kernel: [10, 4], conv_stride: [5, 4], num_feat_extract_layers: 2, "
    "num_conv_pos_embeddings: 4, num_conv_pos_embedding_groups: 2"
)
_PATCHES = fields(
    "depth: 2, hidden_size: 32, num_heads: 4, patch_size: 8, spatial_merge_size: 2, temporal_patch_size: 2"
)
_QWEN_TOKENS = fields(
    f"image_token_id: {IMAGE}, video_token_id: 62, vision_start_token_id: 60, vision_end_token_id: 61"
)
_DEEP = _PATCHES | fields(
    "out_hidden_size: 32, intermediate_size: 48, num_position_embeddings: 16, deepstack_visual_indexes: [0]"
)
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_EMBEDDING: dict[str, Any] = {"embedding_size": 16}


def _encoder(line: str, *, more: str = "", **config: Any) -> ModelType:
    return model_type(f"{line} encoder", text, more=more, **{**_ENCODER, **config})


def _other(line: str, inputs: Callable[[], Inputs] = text, *, more: str = "", **config: Any) -> ModelType:
    return model_type(line, inputs, more=more, **config)


def _two_sided(line: str, *, more: str = "", **config: Any) -> ModelType:
    return model_type(f"{line} encoder-decoder", seq2seq, more=more, **config)


def _seeing(
    line: str,
    inputs: Callable[[], Inputs],
    text_part: Mapping[str, Any],
    vision_part: Mapping[str, Any],
    *,
    more: str = "",
    **config: Any,
) -> ModelType:
    parts = {"text_config": text_part, "vision_config": vision_part}
    return model_type(f"{line} vision-language", inputs, more=more, **config, **parts)


def _text_part(name: str, **config: Any) -> dict[str, Any]:
    return {**DECODER, "model_type": name, **config}


def _vision_part(name: str, **config: Any) -> dict[str, Any]:
    return {**_VISION, "model_type": name, **config}


def _tall_image() -> Inputs:
    return image_in_text(2, {**image(32), "image_sizes": torch.tensor([[32, 16]])})


def _images() -> Inputs:
    return image_in_text(1, {"pixel_values": image()["pixel_values"][None]})


_SIGLIP = _vision_part("siglip_vision_model", projection_dim=32)
_CLIP = _vision_part("clip_vision_model", projection_dim=16)
_ROPE: dict[str, Any] = {"rope_parameters": _MROPE}

ENCODERS = (
    _encoder("bert BertForMaskedLM tied biased"),
    _encoder("roberta RobertaForMaskedLM tied biased"),
    _encoder("xlm-roberta XLMRobertaForMaskedLM tied biased"),
    _encoder("electra ElectraForMaskedLM tied biased", **_EMBEDDING),
    _encoder("convbert ConvBertForMaskedLM tied biased", **_EMBEDDING),
    _encoder("albert AlbertForMaskedLM tied biased", **_EMBEDDING),
    _encoder("mpnet MPNetForMaskedLM tied biased"),
    _encoder("roformer RoFormerForMaskedLM tied biased"),
    _encoder("rembert RemBertForMaskedLM biased", more="input_embedding_size: 16, output_embedding_size: 16"),
    _encoder(
        "deberta DebertaForMaskedLM tied fused-qkv", more="relative_attention: true, pos_att_type: [p2c, c2p]"
    ),
    _encoder(
        "deberta-v2 DebertaV2ForMaskedLM tied biased",
        more="relative_attention: true, pos_att_type: [p2c, c2p], position_buckets: 8, "
        "norm_rel_ebd: layer_norm, share_att_key: true",
    ),
    _encoder(
        "modernbert ModernBertForMaskedLM tied fused-qkv sliding-window",
        more="local_attention: 4, global_attn_every_n_layers: 3",
    ),
    _other(
        "distilbert DistilBertForMaskedLM encoder tied biased",
        more=f"vocab_size: {VOCAB}, dim: 32, hidden_dim: 48, n_layers: {LAYERS}, n_heads: 4, "
        "max_position_embeddings: 64",
    ),
    _other("vit ViTForImageClassification encoder biased vision", image, **_VISION),
    _other("beit BeitForImageClassification encoder vision", image, more="out_indices: [1]", **_VISION),
    _other("dinov2 Dinov2ForImageClassification encoder biased vision", image, **_VISION),
    _other("wav2vec2 Wav2Vec2ForCTC encoder audio", sound, **_ENCODER | _WAVE),
    _other("hubert HubertForCTC encoder audio", sound, **_ENCODER | _WAVE),
)

TWO_SIDED = (
    _two_sided("t5 T5ForConditionalGeneration tied", **_T5),
    _two_sided("mt5 MT5ForConditionalGeneration", **_T5),
    _two_sided("longt5 LongT5ForConditionalGeneration tied", **_T5),
    _two_sided(
        "switch_transformers SwitchTransformersForConditionalGeneration tied",
        more=f"num_decoder_layers: {LAYERS}, num_experts: 4, num_sparse_encoder_layers: 1, "
        "num_sparse_decoder_layers: 1",
        **_T5,
    ),
    _two_sided("bart BartForConditionalGeneration tied biased", **_SIDES),
    _two_sided("mbart MBartForConditionalGeneration tied biased", **_SIDES),
    _two_sided("pegasus PegasusForConditionalGeneration tied biased", **_SIDES),
    _two_sided("m2m_100 M2M100ForConditionalGeneration tied biased", **_SIDES),
    _two_sided(
        "led LEDForConditionalGeneration tied biased",
        more="attention_window: 4, max_encoder_position_embeddings: 64, max_decoder_position_embeddings: 64",
        **{key: value for key, value in _SIDES.items() if key != "max_position_embeddings"},
    ),
    _two_sided(
        "t5gemma T5GemmaForConditionalGeneration tied",
        more=f"vocab_size: {VOCAB}",
        encoder=dict(DECODER),
        decoder=dict(DECODER),
    ),
    _other(
        "whisper WhisperForConditionalGeneration encoder-decoder tied audio",
        spectrogram,
        more="num_mel_bins: 8, max_source_positions: 10, max_target_positions: 64",
        **_SIDES,
    ),
)

SIDE_BY_SIDE = (
    _seeing("clip CLIPModel", text_beside_image, _ENCODER, _VISION, more="projection_dim: 16"),
    _seeing("siglip SiglipModel", text_beside_image, _ENCODER, _VISION),
)

SEEING = (
    _seeing(
        "llava LlavaForConditionalGeneration",
        partial(image_in_text, 4),
        _text_part("llama"),
        _CLIP,
        more=f"image_token_index: {IMAGE}, image_seq_length: 4",
    ),
    _seeing(
        "llava_next LlavaNextForConditionalGeneration",
        text,
        _text_part("mistral"),
        _CLIP,
        more=f"image_token_index: {IMAGE}",
    ),
    _seeing(
        "qwen2_vl Qwen2VLForConditionalGeneration biased",
        patches_in_text,
        _text_part("qwen2_vl_text", **_ROPE),
        {**_PATCHES, "embed_dim": 32, "mlp_ratio": 2},
        **_QWEN_TOKENS,
    ),
    _seeing(
        "qwen2_5_vl Qwen2_5_VLForConditionalGeneration biased",
        patches_in_text,
        _text_part("qwen2_5_vl_text", **_ROPE),
        {
            **_PATCHES,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **_QWEN_TOKENS,
    ),
    _seeing(
        "qwen3_vl Qwen3VLForConditionalGeneration",
        patches_in_text,
        _text_part("qwen3_vl_text", **_ROPE),
        _DEEP,
        **_QWEN_TOKENS,
    ),
    _seeing(
        "qwen3_vl_moe Qwen3VLMoeForConditionalGeneration",
        patches_in_text,
        _text_part("qwen3_vl_moe_text", num_experts=4, **_ROPE, **EXPERTS),
        _DEEP,
        **_QWEN_TOKENS,
    ),
    _seeing(
        "gemma3 Gemma3ForConditionalGeneration tied sliding-window",
        partial(image_in_text, 4),
        _text_part("gemma3_text", sliding_window=4),
        _SIGLIP,
        more=f"image_token_index: {IMAGE}, mm_tokens_per_image: 4, boi_token_index: 61, eoi_token_index: 62",
    ),
    _seeing(
        "paligemma PaliGemmaForConditionalGeneration tied",
        partial(image_in_text, 4),
        _text_part("gemma"),
        _SIGLIP,
        more=f"image_token_index: {IMAGE}, projection_dim: 32",
    ),
    _seeing(
        "mistral3 Mistral3ForConditionalGeneration",
        _tall_image,
        _text_part("mistral"),
        _vision_part("pixtral", head_dim=8, image_size=32),
        more=f"image_token_index: {IMAGE}",
    ),
    _seeing(
        "idefics3 Idefics3ForConditionalGeneration",
        _images,
        _text_part("llama"),
        _vision_part("idefics3_vision"),
        more=f"image_token_id: {IMAGE}, scale_factor: 2",
    ),
    _seeing(
        "internvl InternVLForConditionalGeneration biased",
        partial(image_in_text, 1),
        _text_part("qwen2"),
        _vision_part("internvl_vision", image_size=[16, 16], patch_size=[8, 8]),
        more=f"image_token_id: {IMAGE}, image_seq_length: 1",
    ),
    _seeing(
        "mllama MllamaForConditionalGeneration",
        text,
        _text_part(
            "mllama_text_model",
            cross_attention_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        _vision_part(
            "mllama_vision_model",
            attention_heads=4,
            vision_output_dim=96,
            intermediate_layers_indices=[0, 1],
            num_global_layers=1,
            max_num_tiles=1,
            supported_aspect_ratios=[[1, 1]],
        ),
    ),
    _other(
        "qwen2_audio Qwen2AudioForConditionalGeneration audio biased",
        more="audio_config: {model_type: qwen2_audio_encoder, num_mel_bins: 8, d_model: 32, "
        "encoder_layers: 2, encoder_attention_heads: 4, encoder_ffn_dim: 48, max_source_positions: 10}",
        audio_token_index=IMAGE,
        text_config=_text_part("qwen2"),
    ),
)

OTHERS = (*ENCODERS, *TWO_SIDED, *SIDE_BY_SIDE, *SEEING)
