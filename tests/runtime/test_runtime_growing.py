"""A cluster that grows with the work and shrinks again, with Ray's own autoscaler."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits.growing_cluster import GrowingCluster, growing_cluster
from kits.merge_cases import digests, make_family, merge, recipes

pytestmark = [pytest.mark.ray, pytest.mark.service]

_DRIVE = """
import functools, json, sys, time
from pathlib import Path

import ray

from raymerge.api import submit
from raymerge.errors import OptionError
from raymerge.runtime.workers import dispatcher, ray_pool
from raymerge.options import RunOptions
from raymerge.runtime.workers.worker import MergeWorker

dispatcher._IDLE_SECONDS = 2.0


def nodes():
    return sum(each["Alive"] and each["Resources"].get("CPU", 0) > 0 for each in ray.nodes())


class Waiting(MergeWorker):
    def run(self, number, *given):
        # The first worker waits for the other one, whose node is added for it, and with one part until
        # that node is gone.
        until, other = time.monotonic() + 90, Path(output + ".other")
        if self._name != "worker-0":
            other.touch()
        while not other.exists():
            assert time.monotonic() < until, "no second worker came"
            time.sleep(0.1)
        while number == 0 and nodes() > 1:
            assert time.monotonic() < until, "no node went"
            time.sleep(0.1)
        return super().run(number, *given)


recipe, output, address = json.loads(sys.argv[1]), *sys.argv[2:]
events = []
options = functools.partial(RunOptions, address=address, growing=True, memory=16 << 20)
ray_pool.RayPool = functools.partial(ray_pool.RayPool, worker=Waiting)
submit(recipe, output, options(workers=2, threads=2), on_event=events.append)
said, began = "", time.monotonic()
try:
    submit(recipe, output + "-large", options(threads=7))
except OptionError as error:
    said = str(error)
took = time.monotonic() - began
print(json.dumps({"events": [each.to_json() for each in events], "said": said, "took": took}))
"""


@pytest.fixture
def cluster() -> Iterator[GrowingCluster]:
    # Ray's sockets take no long paths.
    with tempfile.TemporaryDirectory(prefix="grow-") as place, growing_cluster(Path(place), most=2) as made:
        yield made


def test_nodes_come_and_go_with_workers_and_what_none_can_hold_is_refused(
    cluster: GrowingCluster, tmp_path: Path
) -> None:
    recipe = recipes(make_family(tmp_path / "models", hidden=256))["linear"]
    done = subprocess.run(
        [sys.executable, "-c", _DRIVE, json.dumps(recipe), str(tmp_path / "out"), cluster.address],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    made = {event["worker"] for event in found["events"] if event["event"] == "segment_done"}
    assert made == {"worker-0", "worker-1"}
    kinds = [event["event"] for event in found["events"]]
    assert kinds.count("room_awaited") == 1
    assert kinds.count("worker_left") == 1
    assert "worker_lost" not in kinds
    assert kinds.index("worker_left") < kinds.index("published")
    merge(recipe, tmp_path / "inline")
    assert digests(tmp_path / "out") == digests(tmp_path / "inline")
    lack = r"a worker needs CPUs: 7, GPUs: 0; the largest node has CPUs: "
    assert found["said"].startswith(f"workers: {lack}")
    assert "its autoscaler can add none that has room for a worker" in found["said"]
    # Not the half hour for which room is waited for.
    assert found["took"] < 60
