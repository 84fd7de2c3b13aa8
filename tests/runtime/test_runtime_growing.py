"""A cluster that grows with the work and shrinks again, with Ray's own autoscaler of the second version."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from kits.merge_cases import digests, make_family, merge, recipes
from kits.ray_head import own_address

pytestmark = [pytest.mark.ray, pytest.mark.service]

_HEAD = "f" * 51 + "00000"
"""Id of the head's node, which Ray's provider of nodes for tests takes for granted."""
_STORE_BYTES = 100 << 20
_START_SECONDS = 60.0
_NOTHING: Mapping[str, Any] = {
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "rsync_exclude": [],
    "rsync_filter": [],
}
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@dataclass(frozen=True)
class GrowingCluster:
    address: str
    environment: Mapping[str, str]


@contextmanager
def growing_cluster(place: Path, *, most: int) -> Iterator[GrowingCluster]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **secret, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = {"RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    told |= {"RAY_CLOUD_INSTANCE_ID": _HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD}
    address = f"{own_address()}:{port}"
    (place / "cluster.json").write_text(json.dumps(_config(address, most)))
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head"]
    command += ["--block", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
    command += [f"--autoscaling-config={place / 'cluster.json'}", f"--temp-dir={place / 'ray'}"]
    with (place / "said").open("wb") as said:
        head = subprocess.Popen(
            [*command, f"--object-store-memory={_STORE_BYTES}"],
            env={**environment, **told},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        _await(head, port, place / "said")
        yield GrowingCluster(address, environment)
    finally:
        _end(head)


def _config(address: str, most: int) -> dict[str, Any]:
    provider = {"type": "external", "module": _PROVIDER, "gcs_address": address}
    node = {"CPU": 2, "object_store_memory": _STORE_BYTES}
    return {
        **_NOTHING,
        "cluster_name": "growing",
        "max_workers": most,
        "provider": {**provider, "head_node_id": _HEAD, "launch_multiple": True},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "two": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "auth": {"ssh_user": "nobody"},
    }


def _await(head: subprocess.Popen[bytes], port: int, said: Path) -> None:
    ends_at = time.monotonic() + _START_SECONDS
    while True:
        assert head.poll() is None, said.read_text()
        with suppress(OSError), socket.create_connection((own_address(), port), timeout=1):
            return
        assert time.monotonic() < ends_at, said.read_text()
        time.sleep(0.1)


def _end(head: subprocess.Popen[bytes]) -> None:
    own = psutil.Process(head.pid)
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    head.wait()


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
