"""Tiny tokenizers of every kind as files, and the vocabularies that a plan reads from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raymerge.checkpoints.files import is_companion
from raymerge.checkpoints.tokenizer import TokenizerFiles, read_tokenizer
from raymerge.errors import UserError
from raymerge.planner.tokenizer.tokens import ModelVocabulary
from raymerge.planner.tokenizer.vocabulary import VocabularyPlan, build_vocabulary
from raymerge.recipes.entry import parse_reference
from raymerge.recipes.load import recipe_from_mapping
from raymerge.recipes.schema import Recipe

CHATML_CONFIG: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<s>",
}


def no_conversion(root: Path) -> str:
    raise AssertionError(f"{root} was to be converted")


def bpe(
    vocab: Sequence[str] | Mapping[str, int],
    *,
    merges: Sequence[str] = (),
    added: Sequence[str | Mapping[str, Any]] = (),
) -> dict[str, Any]:
    model = {"type": "BPE", "unk_token": None, "vocab": _ids(vocab), "merges": list(merges)}
    return tokenizer_json(model, added)


def unigram(pieces: Sequence[str], *, added: Sequence[str | Mapping[str, Any]] = ()) -> dict[str, Any]:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0 - at] for at, piece in enumerate(pieces)]}
    return tokenizer_json(model, added)


def word_piece(tokens: Sequence[str], *, added: Sequence[str | Mapping[str, Any]] = ()) -> dict[str, Any]:
    options = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return tokenizer_json({"type": "WordPiece", **options, "vocab": _ids(tokens)}, added)


def word_level(
    tokens: Sequence[str] | Mapping[str, int], *, added: Sequence[str | Mapping[str, Any]] = ()
) -> dict[str, Any]:
    return tokenizer_json({"type": "WordLevel", "unk_token": "<unk>", "vocab": _ids(tokens)}, added)


def tokenizer_json(model: Mapping[str, Any], added: Sequence[str | Mapping[str, Any]]) -> dict[str, Any]:
    size = len(model["vocab"])
    known = {entry[0]: at for at, entry in enumerate(model["vocab"])} if _is_list(model) else model["vocab"]
    entries = [_added(each, known.get(_text(each), size + at)) for at, each in enumerate(added)]
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {"version": "1.0", **parts, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": entries} | {
        "model": dict(model)
    }


def write_tokenizer(
    root: Path,
    tokenizer: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
) -> Path:
    contents: dict[str, Any] = dict(files or {})
    contents |= {"tokenizer.json": tokenizer} if tokenizer is not None else {}
    contents |= {"tokenizer_config.json": config} if config is not None else {}
    root.mkdir(parents=True, exist_ok=True)
    for key, content in contents.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        (root / key).write_text(text, encoding="utf-8")
    return root


def companions(root: Path) -> tuple[str, ...]:
    keys = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return tuple(sorted(key for key in keys if is_companion(key)))


def read(root: Path) -> TokenizerFiles:
    found = read_tokenizer(root, companions(root), convert=no_conversion)
    assert found is not None
    return found


def vocabulary(
    root: Path,
    tokenizer: Mapping[str, Any] | None,
    *,
    index: int = 0,
    num_rows: int | None = None,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
) -> ModelVocabulary:
    write_tokenizer(root, tokenizer, files=files)
    found = None if tokenizer is None else read(root)
    rows = num_rows if num_rows is not None else len(found.tokens) if found else 0
    reference = parse_reference(root.name)
    return ModelVocabulary(index, reference, found, rows, {"vocab_size": rows} if config is None else config)


def recipe_of(models: Sequence[ModelVocabulary], **more: Any) -> Recipe:
    names = [model.name for model in models]
    entries = [{"model": name, "parameters": {"weight": 1.0}} for name in names]
    data = {"merge_method": "linear", "base_model": names[0], "models": entries, **more}
    recipe = recipe_from_mapping(data, exists=lambda _: False)
    assert isinstance(recipe, Recipe)
    return recipe


def planned(models: Sequence[ModelVocabulary], **more: Any) -> VocabularyPlan:
    return build_vocabulary(recipe_of(models, **more), models, 0)


def refused(models: Sequence[ModelVocabulary], **more: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        planned(models, **more)
    return [str(problem) for problem in caught.value.problems]


def write_plan(root: Path, donor: Path, files: Mapping[str, bytes], removed: Sequence[str]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    kept = {key: (donor / key).read_bytes() for key in companions(donor) if key not in removed}
    for key, raw in {**kept, **files}.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(raw)
    return root


def _ids(vocab: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    return dict(vocab) if isinstance(vocab, Mapping) else {text: at for at, text in enumerate(vocab)}


def _is_list(model: Mapping[str, Any]) -> bool:
    return isinstance(model["vocab"], list)


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added(token: str | Mapping[str, Any], number: int) -> dict[str, Any]:
    settings = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    own = {} if isinstance(token, str) else dict(token)
    return {"id": number, "content": _text(token), **settings, **own}
