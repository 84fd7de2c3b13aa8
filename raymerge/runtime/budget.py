"""How much memory a worker may use, where the user does not say, and whether there is as much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from raymerge.errors import OptionError, Problem
from raymerge.planner.memory import SMALLEST_BUDGET, Projection, project
from raymerge.planner.tables import Plan
from raymerge.runtime.options import RunOptions
from raymerge.runtime.sizing import local_layouts, most_lanes
from raymerge.units import format_size

_USUAL_BUDGET = 2 << 30
_CLUSTER_BUDGET = 1 << 30
"""Budget on a running cluster: what is free on this machine says nothing about its workers."""


def fit_budget(plan: Plan, options: RunOptions) -> Projection:
    """The memory projection of a plan under the options' budget.

    Raises:
        OptionError: the plan needs more than the budget; the message names the tensor and the least budget.
    """
    budget = options.memory or usual_budget(options, free_memory())
    projection = project(plan, budget, lanes=most_lanes(options))
    what = f"{projection.least_tensor} with {projection.least_method}"
    _check_enough(projection.budget, projection.least_budget, what)
    return projection


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
        if options.address is None:
            busy = max(1, min(num_workers(options), num_units))
            budget = max(budget, min(least, free // 2 // busy))
    _check_enough(budget, least, title)
    return budget


def _check_enough(budget: int, least: int, what: str) -> None:
    if budget < least:
        raise OptionError(
            Problem(
                "--memory",
                f"{format_size(budget)} a worker are too little for {what}.",
                f"The smallest budget that works is {least} bytes ({format_size(least)}).",
            )
        )


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
    return max(layout.workers for layout in local_layouts(options))


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still use: of the machine's, and of its control groups'.

    Args:
        root: where the system's ``proc`` and ``sys`` are.
    """
    machine = int(psutil.virtual_memory().available)
    return max(0, min((machine, *_group_rooms(root))))


def _group_rooms(root: Path) -> Iterator[int]:
    """What each control group that holds this process has left: its own and all above it."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.strip("/")
        # Within a container the path may be the host's; what is mounted then is the container's own group.
        for each in (group, *group.parents):
            most = _text(each / names[0]).strip() if each.is_relative_to(top) else ""
            if most.isdecimal():
                yield int(most) - _used(each, *names[1:])


def _used(group: Path, usage: str, cached: str) -> int:
    """Bytes that a group has in use; file pages that nobody uses make way."""
    stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return int(_text(group / usage).strip() or 0) - int(stat.get(cached, 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
