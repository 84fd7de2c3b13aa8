"""Inputs made of rows of stored matrices: which stored rows a window of them takes, and where each goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from raymerge.merge_plan.expressions import Read, Term
from raymerge.merge_plan.memory import AssemblyNeed
from raymerge.merge_plan.plan import Flags, Ints, starts


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a window of rows takes of one term."""

    ranges: Ints
    """First and stop of runs of stored rows ``[ranges, 2]``, ascending and apart from each other."""
    moves: Ints
    """``[moves, 3]``: a row of the window, the row's place among all those taken, and how many follow it."""

    @property
    def num_rows(self) -> int:
        """Stored rows taken."""
        return int((self.ranges[:, 1] - self.ranges[:, 0]).sum())

    def stored_row(self, place: int) -> int:
        """The stored row at a place among those taken."""
        sizes = self.ranges[:, 1] - self.ranges[:, 0]
        index = int(np.searchsorted(np.cumsum(sizes), place, side="right"))
        return int(self.ranges[index, 0] + place - starts(sizes)[index])


@dataclass(frozen=True, slots=True, eq=False)
class AssembledInput:
    """An assembly as the plan's tables hold it."""

    num_rows: int
    """Rows of the matrix."""
    num_columns: int
    """Its columns."""
    real_rows: int
    """Rows from here on are the mean of those before."""
    terms: tuple[Term, ...]
    """What rows are taken from."""
    runs: Ints
    """``[4, runs]``: to_row, from_row, count and term, by to_row and then term."""
    need: AssemblyNeed
    """Memory that it takes."""

    @property
    def is_padded(self) -> bool:
        """Whether it has rows that are the mean of the others."""
        return self.real_rows < self.num_rows

    def taken(self, first: int, stop: int) -> tuple[Taken, ...]:
        """What the rows from ``first`` up to ``stop`` take of each term."""
        near = self.runs[:, : np.searchsorted(self.runs[0], stop)]
        to, start, count, term = near[:, near[0] + near[2] > first]
        skipped = np.maximum(first - to, 0)
        begin = to + skipped
        moves = np.stack([begin - first, start + skipped, np.minimum(to + count, stop) - begin], axis=1)
        return tuple(self._taken(each, moves[term == number]) for number, each in enumerate(self.terms))

    def _taken(self, term: Term, moves: Ints) -> Taken:
        if term.read.view is not None:
            return Taken(np.array([[0, term.num_rows]], dtype=np.int64), moves)
        return _compacted(moves)

    def covers(self, taken: Sequence[Taken], num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Stretches of a window's rows that equally many terms give: first, stop and how many."""
        change = np.zeros(num_rows + 1, dtype=np.int64)
        for each in taken:
            change[each.moves[:, 0]] += 1
            change[each.moves[:, 0] + each.moves[:, 2]] -= 1
        counts = np.cumsum(change)[:num_rows]
        bounds = [*np.flatnonzero(np.diff(counts, prepend=-1)).tolist(), num_rows]
        for first, stop in pairwise(bounds):
            yield first, stop, int(counts[first])


def _compacted(moves: Ints) -> Taken:
    """Moves from stored rows as moves from among the rows that are taken."""
    if not len(moves):
        return Taken(np.empty((0, 2), dtype=np.int64), moves)
    order = np.argsort(moves[:, 1], kind="stable")
    first = moves[order, 1]
    reach = np.maximum.accumulate(first + moves[order, 2])
    begins: Flags = np.append(True, first[1:] > reach[:-1])
    heads = np.flatnonzero(begins)
    ranges = np.stack([first[heads], reach[np.append(heads[1:], len(first)) - 1]], axis=1)
    shift = starts(ranges[:, 1] - ranges[:, 0]) - ranges[:, 0]
    placed = moves.copy()
    placed[order, 1] += shift[np.cumsum(begins) - 1]
    return Taken(ranges, placed)


@dataclass(frozen=True, slots=True, eq=False)
class RawRows:
    """The bytes of what a tile takes of an assembled input."""

    num_rows: int
    """Rows of the window that the tile lies in."""
    first_row: int
    """Its first row."""
    begin: int
    """The tile's first element within the window."""
    count: int
    """Elements of the tile."""
    taken: tuple[Taken, ...]
    """What each term gives."""
    stored: tuple[torch.Tensor, ...]
    """Its bytes for each term: uint8, on the host; the whole region of a term that lies in a fused tensor."""
    factors: tuple[tuple[torch.Tensor, ...], ...]
    """Bytes of the factors of each term's product, the same for every tile of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class RawCodes:
    """The bytes of what a tile takes of an input that is stored as codes with scales."""

    codes: torch.Tensor
    """uint8, whole bands of rows."""
    scales: torch.Tensor
    """Those of the bands, uint8."""
    tensor_scale: torch.Tensor
    """The one scale of their matrix, uint8; empty where there is none."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of it."""
        return self.codes, self.scales, self.tensor_scale


Input: TypeAlias = Read | AssembledInput
"""What feeds a part: bytes as they are stored, or rows of several matrices."""

RawInput: TypeAlias = torch.Tensor | RawCodes | RawRows
"""What a tile takes of an input: uint8 bytes on the host."""

Raw: TypeAlias = Sequence[RawInput]
"""One for each input of a part, or of a row."""
