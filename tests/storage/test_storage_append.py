"""Adding to the end of a file: durable, and where there is no room it is said which file system lacks it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from raymerge.errors import RoomError
from raymerge.storage.local.store import LocalStore


def test_what_is_added_comes_last_and_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), real(descriptor))[1])
    (tmp_path / "ledger").write_bytes(b"one\n")
    with LocalStore(tmp_path) as store:
        for number, line in enumerate((b"two\n", b"", b"three\n")):
            store.append("ledger", line)
            assert len(synced) == number + 1
    assert (tmp_path / "ledger").read_bytes() == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_a_full_file_system_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it says so only when what was written is to be durable."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "ledger"
    path.write_bytes(b"one\n")
    with LocalStore(tmp_path) as store:
        monkeypatch.setattr(os, name, full)
        with pytest.raises(RoomError, match=rf"{path}.*cannot take .* free") as caught:
            store.append("ledger", b"two\n")
    assert "Free space there" in str(caught.value)
