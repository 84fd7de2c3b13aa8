"""Workers that leave, and nodes that join while parts are made: with a Ray that does as it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.dispatcher_scene import PlainWork, Scene, make_all
from kits.fake_ray import ActorDiedError, ActorUnavailableError, Handle, receipt

from raymerge.events import NodeOfNoUse, WorkerLeft, WorkerLost
from raymerge.merge_plan.files_read import SourceFile
from raymerge.runtime.workers.dispatcher import DispatchPolicy
from raymerge.runtime.workers.placement import Seen, Sight


def _done(handle: Handle) -> None:
    handle.run.last.answer(receipt(handle.numbers[-1]))


# Nodes without GPUs


def test_a_lost_worker_on_a_gpu_is_replaced_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    able: list[set[str]] = [{each} for each in ("a", "a", "b", "b", "a", "a")]
    scene = Scene(monkeypatch, range(6), slots=1, with_gpu=True, workers=2, nodes=("a",), able=able)
    scene.ray.alive["b"] = True
    scene.ray.without_gpus = {"b"}
    scene.handles[0].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    fresh = scene.handles[-1]
    assert fresh.options["num_gpus"] == 1
    assert fresh.options["label_selector"] == {"ray.io/node-id": "in(a)"}


def test_a_node_with_the_only_gpus_is_not_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(6), slots=1, with_gpu=True, nodes=("a", "b"))
    scene.ray.without_gpus = {"b"}
    gpu = scene.handles[0]
    for _ in range(4):
        gpu.run.last.answer(ActorUnavailableError("lost"))
        scene.step()
        gpu = scene.handles[-1]
        assert "label_selector" not in gpu.options
        gpu.is_up("a")
        scene.step()


# Workers that leave a cluster that shrinks


def test_a_worker_for_which_nothing_is_left_leaves_and_a_loss_brings_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(
        monkeypatch, range(2), workers=2, slots=1, policy=DispatchPolicy(leaves=True, growth_seconds=600.0)
    )
    busy, idle = scene.handles
    _done(idle)
    scene.step()
    for look in range(3):
        assert not idle.is_killed
        busy.heartbeat.last.answer((float(look), ()))
        scene.step(5.0)
        scene.step()
    assert idle.is_killed
    assert [each.worker for each in scene.of(WorkerLeft)] == ["worker-1"]
    assert not scene.of(WorkerLost)
    busy.run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    # The cluster has shrunk by now, and takes its time.
    scene.wait(300.0)
    scene.handles[2].is_up()
    make_all(scene, scene.handles[2])
    assert sorted(scene.done) == [0, 1]


def test_workers_that_wait_for_room_are_not_waited_for_when_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, range(1), slots=1, policy=DispatchPolicy(leaves=True))
    scene.group.actors.append(scene.group.spawn())
    scene.handles[0].heartbeat.last.answer((1.0, ()))
    scene.wait(15.0)
    assert [each.is_killed for each in scene.handles] == [False, True]


def test_workers_that_wait_for_room_are_kept_while_a_part_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    able: list[set[str]] = [{"node-a"}, {"node-a"}, {"node-a"}]
    scene = Scene(monkeypatch, range(3), slots=1, able=able, policy=DispatchPolicy(leaves=True))
    scene.group.actors.append(scene.group.spawn())
    for look in range(5):
        scene.handles[0].heartbeat.last.answer((float(look), ()))
        scene.step(5.0)
        scene.step()
    assert not scene.handles[1].is_killed


def test_nobody_leaves_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(2), workers=2, slots=1)
    _done(scene.handles[1])
    for look in range(20):
        scene.handles[0].heartbeat.last.answer((float(look), ()))
        scene.step(5.0)
        scene.step()
    assert not scene.handles[1].is_killed


# Nodes that join


@pytest.mark.parametrize(("growth_seconds", "on"), [(600.0, None), (0.0, "in(a)")])
def test_in_place_of_a_node_that_is_gone_another_may_join(
    growth_seconds: float, on: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it saw nobody else sees; a cluster cannot add the same node again."""
    policy = DispatchPolicy(growth_seconds=growth_seconds)
    able: list[set[str]] = [{"b"}, {"a"}]
    scene = Scene(monkeypatch, range(2), workers=2, nodes=("a", "b"), able=able, slots=1, policy=policy)
    scene.ray.alive["b"] = False
    scene.handles[1].run.last.answer(ActorDiedError("the node died"))
    scene.step()
    selector = scene.handles[2].options.get("label_selector")
    assert selector == (None if on is None else {"ray.io/node-id": on})


def test_a_worker_stays_whose_node_is_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = DispatchPolicy(surveyed=frozenset({"node-a"}), leaves=True)
    scene = _joined(monkeypatch, able=EVERYWHERE, policy=policy)
    for look in range(5):
        scene.handles[0].heartbeat.last.answer((float(look), ()))
        scene.step(5.0)
        scene.step()
    assert not scene.handles[1].is_killed


FILES = tuple(SourceFile(0, "/models", f"{name}.safetensors", 8, "") for name in ("a", "b"))
"""Part 0 reads the first, part 1 the second, part 2 both."""
READ = (frozenset({0}), frozenset({1}), frozenset({0, 1}))


SURVEYED = DispatchPolicy(surveyed=frozenset({"node-a"}))


def _joined(
    monkeypatch: pytest.MonkeyPatch, *, able: list[set[str]], policy: DispatchPolicy = SURVEYED
) -> Scene:
    """A worker on a node that was surveyed, busy with part 0 or 1, and one that comes up on another node."""
    work = PlainWork(slots=1, files=FILES, read=READ)
    scene = Scene(monkeypatch, range(3), able=able, work=work, policy=policy)
    scene.group.actors.append(scene.group.spawn())
    late = scene.group.actors[-1]
    late.opening = late.handle.open.remote(work)
    late.handle.is_up("node-b")
    scene.step()
    scene.step()
    return scene


EVERYWHERE: list[set[str]] = []
ON_THE_FIRST: list[set[str]] = [{"node-a"}, {"node-a"}, {"node-a"}]


@pytest.mark.parametrize("able", [EVERYWHERE, ON_THE_FIRST])
def test_a_node_that_joins_is_asked_before_it_gets_parts(
    able: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = _joined(monkeypatch, able=able)
    late = scene.handles[1]
    assert late.numbers == []
    assert scene.nodes.asked["node-b"].arguments == (FILES, Path("place"))
    scene.nodes.asked["node-b"].answer(Sight("10.0.0.2", (Seen.ABSENT, Seen.SAME)))
    scene.step()
    scene.step()
    assert late.numbers == [1]
    _done(late)
    scene.step()
    assert (late.numbers, scene.handles[0].numbers) == ([1], [0])
    make_all(scene, scene.handles[0])
    assert sorted(scene.done) == [0, 1, 2]
    assert not scene.of(NodeOfNoUse)


@pytest.mark.parametrize(
    ("sight", "lack"),
    [
        (
            Sight("10.0.0.2", (Seen.SAME, Seen.SAME), "is not to be found"),
            "the output place is not to be found",
        ),
        (Sight("10.0.0.2", (Seen.ANOTHER, Seen.ABSENT)), "it sees no source that a part needs"),
    ],
)
def test_a_node_that_joins_and_sees_too_little_gets_nothing(
    sight: Sight, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = _joined(monkeypatch, able=EVERYWHERE)
    scene.nodes.asked["node-b"].answer(sight)
    scene.step()
    make_all(scene, scene.handles[0])
    assert sorted(scene.done) == [0, 1, 2]
    assert scene.handles[1].numbers == []
    assert scene.of(NodeOfNoUse) == [NodeOfNoUse("10.0.0.2", lack)]


def test_a_node_that_joins_and_sees_all_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _joined(monkeypatch, able=EVERYWHERE)
    scene.nodes.asked.pop("node-b").answer(Sight("10.0.0.2", (Seen.SAME, Seen.SAME)))
    scene.step()
    assert scene.handles[1].numbers == [1]
    another = scene.group.spawn()
    another.opening = another.handle.open.remote(None)
    scene.group.actors.append(another)
    another.handle.is_up("node-b")
    scene.step()
    assert another.handle.numbers == [2]
    assert not scene.nodes.asked
