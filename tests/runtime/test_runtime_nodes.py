"""Nodes that see different files, on hosts that this machine plays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chaos.nodes import PORT, joining, start_node
from kits.hosts import Host, hosts, reason_against
from kits.merge_cases import Family, digests, make_family, merge, recipes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True)
class Place:
    shared: Path
    """All nodes see it."""
    first: Path
    """Only the first node sees it."""
    second: Path
    """Only the second node sees it."""
    nowhere: Family
    """Only this process and the driver, on the head, see it."""
    submit: Callable[[dict[str, Any], Path], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if reason := reason_against():
        pytest.skip(reason)
    root, environment = (
        tmp_path_factory.mktemp("nodes"),
        joining() | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    shared, first, second = (make_family(root / name, hidden=256).tunes[0] for name in ("all", "one", "two"))
    nowhere = make_family(root / "nowhere")
    with hosts(3) as (head, *nodes):
        first_flags = ("--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false")
        start_node(head, environment, *first_flags)
        for node, hidden in zip(nodes, (second, first), strict=True):
            for directory in (hidden.parent, root / "nowhere"):
                node.run(["mount", "-t", "tmpfs", "none", str(directory)], {})
            start_node(node, environment, "--address", f"{head.address}:{PORT}", "--num-cpus", "1")

        def submit(recipe: dict[str, Any], output: Path) -> subprocess.CompletedProcess[str]:
            return _submitted(head, environment, recipe, output)

        yield Place(shared, first, second, nowhere, submit)


def _submitted(
    head: Host, environment: dict[str, str], recipe: dict[str, Any], output: Path
) -> subprocess.CompletedProcess[str]:
    path = output.with_name("recipe.yml")
    path.write_text(json.dumps(recipe))
    flags = ["--address", f"{head.address}:{PORT}", "--workers", "2", "--threads", "1", "--memory", "16MiB"]
    program = [sys.executable, "-m", "raymerge.cli"]
    return subprocess.run(
        [*head.inside(), *program, "submit", str(path), "-o", str(output), "--json", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_source_that_no_node_sees_is_told_by_node(place: Place, tmp_path: Path) -> None:
    done = place.submit(recipes(place.nowhere)["linear"], tmp_path / "out")
    assert done.returncode == 2, done.stderr
    (error,) = (json.loads(line) for line in done.stdout.splitlines() if '"error"' in line)
    for model in place.nowhere.tunes:
        assert f"{model}: no node with CPUs sees the files that were planned with (" in error["message"]
    assert error["message"].count("model.safetensors is absent") == 2 * len(place.nowhere.tunes)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yml"]


def test_segments_go_where_their_sources_are(place: Place, tmp_path: Path) -> None:
    """The first layer can only be made on the first node, the last on the second, that between on both."""
    slices = [
        {"sources": [{"model": str(model), "layer_range": [number % 2, number % 2 + 1]}]}
        for number, model in enumerate((place.first, place.shared, place.second))
    ]
    recipe = {"merge_method": "passthrough", "slices": slices}
    done = place.submit(recipe, tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({event["worker"] for event in events if event["event"] == "segment_done"}) == 2
    merge(str(tmp_path / "recipe.yml"), tmp_path / "inline")
    assert digests(tmp_path / "out") == digests(tmp_path / "inline")
