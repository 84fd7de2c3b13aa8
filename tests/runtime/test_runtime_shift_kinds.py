"""Workers of two kinds, workers that leave, and nodes that join while parts are made: with a Ray that does as
it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.fake_ray import ActorDiedError, ActorUnavailableError, Handle, receipt, said
from kits.shift_scene import PlainWork, Scene, make_all

from raymerge.errors import IncompleteError, OptionError
from raymerge.events import NodeOfNoUse, WorkerLeft, WorkerLost
from raymerge.merge_plan.files_read import SourceFile
from raymerge.runtime.workers.dispatcher import DispatchPolicy
from raymerge.runtime.workers.placement import Seen, Sight
from raymerge.runtime.workers.worker_group import Actor

# Carriers beside workers on GPUs


def _mixed(monkeypatch: pytest.MonkeyPatch, copies: set[int], *, parts: int = 6, **more: object) -> Scene:
    terms = DispatchPolicy(copies=frozenset(copies))
    return Scene(monkeypatch, range(parts), slots=1, carriers=1, terms=terms, **more)  # type: ignore[arg-type]


def _done(handle: Handle) -> None:
    handle.run.last.answer(receipt(handle.numbers[-1]))


def test_carriers_take_copies_and_gpus_all_else_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, {0, 1, 4})
    gpu, carrier = scene.handles
    assert (gpu.options["num_gpus"], carrier.options["num_gpus"]) == (1, 0)
    for _ in range(2):
        _done(gpu)
        scene.step()
    assert (gpu.numbers, carrier.numbers) == ([2, 3, 5], [0])
    _done(gpu)
    scene.step()
    # Now nothing else is left for it.
    assert gpu.numbers == [2, 3, 5, 1]
    _done(gpu)
    _done(carrier)
    scene.step()
    assert sorted(gpu.numbers + carrier.numbers) == [0, 1, 2, 3, 4, 5]


def test_carriers_wait_where_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, {0}, parts=3)
    gpu, carrier = scene.handles
    _done(carrier)
    scene.step()
    assert (gpu.numbers, carrier.numbers) == ([1], [0])
    make_all(scene, gpu)
    assert sorted(scene.done) == [0, 1, 2]


def test_without_carriers_parts_are_begun_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, {0, 1}, parts=4)
    gpu, carrier = scene.handles
    scene.team.give_up(scene.team.carriers[0])
    for _ in range(2):
        _done(gpu)
        scene.step()
    assert (gpu.numbers, carrier.numbers) == ([2, 1, 3], [0])


@pytest.mark.parametrize(("victim", "gpus"), [(0, 1), (1, 0)])
def test_a_lost_worker_is_replaced_by_one_of_its_kind(
    victim: int, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = _mixed(monkeypatch, {0, 1, 2})
    scene.handles[victim].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    fresh = scene.handles[2]
    assert fresh.options["num_gpus"] == gpus
    fresh.is_up()
    scene.step()
    (lost,) = scene.of(WorkerLost)
    assert fresh.numbers == list(lost.segments)


def test_a_lost_carrier_is_not_replaced_where_no_copy_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, {0}, parts=3)
    _, carrier = scene.handles
    _done(carrier)
    carrier.pulse.last.answer(ActorDiedError("it crashed"))
    scene.step()
    assert carrier.is_killed
    assert len(scene.handles) == 2


def test_carriers_that_do_not_start_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, {0, 1, 2})
    scene.handles[1].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    for _ in range(3):
        scene.handles[-1].open.last.answer(ActorDiedError("no memory"))
        scene.step()
    assert (
        scene.of(WorkerLost)[-1].reason == "no memory; 3 in a row did not start, so no other takes its place"
    )
    assert not scene.team.carriers
    make_all(scene, scene.handles[0])
    assert sorted(scene.done) == [0, 1, 2, 3, 4, 5]


def test_gpus_whose_workers_do_not_start_end_the_run_though_carriers_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _mixed(monkeypatch, {0, 1, 2})
    scene.handles[0].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    for _ in range(2):
        scene.handles[-1].open.last.answer(ActorDiedError("broken"))
        scene.step()
    scene.handles[-1].open.last.answer(ActorDiedError("broken"))
    with pytest.raises(IncompleteError, match="3 workers did not start, the last with: broken"):
        scene.step()


@pytest.mark.parametrize(("able", "where"), [(["a", "a", "b", "b", "a", "a"], "a"), (["a"] * 6, "a")])
def test_a_lost_worker_on_a_gpu_is_replaced_where_a_gpu_is(
    able: list[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only carriers can be where the copies are."""
    scene = _mixed(monkeypatch, {2, 3}, workers=2, nodes=("a",), able=[{each} for each in able])
    scene.ray.alive["b"] = True
    scene.ray.without_gpus = {"b"}
    scene.handles[0].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    fresh = scene.handles[-1]
    assert fresh.options["num_gpus"] == 1
    assert fresh.options["label_selector"] == {"ray.io/node-id": f"in({where})"}


def test_a_node_with_the_only_gpus_is_not_shunned(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, set(), nodes=("a", "b"))
    scene.ray.without_gpus = {"b"}
    gpu = scene.handles[0]
    for _ in range(4):
        gpu.run.last.answer(ActorUnavailableError("lost"))
        scene.step()
        gpu = scene.handles[-1]
        assert "label_selector" not in gpu.options
        gpu.is_up("a")
        scene.step()


def test_carriers_do_not_look_for_parts_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(6), slots=2, carriers=3, terms=DispatchPolicy(copies=frozenset({5})))
    gpu, *carriers = scene.handles
    assert [each.numbers for each in carriers] == [[5], [], []]
    _done(carriers[0])
    scene.step()
    asked: list[bool] = []
    following = scene.shift._next

    def noted(actor: Actor, *, has_carriers: bool) -> int | None:
        asked.append(actor.is_carrier)
        return following(actor, has_carriers=has_carriers)

    monkeypatch.setattr(scene.shift, "_next", noted)
    make_all(scene, gpu)
    assert asked
    assert not any(asked)


def test_numerics_are_compared_within_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = _mixed(monkeypatch, {0, 1, 2})
    gpu, carrier = scene.team.actors
    scene.team.numerics = {"device": "cuda", "torch": "2"}
    scene.team.hear(gpu, {**said(), "numerics": {"device": "cuda", "torch": "2"}})
    scene.team.hear(carrier, {**said(), "numerics": {"device": "cpu", "torch": "2"}})
    for actor, other in ((gpu, {"device": "cpu", "torch": "2"}), (carrier, {"device": "cpu", "torch": "3"})):
        with pytest.raises(OptionError, match="they differ in device or torch version"):
            scene.team.hear(actor, {**said(), "numerics": other})


def test_parts_that_need_a_gpu_are_not_said_to_lack_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carriers are up and have nothing to do, while nobody comes in place of the worker on a GPU."""
    scene = _mixed(monkeypatch, {0}, parts=2)
    _done(scene.handles[1])
    scene.handles[0].run.last.answer(ActorUnavailableError("lost"))
    scene.step()
    with pytest.raises(IncompleteError, match="no worker has been up for 120 s"):
        scene.wait(150.0)


# Workers that leave a cluster that shrinks


def test_a_worker_for_which_nothing_is_left_leaves_and_a_loss_brings_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(
        monkeypatch, range(2), workers=2, slots=1, terms=DispatchPolicy(leaves=True, growth_seconds=600.0)
    )
    busy, idle = scene.handles
    _done(idle)
    scene.step()
    for look in range(3):
        assert not idle.is_killed
        busy.pulse.last.answer(float(look))
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
    scene = Scene(monkeypatch, range(1), slots=1, terms=DispatchPolicy(leaves=True))
    scene.team.actors.append(scene.team.spawn())
    scene.handles[0].pulse.last.answer(1.0)
    scene.wait(15.0)
    assert [each.is_killed for each in scene.handles] == [False, True]


def test_workers_that_wait_for_room_are_kept_while_a_part_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    able: list[set[str]] = [{"node-a"}, {"node-a"}, {"node-a"}]
    scene = Scene(monkeypatch, range(3), slots=1, able=able, terms=DispatchPolicy(leaves=True))
    scene.team.actors.append(scene.team.spawn())
    for look in range(5):
        scene.handles[0].pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step()
    assert not scene.handles[1].is_killed


def test_carriers_leave_when_no_copy_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = DispatchPolicy(copies=frozenset({0}), leaves=True)
    scene = Scene(monkeypatch, range(3), slots=1, carriers=1, terms=terms)
    gpu, carrier = scene.handles
    _done(carrier)
    for look in range(4):
        gpu.pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step()
    assert [each.worker for each in scene.of(WorkerLeft)] == ["cpu-worker-1"]
    assert not gpu.is_killed


def test_workers_on_gpus_that_left_are_back_where_carriers_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terms = DispatchPolicy(copies=frozenset({0}), leaves=True, growth_seconds=600.0)
    scene = Scene(monkeypatch, range(2), slots=1, carriers=1, terms=terms)
    gpu, carrier = scene.handles
    _done(gpu)
    for look in range(4):
        carrier.pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step()
    assert [each.worker for each in scene.of(WorkerLeft)] == ["worker-0"]
    carrier.run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    for _ in range(3):
        assert scene.handles[-1].options["num_gpus"] == 0
        scene.handles[-1].open.last.answer(ActorDiedError("no memory"))
        scene.step()
    fresh = scene.handles[-1]
    assert fresh.options["num_gpus"] == 1
    fresh.is_up()
    make_all(scene, fresh)
    assert sorted(scene.done) == [0, 1]


def test_nobody_leaves_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, range(2), workers=2, slots=1)
    _done(scene.handles[1])
    for look in range(20):
        scene.handles[0].pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step()
    assert not scene.handles[1].is_killed


# Nodes that join


@pytest.mark.parametrize(("growth_seconds", "on"), [(600.0, None), (0.0, "in(a)")])
def test_in_place_of_a_node_that_is_gone_another_may_join(
    growth_seconds: float, on: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it saw nobody else sees; a cluster cannot add the same node again."""
    terms = DispatchPolicy(growth_seconds=growth_seconds)
    able: list[set[str]] = [{"b"}, {"a"}]
    scene = Scene(monkeypatch, range(2), workers=2, nodes=("a", "b"), able=able, slots=1, terms=terms)
    scene.ray.alive["b"] = False
    scene.handles[1].run.last.answer(ActorDiedError("the node died"))
    scene.step()
    selector = scene.handles[2].options.get("label_selector")
    assert selector == (None if on is None else {"ray.io/node-id": on})


def test_a_worker_on_a_gpu_is_wanted_where_only_a_carrier_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A carrier on a node does not do what is computed there."""
    able: list[set[str]] = [{"a"}, {"b"}, {"b"}]
    scene = _mixed(monkeypatch, {2}, parts=3, workers=2, nodes=("a", "b", "b"), able=able)
    assert [actor.node for actor in scene.team.actors] == ["a", "b", "b"]
    scene.handles[1].run.last.answer(ActorDiedError("it crashed"))
    scene.step()
    assert scene.handles[3].options["label_selector"] == {"ray.io/node-id": "in(b)"}


def test_a_worker_stays_whose_node_is_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = DispatchPolicy(surveyed=frozenset({"node-a"}), leaves=True)
    scene = _joined(monkeypatch, able=EVERYWHERE, terms=terms)
    for look in range(5):
        scene.handles[0].pulse.last.answer(float(look))
        scene.step(5.0)
        scene.step()
    assert not scene.handles[1].is_killed


FILES = tuple(SourceFile(0, "/models", f"{name}.safetensors", 8, "") for name in ("a", "b"))
"""Part 0 reads the first, part 1 the second, part 2 both."""
READ = (frozenset({0}), frozenset({1}), frozenset({0, 1}))


SURVEYED = DispatchPolicy(surveyed=frozenset({"node-a"}))


def _joined(
    monkeypatch: pytest.MonkeyPatch, *, able: list[set[str]], terms: DispatchPolicy = SURVEYED
) -> Scene:
    """A worker on a node that was surveyed, busy with part 0 or 1, and one that comes up on another node."""
    work = PlainWork(slots=1, files=FILES, read=READ)
    scene = Scene(monkeypatch, range(3), able=able, work=work, terms=terms)
    scene.team.actors.append(scene.team.spawn())
    late = scene.team.actors[-1]
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
    another = scene.team.spawn()
    another.opening = another.handle.open.remote(None)
    scene.team.actors.append(another)
    another.handle.is_up("node-b")
    scene.step()
    assert another.handle.numbers == [2]
    assert not scene.nodes.asked
