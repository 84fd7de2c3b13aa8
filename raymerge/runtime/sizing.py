"""How many workers a run has, and how many threads of each compute at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raymerge.runtime.options import RunOptions

MOST_THREADS = 4
"""Compute threads of a worker unless more are asked for: with more they wait for the interpreter's lock."""
MOST_CPU_WORKERS = 8
"""CPU workers that are started on one machine unless more are asked for: beyond that storage is its limit."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the cores of machines are shared out."""

    workers: int
    """Workers."""
    threads: int
    """Threads of each worker that compute at once."""

    @property
    def cores(self) -> int:
        """Cores that are busy at most."""
        return self.workers * self.threads


def layout_of(options: RunOptions, machines: Sequence[int], gpus: int) -> Layout:
    """Workers and threads of a run.

    On processors a worker has up to four threads. They share one import of torch and one memory limit, so
    that few workers start sooner and get more out of the same memory than many; but each kernel call holds
    the interpreter's lock for a moment, which is why large machines have several workers. A GPU is used by
    one worker, and one thread keeps it busy: its kernels are only begun there.

    Args:
        options: what the user asks for.
        machines: CPU cores of each machine.
        gpus: GPUs that are used, on all machines together; 0 to compute on processors.
    """
    if gpus:
        workers = 1 if options.inline else options.workers or gpus
        return Layout(workers, options.threads or 1)
    threads = options.threads or _fitting_threads(machines, 1 if options.inline else options.workers)
    if options.inline or options.workers is not None:
        return Layout(options.workers or 1, threads)
    return Layout(max(1, sum(min(MOST_CPU_WORKERS, cores // threads) for cores in machines)), threads)


def local_layouts(options: RunOptions) -> tuple[Layout, ...]:
    """The layouts that a run on this machine may have; two where the device is still to be chosen."""
    # Here and not above: an embedded Ray is sized, and starts, while torch is imported.
    import torch

    machines, gpus = (cores_here(),), torch.cuda.device_count() if options.device != "cpu" else 0
    kinds = (gpus, 0) if gpus and options.device == "auto" else (gpus,)
    return tuple(layout_of(options, machines, each) for each in kinds)


def embedded_slots(options: RunOptions) -> int:
    """CPU slots of an embedded cluster: the cores here, and more where more workers are asked for."""
    return max((options.workers or 1) * (options.threads or 1), cores_here())


def most_lanes(options: RunOptions) -> int:
    """Segments that a worker may have in hand at once; memory is shared out among so many.

    One more than its compute threads, so that none waits for storage. A cluster is taken for one of machines
    with many cores.
    """
    if options.address is not None:
        return (options.threads or MOST_THREADS) + 1
    return max(layout.threads for layout in local_layouts(options)) + 1


def cores_here(root: Path = Path("/")) -> int:
    """CPU cores that this process may keep busy, by its affinity and the quota of its control group.

    Args:
        root: where the system's ``sys`` is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        # There is no such file, or it says "max".
        return cores


def _fitting_threads(machines: Sequence[int], workers: int | None) -> int:
    """The most threads, of those that pay, with which machines have room for so many workers."""
    for threads in range(MOST_THREADS, 1, -1):
        if sum(cores // threads for cores in machines) >= (workers or 1):
            return threads
    return 1
