"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.errors import CheckpointError, OptionError
from raymerge.storage.open import open_store, resolve_source


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_store("~/models").root == Path("/home/somebody/models")


@pytest.mark.parametrize(
    ("place", "name"),
    [("s3://bucket/x", "ObjectStore"), ("gs://b", "ObjectStore"), ("az://c/x", "ObjectStore")],
)
def test_object_stores_are_opened_without_asking_them(place: str, name: str) -> None:
    assert type(open_store(place)).__name__ == name


def test_a_place_on_another_machine_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^file://host/x: names the machine host"):
        open_store("file://host/x")


def test_a_source_may_be_a_file_address(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    assert resolve_source(model.as_uri()) == str(model)
    with pytest.raises(CheckpointError, match=r"^file://tmp/x: names the machine tmp"):
        resolve_source("file://tmp/x")
    with pytest.raises(CheckpointError, match=r"Write s3://bucket/x"):
        resolve_source("s3:/bucket/x")
