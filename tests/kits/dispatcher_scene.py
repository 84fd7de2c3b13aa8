"""A shift of workers that are up, and a Ray that does as it is told: what becomes of parts and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.fake_ray import FakeRay, Handle, Ref, receipt

from raymerge.events import Event
from raymerge.merge_plan.files_read import SourceFile
from raymerge.options import RunOptions
from raymerge.runtime.workers import dispatcher as dispatcher_module
from raymerge.runtime.workers.dispatcher import DEFAULT_POLICY, Dispatcher, DispatchPolicy
from raymerge.runtime.workers.placement import Placement, Sight
from raymerge.runtime.workers.pool import Runner, Stop
from raymerge.runtime.workers.ray_nodes import Nodes
from raymerge.runtime.workers.sizing import Layout
from raymerge.runtime.workers.worker_group import WorkerGroup

PATIENCE = 60.0


@dataclass(frozen=True)
class PlainWork:
    slots: int = 2
    part: str = "segment"
    files: tuple[SourceFile, ...] = ()
    place: Path = Path("place")
    read: tuple[frozenset[int], ...] = ()

    def reads(self) -> tuple[frozenset[int], ...]:
        return self.read

    def lessened(self, number: int, budget: int | None) -> int | None:
        had = 800 if budget is None else budget
        return had // 2 if had > 100 else None

    def open(self, device: torch.device, name: str) -> Runner:
        raise AssertionError("no worker of these tests opens it")


class FakeNodes(Nodes):
    def __init__(self, ray: FakeRay) -> None:
        super().__init__(ray, is_here=True)
        self.counted = 0
        self.asked: dict[str, Ref] = {}

    def begin_sight(self, node: str, files: Sequence[SourceFile], place: Path | None) -> Ref:
        self.asked[node] = Ref((files, place))
        return self.asked[node]

    def sight(self, node: str, answer: Ref, files: Sequence[SourceFile]) -> Sight:
        found: Sight = self._ray.get(answer)
        return found

    def oom_kills(self, node: str) -> int | None:
        return self.counted


class Scene:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        numbers: Sequence[int],
        *,
        workers: int = 1,
        nodes: Sequence[str] = ("node-a",),
        able: Sequence[set[str]] = (),
        slots: int = 2,
        with_gpu: bool = False,
        policy: DispatchPolicy = DEFAULT_POLICY,
        work: PlainWork | None = None,
    ) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append)
        monkeypatch.setattr(dispatcher_module, "time", clock)
        self.ray = FakeRay(nodes)
        self.nodes = FakeNodes(self.ray)
        connection: Any = SimpleNamespace(ray=self.ray)
        self.group = WorkerGroup(connection, object, RunOptions(), ready_seconds=120.0)
        self.group.equip(Layout(workers, 1), with_gpu=with_gpu)
        self.group.actors = [self.group.spawn() for _ in range(workers)]
        self.events: list[Event] = []
        self.done: list[int] = []
        self.stop = Stop()
        self.dispatcher = Dispatcher(
            self.group,
            self.nodes,
            work or PlainWork(slots=slots),
            numbers,
            placement=Placement(tuple(frozenset(each) for each in able)),
            patience=PATIENCE,
            on_event=self.events.append,
            policy=policy,
        )
        self.dispatcher.begin()
        for number, handle in enumerate(self.ray.handles):
            handle.is_up(nodes[number % len(nodes)])
        # They take up the work and are given parts; then they are asked how these get on.
        self.step()
        self.step()

    @property
    def handles(self) -> list[Handle]:
        return self.ray.handles

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for batch in self.dispatcher.advance(self.stop):
            self.done += [each.segment for each in batch]

    def fail(self, error: Exception, times: int) -> None:
        for _ in range(times):
            before = self.handles[-1]
            before.run.last.answer(error)
            self.step()
            if self.handles[-1] is not before:
                self.handles[-1].is_up()
                self.step()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            self.step(5.0)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def make_all(scene: Scene, handle: Handle) -> None:
    for _ in range(100):
        for ref in handle.run.calls:
            if not ref.answers:
                ref.answer(receipt(ref.arguments[0]))
        if not scene.dispatcher.goes_on(scene.stop):
            return
        scene.step()
    raise AssertionError("it does not end")
