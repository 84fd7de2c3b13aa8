"""The nodes of a Ray cluster: present, joining later, or impossible to add."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from raymerge.errors import OptionError, Problem, RaymergeError
from raymerge.events import NodeOfNoUse, OnEvent
from raymerge.merge_plan.files_read import SourceFile
from raymerge.runtime.workers.placement import Placement, Seen, Sight
from raymerge.runtime.workers.pool import Work
from raymerge.runtime.workers.sizing import Machine, oom_kills
from raymerge.storage.open import open_store
from raymerge.storage.store import FileInfo

_ANSWER_SECONDS = 60.0
"""How long a node may take to say what it sees; a process is started there first."""
_COUNT_SECONDS = 10.0
"""How long it may take to say what it has counted: workers wait for their next parts meanwhile."""


class Nodes:
    def __init__(self, ray: Any, *, is_here: bool) -> None:
        self._ray = ray
        self._is_here = is_here

    def machines(self) -> dict[str, Machine]:
        return {
            node["NodeID"]: Machine(
                int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
            )
            for node in self._alive()
        }

    def is_alive(self, node: str) -> bool:
        return any(each["NodeID"] == node for each in self._alive())

    def oom_kills(self, node: str) -> int | None:
        """Processes that a node's kernel ended for want of memory; None where unknown."""
        if self._is_here:
            return oom_kills()
        answers = self._ask(oom_kills, [node], seconds=_COUNT_SECONDS)
        count: int | None = answers.get(node)
        return count

    def sights(self, files: Sequence[SourceFile], place: Path | None) -> dict[str, Sight]:
        """What each node with CPUs sees of some files, and of the directory of ``place``, if there is one."""
        nodes = [node for node, machine in self.machines().items() if machine.cores]
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in self._alive()}
        names = _distinct({node: hosts[node] for node in nodes})
        with _token(place) as token:
            path = None if token is None else str(token)
            answers = self._ask(_look, nodes, tuple(files), path, seconds=_ANSWER_SECONDS)
        silent = _silent(files)
        return {node: Sight(names[node], *answers.get(node, silent)) for node in nodes}

    def answers(
        self, question: Callable[..., Any], *arguments: Any, seconds: float
    ) -> list[tuple[str, tuple[int, int], Any]]:
        """Name, CPU slots and GPUs, and answer of each node; None where none came in time."""
        alive = {node["NodeID"]: node["NodeManagerHostname"] for node in self._alive()}
        names, machines = _distinct(alive), self.machines()
        by_node = self._ask(question, list(alive), *arguments, seconds=seconds)
        sizes = {node: (machine.cores, machine.gpus) for node, machine in machines.items()}
        return [(names[node], sizes.get(node, (0, 0)), by_node.get(node)) for node in alive]

    def begin_sight(self, node: str, files: Sequence[SourceFile], place: Path | None) -> Any:
        """Ask one node the same while parts are done, when the place itself is there."""
        inside = None if place is None else f"{place}{os.sep}."
        return self._asked(_look, node, tuple(files), inside)

    def sight(self, node: str, answer: Any, files: Sequence[SourceFile]) -> Sight:
        names = {each["NodeID"]: each["NodeManagerHostname"] for each in self._alive()}
        seen = _silent(files)
        with suppress(self._ray.exceptions.RayError):
            seen = self._ray.get(answer)
        return Sight(names.get(node, node), *seen)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _asked(self, question: Callable[..., Any], node: str, *arguments: Any) -> Any:
        where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        asked = self._ray.remote(question).options(num_cpus=0, scheduling_strategy=where)
        return asked.remote(*arguments)

    def _ask(
        self, question: Callable[..., Any], nodes: Sequence[str], *arguments: Any, seconds: float
    ) -> dict[str, Any]:
        asked = {self._asked(question, node, *arguments): node for node in nodes}
        ready, late = self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        for ref in late:
            self._ray.cancel(ref, force=True)
        answers: dict[str, Any] = {}
        for ref in ready:
            with suppress(self._ray.exceptions.RayError):
                answers[asked[ref]] = self._ray.get(ref)
        return answers


def _silent(files: Sequence[SourceFile]) -> tuple[tuple[Seen, ...], str]:
    absent = tuple(Seen.ABSENT for _ in files)
    return absent, f"cannot be asked for: the node did not answer within {_ANSWER_SECONDS:.0f} s"


def _distinct(names: dict[str, str]) -> dict[str, str]:
    """Names of nodes; several on one machine get the first characters of their ids."""
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {node: f"{name} ({node[:8]})" if name in shared else name for node, name in names.items()}


@contextmanager
def _token(place: Path | None) -> Iterator[Path | None]:
    """A file that others find if they see what this machine sees: beside the output place."""
    if place is None:
        yield None
        return
    directory = next(each for each in place.parents if each.is_dir())
    path = directory / f".{place.name}.{secrets.token_hex(8)}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _look(files: Sequence[SourceFile], token: str | None) -> tuple[tuple[Seen, ...], str]:
    lack = ""
    if token is not None and not os.path.exists(token):
        lack = "is not to be found"
    elif token is not None and not os.access(os.path.dirname(token), os.W_OK | os.X_OK):
        lack = "may not be written to"
    roots = dict.fromkeys(file.root for file in files)
    infos = {root: _infos(root, [file.key for file in files if file.root == root]) for root in roots}
    return tuple(_seen(file, infos[file.root]) for file in files), lack


def _infos(root: str, keys: Sequence[str]) -> Mapping[str, FileInfo | None] | None:
    """Files of a source as seen from here; None where they may not be read."""
    try:
        with open_store(root) as store:
            return store.infos(keys)
    except RaymergeError:
        return None


def _seen(file: SourceFile, infos: Mapping[str, FileInfo | None] | None) -> Seen:
    if infos is None:
        return Seen.REFUSED
    info = infos[file.key]
    if info is None:
        return Seen.ABSENT
    is_same = info.nbytes == file.nbytes and file.version in ("", info.version)
    return Seen.SAME if is_same else Seen.ANOTHER


@dataclass(slots=True, eq=False)
class NodeSurvey:
    """Where the parts of a piece of work may be done: as surveyed, and on nodes that join."""

    ray: Any
    nodes: Nodes
    work: Work
    placement: Placement
    known: set[str] | None
    """Nodes that were surveyed; None for a single machine."""
    on_event: OnEvent
    asked: dict[Any, str] = field(default_factory=dict)

    def meet(self, node: str) -> None:
        if self.known is None or node in self.known or self.is_asked(node):
            return
        self.asked[self.nodes.begin_sight(node, self.work.files, self.work.place)] = node

    def is_asked(self, node: str) -> bool:
        return node in self.asked.values()

    def look(self) -> None:
        asked = list(self.asked)
        for answer in self.ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else ():
            node = self.asked.pop(answer)
            self._join(node, self.nodes.sight(node, answer, self.work.files))

    def _join(self, node: str, sight: Sight) -> None:
        known = self.known or set()
        can = [not sight.lack and files <= sight.same for files in self.work.reads()]
        self.placement = self.placement.joined(node, can, known)
        known.add(node)
        if not any(can):
            lack = f"the output place {sight.lack}" if sight.lack else "it sees no source that a part needs"
            self.on_event(NodeOfNoUse(sight.name, lack))


_TELLINGS = 2
"""Looks in a row at which it must be so: between two of them the autoscaler has looked again."""
_NAMES = ("CPU", "GPU")
_HEAD = "node:__internal_head__"
"""What Ray says that the node has which never goes."""
_REPLY_SECONDS = 5


class Demand:
    """Workers of one kind that wait for room, and whether there can be any."""

    def __init__(self, ray: Any, *, cpus: int, gpus: int, lack: str) -> None:
        self._ray = ray
        self._needs = {name: float(count) for name, count in zip(_NAMES, (cpus, gpus), strict=True) if count}
        self._lack = lack
        self._seen = 0

    def check(self) -> None:
        """Raises OptionError if the autoscaler says, twice in a row, that no node that it may add has room
        for such a worker, and no present or coming node may help."""
        self._seen = self._seen + 1 if self._is_hopeless() else 0
        if self._seen >= _TELLINGS:
            what = f"{self._lack}, and its autoscaler can add none that has room for a worker."
            remedy = "Give fewer --threads, another --device, or a group of nodes to the cluster."
            raise OptionError(Problem("workers", what, remedy))

    def _is_hopeless(self) -> bool:
        """Whether there can be no room, as far as is told now.

        The autoscaler also reports what lacks room only because others use all possible nodes, and what waits
        for nodes that are being added."""
        reply = self._reply()
        if reply is None:
            return False
        scaling, cluster = reply.autoscaling_state, reply.cluster_resource_state
        infeasible = [_needed(each.resources_bundle) for each in scaling.infeasible_resource_requests]
        are_coming = bool(scaling.pending_instances or scaling.pending_instance_requests)
        return (
            self._needs in infeasible
            and not are_coming
            and not any(self._may_help(node) for node in cluster.node_states)
        )

    def _may_help(self, node: Any) -> bool:
        """Whether a node has room once others leave it, or goes soon, so that another may be added."""
        # Numbers by name: a later version of Ray may have states that this one does not know.
        states = node.DESCRIPTOR.fields_by_name["status"].enum_type.values_by_name
        if node.status == states["DEAD"].number:
            return False
        has = _needed(node.total_resources)
        is_leaving = (
            node.status in (states["IDLE"].number, states["DRAINING"].number)
            and _HEAD not in node.total_resources
        )
        return is_leaving or all(has.get(name, 0.0) >= count for name, count in self._needs.items())

    def _reply(self) -> Any:
        try:
            client = self._ray._raylet.GcsClient(self._ray.get_runtime_context().gcs_address)
            status = client.get_cluster_status(timeout_s=_REPLY_SECONDS)
            reply = import_module("ray.core.generated.autoscaler_pb2").GetClusterStatusReply()
        except (self._ray.exceptions.RayError, RuntimeError, ImportError, AttributeError):
            # Ray's own summary leaves this out, and what it is made of may be otherwise in another version.
            return None
        reply.ParseFromString(status)
        return reply


def _needed(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if name in _NAMES and amount}
