"""Segments on workers, event by event: handed out largest first, made at fair shares of what is common.

A lane reads, computes and writes one after the other, load by load; what overlaps are the lanes of a worker.
Over many loads that is a steady pace: a lane alone takes the sum of the three times, and all together take no
more than there is of storage, links, threads and cores. Between two events, the begin or the end of a
segment, all paces stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from raymerge.planner.columns import Ints
from raymerge.planner.simulate_cluster import Cluster
from raymerge.planner.simulate_shares import Limit, fair_rates
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


_STAGES = (Limiter.READING, Limiter.WRITING, Limiter.CORES, Limiter.COMPUTING)
"""What a lane that nothing holds back spends its time on, one after the other."""


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
        self._left, self._own = np.zeros(shape), np.zeros(shape)
        self._wake = np.full(shape, np.inf)
        self._reads, self._writes, self._moves = (np.zeros(shape) for _ in range(3))
        self._computes, self._works = np.zeros(shape), np.zeros(shape)
        self._stages = np.zeros((len(_STAGES), *shape))
        self._limits = self._all_limits()
        self._now = self._driver_free = self._alone = 0.0
        self._busy, self._moved = np.zeros(shape[0]), np.zeros(shape[0])
        self._spent = dict.fromkeys(Limiter, 0.0)

    def advance(self) -> bool:
        """Go on to the next event; False when all is done."""
        self._hand_out()
        if not self._in_use.any():
            return False
        streams = self._in_use & np.isinf(self._wake)
        rates = fair_rates(np.where(streams, self._own, 0.0), self._limits)
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.where(streams, self._left / rates, np.inf)
        step = float(min(ends.min(), self._wake.min() - self._now))
        self._account(streams, rates, step)
        self._now += step
        self._left -= rates * step
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

    def _all_limits(self) -> tuple[Limit, ...]:
        """Everything that may hold lanes back beside themselves."""
        each = self._cluster
        found = [
            (Limiter.READING, each.read, self._reads, True),
            (Limiter.WRITING, each.write, self._writes, True),
            (Limiter.READING, each.storage, self._moves, True),
            (Limiter.LINK, each.per_worker, self._moves, False),
            (Limiter.CORES, each.cores, self._works, False),
            (Limiter.COMPUTING, each.threads, self._computes, False),
        ]
        return tuple(
            Limit(name, float(capacity), demand, is_common)
            for name, capacity, demand, is_common in found
            if capacity is not None and (name is not Limiter.COMPUTING or each.threads < each.wanted_lanes)
        )

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
        reads, writes = self._loads.read_bytes[segments], self._loads.write_bytes[segments]
        self._reads[lanes], self._writes[lanes], self._moves[lanes] = reads, writes, reads + writes
        seconds, moving = self._compute[segments], (reads + writes) / (self._cluster.per_core or np.inf)
        self._computes[lanes], self._works[lanes] = seconds, seconds + moving
        waits = np.stack((reads / self._cluster.reading, writes / self._cluster.writing))
        # A core moves the bytes while the lane waits for them, as far as that lasts.
        beyond = np.maximum(moving - waits.sum(axis=0), 0.0)
        stages = np.stack((*waits, beyond, np.maximum(seconds, _NO_TIME)))
        self._own[lanes] = 1 / stages.sum(axis=0)
        self._stages[:, *lanes] = stages
        np.add.at(self._moved, lanes[0], reads + writes)

    def _account(self, streams: npt.NDArray[np.bool_], rates: Floats, step: float) -> None:
        """Write down what a step was spent on."""
        has_work = self._in_use.any(axis=1)
        self._busy += has_work * step
        if self._next == len(self._todo) > 1 and self._in_use.size > 1 and self._in_use.sum() == 1:
            self._alone += step
        full = [limit for limit in self._limits if limit.is_common and limit.is_full(rates).any()]
        for limit in full:
            part = step / len(full)
            if limit.demand is self._moves:
                written = float((rates * self._writes).sum() / (rates * self._moves).sum())
                self._spent[Limiter.WRITING] += part * written
                self._spent[Limiter.READING] += part * (1 - written)
            else:
                self._spent[Limiter(limit.name)] += part
        if not full:
            self._account_lanes(streams, rates, step)

    def _account_lanes(self, streams: npt.NDArray[np.bool_], rates: Floats, step: float) -> None:
        """The same while the storage has room: by what holds back each lane, and by workers without any."""
        working = float(self._in_use.any(axis=1).sum()) / self._cluster.workers
        self._spent[Limiter.IDLE] += step * (1 - working)
        each = step * working / float(self._in_use.sum())
        self._spent[Limiter.DISPATCH] += each * float((self._in_use & ~streams).sum())
        rest = streams.copy()
        for limit in self._limits:
            if not limit.is_common:
                held = rest & limit.is_full(rates) & (limit.demand > 0)
                self._spent[Limiter(limit.name)] += each * float(held.sum())
                rest &= ~held
        # Nothing holds these back: they do one thing after the other.
        shares = (self._stages * self._own * rest).sum(axis=(1, 2))
        for name, share in zip(_STAGES, shares, strict=True):
            self._spent[name] += each * float(share)
