"""The pods of a cluster on Kubernetes: the head's, those of groups of workers, and what they mount."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from raymerge.deploy.profiles.values import (
    AbsolutePath,
    Affinity,
    Count,
    Label,
    Labels,
    MemoryQuantity,
    ObjectName,
    Quantity,
    ResourceName,
    SubPath,
    Switch,
    Text,
)
from raymerge.documents.entry import MapEntry, by
from raymerge.documents.faults import Fault
from raymerge.documents.fields import between, choice_of

_SOURCES = ("pvc", "empty_dir", "host_path", "secret", "config_map")


class Toleration(MapEntry):
    """A taint of nodes that pods put up with."""

    key: Text | None = None
    """The taint's key; None with ``Exists``: every taint."""
    operator: Annotated[Literal["Exists", "Equal"], by(choice_of("Exists", "Equal"))] = "Equal"
    """Whether the value counts."""
    value: Text | None = None
    """The taint's value, with ``Equal``."""
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None,
        by(choice_of("NoSchedule", "PreferNoSchedule", "NoExecute")),
    ] = None
    """The taint's effect; None: every one."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[Fault]:
        """Kubernetes refuses a value beside ``Exists``, and ``Equal`` without a key."""
        is_exists = data.get("operator") == "Exists"
        if is_exists and data.get("value") is not None:
            yield Fault(
                ("value",), "a value has no meaning with the operator Exists.", "Remove one of the two."
            )
        if not is_exists and data.get("key") is None:
            yield Fault(
                (), "a toleration without a key holds for every taint.", "Write operator: Exists too."
            )


class EmptyDir(MapEntry):
    """A directory of a pod, which goes with it."""

    size_limit: MemoryQuantity | None = None
    """Bytes that it may take; the pod is evicted beyond."""
    medium: Annotated[Literal["Memory"] | None, by(choice_of("Memory"))] = None
    """``Memory``: kept in memory, which counts as that of the pod; None: on the node's disk."""


class Volume(MapEntry):
    """A directory that pods mount, from one source."""

    name: Label
    """Its name in the pods."""
    mount_path: AbsolutePath
    """Where containers see it."""
    read_only: Switch = False
    """Whether nothing can be written to it."""
    pvc: ObjectName | None = None
    """A persistent volume claim; ReadWriteMany, for pods on several nodes."""
    sub_path: SubPath | None = None
    """A directory of the claim that is mounted in place of all of it; None: all."""
    empty_dir: EmptyDir | None = None
    """A directory of each pod's own."""
    host_path: AbsolutePath | None = None
    """A directory of each node; that of a shared file system where nodes are to see the same."""
    secret: ObjectName | None = None
    """Files that a secret holds."""
    config_map: ObjectName | None = None
    """Files that a config map holds."""

    @property
    def is_shared(self) -> bool:
        """Whether all pods may see the same files in it."""
        return self.pvc is not None or self.host_path is not None

    @property
    def is_writable(self) -> bool:
        """Whether files can be written to it."""
        return not self.read_only and self.secret is None and self.config_map is None

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[Fault]:
        """A volume has one source; only a claim is mounted in part."""
        given = [name for name in _SOURCES if data.get(name) is not None]
        if not given:
            yield Fault((), "the volume has no source.", f"Write one of: {', '.join(_SOURCES)}.")
        if len(given) > 1:
            what = f"the volume has {len(given)} sources, {' and '.join(given)}."
            yield Fault((given[1],), what, "Keep one of them.")
        if data.get("sub_path") is not None and data.get("pvc") is None:
            what = "only a volume with a claim has a sub_path."
            yield Fault(("sub_path",), what, "Remove it, or write pvc.")


class Head(MapEntry):
    """The pod that runs Ray's head and the driver; it computes nothing."""

    cpu: Quantity = "2"
    """Processors."""
    memory: MemoryQuantity = "8Gi"
    """Bytes."""
    node_selector: Labels = {}
    """Labels of nodes that it may be on."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that it puts up with."""
    affinity: Affinity | None = None
    """Nodes and pods that it is to be near or far from, as Kubernetes writes it."""
    runtime_class: ObjectName | None = None
    """What runs its containers; None: what runs all."""


class WorkerGroup(MapEntry):
    """Pods that are alike."""

    name: Label
    """Its name in the cluster."""
    replicas: Count = 1
    """Pods; with autoscaling, those at the beginning."""
    min_replicas: Count | None = None
    """The fewest pods with autoscaling; None: none."""
    max_replicas: Annotated[int | None, by(between(1))] = None
    """The most pods with autoscaling; None: ``replicas``."""
    cpu: Quantity
    """Processors of a pod."""
    memory: MemoryQuantity
    """Bytes of a pod."""
    gpus: Count = 0
    """GPUs of a pod."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """What Kubernetes calls them."""
    labels: Labels = {}
    """Labels of Ray's nodes."""
    node_selector: Labels = {}
    """Labels of Kubernetes' nodes that its pods may be on."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that its pods put up with."""
    affinity: Affinity | None = None
    """Nodes and pods that its pods are to be near or far from, as Kubernetes writes it."""
    runtime_class: ObjectName | None = None
    """What runs their containers, such as ``nvidia``; None: what runs all."""
    idle_timeout_seconds: Annotated[int | None, by(between(1))] = None
    """Seconds after which an idle pod goes, with autoscaling; None: as for all groups."""
    volumes: tuple[Volume, ...] | None = None
    """What its pods mount instead of the volumes of all; None: those."""
