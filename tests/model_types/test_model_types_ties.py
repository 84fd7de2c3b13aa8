"""Heads that are their embedding: the names that families give them, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from kits.model_parents import save
from kits.model_types import ModelType
from kits.model_types_decoders import DECODERS
from kits.model_types_others import OTHERS
from safetensors import safe_open

import raymerge
from raymerge.architectures import tied_pair

ALL = {kind.name: kind for kind in (*DECODERS, *OTHERS)}
TIED = [name for name, kind in ALL.items() if "tied" in kind.groups]
UNTIED = ["llama", "gpt2", "gpt_neox", "gemma2", "opt", "rwkv", "biogpt", "modernbert-decoder", "mamba"]
UNTIED += ["electra", "distilbert", "modernbert", "whisper", "t5gemma", "gemma3", "qwen2_vl", "idefics3"]
"""Families that can be had with and without a head of their own, each kind of name once."""
ELSEWHERE = {
    "trocr": ("output_projection.weight", "model.decoder.embed_tokens.weight"),
    "ultrabert": ("head.decoder.weight", "model.embed_tokens.weight"),
    "bert-generation": ("lm_head.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "xlm": ("pred_layer.proj.weight", "transformer.embeddings.weight"),
    "xlnet": ("lm_loss.weight", "transformer.word_embedding.weight"),
    "ctrl": ("lm_head.weight", "transformer.w.weight"),
    "openai-gpt": ("lm_head.weight", "transformer.tokens_embed.weight"),
    "florence2": ("lm_head.weight", "model.language_model.shared.weight"),
    "yoso": ("cls.predictions.decoder.weight", "yoso.embeddings.word_embeddings.weight"),
    "longformer": ("lm_head.decoder.weight", "longformer.embeddings.word_embeddings.weight"),
    "git": ("output.weight", "git.embeddings.word_embeddings.weight"),
}
"""Names of families that have no model here."""


@pytest.mark.parametrize("name", TIED)
def test_names_of_head_and_embedding(name: str) -> None:
    ties = getattr(transformers, ALL[name].architecture)._tied_weights_keys
    pairs = {(head, embedding) for head, embedding in ties.items() if head.endswith("weight")}
    found = [tied_pair([embedding], {"model_type": name}) for _, embedding in pairs]
    assert pairs & {(pair.head, pair.embedding) for pair in found if pair is not None}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_families_that_are_not_built_here(name: str) -> None:
    head, embedding = ELSEWHERE[name]
    for names in ([embedding], [head, embedding]):
        pair = tied_pair(names, {"model_type": name})
        assert pair is not None
        assert (pair.head, pair.embedding) == (head, embedding)


@pytest.mark.parametrize("name", UNTIED)
def test_a_tied_model_and_one_with_a_head_of_its_own(name: str, tmp_path: Path) -> None:
    kind: ModelType = ALL[name]
    tied, own = (kind.build(seed, tie_word_embeddings=flag) for seed, flag in ((1, True), (2, False)))
    states = save(tied, tmp_path / "tied"), save(own, tmp_path / "own")
    assert len(_names(tmp_path / "own") - _names(tmp_path / "tied")) == 1
    entries = [{"model": str(tmp_path / each), "parameters": {"weight": 0.5}} for each in ("tied", "own")]
    raymerge.submit(
        {"merge_method": "linear", "models": entries}, tmp_path / "out", raymerge.RunOptions(inline=True)
    )
    model, info = kind.load(tmp_path / "out")
    assert not any(info.values())
    assert _names(tmp_path / "out") == _names(tmp_path / "own")
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (states[0][key] + states[1][key]) / 2, msg=key)
    assert kind.run(model).isfinite().all()


def _names(root: Path) -> set[str]:
    """Names of the tensors in a directory."""
    found: set[str] = set()
    for path in root.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(file.keys())
    return found
