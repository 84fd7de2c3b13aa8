"""Checkpoints that many tests of the runtime read, and one Ray cluster for all that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kits.merge_cases import Family, make_family


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A merge of it is one segment."""
    return make_family(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A merge of it is dozens of segments."""
    return make_family(tmp_path_factory.mktemp("medium"), hidden=256, files=2)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Its tensors are cut into several tiles under a small budget."""
    return make_family(tmp_path_factory.mktemp("large"), hidden=640, layers=1)


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
