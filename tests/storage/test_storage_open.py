"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.errors import CheckpointError
from raymerge.storage.open import open_store, resolve_source


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_store("~/models").root == Path("/home/somebody/models")


def test_a_source_may_be_a_file_address(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    assert resolve_source(model.as_uri()) == str(model)
    with pytest.raises(CheckpointError, match=r"^file://tmp/x: names the machine tmp"):
        resolve_source("file://tmp/x")
    with pytest.raises(CheckpointError, match=r"Write s3://bucket/x"):
        resolve_source("s3:/bucket/x")
