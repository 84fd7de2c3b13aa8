"""The modules that an adapter names are modules of the model's class, of a kind that peft adapts."""

from __future__ import annotations

from pathlib import Path

import torch
from kits.adapter_maker import peft_merge
from kits.checkpoint_maker import read_tensors
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from transformers.pytorch_utils import Conv1D

from raymerge.checkpoints.adapters import open_adapter
from raymerge.lora import ExtractOptions, Limits, extract_lora

FULL = ExtractOptions(Limits(64), device="cpu")


def test_gpt2_stores_its_weights_the_other_way(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    for name in ("base", "tuned"):
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    extraction = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "out", FULL)
    merged = peft_merge(read_tensors(tmp_path / "base"), tmp_path / "out")
    for name, tensor in read_tensors(tmp_path / "tuned").items():
        torch.testing.assert_close(merged[name].float(), tensor, rtol=0, atol=1e-6)
    modules = dict(GPT2LMHeadModel(config).named_modules())
    factors = open_adapter(tmp_path / "out", "m").factors
    assert len(factors) == 8
    for factor in factors.values():
        assert isinstance(modules[factor.module], Conv1D)
        assert factor.transposed
    assert "transformer.wpe" in extraction.saved


def test_qwen2_has_biases_on_three_of_four(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    for seed, name in enumerate(("base", "tuned")):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(tmp_path / name)
    extraction = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "out", FULL)
    assert len(extraction.biases) == 6
    merged = peft_merge(read_tensors(tmp_path / "base"), tmp_path / "out")
    for name, tensor in read_tensors(tmp_path / "tuned").items():
        torch.testing.assert_close(merged[name].float(), tensor, rtol=0, atol=1e-6)
