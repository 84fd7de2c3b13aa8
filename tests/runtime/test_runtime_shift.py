"""What becomes of parts and workers when calls fail, in every order, with a Ray that does as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits import fake_ray
from kits.fake_ray import ActorDiedError, ActorUnavailableError, FakeRay, Handle, RayTaskError, receipt

from raymerge.errors import IncompleteError, TransientError
from raymerge.runtime import shift as shift_module
from raymerge.runtime.events import Event, MemoryShort, WorkerLost
from raymerge.runtime.options import RunOptions
from raymerge.runtime.placement import Placement, SourceFile
from raymerge.runtime.pool import TICK_SECONDS, Runner, Stop
from raymerge.runtime.ray_nodes import Nodes
from raymerge.runtime.shift import Shift
from raymerge.runtime.team import Team

PATIENCE = 60.0


@dataclass(frozen=True)
class _Work:
    """Parts that need 100 bytes and usually have 800."""

    slots: int = 2
    part: str = "segment"
    files: tuple[SourceFile, ...] = ()
    place: Path = Path("place")

    def reads(self) -> tuple[frozenset[int], ...]:
        return ()

    def lessened(self, number: int, budget: int | None) -> int | None:
        had = 800 if budget is None else budget
        return had // 2 if had > 100 else None

    def open(self, device: torch.device, name: str) -> Runner:
        raise AssertionError("no worker of these tests opens it")


class _FakeNodes(Nodes):
    """Nodes whose kernels have counted what a test says."""

    def __init__(self, ray: FakeRay) -> None:
        super().__init__(ray, is_here=True)
        self.counted = 0

    def oom_kills(self, node: str) -> int | None:
        return self.counted


class _Scene:
    """A shift of workers that are up, spread over the nodes in turn, and what a test does around it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        numbers: Sequence[int],
        *,
        workers: int = 1,
        nodes: Sequence[str] = ("node-a",),
        able: Sequence[set[str]] = (),
        slots: int = 2,
    ) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append)
        monkeypatch.setattr(shift_module, "time", clock)
        self.ray = FakeRay(nodes)
        self.nodes = _FakeNodes(self.ray)
        connection: Any = SimpleNamespace(ray=self.ray)
        self.team = Team(connection, object, RunOptions(), ready_seconds=120.0)
        self.team.actors = [self.team.spawn() for _ in range(workers)]
        self.events: list[Event] = []
        self.done: list[int] = []
        self.stop = Stop()
        self.shift = Shift(
            self.team,
            self.nodes,
            _Work(slots=slots),
            numbers,
            placement=Placement(tuple(frozenset(each) for each in able)),
            patience=PATIENCE,
            on_event=self.events.append,
        )
        self.shift.begin()
        for number, handle in enumerate(self.ray.handles):
            handle.is_up(nodes[number % len(nodes)])
        # They take up the work and are given parts; then they are asked how these get on.
        self.step()
        self.step()

    @property
    def handles(self) -> list[Handle]:
        """Every worker that there ever was."""
        return self.ray.handles

    def step(self, seconds: float = 0.0) -> None:
        """Let time go by, and the driver look around once."""
        self.now += seconds
        for batch in self.shift.advance(self.stop):
            self.done += [each.segment for each in batch]

    def fail(self, error: Exception, times: int) -> None:
        """Have the part that was handed out last fail so often; who replaces a lost worker comes up."""
        for _ in range(times):
            before = self.handles[-1]
            before.run.last.answer(error)
            self.step()
            if self.handles[-1] is not before:
                self.handles[-1].is_up()
                self.step()

    def wait(self, seconds: float) -> None:
        """Let time go by in steps of five seconds."""
        for _ in range(round(seconds / 5)):
            self.step(5.0)

    def of(self, kind: type[Any]) -> list[Any]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def _make_all(scene: _Scene, handle: Handle) -> None:
    """Have a worker make all that it is given."""
    for _ in range(100):
        for ref in handle.run.calls:
            if not ref.answers:
                ref.answer(receipt(ref.arguments[0]))
        if not scene.shift.goes_on(scene.stop):
            return
        scene.step()
    raise AssertionError("it does not end")


# Workers that do not get on


def test_a_worker_whose_parts_do_not_get_on_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0, 1])
    (hung,) = scene.handles
    hung.pulse.last.answer(0.25)
    scene.wait(PATIENCE)
    (lost,) = scene.of(WorkerLost)
    assert lost.segments == (0, 1)
    assert lost.reason == "nothing that it had in hand got on for 1:00"
    assert hung.is_killed
    scene.handles[1].is_up()
    _make_all(scene, scene.handles[1])
    assert sorted(scene.done) == [0, 1]


def test_a_worker_that_is_slow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: between two looks one of its threads has taken some processor time."""
    scene = _Scene(monkeypatch, [0])
    (slow,) = scene.handles
    for look in range(100):
        slow.pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step(5.0)
    assert not scene.of(WorkerLost)
    assert len(slow.pulse.calls) > 50


def test_a_driver_that_was_paused_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0])
    scene.step(10_000.0)
    assert not scene.of(WorkerLost)


def test_a_worker_with_nothing_in_hand_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0], workers=2)
    for look in range(40):
        scene.handles[0].pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step(5.0)
    assert not scene.of(WorkerLost)


# Workers that are lost, or seem to be


def test_a_worker_that_cannot_be_reached_is_killed_and_its_late_answers_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _Scene(monkeypatch, [0, 1])
    (zombie,) = scene.handles
    first, second = zombie.run.calls
    first.answer(ActorUnavailableError("may or may not have executed"))
    # It did, and so did the other one: both answers come too late.
    second.answer(receipt(1))
    scene.step()
    assert zombie.is_killed
    assert scene.done == []
    (lost,) = scene.of(WorkerLost)
    assert set(lost.segments) == {0, 1}
    scene.handles[1].is_up()
    _make_all(scene, scene.handles[1])
    assert sorted(scene.done) == [0, 1]


def test_parts_of_workers_that_cannot_be_reached_are_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the network do not make a part one that takes down workers; in the end they are too many."""
    scene = _Scene(monkeypatch, [7])
    with pytest.raises(IncompleteError, match=r"12 workers were lost, and nothing was made between"):
        scene.fail(ActorUnavailableError("lost"), times=20)
    assert len(scene.of(WorkerLost)) == 12


def test_losses_between_which_something_is_made_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, range(60), slots=1)
    while len(scene.done) < 30:
        handle = scene.handles[-1]
        handle.run.last.answer(receipt(handle.numbers[-1]))
        scene.step()
        handle.run.last.answer(ActorUnavailableError("lost"))
        scene.step()
        scene.handles[-1].is_up()
        scene.step()
    assert len(scene.of(WorkerLost)) == 30


def test_a_part_that_takes_down_three_workers_is_named_and_ran_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _Scene(monkeypatch, range(4))
    with pytest.raises(IncompleteError, match=r"segment \d took down 3 workers, the last with: it crashed"):
        scene.fail(ActorDiedError("it crashed"), times=3)
    first, *others = scene.of(WorkerLost)
    assert len(first.segments) == 2
    assert [len(each.segments) for each in others] == [1, 1]


def test_parts_of_a_node_that_is_gone_are_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"node-{n}" for n in range(6)]
    scene = _Scene(monkeypatch, [7], nodes=names)
    for name, then in pairwise(names):
        scene.ray.alive[name] = False
        scene.handles[-1].run.last.answer(ActorDiedError("the node died"))
        scene.step()
        scene.handles[-1].is_up(then)
        scene.step()
    _make_all(scene, scene.handles[-1])
    assert scene.done == [7]
    assert all(each.reason.startswith("its node is gone") for each in scene.of(WorkerLost))


def test_no_more_workers_are_started_on_a_node_where_they_die(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0], nodes=("good", "bad"), slots=1)
    selectors = []
    for _ in range(3):
        scene.handles[-1].run.last.answer(ActorUnavailableError("lost"))
        scene.step()
        selectors.append(scene.handles[-1].options.get("label_selector"))
        scene.handles[-1].is_up("bad")
        scene.step()
    # The first was on the good one.
    assert selectors == [None, None, None]
    scene.handles[-1].run.last.answer(ActorUnavailableError("lost"))
    scene.step()
    assert scene.handles[-1].options["label_selector"] == {"ray.io/node-id": "!in(bad)"}


def test_a_node_on_which_parts_are_made_is_not_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, range(20), nodes=("node-a", "node-b"), slots=1)
    for _ in range(5):
        scene.handles[-1].run.last.answer(receipt(scene.handles[-1].numbers[-1]))
        scene.step()
        scene.fail(ActorUnavailableError("lost"), times=1)
    assert not any("label_selector" in handle.options for handle in scene.handles)


def test_the_only_node_is_never_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0], slots=1)
    scene.fail(ActorUnavailableError("lost"), times=5)
    assert not any("label_selector" in handle.options for handle in scene.handles)


# Memory, and storage that fails for a moment


@pytest.mark.parametrize(
    "error",
    [
        RayTaskError(MemoryError("no room")),
        RayTaskError(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")),
        fake_ray.OutOfMemoryError("the node is short of memory"),
    ],
)
def test_a_part_that_runs_out_of_memory_is_made_alone_with_less(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    scene = _Scene(monkeypatch, [5])
    for budget in (400, 200):
        scene.handles[-1].run.last.answer(error)
        scene.step()
        if not isinstance(error, RayTaskError):
            scene.handles[-1].is_up()
            scene.step()
        assert scene.handles[-1].run.last.arguments == (5, budget)
    assert [each.budget for each in scene.of(MemoryShort)] == [400, 200]
    assert len(scene.of(WorkerLost)) == (0 if isinstance(error, RayTaskError) else 2)
    _make_all(scene, scene.handles[-1])
    assert scene.done == [5]


def test_a_part_that_has_no_less_memory_to_run_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [5])
    with pytest.raises(IncompleteError, match=r"segment 5 ran out of memory, alone .* of 100 B .*fewer --w"):
        scene.fail(RayTaskError(MemoryError("no room")), times=5)


def test_a_worker_that_the_system_ended_for_want_of_memory_is_told_from_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _Scene(monkeypatch, [5])
    scene.nodes.counted = 1
    scene.handles[0].run.last.answer(ActorDiedError("SIGKILL"))
    scene.step()
    (lost,), (short,) = scene.of(WorkerLost), scene.of(MemoryShort)
    assert lost.reason == "the system ended it, because memory ran out"
    assert short.budget == 400
    # The next one starts after that, and its crash is a crash.
    scene.handles[1].is_up(oom_kills=1)
    scene.step()
    scene.handles[1].run.last.answer(ActorDiedError("SIGKILL"))
    scene.step()
    assert scene.of(WorkerLost)[1].reason == "SIGKILL"
    assert len(scene.of(MemoryShort)) == 1


def test_a_part_that_has_no_less_is_tried_alone_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others had in hand beside it may have been too much."""
    monkeypatch.setattr(_Work, "lessened", lambda *_: None)
    scene = _Scene(monkeypatch, range(2))
    first, second = scene.handles[0].run.calls
    first.answer(RayTaskError(MemoryError("no room")))
    scene.step()
    assert scene.handles[0].numbers == [0, 1]
    second.answer(receipt(1))
    scene.step()
    assert scene.handles[0].run.last.arguments == (0,)
    with pytest.raises(IncompleteError, match="segment 0 ran out of memory, alone on a worker"):
        scene.fail(RayTaskError(MemoryError("no room")), times=1)


def test_what_the_kernel_ended_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [5, 6], workers=2, slots=1)
    scene.nodes.counted = 1
    for handle in scene.handles[:2]:
        handle.run.last.answer(ActorDiedError("SIGKILL"))
        scene.step()
    reasons = [lost.reason for lost in scene.of(WorkerLost)]
    assert reasons == ["the system ended it, because memory ran out", "SIGKILL"]


def test_a_part_with_less_memory_has_a_worker_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, range(4))
    first, second = scene.handles[0].run.calls
    first.answer(RayTaskError(MemoryError("no room")))
    scene.step()
    # The other one goes on, and nothing joins it.
    assert scene.handles[0].numbers == [0, 1]
    second.answer(receipt(1))
    scene.step()
    assert scene.handles[0].run.last.arguments == (0, 400)
    scene.step()
    assert scene.handles[0].numbers == [0, 1, 0]
    _make_all(scene, scene.handles[0])
    assert sorted(scene.done) == [0, 1, 2, 3]


def test_a_part_that_met_failing_storage_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0, 1, 2], slots=1)
    scene.handles[0].run.last.answer(RayTaskError(TransientError("the server was away")))
    scene.step()
    assert scene.handles[0].numbers == [0, 1]
    _make_all(scene, scene.handles[0])
    assert scene.done == [1, 2, 0]


def test_storage_that_goes_on_failing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(monkeypatch, [0])
    with pytest.raises(TransientError, match="the server is away"):
        scene.fail(RayTaskError(TransientError("the server is away")), times=4)
    assert scene.handles[0].numbers == [0, 0, 0]


# Placement


def test_parts_go_where_their_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"node-a", "node-b"}
    scene = _Scene(
        monkeypatch,
        range(4),
        workers=2,
        nodes=("node-a", "node-b"),
        able=[both, {"node-b"}, {"node-a"}, both],
        slots=1,
    )
    # What only one node can do comes first, so that none of them waits for the other in the end.
    assert [handle.numbers for handle in scene.handles] == [[2], [1]]


def test_a_lost_worker_is_replaced_where_nobody_else_can_do_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _Scene(
        monkeypatch,
        range(4),
        workers=2,
        nodes=("node-a", "node-b"),
        able=[{"node-b"}, {"node-b"}, {"node-a"}, {"node-a"}],
        slots=1,
    )
    scene.handles[1].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    assert scene.handles[2].options["label_selector"] == {"ray.io/node-id": "in(node-b)"}


def test_parts_that_nobody_can_do_any_more_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _Scene(
        monkeypatch,
        range(2),
        workers=2,
        nodes=("node-a", "node-b"),
        able=[{"node-b"}, {"node-a"}],
        slots=1,
    )
    scene.handles[0].run.last.answer(receipt(1))
    scene.ray.alive["node-b"] = False
    scene.handles[1].run.last.answer(ActorDiedError("the node died"))
    scene.step()
    # There is room for another worker only where the files are not.
    scene.handles[2].is_up("node-a")
    scene.handles[0].pulse.last.answer(0.25)
    with pytest.raises(
        IncompleteError, match=r"no worker for 120 s was on a node that sees the files .* 1 s"
    ):
        scene.wait(150.0)
    assert scene.done == [1]
    # Whoever waits for a node does not take a processor meanwhile.
    assert len(scene.slept) >= 20
    assert set(scene.slept) == {TICK_SECONDS}
