"""Checkpoints as sources, and their tokenizers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, sparse_checkpoint, tiny_llama, write_checkpoint
from kits.deepseek_headers import (
    V3_CONFIG,
    V3_NBYTES,
    V3_NUM_FILES,
    V3_NUM_TENSORS,
    deepseek_v3_names,
    deepseek_v3_specs,
)
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

from raymerge.checkpoints.files import is_companion
from raymerge.checkpoints.header import TensorSpec
from raymerge.checkpoints.source import (
    Checkpoint,
    in_natural_order,
    main_dtype,
    natural_key,
    open_checkpoint,
    same_bytes,
)
from raymerge.checkpoints.tokenizer import (
    AddedToken,
    TokenizerFiles,
    TokenizerKind,
    added_ids,
    has_holes,
    read_tokenizer,
)
from raymerge.checkpoints.views import FusedKind, View, blocks, fused_views, whole_view
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError

CONFIG: Mapping[str, Any] = {"model_type": "llama", "hidden_size": 4}


def made(
    root: Path, files: int = 1, extra: Mapping[str, str | bytes] | None = None, **tensors: torch.Tensor
) -> Checkpoint:
    return open_checkpoint(write_checkpoint(root, tensors, CONFIG, files=files, extra=extra), "m")


def refusal(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root, "m")
    assert caught.value.exit_code == 2
    return str(caught.value)


class TestOpening:
    @pytest.mark.parametrize("files", [1, 3, 12])
    def test_finds_every_tensor_where_it_lies(self, tmp_path: Path, files: int) -> None:
        checkpoint = open_checkpoint(str(tiny_llama(tmp_path, 1, files=files)), "mine")
        expected = read_tensors(tmp_path)
        assert checkpoint.tensors.keys() == expected.keys()
        assert len(checkpoint.files) == files
        for name, tensor in checkpoint.tensors.items():
            assert tensor.name == name
            assert tensor.shape == tuple(expected[name].shape)
            data = (tmp_path / tensor.key).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
            assert data == expected[name].view(torch.uint8).numpy().tobytes()

    def test_says_what_it_is(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(tiny_llama(tmp_path, 1), "mine")
        assert (checkpoint.name, checkpoint.root) == ("mine", str(tmp_path))
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.notes == ()
        assert checkpoint.companions == (
            "generation_config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        )

    def test_tensors_come_in_natural_order(self, tmp_path: Path) -> None:
        names = [f"model.layers.{layer}.mlp.experts.{e}.w" for layer in (0, 2, 10) for e in (0, 9, 11)]
        tensors = {name: torch.zeros(1) for name in reversed(names)}
        checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, CONFIG, files=4), "m")
        assert list(checkpoint.tensors) == names

    def test_fingerprints_change_with_the_file(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1)
        (before,) = open_checkpoint(root, "m").files
        assert before.nbytes == (root / before.key).stat().st_size
        os.utime(root / before.key, ns=(0, int(before.version) + 1))
        (after,) = open_checkpoint(root, "m").files
        assert after.version != before.version
        assert after.header_digest == before.header_digest

    def test_opens_the_cache_of_the_hub(self, tmp_path: Path) -> None:
        real = tiny_llama(tmp_path / "blobs", 1, files=2)
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for path in real.iterdir():
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
        linked, plain = open_checkpoint(snapshot, "m"), open_checkpoint(real, "m")
        assert (linked.tensors, linked.files) == (plain.tensors, plain.files)
        assert linked.companions == plain.companions

    def test_notes_of_index_and_headers_are_told(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1, files=2)
        index = json.loads((root / "model.safetensors.index.json").read_text())
        index["metadata"]["total_size"] += 1
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
        notes = open_checkpoint(root, "m").notes
        assert len(notes) == 1
        assert "total_size" in notes[0]


class TestRefusals:
    def test_no_directory(self, tmp_path: Path) -> None:
        assert "there is no such directory" in refusal(tmp_path / "missing")

    def test_everything_at_once(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1, files=3)
        (root / "config.json").write_text("{")
        (root / "model-00001-of-00003.safetensors").unlink()
        with open(root / "model-00002-of-00003.safetensors", "ab") as file:
            file.write(b"!")
        with open(root / "model-00003-of-00003.safetensors", "r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 1)
        text = refusal(root)
        assert "names model-00001-of-00003.safetensors, which is not in the directory" in text
        assert "model-00002-of-00003.safetensors: has" in text
        assert "1 too many" in text
        assert "model-00003-of-00003.safetensors: has" in text
        assert "1 too few" in text
        assert "config.json:1:2: is not JSON" in text
        assert len(text.splitlines()) == 4

    def test_index_and_headers_disagree(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1, files=2)
        index = json.loads((root / "model.safetensors.index.json").read_text())
        index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "places 1 tensor (ghost) in model-00001-of-00002.safetensors" in refusal(root)

    def test_no_config(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1)
        (root / "config.json").unlink()
        assert f"{root}/config.json: is missing" in refusal(root)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'{\n "a": 1,\n}', "config.json:3:1: is not JSON"),
            (b"", "config.json:1:1: is not JSON: Expecting value"),
            (b"[1]", "config.json: is not a JSON object"),
            (b'{"a": "\xff"}', "config.json: is not JSON text that can be read"),
            (b'\xef\xbb\xbf{"a": 1}', "config.json:1:1: is not JSON: Unexpected UTF-8 BOM"),
            (b"[" * 100_000, "config.json: is not JSON text that can be read"),
        ],
    )
    def test_bad_config(self, tmp_path: Path, content: bytes, message: str) -> None:
        root = tiny_llama(tmp_path, 1)
        (root / "config.json").write_bytes(content)
        assert message in refusal(root)

    def test_what_transformers_writes_is_a_good_config(self, tmp_path: Path) -> None:
        root = tiny_llama(tmp_path, 1)
        (root / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
        assert open_checkpoint(root, "m").config == {"time_step_limit": [0.0, float("inf")]}

    @pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "model.gguf", "readme.txt"])
    def test_what_is_no_model_is_not_asked_for_a_config(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        text = refusal(tmp_path)
        assert len(text.splitlines()) == 1
        assert "config.json: is missing" not in text

    def test_a_broken_config_of_what_is_no_model_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        assert len(refusal(tmp_path).splitlines()) == 2


COPIED = (
    *("tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja"),
    *("modeling_custom.py", "LICENSE", "x.npz", "1_Pooling/config.json", "docs/README.md", "raymerge.txt"),
    *("a/raymerge/x.txt", "checkpoint-notes/x.txt"),
)
NOT_COPIED = (
    *("config.json", "README.md", "README.md/notes.txt", ".gitattributes", ".cache/x.json"),
    *("a/.hidden/x.json", "raymerge", "raymerge/a/b.json", "model.safetensors"),
    *("model.safetensors.index.json", "consolidated.safetensors", "adapter_config.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "x.pt", "x.pth", "x.ckpt", "x.gguf"),
    *("onnx/model.onnx", "onnx/model.onnx_data", "tf_model.h5", "flax_model.msgpack", "weights.npz"),
    *("optimizer.json", "scheduler.dat", "rng_state_0.json", "trainer_state.json", "training_args.bin"),
    *("checkpoint-500/tokenizer.json",),
)


@pytest.mark.parametrize(("keys", "are_copied"), [(COPIED, True), (NOT_COPIED, False)])
def test_companions_are_told_by_their_names(keys: Sequence[str], are_copied: bool) -> None:
    assert [key for key in keys if is_companion(key) != are_copied] == []


class TestMainDtype:
    def test_the_most_bytes_count(self, tmp_path: Path) -> None:
        tensors = {"a": torch.zeros(7, dtype=torch.float32), "b": torch.zeros(15, dtype=torch.bfloat16)}
        assert main_dtype(made(tmp_path, **tensors)) is DType.BF16

    def test_codes_and_integers_do_not_count(self, tmp_path: Path) -> None:
        tensors = {
            "w": torch.zeros(64).to(torch.float8_e4m3fn),
            "i": torch.zeros(99, dtype=torch.int64),
            "s": torch.zeros(1, dtype=torch.float16),
        }
        assert main_dtype(made(tmp_path, **tensors)) is DType.F16

    def test_without_any_it_says_so(self, tmp_path: Path) -> None:
        checkpoint = made(tmp_path, a=torch.zeros(1, dtype=torch.int8), b=torch.zeros(1, dtype=torch.bool))
        with pytest.raises(
            CheckpointError, match=r"no tensor is of F16, BF16, F32 or F64; there is BOOL, I8\."
        ):
            main_dtype(checkpoint)


class TestSameBytes:
    def test_compares_across_files(self, tmp_path: Path) -> None:
        row = torch.arange(8.0)
        checkpoint = made(tmp_path, files=3, a=row, b=row.clone(), c=row + 1)
        a, b, c = checkpoint.tensors.values()
        assert len({a.key, b.key, c.key}) == 3
        assert same_bytes(checkpoint, a, a)
        assert same_bytes(checkpoint, a, b)
        assert not same_bytes(checkpoint, a, c)

    def test_shape_dtype_and_bytes_count_and_not_values(self, tmp_path: Path) -> None:
        zeros = torch.zeros(8, dtype=torch.float16)
        others = {"b": zeros.reshape(2, 4), "c": torch.zeros(8, dtype=torch.bfloat16), "d": -zeros}
        checkpoint = made(tmp_path, a=zeros, **others, e=zeros * torch.nan)
        for name in others:
            assert not same_bytes(checkpoint, checkpoint.tensors["a"], checkpoint.tensors[name])
        assert same_bytes(checkpoint, checkpoint.tensors["e"], checkpoint.tensors["e"])

    @pytest.mark.parametrize("place", [0, 4 * 2**20 - 1, 4 * 2**20, 9 * 2**20])
    def test_any_byte_of_a_big_one(self, tmp_path: Path, place: int) -> None:
        one = torch.zeros(9 * 2**20 + 1, dtype=torch.uint8)
        other = one.clone()
        other[place] = 1
        checkpoint = made(tmp_path, a=one, b=other, c=one.clone())
        a, b, c = (checkpoint.tensors[name] for name in "abc")
        assert not same_bytes(checkpoint, a, b)
        assert same_bytes(checkpoint, a, c)


class TestNaturalKey:
    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.text("ab.019٣²", max_size=6), max_size=8))
    def test_is_a_total_order_of_all_names(self, names: list[str]) -> None:
        ordered = sorted(names, key=natural_key)
        backwards = names[::-1]
        assert ordered == sorted(backwards, key=natural_key)
        assert len({natural_key(name) for name in names}) == len(set(names))

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.lists(st.sampled_from(["a", "1", "12", ".", ".experts.", "experts"]), max_size=6)))
    def test_is_the_order_of_tensors_with_and_without_experts(self, names: list[list[str]]) -> None:
        tensors = [TensorSpec("".join(words), DType.F32, ()) for words in names]
        assert list(in_natural_order(tensors)) == sorted({each.name for each in tensors}, key=natural_key)


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


@settings(deadline=None, max_examples=30)
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
    assert ("tokenizer.json" not in found.files, found.older_keys) == (False, ("merges.txt",))


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
    assert ("tokenizer.json" not in found.files, found.older_keys, found.tokens["b"]) == (True, (key,), 1)
    assert found.roles == {"eos_token": "b"}


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ("{", ":1:2: is not JSON: "),
        ({}, ": has no model with a vocab."),
        ({"model": {"type": "Magic", "vocab": {}}}, ": has a model of the unknown type 'Magic'."),
        ({"model": {"vocab": {"a": -1}}}, ": has a token whose id is '-1'."),
        ({"model": {"vocab": ["a"]}}, ": has a vocab whose entry 0 is no pair of text and score."),
        ({"model": {"vocab": {}}, "added_tokens": {}}, ""),
        ({"model": {"vocab": {}}, "added_tokens": {"a": 1}}, ": has added_tokens that are no list."),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}, ": has an added token without a text"),
    ],
)
def test_a_tokenizer_that_cannot_be_understood_is_refused(tmp_path: Path, tokenizer: Any, said: str) -> None:
    write_tokenizer(tmp_path, None, files={"tokenizer.json": tokenizer})
    if not said:
        assert read(tmp_path).tokens == {}
        return
    (problem,) = _problems(tmp_path)
    assert f"{tmp_path}/tokenizer.json{said}" in problem
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


class TestDeepSeekV3:
    @pytest.mark.slow
    def test_opens_in_seconds(self, tmp_path: Path) -> None:
        root = sparse_checkpoint(tmp_path, deepseek_v3_specs(), V3_CONFIG, names=deepseek_v3_names())
        started = time.process_time()
        checkpoint = open_checkpoint(root, "v3")
        # Processor seconds: about 1 when measured alone; the bound leaves room for a busy machine.
        assert time.process_time() - started < 6
        assert len(checkpoint.tensors) == V3_NUM_TENSORS
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) == V3_NBYTES
        assert len(checkpoint.files) == V3_NUM_FILES
        assert checkpoint.notes == ()
        assert main_dtype(checkpoint) is DType.BF16
        names = list(checkpoint.tensors)
        assert names.index("model.layers.9.mlp.experts.99.up_proj.weight") < names.index(
            "model.layers.10.mlp.experts.0.up_proj.weight"
        )


KINDS: tuple[FusedKind, ...] = ("out_in", "in_out", "in_out_interleaved", "rows", "rows_transposed")
STACKED = KINDS[:3]


class Sizes(NamedTuple):
    experts: int
    projections: int
    rows: int
    columns: int


SIZES = st.builds(Sizes, st.integers(1, 4), st.integers(1, 2), st.integers(1, 5), st.integers(1, 5))


def logical_tensors(sizes: Sizes, *, bias: bool = False) -> list[list[torch.Tensor]]:
    """Distinct numbers everywhere: [expert][projection] -> [F, d], or [F] for biases."""
    shape = (sizes.rows,) if bias else (sizes.rows, sizes.columns)
    numbers = torch.arange(sizes.experts * sizes.projections * prod(shape)).reshape(
        sizes.experts, sizes.projections, *shape
    )
    return [[numbers[e, p].clone() for p in range(sizes.projections)] for e in range(sizes.experts)]


def stored(kind: FusedKind, logical: list[list[torch.Tensor]]) -> torch.Tensor:
    """The fused tensor as its publisher would make it from the matrices."""
    match kind:
        case "out_in":
            return torch.stack([torch.cat(each, dim=0) for each in logical])
        case "in_out":
            return torch.stack(
                [torch.cat([m.mT if m.ndim == 2 else m for m in each], dim=-1) for each in logical]
            )
        case "in_out_interleaved":
            return torch.stack(
                [
                    torch.stack([m.mT if m.ndim == 2 else m for m in each], dim=-1).flatten(-2)
                    for each in logical
                ]
            )
        case "rows":
            return torch.cat([each[0] for each in logical])
        case "rows_transposed":
            return torch.cat([each[0].mT for each in logical])


def gather(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return torch.as_strided(tensor.contiguous(), view.shape, view.strides, view.offset)


def check(kind: FusedKind, logical: list[list[torch.Tensor]], sizes: Sizes) -> None:
    whole = stored(kind, logical).contiguous()
    shape = tuple(whole.shape)
    views = fused_views(kind, shape, sizes.projections, sizes.experts)
    flat = [matrix for each in logical for matrix in each]
    assert len(views) == len(flat)
    for view, matrix in zip(views, flat, strict=True):
        assert torch.equal(gather(whole, view), matrix)
        assert view.num_elements == matrix.numel()
        assert view.is_flat == gather(whole, view).is_contiguous()
    # Both ways: scattering the matrices into an empty tensor gives the stored one again.
    empty = torch.full(shape, -1, dtype=whole.dtype)
    for view, matrix in zip(views, flat, strict=True):
        torch.as_strided(empty, view.shape, view.strides, view.offset).copy_(matrix)
    assert torch.equal(empty, whole)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", STACKED)
@settings(deadline=None, max_examples=20)
@given(sizes=SIZES)
def test_stacked_matrices_and_biases_both_ways(kind: FusedKind, bias: bool, sizes: Sizes) -> None:
    check(kind, logical_tensors(sizes, bias=bias), sizes)


@pytest.mark.parametrize("kind", ["rows", "rows_transposed"])
@settings(deadline=None, max_examples=20)
@given(sizes=SIZES)
def test_flattened_rows_both_ways(kind: FusedKind, sizes: Sizes) -> None:
    one = sizes._replace(projections=1)
    check(kind, logical_tensors(one), one)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(sizes=SIZES)
def test_blocks_partition_the_tensor_into_complete_logical_tensors(kind: FusedKind, sizes: Sizes) -> None:
    if kind not in STACKED:
        sizes = sizes._replace(projections=1)
    shape = tuple(stored(kind, logical_tensors(sizes)).shape)
    views = fused_views(kind, shape, sizes.projections, sizes.experts)
    position, members = 0, list[int]()
    for start, num_elements, inside in blocks(kind, shape, sizes.projections, sizes.experts):
        assert start == position
        held = {index for member in inside for index in elements(views[member])}
        assert held == set(range(start, start + num_elements))
        position += num_elements
        members += inside
    assert position == prod(shape)
    assert members == list(range(len(views)))


def elements(view: View) -> set[int]:
    size = 1 + view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    return set(gather(torch.arange(size), view).flatten().tolist())


@pytest.mark.parametrize(
    ("kind", "shape", "projections", "num_blocks"),
    [
        ("out_in", (3, 8, 5), 2, 6),
        ("out_in", (3, 8), 2, 6),
        ("in_out", (3, 5, 8), 2, 3),
        ("in_out", (3, 8), 2, 6),
        ("in_out_interleaved", (3, 5, 8), 2, 3),
        ("in_out_interleaved", (3, 8), 2, 3),
        ("rows", (12, 5), 1, 3),
        ("rows_transposed", (12, 5), 1, 3),
    ],
)
def test_blocks_are_the_smallest(
    kind: FusedKind, shape: tuple[int, ...], projections: int, num_blocks: int
) -> None:
    found = blocks(kind, shape, projections, 3)
    assert len(found) == num_blocks
    assert {block.num_elements for block in found} == {prod(shape) // num_blocks}


def test_a_view_is_flat_where_its_elements_lie_in_order() -> None:
    assert whole_view((2, 3, 4)) == View(0, (2, 3, 4), (12, 4, 1))
    assert whole_view(()).num_elements == 1
    flat = (whole_view((2, 3, 4)), whole_view((0, 4)), View(7, (1, 5), (99, 1)), View(7, (0, 2), (1, 5)))
    assert all(view.is_flat for view in flat)
    assert not View(7, (5, 2), (1, 5)).is_flat


@pytest.mark.parametrize(
    ("kind", "shape", "projections", "experts"),
    [
        ("out_in", (4, 7, 3), 2, 4),
        ("in_out_interleaved", (4, 7), 2, 4),
        ("out_in", (4,), 1, 4),
        ("rows", (10, 3), 1, 4),
        ("rows", (8, 3), 2, 4),
        ("rows_transposed", (2, 8, 3), 1, 2),
        ("out_in", (0, 6, 3), 2, 0),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    kind: FusedKind, shape: tuple[int, ...], projections: int, experts: int
) -> None:
    with pytest.raises(ValueError, match=kind):
        fused_views(kind, shape, projections, experts)
    with pytest.raises(ValueError, match="experts"):
        blocks(kind, shape, projections, experts)
