"""Companion files arrive byte for byte, or nothing is copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from raymerge.errors import CheckpointError
from raymerge.publish.companions import Copied, companion_problems, copy_companions
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


def test_bytes_sizes_and_digests(source: LocalStore, target: LocalStore) -> None:
    copied = copy_companions(source, target, FILES)
    assert copied == tuple(
        Copied(key, len(data), xxhash.xxh3_128_hexdigest(data)) for key, data in FILES.items()
    )
    assert {file.key: target.read(file.key, 0, file.nbytes) for file in target.files()} == FILES


def test_only_what_is_asked_for_in_that_order(source: LocalStore, target: LocalStore) -> None:
    wanted = ["tokenizer.json", "code/modeling_x.py"]
    assert [each.key for each in copy_companions(source, target, wanted)] == wanted
    assert len(target.files()) == 2
    assert copy_companions(source, target, []) == ()


def test_copying_again_gives_the_same(source: LocalStore, target: LocalStore) -> None:
    target.write_atomic("tokenizer.json", b"something longer than the file that comes")
    first = copy_companions(source, target, FILES)
    assert copy_companions(source, target, FILES) == first
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
    assert len(companion_problems(source, keys)) == 3
    with pytest.raises(CheckpointError) as caught:
        copy_companions(source, target, keys)
    assert len(caught.value.problems) == 3
    assert "gone since the plan was made" in str(caught.value)
    assert target.files() == ()


def test_names_in_directories_of_their_own_are_no_collision(source: LocalStore, tmp_path: Path) -> None:
    for key in ("encoder/config.json", "docs/README.md", "raymerge.txt"):
        path = tmp_path / "source" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        assert companion_problems(source, [key]) == ()
