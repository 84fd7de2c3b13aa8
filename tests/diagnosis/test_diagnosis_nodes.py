"""Real nodes of Ray on hosts that this machine plays: the one with another raymerge is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.nodes import PORT, joining, start_node
from kits.hosts import hosts, reason_against

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_node_with_another_raymerge_is_named_though_it_cannot_import_ours(tmp_path: Path) -> None:
    if reason := reason_against():
        pytest.skip(reason)
    other = tmp_path / "raymerge-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: raymerge\nVersion: 9.9.9\n")
    (tmp_path / "raymerge").mkdir()
    (tmp_path / "raymerge" / "__init__.py").write_text("")
    ours = joining() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    theirs = ours | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with hosts(3) as (head, first, second):
        flags = ("--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false")
        start_node(head, ours, *flags)
        for node, environment in ((first, ours), (second, theirs)):
            start_node(node, environment, "--address", f"{head.address}:{PORT}", "--num-cpus", "1")
        done = subprocess.run(
            [
                *(*head.inside(), sys.executable, "-m", "raymerge.cli", "doctor", str(tmp_path), "--json"),
                *("--address", f"{head.address}:{PORT}"),
            ],
            env={**os.environ, **ours},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    checks = json.loads(done.stdout)["checks"]
    problems = [(each["topic"], each["fact"]) for each in checks if each["verdict"] == "problem"]
    ((topic, fact),) = problems
    assert topic == f"node {second.name}"
    assert fact.startswith("raymerge 9.9.9 where this machine has ")
    assert "3 nodes with 2 CPU slots" in next(
        each["fact"] for each in checks if each["topic"] == "Ray cluster"
    )
    assert sum(each["topic"].startswith("node ") for each in checks) == 4
    assert done.returncode == 2
