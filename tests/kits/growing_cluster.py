"""A Ray cluster on this machine whose autoscaler, of Ray's second version, adds nodes and takes them away."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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
    address = f"{_own_address()}:{port}"
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


def _own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


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
        with suppress(OSError), socket.create_connection((_own_address(), port), timeout=1):
            return
        assert time.monotonic() < ends_at, said.read_text()
        time.sleep(0.1)


def _end(head: subprocess.Popen[bytes]) -> None:
    own = psutil.Process(head.pid)
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    head.wait()
