"""What a run of a plan would take on a cluster, simulated segment by segment.

A lane reads, computes and writes one after the other, load by load; what overlaps are the lanes of a worker.
Over many loads that is a steady pace: a lane alone takes the sum of the three times, and among others longer,
as it waits for them at storage, links, threads and cores. Between two events, the begin or the end of a
segment, all paces stay as they are.

What a run would take on a cluster: the segments of the real plan, by the driver's rules, on a model of it.

Pure arithmetic: nothing is read, and two calls give equal results.

How fast lanes go on that wait for each other.

A lane does one thing after the other: it reads, computes and writes. At each of these it finds others that
want the same, and takes as long as it would alone times their number, itself among them, for each that can be
served at once. Whom it finds follows from how long everything takes them, so both are worked out in turn
until nothing changes. (That is approximate mean value analysis of a closed network, where every lane is a
class.)

So lanes never overlap without a gap: a resource is busy all the time only where they wait for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from raymerge.errors import OptionError, Problem
from raymerge.merge_plan.columns import Ints
from raymerge.merge_plan.memory import lanes_of
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.projection import project
from raymerge.planner.simulate_speeds import MethodSpeeds, measured_speeds
from raymerge.planner.simulate_work import Floats, SegmentLoads, segment_loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers and the storage that they share; speeds are in bytes per second."""

    workers: int = 1
    """How many there are."""
    storage: float | None = None
    """What all workers together read and write."""
    read: float | None = None
    """What they read, where that has a limit of its own."""
    write: float | None = None
    """What they write durably, where that has a limit of its own."""
    per_worker: float | None = None
    """What one worker reads and writes; None for as much as the storage gives."""
    compute: float | None = None
    """Bytes of sources that one thread computes with, the base counted; None for what was measured."""
    threads: int = 4
    """Threads of a worker that compute at once; as many as a worker on a machine of many cores has."""
    cores: int | None = None
    """Cores of a worker, on which it computes, reads and writes; None for as many as it likes."""
    per_core: float | None = None
    """What one core reads or writes, where bytes take its time (files in the system's cache, object storage);
    None where they do not (direct I/O)."""
    lanes: int | None = None
    """Segments that a worker has in flight, if its memory holds so many; None for two more than threads."""
    memory: int | None = None
    """Bytes that a worker may use; None for what the plan is shown for."""
    overhead: float = 0.005
    """Seconds from a lane's last segment to its next."""
    driver: float = 0.001
    """Seconds in which the driver takes one receipt and hands out the next segment, one after the other."""
    startup: float = 8.0
    """Seconds until the workers are there."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise OptionError(problems)

    @property
    def wanted_lanes(self) -> int:
        """Segments that a worker is to have in flight."""
        return self.lanes or lanes_of(self.threads)

    def _problems(self) -> Iterator[Problem]:
        for name in ("workers", "threads", "cores", "lanes"):
            if (given := getattr(self, name)) is not None and given < 1:
                what = f"{given} {name} cannot do anything."
                yield Problem(f"--simulate {name}", what, "Give 1 or more.")
        for name in ("storage", "read", "write", "per_worker", "compute", "per_core", "memory"):
            if (given := getattr(self, name)) is not None and not 0 < given < math.inf:
                yield Problem(f"--simulate {name}", f"{given} moves nothing.", "Give more than 0.")
        for name in ("overhead", "driver", "startup"):
            if not 0 <= getattr(self, name) < math.inf:
                yield Problem(f"--simulate {name}", f"{getattr(self, name)} is no time.", "Give 0 or more.")
        if self.storage is None and (self.read is None or self.write is None):
            what = "the speed of the storage is not given."
            remedy = "Give storage=2GB/s for reading and writing together, or both read= and write=."
            yield Problem("--simulate", what, remedy)


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


__all__ = ["Cluster", "Limiter", "OtherNumber", "Simulation", "Spread", "simulate", "simulate_plan"]

_FINISHING_SECONDS = 0.2
_FINISHING_PER_TENSOR = 20e-6
"""Seconds in which the structure is verified and the index written."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of all workers."""

    least: float
    """Of the worker that has least."""
    median: float
    """Of the one in the middle."""
    most: float
    """Of the worker that has most."""


@dataclass(frozen=True, slots=True)
class OtherNumber:
    """The same run with another number of workers."""

    workers: int
    """How many."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a run would take."""

    cluster: Cluster
    """What it would run on."""
    segments: int
    """Segments."""
    startup_seconds: float
    """Until the workers are there."""
    run_seconds: float
    """From the first byte read to the last one written."""
    finishing_seconds: float
    """Until the checkpoint is published."""
    read_bytes: int
    """Bytes read, those that statistics read again counted again."""
    written_bytes: int
    """Bytes of tensors written."""
    busy_seconds: Spread
    """Time in which a worker has work."""
    moved_bytes: Spread
    """Bytes that a worker reads and writes."""
    shares: Mapping[str, float]
    """Share of the wall time by what it is spent on, largest first; they add up to 1."""
    alone_seconds: float
    """How long the last segment is the only one."""
    others: tuple[OtherNumber, ...]
    """Half and twice as many workers."""
    guessed: tuple[str, ...]
    """Methods whose speed was not measured, so that it is a guess."""

    @property
    def seconds(self) -> float:
        """Wall time of all."""
        return self.startup_seconds + self.run_seconds + self.finishing_seconds

    @property
    def limiter(self) -> str:
        """What most of the time is spent on."""
        return next(iter(self.shares))

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return {"seconds": self.seconds, "limiter": self.limiter, **asdict(self)}


def simulate_plan(
    plan: Plan, cluster: Cluster, budget: int, *, speeds: MethodSpeeds | None = None
) -> Simulation:
    """Simulate the run of a plan, and again with half and with twice as many workers.

    Args:
        plan: an executable plan.
        cluster: what it runs on.
        budget: bytes that a worker may use, where the cluster does not say.
        speeds: how fast methods compute, where the cluster does not say; None for what was measured.

    Raises:
        OptionError: a worker's memory is too little for the plan.
    """
    memory = project(plan, cluster.memory or budget, lanes=cluster.wanted_lanes)
    shortage = memory.shortage("--simulate memory")
    if shortage is not None:
        raise OptionError(shortage)
    cluster = replace(cluster, lanes=memory.lanes, memory=memory.budget)
    return simulate(segment_loads(plan, memory.lane, speeds or measured_speeds()), cluster)


def simulate(loads: SegmentLoads, cluster: Cluster) -> Simulation:
    """Simulate a run, and again with half and with twice as many workers.

    Args:
        loads: what the segments take, under the cluster's memory.
        cluster: what they run on.
    """
    course = run_segments(loads, cluster)
    finishing = _FINISHING_SECONDS + _FINISHING_PER_TENSOR * loads.num_tensors
    fixed = cluster.startup + finishing
    numbers = dict.fromkeys((max(1, cluster.workers // 2), 2 * cluster.workers))
    others = [
        OtherNumber(each, fixed + run_segments(loads, replace(cluster, workers=each)).seconds)
        for each in numbers
        if each != cluster.workers
    ]
    return Simulation(
        cluster=cluster,
        segments=len(loads),
        startup_seconds=cluster.startup,
        run_seconds=course.seconds,
        finishing_seconds=finishing,
        read_bytes=int(loads.read_bytes.sum()),
        written_bytes=int(loads.write_bytes.sum()),
        busy_seconds=_spread(course.busy_seconds),
        moved_bytes=_spread(course.moved_bytes.astype(np.float64)),
        shares=_shares(course, cluster.startup, finishing),
        alone_seconds=course.alone_seconds,
        others=tuple(others),
        guessed=() if cluster.compute is not None else loads.guessed,
    )


def _spread(values: Floats) -> Spread:
    return Spread(float(values.min()), float(np.median(values)), float(values.max()))


def _shares(course: Course, startup: float, finishing: float) -> dict[str, float]:
    spent = {**course.spent, Limiter.START_UP: startup, Limiter.FINISHING: finishing}
    total = sum(spent.values())
    ordered = sorted(spent, key=lambda each: -spent[each])
    return {each.value: spent[each] / total for each in ordered if spent[each] > 0}
