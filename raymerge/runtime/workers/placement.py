"""Which nodes of a cluster can do which parts, by the files that each sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raymerge.errors import Problem, shortlist
from raymerge.merge_plan.files_read import SourceFile
from raymerge.storage.addresses import is_remote, shown


class Seen(StrEnum):
    SAME = "the same"
    ABSENT = "absent"
    ANOTHER = "another file"
    REFUSED = "not to be read with what credentials the node has"


@dataclass(frozen=True, slots=True)
class Sight:
    name: str
    files: tuple[Seen, ...]
    lack: str = ""
    """What is wrong with the output place, as seen from there; "" for nothing."""

    @property
    def same(self) -> frozenset[int]:
        return frozenset(n for n, seen in enumerate(self.files) if seen is Seen.SAME)


@dataclass(frozen=True, slots=True)
class Placement:
    able: tuple[frozenset[str], ...] = ()
    """Of every part, the nodes that can do it; empty where all can do all."""

    def allows(self, node: str, number: int) -> bool:
        return not self.able or node in self.able[number]

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that can do anything; empty for all."""
        return frozenset().union(*self.able)

    def joined(self, node: str, can: Sequence[bool], others: Collection[str]) -> Placement:
        """With a node that can do these parts, beside the nodes ``others``."""
        if not self.able and all(can):
            return self
        able = self.able or (frozenset(others),) * len(can)
        return Placement(
            tuple(nodes | {node} if is_able else nodes for nodes, is_able in zip(able, can, strict=True))
        )

    def is_served(self, present: Collection[str], homes: Collection[str]) -> bool:
        """Whether workers on these nodes can do every part that any of ``homes`` could, and each of them
        some. ``homes`` are all nodes that could have a worker of this kind."""
        able = [nodes for nodes in self.able if nodes.intersection(homes)]
        if not able:
            return True
        return frozenset().union(*able).issuperset(present) and all(
            nodes.intersection(present) for nodes in able
        )

    def ordered(self, numbers: Iterable[int]) -> list[int]:
        """In the given order, but first the parts that fewer nodes can do."""
        return sorted(numbers, key=lambda number: len(self.able[number]) if self.able else 0)

    def short_of(
        self, numbers: Iterable[int], present: Collection[str], homes: Collection[str]
    ) -> frozenset[str]:
        """Of the nodes that can have a worker, those that can do parts which no present one can."""
        if not self.able:
            return frozenset()
        lonely = {self.able[number] for number in numbers if not self.able[number].intersection(present)}
        return frozenset().union(*lonely).intersection(homes)


def placement_of(sights: Mapping[str, Sight], reads: Sequence[frozenset[int]]) -> Placement:
    seen = {node: sight.same for node, sight in sights.items()}
    able = {files: frozenset(node for node in seen if files <= seen[node]) for files in set(reads)}
    if all(len(nodes) == len(seen) for nodes in able.values()):
        return Placement()
    return Placement(tuple(able[files] for files in reads))


def stations(placement: Placement, capacities: Mapping[str, int], workers: int) -> list[str]:
    """A node for each of some workers, so that every part can be done: first the indispensable ones, then
    those with most room. Fewer than ``workers`` where those nodes have less room; more where fewer could not
    do every part."""
    open_nodes = {
        node: capacity for node, capacity in capacities.items() if capacity and node in placement.nodes
    }
    left = {nodes.intersection(open_nodes) for nodes in placement.able}
    chosen: list[str] = []
    while left := {nodes for nodes in left if nodes and not nodes.intersection(chosen)}:
        counts = Counter(node for nodes in sorted(left, key=sorted) for node in nodes)
        chosen.append(max(sorted(counts), key=lambda node: counts[node]))
    taken = Counter(chosen)
    while len(chosen) < min(workers, sum(open_nodes.values())):
        node = max(sorted(open_nodes), key=lambda each: open_nodes[each] - taken[each])
        chosen.append(node)
        taken[node] += 1
    return chosen


def survey_problems(
    sights: Mapping[str, Sight], files: Sequence[SourceFile], reads: Sequence[frozenset[int]], place: str
) -> list[Problem]:
    """Sources no node sees, nodes that cannot write the output, parts whose files no node has."""
    problems = [
        Problem(
            f"node {sight.name}",
            f"the directory {place}, which is written to, {sight.lack} there.",
            "Mount it there under the same path, or start that node without CPUs, for no worker to go there.",
        )
        for sight in sights.values()
        if sight.lack
    ]
    seen = {n for sight in sights.values() for n, status in enumerate(sight.files) if status is Seen.SAME}
    nowhere = [n for n in range(len(files)) if n not in seen]
    for root in dict.fromkeys(files[n].root for n in nowhere):
        problems.append(_unseen(root, [n for n in nowhere if files[n].root == root], sights, files))
    if not nowhere and not problems:
        able = placement_of(sights, reads).able
        if undoable := [number for number, nodes in enumerate(able) if not nodes]:
            problems.append(_apart(undoable, reads, sights, files))
    return problems


def unreached(count: int, part: str, *, threads: int, with_gpu: bool) -> Problem:
    slots = f"{threads} CPU slot{'' if threads == 1 else 's'}"
    needs = f"a GPU with {slots} beside it" if with_gpu else f"{slots} for a worker"
    what = f"no node that sees what {count} {part}{'s read' if count > 1 else ' reads'} has {needs}."
    instead = "--device cpu" if with_gpu else "fewer --threads"
    return Problem("sources", what, f"Put the sources where such nodes see them, or give {instead}.")


def _unseen(
    root: str, numbers: Sequence[int], sights: Mapping[str, Sight], files: Sequence[SourceFile]
) -> Problem:
    seen = "; ".join(
        f"{sight.name}: {_list({files[n].key: sight.files[n] for n in numbers})}" for sight in sights.values()
    )
    remedy = (
        "Put the source on a shared file system, or copy it to the nodes under the same path, with its times "
        "(rsync -a)."
    )
    if is_remote(root):
        remedy = "Give every node credentials that may read it, and a way to its server."
    return Problem(shown(root), f"no node with CPUs sees the files that were planned with ({seen}).", remedy)


def _list(seen_files: Mapping[str, Seen]) -> str:
    return shortlist([f"{key} is {seen}" for key, seen in seen_files.items()])


def _apart(
    numbers: Sequence[int],
    reads: Sequence[frozenset[int]],
    sights: Mapping[str, Sight],
    files: Sequence[SourceFile],
) -> Problem:
    needed = sorted(reads[numbers[0]])
    lacks = "; ".join(
        f"{sight.name} lacks {', '.join(files[n].path for n in needed if sight.files[n] is not Seen.SAME)}"
        for sight in sights.values()
    )
    return Problem(
        "sources",
        f"no node sees all the files that a part of the work reads, for {len(numbers)} of {len(reads)} "
        f"parts. Of part {numbers[0]}: {lacks}.",
        "Put the sources on a shared file system, or copy to one node what is read together.",
    )
