"""How one shard is made by itself, from its first byte to its last, for a place that takes no other order.

In a plan, bytes that are equal are made once and written to all of their places, and codes are made together
with their scales. Here every shard has all of its bytes made for itself, and what would have to wait for too
long until its place is reached is made again when it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raymerge.execute.ops import Making
from raymerge.merge_plan.columns import Ints, ints
from raymerge.merge_plan.files_read import files_read
from raymerge.merge_plan.tables import Plan

MOST_EARLY_BYTES = 32 << 20
"""Bytes of a shard that are kept at most until their place in it is reached."""


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """The making of one shard."""

    name: str
    """Its file name."""
    nbytes: int
    """Its size."""
    header: bytes
    """What it begins with."""
    steps: tuple[tuple[int, tuple[Making, ...]], ...]
    """What is made, in order: numbers of segments, each with some of its rows, none of them twice."""
    early_bytes: int
    """The most bytes that are kept until their place is reached."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of its segments."""
        return tuple(dict.fromkeys(segment for segment, _ in self.steps))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is wanted of a plan's rows."""

    offset: list[int]
    nbytes: list[int]
    maker: list[int]
    """The row that writes each."""


def shard_orders(plan: Plan, *, most_early: int = MOST_EARLY_BYTES) -> tuple[ShardOrder, ...]:
    """How each shard is made, in the plan's order.

    Args:
        plan: what is made.
        most_early: bytes that may be kept until their place is reached.
    """
    table = plan["rows"]
    rows = _Rows(ints(table, "offset").tolist(), ints(table, "nbytes").tolist(), _makers(plan).tolist())
    by_shard: dict[int, list[tuple[int, int, int]]] = {}
    spans = (ints(plan["segments"], name).tolist() for name in ("first_row", "num_rows", "shard"))
    for segment, (first, count, shard) in enumerate(zip(*spans, strict=True)):
        by_shard.setdefault(shard, []).append((segment, first, count))
    found = []
    for number, shard in enumerate(plan["shards"].to_pylist()):
        queue = _Queue(rows, by_shard.get(number, ()), most_early)
        steps = tuple(queue.steps())
        found.append(ShardOrder(shard["name"], shard["nbytes"], shard["header"], steps, queue.most_kept))
    return tuple(found)


def shard_reads(plan: Plan, orders: Sequence[ShardOrder]) -> tuple[frozenset[tuple[int, str]], ...]:
    """Of each shard the files that it is made of, by the source's index and the key."""
    read = files_read(plan)
    firsts = ints(plan["segments"], "first_row")
    found = []
    for order in orders:
        rows = np.asarray([row for _, makings in order.steps for row, _ in makings], dtype=np.int64)
        # Of a row that belongs to another shard, all files of its segment: that is where it is made.
        makers = np.unique(np.searchsorted(firsts, rows, side="right") - 1).tolist()
        found.append(frozenset[tuple[int, str]]().union(*(read[segment] for segment in makers)))
    return tuple(found)


def _makers(plan: Plan) -> Ints:
    """The row that writes each row."""
    copy_of, made_with = ints(plan["rows"], "copy_of"), ints(plan["rows"], "made_with")
    first = np.where(copy_of >= 0, copy_of, np.arange(len(copy_of)))
    return np.where(made_with[first] >= 0, made_with[first], first)


class _Queue:
    """The rows of one shard on their way into it."""

    def __init__(self, rows: _Rows, own: Sequence[tuple[int, int, int]], most: int) -> None:
        self._rows = rows
        self._own = own
        self._most = most
        self._with: dict[int, list[int]] = {}
        for _, first, count in own:
            for row in range(first, first + count):
                self._with.setdefault(rows.maker[row], []).append(row)
        self._done: set[int] = set()
        self._kept: dict[int, int] = {}
        self._kept_bytes = 0
        self.most_kept = 0
        """The most bytes that were kept so far."""

    def steps(self) -> Iterator[tuple[int, tuple[Making, ...]]]:
        """What is made, segment by segment; where a row comes again, another step begins."""
        for segment, first, count in self._own:
            makings: dict[int, Making] = {}
            is_first = True
            for row in range(first, first + count):
                if row in self._done:
                    continue
                maker = self._rows.maker[row]
                if maker in makings:
                    yield segment, tuple(makings.values())
                    makings, is_first = {}, False
                makings[maker] = (maker, self._made(row))
            if makings or is_first:
                yield segment, tuple(makings.values())

    def _made(self, row: int) -> tuple[int, ...]:
        """A row whose place is reached, and what is made with it and kept."""
        offsets, sizes = self._rows.offset, self._rows.nbytes
        chosen = [row]
        for other in self._with[self._rows.maker[row]]:
            is_open = other != row and other not in self._done
            if is_open and self._kept_bytes + sizes[other] <= self._most:
                chosen.append(other)
                self._keep(offsets[other], sizes[other])
        self._done.update(chosen)
        at = offsets[row] + sizes[row]
        while (nbytes := self._kept.pop(at, 0)) > 0:
            at, self._kept_bytes = at + nbytes, self._kept_bytes - nbytes
        return tuple(chosen)

    def _keep(self, offset: int, nbytes: int) -> None:
        if nbytes:
            self._kept[offset] = nbytes
            self._kept_bytes += nbytes
            self.most_kept = max(self.most_kept, self._kept_bytes)
