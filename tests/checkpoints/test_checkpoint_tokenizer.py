"""A model's tokenizer as its files say it, in the ids that loading gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.tokenizer_maker import (
    bpe,
    companions,
    no_conversion,
    read,
    unigram,
    word_level,
    word_piece,
    write_tokenizer,
)
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from raymerge.checkpoints.tokenizer import (
    AddedToken,
    TokenizerFiles,
    TokenizerKind,
    added_ids,
    has_holes,
    read_tokenizer,
)
from raymerge.errors import CheckpointError


def _read(root: Path, tokenizer: dict[str, Any], **files: Any) -> TokenizerFiles:
    return read(write_tokenizer(root, tokenizer, files={f"{key}.json": each for key, each in files.items()}))


def _problems(root: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(root, companions(root), convert=no_conversion)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("tokenizer", "kind"),
    [
        (bpe(["a", "b", "ab"], merges=["a b"], added=["<s>"]), TokenizerKind.BPE),
        (unigram(["<unk>", "a", "b"], added=["<s>"]), TokenizerKind.UNIGRAM),
        (word_piece(["[UNK]", "a", "##b"], added=["<s>"]), TokenizerKind.WORD_PIECE),
        (word_level(["<unk>", "a", "b"], added=["<s>"]), TokenizerKind.WORD_LEVEL),
    ],
)
def test_every_kind_is_read_and_guessed_from_files_of_old_releases(
    tmp_path: Path, tokenizer: dict[str, Any], kind: TokenizerKind
) -> None:
    found = _read(tmp_path / "new", tokenizer)
    assert (found.kind, found.tokens["<s>"], len(found.tokens)) == (kind, 3, 4)
    assert found.tokens == Tokenizer.from_str(json.dumps(tokenizer)).get_vocab(with_added_tokens=True)
    old = {**tokenizer, "model": {key: each for key, each in tokenizer["model"].items() if key != "type"}}
    assert _read(tmp_path / "old", old).kind is kind


def test_settings_of_added_tokens(tmp_path: Path) -> None:
    entry = {"content": "<x>", "lstrip": True, "normalized": True, "special": False}
    found = _read(tmp_path, bpe(["a"], added=["<s>", entry]))
    assert found.added["<s>"] == AddedToken("<s>", normalized=False, special=True)
    assert found.added["<x>"] == AddedToken("<x>", lstrip=True)
    assert found.added["<x>"].as_json(2) == {"id": 2, "single_word": False, "rstrip": False, **entry}
    assert "id" not in found.added["<x>"].as_json()


def test_ids_are_those_that_loading_gives_and_a_note_says_so(tmp_path: Path) -> None:
    tokenizer = bpe(["a", "b"], added=["<s>", "</s>"])
    tokenizer["added_tokens"][1]["id"] = 7
    found = _read(tmp_path, tokenizer)
    assert found.tokens["</s>"] == 3 == Tokenizer.from_str(json.dumps(tokenizer)).token_to_id("</s>")
    (note,) = found.notes
    assert "'</s>': 7 in the file, 3 when loaded" in note


def test_stated_ids_hold_where_the_model_has_holes(tmp_path: Path) -> None:
    tokenizer = bpe({"a": 0, "b": 1, "c": 5, "<s>": 9}, added=["<s>", "<x>"])
    tokenizer["added_tokens"][1]["id"] = 10
    found = _read(tmp_path, tokenizer)
    assert (found.tokens["<s>"], found.tokens["<x>"], found.notes) == (9, 10, ())
    assert found.is_ambiguous
    assert not _read(tmp_path / "pinned", bpe({"a": 0, "<s>": 9}, added=["<s>"])).is_ambiguous
    assert has_holes({"a": 0, "c": 2})
    assert not has_holes({})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6),
    st.lists(st.sampled_from([*"abcdefgh", "<s>", "<t>", "<u>", "<v>"]), unique=True, max_size=8),
)
def test_ids_agree_with_the_library(vocab: list[str], added: list[str]) -> None:
    numbers = {text: at for at, text in enumerate(vocab)}
    tokenizer = bpe(numbers, added=added)
    stated = [(each["content"], each["id"]) for each in tokenizer["added_tokens"]]
    loaded = Tokenizer.from_str(json.dumps(tokenizer)).get_vocab(with_added_tokens=True)
    assert {**numbers, **added_ids(numbers, stated)} == loaded


def test_special_tokens_by_role_from_both_files(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "unk_token": None,
        "add_bos_token": True,
        "image_token": "<img>",
    }
    tokenizer = bpe(["a"], added=["<s>", "</s>", "<p>", "<img>"])
    legacy = {"pad_token": "<p>", "eos_token": "<p>"}
    found = _read(tmp_path, tokenizer, tokenizer_config=config, special_tokens_map=legacy)
    assert found.roles == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<p>",
        "image_token": "<img>",
    }


@pytest.mark.parametrize("field", ["extra_special_tokens", "additional_special_tokens"])
@pytest.mark.parametrize("has_decoder", [False, True])
def test_tokens_that_transformers_adds_on_loading(tmp_path: Path, field: str, has_decoder: bool) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        field: ["<e1>", "<e2>"],
    }
    if has_decoder:
        plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
        config["added_tokens_decoder"] = {
            "4": {"content": "<later>", **plain},
            "2": {"content": "<s>", **plain},
            "3": {"content": "<soon>", **plain},
        }
    found = _read(tmp_path, bpe(["a", "b"], added=["<s>"]), tokenizer_config=config)
    assert found.tokens == PreTrainedTokenizerFast.from_pretrained(tmp_path).get_vocab()
    assert found.added["[PAD]"].special
    assert ("<later>" in found.tokens) is has_decoder


def test_added_tokens_of_an_older_file_count(tmp_path: Path) -> None:
    tokenizer = bpe(["a"], added=["<s>"])
    found = _read(tmp_path, tokenizer, added_tokens={"<s>": 1, "<y>": 3, "<x>": 2}, tokenizer_config={})
    assert found.tokens == {"a": 0, "<s>": 1, "<x>": 2, "<y>": 3}
    assert found.older_keys == ("added_tokens.json",)


@pytest.mark.parametrize(
    ("config", "files", "usual"),
    [
        ({"chat_template": "C"}, {}, "C"),
        ({"chat_template": {"default": "D", "tool_use": "T"}}, {}, "D"),
        (
            {"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]},
            {},
            "D",
        ),
        ({"chat_template": "C"}, {"chat_template.jinja": "J"}, "J"),
        ({}, {"chat_template.json": {"chat_template": "P"}}, "P"),
        ({}, {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"}, "J"),
        ({}, {}, None),
    ],
)
def test_chat_templates_wherever_they_are_kept(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], usual: str | None
) -> None:
    found = read(write_tokenizer(tmp_path, bpe(["a"]), config, files))
    assert found.chat_template == usual
    assert ("tool_use" in found.templates) == ("T" in str([config, files]))


def test_files_are_kept_as_they_are(tmp_path: Path) -> None:
    files = {"generation_config.json": {"eos_token_id": 2}, "merges.txt": "#", "LICENSE": "free"}
    found = read(write_tokenizer(tmp_path, bpe(["a"]), {"eos_token": "a"}, files))
    assert found.files == {
        key: (tmp_path / key).read_bytes() for key in ("tokenizer.json", "tokenizer_config.json")
    }
    assert found.generation_config == (tmp_path / "generation_config.json").read_bytes()
    assert found.tokenizer_json == found.files["tokenizer.json"]
    assert (found.is_converted, found.older_keys) == (False, ("merges.txt",))


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer_config.json": "{}"}, {"added_tokens.json": "{}"}, {"merges.txt": ""}]
)
def test_a_model_without_a_vocabulary_has_no_tokenizer(tmp_path: Path, files: dict[str, Any]) -> None:
    write_tokenizer(tmp_path, None, files=files)
    assert read_tokenizer(tmp_path, companions(tmp_path), convert=no_conversion) is None


@pytest.mark.parametrize(
    "key", ["tokenizer.model", "tokenizer.model.v3", "vocab.json", "vocab.txt", "tekken.json"]
)
def test_older_files_are_converted(tmp_path: Path, key: str) -> None:
    write_tokenizer(tmp_path, None, {"eos_token": "b"}, {key: "{}"})
    asked: list[Path] = []

    def convert(root: Path) -> str:
        asked.append(root)
        return json.dumps(bpe(["a", "b"]))

    found = read_tokenizer(tmp_path, companions(tmp_path), convert=convert)
    assert found is not None
    assert asked == [tmp_path]
    assert (found.is_converted, found.older_keys, found.tokens["b"]) == (True, (key,), 1)
    assert found.roles == {"eos_token": "b"}


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ("{", "is not JSON ("),
        ({}, "has no model with a vocab."),
        ({"model": {"type": "Magic", "vocab": {}}}, "has a model of the unknown type 'Magic'."),
        ({"model": {"vocab": {"a": -1}}}, "has a token whose id is '-1'."),
        ({"model": {"vocab": ["a"]}}, "has a vocab whose entry 0 is no pair of text and score."),
        ({"model": {"vocab": {}}, "added_tokens": {}}, ""),
        ({"model": {"vocab": {}}, "added_tokens": {"a": 1}}, "has added_tokens that are no list."),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}, "has an added token without a text"),
    ],
)
def test_a_tokenizer_that_cannot_be_understood_is_refused(tmp_path: Path, tokenizer: Any, said: str) -> None:
    write_tokenizer(tmp_path, None, files={"tokenizer.json": tokenizer})
    if not said:
        assert read(tmp_path).tokens == {}
        return
    (problem,) = _problems(tmp_path)
    assert f"{tmp_path}/tokenizer.json: {said}" in problem
    assert problem.endswith("from the place the model comes from.")


def test_all_broken_files_are_named_at_once(tmp_path: Path) -> None:
    files = {
        "tokenizer.json": "nothing",
        "special_tokens_map.json": "[1]",
        "tokenizer_config.json": {"added_tokens_decoder": {"0": 7}},
    }
    write_tokenizer(tmp_path, None, files=files)
    found = " ".join(_problems(tmp_path))
    assert all(key in found for key in files)
    assert "has an added token without a text (7)." in found
