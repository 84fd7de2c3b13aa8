"""The nodes of a Ray cluster, and what is asked of a node rather than of a worker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raymerge.errors import RaymergeError
from raymerge.merge_plan.files_read import SourceFile
from raymerge.runtime.workers.memory_errors import oom_kills
from raymerge.runtime.workers.placement import Seen, Sight
from raymerge.runtime.workers.sizing import Machine
from raymerge.storage.open import open_store
from raymerge.storage.store import FileInfo

_ANSWER_SECONDS = 60.0
"""How long a node may take to say what it sees; a process is started there first."""
_COUNT_SECONDS = 10.0
"""How long it may take to say what it has counted: workers wait for their next parts meanwhile."""


class Nodes:
    """The nodes that a pool's workers are on."""

    def __init__(self, ray: Any, *, is_here: bool) -> None:
        """
        Args:
            ray: the ray module, connected or about to be.
            is_here: whether all nodes are this machine.
        """
        self._ray = ray
        self._is_here = is_here

    def machines(self) -> dict[str, Machine]:
        """What each node that is alive has, by its id."""
        return {
            node["NodeID"]: Machine(
                int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
            )
            for node in self._alive()
        }

    def is_alive(self, node: str) -> bool:
        """Whether a node is there, as far as Ray knows."""
        return any(each["NodeID"] == node for each in self._alive())

    def oom_kills(self, node: str) -> int | None:
        """Processes that the kernel of a node has ended because memory ran out; None where nobody tells."""
        if self._is_here:
            return oom_kills()
        answers = self._ask(oom_kills, [node], seconds=_COUNT_SECONDS)
        found: int | None = answers.get(node)
        return found

    def sights(self, files: Sequence[SourceFile], place: Path | None) -> dict[str, Sight]:
        """What each node with CPUs sees of some files, and of the directory of ``place``, if there is one."""
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._alive()}
        nodes = [node for node, machine in self.machines().items() if machine.cores]
        names = _told_apart({node: f"{names[node]}" for node in nodes})
        with _token(place) as token:
            wanted = None if token is None else str(token)
            found = self._ask(_look, nodes, tuple(files), wanted, seconds=_ANSWER_SECONDS)
        silent = _silent(files)
        return {node: Sight(names[node], *found.get(node, silent)) for node in nodes}

    def begin_sight(self, node: str, files: Sequence[SourceFile], place: Path | None) -> Any:
        """Ask one node the same while parts are done, when the place itself is there.

        Returns:
            A reference to the answer, for ``sight``.
        """
        inside = None if place is None else f"{place}{os.sep}."
        return self._asked(_look, node, tuple(files), inside)

    def sight(self, node: str, answer: Any, files: Sequence[SourceFile]) -> Sight:
        """What that node sees, once the answer is there."""
        names = {each["NodeID"]: each["NodeManagerHostname"] for each in self._alive()}
        found = _silent(files)
        with suppress(self._ray.exceptions.RayError):
            found = self._ray.get(answer)
        return Sight(names.get(node, node), *found)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _asked(self, question: Callable[..., Any], node: str, *arguments: Any) -> Any:
        """A reference to what a node answers."""
        where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        asked = self._ray.remote(question).options(num_cpus=0, scheduling_strategy=where)
        return asked.remote(*arguments)

    def _ask(
        self, question: Callable[..., Any], nodes: Sequence[str], *arguments: Any, seconds: float
    ) -> dict[str, Any]:
        """Have each node answer; those that do not in time, or cannot, are left out."""
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
    """What counts for a node that does not answer."""
    absent = tuple(Seen.ABSENT for _ in files)
    return absent, f"cannot be asked for: the node did not answer within {_ANSWER_SECONDS:.0f} s"


def _told_apart(names: dict[str, str]) -> dict[str, str]:
    """Names of nodes; several on one machine are told apart by the first characters of their ids."""
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {node: f"{name} ({node[:8]})" if name in shared else name for node, name in names.items()}


@contextmanager
def _token(place: Path | None) -> Iterator[Path | None]:
    """A file that others find where they see what this machine sees: beside the place that is written to."""
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
    """What this machine sees; called on each node."""
    lack = ""
    if token is not None and not os.path.exists(token):
        lack = "is not to be found"
    elif token is not None and not os.access(os.path.dirname(token), os.W_OK | os.X_OK):
        lack = "may not be written to"
    roots = dict.fromkeys(file.root for file in files)
    found = {root: _found(root, [file.key for file in files if file.root == root]) for root in roots}
    return tuple(_seen(file, found[file.root]) for file in files), lack


def _found(root: str, keys: Sequence[str]) -> Mapping[str, FileInfo | None] | None:
    """Files of a source as they are seen from here; None where they may not be looked at."""
    try:
        with open_store(root) as store:
            return store.infos(keys)
    except RaymergeError:
        return None


def _seen(file: SourceFile, found: Mapping[str, FileInfo | None] | None) -> Seen:
    if found is None:
        return Seen.REFUSED
    info = found[file.key]
    if info is None:
        return Seen.ABSENT
    is_same = info.nbytes == file.nbytes and file.version in ("", info.version)
    return Seen.SAME if is_same else Seen.ANOTHER
