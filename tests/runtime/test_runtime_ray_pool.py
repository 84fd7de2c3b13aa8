"""What a pool keeps of its workers, and when it tells that it waits for one: with a Ray that obeys a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kits.fake_ray import ActorDiedError, FakeRay, receipt

from raymerge.events import Event, RoomAwaited
from raymerge.merge_plan.files_read import SourceFile
from raymerge.options import RunOptions
from raymerge.runtime.workers import ray_pool, sizing
from raymerge.runtime.workers.pool import Runner, Stop
from raymerge.runtime.workers.ray_pool import RayPool


@dataclass(frozen=True)
class _Work:
    """Parts that say nothing of themselves."""

    slots: int = 1
    part: str = "segment"
    files: tuple[SourceFile, ...] = ()
    place: Path = Path("place")

    def reads(self) -> tuple[frozenset[int], ...]:
        return ()

    def lessened(self, number: int, budget: int | None) -> int | None:
        return None

    def open(self, device: torch.device, name: str) -> Runner:
        raise AssertionError("no worker of these tests opens it")


def _pool(
    monkeypatch: pytest.MonkeyPatch, options: RunOptions, nodes: Sequence[str] = ("node-a",)
) -> tuple[RayPool, FakeRay, list[Event]]:
    ray, events = FakeRay(nodes), list[Event]()
    connection = SimpleNamespace(ray=ray, open=lambda: None, close=lambda: None)
    monkeypatch.setattr(ray_pool, "RayConnection", lambda *_, **__: connection)
    return RayPool(options, events.append, parts=1), ray, events


def test_no_more_slots_are_asked_for_than_there_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    connection = SimpleNamespace(ray=FakeRay(("node-a",)))
    monkeypatch.setattr(
        ray_pool, "RayConnection", lambda *_, num_cpus, **__: asked.append(num_cpus) or connection
    )
    monkeypatch.setattr(sizing, "cores_here", lambda: 2)
    RayPool(RunOptions(workers=50, threads=1, device="cpu"), lambda _: None, parts=3)
    assert asked == [3]


def _lost_behind_its_last_receipt(pool: RayPool, ray: FakeRay) -> None:
    """One piece of work of one part, whose worker dies when all is made, and is replaced."""
    made = pool.run(_Work(), [0], Stop())
    (first,) = ray.handles
    assert next(made) == ()
    first.is_up()
    # It is given the part, and then asked how it gets on.
    assert [next(made), next(made)] == [(), ()]
    first.run.last.answer(receipt(0))
    first.heartbeat.last.answer(ActorDiedError())
    assert [[each.segment for each in batch] for batch in made] == [[0]]


def test_who_takes_the_place_of_a_worker_that_died_last_is_there_for_the_next_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, ray, _ = _pool(monkeypatch, RunOptions(workers=1, threads=1))
    pool.group.actors = [pool.group.spawn()]
    _lost_behind_its_last_receipt(pool, ray)
    first, second = ray.handles
    assert (first.is_killed, second.is_killed) == (True, False)
    second.is_up()
    made = pool.run(_Work(), [0], Stop())
    assert next(made) == ()
    second.is_up()
    assert next(made) == ()
    second.run.last.answer(receipt(0))
    assert [[each.segment for each in batch] for batch in made] == [[0]]
    assert len(ray.handles) == 2


def test_a_cluster_that_grows_is_not_kept_growing_once_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, ray, _ = _pool(monkeypatch, RunOptions(workers=1, threads=1, growing=True))
    pool.group.actors = [pool.group.spawn()]
    _lost_behind_its_last_receipt(pool, ray)
    assert [each.is_killed for each in ray.handles] == [True, True]


@pytest.mark.parametrize(
    ("threads", "lack"),
    [(2, None), (4, "a worker needs CPUs: 4, GPUs: 0; the largest node has CPUs: 2, GPUs: 2")],
)
def test_it_is_told_that_a_cluster_has_to_grow_first(
    threads: int, lack: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(workers=3, threads=threads, device="cpu", address="far:6379", growing=True)
    pool, _, events = _pool(monkeypatch, options)
    waits: list[float | None] = []
    monkeypatch.setattr(
        pool.group, "take_on", lambda _, *, seconds=None, look=None: waits.append(look and seconds)
    )
    pool.start()
    told = [each for each in events if isinstance(each, RoomAwaited)]
    assert [(each.lack, each.seconds) for each in told] == ([] if lack is None else [(lack, waits[0])])
