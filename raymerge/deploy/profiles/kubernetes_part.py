"""The section of a profile for KubeRay on Kubernetes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from raymerge.deploy.profiles.kubernetes import Head, Volume, WorkerGroup
from raymerge.deploy.profiles.values import (
    Annotations,
    Count,
    Environment,
    Label,
    Labels,
    ObjectName,
    Positive,
    Switch,
)
from raymerge.documents.entry import MapEntry, by
from raymerge.documents.faults import Fault, FaultError, show
from raymerge.documents.fields import between, choice_of, read_text

_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+([A-Za-z0-9.]*)")
_MODES = ("HTTPMode", "K8sJobMode", "SidecarMode")
_UPSCALING = ("Default", "Conservative", "Aggressive")
_PULLING = ("IfNotPresent", "Always", "Never")


def _image(value: object) -> str:
    text = read_text(value)
    if _IMAGE.fullmatch(text) is None:
        what = f"{show(text)} is not the name of an image."
        raise FaultError(Fault((), what, "Write it like registry.example/raymerge:0.1.0."))
    if ":" not in text.rpartition("/")[2]:
        what = f"{show(text)} names no version: workers that start later could be another."
        raise FaultError(Fault((), what, "Add a tag, like :0.1.0, or a digest."))
    return text


def _version(value: object) -> str:
    text = read_text(value)
    if _VERSION.fullmatch(text) is None:
        raise FaultError(Fault((), f"{show(text)} is not a version of Ray.", "Write it like '2.60.0'."))
    return text


class Autoscaling(MapEntry):
    """Whether pods come and go with what is to be done."""

    enabled: Switch = False
    """Whether they do."""
    idle_timeout_seconds: Positive = 60
    """Seconds after which an idle pod goes."""
    upscaling_mode: Annotated[
        Literal["Default", "Conservative", "Aggressive"], by(choice_of(*_UPSCALING))
    ] = "Default"
    """How fast pods come."""


class SecurityContext(MapEntry):
    """Whom processes in containers run as. That is never root."""

    run_as_user: Annotated[int, by(between(1))] = 1000
    """Id of the user."""
    run_as_group: Annotated[int, by(between(1))] = 100
    """Id of the group."""
    fs_group: Annotated[int | None, by(between(1))] = 100
    """Id of the group that mounted volumes are given to; None: they are left as they are."""


class Kubernetes(MapEntry):
    """``kubernetes``: a Ray cluster that is made for a run, by KubeRay's operator."""

    namespace: Label = "default"
    """Where everything is."""
    image: Annotated[str, by(_image)]
    """Image with Ray, raymerge and what it needs, with its tag or digest."""
    image_pull_policy: Annotated[Literal["IfNotPresent", "Always", "Never"], by(choice_of(*_PULLING))] = (
        "IfNotPresent"
    )
    """When nodes pull it."""
    image_pull_secrets: tuple[ObjectName, ...] = ()
    """Secrets that open its registry."""
    service_account: ObjectName | None = None
    """Whom pods are to the cluster and, by workload identity, to object stores."""
    ray_version: Annotated[str, by(_version)]
    """Version of Ray in the image."""
    submission_mode: Annotated[Literal["HTTPMode", "K8sJobMode", "SidecarMode"], by(choice_of(*_MODES))] = (
        "HTTPMode"
    )
    """How the operator starts the driver."""
    token_auth: Switch = True
    """Whether Ray asks for a token."""
    token_secret: ObjectName | None = None
    """A secret that has it, below ``auth_token``; None: the operator makes one."""
    head: Head = Head()
    """The head's pod."""
    workers: tuple[WorkerGroup, ...]
    """Groups of workers' pods."""
    autoscaling: Autoscaling = Autoscaling()
    """Whether pods come and go."""
    volumes: tuple[Volume, ...] = ()
    """What all pods mount."""
    env: Environment = {}
    """Environment variables of all containers; no secrets."""
    env_from_secrets: tuple[ObjectName, ...] = ()
    """Secrets whose entries are environment variables of all containers."""
    queue: ObjectName | None = None
    """A local queue of Kueue that runs wait in; None: they begin at once."""
    priority_class: ObjectName | None = None
    """Priority class of all pods."""
    ttl_seconds: Count = 300
    """Seconds after its end at which a run's pods go."""
    backoff_limit: Count = 2
    """Times that a failed run is begun again; it goes on where it stopped."""
    active_deadline_seconds: Annotated[int | None, by(between(1))] = None
    """Seconds after which a run is ended; None: never."""
    termination_grace_seconds: Annotated[int, by(between(1))] = 60
    """Seconds from SIGTERM to SIGKILL of a pod."""
    labels: Labels = {}
    """Labels of everything that is made."""
    annotations: Annotations = {}
    """Annotations of everything that is made."""
    security: SecurityContext = SecurityContext()
    """Whom processes run as."""
