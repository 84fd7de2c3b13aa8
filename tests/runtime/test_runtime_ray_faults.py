"""Faults of workers on a real Ray: those that hang, and those that run out of memory."""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kits.control_group import memory_group
from kits.merge_cases import Family, digests, merge, recipes

from raymerge.api import submit
from raymerge.events import Event, MemoryShort, WorkerLost
from raymerge.options import RunOptions
from raymerge.runtime.workers import ray_pool
from raymerge.runtime.workers.ray_pool import RayPool
from raymerge.runtime.workers.worker import MergeWorker

pytestmark = pytest.mark.ray

VICTIM = 7
"""A segment that is made while others are."""


@pytest.fixture(scope="module")
def undisturbed(medium: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    merge(recipes(medium)["dare_ties"], output)
    return digests(output)


def _submit(
    family: Family,
    output: Path,
    worker: type[Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    patience: float = 600.0,
    workers: int = 2,
) -> list[Event]:
    monkeypatch.setattr(ray_pool, "RayPool", functools.partial(RayPool, worker=worker))
    events: list[Event] = []
    options = RunOptions(workers=workers, memory=64 << 20, patience=patience)
    submit(recipes(family)["dare_ties"], output, options, on_event=events.append)
    return events


def _of(kind: type[Any], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _hungry(content: int) -> type[Any]:
    """Asks for memory that the system does not give it, for one segment with more than so many bytes.

    Defined in here, so that Ray sends the class itself to workers that cannot import this file.
    """

    class Hungry(MergeWorker):
        def run(self, segment: int, budget: int | None = None) -> dict[str, Any]:
            if segment == VICTIM and (budget is None or budget > content):
                before = resource.getrlimit(resource.RLIMIT_AS)
                most = psutil.Process().memory_info().vms + (64 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
                try:
                    torch.empty(256 << 20, dtype=torch.uint8)
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, before)
            return super().run(segment, budget)

    return Hungry


@pytest.mark.slow
def test_a_segment_that_runs_out_of_memory_is_made_with_less_and_has_the_same_bytes(
    medium: Family,
    tmp_path: Path,
    ray_cluster: Any,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = _submit(medium, tmp_path / "out", _hungry(5 << 20), monkeypatch)
    shorts = _of(MemoryShort, events)
    assert {short.segment for short in shorts} == {VICTIM}
    budgets = [short.budget for short in shorts]
    assert len(budgets) >= 2
    assert all(after == max(after, before // 2) for before, after in pairwise(budgets))
    assert "can't allocate memory" in shorts[0].reason
    assert not _of(WorkerLost, events)
    assert digests(tmp_path / "out") == undisturbed


_HUNGRY = """
import functools, json, sys

from raymerge.api import submit
from raymerge.runtime.workers import ray_pool
from raymerge.options import RunOptions
from raymerge.runtime.workers.worker import MergeWorker

job = json.load(sys.stdin)
VICTIM = job["victim"]


class Hungry(MergeWorker):
    def run(self, segment, budget=None):
        taken = []
        while budget is None and segment == VICTIM:
            taken.append(bytearray(b"x") * (32 << 20))
        return super().run(segment, budget)


ray_pool.RayPool = functools.partial(ray_pool.RayPool, worker=Hungry)
options = RunOptions(workers=1, memory=64 << 20)
submit(job["recipe"], job["output"], options, on_event=lambda event: print(json.dumps(event.to_json())))
"""


@pytest.mark.slow
def test_a_worker_that_the_kernel_ends_for_want_of_memory_is_told_from_one_that_crashes(
    medium: Family, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """In a group with a limit, as a container is."""
    job = {"recipe": recipes(medium)["dare_ties"], "output": str(tmp_path / "out"), "victim": VICTIM}
    with memory_group(2 << 30) as join:
        if join is None:
            pytest.skip("this user can make no control group")
        done = subprocess.run(
            ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(join), sys.executable, "-c", _HUNGRY],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (lost,) = (event for event in events if event["event"] == "worker_lost")
    assert lost["reason"] == "the system ended it, because memory ran out"
    shorts = [event["segment"] for event in events if event["event"] == "memory_short"]
    assert VICTIM in shorts
    assert sorted(shorts) == sorted(lost["segments"])
    assert digests(tmp_path / "out") == undisturbed
