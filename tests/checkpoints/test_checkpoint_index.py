"""Which files hold the weights, and every directory where that is not to be known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raymerge.checkpoints.files import WeightIndex, check_index, find_weights
from raymerge.checkpoints.header import read_header
from raymerge.errors import CheckpointError, Problem
from raymerge.storage.local.store import LocalStore

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def put_weights(root: Path, key: str, *names: str) -> None:
    save_file({name: torch.zeros(4) for name in names}, root / key)


def put_index(root: Path, weight_map: object, *, key: str = INDEX, **metadata: Any) -> None:
    (root / key).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def find(root: Path) -> WeightIndex:
    with LocalStore(root) as store:
        return find_weights(store, store.files())


def check(root: Path) -> tuple[str, list[str]]:
    """The problems as text, and the notes."""
    with LocalStore(root) as store:
        files = store.files()
        index = find_weights(store, files)
        headers = [read_header(store, i.key, i.nbytes, i.version) for i in files if i.key in index.keys]
        problems, notes = check_index(index, headers, store.location("."))
    return "\n".join(map(str, (*index.problems, *problems))), notes


def refusal(root: Path) -> str:
    problems = _problems(root)
    assert problems, "the directory was taken as a checkpoint"
    assert all(problem.remedy for problem in problems)
    return "\n".join(map(str, problems))


def _problems(root: Path) -> tuple[Problem, ...]:
    try:
        return find(root).problems
    except CheckpointError as error:
        return error.problems


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    put_weights(tmp_path, ONE, "a", "b")
    put_weights(tmp_path, TWO, "c")
    put_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO}, total_size=48)
    return tmp_path


class TestAccepted:
    def test_a_single_file(self, tmp_path: Path) -> None:
        put_weights(tmp_path, "model.safetensors", "a")
        assert find(tmp_path) == WeightIndex(("model.safetensors",), None, None, ())
        assert check(tmp_path) == ("", [])

    def test_several_files_with_an_index(self, sharded: Path) -> None:
        index = find(sharded)
        assert index.keys == (ONE, TWO)
        assert index.weight_map == {"a": ONE, "b": ONE, "c": TWO}
        assert (index.total_size, index.notes, index.problems) == (48, (), ())
        assert check(sharded) == ("", [])

    def test_an_index_may_name_files_as_it_likes(self, tmp_path: Path) -> None:
        put_weights(tmp_path, "weights.part_a.safetensors", "a")
        put_index(tmp_path, {"a": "weights.part_a.safetensors"})
        assert find(tmp_path).keys == ("weights.part_a.safetensors",)
        assert find(tmp_path).notes == ()

    @pytest.mark.parametrize("of", ["00003", "000003"])
    def test_a_complete_set_without_an_index(self, tmp_path: Path, of: str) -> None:
        for number in (1, 2, 3):
            put_weights(tmp_path, f"model-{number:05d}-of-{of}.safetensors", f"x{number}")
        index = find(tmp_path)
        assert len(index.keys) == 3
        assert index.weight_map is None
        assert "the 3 numbered files are complete" in index.notes[0]
        assert check(tmp_path) == ("", [])


class TestTwoSets:
    def test_a_single_file_beside_the_index(self, sharded: Path) -> None:
        put_weights(sharded, "model.safetensors", "a")
        text = refusal(sharded)
        assert "holds model.safetensors beside model.safetensors.index.json, which does not name it" in text
        assert "Delete model.safetensors if" in text

    def test_a_single_file_beside_numbered_ones(self, tmp_path: Path) -> None:
        put_weights(tmp_path, "model.safetensors", "a")
        put_weights(tmp_path, ONE, "a")
        assert f"holds model.safetensors and also {ONE}" in refusal(tmp_path)

    @pytest.mark.parametrize("of", ["00009", "000009"])
    def test_remains_of_another_run(self, sharded: Path, of: str) -> None:
        for number in range(1, 6):
            put_weights(sharded, f"model-{number:05d}-of-{of}.safetensors", "a")
        text = refusal(sharded)
        assert f"holds model-00001-of-{of}.safetensors, model-00002-of-{of}.safetensors" in text
        assert "and 2 more, which" in text
        assert "remains of another set" in text

    @pytest.mark.parametrize(
        "second", ["model.fp16.safetensors.index.json", "model-old.safetensors.index.json"]
    )
    def test_a_second_index(self, sharded: Path, second: str) -> None:
        put_index(sharded, {"a": ONE}, key=second)
        text = refusal(sharded)
        assert "holds 2 indexes" in text
        assert second in text

    def test_an_index_under_another_name_alone(self, sharded: Path) -> None:
        (sharded / INDEX).rename(sharded / "model.fp16.safetensors.index.json")
        assert "Rename it to model.safetensors.index.json" in refusal(sharded)

    def test_two_numbered_sets_without_an_index(self, tmp_path: Path) -> None:
        for name in (ONE, TWO, "model-00001-of-00001.safetensors"):
            put_weights(tmp_path, name, name)
        text = refusal(tmp_path)
        assert "1 files of 1 and 2 files of 2" in text
        assert "several sets" in text


class TestIncomplete:
    def test_a_missing_file_is_named_with_its_tensors(self, sharded: Path) -> None:
        (sharded / ONE).unlink()
        text = refusal(sharded)
        assert f"names {ONE}, which is not in the directory (2 tensors)" in text

    def test_missing_numbers_are_named(self, tmp_path: Path) -> None:
        for number in (1, 4):
            put_weights(tmp_path, f"model-{number:05d}-of-00007.safetensors", "x")
        text = refusal(tmp_path)
        assert "holds 2 of 7 numbered files and no index; 5 missing" in text
        assert "model-00002-of-00007.safetensors, model-00003-of-00007.safetensors" in text
        assert "model-00005-of-00007.safetensors and others" in text

    @pytest.mark.parametrize(
        "numbers", [["00000", "00001"], ["00001", "00002", "00003"], ["00001", "000001"]]
    )
    def test_numbers_that_are_no_sequence(self, tmp_path: Path, numbers: list[str]) -> None:
        for number in numbers:
            put_weights(tmp_path, f"model-{number}-of-00002.safetensors", number)
        assert "no sequence from 1" in refusal(tmp_path)


class TestHostileIndex:
    @pytest.mark.parametrize("key", ["../outside.safetensors", "a/b.safetensors", "", ".."])
    def test_only_files_beside_it(self, sharded: Path, key: str) -> None:
        put_index(sharded, {"a": ONE, "b": key, "c": TWO})
        text = refusal(sharded)
        assert f"places tensor 'b' in {key!r}, which is not the name of a file beside it" in text

    def test_only_safetensors(self, sharded: Path) -> None:
        (sharded / "x.bin").write_bytes(b"")
        put_index(sharded, {"a": ONE, "b": "x.bin", "c": TWO})
        assert "names x.bin: no safetensors" in refusal(sharded)
        assert find(sharded).keys == (ONE, TWO)

    def test_thousands_of_files_are_counted_quickly(self, sharded: Path) -> None:
        put_index(sharded, {f"x{n}": f"{n:06d}.safetensors" if n % 2 else f"../{n}" for n in range(60_000)})
        text = refusal(sharded)
        assert "(30000 such names in all)" in text
        assert (
            "names 000001.safetensors, 000003.safetensors, 000005.safetensors and 29997 more, which are"
            in text
        )
        assert len(text) < 2000

    def test_all_of_it_at_once(self, sharded: Path) -> None:
        put_index(sharded, {"a": "../a.safetensors", "b": "b.safetensors", "c": TWO})
        put_weights(sharded, "model.safetensors", "a")
        assert len(refusal(sharded).splitlines()) == 4

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is not JSON"),
            ("[]", "the index is not a JSON object"),
            ("{}", "weight_map is missing"),
            ('{"weight_map": {"a": 1}}', "is not a map from tensor names to file names"),
            ('{"weight_map": {}}', "weight_map names no tensor"),
            ('{"weight_map": {"a": "x", "a": "y"}}', "names 'a' twice"),
            ("[" * 100_000, "nested too deep"),
        ],
    )
    def test_other_contents(self, sharded: Path, text: str, message: str) -> None:
        (sharded / INDEX).write_text(text)
        found = refusal(sharded)
        assert message in found
        assert found.startswith(str(sharded / INDEX))


class TestAgainstHeaders:
    def test_a_tensor_that_the_file_lacks(self, sharded: Path) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO, "d": TWO})
        text, _ = check(sharded)
        assert text.startswith(f"{sharded}: {INDEX} places 1 tensor (d) in {TWO}, which does not hold them")

    def test_a_tensor_that_the_index_lacks(self, sharded: Path) -> None:
        put_index(sharded, {"a": ONE, "c": TWO})
        text, _ = check(sharded)
        assert text.startswith(f"{sharded}: {ONE} holds 1 tensor (b) that {INDEX} does not place there")

    def test_a_tensor_in_the_wrong_file(self, sharded: Path) -> None:
        put_index(sharded, {"a": ONE, "b": TWO, "c": TWO})
        text, _ = check(sharded)
        assert f"places 1 tensor (b) in {TWO}" in text
        assert f"{ONE} holds 1 tensor (b)" in text

    def test_many_files_that_disagree_are_not_all_listed(self, tmp_path: Path) -> None:
        files = [f"x{number:02d}.safetensors" for number in range(20)]
        for file in files:
            put_weights(tmp_path, file, file)
        put_index(tmp_path, {f"ghost.{file}": file for file in files})
        text, _ = check(tmp_path)
        assert len(text.splitlines()) == 9
        assert f"there are 32 more such disagreements with {INDEX}." in text

    @pytest.mark.parametrize("with_index", [True, False])
    def test_a_tensor_in_two_files(self, sharded: Path, with_index: bool) -> None:
        put_weights(sharded, TWO, "a", "c")
        if not with_index:
            (sharded / INDEX).unlink()
        text, _ = check(sharded)
        assert f"holds 1 tensor (a) in more than one file (the first in {ONE} and {TWO})" in text

    @pytest.mark.parametrize("size", [47, 49, 24, 10**15, 47.0, 0])
    def test_a_wrong_total_is_a_note(self, sharded: Path, size: float) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total_size=size)
        text, notes = check(sharded)
        assert text == ""
        assert f"total_size as {int(size)}, the headers add up to 48 bytes" in notes[0]

    @pytest.mark.parametrize("size", [23, 1, -5])
    def test_a_total_below_half_is_another_model(self, sharded: Path, size: int) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total_size=size)
        text, notes = check(sharded)
        assert "the index is of another model" in text
        assert notes == []

    @pytest.mark.parametrize("size", ["48", True, 1.5, [48], {}, 1e308])
    def test_a_total_that_is_no_number_of_bytes(self, sharded: Path, size: object) -> None:
        put_index(sharded, {"a": ONE, "b": ONE, "c": TWO}, total_size=size)
        if size == 1e308:
            assert check(sharded)[0] == ""
            return
        index = find(sharded)
        assert index.total_size is None
        assert "not a size; ignored" in index.notes[0]


class TestNoWeights:
    def holding(self, root: Path, *names: str) -> str:
        for name in names:
            (root / name).write_bytes(b"")
        return refusal(root)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
    def test_pickles(self, tmp_path: Path, name: str) -> None:
        text = self.holding(tmp_path, name)
        assert f"has its weights in {name}, and pickled weights are refused (pickled_weights: refuse)" in text
        assert f"M.from_pretrained('{tmp_path}'" in text
        assert f"m.save_pretrained('{tmp_path}-safetensors')" in text

    def test_gguf(self, tmp_path: Path) -> None:
        assert "has its weights in x.Q4_K_M.gguf; GGUF is" in self.holding(tmp_path, "x.Q4_K_M.gguf")

    @pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
    def test_adapter(self, tmp_path: Path, weights: str) -> None:
        assert "is a LoRA adapter" in self.holding(tmp_path, "adapter_config.json", weights)

    def test_safetensors_under_other_names(self, tmp_path: Path) -> None:
        text = self.holding(tmp_path, "consolidated.safetensors", "foo.safetensors")
        assert "holds consolidated.safetensors, foo.safetensors, but neither model.safetensors" in text

    def test_weights_in_a_directory_below_do_not_count(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        put_weights(tmp_path / "a", "model.safetensors", "x")
        assert "holds no weights" in refusal(tmp_path)
