"""Checkpoints that many tests of the runtime read, and one Ray cluster for all that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import Family, make_family
from kits.s3_server import S3Server
from kits.seaweed_server import S3_SERVERS, any_s3_server


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Its merges are one segment."""
    return make_family(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Its merges are dozens of segments."""
    return make_family(tmp_path_factory.mktemp("medium"), hidden=256, files=2)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Its tensors are several tiles under a small budget."""
    return make_family(tmp_path_factory.mktemp("large"), hidden=640, layers=1)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A place for an output, in a directory of its own."""
    (tmp_path / "outs").mkdir()
    return tmp_path / "outs" / "out"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The ray module, connected to an embedded cluster that every pool of this process then uses."""
    from raymerge.runtime.workers.ray_environment import RayConnection

    connection = RayConnection(None, num_cpus=2)
    try:
        connection.open()
        yield connection.ray
    finally:
        connection.close()


@pytest.fixture(scope="session", params=S3_SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    with any_s3_server(request.param) as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server, empty; nothing half uploaded may be left there."""
    server.empty()
    yield server
    server.calm()
    assert server.abort_uploads("") == []
