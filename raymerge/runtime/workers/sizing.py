"""How many workers a run has, how many threads each, and how much memory; and what the system lets it have.

Control groups limit memory, processors and processes: nested groups of containers, batch jobs or services,
each with limits of its own. Linux has two versions; a machine may use both at once, for different resources.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from raymerge import devices
from raymerge.errors import OptionError, Problem
from raymerge.merge_plan.memory import (
    FAR_BYTES,
    FAR_LANE_BYTES,
    SMALLEST_BUDGET,
    Projection,
    lanes_of,
    project,
    too_little_memory,
)
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.units import format_size

_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd", "/dev/dri")
"""What the drivers of GPUs put into Linux: NVIDIA's, its boards', Windows' subsystem's, AMD's and Intel's."""
MOST_THREADS = 4
"""Compute threads of a worker unless more are asked for: with more they wait for the interpreter's lock."""
MOST_CPU_WORKERS = 8
"""CPU workers that are started on one machine unless more are asked for: beyond that storage is its limit."""


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpus: int = 0

    def capacity(self, threads: int, *, with_gpu: bool) -> int:
        """Workers of so many threads that fit; each with a GPU of its own, or without."""
        capacity = self.cores // threads
        return min(self.gpus, capacity) if with_gpu else capacity


@dataclass(frozen=True, slots=True)
class Layout:
    workers: int
    threads: int

    @property
    def cores(self) -> int:
        return self.workers * self.threads


def layout_of(options: RunOptions, machines: Sequence[int], gpus: int) -> Layout:
    """Workers and threads of a run; ``machines`` are CPU cores of each, ``gpus`` GPUs with workers on all of
    them together, 0 to compute on processors.

    On processors a worker has up to four threads, or three where that leaves fewer cores idle. They share one
    import of torch and one memory limit, so that few workers start sooner and make more of the same memory;
    but each kernel call holds the interpreter's lock for a moment, so large machines have several workers. A
    GPU has one worker with one thread, which only launches its kernels."""
    if gpus:
        workers = 1 if options.inline else options.workers or gpus
        return Layout(workers, options.threads or 1)
    if options.inline or options.workers is not None:
        workers = options.workers or 1
        return Layout(workers, options.threads or _fitting_threads(machines, workers))
    threads = options.threads or _filling_threads(machines)
    return Layout(max(1, _num_workers(machines, threads)), threads)


def local_layouts(options: RunOptions) -> tuple[Layout, ...]:
    """The layouts that a run here may have; two where the device is still to be chosen."""
    return tuple(layout_of(options, (cores_here(),), gpus) for gpus in _local_gpus(options))


def embedded_slots(options: RunOptions) -> int:
    """CPU slots of an embedded cluster: the cores here, or more for more workers or GPUs."""
    return max(cores_here(), *(layout.cores for layout in local_layouts(options)))


def most_lanes(options: RunOptions) -> int:
    """Segments that a worker may have in hand at once, which share its memory. More than its compute threads:
    while one computes, others read and write. A cluster counts as one of machines with many cores, and with
    GPUs unless they are not to be used."""
    if options.address is None:
        threads = [layout_of(options, (cores_here(),), gpus).threads for gpus in _local_gpus(options)]
    else:
        threads = [options.threads or (1 if options.device == "cuda" else MOST_THREADS)]
    return lanes_of(max(threads))


def no_capacity(
    options: RunOptions, layout: Layout, machines: Sequence[Machine], *, with_gpu: bool
) -> Problem | None:
    capacity = sum(machine.capacity(layout.threads, with_gpu=with_gpu) for machine in machines)
    if layout.workers <= capacity:
        return None
    workers = f"{layout.workers} worker{'' if layout.workers == 1 else 's'}"
    gpus = sum(machine.gpus for machine in machines)
    if with_gpu and gpus > capacity:
        has = f"the CPU slots of the cluster suffice for {capacity} of its {gpus} GPUs"
        what = f"{workers} were asked for, but {has}, at {layout.threads} for each on its own machine."
        return Problem("--workers", what, f"Give at most {capacity}, or add CPU slots.")
    if with_gpu:
        what = f"{workers} were asked for, but the cluster has {gpus} GPU{'' if gpus == 1 else 's'}."
        return Problem("--workers", what, f"Give at most {capacity}, or --device cpu.")
    if layout.threads == 1:
        what = f"{workers} were asked for, but the cluster has {capacity} CPU slots."
        return Problem("--workers", what, f"Give at most {capacity}, or add machines.")
    where = "--threads" if options.workers is None else "--workers"
    what = f"{workers} of {layout.threads} threads were asked for, but the cluster has room for {capacity}."
    return Problem(where, what, "Give fewer --threads, or add machines.")


def no_gpu(machines: Sequence[Machine]) -> Problem:
    lack = "CPU slots beside its GPUs" if any(machine.gpus for machine in machines) else "GPU"
    what = f"cuda was asked for, but the cluster has no {lack}."
    return Problem("--device", what, "Use --device auto or cpu.")


def cores_here(root: Path = Path("/")) -> int:
    """CPU cores that this process may keep busy, by its affinity and control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(min((cores, *core_quotas(root)))))


def _local_gpus(options: RunOptions) -> tuple[int, ...]:
    """GPUs for a run here; two numbers where the device is still to be chosen."""
    # Nobody waits for torch to ask for what no driver is there for.
    is_possible = options.device != "cpu" and ("torch" in sys.modules or _has_driver())
    gpus = len(devices.list_gpus()) if is_possible else 0
    return (gpus, 0) if gpus and options.device == "auto" else (gpus,)


def _has_driver() -> bool:
    return sys.platform != "linux" or any(map(os.path.exists, _DRIVERS))


def _fitting_threads(machines: Sequence[int], workers: int) -> int:
    """The most useful threads with which machines have room for so many workers."""
    for threads in range(MOST_THREADS, 1, -1):
        if sum(cores // threads for cores in machines) >= workers:
            return threads
    return 1


def _filling_threads(machines: Sequence[int]) -> int:
    """Threads with which workers leave the fewest cores idle: few large workers rather than many small."""
    fitting = _fitting_threads(machines, 1)
    choice = range(fitting, max(1, fitting - 2), -1)
    return max((_num_workers(machines, each) * each, each) for each in choice)[1] if choice else 1


def _num_workers(machines: Sequence[int], threads: int) -> int:
    return sum(min(MOST_CPU_WORKERS, cores // threads) for cores in machines)


_USUAL_BUDGET = 512 << 20
"""More hardly helps: what does not fit is read twice, the second time from the page cache."""
_CLUSTER_BUDGET = 1 << 30
"""Budget on a running cluster: what is free on this machine says nothing about its workers."""


def fit_budget(plan: Plan, options: RunOptions, *, beside: int = 0, is_far: bool = False) -> Projection:
    """The memory projection of a plan under the options' budget; ``beside`` is bytes that each lane takes to
    upload. Without a budget of the user's, a plan that needs more than usual gets it, if this machine has it.

    Raises OptionError, with the tensor and the least budget, if the plan needs more."""
    free, lanes = free_memory(), most_lanes(options)
    if beside:
        # A shard is uploaded by one lane.
        lanes = max(1, min(lanes, plan["shards"].num_rows))
    each, apart = (beside + FAR_LANE_BYTES, FAR_BYTES) if is_far else (beside, 0)
    budget = options.memory or usual_budget(options, free)
    how = {"beside": each, "upload": beside, "apart": apart}
    projection = _projected(plan, budget, lanes, **how)
    if options.memory is None:
        least = projection.least_budget + each + apart
        spared = _spared(options, free, least, workers=num_workers(options))
        if spared > budget:
            budget = spared
            projection = _projected(plan, budget, lanes, **how)
    shortage = projection.shortage(given=budget)
    if shortage is not None:
        raise OptionError(shortage)
    return projection


def _projected(plan: Plan, budget: int, lanes: int, *, beside: int, upload: int, apart: int) -> Projection:
    """The projection with as many lanes as the budget holds, each with its memory for servers."""
    if not beside:
        return project(plan, budget, lanes=lanes)
    while True:
        projection = project(plan, max(1, budget - apart - lanes * beside), lanes=lanes)
        projection = replace(projection, beside=beside, upload=upload, apart=apart)
        if lanes > 1 and projection.shortage() is not None:
            lanes -= 1
        elif projection.lanes < lanes:
            lanes = projection.lanes
        else:
            return projection


def fit_units(options: RunOptions, *, least: int, num_units: int, title: str, useful: int = 0) -> int:
    """Bytes of memory of a worker for units of which each needs ``least``. Without a budget of the user's,
    what a merge would get, or more, up to ``useful`` or ``least``, where this machine has it to spare.

    Raises OptionError, with the stage and the least budget, if it is less than ``least``."""
    budget = options.memory
    if budget is None:
        free = free_memory()
        budget = usual_budget(options, free)
        busy = max(1, min(num_workers(options), num_units))
        budget = max(budget, _spared(options, free, max(least, useful), workers=busy))
    if budget < least:
        raise OptionError(too_little_memory("--memory", budget, least, title))
    return budget


def _spared(options: RunOptions, free: int, useful: int, *, workers: int) -> int:
    """Bytes of this machine's memory for each of some workers; 0 for another machine."""
    return min(useful, free // 2 // workers) if options.address is None else 0


def check_free(options: RunOptions, *, evaluators: int = 0) -> None:
    """Raises OptionError: workers here, or so many evaluators, would have more memory than is free."""
    if options.memory is None or options.address is not None:
        return
    workers, free = evaluators or num_workers(options), free_memory()
    who = "evaluator" if evaluators else "worker"
    if options.memory * workers > free:
        count = f"{workers} {who}s" if workers > 1 else f"1 {who}"
        raise OptionError(
            Problem(
                "--memory",
                f"{count} with {format_size(options.memory)} each would use "
                f"{format_size(options.memory * workers)}, and {format_size(free)} are free here.",
                f"Give at most {format_size(free // workers)}, or fewer --{who}s.",
            )
        )


def usual_budget(options: RunOptions, free: int) -> int:
    """Half of the free memory, shared out, and no more than helps; in bytes."""
    if options.address is not None:
        return _CLUSTER_BUDGET
    return max(SMALLEST_BUDGET, min(_USUAL_BUDGET, free // 2 // num_workers(options)))


def num_workers(options: RunOptions) -> int:
    return max(layout.workers for layout in local_layouts(options))


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still use, by the machine and its control groups."""
    machine = int(psutil.virtual_memory().available)
    return max(0, min((machine, *available_memory(root))))


@dataclass(frozen=True, slots=True)
class _Group:
    directory: Path
    version: int

    def text(self, name: str) -> str:
        return _text(self.directory / name).strip()

    def number(self, name: str) -> int | None:
        text = self.text(name)
        return int(text) if text.isdecimal() else None


def available_memory(root: Path) -> Iterator[int]:
    """Bytes left in each group with a limit; unused file pages count as free."""
    for group in _groups("memory", root):
        if group.version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            names = ("memory.max", "memory.current", "inactive_file")
        most = group.number(names[0])
        if most is not None:
            stat = dict(line.split() for line in group.text("memory.stat").splitlines())
            yield most - (group.number(names[1]) or 0) + int(stat.get(names[2], 0))


def core_quotas(root: Path) -> Iterator[float]:
    """Cores that each group with a limit may keep busy, as a share of time; need not be whole."""
    for group in _groups("cpu", root):
        if group.version == 1:
            limits = [group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")]
        else:
            limits = group.text("cpu.max").split()
        if len(limits) == 2 and all(each.isdecimal() and int(each) for each in limits):
            yield int(limits[0]) / int(limits[1])


def available_processes(root: Path) -> Iterator[int]:
    """Processes and threads that each group with a limit may still start."""
    for group in _groups("pids", root):
        most = group.number("pids.max")
        if most is not None:
            yield most - (group.number("pids.current") or 0)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel ended for want of memory, of the group or machine; None if unknown."""
    kills = _groups_oom_kills(root)
    if kills is not None:
        return kills
    try:
        lines = (root / "proc/vmstat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    counts = dict(line.split(" ", 1) for line in lines)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _groups_oom_kills(root: Path) -> int | None:
    """``oom_kills`` of this process's own group; None where it is not counted."""
    for group in _groups("memory", root):
        text = group.text("memory.oom_control" if group.version == 1 else "memory.events")
        counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        if counts.get("oom_kill", "").isdecimal():
            return int(counts["oom_kill"])
    return None


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """This process's group and all above it that may limit a controller's resource."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, version = (mounted / controller, 1) if controllers else (mounted, 2)
        own = top / path.strip("/")
        # Within a container the path may be the host's; what is mounted then is the container's own group.
        for each in (own, *own.parents):
            if each.is_relative_to(top):
                yield _Group(each, version)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
