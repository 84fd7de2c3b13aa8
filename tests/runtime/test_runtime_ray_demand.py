"""Whether a cluster that grows can ever have room: what its autoscaler tells, and what is made of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kits.fake_ray import RayError
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply, NodeStatus

from raymerge.errors import OptionError
from raymerge.runtime.workers import worker_group
from raymerge.runtime.workers.ray_nodes import Demand
from raymerge.runtime.workers.worker_group import ready_answers

LACK = "a worker needs CPUs: 4, GPUs: 1; the largest node has CPUs: 2, GPUs: 0"
WANTED = {"CPU": 4.0, "GPU": 1.0}


HEAD = {"CPU": 2.0, "node:__internal_head__": 1.0}
SMALL = {"CPU": 2.0}
LARGE = {"CPU": 8.0, "GPU": 1.0}


def _told(
    *infeasible: dict[str, float],
    nodes: tuple[tuple[int, dict[str, float]], ...] = (),
    adds: bool = False,
    asks: bool = False,
) -> bytes:
    """A cluster's status as its head answers it: beside an idle head, nodes in these states."""
    reply = GetClusterStatusReply()
    for status, has in ((NodeStatus.IDLE, HEAD), *nodes):
        node = reply.cluster_resource_state.node_states.add(status=status)
        node.total_resources.update(has)
    for bundle in infeasible:
        reply.autoscaling_state.infeasible_resource_requests.add().resources_bundle.update(bundle)
    if adds:
        reply.autoscaling_state.pending_instances.add(ray_node_type_name="gpu")
    if asks:
        reply.autoscaling_state.pending_instance_requests.add(ray_node_type_name="gpu", count=1)
    return bytes(reply.SerializeToString())


def _demand(*tellings: bytes | Exception) -> Demand:
    """Of a worker with four CPUs and a GPU, on a cluster that tells this, one after the other."""
    left = iter(tellings)

    class Client:
        def __init__(self, address: str) -> None:
            assert address == "head:6379"

        def get_cluster_status(self, *, timeout_s: int) -> bytes:
            told = next(left)
            if isinstance(told, Exception):
                raise told
            return told

    context = SimpleNamespace(gcs_address="head:6379")
    ray: Any = SimpleNamespace(
        _raylet=SimpleNamespace(GcsClient=Client),
        get_runtime_context=lambda: context,
        exceptions=SimpleNamespace(RayError=RayError),
    )
    return Demand(ray, cpus=4, gpus=1, lack=LACK)


def test_what_the_autoscaler_can_never_give_is_refused_with_what_there_is() -> None:
    # Whatever is there: too small, and used by others, or gone.
    nodes = ((NodeStatus.RUNNING, SMALL), (NodeStatus.DEAD, LARGE))
    demand = _demand(_told({"CPU": 1.0}, WANTED, nodes=nodes), _told(WANTED, nodes=nodes))
    demand.check()
    with pytest.raises(OptionError) as caught:
        demand.check()
    assert str(caught.value) == (
        f"workers: {LACK}, and its autoscaler can add none that has room for a worker. Give fewer --threads, "
        "another --device, or a group of nodes to the cluster."
    )


@pytest.mark.parametrize(
    "tellings",
    [
        (_told(), _told(), _told()),
        # Of others, or no longer so: nodes were being replaced.
        (_told({"CPU": 4.0}), _told({"CPU": 8.0, "GPU": 1.0}), _told({"CPU": 1.0})),
        (_told(WANTED), _told(), _told(WANTED)),
        # Others have the node that has room, or will have it; or one goes, and makes room for another.
        (_told(WANTED, nodes=((NodeStatus.RUNNING, LARGE),)),) * 3,
        (_told(WANTED, adds=True),) * 3,
        (_told(WANTED, asks=True),) * 3,
        (_told(WANTED, nodes=((NodeStatus.IDLE, SMALL),)),) * 3,
        (_told(WANTED, nodes=((NodeStatus.DRAINING, SMALL),)),) * 3,
        (_told(WANTED), _told(WANTED, adds=True), _told(WANTED)),
        # Nobody tells.
        (RayError("unavailable"), RuntimeError("no such call"), b""),
    ],
)
def test_otherwise_it_is_waited_for(tellings: tuple[bytes | Exception, ...]) -> None:
    demand = _demand(*tellings)
    for _ in tellings:
        demand.check()


def test_whoever_waits_for_workers_looks_around_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()

    def wait(refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert (refs, num_returns) == (["ready"], 1)
        now[0] += timeout
        return (refs, []) if now[0] >= 20 else ([], refs)

    monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ray = SimpleNamespace(wait=wait, get=lambda ref, **_: {"is": ref})
    found = ready_answers(ray, ["ready"], seconds=1800.0, look=lambda: looks.append(now[0]))
    assert found == [{"is": "ready"}]
    assert looks == [5.0, 10.0, 15.0]
