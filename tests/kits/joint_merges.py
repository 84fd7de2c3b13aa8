"""Several plans carried out together by hand, and what each of them gives by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raymerge.api import plan_for
from raymerge.execute.receipts import UNFINISHED, JointReceipt
from raymerge.merge_plan.memory import project
from raymerge.merge_plan.tables import Plan
from raymerge.planner.inputs.sources import holdings
from raymerge.publish.shards import JointWork, SegmentWork
from raymerge.runtime.driver.versions import source_files
from raymerge.storage.local.store import LocalStore


def planned(recipe: Mapping[str, Any], root: Path, budget: int, lanes: int = 1) -> SegmentWork:
    """The work of one recipe, with its shards begun below ``root``."""
    merge = plan_for(recipe, root / "planned")[-1]
    made, held = merge.plan.require(), holdings(merge.sources)
    root.mkdir(parents=True)
    with closing(LocalStore(root)) as store:
        for shard in made["shards"].to_pylist():
            store.create(shard["name"] + UNFINISHED, shard["nbytes"])
    roots, projection = tuple(each.root for each in held), project(made, budget, lanes=lanes)
    return SegmentWork(made, roots, root, projection, 1, source_files(held))


def made_apart(work: SegmentWork) -> dict[str, bytes]:
    """What a plan gives by itself, by tensor."""
    with closing(work.open(torch.device("cpu"), "apart")) as runner:
        for segment in range(len(work.plan["segments"])):
            runner.run(segment)
    return written(work.plan, work.staging)


def joint_work(works: Sequence[SegmentWork]) -> JointWork:
    segments = range(len(works[0].plan["segments"]))
    neediest = max((each.projection for each in works), key=lambda each: each.least_budget)
    todo = dict.fromkeys(segments, tuple(range(len(works))))
    return JointWork(tuple(works), todo, neediest.together(len(works)))


def made_together(work: JointWork, device: str = "cpu") -> list[JointReceipt]:
    with closing(work.open(torch.device(device), "together")) as runner:
        receipts = [runner.run(segment) for segment in sorted(work.todo)]
    assert all(isinstance(each, JointReceipt) for each in receipts)
    return [each for each in receipts if isinstance(each, JointReceipt)]


def written(plan: Plan, root: Path) -> dict[str, bytes]:
    shards = plan["shards"].column("name").to_pylist()
    with closing(LocalStore(root)) as store:
        return {
            row["name"]: store.read(shards[row["shard"]] + UNFINISHED, row["offset"], row["nbytes"])
            for row in plan["tensors"].to_pylist()
        }


def elsewhere(work: SegmentWork, root: Path) -> SegmentWork:
    """The same work, into another directory."""
    root.mkdir(parents=True)
    with closing(LocalStore(root)) as store:
        for shard in work.plan["shards"].to_pylist():
            store.create(shard["name"] + UNFINISHED, shard["nbytes"])
    return replace(work, staging=root)
