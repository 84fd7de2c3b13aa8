"""The parts of a piece of work that nobody has in hand, in the order in which they are to be begun."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from typing import TypeAlias

from raymerge.runtime.workers.placement import Placement

_Entry: TypeAlias = tuple[int, int]
"""A place in the order, and the part."""


@dataclass(slots=True)
class _Group:
    """Parts that the same workers can do: on the same nodes, and carriers or not."""

    is_copy: bool
    """Whether carriers may do them."""
    entries: deque[_Entry] = field(default_factory=deque)
    """In order: new ones come before or behind all that there are."""


class PartQueue:
    """Finds the first part that a worker can do without a walk over those that it cannot.

    Parts differ in the nodes that can do them and in whether carriers may, and there are few such groups,
    however many parts there are.
    """

    def __init__(self, numbers: Iterable[int], *, copies: Collection[int], placement: Placement) -> None:
        """
        Args:
            numbers: the parts, in order.
            copies: those that carriers may do.
            placement: which nodes can do which of them.
        """
        self._copies = copies
        self._placement = placement
        self._groups: dict[tuple[frozenset[str] | None, bool], _Group] = {}
        self._first, self._stop, self._len = 0, 0, 0
        for number in numbers:
            self.append(number)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        """All parts in order."""
        return (number for _, number in merge(*(group.entries for group in self._groups.values())))

    @property
    def has_copies(self) -> bool:
        """Whether there is something for carriers."""
        return any(group.is_copy and group.entries for group in self._groups.values())

    def append(self, number: int) -> None:
        """Put a part behind all others."""
        self._group(number).entries.append((self._stop, number))
        self._stop += 1
        self._len += 1

    def appendleft(self, number: int) -> None:
        """Put a part before all others."""
        self._first -= 1
        self._group(number).entries.appendleft((self._first, number))
        self._len += 1

    def first(self, node: str | None, *, is_copy: bool | None = None) -> int | None:
        """The first part for a node; None where there is none.

        Args:
            node: where it would be done; None for wherever it can be.
            is_copy: True for those alone that carriers may do, False for all others, None for any.
        """
        group = self._first_group(node, is_copy)
        return None if group is None else group.entries[0][1]

    def take(self, number: int) -> None:
        """Take out a part that ``first`` has just named."""
        entries = self._group(number).entries
        if not entries or entries[0][1] != number:
            raise ValueError(f"part {number} is not the first of its group")
        entries.popleft()
        self._len -= 1

    def place(self, placement: Placement) -> None:
        """Take up that nodes can do other parts than before."""
        if placement is self._placement:
            return
        entries = list(merge(*(group.entries for group in self._groups.values())))
        self._placement, self._groups = placement, {}
        for entry in entries:
            self._group(entry[1]).entries.append(entry)

    def _group(self, number: int) -> _Group:
        able = self._placement.able
        is_copy = number in self._copies
        return self._groups.setdefault((able[number] if able else None, is_copy), _Group(is_copy))

    def _first_group(self, node: str | None, is_copy: bool | None) -> _Group | None:
        able = (
            group
            for group in self._groups.values()
            if group.entries
            and (is_copy is None or group.is_copy is is_copy)
            and (node is None or self._placement.allows(node, group.entries[0][1]))
        )
        return min(able, key=lambda group: group.entries[0], default=None)
