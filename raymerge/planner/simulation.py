"""Segments on workers, event by event: handed out largest first, made at the paces that lanes leave others.

A lane reads, computes and writes one after the other, load by load; what overlaps are the lanes of a worker.
Over many loads that is a steady pace: a lane alone takes the sum of the three times, and among others longer,
as it waits for them at storage, links, threads and cores. Between two events, the begin or the end of a
segment, all paces stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from raymerge.merge_plan.columns import Ints
from raymerge.planner.simulate_cluster import Cluster
from raymerge.planner.simulate_queues import Network, Paces, Resource
from raymerge.planner.simulate_work import Floats, SegmentLoads

_TOGETHER = 1e-3
"""Events so close together count as one, as a share of the mean time of a segment."""
_NO_TIME = 1e-9
"""Seconds that computing a segment takes at least."""


class Limiter(StrEnum):
    """What time is spent on."""

    START_UP = "start-up"
    READING = "reading from the storage"
    WRITING = "writing to the storage"
    LINK = "the workers' links"
    COMPUTING = "computing"
    CORES = "the workers' cores, computing and moving bytes"
    DISPATCH = "handing out"
    IDLE = "workers without a segment"
    FINISHING = "finishing"


@dataclass(frozen=True, slots=True)
class Course:
    """How the segments of a run went."""

    seconds: float
    """From the first segment handed out to the last one's end."""
    busy_seconds: Floats
    """Time in which each worker had a segment ``[workers]``."""
    moved_bytes: Ints
    """Bytes that each worker read and wrote ``[workers]``."""
    spent: Mapping[Limiter, float]
    """``seconds``, by what they were spent on."""
    alone_seconds: float
    """How long the last segment was the only one, on more than one lane."""


def run_segments(loads: SegmentLoads, cluster: Cluster) -> Course:
    """Run segments on a cluster until all are done.

    Args:
        loads: the segments.
        cluster: what they run on.
    """
    shift = _Shift(loads, cluster)
    while shift.advance():
        pass
    return shift.course()


class _Shift:
    """Workers with their lanes, and the time of the run; arrays of lanes are ``[workers, lanes]``."""

    def __init__(self, loads: SegmentLoads, cluster: Cluster) -> None:
        self._cluster = cluster
        self._compute = loads.compute_seconds(cluster.compute)
        self._loads = loads
        # Those of equal cost in the order of their numbers, as the driver has them.
        self._todo = np.argsort(-loads.cost, kind="stable")
        self._next = 0
        # More workers than segments have nothing to do, and need not be looked at one by one.
        shape = (max(1, min(cluster.workers, len(loads))), cluster.wanted_lanes)
        self._in_use = np.zeros(shape, dtype=np.bool_)
        self._left = np.zeros(shape)
        self._wake = np.full(shape, np.inf)
        self._network = Network(shape, tuple(_resources(cluster)), cluster.threads)
        self._now = self._driver_free = self._alone = 0.0
        self._busy, self._moved = np.zeros(shape[0]), np.zeros(shape[0])
        self._spent = dict.fromkeys(Limiter, 0.0)

    def advance(self) -> bool:
        """Go on to the next event; False when all is done."""
        self._hand_out()
        if not self._in_use.any():
            return False
        streams = self._in_use & np.isinf(self._wake)
        paces = self._network.settle(streams)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.where(streams, self._left / paces.rates, np.inf)
        step = float(min(ends.min(), self._wake.min() - self._now))
        self._account(streams, paces, step)
        self._now += step
        self._left -= paces.rates * step
        done = streams & (ends <= step + self._together)
        self._in_use &= ~done
        self._wake[self._wake <= self._now + self._together] = np.inf
        return True

    def course(self) -> Course:
        """What came of it."""
        idle = self._cluster.workers - len(self._busy)
        busy, moved = (np.concatenate((each, np.zeros(idle))) for each in (self._busy, self._moved))
        return Course(self._now, busy, moved.astype(np.int64), self._spent, self._alone)

    @property
    def _together(self) -> float:
        return _TOGETHER * self._now / max(1, self._next) * self._in_use.size

    def _hand_out(self) -> None:
        """Fill free lanes with the largest segments that wait, one on every worker before a second."""
        workers = len(self._in_use)
        free = np.flatnonzero(~self._in_use.T)[: len(self._todo) - self._next]
        if not len(free):
            return
        lanes = (free % workers, free // workers)
        taken = self._todo[self._next : self._next + len(free)]
        self._next += len(free)
        self._take(lanes, taken)
        # The driver hands out one after the other.
        begins = max(self._now, self._driver_free) + self._cluster.driver * np.arange(1, len(free) + 1)
        self._driver_free = float(begins[-1])
        self._wake[lanes] = begins + self._cluster.overhead

    def _take(self, lanes: tuple[Ints, Ints], segments: npt.NDArray[np.intp]) -> None:
        self._in_use[lanes] = True
        self._left[lanes] = 1.0
        moved = self._loads.read_bytes[segments], self._loads.write_bytes[segments]
        self._network.computes[lanes] = np.maximum(self._compute[segments], _NO_TIME)
        for number, resource in enumerate(self._network.resources):
            for direction, (nbytes, speed) in enumerate(zip(moved, resource.speeds, strict=True)):
                self._network.moves[direction, number, *lanes] = nbytes / speed
        np.add.at(self._moved, lanes[0], sum(moved))

    def _account(self, streams: npt.NDArray[np.bool_], paces: Paces, step: float) -> None:
        """Write down what a step was spent on: what lanes do in it, and workers without any."""
        has_work = self._in_use.any(axis=1)
        self._busy += has_work * step
        if self._next == len(self._todo) > 1 and self._in_use.size > 1 and self._in_use.sum() == 1:
            self._alone += step
        working = float(has_work.sum()) / self._cluster.workers
        self._spent[Limiter.IDLE] += step * (1 - working)
        each = step * working / float(self._in_use.sum())
        self._spent[Limiter.DISPATCH] += each * float((self._in_use & ~streams).sum())
        self._spent[Limiter.COMPUTING] += each * float(paces.computing.sum())
        self._spent[Limiter.CORES] += each * float(paces.held_up.sum())
        for number, resource in enumerate(self._network.resources):
            shares = (paces.transfers * (paces.slowest == number)).sum(axis=(1, 2))
            for name, share in zip(resource.names, shares.tolist(), strict=True):
                self._spent[Limiter(name)] += each * share


def _resources(cluster: Cluster) -> Iterator[Resource]:
    """What lanes share while they read and write."""
    either = (Limiter.READING, Limiter.WRITING)
    if cluster.read is not None:
        yield Resource(either, (cluster.read, math.inf), is_common=True)
    if cluster.write is not None:
        yield Resource(either, (math.inf, cluster.write), is_common=True)
    if cluster.storage is not None:
        yield Resource(either, (cluster.storage, cluster.storage), is_common=True)
    if cluster.per_worker is not None:
        yield Resource((Limiter.LINK, Limiter.LINK), (cluster.per_worker, cluster.per_worker))
    if cluster.cores is not None or cluster.per_core is not None:
        speed, servers = cluster.per_core or math.inf, cluster.cores or math.inf
        yield Resource((Limiter.CORES, Limiter.CORES), (speed, speed), servers=servers, is_cores=True)
