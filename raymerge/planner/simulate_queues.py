"""How fast lanes go on that wait for each other.

A lane does one thing after the other: it reads, computes and writes. At each of these it finds others that
want the same, and takes as long as it would alone times their number, itself among them, for each that can be
served at once. Whom it finds follows from how long everything takes them, so both are worked out in turn
until nothing changes. (That is approximate mean value analysis of a closed network, where every lane is a
class.)

So lanes never overlap without a gap: a resource is busy all the time only where they wait for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raymerge.planner.simulate_work import Floats

_ROUNDS = 40
_SETTLED = 1e-3
"""Paces that change by less than this part are settled."""
_WIDTH = math.sqrt(3) / math.pi
"""Of the logistic distribution, for a standard deviation of 1."""
_NEXT_TO_NONE = 1e-12
"""A variance that may be divided by."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that lanes share while they read and write."""

    names: tuple[str, str]
    """What time is called that is spent on it, reading and writing."""
    speeds: tuple[float, float]
    """Bytes a second that it reads and writes for a lane that has it alone; infinite where it has no part."""
    servers: float = 1.0
    """Lanes that it serves at once, each as fast as if alone."""
    is_common: bool = False
    """Whether the lanes of all workers share it; otherwise each worker has its own."""
    is_cores: bool = False
    """Whether lanes compute on it, too."""


@dataclass(frozen=True, slots=True)
class Paces:
    """How fast lanes go on, and what they do meanwhile."""

    rates: Floats
    """Segments a second ``[workers, lanes]``; 0 of a lane that rests."""
    transfers: Floats
    """Share of its time in which a lane reads and writes ``[2, workers, lanes]``."""
    slowest: npt.NDArray[np.intp]
    """The number of the resource that this takes the time of ``[2, workers, lanes]``."""
    computing: Floats
    """Share in which it computes, or waits for leave to ``[workers, lanes]``."""
    held_up: Floats
    """Share in which it might compute, but for others on the cores ``[workers, lanes]``."""


class Network:
    """Lanes, what each asks of what they share, and where they were when last looked at."""

    def __init__(self, shape: tuple[int, int], resources: Sequence[Resource], threads: int) -> None:
        """
        Args:
            shape: workers, and the lanes of each.
            resources: what they share while they read and write. A transfer uses all of them at once, and
                takes as long as the slowest.
            threads: lanes of a worker that compute at once.
        """
        self.resources = tuple(resources)
        """What they share."""
        self.moves = np.zeros((2, len(self.resources), *shape))
        """Seconds that each lane's segment takes of each resource alone, reading and writing."""
        self.computes = np.ones(shape)
        """Seconds of one thread; above 0."""
        self._threads = threads if threads < shape[1] else math.inf
        # Part of its time in which a lane is at a resource, on a core to compute, and there or waiting to be.
        self._moving = np.zeros(self.moves.shape[1:])
        self._on_core, self._at_threads = np.zeros(shape), np.zeros(shape)

    def settle(self, streams: npt.NDArray[np.bool_]) -> Paces:
        """The paces of some lanes, the others resting; it takes few rounds where few lanes changed.

        Args:
            streams: the lanes that are at work ``[workers, lanes]``.
        """
        before = np.zeros(streams.shape)
        for _ in range(_ROUNDS):
            stays = self.moves * self._crowding()
            transfers = stays.max(axis=1)
            on_core = self.computes * self._core_crowding()
            at_threads = on_core * self._thread_crowding()
            rates = streams / (transfers.sum(axis=0) + at_threads)
            self._moving = rates * stays.sum(axis=0)
            self._on_core, self._at_threads = rates * on_core, rates * at_threads
            if (np.abs(rates - before) <= _SETTLED * rates).all():
                break
            before = rates
        return Paces(
            rates,
            rates * transfers,
            stays.argmax(axis=1),
            rates * (at_threads - on_core + self.computes),
            rates * (on_core - self.computes),
        )

    def _crowding(self) -> Floats:
        """How much longer transfers take for others at each resource ``[resources, workers, lanes]``."""
        found = np.ones_like(self._moving)
        for number, each in enumerate(self.resources):
            if each.is_cores:
                found[number] += self._on_cores(number, self._threads)
            else:
                found[number] += _others(self._moving[number], is_common=each.is_common) / each.servers
        return found

    def _core_crowding(self) -> Floats | float:
        """The same for computing: beside a lane that may compute there are no more than one thread less."""
        cores = [number for number, each in enumerate(self.resources) if each.is_cores]
        return 1 + sum(self._on_cores(number, self._threads - 1) for number in cores)

    def _thread_crowding(self) -> Floats | float:
        """How much longer it takes for waiting until it may."""
        there = self._at_threads
        return 1 + _in_the_way(_others(there), _others(there * (1 - there)), self._threads)

    def _on_cores(self, number: int, most: float) -> Floats | float:
        """How much longer it takes for others on a worker's cores, of whom no more than ``most`` compute."""
        both, computing = self._moving[number] + self._on_core, self._on_core
        beside = np.minimum(_others(computing), most)
        # As far as others wait for leave to compute their number does not vary.
        spread = beside * (1 - beside / max(most, 1.0))
        fixed = np.maximum(_others(computing * (1 - computing)) - spread, 0.0)
        others = _others(self._moving[number]) + beside
        return _in_the_way(others, _others(both * (1 - both)) - fixed, self.resources[number].servers)


def _others(there: Floats, *, is_common: bool = False) -> Floats:
    """Sums over all other lanes, or over those of the same worker."""
    total = there.sum() if is_common else there.sum(axis=1, keepdims=True)
    return np.asarray(np.maximum(total - there, 0.0))


def _in_the_way(others: Floats, variance: Floats, servers: float) -> Floats | float:
    """Others for each server, beyond those that are served beside a lane: what its service takes longer by.

    Args:
        others: how many there are on average.
        variance: of their number.
        servers: how many are served at once.
    """
    if math.isinf(servers):
        return 0.0
    # The mean of what is above, and not what is above the mean; never more than all of them.
    width = _WIDTH * np.sqrt(np.maximum(variance, _NEXT_TO_NONE))
    above = width * np.logaddexp(0, (others + 1 - servers) / width)
    return np.asarray(np.minimum(above, others) / servers)
