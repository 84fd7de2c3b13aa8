"""Tiny mixtures of experts of each family as it is published: layouts, prediction layers, float32 biases.

A model is made by transformers with random weights; what transformers leaves out of a checkpoint (layers that
predict further tokens, names of files) is added by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import read_config, read_tensors, write_checkpoint
from kits.float64_merges import Merge
from kits.model_types import ModelType, perturb, text
from kits.model_types_decoders import DECODER, DECODERS, EXPERTS, LATENT

Tensors = Mapping[str, torch.Tensor]
State = dict[str, torch.Tensor]

LAYERS = 4
HIDDEN = 32
DELTA = 0.04
"""Standard deviation of a fine-tune's change; that of the weights is about 0.05."""

_SELECTION = r"correction_bias$|expert_bias$"
_NUM_FILES = 3
_SIX = {"num_experts": 6}
_SIX_NARROW = {"num_experts": 6, "moe_intermediate_size": 24}
_SIX_LOCAL = {"num_local_experts": 6}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}


@dataclass(frozen=True, slots=True)
class Family:
    kind: ModelType
    layout: str = "each"
    """``each`` expert by itself, or how experts are stored together: ``out_in``, ``in_out``, ``interleaved``,
    ``rows``."""
    num_experts: int = 6
    prediction: str = ""
    """Path of its layer that predicts further tokens; "" without."""
    float32: str = _SELECTION
    """Pattern of the tensors that stay in float32 where all others are in bfloat16."""

    @property
    def name(self) -> str:
        return self.kind.name

    def loaded(self) -> str:
        return "out_in" if self.layout == "each" else self.layout

    def with_config(self, **config: Any) -> Family:
        return replace(self, kind=replace(self.kind, config={**self.kind.config, **config}))


@dataclass(frozen=True, slots=True)
class Parent:
    root: Path
    state: State


@dataclass(frozen=True, slots=True)
class Ancestry:
    family: Family
    parents: tuple[Parent, ...]
    model: torch.nn.Module

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(str(parent.root) for parent in self.parents)


def make_ancestry(family: Family, root: Path, *, fine_tunes: int = 2) -> Ancestry:
    model = family.kind.build(1)
    parents = []
    for number in range(1 + fine_tunes):
        if number:
            perturb(model, 100 + number, scale=DELTA)
        parents.append(_save(family, model, root / f"model{number}", seed=200 + number))
    return Ancestry(family, tuple(parents), model)


def fused(model: torch.nn.Module, state: Tensors, root: Path) -> Path:
    model.load_state_dict(dict(state))
    model.save_pretrained(root, save_original_format=False)  # type: ignore[operator]
    return root


def in_bfloat16(root: Path, family: Family, target: Path) -> Path:
    tensors = {
        name: tensor if re.search(family.float32, name) else tensor.bfloat16()
        for name, tensor in read_tensors(root).items()
    }
    return write_checkpoint(target, tensors, {**read_config(root), "dtype": "bfloat16"}, files=_NUM_FILES)


def by_expert(root: Path, family: Family, target: Path) -> Path:
    return write_checkpoint(
        target, taken_apart(read_tensors(root), family), read_config(root), files=_NUM_FILES
    )


def taken_apart(tensors: Tensors, family: Family) -> State:
    found: State = {}
    for name, tensor in tensors.items():
        singles = dict(single_experts(name, tensor, family))
        found |= singles or {name: tensor}
    return found


def single_experts(name: str, tensor: torch.Tensor, family: Family) -> Iterable[tuple[str, torch.Tensor]]:
    found = pieces(name, tensor, family.layout, family.num_experts)
    if len(found) == 1:
        return
    block, _, word = name.removesuffix("_bias").removesuffix(".weight").rpartition(".")
    block = block.removesuffix(".mlp").removesuffix(".experts")
    leaf = "bias" if name.endswith("_bias") else "weight"
    projections = _PROJECTIONS[word]
    for number, piece in enumerate(found):
        expert, projection = divmod(number, len(projections))
        is_turned = family.layout in ("in_out", "interleaved") or word == "w2"
        matrix = piece.T if is_turned and leaf == "weight" else piece
        yield f"{block}.experts.{expert}.{projections[projection]}_proj.{leaf}", matrix.contiguous()


_PROJECTIONS: Mapping[str, Sequence[str]] = {
    "gate_up_proj": ("gate", "up"),
    "input_linear": ("gate", "up"),
    "down_proj": ("down",),
    "output_linear": ("down",),
    "w1": ("gate",),
    "v1": ("up",),
    "w2": ("down",),
}
_FUSED = re.compile(
    r"\.experts\.(gate_up|up|down)_proj(_bias)?$|\.experts\.mlp\.(w1|v1|w2)$"
    r"|block_sparse_moe\.(in|out)put_linear\.weight$"
)


def pieces(name: str, tensor: torch.Tensor, layout: str, num_experts: int) -> Sequence[torch.Tensor]:
    """Views of the matrices and biases in a tensor, expert by expert, gate before up; itself if not fused."""
    if not _FUSED.search(name):
        return (tensor,)
    if layout == "rows":
        return tensor.chunk(num_experts)
    if not re.search(r"gate_up|input_linear", name):
        return tensor.unbind()
    return [half for expert in tensor for half in _halves(expert, layout)]


def _halves(expert: torch.Tensor, layout: str) -> tuple[torch.Tensor, ...]:
    if layout == "interleaved":
        return expert[..., 0::2], expert[..., 1::2]
    return expert.chunk(2, dim=-1 if layout == "in_out" else 0)


def merged_states(
    states: Sequence[Mapping[str, torch.Tensor]], merge: Merge, *, layout: str, num_experts: int
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            found[name] = first
            continue
        parents = [state[name].double() for state in states]
        found[name] = result = parents[0].clone()
        split = [pieces(name, parent, layout, num_experts) for parent in (result, *parents)]
        for target, *members in zip(*split, strict=True):
            target.copy_(torch.from_numpy(merge([each.numpy() for each in members])[0]))
    return found


def _save(family: Family, model: torch.nn.Module, root: Path, *, seed: int) -> Parent:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(root)  # type: ignore[operator]
    if family.prediction:
        tensors, config = read_tensors(root), read_config(root)
        (root / "model.safetensors").unlink()
        made = _prediction(tensors, family.prediction)
        added = perturb(torch.nn.ParameterDict(_dotless(made)).requires_grad_(False), seed, scale=DELTA)
        tensors |= {name.replace("/", "."): tensor for name, tensor in added.state_dict().items()}
        write_checkpoint(root, tensors, {**config, "num_nextn_predict_layers": 1}, files=_NUM_FILES)
    return Parent(root, state)


def _dotless(tensors: Tensors) -> State:
    return {name.replace(".", "/"): tensor for name, tensor in tensors.items()}


def _prediction(tensors: Tensors, path: str) -> State:
    last = f"model.layers.{LAYERS - 1}."
    norm, table = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    joint = torch.zeros(HIDDEN, 2 * HIDDEN)
    if path == "mtp":
        ends = {"norm": norm, "pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm, "fc": joint}
        block = "mtp.layers.0"
    else:
        ends = {"enorm": norm, "hnorm": norm, "shared_head.norm": norm, "eh_proj": joint}
        ends |= {"embed_tokens": table, "shared_head.head": tensors["lm_head.weight"]}
        block = path
    found = {f"{path}.{name}.weight": tensor.clone() for name, tensor in ends.items()}
    layer = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    return found | {f"{block}.{name}": tensor.clone() for name, tensor in layer.items()}


def _published(
    name: str,
    config: Mapping[str, Any],
    layout: str = "each",
    *,
    experts: int = 6,
    prediction: str = "",
    float32: str = _SELECTION,
) -> Family:
    kind = next(kind for kind in DECODERS if kind.name == name)
    depth = {"n_layers" if name == "dbrx" else "num_hidden_layers": LAYERS}
    kind = replace(kind, config={**kind.config, **depth, **config})
    return Family(kind, layout, experts, prediction, float32)


def _further(name: str, architecture: str, config: Mapping[str, Any]) -> Family:
    sizes = {**DECODER, **EXPERTS, "num_hidden_layers": LAYERS, **config}
    return Family(ModelType(name, architecture, sizes, frozenset({"decoder"})))


def _seeing_llama4() -> Family:
    words = {**DECODER, "intermediate_size_mlp": 48, "num_local_experts": 6, "num_experts_per_tok": 1}
    layers = {"num_hidden_layers": LAYERS, "interleave_moe_layer_step": 2, "attention_chunk_size": 8}
    tower = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"image_size": 16, "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32}
    config = {"text_config": words | layers, "vision_config": tower | sizes | {"projector_output_dim": 32}}
    kind = ModelType("llama4", "Llama4ForConditionalGeneration", config, frozenset({"vision-language"}), text)
    return Family(kind, "in_out")


_DBRX = {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2, "hidden_size": HIDDEN}
_TURNS = ["linear_attention", "full_attention"] * 2
_LAST = ["linear_attention"] * 3 + ["full_attention"]
_FOURTH = f"model.layers.{LAYERS}"

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _published("mixtral", _SIX_LOCAL),
        _published("qwen2_moe", {**_SIX_NARROW, "mlp_only_layers": [0]}),
        _published("qwen3_moe", {**_SIX_NARROW, "decoder_sparse_step": 2}),
        _published("deepseek_v2", {**_GROUPED, "topk_method": "group_limited_greedy"}, experts=8),
        _published("deepseek_v3", _GROUPED, experts=8, prediction=_FOURTH),
        _published("glm4_moe", {"n_routed_experts": 6}, prediction=_FOURTH),
        _published("gpt_oss", _SIX_LOCAL, "interleaved"),
        _published("llama4_text", _SIX_LOCAL, "in_out"),
        _seeing_llama4(),
        _published("olmoe", _SIX),
        _published("granitemoe", _SIX_LOCAL, "out_in"),
        _published("dbrx", {"ffn_config": _DBRX}, "rows"),
        _published("jamba", _SIX, float32=r"A_log$|\.D$"),
        _published("minimax", {**_SIX_LOCAL, "layer_types": _TURNS}),
        _published("minimax_m2", _SIX_LOCAL),
        _published("phimoe", _SIX_LOCAL),
        _published("qwen3_next", {**_SIX_NARROW, "layer_types": _LAST}, prediction="mtp"),
        _published("granitemoehybrid", {**_SIX_LOCAL, "layer_types": ["mamba", "attention"] * 2}, "out_in"),
        _published("hunyuan_v1_moe", _SIX, float32=r"\.gate\.wg\."),
        _published("ernie4_5_moe", {"moe_num_experts": 6}, float32=rf"{_SELECTION}|\.mlp\.gate\."),
        _published("lfm2_moe", {**_SIX, "layer_types": ["conv", "full_attention"] * 2}),
        _published("flex_olmo", _SIX),
    )
}

_ROUTED = {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_DENSE_FIRST = {**_ROUTED, "first_k_dense_replace": 1}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
_COMPRESSED = {
    **_INDEXER,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "hc_mult": 2,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "num_key_value_heads": 1,
}
_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, **_HEADS, "layer_types": _LAST}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4}

FURTHER: Mapping[str, Family] = {
    family.name: family
    for family in (
        _further("dots1", "Dots1ForCausalLM", _DENSE_FIRST),
        _further("deepseek_v32", "DeepseekV32ForCausalLM", {**_DENSE_FIRST, **LATENT, **_INDEXER}),
        _further("deepseek_v4", "DeepseekV4ForCausalLM", {**_ROUTED, **_COMPRESSED}),
        _further("glm4_moe_lite", "Glm4MoeLiteForCausalLM", {**_DENSE_FIRST, **LATENT}),
        _further(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            {**_SIX, **_LINEAR, "shared_expert_intermediate_size": 24},
        ),
        _further("exaone_moe", "ExaoneMoeForCausalLM", _SIX),
        _further("afmoe", "AfmoeForCausalLM", {**_SIX, **_SIX_LOCAL, "num_dense_layers": 1}),
        _further("hy_v3", "HYV3ForCausalLM", _SIX),
        _further("solar_open", "SolarOpenForCausalLM", _ROUTED),
        _further("mimo_v2_flash", "MiMoV2FlashForCausalLM", _ROUTED),
        _further(
            "nemotron_h",
            "NemotronHForCausalLM",
            {
                **_ROUTED,
                **_MAMBA,
                "hybrid_override_pattern": "M*-E",
                "moe_shared_expert_intermediate_size": 24,
            },
        ),
    )
}

AncestryOf = Callable[[str], Ancestry]
