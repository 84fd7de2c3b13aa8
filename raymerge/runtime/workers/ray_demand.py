"""Whether a cluster that grows can ever have room for a worker, as far as its autoscaler tells."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from raymerge.errors import OptionError, Problem

_TELLINGS = 2
"""Looks in a row at which it must be so: between two of them the autoscaler has looked again."""
_NAMES = ("CPU", "GPU")
"""What Ray calls what a worker needs."""
_HEAD = "node:__internal_head__"
"""What Ray says that the node has which never goes."""
_REPLY_SECONDS = 5
"""The most that the cluster may take to tell."""


class Demand:
    """Workers of one kind that wait for room, and whether there can be any."""

    def __init__(self, ray: Any, *, cpus: int, gpus: int, lack: str) -> None:
        """
        Args:
            ray: the ray module, connected.
            cpus: CPU slots of a worker.
            gpus: GPUs of it.
            lack: what it needs and what the cluster has, for the message.
        """
        self._ray = ray
        self._wanted = {name: float(count) for name, count in zip(_NAMES, (cpus, gpus), strict=True) if count}
        self._lack = lack
        self._seen = 0

    def check(self) -> None:
        """See that the autoscaler has not said that no node that it may add has room for such a worker.

        Raises:
            OptionError: it has, twice in a row, and no node that is there or comes may help.
        """
        self._seen = self._seen + 1 if self._is_hopeless() else 0
        if self._seen >= _TELLINGS:
            what = f"{self._lack}, and its autoscaler can add none that has room for a worker."
            remedy = "Give fewer --threads, another --device, or a group of nodes to the cluster."
            raise OptionError(Problem("workers", what, remedy))

    def _is_hopeless(self) -> bool:
        """Whether there can be no room, as far as is told now.

        The autoscaler tells as well of what has no room only because others use all nodes that there may be,
        and of what waits for nodes that it is adding.
        """
        reply = self._reply()
        if reply is None:
            return False
        told, cluster = reply.autoscaling_state, reply.cluster_resource_state
        infeasible = [_needed(each.resources_bundle) for each in told.infeasible_resource_requests]
        are_coming = bool(told.pending_instances or told.pending_instance_requests)
        return (
            self._wanted in infeasible
            and not are_coming
            and not any(self._may_help(node) for node in cluster.node_states)
        )

    def _may_help(self, node: Any) -> bool:
        """Whether a node has room once others leave it, or goes soon, so that another may be added."""
        # Numbers by name: a later version of Ray may have states that this one does not know.
        states = node.DESCRIPTOR.fields_by_name["status"].enum_type.values_by_name
        if node.status == states["DEAD"].number:
            return False
        has = _needed(node.total_resources)
        is_leaving = (
            node.status in (states["IDLE"].number, states["DRAINING"].number)
            and _HEAD not in node.total_resources
        )
        return is_leaving or all(has.get(name, 0.0) >= count for name, count in self._wanted.items())

    def _reply(self) -> Any:
        """What the cluster tells of itself and of its autoscaler; None where nobody does."""
        try:
            client = self._ray._raylet.GcsClient(self._ray.get_runtime_context().gcs_address)
            told = client.get_cluster_status(timeout_s=_REPLY_SECONDS)
            reply = import_module("ray.core.generated.autoscaler_pb2").GetClusterStatusReply()
        except (self._ray.exceptions.RayError, RuntimeError, ImportError, AttributeError):
            # Ray's own summary leaves this out, and what it is made of may be otherwise in another version.
            return None
        reply.ParseFromString(told)
        return reply


def _needed(resources: Mapping[str, float]) -> dict[str, float]:
    """Of some resources those that workers need."""
    return {name: amount for name, amount in resources.items() if name in _NAMES and amount}
