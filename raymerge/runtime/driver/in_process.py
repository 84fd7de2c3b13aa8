"""Whether a merge runs in this process though nobody asked for that: a small one takes less time than Ray
takes to start and to end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raymerge.errors import OptionError
from raymerge.merge_plan.plan import Plan, ints
from raymerge.options import RunOptions
from raymerge.planner.inputs.sources import reads_far
from raymerge.planner.merges import PlannedMerge
from raymerge.planner.simulation import Cluster, simulate_plan
from raymerge.runtime.driver.chained_merges import has_steps
from raymerge.runtime.workers.sizing import Layout, cores_here, fit_budget, layout_of, local_layouts
from raymerge.storage.addresses import is_remote

RAY_SECONDS = 2.0
"""What an embedded Ray adds to a merge on one worker, by ``tests/benchmarks/startup.py``."""
SMALL_SECONDS = 10.0
"""Of a longer merge Ray's start is a small part, and Ray replaces a worker that dies or hangs."""
_READ, _WRITE, _PER_CORE = 5e8, 3e8, 3e9
"""Bytes a second of a slow local disk, whose files are in no cache, and of a core's copies. On most machines
a merge takes less time than by these; where it takes more, such as on a network mount, Ray would help."""


def run_options(
    outputs: Sequence[Sequence[PlannedMerge]], place: Path | str, options: RunOptions
) -> RunOptions:
    """The options that a run will have towards these outputs at or below a place, each with its merges:
    ``inline`` where Ray would cost it more than it brings, and no option needs or asks for workers."""
    if not _is_left_open(options):
        return options
    here = replace(options, inline=True)
    return here if _is_small(outputs, place, options, here) else options


def _is_small(
    outputs: Sequence[Sequence[PlannedMerge]], place: Path | str, options: RunOptions, here: RunOptions
) -> bool:
    if is_remote(str(place)) or any(map(has_steps, outputs)):
        return False
    last = [merges[-1] for merges in outputs]
    # How fast servers answer nobody knows, and of several kinds of devices one is yet to be chosen.
    if any(merge.plan.problems or reads_far(merge.sources) for merge in last):
        return False
    if len(layouts := local_layouts(options)) > 1:
        return False
    if sum(_least_written(merge.plan) for merge in last) > SMALL_SECONDS * _WRITE:
        return False
    try:
        own = sum(_seconds(merge.plan, here, layout_of(here, (cores_here(),), 0)) for merge in last)
        on_ray = sum(_seconds(merge.plan, options, layouts[0]) for merge in last)
    except OptionError:
        # It says itself what it lacks.
        return False
    return own <= min(on_ray + RAY_SECONDS, SMALL_SECONDS)


def _least_written(plan: Plan) -> int:
    """Bytes that are written at least: told at once, where a large merge is simulated for some time."""
    copy_of, made_with, nbytes = (ints(plan["ops"], name) for name in ("copy_of", "made_with", "nbytes"))
    return int(nbytes[(copy_of < 0) & (made_with < 0)].sum())


def _is_left_open(options: RunOptions) -> bool:
    is_usual = options.inline is None and options.workers is None and options.patience is None
    return is_usual and options.device != "cuda" and not (options.address or options.run or _has_ray())


def _has_ray() -> bool:
    """Whether this process is connected to Ray already, which costs nothing more."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _seconds(plan: Plan, options: RunOptions, layout: Layout) -> float:
    cluster = Cluster(
        workers=layout.workers,
        threads=layout.threads,
        cores=layout.threads,
        read=_READ,
        write=_WRITE,
        per_core=_PER_CORE,
        startup=0.0,
    )
    return simulate_plan(plan, cluster, fit_budget(plan, options).budget).seconds
