"""Small real checkpoints, and big ones of which only the headers are real."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from raymerge.checkpoints.header import FileLayout, TensorSpec, lay_out, shard_names, weight_map_json

TOKENIZER_FILES: Mapping[str, str] = {
    "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}\n',
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}\n',
    "special_tokens_map.json": '{"bos_token": "<s>", "eos_token": "</s>"}\n',
    "generation_config.json": '{"bos_token_id": 1, "eos_token_id": 2}\n',
}
"""Companion files that look as a tokenizer's do; raymerge copies them without reading."""


def fields(text: str) -> dict[str, Any]:
    """Fields of a config, as YAML has them within braces."""
    found: dict[str, Any] = yaml.safe_load(f"{{{text}}}")
    return found


def index_json(layouts: Sequence[FileLayout], names: Sequence[str]) -> bytes:
    weight_map = {
        tensor.name: name for layout, name in zip(layouts, names, strict=True) for tensor in layout.tensors
    }
    return weight_map_json(weight_map, sum(layout.nbytes - layout.data_start for layout in layouts))


def write_checkpoint(
    root: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    files: int = 1,
    extra: Mapping[str, str | bytes] | None = None,
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    names = shard_names(files)
    weight_map: dict[str, str] = {}
    for number, file in enumerate(names):
        # Clones, because safetensors refuses tensors that share memory, as a test's may.
        members = {name: tensors[name].contiguous().clone() for name in sorted(tensors)[number::files]}
        save_file(members, root / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    if files > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        write_json(
            root / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    write_json(root / "config.json", config)
    for key, content in (extra or {}).items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def llama_config(
    *,
    layers: int = 3,
    hidden: int = 32,
    vocab: int = 64,
    tie: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": tie,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.post_attention_layernorm.weight": (hidden,),
            f"{block}.self_attn.q_proj.weight": (hidden, hidden),
            f"{block}.self_attn.k_proj.weight": (narrow, hidden),
            f"{block}.self_attn.v_proj.weight": (narrow, hidden),
            f"{block}.self_attn.o_proj.weight": (hidden, hidden),
            f"{block}.mlp.gate_proj.weight": (width, hidden),
            f"{block}.mlp.up_proj.weight": (width, hidden),
            f"{block}.mlp.down_proj.weight": (hidden, width),
        }
    return shapes


def tiny_llama(
    root: Path,
    seed: int,
    *,
    layers: int = 3,
    hidden: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    tie: bool = False,
    vocab: int = 64,
    base: Path | None = None,
    scale: float = 0.02,
    files: int = 1,
) -> Path:
    """A Llama that transformers loads, with random weights that hang on ``seed`` alone.

    With ``base`` (a directory made by this function with the same sizes) it is that model plus noise of
    standard deviation ``scale``, as a fine-tune is; else the weights themselves are such noise.
    """
    config = llama_config(layers=layers, hidden=hidden, vocab=vocab, tie=tie, dtype=dtype)
    parents = read_tensors(base) if base is not None else {}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in llama_shapes(config).items():
        noise = torch.randn(shape, generator=generator) * scale
        start = parents[name].float() if base is not None else torch.ones(shape) * float(len(shape) == 1)
        tensors[name] = (start + noise).to(dtype)
    return write_checkpoint(root, tensors, config, files=files, extra=TOKENIZER_FILES)


def read_tensors(root: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(root.glob("model*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def read_config(root: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((root / "config.json").read_text())
    return config


def sparse_checkpoint(
    root: Path,
    headers: Sequence[Sequence[TensorSpec]],
    config: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
) -> Path:
    """Real headers and index, and data that is one hole: hundreds of gigabytes in a few MB of disk."""
    root.mkdir(parents=True, exist_ok=True)
    files = names or shard_names(len(headers))
    layouts = [lay_out(specs) for specs in headers]
    for file, layout in zip(files, layouts, strict=True):
        with open(root / file, "wb") as stream:
            stream.write(layout.header)
            stream.truncate(layout.nbytes)
    if len(headers) > 1:
        (root / "model.safetensors.index.json").write_bytes(index_json(layouts, files))
    write_json(root / "config.json", config)
    return root
