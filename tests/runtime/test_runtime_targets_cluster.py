"""The target cluster: workers that join while others work, and addresses that cannot be."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from kits.command_line import run_command
from kits.merge_cases import digests, make_family, merge, recipes

_DRIVE = """
import functools, json, os, sys, time
from ray.cluster_utils import Cluster

import raymerge
from raymerge.runtime.workers import ray_pool
from raymerge.events import SegmentDone
from raymerge.runtime.workers.worker import MergeWorker


class Slow(MergeWorker):
    # It makes two segments, and the others once another has made one as well, or two minutes are over.

    def run(self, *args):
        self.begun = getattr(self, "begun", 0) + 1
        ends_at = time.monotonic() + 120
        while self.begun > 2 and not os.path.exists(gate) and time.monotonic() < ends_at:
            time.sleep(0.05)
        return super().run(*args)


gate = sys.argv[2] + ".gate"


ray_pool.RayPool = functools.partial(ray_pool.RayPool, worker=Slow)
node = {"num_cpus": 1, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, connect=False, head_node_args={**node, "include_dashboard": False})
workers = []


def tell(event):
    if isinstance(event, SegmentDone):
        if not workers:
            cluster.add_node(**node)
        workers.append(event.worker)
        if len(set(workers)) > 1:
            open(gate, "w").close()


options = raymerge.RunOptions(workers=3, threads=1, address=cluster.address, growing=True, memory=64 << 20)
try:
    raymerge.submit(sys.argv[1], sys.argv[2], options, on_event=tell)
finally:
    import ray

    ray.shutdown()
    cluster.shutdown()
print(json.dumps(workers))
"""


@pytest.mark.ray
@pytest.mark.service
def test_workers_join_a_cluster_that_grows(tmp_path: Path) -> None:
    """Of three, one has room at first, one finds room later, and one never does."""
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(make_family(tmp_path / "models", hidden=256, files=2))["linear"]))
    merge(str(recipe), tmp_path / "expected")
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVE, str(recipe), str(tmp_path / "out")],
        env={**os.environ, **secret, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workers = json.loads(done.stdout.splitlines()[-1])
    assert len(set(workers)) == 2
    assert len(set(workers[:2])) == 1
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")


def test_a_head_node_that_does_not_answer_is_told_with_the_way_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that other tests have connected to a cluster would stay connected.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipes(make_family(tmp_path / "models"))["linear"]))
    outcome = run_command("submit", str(recipe), "-o", "out", "--address", "127.0.0.1:9", cwd=tmp_path)
    assert outcome.code == 2
    assert "no Ray cluster can be reached there" in outcome.text
    assert "--address http://HEAD:8265" in outcome.text
