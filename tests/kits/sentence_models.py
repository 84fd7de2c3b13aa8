"""Small models of Sentence Transformers with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, BertTokenizerFast

WIDTH, OUT = 16, 8
MODULES = ("", "1_Pooling", "2_Dense", "3_LayerNorm", "4_Normalize")


def sentence_model(root: Path, seed: int) -> Path:
    """A BERT with pooling, ``Dense``, ``LayerNorm`` and ``Normalize`` behind it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
        )
        BertModel(config).save_pretrained(root)
        dense = {"linear.weight": torch.randn(OUT, WIDTH), "linear.bias": torch.randn(OUT)}
        norm = {"norm.weight": torch.randn(OUT), "norm.bias": torch.randn(OUT)}
    kinds = ["Transformer", *(path.partition("_")[2] for path in MODULES[1:])]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(zip(MODULES, kinds, strict=True))
    ]
    tanh = "torch.nn.modules.activation.Tanh"
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {
            "in_features": WIDTH,
            "out_features": OUT,
            "bias": True,
            "activation_function": tanh,
        },
        "3_LayerNorm/config.json": {"dimension": OUT},
        "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    }
    for key, content in files.items():
        (root / key).parent.mkdir(exist_ok=True)
        (root / key).write_text(json.dumps(content))
    save_file(dense, root / "2_Dense" / "model.safetensors")
    save_file(norm, root / "3_LayerNorm" / "model.safetensors")
    letters = [chr(ord("a") + number) for number in range(26)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters)]
    (root / "vocab.txt").write_text("\n".join(tokens) + "\n")
    BertTokenizerFast(str(root / "vocab.txt")).save_pretrained(root)
    return root
