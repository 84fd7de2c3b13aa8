"""Workers on GPUs and on processors in one run, on a cluster that declares GPUs: who makes what, and what is
lost of either kind. The workers claim a device and compute on the processor all the same."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kits.merge_cases import digests, make_family, recipes

import raymerge
from raymerge.merge_plan.elements import copied_segments
from raymerge.publish.attempt import RECORD
from raymerge.publish.ledger import NAME, Ledger

pytestmark = pytest.mark.ray

_DRIVE = """
import functools, json, os, signal, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

from raymerge.api import submit
from raymerge.runtime.workers import ray_pool
from raymerge.options import RunOptions
from raymerge.runtime.workers.worker import MergeWorker


class Claiming(MergeWorker):
    def __init__(self, name, device):
        super().__init__(name, "cpu")
        self.kind = "cpu" if device == "cpu" else "cuda"
        self.made, self.dies = 0, False

    def ready(self):
        found = super().ready()
        return {**found, "numerics": {**found["numerics"], "device": self.kind}}

    def run(self, number, *given):
        # The first of each kind dies over its second part.
        self.made += 1
        if self.made >= 2 and not (place / self.kind).exists():
            self.dies = True
            (place / self.kind).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # Of what both can do something is left until there is another carrier, and that one leaves some to
        # the GPU: neither is given so much at once that nothing is left.
        is_other = self.kind == "cpu" and (place / "cpu").exists() and not self.dies
        if is_other:
            (place / "replaced").touch()
        awaited = "shared" if is_other else "replaced" if self.kind == "cuda" and number in copies else None
        while awaited is not None and not (place / awaited).exists():
            time.sleep(0.05)
        found = super().run(number, *given)
        if self.kind == "cuda" and number in copies:
            (place / "shared").touch()
        return found


recipe, copies, place = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, connect=False, head_node_args=node)
events = []
try:
    ray_pool.RayPool = functools.partial(ray_pool.RayPool, worker=Claiming)
    options = RunOptions(address=cluster.address, device="cuda", cpu_workers=1, memory=16 << 20)
    submit(recipe, place / "out", options, on_event=events.append)
finally:
    cluster.shutdown()
    print(json.dumps([event.to_json() for event in events]))
"""


def _run(recipe: dict[str, Any], copies: frozenset[int], place: Path) -> list[dict[str, Any]]:
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVE, json.dumps(recipe), json.dumps(sorted(copies)), str(place)],
        env={**os.environ, **secret, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_only_workers_on_gpus_compute_and_each_kind_replaces_its_own(tmp_path: Path) -> None:
    recipe = recipes(make_family(tmp_path / "models", hidden=256))["passthrough"]
    copies, every = copied_segments(raymerge.plan(recipe)), set()
    events = _run(recipe, copies, tmp_path)
    makers: dict[str, set[str]] = {"copied": set(), "computed": set()}
    for event in events:
        if event["event"] == "segment_done":
            every.add(event["segment"])
            makers["copied" if event["segment"] in copies else "computed"].add(event["worker"])
    assert copies
    assert copies < every
    (chosen,) = (event for event in events if event["event"] == "carriers_chosen")
    assert (chosen["workers"], chosen["copies"], chosen["parts"]) == (1, len(copies), len(every))
    assert not any(name.startswith("cpu-") for name in makers["computed"])
    lost = [event["worker"] for event in events if event["event"] == "worker_lost"]
    assert sorted(name.rpartition("-")[0] for name in lost) == ["cpu-worker", "worker"]
    # Who came in their place made something too.
    assert {name.rpartition("-")[0] for name in makers["copied"] - set(lost)} == {"cpu-worker", "worker"}
    assert {name.rpartition("-")[0] for name in makers["computed"] - set(lost)} == {"worker"}
    raymerge.submit(recipe, tmp_path / "inline", raymerge.RunOptions(inline=True))
    made, wanted = digests(tmp_path / "out"), digests(tmp_path / "inline")
    # The record of the one tells of another device than that of the other.
    assert {name for name in made if made[name] != wanted.get(name)} == {
        "raymerge/numerics.json",
        "raymerge/provenance.json",
    }
    assert made.keys() == wanted.keys()
    conditions = Ledger.conditions(tmp_path / "out" / RECORD / NAME)
    assert conditions is not None
    assert conditions["numerics"]["device"] == "cuda"
