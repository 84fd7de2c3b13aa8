"""Clusters that lose a node: a raylet that is killed, a host without power, a cable that is pulled."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from chaos.faults import QUICK_HEALTH, Fault, NotHereError, Outcome, Trial, both_work, come_to
from chaos.yard import PATIENCE_SECONDS, Attempt, BrokenPromiseError, Place, waited
from kits.hosts import Host, hosts, reason_against

_STORE = 100 << 20
PORT = 6379
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats")
_NODES = """
import json, sys
from ray.cluster_utils import Cluster

store = {"object_store_memory": int(sys.argv[1])}
head = {"num_cpus": 0, "include_dashboard": False, **store}
cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
nodes = [cluster.add_node(num_cpus=2, **store) for _ in range(2)]
raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@dataclass(frozen=True, slots=True)
class HostCluster:
    """A cluster of Ray over hosts: the head, on which the driver runs, and the others with workers."""

    head: Host
    """Has no workers."""
    others: tuple[Host, ...]
    """Have room for two workers each."""
    places: tuple[Place, ...]
    """Their disks, in that order; nothing else happens there."""
    environment: Mapping[str, str]

    @property
    def flags(self) -> tuple[str, ...]:
        return "--address", f"{self.head.address}:{PORT}", "--workers", "2", "--threads", "1"

    def pause(self, seconds: float) -> None:
        """Slow the disks of all hosts down."""
        for place in self.places:
            place.pause(seconds)


def raylet_of_node_killed(trial: Trial) -> Outcome:
    """A node of a running cluster is gone with its workers; the run goes on with the others."""
    place = trial.place()
    place.pause(0.05)
    environment = {**place.disk(), **joining()}
    with _nodes(environment) as (address, raylets):
        flags = ("--address", address, "--workers", "2", "--threads", "1")
        with place.submit(*flags, environment=environment) as attempt:
            both_work(attempt)
            os.kill(raylets[0], signal.SIGKILL)
            _loses_a_worker(attempt)
            place.pause(0)
            attempt.ends(0)
    return 1, [place]


def host_without_power(trial: Trial) -> Outcome:
    """One of three hosts goes off in the run, which goes on."""
    place = trial.place()
    with _host_cluster(trial) as cluster:
        cluster.pause(0.05)
        environment = {**place.disk(), **cluster.environment}
        with place.submit(*cluster.flags, inside=cluster.head.inside(), environment=environment) as attempt:
            both_work(attempt)
            cluster.others[1].power_off()
            _loses_a_worker(attempt)
            cluster.pause(0)
            attempt.ends(0)
    return 1, [place]


def host_of_driver_without_power(trial: Trial) -> Outcome:
    """The driver's host goes off; another host is told so for a while, and then goes on in its place."""
    place = trial.place()
    place.pause(0.02)
    with _bare_hosts(2) as (first, second):
        with place.submit("--inline", inside=first.inside(), environment=place.disk()) as attempt:
            come_to(place, attempt, 5)
            with place.submit("--inline", inside=second.inside(), environment=place.disk()) as refused:
                refused.ends(2)
                if first.name not in refused.message():
                    raise BrokenPromiseError(
                        f"the other host is not told of {first.name}: {refused.message()}"
                    )
            first.power_off()
        code, end_at = 2, time.monotonic() + PATIENCE_SECONDS
        while code and time.monotonic() < end_at:
            with place.submit("--inline", inside=second.inside(), environment=place.disk()) as attempt:
                code = attempt.ends(0, 2)
            time.sleep(2 if code else 0)
    return 1, [place]


def host_cut_off(trial: Trial) -> Outcome:
    """A host is cut off, given up, goes on writing what others write meanwhile, and comes back."""
    place = trial.place()
    with _host_cluster(trial) as cluster:
        cluster.pause(0.1)
        lonely, disk = cluster.others[0], cluster.places[0]
        environment = {**place.disk(), **cluster.environment}
        with place.submit(*cluster.flags, inside=cluster.head.inside(), environment=environment) as attempt:
            both_work(attempt)
            lonely.cut()
            disk.pause(2)
            _loses_a_worker(attempt)
            given_up = time.time()
            if not waited(lambda: _writes_since(disk, given_up) > 0, attempt):
                raise BrokenPromiseError("the run was over before the host that was given up wrote anything")
            lonely.heal()
            cluster.pause(0)
            attempt.ends(0)
    return 1, [place]


def _loses_a_worker(attempt: Attempt) -> None:
    if not waited(lambda: bool(attempt.events("worker_lost")), attempt):
        raise BrokenPromiseError(f"no worker was lost: {attempt.tail()}")


def _writes_since(place: Place, moment: float) -> int:
    """Writes that a disk has noted since then."""
    notes = place.notes()
    return sum(kind == "pwrite" and float(at) > moment for at, _, kind, _ in notes)


def joining() -> dict[str, str]:
    """What every process of one cluster has in its environment."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **QUICK_HEALTH}


@contextmanager
def _nodes(environment: Mapping[str, str]) -> Iterator[tuple[str, list[int]]]:
    """A head and two nodes on this machine: the address, and the numbers of the nodes' raylets."""
    process = subprocess.Popen(
        [sys.executable, "-c", _NODES, str(_STORE)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline() or "{}")
        if not told:
            raise OSError("no cluster could be started")
        yield told["address"], told["raylets"]
    finally:
        process.communicate(timeout=60)


@contextmanager
def _bare_hosts(count: int) -> Iterator[list[Host]]:
    if reason := reason_against():
        raise NotHereError(reason)
    with hosts(count) as found:
        yield found


@contextmanager
def _host_cluster(trial: Trial) -> Iterator[HostCluster]:
    places = tuple(trial.yard.place(f"{trial.name}-host{number}") for number in (2, 3))
    shared = joining()
    with _bare_hosts(3) as (head, *others), ThreadPoolExecutor(2) as threads:
        first = ("--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false")
        start_node(head, {**places[0].disk(), **shared}, *first)
        join = ("--address", f"{head.address}:{PORT}", "--num-cpus", "2")
        started = [
            threads.submit(start_node, host, {**place.disk(notes=True), **shared}, *join)
            for host, place in zip(others, places, strict=True)
        ]
        for each in started:
            each.result()
        yield HostCluster(head, tuple(others), places, shared)


def start_node(host: Host, environment: Mapping[str, str], *flags: str) -> None:
    """Start a node of Ray on a host: once more where the half minute that Ray gives it was too short."""
    command = [*_RAY, *flags, "--node-ip-address", host.address, "--object-store-memory", str(_STORE)]
    try:
        host.run(command, environment)
    except OSError:
        host.clear()
        host.run(command, environment)


NODE_FAULTS: tuple[Fault, ...] = (
    Fault("SIGKILL of the raylet of one of two nodes", raylet_of_node_killed),
    Fault("power loss of one of three hosts", host_without_power),
    Fault("power loss of the driver's host, and another goes on", host_of_driver_without_power),
    Fault("a host cut off the network that goes on writing, and comes back", host_cut_off),
)
