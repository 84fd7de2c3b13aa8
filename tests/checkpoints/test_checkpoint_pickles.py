"""Checkpoints with pickled weights, and single files of tensors, as far as no pickle is read.

A stand-in reads the "pickles", which are safetensors under other names: this package knows no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from kits.pickle_maker import PICKLE, PICKLE_INDEX, record_config
from safetensors.torch import save_file

from raymerge.checkpoints.header import FileHeader, read_header
from raymerge.checkpoints.source import Checkpoint, open_checkpoint, open_tensor_file
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import FileInfo, ReadStore

ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def put(root: Path, key: str, *names: str) -> None:
    root.mkdir(exist_ok=True)
    save_file({name: torch.ones(2) for name in names}, root / key)
    (root / "config.json").write_text('{"model_type": "odd"}')


def put_index(root: Path, **weight_map: str) -> None:
    (root / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def stand_in(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
    return read_header(store, info.key, info.nbytes, info.version), (f"{info.key} was read.",)


def opened(root: Path) -> Checkpoint:
    return open_checkpoint(root, "m", read_pickle=stand_in)


def refusal(root: Path, *, pickled: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root, "m", read_pickle=stand_in if pickled else None)
    return str(caught.value)


class TestChosen:
    @pytest.mark.parametrize("key", [PICKLE, "pytorch_model.pt", "pytorch_model.pth"])
    def test_a_single_file(self, tmp_path: Path, key: str) -> None:
        put(tmp_path, key, "a", "b")
        found = opened(tmp_path)
        assert list(found.tensors) == ["a", "b"]
        assert [file.key for file in found.files] == [key]
        assert found.notes == (f"its tensors are read from pickled files: {key}.", f"{key} was read.")
        assert found.companions == ()

    def test_safetensors_go_first(self, tmp_path: Path) -> None:
        put(tmp_path, PICKLE, "a")
        put(tmp_path, "model.safetensors", "b")
        found = opened(tmp_path)
        assert list(found.tensors) == ["b"]
        assert found.notes == ()

    def test_what_training_left_is_left_alone(self, tmp_path: Path) -> None:
        put(tmp_path, PICKLE, "a")
        put(tmp_path, "training_args.bin", "z")
        found = opened(tmp_path)
        assert list(found.tensors) == ["a"]
        assert [(each.key, each.rule) for each in found.left_out] == [("training_args.bin", "training state")]
        assert found.companions == ()

    def test_files_are_read_one_after_the_other(self, tmp_path: Path) -> None:
        names = [f"pytorch_model-{number:05d}-of-00009.bin" for number in range(1, 10)]
        for name in names:
            put(tmp_path, name, f"in.{name}")
        under_way: list[str] = []

        def read(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
            under_way.append(info.key)
            assert len(under_way) == 1
            found = stand_in(store, info)
            under_way.remove(info.key)
            return found

        assert len(open_checkpoint(tmp_path, "m", read_pickle=read).files) == 9


class TestRefused:
    def test_unless_they_are_allowed(self, tmp_path: Path) -> None:
        put(tmp_path, PICKLE, "a")
        text = refusal(tmp_path, pickled=False)
        assert "has its weights in pytorch_model.bin" in text
        assert (
            "(pickled_weights: refuse). Take that out: no code of the file is run. Or convert it: python -c"
            in text
        )

    def test_under_other_names(self, tmp_path: Path) -> None:
        put(tmp_path, "unet.pt", "a")
        text = refusal(tmp_path)
        assert "holds unet.pt, but neither pytorch_model.bin nor an index" in text
        assert "rename it to pytorch_model.bin" in text

    def test_an_index_that_does_not_fit(self, tmp_path: Path) -> None:
        put(tmp_path, ONE, "a")
        put_index(tmp_path, a=ONE, b=TWO, c="../x.bin", d="config.json")
        text = refusal(tmp_path)
        assert f"{PICKLE_INDEX}: names {TWO}, which is not in the directory" in text
        assert "places tensor 'c' in '../x.bin', which is not the name of a file beside it" in text
        assert "names config.json: no pickled weights" in text

    def test_all_files_that_cannot_be_read_at_once(self, tmp_path: Path) -> None:
        put(tmp_path, ONE, "a")
        put(tmp_path, TWO, "b")

        def read(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
            raise CheckpointError(Problem(store.location(info.key), "is odd.", "Mend it."))

        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path, "m", read_pickle=read)
        assert [problem.where for problem in caught.value.problems] == [str(tmp_path / n) for n in (ONE, TWO)]


class TestTensorFile:
    def test_is_a_checkpoint_without_config_and_companions(self, tmp_path: Path) -> None:
        put(tmp_path, "unet.safetensors", "layers.10.w", "layers.2.w")
        (tmp_path / "tokenizer.json").write_text("{}")
        found = open_tensor_file(tmp_path / "unet.safetensors", "unet")
        assert (found.name, found.root, found.config, found.companions) == ("unet", str(tmp_path), {}, ())
        assert found.is_raw
        assert found.is_single_file
        assert list(found.tensors) == ["layers.2.w", "layers.10.w"]
        (file,) = found.files
        assert (file.key, file.nbytes) == ("unet.safetensors", (tmp_path / file.key).stat().st_size)

    def test_has_the_version_that_its_directory_gives_it(self, tmp_path: Path) -> None:
        put(tmp_path, "x.safetensors", "a")
        (file,) = open_tensor_file(tmp_path / "x.safetensors", "x").files
        with LocalStore(tmp_path) as store:
            assert file.version in [info.version for info in store.files() if info.key == file.key]

    def test_what_lies_beside_it_is_not_looked_at(self, tmp_path: Path) -> None:
        put(tmp_path, "x.safetensors", "a")
        (tmp_path / "closed").mkdir()
        os.chmod(tmp_path / "closed", 0)
        assert list(open_tensor_file(tmp_path / "x.safetensors", "x").tensors) == ["a"]
        os.chmod(tmp_path / "closed", 0o700)

    def test_may_be_pickled(self, tmp_path: Path) -> None:
        put(tmp_path, "x.pt", "a")
        found = open_tensor_file(tmp_path / "x.pt", "x", read_pickle=stand_in)
        assert (list(found.tensors), found.notes) == (["a"], ("x.pt was read.",))

    def test_a_broken_one_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x.safetensors").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="too few for a safetensors file"):
            open_tensor_file(tmp_path / "x.safetensors", "x")


class TestResultsWithoutConfig:
    def _raw(self, root: Path) -> Path:
        put(root, "model.safetensors", "a")
        (root / "config.json").unlink()
        return root

    def test_are_read_where_that_was_planned(self, tmp_path: Path) -> None:
        record_config(self._raw(tmp_path), {})
        found = open_checkpoint(tmp_path, "m")
        assert found.is_raw
        assert not found.is_single_file
        assert found.companions == ()

    def test_are_refused_where_a_config_was_planned(self, tmp_path: Path) -> None:
        record_config(self._raw(tmp_path), {"model_type": "odd"})
        assert "config.json: is missing" in refusal(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '"config"', "\xff"])
    def test_are_refused_where_the_record_says_nothing(self, tmp_path: Path, text: str) -> None:
        record_config(self._raw(tmp_path), {})
        (tmp_path / "raymerge" / "plan" / "manifest.json").write_text(text)
        assert "config.json: is missing" in refusal(tmp_path)
