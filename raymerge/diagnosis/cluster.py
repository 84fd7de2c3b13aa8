"""A cluster: the nodes of Ray with what runs there, the Jobs API, Kubernetes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymerge.deploy.profiles import Profile
from raymerge.deploy.targets.job_server import open_job_server
from raymerge.deploy.targets.kubernetes import missing
from raymerge.deploy.targets.kubernetes_api import open_server
from raymerge.deploy.targets.target import Where
from raymerge.diagnosis.check import Check, note, ok, problem
from raymerge.errors import shortlist
from raymerge.runtime.workers.node_facts import COMPARED, versions_here
from raymerge.runtime.workers.ray_environment import OBJECT_STORE_BYTES
from raymerge.units import format_size

_QUESTION = "raymerge.runtime.workers.node_facts"
_GRACE_SECONDS = 5.0
_WHERE = (
    "From a node of the cluster give HOST:PORT of its head (often port 6379), or auto; from elsewhere its "
    "dashboard, --address http://HEAD:8265."
)
_INLINE = "Give --inline to merge without Ray, in one process."
_MOST_SHOWN = 8
_MOST_SKEW = 5.0
"""Seconds between clocks: leases and records go by them."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    nodes: tuple[Mapping[str, Any], ...]
    """``node_facts.facts`` of each node that answered, with its ``host``."""
    silent: tuple[str, ...]
    """Hosts of nodes that did not answer."""
    seconds: float
    """From the first word to Ray until all were asked."""


Refusals = tuple[tuple[str, str], ...]
"""What keeps nodes from being asked, each with its remedy; "" for the usual one."""


def ask_nodes(address: str | None, places: Sequence[str] = (), *, seconds: float) -> ClusterFacts | Refusals:
    """What the nodes say of themselves, or why they cannot be asked; None asks an embedded Ray.

    In a process of its own: Ray ends the one that it loses its cluster in, and waits for minutes. With -P,
    without which modules in the current directory would be run."""
    command = [sys.executable, "-P", "-m", _QUESTION, address or "", *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            answer, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return ((f"Ray gives no answer within {seconds:.0f} seconds.", ""),)
    try:
        facts = json.loads(answer.splitlines()[-1])
    except (IndexError, ValueError):
        last = (error.strip().splitlines() or ["it said nothing"])[-1]
        return ((f"Ray ended the process that asked: {last}", ""),)
    if "problems" in facts:
        return tuple((str(what), str(remedy)) for what, remedy in facts["problems"])
    return ClusterFacts(tuple(facts["nodes"]), tuple(facts["silent"]), facts["seconds"])


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def embedded_ray(*, seconds: float) -> Iterator[Check]:
    facts = ask_nodes(None, seconds=seconds)
    if not isinstance(facts, ClusterFacts):
        yield from (problem("Ray", what, remedy or _INLINE) for what, remedy in facts)
    elif not facts.nodes:
        yield problem("Ray", "an embedded Ray starts, and runs no task.", _INLINE)
    else:
        yield ok("Ray", f"an embedded Ray starts and runs a task, in {facts.seconds:.1f} s")


def ray_cluster(address: str, places: Sequence[str] = (), *, seconds: float) -> Iterator[Check]:
    """``places``: directories that every node should have."""
    facts = ask_nodes(address, places, seconds=seconds)
    if isinstance(facts, ClusterFacts):
        yield from nodes(address, facts, versions_here())
    else:
        yield from (problem("Ray cluster", f"{address}: {what}", remedy or _WHERE) for what, remedy in facts)


def nodes(address: str, facts: ClusterFacts, here: Mapping[str, str | None]) -> Iterator[Check]:
    """What the nodes have, and where they differ from this process: ``here``, by the same names."""
    yield ok("Ray cluster", f"{address}: {_summary(facts.nodes)}")
    for each in facts.nodes[:_MOST_SHOWN]:
        yield ok(f"node {each['host']}", _described(each))
    if facts.silent:
        what = f"{shortlist(facts.silent, _MOST_SHOWN)} did not answer."
        yield problem("Ray cluster", what, "Look at the nodes in Ray's dashboard; no worker starts there.")
    yield from _differing(facts.nodes, here)
    for each in facts.nodes:
        for place in each["unseen"]:
            what = f"it has no directory {place}."
            yield problem(
                f"node {each['host']}", what, "Mount it there: workers read and write by this path."
            )
        if abs(each["skew"]) > _MOST_SKEW:
            what = f"its clock is {abs(each['skew']):.0f} s {'ahead' if each['skew'] > 0 else 'behind'}."
            yield note(f"node {each['host']}", what, "Synchronise the clocks: leases go by them.")
        if each["shared_free"] is not None and each["shared_free"] < OBJECT_STORE_BYTES:
            what = f"/dev/shm has {format_size(each['shared_free'])} free."
            yield note(f"node {each['host']}", what, "Give it more: what Ray's processes share lies there.")


def _differing(nodes: Sequence[Mapping[str, Any]], here: Mapping[str, str | None]) -> Iterator[Check]:
    for name in COMPARED:
        others = {each["host"]: each["versions"].get(name) for each in nodes}
        differing = {host: version for host, version in others.items() if version != here.get(name)}
        for host, version in differing.items():
            what = (
                f"{name} {version} where this machine has {here.get(name)}."
                if version
                else f"{name} is absent."
            )
            remedy = f"Install {name} {here.get(name)} there, or start the command where all agree."
            yield problem(f"node {host}", what, remedy)


def _summary(nodes: Sequence[Mapping[str, Any]]) -> str:
    cpus, num_gpus = (sum(each[key] for each in nodes) for key in ("cpus", "gpus"))
    count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    return f"{count} with {cpus:g} CPU slots and {num_gpus:g} GPUs answered"


def _described(facts: Mapping[str, Any]) -> str:
    names = [f"{len(names)} x {names[0]}" for names in [facts["gpu_names"]] if names]
    memory = f"{format_size(facts['memory_free'])} free of {format_size(facts['memory'])}"
    return ", ".join((f"{facts['cpus']:g} CPU slots", *names, memory, *_versions(facts["versions"])))


def _versions(versions: Mapping[str, str | None]) -> Iterator[str]:
    return (f"{name} {versions[name]}" for name in COMPARED if versions.get(name))


def jobs_api(where: Where, environment: Mapping[str, str], here: Mapping[str, str | None]) -> Iterator[Check]:
    version = open_job_server(where, environment).ray_version()
    fact = f"{where.address} answers; Ray {version} there, {here.get('ray')} here"
    is_same = version == here.get("ray")
    yield ok("Jobs API", fact) if is_same else note("Jobs API", fact, "Where jobs fail, install one of them.")
    what = "what its nodes have can only be asked on one of them."
    yield note("Jobs API", what, "There: raymerge doctor --address auto")


def kubernetes(profile: Profile) -> Iterator[Check]:
    asked = profile.kubernetes
    assert asked is not None
    server = open_server(asked.namespace)
    problems = list(missing(server, asked))
    for each in problems:
        yield problem("Kubernetes", each.what, each.remedy)
    if not problems:
        fact = f"{server.url} answers; KubeRay, the namespace {server.namespace}, your rights in it and all "
        yield ok("Kubernetes", f"{fact}that the profile names are there")
    what = "pods have memory, GPUs and credentials of their own, which are not seen from here."
    yield note("Kubernetes", what, "The log of a run tells of them: raymerge logs RUN.")
