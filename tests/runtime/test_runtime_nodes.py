"""Nodes that see different files, and nodes that go away, on a cluster of several raylets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import Family, digests, make_family, merge, recipes
from kits.node_cluster import NodeCluster, node_cluster

from raymerge.events import Started

pytestmark = pytest.mark.ray

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a node see other directories")


@dataclass(frozen=True)
class _Place:
    shared: Path
    """All nodes see it."""
    first: Path
    """Only the first node sees it."""
    second: Path
    """Only the second node sees it."""
    nowhere: Path
    """Only this process and the driver see it."""
    cluster: NodeCluster


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Place]:
    root = tmp_path_factory.mktemp("nodes")
    shared, first, second, nowhere = (root / name for name in ("shared", "first", "second", "nowhere"))
    make_family(shared, hidden=256)
    for directory in (first, second, nowhere):
        make_family(directory, hidden=32 if directory == nowhere else 256)
    hidden = [[second, nowhere], [first, nowhere]] if os.geteuid() == 0 else [[], []]
    with node_cluster(hidden) as cluster:
        yield _Place(shared, first, second, nowhere, cluster)


def _family(directory: Path) -> Family:
    return Family(directory / "base", tuple(directory / f"tune{number}" for number in (1, 2, 3)))


def _layers(*models: Path) -> dict[str, Any]:
    """A model of layers that each come from another model, and of what else the first one has."""
    slices = [
        {"sources": [{"model": str(model), "layer_range": [number % 2, number % 2 + 1]}]}
        for number, model in enumerate(models)
    ]
    return {"merge_method": "passthrough", "slices": slices}


# What is found out before the first byte


@pytest.mark.slow
@AS_ROOT
def test_a_source_that_no_node_sees_is_told_by_node(place: _Place, tmp_path: Path) -> None:
    recipe = recipes(_family(place.nowhere))["linear"]
    place.cluster.begin(recipe, tmp_path / "out")
    found = place.cluster.outcome()
    assert found.code == 2
    said = found.said.splitlines()
    assert len(said) == 3
    for line, model in zip(said, _family(place.nowhere).tunes, strict=True):
        assert line.startswith(f"{model}: no node with CPUs sees the files that were planned with (")
        assert line.count("model.safetensors is absent") == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@AS_ROOT
def test_segments_go_where_their_sources_are(place: _Place, tmp_path: Path) -> None:
    """The first layer can only be made on the first node, the last on the second, that between on both."""
    recipe = _layers(place.first / "tune1", place.shared / "tune1", place.second / "tune1")
    place.cluster.begin(recipe, tmp_path / "out")
    found = place.cluster.outcome()
    assert found.code == 0, found.said
    workers = {event["worker"] for event in found.events if event["event"] == "segment_done"}
    assert len(workers) == 2
    merge(recipe, tmp_path / "inline")
    assert digests(tmp_path / "out") == digests(tmp_path / "inline")


# Nodes that go away; these tests leave a smaller cluster behind


@pytest.mark.slow
def test_a_node_that_dies_costs_nothing_but_time(place: _Place, tmp_path: Path) -> None:
    recipe = recipes(_family(place.shared))["linear"]
    place.cluster.begin(recipe, tmp_path / "out", pause=1.2)
    place.cluster.until(3)
    place.cluster.nodes[0].kill()
    found = place.cluster.outcome()
    assert found.code == 0, found.said
    (lost,) = (event for event in found.events if event["event"] == "worker_lost")
    assert lost["segments"]
    assert lost["reason"].startswith("its node is gone")
    merge(recipe, tmp_path / "inline")
    assert digests(tmp_path / "out") == digests(tmp_path / "inline")


@pytest.mark.slow
def test_when_all_nodes_are_gone_the_same_command_goes_on_later(place: _Place, tmp_path: Path) -> None:
    recipe = recipes(_family(place.shared))["linear"]
    place.cluster.begin(recipe, tmp_path / "out", workers=1, pause=0.4, ready_seconds=4.0)
    place.cluster.until(3)
    place.cluster.nodes[1].kill()
    found = place.cluster.outcome()
    assert found.code == 3
    assert "no worker has been up for 4 s" in found.said
    merged = merge(recipe, tmp_path / "out")
    assert merged.of(Started)[0].done_segments >= 3
    merge(recipe, tmp_path / "inline")
    assert digests(tmp_path / "out") == digests(tmp_path / "inline")
