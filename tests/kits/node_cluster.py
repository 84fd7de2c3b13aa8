"""A Ray cluster of several nodes on this machine, which may see different directories, and can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_PATIENCE_SECONDS = 90.0
_STORE_BYTES = 100 << 20
_SECRETS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_SOON_MISSED = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "4",
}
"""A node that is gone is missed after seconds; usually that takes a quarter of a minute. One that is slow to
answer, on a busy machine, is not."""
_HEAD = """
import sys, time
from ray.cluster_utils import Cluster

head = {"num_cpus": 0, "object_store_memory": int(sys.argv[1]), "include_dashboard": False}
cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
try:
    print(cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""
_START = "from ray.scripts.scripts import main; main()"
_DRIVER = """
import json, sys, time

from raymerge.api import submit
from raymerge.errors import RaymergeError
from raymerge.runtime.workers import ray_pool
from raymerge.options import RunOptions
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.worker import MergeWorker


class Slow(MergeWorker):
    def run(self, *given):
        time.sleep(PAUSE)
        return super().run(*given)


class Pool(ray_pool.RayPool):
    def __init__(self, *given, **named):
        super().__init__(*given, worker=Slow, **named)

    def run(self, *given):
        self.group.ready_seconds = job["ready_seconds"]
        yield from super().run(*given)


ray_pool.RayPool = Pool


def report(event):
    print(json.dumps(event.to_json()), flush=True)


address = sys.argv[1]
connection = RayConnection(address)
connection.open()
for count in range(int(sys.argv[2])):
    while sum(node["Alive"] for node in connection.ray.nodes()) <= count:
        time.sleep(0.05)
    print("{}", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    PAUSE = job["pause"]
    options = RunOptions(address=address, workers=job["workers"], threads=1, memory=16 << 20)
    code, said = 0, ""
    try:
        submit(job["recipe"], job["output"], options, on_event=report)
    except RaymergeError as error:
        code, said = error.exit_code, str(error)
    print(json.dumps({"code": code, "said": said}), flush=True)
"""


@dataclass
class Outcome:
    code: int
    said: str
    events: list[dict[str, Any]]


@dataclass
class Node:
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.command, env=self.environment, stdin=null, stdout=null, stderr=null
        )

    def kill(self) -> None:
        kin = psutil.Process(self.process.pid).children(recursive=True)
        for each in kin:
            if each.name() == "raylet":
                each.kill()

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            for each in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait()


@dataclass
class NodeCluster:
    nodes: list[Node]
    driver: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def begin(
        self,
        recipe: Mapping[str, Any],
        output: Path,
        *,
        workers: int = 2,
        pause: float = 0.0,
        ready_seconds: float = 120.0,
    ) -> None:
        job = {
            "recipe": recipe,
            "output": str(output),
            "workers": workers,
            "pause": pause,
            "ready_seconds": ready_seconds,
        }
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps(job) + "\n")
        self.driver.stdin.flush()

    def until(self, count: int) -> None:
        for _ in range(count):
            while self._next().get("event") != "segment_done":
                assert "code" not in self.lines[-1], self.lines[-1]

    def outcome(self) -> Outcome:
        while "code" not in (line := self._next()):
            pass
        events, self.lines = self.lines[:-1], []
        return Outcome(line["code"], line["said"], events)

    def _next(self) -> dict[str, Any]:
        assert self.driver.stdout is not None
        line = self.driver.stdout.readline()
        assert line, "the driver ended"
        self.lines.append(json.loads(line))
        return self.lines[-1]


@contextmanager
def node_cluster(hidden: Sequence[Sequence[Path]]) -> Iterator[NodeCluster]:
    environment = {**os.environ, **_SECRETS, **_SOON_MISSED, "PYTHONPATH": os.pathsep.join(sys.path)}
    started: list[subprocess.Popen[str]] = []
    nodes: list[Node] = []

    def start(*command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        return process

    try:
        head = start(sys.executable, "-c", _HEAD, str(_STORE_BYTES))
        assert head.stdout is not None
        address = next(line for line in head.stdout if ":" in line).strip()
        join = [sys.executable, "-c", _START, "start", "--block", f"--address={address}", "--num-cpus=1"]
        join.append(f"--object-store-memory={_STORE_BYTES}")
        driver = start(sys.executable, "-c", _DRIVER, address, str(1 + len(hidden)))
        assert driver.stdout is not None
        assert driver.stdout.readline() == "{}\n"
        for directories in hidden:
            mounts = "".join('mount -t tmpfs none "$1" && shift && ' for _ in directories)
            apart = ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh", *map(str, directories)]
            command = [*apart, *join] if directories else join
            nodes.append(Node(command, environment))
            # One after the other: two that start at once may want the same port.
            assert driver.stdout.readline() == "{}\n"
        yield NodeCluster(nodes, driver)
    finally:
        for node in nodes:
            node.end()
        # The driver, if it was started, before the head.
        for process in reversed(started):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
