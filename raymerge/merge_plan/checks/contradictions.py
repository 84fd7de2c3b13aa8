"""Collects what in a plan contradicts itself: for each rule the first row that breaks it, and how many do."""

from __future__ import annotations

import numpy as np

from raymerge.errors import Problem
from raymerge.merge_plan.columns import Flags

_REMEDY = (
    "Make the plan anew; if this comes again, it is a bug in raymerge: please report it with the recipe."
)


class Contradictions:
    """Contradictions in the order found."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def __bool__(self) -> bool:
        return bool(self._problems)

    def say(self, where: str, what: str) -> None:
        """One contradiction."""
        self._problems.append(Problem(f"plan, {where}", f"{what}.", _REMEDY))

    def flag(self, table: str, broken: Flags, what: str) -> None:
        """A rule that the flagged rows of a table ``[rows]`` break, if there are any."""
        count = int(np.count_nonzero(broken))
        if count:
            more = f" ({count - 1} more rows alike)" if count > 1 else ""
            self.say(f"table {table}, row {int(np.argmax(broken))}", what + more)

    def problems(self) -> tuple[Problem, ...]:
        """Everything found."""
        return tuple(self._problems)
