"""Nodes that join while parts are done: each is asked what it sees before a worker on it is given any."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from raymerge.events import NodeOfNoUse, OnEvent
from raymerge.runtime.workers.placement import Placement, Sight
from raymerge.runtime.workers.pool import Work
from raymerge.runtime.workers.ray_nodes import Nodes


class Grounds:
    """Where the parts of a piece of work may be done: as it was found out before, and on nodes that join."""

    def __init__(
        self,
        ray: Any,
        nodes: Nodes,
        work: Work,
        *,
        placement: Placement,
        surveyed: Collection[str] | None,
        on_event: OnEvent,
    ) -> None:
        """
        Args:
            ray: the ray module.
            nodes: asked what they see.
            work: what is done.
            placement: where its parts may be done, of the nodes that were surveyed.
            surveyed: their ids; None where all nodes are one machine, and there is nothing to ask.
            on_event: told of nodes that are of no use.
        """
        self._ray = ray
        self._nodes = nodes
        self._work = work
        self._placement = placement
        self._known = None if surveyed is None else set(surveyed)
        self._asked: dict[Any, str] = {}
        self._on_event = on_event

    @property
    def placement(self) -> Placement:
        """Where parts may be done, as far as that is known by now."""
        return self._placement

    def meet(self, node: str) -> None:
        """Have a node asked that a worker turns out to be on, unless that was done."""
        if self._known is None or node in self._known or self.is_asked(node):
            return
        self._asked[self._nodes.begin_sight(node, self._work.files, self._work.place)] = node

    def is_asked(self, node: str) -> bool:
        """Whether a node is yet to say what it sees."""
        return node in self._asked.values()

    def look(self) -> None:
        """Take up what nodes have answered since."""
        asked = list(self._asked)
        for answer in self._ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else ():
            node = self._asked.pop(answer)
            self._join(node, self._nodes.sight(node, answer, self._work.files))

    def _join(self, node: str, sight: Sight) -> None:
        known = self._known or set()
        can = [not sight.lack and files <= sight.same for files in self._work.reads()]
        self._placement = self._placement.joined(node, can, known)
        known.add(node)
        if not any(can):
            lack = f"the output place {sight.lack}" if sight.lack else "it sees no source that a part needs"
            self._on_event(NodeOfNoUse(sight.name, lack))
