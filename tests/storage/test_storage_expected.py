"""Files that must be what they were when the plan was made, while they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raymerge.errors import CheckpointError
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import FileInfo

SAID = r"x: the file was changed while it was merged\. Leave the sources alone"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    for key in ("x", "y"):
        (tmp_path / key).write_bytes(b"0123456789")
        os.utime(tmp_path / key, ns=(1, 1000))
    return LocalStore(tmp_path, expected={"x": FileInfo("x", 10, "1000")})


def test_a_file_that_is_as_expected_is_read(store: LocalStore) -> None:
    assert store.read("x", 2, 3) == b"234"
    store.check_expected()


@pytest.mark.parametrize("content", [b"9876543210", b"012345678"], ids=["as long", "shorter"])
def test_another_file_is_not_read(store: LocalStore, content: bytes) -> None:
    """Also if it is gone again when one looks: what was opened would be read for long."""
    (store.root / "other").write_bytes(content)
    os.utime(store.root / "other", ns=(1, 1000 + (len(content) == 10)))
    (store.root / "x").rename(store.root / "kept")
    (store.root / "other").rename(store.root / "x")
    with pytest.raises(CheckpointError, match=SAID):
        store.read("x", 0, 1)
    (store.root / "kept").rename(store.root / "x")
    store.check_expected()
    assert store.read("x", 0, 10) == b"0123456789"


def test_a_file_that_is_written_to_after_it_was_opened_is_found(store: LocalStore) -> None:
    store.read("x", 0, 1)
    with (store.root / "x").open("r+b") as file:
        file.write(b"new")
    with pytest.raises(CheckpointError, match=SAID):
        store.check_expected()


def test_a_file_that_takes_the_place_of_one_that_was_read_is_found(store: LocalStore) -> None:
    store.read("x", 0, 1)
    (store.root / "z").write_bytes(b"0123456789")
    (store.root / "z").replace(store.root / "x")
    with pytest.raises(CheckpointError, match=SAID):
        store.check_expected()


def test_of_others_and_of_what_is_gone_nothing_is_said(store: LocalStore) -> None:
    store.read("x", 0, 1)
    store.read("y", 0, 1)
    (store.root / "y").write_bytes(b"new")
    (store.root / "x").unlink()
    store.check_expected()
    assert store.read("x", 1, 2) == b"12"
