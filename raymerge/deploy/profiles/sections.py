"""The sections of a profile: run options, stores, clusters, and the pods of KubeRay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import PlainSerializer, PlainValidator, ValidationError

from raymerge.deploy.profiles.values import (
    AbsolutePath,
    Affinity,
    Annotations,
    Bytes,
    Count,
    Directory,
    Environment,
    Label,
    Labels,
    MemoryQuantity,
    ObjectName,
    Positive,
    Quantity,
    ResourceName,
    SubPath,
    Switch,
    Text,
    read_header_sources,
)
from raymerge.documents.fields import (
    Fault,
    FaultError,
    MapEntry,
    between,
    by,
    choice_of,
    faults_of,
    read_positive,
    read_text,
    refusal,
    show,
)
from raymerge.errors import OptionError
from raymerge.storage.addresses import NO_OPTIONS, StoreOptions

_HOST = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\]"
_GCS_ADDRESS = re.compile(rf"auto|({_HOST}):[0-9]{{1,5}}")
_SERVER = re.compile(rf"https?://({_HOST})(:[0-9]{{1,5}})?(/[A-Za-z0-9._~/-]*)?")
_MOST_THREADS = 256
_MOST_WORKERS = 10_000


class RunSettings(MapEntry):
    """``run``: options of a submission. None is the command line's default."""

    workers: Annotated[int | None, by(between(1, _MOST_WORKERS))] = None
    """Number of workers; an autoscaling cluster is asked for missing ones."""
    threads: Annotated[int | None, by(between(1, _MOST_THREADS))] = None
    memory: Bytes | None = None
    """Bytes that a worker may use beyond an idle one."""
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, by(choice_of("auto", "cpu", "cuda"))] = None
    patience: Annotated[float | None, by(read_positive)] = None
    """Seconds without progress after which a worker is replaced."""
    scratch: Directory | None = None
    steps: Directory | None = None
    """Directory for intermediate results of stages and merges."""


class _Storage(MapEntry):
    region: Text | None = None
    endpoint: Text | None = None
    anonymous: Switch = False
    profile: Text | None = None
    allow_http: Switch = False
    kms_key: Text | None = None
    requester_pays: Switch = False


def _store_options(value: object) -> StoreOptions:
    if isinstance(value, StoreOptions):
        return value
    try:
        fields = _Storage.model_validate(value)
    except ValidationError as error:
        raise FaultError(faults_of(error)) from None
    try:
        return StoreOptions(**fields.model_dump())
    except OptionError as error:
        # They say where by "storage: " and the name of the field.
        faults = (Fault((each.where.split()[-1],), each.what, each.remedy) for each in error.problems)
        raise FaultError(faults) from None


def _plain_options(options: StoreOptions) -> dict[str, object]:
    usual = asdict(NO_OPTIONS)
    return {name: value for name, value in asdict(options).items() if value != usual[name]}


Storage: TypeAlias = Annotated[StoreOptions, PlainValidator(_store_options), PlainSerializer(_plain_options)]


def _gcs_address(value: object) -> str:
    text = read_text(value)
    if text.startswith(("http://", "https://")):
        what = f"{show(text)} is the address of a dashboard."
        raise refusal(what, "Write it below 'job', with target: job.")
    if _GCS_ADDRESS.fullmatch(text) is None:
        what = f"{show(text)} is not the address of a Ray head."
        raise refusal(what, "Write HOST:PORT, like 10.0.0.1:6379, or auto.")
    return text


def _server(value: object) -> str:
    text = read_text(value)
    if _SERVER.fullmatch(text) is None:
        what = f"{show(text)} is not the address of a dashboard."
        raise refusal(what, "Write it like http://head:8265.")
    return text.rstrip("/")


class ClusterSection(MapEntry):
    """``cluster``: a Ray cluster, from inside it."""

    address: Annotated[str | None, by(_gcs_address)] = None
    """``HOST:PORT`` of the head, or ``auto`` for the cluster of this process."""
    autoscaling: Switch = False
    """Whether it adds nodes for waiting workers: those of ``run: {workers: N}`` without room join later."""


class JobSection(MapEntry):
    """``job``: a Ray cluster by its Jobs API, from anywhere."""

    address: Annotated[str | None, by(_server)] = None
    num_cpus: Annotated[float, by(between(0))] = 0
    """CPU slots that the driver takes; it computes nothing."""
    working_dir: Directory | None = None
    """A directory sent with the job; None: recipe and profile only."""
    env: Environment = {}
    headers_from_env: Annotated[Mapping[str, str] | None, by(read_header_sources)] = None
    """Request headers, each with the local environment variable that holds its value."""


_SOURCES = ("pvc", "empty_dir", "host_path", "secret", "config_map")


class Toleration(MapEntry):
    key: Text | None = None
    operator: Annotated[Literal["Exists", "Equal"], by(choice_of("Exists", "Equal"))] = "Equal"
    """``Equal``: the value has to match."""
    value: Text | None = None
    effect: Annotated[
        Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None,
        by(choice_of("NoSchedule", "PreferNoSchedule", "NoExecute")),
    ] = None

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterator[Fault]:
        """Kubernetes refuses a value with ``Exists``, and ``Equal`` without a key."""
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
    size_limit: MemoryQuantity | None = None
    """Bytes; the pod is evicted above it."""
    medium: Annotated[Literal["Memory"] | None, by(choice_of("Memory"))] = None
    """``Memory``: in memory, counted as the pod's; None: on the node's disk."""


class Volume(MapEntry):
    name: Label
    mount_path: AbsolutePath
    read_only: Switch = False
    pvc: ObjectName | None = None
    """A persistent volume claim; ReadWriteMany if pods are on several nodes."""
    sub_path: SubPath | None = None
    """The directory of the claim to mount; None: its root."""
    empty_dir: EmptyDir | None = None
    host_path: AbsolutePath | None = None
    """A directory of each node; of a shared filesystem if nodes have to see the same files."""
    secret: ObjectName | None = None
    config_map: ObjectName | None = None

    @property
    def is_shared(self) -> bool:
        return self.pvc is not None or self.host_path is not None

    @property
    def is_writable(self) -> bool:
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
    """The pod of Ray's head and the driver; it computes nothing."""

    cpu: Quantity = "2"
    memory: MemoryQuantity = "8Gi"
    node_selector: Labels = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity | None = None
    runtime_class: ObjectName | None = None


class WorkerGroup(MapEntry):
    name: Label
    replicas: Count = 1
    min_replicas: Count | None = None
    """With autoscaling; None: 0."""
    max_replicas: Annotated[int | None, by(between(1))] = None
    """With autoscaling; None: ``replicas``."""
    cpu: Quantity
    memory: MemoryQuantity
    gpus: Count = 0
    gpu_resource: ResourceName = "nvidia.com/gpu"
    labels: Labels = {}
    """Labels of Ray's nodes."""
    node_selector: Labels = {}
    tolerations: tuple[Toleration, ...] = ()
    affinity: Affinity | None = None
    runtime_class: ObjectName | None = None
    idle_timeout_seconds: Annotated[int | None, by(between(1))] = None
    """Seconds after which an idle pod is removed, with autoscaling; None: the cluster's."""
    volumes: tuple[Volume, ...] | None = None
    """Replaces the volumes of all pods, unless None."""


_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+([A-Za-z0-9.]*)")
_MODES = ("HTTPMode", "K8sJobMode", "SidecarMode")
_UPSCALING = ("Default", "Conservative", "Aggressive")
_PULLING = ("IfNotPresent", "Always", "Never")


def _image(value: object) -> str:
    text = read_text(value)
    if _IMAGE.fullmatch(text) is None:
        what = f"{show(text)} is not the name of an image."
        raise refusal(what, "Write it like registry.example/raymerge:0.1.0.")
    if ":" not in text.rpartition("/")[2]:
        what = f"{show(text)} names no version: workers that start later could be another."
        raise refusal(what, "Add a tag, like :0.1.0, or a digest.")
    return text


def _version(value: object) -> str:
    text = read_text(value)
    if _VERSION.fullmatch(text) is None:
        raise refusal(f"{show(text)} is not a version of Ray.", "Write it like '2.60.0'.")
    return text


class Autoscaling(MapEntry):
    enabled: Switch = False
    idle_timeout_seconds: Positive = 60
    upscaling_mode: Annotated[
        Literal["Default", "Conservative", "Aggressive"], by(choice_of(*_UPSCALING))
    ] = "Default"


class SecurityContext(MapEntry):
    """User and groups of processes in containers; never root."""

    run_as_user: Annotated[int, by(between(1))] = 1000
    run_as_group: Annotated[int, by(between(1))] = 100
    fs_group: Annotated[int | None, by(between(1))] = 100
    """Group that owns mounted volumes; None: unchanged."""


class Kubernetes(MapEntry):
    """``kubernetes``: a Ray cluster that KubeRay's operator creates for a run."""

    namespace: Label = "default"
    image: Annotated[str, by(_image)]
    """Image with Ray, raymerge and its dependencies, with tag or digest."""
    image_pull_policy: Annotated[Literal["IfNotPresent", "Always", "Never"], by(choice_of(*_PULLING))] = (
        "IfNotPresent"
    )
    image_pull_secrets: tuple[ObjectName, ...] = ()
    service_account: ObjectName | None = None
    """Identity of pods in the cluster and, by workload identity, in object stores."""
    ray_version: Annotated[str, by(_version)]
    submission_mode: Annotated[Literal["HTTPMode", "K8sJobMode", "SidecarMode"], by(choice_of(*_MODES))] = (
        "HTTPMode"
    )
    token_auth: Switch = True
    token_secret: ObjectName | None = None
    """A secret with the token at ``auth_token``; None: the operator makes one."""
    head: Head = Head()
    workers: tuple[WorkerGroup, ...]
    autoscaling: Autoscaling = Autoscaling()
    volumes: tuple[Volume, ...] = ()
    env: Environment = {}
    env_from_secrets: tuple[ObjectName, ...] = ()
    """Secrets whose entries are environment variables of all containers."""
    queue: ObjectName | None = None
    priority_class: ObjectName | None = None
    ttl_seconds: Count = 300
    """Seconds that pods of a finished run are kept."""
    backoff_limit: Count = 2
    """Retries of a failed run; each resumes."""
    active_deadline_seconds: Annotated[int | None, by(between(1))] = None
    """Limit of a run in seconds; None: no limit."""
    termination_grace_seconds: Annotated[int, by(between(1))] = 60
    """Seconds from SIGTERM to SIGKILL of a pod."""
    labels: Labels = {}
    annotations: Annotations = {}
    security: SecurityContext = SecurityContext()
