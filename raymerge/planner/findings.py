"""Collects problems while planning, so that all are reported at once and similar ones together."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from raymerge.errors import Problem

_SHOWN = 5


@dataclass(slots=True)
class _Group:
    where: str
    what: str
    remedy: str
    examples: dict[str, None] = field(default_factory=dict)


class Findings:
    """Problems in order of first appearance; tensors with the same problem are counted and sampled."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}

    def add(self, problem: Problem) -> None:
        """Add a single problem; a repetition is dropped."""
        self._groups.setdefault(
            (problem.where, problem.what), _Group(problem.where, problem.what, problem.remedy)
        )

    def tensor(self, key: tuple[str, ...], *, where: str, what: str, remedy: str, example: str) -> None:
        """Add one tensor with the problem named by ``key``; the text of the first one is kept.

        ``what`` may hold ``{count}``, the number of different examples.
        """
        self._groups.setdefault(key, _Group(where, what, remedy)).examples[example] = None

    @property
    def is_empty(self) -> bool:
        return not self._groups

    def problems(self) -> tuple[Problem, ...]:
        return tuple(_problem(group) for group in self._groups.values())


def _problem(group: _Group) -> Problem:
    count = len(group.examples)
    if not count:
        return Problem(group.where, group.what, group.remedy)
    more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
    listed = "; ".join(islice(group.examples, _SHOWN)) + more
    return Problem(group.where, f"{group.what.replace('{count}', str(count))}: {listed}.", group.remedy)
