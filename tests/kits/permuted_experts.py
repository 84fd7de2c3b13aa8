"""Small mixtures of experts in the layouts that are published, and the same with experts and neurons moved.

A model is made as its canonical logical tensors, moved as such, and stored in a family's own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kits.checkpoint_maker import write_checkpoint

Tensors = Mapping[str, torch.Tensor]

WIDTH = 12
NEURONS = 10


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    layout: str
    """``each`` for tensors of single experts, or how they are fused."""
    experts: int = 6
    groups: int = 1
    dense: int = 0
    shared: str = ""
    is_biased: bool = False
    selects: bool = False
    layers: int = 2

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["AnyForCausalLM"],
            "model_type": self.name,
            "num_hidden_layers": self.layers,
            "hidden_size": WIDTH,
            "intermediate_size": 16,
            "moe_intermediate_size": NEURONS,
            "num_experts": self.experts,
            "n_group": self.groups,
            "first_k_dense_replace": self.dense,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


MIXTRAL = Family("mixtral", "mixtral")
QWEN = Family("qwen3_moe", "each")
FUSED = Family("qwen3_moe", "out_in")
LLAMA4 = Family("llama4", "in_out", shared="shared_expert")
GPT_OSS = Family("gpt_oss", "interleaved", is_biased=True)
DBRX = Family("dbrx", "rows")
GRANITE = Family("granitemoehybrid", "linear", shared="shared_mlp")
DEEPSEEK = Family(
    "deepseek_v3", "each", experts=8, groups=4, dense=1, shared="shared_experts", selects=True, layers=3
)
FAMILIES = (MIXTRAL, QWEN, FUSED, LLAMA4, GPT_OSS, DBRX, GRANITE, DEEPSEEK)


def make_model(family: Family, seed: int, *, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {"model.embed_tokens.weight": _normal((8, WIDTH), generator, dtype)}
    for layer in range(family.layers):
        block = f"model.layers.{layer}.mlp"
        if layer < family.dense:
            found |= _network(block, family, generator, dtype)
            continue
        found[f"{block}.gate.weight"] = _normal((family.experts, WIDTH), generator, dtype)
        if family.is_biased:
            found[f"{block}.gate.bias"] = _normal((family.experts,), generator, dtype)
        if family.selects:
            bias = _normal((family.experts,), generator, torch.float32)
            found[f"{block}.gate.e_score_correction_bias"] = bias
        for path in _networks(block, family):
            found |= _network(path, family, generator, dtype)
    found["model.norm.weight"] = _normal((WIDTH,), generator, dtype)
    found["lm_head.weight"] = _normal((8, WIDTH), generator, dtype)
    return found


def moved(
    model: Tensors, family: Family, seed: int, *, experts: bool = True, neurons: bool = True
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = dict(model)
    for layer in range(family.dense, family.layers):
        block = f"model.layers.{layer}.mlp"
        order = expert_order(family, generator) if experts else torch.arange(family.experts)
        for name in (n for n in model if n.startswith(f"{block}.gate.")):
            found[name] = model[name][order]
        for place, path in enumerate(_networks(block, family)):
            origin = f"{block}.experts.{order[place]}" if place < family.experts else path
            own = {name.removeprefix(origin): model[name] for name in model if name.startswith(f"{origin}.")}
            width = len(own[".up_proj.weight"])
            turn = torch.randperm(width, generator=generator) if neurons else torch.arange(width)
            found |= {f"{path}{leaf}": _turned(leaf, value, turn) for leaf, value in own.items()}
    return found


def expert_order(family: Family, generator: torch.Generator) -> torch.Tensor:
    size = family.experts // family.groups
    groups = torch.randperm(family.groups, generator=generator)
    return torch.cat([group * size + torch.randperm(size, generator=generator) for group in groups])


def noisy(model: Tensors, seed: int, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            value.float() + _normal(value.shape, generator, torch.float32) * scale * value.float().std()
        ).to(value.dtype)
        for name, value in model.items()
    }


def store(root: Path, model: Tensors, family: Family, **config: Any) -> Path:
    return write_checkpoint(root, stored(model, family), {**family.config, **config})


def stored(model: Tensors, family: Family) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in model.items() if ".mlp." not in name}
    for layer in range(family.layers):
        block = f"model.layers.{layer}.mlp"
        own = {name.removeprefix(f"{block}."): v for name, v in model.items() if name.startswith(f"{block}.")}
        path = f"model.layers.{layer}.{_BLOCK.get(family.layout, 'mlp')}"
        for name, value in _in_layout(own, family).items() if layer >= family.dense else own.items():
            found[f"{path}.{name}"] = value
    return found


def same_bytes(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


_BLOCK = {
    "mixtral": "block_sparse_moe",
    "in_out": "feed_forward",
    "rows": "ffn",
    "linear": "block_sparse_moe",
}
_ROUTER = {"in_out": "router", "interleaved": "router", "rows": "router.layer", "linear": "router.layer"}


def _normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def _networks(block: str, family: Family) -> list[str]:
    return [*(f"{block}.experts.{e}" for e in range(family.experts)), *_shared(block, family)]


def _shared(block: str, family: Family) -> list[str]:
    return [f"{block}.{family.shared}"] if family.shared else []


def _network(
    path: str, family: Family, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    rows = 2 * NEURONS if path.endswith((".mlp", family.shared or "-")) else NEURONS
    found = {}
    for kind, shape in (("gate", (rows, WIDTH)), ("up", (rows, WIDTH)), ("down", (WIDTH, rows))):
        found[f"{path}.{kind}_proj.weight"] = _normal(shape, generator, dtype)
        if family.is_biased:
            found[f"{path}.{kind}_proj.bias"] = _normal(shape[:1], generator, dtype)
    return found


def _turned(leaf: str, value: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    if ".down_proj" not in leaf:
        return value[turn]
    return value[:, turn] if leaf.endswith("weight") else value


def _in_layout(own: Tensors, family: Family) -> dict[str, torch.Tensor]:
    router = _ROUTER.get(family.layout, "gate")
    found = {
        name.replace("gate.", f"{router}.", 1): value
        for name, value in own.items()
        if name.startswith("gate.")
    }
    shared = {name: value for name, value in own.items() if family.shared and name.startswith(family.shared)}
    if family.layout == "linear" and family.shared:
        rows = [shared[f"{family.shared}.{kind}_proj.weight"] for kind in ("gate", "up")]
        found[f"{family.shared}.input_linear.weight"] = torch.cat(rows)
        found[f"{family.shared}.output_linear.weight"] = shared[f"{family.shared}.down_proj.weight"]
    else:
        found |= shared
    if family.layout in ("each", "mixtral"):
        words = {"gate": "w1", "up": "w3", "down": "w2"} if family.layout == "mixtral" else {}
        for name, value in own.items():
            if name.startswith("experts."):
                kind = name.split(".")[2].removesuffix("_proj")
                found[name.replace(f"{kind}_proj", words.get(kind, f"{kind}_proj"))] = value
        return found
    return found | _fused(own, family)


def _fused(own: Tensors, family: Family) -> dict[str, torch.Tensor]:
    def stack(kind: str, leaf: str = "weight") -> torch.Tensor:
        return torch.stack([own[f"experts.{e}.{kind}_proj.{leaf}"] for e in range(family.experts)])

    gate, up, down = stack("gate"), stack("up"), stack("down")
    if family.layout == "rows":
        names = ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")
        values = (gate.flatten(0, 1), up.flatten(0, 1), down.transpose(1, 2).flatten(0, 1))
        return dict(zip(names, values, strict=True))
    if family.layout == "linear":
        return {"input_linear.weight": torch.cat([gate, up], 1), "output_linear.weight": down}
    joined: Mapping[str, Callable[[], torch.Tensor]] = {
        "out_in": lambda: torch.cat([gate, up], 1),
        "in_out": lambda: torch.cat([gate, up], 1).transpose(1, 2),
        "interleaved": lambda: torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2),
    }
    found = {
        "experts.gate_up_proj": joined[family.layout](),
        "experts.down_proj": down if family.layout == "out_in" else down.transpose(1, 2),
    }
    if family.is_biased:
        both = torch.stack([stack("gate", "bias"), stack("up", "bias")], 2).flatten(1, 2)
        found |= {"experts.gate_up_proj_bias": both, "experts.down_proj_bias": stack("down", "bias")}
    return found
