"""Which source row each row of an output's embedding or head is made of, in runs of consecutive rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raymerge.errors import PlanError, Problem

Ids: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]

ABSENT = -1
"""Stands for the row of a token that a source lacks."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive output rows that are made alike."""

    to_row: int
    """The first of them."""
    count: int
    """How many there are."""
    terms: tuple[tuple[int, int], ...]
    """Source and its first row, which goes on with the output's. Of several the mean; of none zeros."""


@dataclass(frozen=True, slots=True)
class FixedRow:
    """The row that the recipe gives a token."""

    place: str
    """Where the recipe says so."""
    name: str
    """The token and its source, for messages."""
    term: tuple[int, int] | None
    """Source and row; None for zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class RowSources:
    """What every output row may be made of."""

    ids: Mapping[int, Ids]
    """The row of each output token in each source, ``ABSENT`` where there is none; shape [num_tokens]."""
    base: int
    """The source whose row fills a gap before all others."""
    fixed: Mapping[int, FixedRow]
    """Rows that the recipe chooses, by output row; they fill gaps only, unless forced."""
    forced: frozenset[int]
    """Output rows that are filled alike for every source."""

    def runs(self, member: int, holders: Mapping[int, int]) -> tuple[RowRun, ...]:
        """The rows of the matrix that stands for ``member`` in a merge, in order and without a gap.

        Args:
            member: the source whose matrix is brought into the output's numbering; one that lacks the
                tensor is filled throughout.
            holders: rows of this tensor in each source that has it; a token beyond them is absent there.

        Raises:
            PlanError: the recipe takes a row from a source that lacks the tensor.
        """
        self._check(holders)
        order = sorted(holders)
        rows = np.stack([_within(self.ids[source], holders[source]) for source in order])
        used = self._defaults(rows, order)
        own = self._own(rows[order.index(member)] if member in holders else None)
        used[:, own] = False
        if member in holders:
            used[order.index(member), own] = True
        for row, fixed in self.fixed.items():
            if own[row]:
                continue
            used[:, row] = False
            if fixed.term is not None:
                at = order.index(fixed.term[0])
                used[at, row], rows[at, row] = True, fixed.term[1]
        return _runs(used, rows, order)

    def defaults(self) -> Ids:
        """How many sources the row of each token without a row of its own is the mean of; [num_tokens]."""
        order = sorted(self.ids)
        found: Ids = self._defaults(np.stack([self.ids[each] for each in order]), order).sum(0)
        return found

    def _own(self, rows: Ids | None) -> _Flags:
        """Output rows that are the member's own; ``rows`` are its rows, None where it has none."""
        size = len(self.ids[self.base])
        own: _Flags = rows != ABSENT if rows is not None else np.zeros(size, dtype=np.bool_)
        own[sorted(self.forced)] = False
        return own

    def _defaults(self, rows: npt.NDArray[Any], order: Sequence[int]) -> _Flags:
        """Sources that a gap is filled from: the base where it has the token, else all that have it."""
        used: _Flags = rows != ABSENT
        if self.base in order:
            at = order.index(self.base)
            has_base = used[at].copy()
            used[:, has_base] = False
            used[at] = has_base
        return used

    def _check(self, holders: Mapping[int, int]) -> None:
        remedy = "Take the row from a model that has the tensor."
        problems = [
            Problem(row.place, f"{row.name} lacks a tensor that needs it, or that row of it.", remedy)
            for row in self.fixed.values()
            if row.term is not None and row.term[1] >= holders.get(row.term[0], 0)
        ]
        if problems:
            raise PlanError(problems)


def _within(ids: Ids, num_rows: int) -> Ids:
    """The rows of each token, those that a tensor of so many rows has."""
    found: Ids = np.where(ids < num_rows, ids, ABSENT)
    return found


def _runs(used: _Flags, rows: npt.NDArray[Any], order: Sequence[int]) -> tuple[RowRun, ...]:
    num_tokens = used.shape[1]
    if not num_tokens:
        return ()
    # Rows that advance with the output's keep their distance to it: a run ends where a distance changes.
    distance = np.where(used, rows - np.arange(num_tokens), 0)
    breaks = (used[:, 1:] != used[:, :-1]) | (distance[:, 1:] != distance[:, :-1])
    starts = np.concatenate([[0], np.flatnonzero(breaks.any(axis=0)) + 1])
    counts = np.diff(np.append(starts, num_tokens))
    flags, firsts = used[:, starts].T.tolist(), rows[:, starts].T.tolist()
    return tuple(
        RowRun(
            start,
            count,
            tuple((s, row) for s, is_used, row in zip(order, flag, first, strict=True) if is_used),
        )
        for start, count, flag, first in zip(starts.tolist(), counts.tolist(), flags, firsts, strict=True)
    )
