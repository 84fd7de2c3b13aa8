"""Addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymerge.errors import OptionError
from raymerge.storage.open import open_store


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("out", "out"),
        ("/data/models/a b", "/data/models/a b"),
        ("./x:y", "x:y"),
        ("file:///data/model", "/data/model"),
        ("file:///data/a%20b", "/data/a b"),
        ("file://localhost/data", "/data"),
        ("FILE:///data", "/data"),
    ],
)
def test_local_places(uri: str, root: str) -> None:
    assert open_store(uri).root == Path(root)


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_store("~/models").root == Path("/home/somebody/models")


@pytest.mark.parametrize(
    "uri", ["s3://bucket/x", "gs://bucket/x", "hf://org/name", "file://host/x", "S3://b"]
)
def test_other_places_are_refused_with_the_way_out(uri: str) -> None:
    with pytest.raises(OptionError, match=r"not readable yet\. Copy it to a local directory") as caught:
        open_store(uri)
    assert str(caught.value).startswith(uri)
