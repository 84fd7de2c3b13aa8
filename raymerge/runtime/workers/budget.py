"""How much memory a worker may use, where the user does not say, and whether there is as much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil

from raymerge.errors import OptionError, Problem
from raymerge.execute.reading import FAR_BYTES, FAR_LANE_BYTES
from raymerge.merge_plan.projection import SMALLEST_BUDGET, Projection, project, too_little_memory
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.runtime.workers.control_groups import memory_rooms
from raymerge.runtime.workers.sizing import local_layouts, most_lanes
from raymerge.units import format_size

_USUAL_BUDGET = 512 << 20
"""More hardly helps: what does not fit is read twice, the second time from the page cache."""
_CLUSTER_BUDGET = 1 << 30
"""Budget on a running cluster: what is free on this machine says nothing about its workers."""


def fit_budget(plan: Plan, options: RunOptions, *, beside: int = 0, is_far: bool = False) -> Projection:
    """The memory projection of a plan under the options' budget.

    Where the user does not say, a plan that needs more than is usual gets it, if this machine has it.

    Args:
        plan: what is to be made.
        options: how to run.
        beside: bytes that each lane takes to upload what it makes.
        is_far: whether sources are read from servers.

    Raises:
        OptionError: the plan needs more than the budget; the message names the tensor and the least budget.
    """
    free, lanes = free_memory(), most_lanes(options)
    if beside:
        # A shard is uploaded by one lane.
        lanes = max(1, min(lanes, plan["shards"].num_rows))
    each, apart = (beside + FAR_LANE_BYTES, FAR_BYTES) if is_far else (beside, 0)
    budget = options.memory or usual_budget(options, free)
    projection = _projected(plan, budget, lanes=lanes, beside=each, apart=apart)
    if options.memory is None:
        least = projection.least_budget + each + apart
        spared = _spared(options, free, least, workers=num_workers(options))
        if spared > budget:
            budget = spared
            projection = _projected(plan, budget, lanes=lanes, beside=each, apart=apart)
    shortage = projection.shortage(given=budget)
    if shortage is not None:
        raise OptionError(shortage)
    return projection


def _projected(plan: Plan, budget: int, *, lanes: int, beside: int, apart: int) -> Projection:
    """The projection with as many lanes as the budget holds, each with what it takes for servers."""
    if not beside:
        return project(plan, budget, lanes=lanes)
    wanted = lanes
    while True:
        found = project(plan, max(1, budget - apart - wanted * beside), lanes=wanted)
        found = replace(found, beside=beside, apart=apart)
        if wanted > 1 and found.shortage() is not None:
            wanted -= 1
        elif found.lanes < wanted:
            wanted = found.lanes
        else:
            return found


def fit_units(options: RunOptions, *, least: int, num_units: int, title: str) -> int:
    """Bytes of memory that a worker may use for a unit of a stage.

    Where the user does not say, it is what a merge would get, or more where a unit needs more and this
    machine has it to spare.

    Args:
        options: how to run.
        least: bytes without which no unit can be done.
        num_units: units of the stage; no more workers than that are busy.
        title: what messages call the stage.

    Raises:
        OptionError: it is less than ``least``; the message names the stage and the least budget.
    """
    budget = options.memory
    if budget is None:
        free = free_memory()
        budget = usual_budget(options, free)
        busy = max(1, min(num_workers(options), num_units))
        budget = max(budget, _spared(options, free, least, workers=busy))
    if budget < least:
        raise OptionError(too_little_memory("--memory", budget, least, title))
    return budget


def _spared(options: RunOptions, free: int, least: int, *, workers: int) -> int:
    """Bytes that each of some workers may have of this machine's memory, where so many are needed; 0 where it
    is another machine's."""
    return min(least, free // 2 // workers) if options.address is None else 0


def check_free(options: RunOptions) -> None:
    """See that this machine has the memory that its workers were promised.

    Raises:
        OptionError: it has less.
    """
    if options.memory is None or options.address is not None:
        return
    workers, free = num_workers(options), free_memory()
    if options.memory * workers > free:
        count = f"{workers} workers" if workers > 1 else "1 worker"
        raise OptionError(
            Problem(
                "--memory",
                f"{count} with {format_size(options.memory)} each would use "
                f"{format_size(options.memory * workers)}, and {format_size(free)} are free here.",
                f"Give at most {format_size(free // workers)}, or fewer --workers.",
            )
        )


def usual_budget(options: RunOptions, free: int) -> int:
    """Half of the free memory, shared out, and no more than helps; in bytes.

    Args:
        options: how many workers there are, and where.
        free: bytes of memory that are free on this machine.
    """
    if options.address is not None:
        return _CLUSTER_BUDGET
    return max(SMALLEST_BUDGET, min(_USUAL_BUDGET, free // 2 // num_workers(options)))


def num_workers(options: RunOptions) -> int:
    """Workers that a run on this machine has at most."""
    return max(layout.all_workers for layout in local_layouts(options))


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still use: of the machine's, and of its control groups'.

    Args:
        root: where the system's ``proc`` and ``sys`` are.
    """
    machine = int(psutil.virtual_memory().available)
    return max(0, min((machine, *memory_rooms(root))))
