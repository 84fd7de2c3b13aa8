"""What becomes of parts and workers when calls fail, in every order, with a Ray that does as it is told."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kits import fake_ray
from kits.dispatcher_scene import PATIENCE, PlainWork, Scene, make_all
from kits.fake_ray import ActorDiedError, ActorUnavailableError, RayTaskError, receipt

from raymerge.cli.messages import failure_of
from raymerge.errors import IncompleteError, Problem, TargetError, TransientError
from raymerge.events import MemoryShort, PartInHand, WorkerLost, WorkerProgress
from raymerge.runtime.workers.pool import ATTEMPTS, TICK_SECONDS

# What workers are given


def test_every_worker_gets_all_that_it_takes_and_none_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, range(9), workers=2, slots=6)
    assert [each.numbers for each in scene.handles] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


# Workers that do not get on


def test_a_worker_whose_parts_do_not_get_on_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0, 1])
    (hung,) = scene.handles
    hung.heartbeat.last.answer((0.25, ()))
    scene.wait(PATIENCE)
    (lost,) = scene.of(WorkerLost)
    assert lost.segments == (0, 1)
    assert lost.reason == "nothing that it had in hand got on for 1:00"
    assert hung.is_killed
    scene.handles[1].is_up()
    make_all(scene, scene.handles[1])
    assert sorted(scene.done) == [0, 1]


def test_a_worker_that_answers_without_getting_on_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive, but a read of it waits in vain; what it says of its parts is no progress."""
    scene = Scene(monkeypatch, [0])
    (hung,) = scene.handles
    for look in range(int(PATIENCE)):
        hung.heartbeat.last.answer((0.25, (PartInHand(0, "reading", "a.weight", look, 100),)))
        scene.step(1.0)
        scene.step(1.0)
    (lost,) = scene.of(WorkerLost)
    assert lost.segments == (0,)


def test_a_worker_that_is_slow_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0])
    (slow,) = scene.handles
    for look in range(100):
        slow.heartbeat.last.answer((float(look), ()))
        scene.step(5.0)
        scene.step(5.0)
    assert not scene.of(WorkerLost)
    assert len(slow.heartbeat.calls) > 50


def test_what_a_worker_does_is_told_with_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0])
    (worker,) = scene.handles
    asked, parts = len(worker.heartbeat.calls), (PartInHand(0, "writing", "a.weight", 7, 9),)
    worker.heartbeat.last.answer((1.0, parts))
    scene.step(1.0)
    (told,) = scene.of(WorkerProgress)
    assert told.parts == parts
    # A few workers are asked every second.
    scene.step(1.0)
    assert len(worker.heartbeat.calls) > asked


def test_a_driver_that_was_paused_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0])
    scene.step(10_000.0)
    assert not scene.of(WorkerLost)


# Workers that are lost, or seem to be


def test_a_worker_that_cannot_be_reached_is_killed_and_its_late_answers_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, [0, 1])
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
    make_all(scene, scene.handles[1])
    assert sorted(scene.done) == [0, 1]


def test_parts_of_workers_that_cannot_be_reached_are_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the network do not make a part one that takes down workers; in the end they are too many."""
    scene = Scene(monkeypatch, [7])
    with pytest.raises(IncompleteError, match=r"12 workers were lost, and nothing was made between"):
        scene.fail(ActorUnavailableError("lost"), times=20)
    assert len(scene.of(WorkerLost)) == 12


def test_losses_between_which_something_is_made_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(60), slots=1)
    while len(scene.done) < 30:
        handle = scene.handles[-1]
        handle.run.last.answer(receipt(handle.numbers[-1]))
        scene.step()
        handle.run.last.answer(ActorUnavailableError("lost"))
        scene.step()
        scene.handles[-1].is_up()
        scene.step()
    assert len(scene.of(WorkerLost)) == 30


def test_a_part_that_takes_down_three_workers_is_named_and_ran_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(4))
    with pytest.raises(IncompleteError, match=r"segment \d took down 3 workers, the last with: it crashed"):
        scene.fail(ActorDiedError("it crashed"), times=3)
    first, *others = scene.of(WorkerLost)
    assert len(first.segments) == 2
    assert [len(each.segments) for each in others] == [1, 1]


def test_parts_of_a_node_that_is_gone_are_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"node-{n}" for n in range(6)]
    scene = Scene(monkeypatch, [7], nodes=names)
    for name, then in pairwise(names):
        scene.ray.alive[name] = False
        scene.handles[-1].run.last.answer(ActorDiedError("the node died"))
        scene.step()
        scene.handles[-1].is_up(then)
        scene.step()
    make_all(scene, scene.handles[-1])
    assert scene.done == [7]
    assert all(each.reason.startswith("its node is gone") for each in scene.of(WorkerLost))


def test_no_more_workers_are_started_on_a_node_where_they_die(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0], nodes=("good", "bad"), slots=1)
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
    scene = Scene(monkeypatch, range(20), nodes=("node-a", "node-b"), slots=1)
    for _ in range(5):
        scene.handles[-1].run.last.answer(receipt(scene.handles[-1].numbers[-1]))
        scene.step()
        scene.fail(ActorUnavailableError("lost"), times=1)
    assert not any("label_selector" in handle.options for handle in scene.handles)


def test_the_only_node_is_never_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0], slots=1)
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
    scene = Scene(monkeypatch, [5])
    for budget in (400, 200):
        scene.handles[-1].run.last.answer(error)
        scene.step()
        if not isinstance(error, RayTaskError):
            scene.handles[-1].is_up()
            scene.step()
        assert scene.handles[-1].run.last.arguments == (5, budget)
    assert [each.budget for each in scene.of(MemoryShort)] == [400, 200]
    assert len(scene.of(WorkerLost)) == (0 if isinstance(error, RayTaskError) else 2)
    make_all(scene, scene.handles[-1])
    assert scene.done == [5]


def test_a_part_that_has_no_less_memory_to_run_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [5])
    with pytest.raises(IncompleteError, match=r"segment 5 ran out of memory, alone .* of 100 B .*fewer --w"):
        scene.fail(RayTaskError(MemoryError("no room")), times=5)


def test_a_worker_that_the_system_ended_for_want_of_memory_is_told_from_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, [5])
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
    monkeypatch.setattr(PlainWork, "lessened", lambda *_: None)
    scene = Scene(monkeypatch, range(2))
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
    scene = Scene(monkeypatch, [5, 6], workers=2, slots=1)
    scene.nodes.counted = 1
    for handle in scene.handles[:2]:
        handle.run.last.answer(ActorDiedError("SIGKILL"))
        scene.step()
    reasons = [lost.reason for lost in scene.of(WorkerLost)]
    assert reasons == ["the system ended it, because memory ran out", "SIGKILL"]


def test_a_part_with_less_memory_has_a_worker_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(4))
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
    make_all(scene, scene.handles[0])
    assert sorted(scene.done) == [0, 1, 2, 3]


def test_a_part_that_met_failing_storage_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0, 1, 2], slots=1)
    scene.handles[0].run.last.answer(RayTaskError(TransientError("the server was away")))
    scene.step()
    assert scene.handles[0].numbers == [0, 1]
    make_all(scene, scene.handles[0])
    assert scene.done == [1, 2, 0]


def test_storage_that_goes_on_failing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, [0])
    with pytest.raises(TransientError, match="the server is away"):
        scene.fail(RayTaskError(TransientError("the server is away")), times=4)
    assert scene.handles[0].numbers == [0, 0, 0]


def test_what_a_worker_is_refused_is_not_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its credentials may have expired; what its error came of stays on its machine."""
    scene = Scene(monkeypatch, [0])
    with pytest.raises(TargetError) as caught:
        scene.fail(RayTaskError(TargetError(Problem("s3://a/b", "the store refuses it.", ""))), times=1)
    assert not failure_of(caught.value).is_final


# Placement


def test_parts_go_where_their_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"node-a", "node-b"}
    scene = Scene(
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
    scene = Scene(
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
    scene = Scene(
        monkeypatch, range(2), workers=2, nodes=("node-a", "node-b"), able=[{"node-b"}, {"node-a"}], slots=1
    )
    scene.handles[0].run.last.answer(receipt(1))
    scene.ray.alive["node-b"] = False
    scene.handles[1].run.last.answer(ActorDiedError("the node died"))
    scene.step()
    # There is room for another worker only where the files are not.
    scene.handles[2].is_up("node-a")
    scene.handles[0].heartbeat.last.answer((0.25, ()))
    with pytest.raises(
        IncompleteError, match=r"no worker for 120 s was on a node that sees the files .* 1 s"
    ):
        scene.wait(150.0)
    assert scene.done == [1]
    # Whoever waits for a node does not take a processor meanwhile.
    assert len(scene.slept) >= 20
    assert set(scene.slept) == {TICK_SECONDS}


def test_without_any_node_the_run_ends_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(2), slots=1)
    scene.handles[0].run.last.answer(receipt(0))
    scene.step()
    scene.ray.alive["node-a"] = False
    scene.handles[0].run.last.answer(ActorDiedError("the node died"))
    with pytest.raises(IncompleteError, match=r"no worker has been up for 120 s"):
        scene.wait(150.0)
    assert scene.done == [0]


# Workers that do not start


def _lose(scene: Scene, failing: int) -> None:
    """Have the worker make a part and die in the next, and then so many others not start."""
    made = scene.handles[-1].run.last
    made.answer(receipt(made.arguments[0]))
    scene.step()
    scene.handles[-1].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    for _ in range(failing):
        scene.handles[-1].open.last.answer(ActorDiedError("it crashed"))
        scene.step()


def test_failed_starts_count_in_a_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(8), slots=1)
    for _ in range(3):
        _lose(scene, ATTEMPTS - 1)
        scene.handles[-1].is_up()
        scene.step()
    make_all(scene, scene.handles[-1])
    assert sorted(scene.done) == list(range(8))
    assert sum(not lost.segments for lost in scene.of(WorkerLost)) == 3 * (ATTEMPTS - 1)


def test_as_many_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(8), slots=1)
    with pytest.raises(IncompleteError, match=f"{ATTEMPTS} workers did not start"):
        _lose(scene, ATTEMPTS)
