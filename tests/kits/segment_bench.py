"""A plan's segments run by hand, in one process and against stores that a test may wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raymerge.api import plan, read_recipe
from raymerge.execute.segment import UNFINISHED, SegmentRunner
from raymerge.planner.memory import Projection, project
from raymerge.planner.sources import open_sources
from raymerge.planner.tables import Plan
from raymerge.storage.local import LocalStore


@dataclass(frozen=True, slots=True)
class Bench:
    """A plan and everything that makes its segments."""

    plan: Plan
    projection: Projection
    staging: LocalStore
    runner: SegmentRunner

    @property
    def segments(self) -> range:
        """Numbers of the plan's segments."""
        return range(len(self.plan["segments"]))

    def written(self) -> Iterator[tuple[str, bytes]]:
        """Name and bytes of every tensor that the plan lists, as they are in the shards now."""
        shards = self.plan["shards"].column("name").to_pylist()
        for row in self.plan["tensors"].to_pylist():
            key = shards[row["shard"]] + UNFINISHED
            yield row["name"], self.staging.read(key, row["offset"], row["nbytes"])


def make_bench(
    recipe: Mapping[str, Any],
    root: Path,
    *,
    budget: int = 16 << 20,
    wrap: Callable[[LocalStore], Any] = lambda store: store,
) -> Bench:
    """A bench whose staging directory is ``root``, with the shards' headers written.

    Args:
        recipe: what to merge.
        root: where shards grow; made if absent.
        budget: bytes that the worker may use.
        wrap: what the runner writes through, made of the store of ``root``.
    """
    root.mkdir(parents=True, exist_ok=True)
    staging = LocalStore(root)
    made = plan(recipe).require()
    for shard in made["shards"].to_pylist():
        staging.create(shard["name"] + UNFINISHED, shard["nbytes"])
        staging.write_at(shard["name"] + UNFINISHED, 0, shard["header"])
    sources = [LocalStore(Path(each.checkpoint.root)) for each in open_sources(read_recipe(recipe))]
    projection = project(made, budget)
    runner = SegmentRunner(
        made, sources, wrap(staging), device=torch.device("cpu"), projection=projection, name="bench"
    )
    return Bench(made, projection, staging, runner)


class PromptExecutor:
    """Stands in for a thread pool: runs a call at once, and holds on to it until its result is taken.

    A measurement of one thread then sees all that the pipeline keeps alive at the worst moment.
    """

    def __init__(self, workers: int) -> None:
        del workers

    def __enter__(self) -> PromptExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """The finished call."""
        return _Held(call, args)


class _Held(Future[Any]):
    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._args = args
        self.set_result(call(*args))

    def result(self, timeout: float | None = None) -> Any:
        self._args = ()
        return super().result(timeout)
