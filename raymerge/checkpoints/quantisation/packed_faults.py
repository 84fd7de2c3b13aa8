"""Faults of a checkpoint's quantised tensors; alike ones are told once, for there can be ten thousands."""

from __future__ import annotations

from collections import Counter

from raymerge.errors import Problem


class Faults:
    """Collects faults in order of first appearance."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._first: dict[str, Problem] = {}
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, what: str, remedy: str) -> None:
        """One fault; of a kind, the first is told in full and the others are counted."""
        if kind not in self._first:
            self._first[kind] = Problem(self._where, what, remedy)
        self._counts[kind] += 1

    def problems(self) -> tuple[Problem, ...]:
        """Everything collected."""
        return tuple(self._problem(kind, problem) for kind, problem in self._first.items())

    def _problem(self, kind: str, problem: Problem) -> Problem:
        more = self._counts[kind] - 1
        if not more:
            return problem
        noun = "tensor" if more == 1 else "tensors"
        return Problem(problem.where, f"{problem.what} So it is with {more} more {noun}.", problem.remedy)
