"""What a run would take on a cluster: the segments of the real plan, by the driver's rules, on a model of it.

Pure arithmetic: nothing is read, and two calls give equal results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from raymerge.errors import OptionError
from raymerge.merge_plan.plan import Plan
from raymerge.merge_plan.projection import project
from raymerge.planner.simulate_cluster import Cluster
from raymerge.planner.simulate_speeds import MethodSpeeds, measured_speeds
from raymerge.planner.simulate_work import Floats, SegmentLoads, segment_loads
from raymerge.planner.simulation import Course, Limiter, run_segments

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
