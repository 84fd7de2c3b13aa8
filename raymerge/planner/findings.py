"""Collects what is wrong while planning, so that all of it is said at once and alike things are said once."""

from __future__ import annotations

from dataclasses import dataclass, field

from raymerge.errors import Problem

_SHOWN = 5


@dataclass(slots=True)
class _Group:
    where: str
    what: str
    remedy: str
    examples: list[str] = field(default_factory=list)
    count: int = 0


class Findings:
    """Problems in order of first appearance; tensors with the same trouble are counted and sampled."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], _Group] = {}

    def add(self, problem: Problem) -> None:
        """One problem of its own; a repetition is dropped."""
        self._groups.setdefault(
            (problem.where, problem.what), _Group(problem.where, problem.what, problem.remedy)
        )

    def tensor(self, key: tuple[str, ...], *, where: str, what: str, remedy: str, example: str) -> None:
        """One tensor that has the trouble named by ``key``; ``what`` and ``remedy`` of the first one are kept.

        ``what`` may hold ``{count}``.
        """
        group = self._groups.setdefault(key, _Group(where, what, remedy))
        group.count += 1
        if len(group.examples) < _SHOWN:
            group.examples.append(example)

    def problems(self) -> tuple[Problem, ...]:
        """Everything found."""
        return tuple(_problem(group) for group in self._groups.values())


def _problem(group: _Group) -> Problem:
    if not group.count:
        return Problem(group.where, group.what, group.remedy)
    more = group.count - len(group.examples)
    listed = "; ".join(group.examples) + (f"; and {more} more" if more else "")
    return Problem(group.where, f"{group.what.replace('{count}', str(group.count))}: {listed}.", group.remedy)
