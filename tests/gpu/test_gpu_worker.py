"""A worker of Ray with the simulated GPU: on a cluster that has one, and in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kits.merge_cases import make_family, merge
from kits.simulated_gpu import without_gpu

pytestmark = [pytest.mark.ray, without_gpu]

TESTS = Path(__file__).resolve().parents[1]
DRIVER = """
import functools, json, sys
import ray
from kits.merge_cases import make_family, merge, recipes, Family
from raymerge.events import Started, SegmentDone
from raymerge.options import RunOptions
from raymerge.runtime.workers import ray_pool
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.worker import MergeWorker

def on_simulated_gpu():
    # In here, so that Ray sends the class itself.
    class OnSimulatedGpu(MergeWorker):
        def __init__(self, *args):
            from kits.simulated_gpu import simulated_gpu

            self._simulation = simulated_gpu(seed=1)
            self._gpu = self._simulation.__enter__()
            super().__init__(*args)

    return OnSimulatedGpu

ray_pool.RayPool = functools.partial(RayPool, worker=on_simulated_gpu())
ray.init = functools.partial(ray.init, num_gpus=1)
recipe, outs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for device, out in outs.items():
    made = merge(recipe, out, RunOptions(device=device, memory=64 << 20))
    (started,) = made.of(Started)
    peak = max(each.receipt.peak_device for each in made.of(SegmentDone))
    print(json.dumps([started.device, started.device_reason, started.workers, peak]))
"""
