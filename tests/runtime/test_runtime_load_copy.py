"""Copies of remote checkpoints that are to be loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kits.merge_cases import Family
from kits.s3_server import ENVIRONMENT, S3Server, s3_server

from raymerge.runtime.driver.load_copy import copy_to_load


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as found:
        yield found


def test_weights_are_copied_whole_where_the_system_writes_a_part_at_a_time(
    server: S3Server, small: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    place = server.upload(small.base, "model")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, data, at: real(to, data[: max(1, len(data) // 2)], at))
    with copy_to_load(place, memory=1 << 30, scratch=str(tmp_path)) as copy:
        assert copy.lack == ""
        weights = sorted(small.base.glob("*.safetensors"))
        assert weights
        for each in weights:
            assert (copy.root / each.name).read_bytes() == each.read_bytes()
    assert list(tmp_path.iterdir()) == []
