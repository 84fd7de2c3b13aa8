"""A driver whose workers of Ray have the simulated GPU each: ``python -m kits.gpu_worker JOBS``.

``JOBS`` are JSON: a list of recipes, devices and outputs. Prints, for each, what the run was started with."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import ray
from kits.merge_cases import merge

from raymerge.events import Started
from raymerge.options import RunOptions
from raymerge.runtime.workers import ray_pool
from raymerge.runtime.workers.ray_environment import RayConnection
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.worker import MergeWorker


class GpuWorker(MergeWorker):
    """A worker in whose process torch has the simulated GPU, with a seed of the worker's own."""

    def __init__(self, name: str, device: Any) -> None:
        from kits.simulated_gpu import simulated_gpu

        self._simulation = simulated_gpu(seed=sum(name.encode()))
        self._simulation.__enter__()
        super().__init__(name, device)


def main() -> None:
    ray.init = functools.partial(ray.init, num_gpus=1)
    ray_pool.RayPool = functools.partial(RayPool, worker=GpuWorker)  # type: ignore[misc]
    connection = RayConnection(None, num_cpus=2)
    connection.open()
    for recipe, device, output in json.loads(sys.argv[1]):
        (started,) = merge(recipe, output, RunOptions(device=device, workers=1, memory=64 << 20)).of(Started)
        print(json.dumps([started.device, started.device_reason]))
    connection.close()


if __name__ == "__main__":
    main()
