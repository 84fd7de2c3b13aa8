"""Pickled weights: every tensor is found where it lies, and what cannot be proved is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.pickle_maker import PICKLE, PICKLE_INDEX, Marker, local_header, overwrite, record_config, repacked
from safetensors.torch import load_file, save_file

from raymerge.checkpoints.header import FileHeader, read_header
from raymerge.checkpoints.pickles import conversion_command, read_pickled
from raymerge.checkpoints.source import Checkpoint, open_checkpoint, open_tensor_file
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import FileInfo, ReadStore

ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def put(root: Path, key: str, *names: str) -> None:
    root.mkdir(exist_ok=True)
    save_file({name: torch.ones(2) for name in names}, root / key)
    (root / "config.json").write_text('{"model_type": "odd"}')


def stand_in(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
    return read_header(store, info.key, info.nbytes, info.version), (f"{info.key} was read.",)


@pytest.fixture(autouse=True)
def _stand_in_for_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymerge.checkpoints.source.read_pickled", stand_in)


def opened(root: Path) -> Checkpoint:
    return open_checkpoint(root, "m", pickled=True)


def refusal(root: Path, *, pickled: bool = True) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root, "m", pickled=pickled)
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

    def test_files_are_read_one_after_the_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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

        monkeypatch.setattr("raymerge.checkpoints.source.read_pickled", read)
        assert len(opened(tmp_path).files) == 9


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
        weight_map = {"a": ONE, "b": TWO, "c": "../x.bin", "d": "config.json"}
        (tmp_path / PICKLE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        text = refusal(tmp_path)
        assert f"{PICKLE_INDEX}: names {TWO}, which is not in the directory" in text
        assert "places tensor 'c' in '../x.bin', which is not the name of a file beside it" in text
        assert "names config.json: no pickled weights" in text

    def test_all_files_that_cannot_be_read_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path, ONE, "a")
        put(tmp_path, TWO, "b")

        def read(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
            raise CheckpointError(Problem(store.location(info.key), "is odd.", "Mend it."))

        monkeypatch.setattr("raymerge.checkpoints.source.read_pickled", read)
        with pytest.raises(CheckpointError) as caught:
            opened(tmp_path)
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
        found = open_tensor_file(tmp_path / "x.pt", "x", pickled=True)
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


def read(path: Path) -> tuple[FileHeader, tuple[str, ...]]:
    with LocalStore(path.parent) as store:
        return read_pickled(store, FileInfo(path.name, path.stat().st_size, "v"))


def refusal_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert all(problem.where == str(path) and problem.remedy for problem in caught.value.problems)
    return str(caught.value)


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def stored(path: Path, header: FileHeader) -> dict[str, torch.Tensor]:
    """The tensors that the header's ranges hold."""
    data = path.read_bytes()
    found = {}
    for each in header.tensors:
        assert (each.key, each.nbytes) == (path.name, each.dtype.nbytes(each.num_elements))
        piece = bytearray(data[each.offset : each.offset + each.nbytes])
        dtype = getattr(torch, str(each.dtype.torch_name))
        empty = torch.empty(each.shape, dtype=dtype)
        found[each.name] = torch.frombuffer(piece, dtype=dtype).reshape(each.shape) if piece else empty
    return found


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def _of_dtype(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    narrow = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    return narrow.view(dtype) if dtype.itemsize == 1 and name != "bool" else narrow.to(dtype)


MARKS = (".format_version", ".storage_alignment")
"""Records by which torch knows that it packed an archive itself."""
TORCH_NAMES = [name for dtype in DType if (name := dtype.torch_name) and hasattr(torch, name)]


class TestFound:
    def test_every_dtype_where_it_lies(self, tmp_path: Path) -> None:
        tensors = {name: _of_dtype(name) for name in TORCH_NAMES}
        path = saved(tmp_path / "all.bin", tensors)
        header, notes = read(path)
        assert notes == ()
        assert (header.key, header.nbytes, header.version) == (path.name, path.stat().st_size, "v")
        found = stored(path, header)
        assert found.keys() == tensors.keys()
        assert all(equal(found[name], tensors[name]) for name in tensors)

    def test_parts_shared_storages_and_odd_shapes(self, tmp_path: Path) -> None:
        whole = torch.randn(8, 4)
        tensors = {
            "whole": whole,
            "rows": whole[2:5],
            "again": whole,
            "tied": whole.view(4, 8),
            "one": torch.tensor(3.0),
            "none": torch.empty(0, 7),
            "last": torch.ones(3, dtype=torch.bfloat16),
        }
        path = saved(tmp_path / "x.pt", tensors)
        header, _ = read(path)
        found = stored(path, header)
        assert all(equal(found[name], tensors[name]) for name in tensors)
        offsets = {tensor.name: tensor.offset for tensor in header.tensors}
        assert offsets["whole"] == offsets["again"] == offsets["tied"]
        assert offsets["rows"] == offsets["whole"] + 2 * 4 * 4

    def test_parameters_of_a_module(self, tmp_path: Path) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        path = saved(tmp_path / "x.bin", OrderedDict(module.state_dict(keep_vars=True)))
        found = stored(path, read(path)[0])
        assert all(equal(found[name], value) for name, value in module.state_dict().items())

    def test_tensors_come_in_the_order_of_their_bytes(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "x.bin", {name: torch.ones(20) for name in "cab"})
        header, _ = read(path)
        offsets = [tensor.offset for tensor in header.tensors]
        assert offsets == sorted(offsets)
        assert header.data_start == offsets[0] > 0

    def test_saved_on_a_gpu(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "x.bin", {"a": torch.arange(9.0)})
        with zipfile.ZipFile(path) as archive:
            description = archive.read("x/data.pkl")
        moved = description.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
        assert moved != description
        path = repacked(path, tmp_path / "gpu.bin", change={"data.pkl": moved}, without=MARKS)
        assert equal(stored(path, read(path)[0])["a"], torch.arange(9.0))

    @settings(deadline=None, max_examples=10)
    @given(
        st.dictionaries(
            st.text("ab.é0", min_size=1, max_size=6),
            st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(TORCH_NAMES)),
            max_size=8,
        )
    )
    def test_whatever_is_saved(self, tmp_path_factory: pytest.TempPathFactory, asked: dict[str, Any]) -> None:
        path = tmp_path_factory.mktemp("any") / "x.bin"
        tensors = {
            name: torch.zeros(shape).to(getattr(torch, dtype)) for name, (shape, dtype) in asked.items()
        }
        saved(path, {**tensors, "last": torch.ones(2)})
        found = stored(path, read(path)[0])
        assert all(equal(found[name], tensors[name]) for name in tensors)


class TestDigest:
    def test_the_same_weights_have_the_same(self, tmp_path: Path) -> None:
        tensors = {"a": torch.ones(4), "b": torch.zeros(3)}
        (tmp_path / "y").mkdir()
        one, other = saved(tmp_path / "x.bin", tensors), saved(tmp_path / "y" / "x.bin", tensors)
        assert read(one)[0].digest == read(other)[0].digest

    @pytest.mark.parametrize(
        "other", [{"a": torch.ones(5)}, {"b": torch.ones(4)}, {"a": torch.zeros(4)}, {"a": torch.ones(2, 2)}]
    )
    def test_others_have_another(self, tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
        """The archive has checksums of its data, so that even other numbers show."""
        path = saved(tmp_path / "x.bin", {"a": torch.ones(4)})
        before = read(path)[0].digest
        assert read(saved(path, other))[0].digest != before


class TestNested:
    @pytest.mark.parametrize("key", ["state_dict", "model"])
    def test_one_step_below_is_told(self, tmp_path: Path, key: str) -> None:
        path = saved(tmp_path / "x.ckpt", {"epoch": 3, key: {"a": torch.ones(2)}, "args": {"lr": [0.1]}})
        header, notes = read(path)
        assert [tensor.name for tensor in header.tensors] == ["a"]
        assert notes == (
            f"the tensors of x.ckpt are those below '{key}'; beside it, and left out: epoch, args.",
        )

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ({"model": {"a": torch.ones(1)}, "ema": {"a": torch.ones(1)}}, "tensors below model, ema"),
            ({"model": {"a": torch.ones(1)}, "opt": [{"s": (torch.ones(1),)}]}, "tensors below model, opt"),
            ({"x": {"y": {"a": torch.ones(1)}}}, "x is a dict|y is a dict"),
            ({"epoch": 3}, "holds no tensors"),
            ({}, "holds no tensors"),
            ([torch.ones(1)], "holds a list, not a map"),
            (torch.ones(1), "not a map from names to tensors"),
        ],
    )
    def test_what_is_not_clear_is_refused(self, tmp_path: Path, value: Any, said: str) -> None:
        assert re.search(said, refusal_of(saved(tmp_path / "x.bin", value)))

    def test_a_circle_ends(self, tmp_path: Path) -> None:
        circle: dict[str, Any] = {"lr": 1}
        circle["again"] = [circle]
        path = saved(tmp_path / "x.bin", {"model": {"a": torch.ones(1)}, "circle": circle})
        assert len(read(path)[0].tensors) == 1


class TestViews:
    @pytest.mark.parametrize(
        ("tensor", "said"),
        [
            (torch.randn(3, 4).t(), "do not lie one after the other"),
            (torch.ones(1).expand(5), "do not lie one after the other"),
            (torch.randn(4, 4)[:, 1], "do not lie one after the other"),
            (torch.randn(3, dtype=torch.complex64).conj(), "changes the sign"),
            (torch.ones(1, dtype=torch.complex64).conj().imag, "changes the sign"),
            (torch.eye(3).to_sparse(), "is sparse"),
            (torch.ones(2, dtype=torch.complex128), "is of torch.complex128, which raymerge does not know"),
            (torch.ones(3, device="meta"), "is not where torch takes it to be"),
            (3, "is a int and no tensor"),
            (None, "is a NoneType and no tensor"),
            (torch.Size([1]), "is a Size and no tensor"),
        ],
    )
    def test_is_refused_by_name(self, tmp_path: Path, tensor: Any, said: str) -> None:
        text = refusal_of(saved(tmp_path / "pytorch_model.bin", {"good": torch.ones(2), "odd": tensor}))
        assert f": odd {said}" in text or ("odd is a view" in text and said in text)
        assert "good" not in text
        assert "model.safetensors" in text

    def test_all_of_a_kind_in_one_sentence(self, tmp_path: Path) -> None:
        odd = {f"w{number}": torch.randn(3, 4).t() for number in range(5)}
        text = refusal_of(saved(tmp_path / "x.bin", {"good": torch.ones(2), **odd, "step": 7}))
        assert "each of 5 entries (w0, w1, w2 and 2 more) is a view" in text
        assert "step is a int and no tensor" in text
        assert len(text.splitlines()) == 2

    @pytest.mark.parametrize("name", ["__metadata__", "half\ud800", 7])
    def test_names_that_safetensors_cannot_have(self, tmp_path: Path, name: Any) -> None:
        assert "cannot be a name" in refusal_of(saved(tmp_path / "x.bin", {name: torch.ones(1)}))

    @pytest.mark.slow
    def test_the_command_of_the_remedy_works(self, tmp_path: Path) -> None:
        tensors = {"good": torch.ones(2), "odd": torch.randn(3, 4).t()}
        path = saved(tmp_path / "pytorch_model.bin", {"model": {**tensors, "step": 7}})
        command = refusal_of(path).splitlines()[0].partition("convert it: ")[2]
        program, *arguments = shlex.split(command)
        assert program == "python"
        subprocess.run([sys.executable, *arguments], check=True, timeout=120)
        found = load_file(tmp_path / "model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("d/pytorch_model.bin", "'d/model.safetensors'"),
        ("pytorch_model-00001-of-00002.bin", "'model-00001-of-00002.safetensors'"),
        ("d/unet.pt", "'d/unet.safetensors'"),
    ],
)
def test_converted_files_have_the_names_that_are_looked_for(path: str, target: str) -> None:
    assert f"torch.load('{path}'" in conversion_command(path)
    assert target in conversion_command(path)


class TestCode:
    def test_is_never_run(self, tmp_path: Path) -> None:
        text = refusal_of(saved(tmp_path / "x.bin", {"a": torch.ones(2), "b": Marker(tmp_path / "harmed")}))
        assert "would run code or build other things" in text
        assert re.search(r"posix|os\.mkdir|nt", text)
        assert os.listdir(tmp_path) == ["x.bin"]

    def test_is_never_run_in_the_older_format(self, tmp_path: Path) -> None:
        value = {"a": torch.ones(2), "b": Marker(tmp_path / "harmed")}
        torch.save(value, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
        refusal_of(tmp_path / "x.bin")
        assert os.listdir(tmp_path) == ["x.bin"]


def _archive(path: Path) -> Path:
    return saved(path, {"a": torch.arange(40.0), "b": torch.ones(7)})


class TestArchives:
    def test_the_older_format(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
        text = refusal_of(tmp_path / "x.bin")
        assert "not of the format that torch writes since version 1.6" in text
        assert "weights_only=True" in text

    @pytest.mark.parametrize(
        "content", [b"", b"version https://git-lfs", b"PK\x03\x04", b"\x80\x02", b"x" * 99]
    )
    def test_no_archive_at_all(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.bin").write_bytes(content)
        text = refusal_of(tmp_path / "x.bin")
        assert ("git lfs pull" in text) == content.startswith(b"version")

    def test_one_packed_again_without_torch_s_mark_is_read(self, tmp_path: Path) -> None:
        path = repacked(_archive(tmp_path / "x.bin"), tmp_path / "again.bin", without=MARKS)
        found = stored(path, read(path)[0])
        assert torch.equal(found["a"], torch.arange(40.0))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            # torch computes offsets from how it packs itself; for an archive packed again they are wrong.
            ({}, "another tool packed this archive.*convert it"),
            ({"compress": True}, "x/data/0 is compressed"),
            ({"change": {"byteorder": b"big"}}, "big-endian"),
            ({"without": ("data.pkl",)}, "without a description of tensors"),
            ({"change": {"data/1": b"\0" * 20}, "without": MARKS}, ": b is not where torch takes it to be"),
            ({"without": ("data/1", ".format_version")}, ""),
            *(
                ({"change": {"data.pkl": text}}, "")
                for text in (b"", b"junk", b"\x80\x02N.", b"\x80\x02K\x01")
            ),
        ],
    )
    def test_one_packed_otherwise(self, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
        path = repacked(_archive(tmp_path / "x.bin"), tmp_path / "again.bin", **changes)
        assert re.search(said, refusal_of(path))

    def test_a_program(self, tmp_path: Path) -> None:
        path = repacked(_archive(tmp_path / "x.bin"), tmp_path / "ts.bin", change={"version": b"3"})
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x/constants.pkl", b"")
        assert "TorchScript" in refusal_of(path)

    def test_a_name_twice(self, tmp_path: Path) -> None:
        path = _archive(tmp_path / "x.bin")
        with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x/data/0", b"0" * 160)
        assert "has a name twice" in refusal_of(path)

    def test_a_local_header_of_another_record(self, tmp_path: Path) -> None:
        path = _archive(tmp_path / "x.bin")
        overwrite(path, local_header(path, "/data/0") + 30, b"x/data/1")
        assert "is not where the directory says" in refusal_of(path)

    @pytest.mark.parametrize("part", [0.07, 0.5, 0.999])
    def test_cut_off(self, tmp_path: Path, part: float) -> None:
        path = _archive(tmp_path / "x.bin")
        os.truncate(path, int(part * path.stat().st_size))
        assert "Download or copy the file again" in refusal_of(path)

    @settings(deadline=None, max_examples=20)
    @given(at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
    def test_a_changed_byte_is_refused_or_changes_no_place(
        self, tmp_path_factory: pytest.TempPathFactory, at: float, value: int
    ) -> None:
        path = _archive(tmp_path_factory.mktemp("harmed") / "x.bin")
        before = {tensor.name: tensor for tensor in read(path)[0].tensors}
        overwrite(path, int(at * path.stat().st_size), bytes([value]))
        try:
            header, _ = read(path)
        except CheckpointError:
            return
        starts = {tensor.offset for tensor in before.values()}
        assert all(tensor.offset in starts for tensor in header.tensors if tensor.nbytes)


def test_a_torch_that_does_not_tell_places_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _archive(tmp_path / "x.bin")
    load = torch.load

    def older(*arguments: Any, **options: Any) -> Any:
        found = load(*arguments, **options)
        for tensor in found.values():
            tensor.untyped_storage()._checkpoint_offset = None
        return found

    monkeypatch.setattr(torch, "load", older)
    text = refusal_of(path)
    assert "each of 2 entries (a, b) is not where torch takes it to be" in text
    assert "this torch is too old" in text


def test_the_data_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "x.bin", {f"w{number}": torch.ones(1 << 20) for number in range(4)})
    reads: list[int] = []
    original = LocalStore.read_into

    def counting(self: LocalStore, key: str, offset: int, buffer: memoryview) -> None:
        reads.append(buffer.nbytes)
        original(self, key, offset, buffer)

    monkeypatch.setattr(LocalStore, "read_into", counting)
    assert len(read(path)[0].tensors) == 4
    assert sum(reads) < 1 << 20 < path.stat().st_size


class _Far(LocalStore):
    """A directory that takes its time, and counts what it is asked."""

    asked: list[int]
    others: threading.Event
    """Set once a second record is asked for."""

    @property
    def is_far(self) -> bool:
        return True

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.asked.append(buffer.nbytes)
        if buffer.nbytes < 100:
            if sum(nbytes < 100 for nbytes in self.asked) > 1:
                self.others.set()
            assert self.others.wait(10), "they are asked for one after the other"
        super().read_into(key, offset, buffer)


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_a_server_is_asked_once_for_each_record_and_for_both_ends(size: int, tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.full((size,), float(number)) for number in range(40)}
    path = saved(tmp_path / "x.bin", tensors)
    info = FileInfo(path.name, path.stat().st_size, "v")
    with _Far(path.parent) as store:
        store.asked, store.others = [], threading.Event()
        assert read_pickled(store, info) == read(path)
    if size == 1:
        assert store.asked == [info.nbytes]
        return
    ends = [nbytes for nbytes in store.asked if nbytes == 256 << 10]
    heads = [nbytes for nbytes in store.asked if nbytes < 100]
    # Of those that lie in the ends nothing is asked for again.
    assert (len(ends), len(heads)) == (2, len(store.asked) - 2)
    assert 30 < len(heads) < 40
    assert sum(store.asked) < info.nbytes // 10
