"""Whole checkpoints: opened, ordered, fingerprinted, or refused with everything that is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.checkpoint_maker import read_tensors, tiny_llama, write_checkpoint

from raymerge.checkpoints.files import is_companion
from raymerge.checkpoints.source import Checkpoint, main_dtype, natural_key, open_checkpoint, same_bytes
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
        assert (linked.tensors, linked.files, linked.companions) == (
            plain.tensors,
            plain.files,
            plain.companions,
        )

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

    def test_shape_and_dtype_count(self, tmp_path: Path) -> None:
        zeros = torch.zeros(8, dtype=torch.float16)
        checkpoint = made(tmp_path, a=zeros, b=zeros.reshape(2, 4), c=torch.zeros(8, dtype=torch.bfloat16))
        a, b, c = (checkpoint.tensors[name] for name in "abc")
        assert not same_bytes(checkpoint, a, b)
        assert not same_bytes(checkpoint, a, c)

    def test_bytes_count_and_not_values(self, tmp_path: Path) -> None:
        checkpoint = made(
            tmp_path, a=torch.tensor([0.0]), b=torch.tensor([-0.0]), c=torch.tensor([float("nan")])
        )
        a, b, c = (checkpoint.tensors[name] for name in "abc")
        assert not same_bytes(checkpoint, a, b)
        assert same_bytes(checkpoint, c, c)

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
    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.text("ab.019٣²", max_size=6), max_size=8))
    def test_is_a_total_order_of_all_names(self, names: list[str]) -> None:
        ordered = sorted(names, key=natural_key)
        backwards = names[::-1]
        assert ordered == sorted(backwards, key=natural_key)
        assert len({natural_key(name) for name in names}) == len(set(names))
