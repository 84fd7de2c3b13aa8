"""Companion files arrive byte for byte, or nothing is copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.errors import CheckpointError
from raymerge.publish.finish import copy_companions
from raymerge.storage.local.store import LocalStore

FILES = {
    "tokenizer.json": b'{"a": 1}\r\n',
    "merges.txt": "été\n".encode(),
    "empty.txt": b"",
    "code/modeling_x.py": b"import torch\n",
    "big.model": bytes(range(256)) * 40_000,
}


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    for key, data in FILES.items():
        path = tmp_path / "source" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return LocalStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> LocalStore:
    (tmp_path / "target").mkdir()
    return LocalStore(tmp_path / "target")


def test_files_arrive_with_their_bytes(source: LocalStore, target: LocalStore) -> None:
    assert len(FILES["big.model"]) > 8 << 20
    copy_companions(source, target, ["tokenizer.json", "code/modeling_x.py"])
    assert [file.key for file in target.files()] == ["code/modeling_x.py", "tokenizer.json"]
    target.write_atomic("tokenizer.json", b"something longer than the file that comes")
    for _ in range(2):
        copy_companions(source, target, FILES)
        assert {file.key: target.read(file.key, 0, file.nbytes) for file in target.files()} == FILES


@pytest.mark.parametrize(
    "key",
    [
        "config.json",
        "README.md",
        "raymerge/plan.json",
        "model.safetensors",
        "sub/other.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_names_that_the_output_uses_are_refused(
    source: LocalStore, target: LocalStore, tmp_path: Path, key: str
) -> None:
    path = tmp_path / "source" / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="name of a file that the merge writes") as caught:
        copy_companions(source, target, ["tokenizer.json", key])
    assert [problem.where for problem in caught.value.problems] == [str(path)]
    assert target.files() == ()


def test_all_problems_at_once_and_nothing_copied(source: LocalStore, target: LocalStore) -> None:
    keys = ["config.json", "gone.txt", "tokenizer.json", "README.md"]
    with pytest.raises(CheckpointError) as caught:
        copy_companions(source, target, keys)
    assert len(caught.value.problems) == 3
    assert "gone since the plan was made" in str(caught.value)
    assert target.files() == ()


def test_names_in_directories_of_their_own_are_no_collision(
    source: LocalStore, target: LocalStore, tmp_path: Path
) -> None:
    keys = ("encoder/config.json", "docs/README.md", "raymerge.txt")
    for key in keys:
        path = tmp_path / "source" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    copy_companions(source, target, keys)
    assert {file.key for file in target.files()} == {*keys}
