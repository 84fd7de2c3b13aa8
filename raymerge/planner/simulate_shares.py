"""Fair shares: what each of many users gets of what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raymerge.planner.simulate_work import Floats

_ROUNDS = 3
"""How often limits that hang on each other are worked out; more changes nothing that can be seen."""
_SLACK = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that lanes share, so much of it a second."""

    name: str
    """What it is called."""
    capacity: float
    """Units a second; above 0."""
    demand: Floats
    """Units that each lane takes for a whole segment, ``[workers, lanes]``."""
    is_common: bool
    """Whether all lanes share it; otherwise each worker has its own."""

    def granted(self, rates: Floats) -> Floats | None:
        """The rates that it allows of those that are wanted, segments a second ``[workers, lanes]``; None if
        there is enough for all."""
        wants = rates * self.demand
        level = water_level(wants.reshape(1, -1) if self.is_common else wants, self.capacity)
        if level is None:
            return None
        with np.errstate(divide="ignore"):
            return np.asarray(np.where(self.demand > 0, level / self.demand, np.inf))

    def is_full(self, rates: Floats) -> npt.NDArray[np.bool_]:
        """Whether it has nothing left at these rates, ``[1, 1]``; of each worker ``[workers, 1]``."""
        used = (rates * self.demand).sum(axis=None if self.is_common else 1, keepdims=True)
        return np.asarray(used * _SLACK >= self.capacity)


def water_level(wants: Floats, capacity: float) -> Floats | None:
    """What nobody gets more than, so that all of a capacity is given out and nobody more than is wanted.

    Args:
        wants: of each group what its members want, ``[groups, members]``.
        capacity: what each group has.

    Returns:
        ``[groups, 1]``, infinite where there is enough; None if there is enough everywhere.
    """
    tight = wants.sum(axis=1) > capacity
    if not tight.any():
        return None
    ordered = np.sort(np.minimum(wants[tight], capacity), axis=1)
    below = np.zeros_like(ordered)
    np.cumsum(ordered[:, :-1], axis=1, out=below[:, 1:])
    candidates = (capacity - below) / np.arange(ordered.shape[1], 0, -1)
    first = np.argmax(ordered >= candidates, axis=1)
    level = np.full((len(wants), 1), np.inf)
    level[tight, 0] = candidates[np.arange(len(first)), first]
    return level


def fair_rates(own: Floats, limits: Sequence[Limit]) -> Floats:
    """How fast lanes go on: each as fast as it can by itself, and as its share of every limit allows.

    What a lane leaves of its share of one limit, because another holds it back, goes to the others.

    Args:
        own: segments a second of each lane alone, ``[workers, lanes]``; 0 for one that rests.
        limits: what they share.

    Returns:
        segments a second ``[workers, lanes]``; no limit is exceeded.
    """
    allowed: list[Floats | None] = [None] * len(limits)
    for _ in range(_ROUNDS):
        for index, limit in enumerate(limits):
            allowed[index] = limit.granted(_least(own, allowed[:index] + allowed[index + 1 :]))
        if sum(each is not None for each in allowed) < 2:
            # What one limit allows does not change with what the others leave.
            break
    rates = _least(own, allowed)
    return rates if len(limits) < 3 else _within(rates, limits)


def _least(own: Floats, allowed: Sequence[Floats | None]) -> Floats:
    rates = own
    for each in allowed:
        rates = rates if each is None else np.minimum(rates, each)
    return rates


def _within(rates: Floats, limits: Sequence[Limit]) -> Floats:
    """Three limits or more may not have settled: nobody may get more than there is."""
    for limit in limits:
        axis = None if limit.is_common else 1
        used = (rates * limit.demand).sum(axis=axis, keepdims=True)
        rates = rates * np.minimum(1.0, limit.capacity / np.maximum(used, limit.capacity))
    return rates
