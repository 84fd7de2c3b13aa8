"""Decoders of text, cut down: one entry a family, as ``model_type`` reads it."""

from __future__ import annotations

from typing import Any

from kits.checkpoint_maker import fields
from kits.model_types import LAYERS, VOCAB, ModelType, model_type, text

TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = f"vocab_size: {VOCAB}, hidden_size: 32, num_hidden_layers: {LAYERS}"
DECODER: dict[str, Any] = TOKENS | fields(
    f"{_SIZES}, intermediate_size: 48, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, "
    "max_position_embeddings: 64"
)
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = fields(
    "kv_lora_rank: 16, q_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8, "
    "num_key_value_heads: 4, head_dim: 4"
)
_GPT = TOKENS | fields(f"vocab_size: {VOCAB}, n_embd: 32, n_layer: {LAYERS}, n_head: 4, n_positions: 64")
_ROUTED = EXPERTS | fields("n_routed_experts: 4, n_shared_experts: 1, n_group: 1, topk_group: 1")
_TURNS = ["linear_attention", "full_attention", "linear_attention"]
_LINEAR: dict[str, Any] = {"layer_types": _TURNS} | fields(
    "linear_key_head_dim: 8, linear_value_head_dim: 8, linear_num_key_heads: 2, linear_num_value_heads: 4"
)
_FOUR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
_FOUR_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = fields(
    "mamba_n_heads: 4, mamba_d_head: 16, mamba_d_state: 8, mamba_n_groups: 1, mamba_chunk_size: 4"
)
_STATES = TOKENS | fields(f"{_SIZES}, state_size: 4")
_WINDOW: dict[str, Any] = {"sliding_window": 4}
_CONV = ["conv", "full_attention", "conv"]


def _usual(line: str, *, more: str = "", **config: Any) -> ModelType:
    return _own(line, more=more, **{**DECODER, **config})


def _own(line: str, *, more: str = "", **config: Any) -> ModelType:
    return model_type(f"{line} decoder", text, more=more, **config)


DENSE = (
    _usual("llama LlamaForCausalLM"),
    _usual("mistral MistralForCausalLM sliding-window", **_WINDOW),
    _usual(
        "qwen2 Qwen2ForCausalLM biased sliding-window",
        more="use_sliding_window: true, max_window_layers: 1",
        **_WINDOW,
    ),
    _usual("qwen3 Qwen3ForCausalLM tied", more="tie_word_embeddings: true"),
    _usual("olmo OlmoForCausalLM"),
    _usual("olmo2 Olmo2ForCausalLM"),
    _usual("olmo3 Olmo3ForCausalLM sliding-window", **_WINDOW),
    _usual("granite GraniteForCausalLM tied", more="tie_word_embeddings: true"),
    _usual("gemma GemmaForCausalLM tied"),
    _usual("gemma2 Gemma2ForCausalLM tied sliding-window", **_WINDOW),
    _usual("gemma3_text Gemma3ForCausalLM tied sliding-window", **_WINDOW),
    _usual("phi PhiForCausalLM biased"),
    _usual("phi3 Phi3ForCausalLM fused-qkv sliding-window", **_WINDOW),
    _usual("stablelm StableLmForCausalLM biased", more="use_qkv_bias: true, qk_layernorm: true"),
    _usual("starcoder2 Starcoder2ForCausalLM tied biased sliding-window", **_WINDOW),
    _usual("cohere CohereForCausalLM tied", more="use_qk_norm: true"),
    _usual("cohere2 Cohere2ForCausalLM tied sliding-window", **_WINDOW),
    _usual("glm GlmForCausalLM biased"),
    _usual("glm4 Glm4ForCausalLM"),
    _usual("nemotron NemotronForCausalLM"),
    _usual("persimmon PersimmonForCausalLM biased fused-qkv"),
    _usual("hunyuan_v1_dense HunYuanDenseV1ForCausalLM"),
    _usual("smollm3 SmolLM3ForCausalLM tied", more="no_rope_layers: [1, 1, 0]"),
    _usual("ernie4_5 Ernie4_5ForCausalLM tied"),
    _usual(
        "exaone4 Exaone4ForCausalLM sliding-window",
        more="layer_types: [sliding_attention, full_attention, sliding_attention]",
        **_WINDOW,
    ),
    _usual("arcee ArceeForCausalLM"),
    _usual("apertus ApertusForCausalLM"),
    _usual("helium HeliumForCausalLM"),
    _usual("diffllama DiffLlamaForCausalLM"),
    _usual("nanochat NanoChatForCausalLM"),
    _usual("modernbert-decoder ModernBertDecoderForCausalLM tied"),
    _usual("gpt_neox GPTNeoXForCausalLM biased fused-qkv"),
    _own("gpt2 GPT2LMHeadModel tied biased fused-qkv", **_GPT),
    _own("gpt_bigcode GPTBigCodeForCausalLM tied fused-qkv", **_GPT),
    _own("gptj GPTJForCausalLM biased", more="rotary_dim: 4", **_GPT),
    _own(
        "gpt_neo GPTNeoForCausalLM tied sliding-window",
        more=f"vocab_size: {VOCAB}, hidden_size: 32, intermediate_size: 48, num_layers: 4, num_heads: 4, "
        "attention_types: [[[global, local], 2]], window_size: 4, max_position_embeddings: 64",
    ),
    _own(
        "opt OPTForCausalLM tied biased",
        more=f"vocab_size: {VOCAB}, hidden_size: 32, ffn_dim: 48, num_hidden_layers: {LAYERS}, "
        "num_attention_heads: 4, max_position_embeddings: 64, word_embed_proj_dim: 16, "
        "do_layer_norm_before: false",
    ),
    _own(
        "bloom BloomForCausalLM tied biased fused-qkv",
        more=f"vocab_size: {VOCAB}, hidden_size: 32, n_layer: {LAYERS}, n_head: 4",
    ),
    _own(
        "falcon FalconForCausalLM tied fused-qkv",
        more=f"vocab_size: {VOCAB}, hidden_size: 32, num_hidden_layers: {LAYERS}, num_attention_heads: 4, "
        "num_kv_heads: 2, new_decoder_architecture: true",
    ),
    _own(
        "mpt MptForCausalLM tied fused-qkv",
        more=f"vocab_size: {VOCAB}, d_model: 32, n_layers: {LAYERS}, n_heads: 4, max_seq_len: 64, "
        "expansion_ratio: 2",
    ),
    _own(
        "xglm XGLMForCausalLM tied biased",
        more=f"vocab_size: {VOCAB}, d_model: 32, ffn_dim: 48, num_layers: {LAYERS}, attention_heads: 4, "
        "max_position_embeddings: 64",
    ),
    _usual("biogpt BioGptForCausalLM tied biased"),
)

SPARSE = (
    _usual("qwen2_moe Qwen2MoeForCausalLM biased", more="shared_expert_intermediate_size: 24", **_FOUR),
    _usual("qwen3_moe Qwen3MoeForCausalLM", more="num_experts: 4", **EXPERTS),
    _usual(
        "qwen3_next Qwen3NextForCausalLM",
        more="num_experts: 4, shared_expert_intermediate_size: 24",
        **_LINEAR,
        **EXPERTS,
    ),
    _usual("mixtral MixtralForCausalLM", more="num_local_experts: 4"),
    _usual("deepseek_v2 DeepseekV2ForCausalLM", more="first_k_dense_replace: 1", **_ROUTED, **LATENT),
    _usual("deepseek_v3 DeepseekV3ForCausalLM", more="first_k_dense_replace: 1", **_ROUTED, **LATENT),
    _usual("olmoe OlmoeForCausalLM", **_FOUR),
    _usual("flex_olmo FlexOlmoForCausalLM", **_FOUR),
    _usual("granitemoe GraniteMoeForCausalLM", **_FOUR_LOCAL),
    _usual(
        "granitemoehybrid GraniteMoeHybridForCausalLM",
        more="shared_intermediate_size: 24, layer_types: [mamba, attention, mamba]",
        **_FOUR_LOCAL,
        **_MAMBA,
    ),
    _usual("glm4_moe Glm4MoeForCausalLM", more="first_k_dense_replace: 1", **_ROUTED),
    _usual("gpt_oss GptOssForCausalLM biased sliding-window", **_FOUR_LOCAL, **_WINDOW),
    _usual(
        "lfm2_moe Lfm2MoeForCausalLM",
        more="num_experts: 4, num_dense_layers: 1",
        layer_types=_CONV,
        **EXPERTS,
    ),
    _own(
        "dbrx DbrxForCausalLM fused-qkv",
        more=f"vocab_size: {VOCAB}, d_model: 32, n_heads: 4, n_layers: {LAYERS}, max_seq_len: 64, "
        f"attn_config: {{kv_n_heads: 2, clip_qkv: 8.0, rope_theta: 10000.0}}, "
        f"ffn_config: {{ffn_hidden_size: 24, moe_num_experts: 4, moe_top_k: 2, hidden_size: 32}}",
    ),
    _usual(
        "phimoe PhimoeForCausalLM biased",
        more="num_local_experts: 4, attention_bias: true, lm_head_bias: true",
    ),
    _usual("minimax MiniMaxForCausalLM", more="num_local_experts: 4, block_size: 4", layer_types=_TURNS),
    _usual("minimax_m2 MiniMaxM2ForCausalLM", **_FOUR_LOCAL),
    _usual("hunyuan_v1_moe HunYuanMoEV1ForCausalLM", more="num_experts: 4, moe_topk: 2"),
    _usual(
        "ernie4_5_moe Ernie4_5_MoeForCausalLM",
        more="moe_num_experts: 4, moe_k: 2, moe_intermediate_size: 24, moe_num_shared_experts: 1, "
        "moe_layer_start_index: 1",
    ),
    _usual(
        "llama4_text Llama4ForCausalLM",
        more="num_local_experts: 4, intermediate_size_mlp: 48, interleave_moe_layer_step: 2, "
        "attention_chunk_size: 8",
    ),
)

RECURRENT = (
    _own("mamba MambaForCausalLM tied", more="time_step_rank: 4", **_STATES),
    _own("mamba2 Mamba2ForCausalLM", more="num_heads: 8, head_dim: 8, n_groups: 1, chunk_size: 4", **_STATES),
    _usual("falcon_h1 FalconH1ForCausalLM", more="mamba_d_ssm: 32", **_MAMBA | {"mamba_d_head": 8}),
    _usual("bamba BambaForCausalLM", more="attn_layer_indices: [1]", **_MAMBA),
    _usual(
        "nemotron_h NemotronHForCausalLM",
        more="hybrid_override_pattern: 'M*-', mamba_num_heads: 4, mamba_head_dim: 8, ssm_state_size: 8, "
        "n_groups: 1, chunk_size: 4",
    ),
    _usual(
        "recurrent_gemma RecurrentGemmaForCausalLM tied sliding-window",
        more="lru_width: 32, attention_window_size: 4, block_types: [recurrent, recurrent, attention]",
    ),
    _usual("lfm2 Lfm2ForCausalLM tied", layer_types=_CONV),
    _own(
        "rwkv RwkvForCausalLM",
        more=f"vocab_size: {VOCAB}, hidden_size: 32, num_hidden_layers: {LAYERS}, context_length: 64",
    ),
)

BOUND = (
    _usual(
        "jamba JambaForCausalLM",
        more="mamba_d_state: 4, mamba_dt_rank: 4, attn_layer_period: 2, attn_layer_offset: 1, "
        "expert_layer_period: 2, expert_layer_offset: 1, use_mamba_kernels: false",
        **_FOUR,
    ),
    _usual(
        "zamba2 Zamba2ForCausalLM",
        more="mamba_d_state: 4, n_mamba_heads: 4, mamba_ngroups: 1, chunk_size: 4, adapter_rank: 4, "
        "layers_block_type: [mamba, hybrid, mamba], attention_head_dim: 8, num_mem_blocks: 1",
    ),
)

DECODERS = (*DENSE, *SPARSE, *RECURRENT, *BOUND)
