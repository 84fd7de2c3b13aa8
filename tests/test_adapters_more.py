"""``MODEL+ADAPTER`` beside what else a recipe may ask for: tokenizers, rules, other names, tied heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.adapter_maker import PREFIX, factor_tensors, lora_config, peft_merge, write_adapter
from kits.checkpoint_maker import llama_config, llama_shapes, read_tensors, write_checkpoint
from kits.tokenizer_maker import word_level
from tokenizers import Tokenizer

import raymerge
from raymerge.errors import PlanError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WORDS = ("<unk>", "the", "a", "red", "house")
OTHERS = ("<unk>", "house", "red", "green", "the")
"""Words of two vocabularies, by id."""
HIDDEN = 8


def _merge(recipe: Mapping[str, Any], out: Path) -> dict[str, torch.Tensor]:
    plain = json.loads(json.dumps(recipe, default=str))
    return read_tensors(raymerge.submit(plain, out, raymerge.RunOptions(inline=True)).output)


def _linear(*models: object, **more: Any) -> dict[str, Any]:
    entries = [{"model": str(each), "parameters": {"weight": 1}} for each in models]
    return {"merge_method": "linear", "models": entries, **more}


def _check(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=3e-6, atol=3e-7)


def _notes(recipe: Mapping[str, Any]) -> str:
    return "\n".join(raymerge.plan(json.loads(json.dumps(recipe, default=str))).manifest["notes"])


def _refusal(recipe: Mapping[str, Any], out: Path) -> str:
    with pytest.raises(PlanError) as caught:
        _merge(recipe, out)
    assert not out.exists()
    return str(caught.value)


def _tokenizer(words: tuple[str, ...]) -> dict[str, str]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    return {"tokenizer.json": json.dumps(word_level(words)), "tokenizer_config.json": json.dumps(config)}


def _speaker(root: Path, seed: int, words: tuple[str, ...], *, tie: bool = False) -> Path:
    """A Llama of one layer in float32 with a row for each word, and its tokenizer."""
    config = llama_config(layers=1, hidden=HIDDEN, vocab=len(words), tie=tie, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in llama_shapes(config).items()}
    return write_checkpoint(root, tensors, config, extra=_tokenizer(words))


def _embedding_lora(root: Path, rows: int, seed: int, **config: Any) -> Path:
    """An adapter that adds a product to the embedding."""
    generator = torch.Generator().manual_seed(seed)
    module = f"{PREFIX}{EMBEDDING.removesuffix('.weight')}"
    factors = {
        f"{module}.lora_embedding_A": torch.randn(4, rows, generator=generator),
        f"{module}.lora_embedding_B": torch.randn(HIDDEN, 4, generator=generator),
    }
    return write_adapter(root, factors, lora_config(target_modules=["embed_tokens"], **config))


def _grown_lora(root: Path, rows: int, seed: int) -> Path:
    """An adapter that holds embedding and head whole, of a vocabulary of its own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = factor_tensors("model.layers.0.self_attn.q_proj", (HIDDEN, HIDDEN), 4, generator)
    tensors |= {PREFIX + name: torch.randn(rows, HIDDEN, generator=generator) for name in (EMBEDDING, HEAD)}
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    return write_adapter(root, tensors, lora_config(**saved))


def _by_word(
    ids: Mapping[str, int], *parents: tuple[tuple[str, ...], Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The mean of models by words, where a word that one lacks is its row in the other."""
    first = parents[0][1]
    mean = {name: sum(each[name].double() for _, each in parents) / len(parents)
            for name in first if name not in (EMBEDDING, HEAD)}  # fmt: skip
    for name in {EMBEDDING, HEAD} & first.keys():
        rows = torch.zeros(len(ids), HIDDEN, dtype=torch.float64)
        for word, number in ids.items():
            own = [each[name][words.index(word)].double() for words, each in parents if word in words]
            rows[number] = torch.stack(own).mean(dim=0)
        mean[name] = rows
    return mean


def _ids(out: Path) -> dict[str, int]:
    found: dict[str, int] = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()
    return found


class TestTokenizers:
    @pytest.mark.parametrize("source", ["union", "base"])
    def test_rows_that_an_adapter_changes_are_matched_by_token(self, tmp_path: Path, source: str) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS), _speaker(tmp_path / "two", 2, OTHERS)
        lora = _embedding_lora(tmp_path / "lora", len(OTHERS), 3)
        recipe = _linear(one, f"{two}+{lora}", base_model=str(one), tokenizer_source=source)
        found = _merge(recipe, tmp_path / "out")
        ids = _ids(tmp_path / "out")
        assert len(ids) == (6 if source == "union" else 5)
        _check(
            found, _by_word(ids, (WORDS, read_tensors(one)), (OTHERS, peft_merge(read_tensors(two), lora)))
        )
        assert "deltas applied 1 of 1" in _notes(recipe)

    def test_more_rows(self, tmp_path: Path) -> None:
        one, two = _speaker(tmp_path / "one", 1, WORDS), _speaker(tmp_path / "two", 2, OTHERS)
        lora = _grown_lora(tmp_path / "lora", 7, 3)
        grown = (*WORDS, "blue", "sky")
        for name, text in _tokenizer(grown).items():
            (lora / name).write_text(text)
        found = _merge(_linear(f"{one}+{lora}", two, tokenizer_source="union"), tmp_path / "out")
        ids = _ids(tmp_path / "out")
        assert {"blue", "sky", "green"} <= ids.keys()
        _check(
            found, _by_word(ids, (grown, peft_merge(read_tensors(one), lora)), (OTHERS, read_tensors(two)))
        )

    def test_more_rows_alone(self, tmp_path: Path) -> None:
        one = _speaker(tmp_path / "one", 1, WORDS)
        lora = _grown_lora(tmp_path / "lora", 7, 3)
        recipe = _linear(f"{one}+{lora}")
        found = _merge(recipe, tmp_path / "out")
        _check(found, peft_merge(read_tensors(one), lora))
