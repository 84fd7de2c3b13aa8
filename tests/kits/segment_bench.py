"""A plan's segments run by hand, in one process and against stores that a test may wrap."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raymerge.api import plan_for
from raymerge.execute import compute
from raymerge.execute.output import UNFINISHED
from raymerge.execute.reading import TileJob, read_plans
from raymerge.execute.segment import PlanOutput, SegmentRunner
from raymerge.execute.transfers import HostTransfers
from raymerge.merge_plan.jobs import OpJob
from raymerge.merge_plan.memory import Lane, Projection, project
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.sources import holdings
from raymerge.storage.local.buffers import aligned_buffer
from raymerge.storage.local.store import LocalStore


@dataclass(frozen=True, slots=True)
class Bench:
    plan: Plan
    projection: Projection
    staging: LocalStore
    runner: SegmentRunner

    @property
    def segments(self) -> range:
        return range(len(self.plan["segments"]))

    def written(self) -> Iterator[tuple[str, bytes]]:
        shards = self.plan["shards"].column("name").to_pylist()
        for row in self.plan["tensors"].to_pylist():
            key = shards[row["shard"]] + UNFINISHED
            yield row["name"], self.staging.read(key, row["offset"], row["nbytes"])


def make_bench(recipe: Mapping[str, Any], root: Path, **settings: Any) -> Bench:
    merge = plan_for(recipe, root / "planned")[-1]
    roots = [each.root for each in holdings(merge.sources)]
    return plan_bench(merge.plan.require(), roots, root, **settings)


def plan_bench(
    made: Plan,
    roots: Sequence[str],
    root: Path,
    *,
    budget: int = 16 << 20,
    wrap: Callable[[LocalStore], Any] = lambda store: store,
    device: str = "cpu",
    lanes: int = 1,
) -> Bench:
    """The plan over sources at ``roots``, its shards begun in ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    staging = LocalStore(root)
    for shard in made["shards"].to_pylist():
        staging.create(shard["name"] + UNFINISHED, shard["nbytes"])
        staging.write_at(shard["name"] + UNFINISHED, 0, shard["header"])
    projection = project(made, budget, lanes=lanes)
    runner = SegmentRunner(
        [PlanOutput(made, wrap(staging), range(len(roots)))],
        [LocalStore(Path(each)) for each in roots],
        device=torch.device(device),
        projection=projection,
        threads=max(1, lanes - 1),
        name="bench",
    )
    return Bench(made, projection, staging, runner)


def tiles_of(ops: Sequence[OpJob], budget: int) -> list[TileJob]:
    cut = read_plans(ops, Lane(budget), torch.device("cpu"))
    return [tile for each in cut for load in (*each.padding, *each.loads) for tile in load.tiles]


class Buffers:
    def __init__(self) -> None:
        self.most = 0
        self.made = 0
        self.live = 0

    def make(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        memory = np.frombuffer(aligned_buffer(nbytes), dtype=np.uint8)
        self.made += 1
        self.live += memory.nbytes
        self.most = max(self.most, self.live)
        weakref.finalize(memory, self._gone, memory.nbytes)
        return memory

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


@contextmanager
def counted_buffers(*, with_pieces: bool = False) -> Iterator[Buffers]:
    buffers = Buffers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfers, "buffer", lambda _, nbytes: torch.from_numpy(buffers.make(nbytes)))
        if with_pieces:
            patch.setattr(compute, "aligned_buffer", lambda nbytes: buffers.make(nbytes).data)
        yield buffers
