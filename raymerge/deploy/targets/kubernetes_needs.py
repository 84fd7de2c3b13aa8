"""What a RayJob rests on that has to be in its namespace already: asked for before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raymerge.deploy.targets.kubernetes_api import (
    CLAIMS,
    CONFIG_MAPS,
    NAMESPACES,
    PRIORITIES,
    QUEUES,
    RAY_JOBS,
    RUNTIME_CLASSES,
    SECRETS,
    SERVICE_ACCOUNTS,
    WHERE,
    AnswerError,
    Kind,
    Server,
)
from raymerge.errors import Problem

Json = dict[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_INSTALL = (
    "Have an administrator run `helm install kuberay-operator kuberay/kuberay-operator`, after "
    "`helm repo add kuberay https://ray-project.github.io/kuberay-helm/`."
)
_NOUNS = {
    SERVICE_ACCOUNTS: ("service account", "service_account"),
    SECRETS: ("secret", "the secrets"),
    CLAIMS: ("persistent volume claim", "the volumes"),
    CONFIG_MAPS: ("config map", "the volumes"),
    QUEUES: ("Kueue queue", "queue"),
    PRIORITIES: ("priority class", "priority_class"),
    RUNTIME_CLASSES: ("runtime class", "runtime_class"),
}
"""What people call it, and where the profile names it."""
_ACTS = (("create", RAY_JOBS), ("get", RAY_JOBS), ("list", RAY_JOBS), ("create", CONFIG_MAPS))
"""What sending a run takes."""


@dataclass(frozen=True, slots=True)
class Need:
    kind: Kind
    name: str


def needs(job: Json, own: str) -> list[Need]:
    """The objects that a RayJob names, each once, in the order of their kinds and names.

    Args:
        own: the config map that comes with it.
    """
    cluster = job["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"]]
    templates += [group["template"] for group in cluster.get("workerGroupSpecs", ())]
    found = {need for template in templates for need in _of_pod(template["spec"])}
    if secret := cluster.get("authOptions", {}).get("secretName"):
        found.add(Need(SECRETS, secret))
    if queue := job["metadata"].get("labels", {}).get(QUEUE_LABEL):
        found.add(Need(QUEUES, queue))
    found.discard(Need(CONFIG_MAPS, own))
    return sorted(found, key=lambda need: (need.kind.plural, need.name))


def missing(server: Server, job: Json, own: str) -> Iterator[Problem]:
    """Everything that stands in the way of a RayJob in a namespace.

    Raises:
        OptionError: the server does not answer.
    """
    if not server.has(RAY_JOBS):
        what = f"the cluster at {server.url} has no KubeRay: it does not know RayJobs (ray.io/v1)."
        yield Problem(WHERE, what, _INSTALL)
    try:
        if server.read(NAMESPACES, server.namespace) is None:
            what = f"the cluster at {server.url} has no namespace {server.namespace}."
            remedy = f"Run `kubectl create namespace {server.namespace}`, or name another in the profile."
            yield Problem(WHERE, what, remedy)
            return
    except AnswerError as error:
        # Somebody who may use one namespace may often not look at namespaces as such.
        if error.code != 403:
            raise
    yield from _forbidden(server)
    for need in needs(job, own):
        yield from _absent(server, need)


def _forbidden(server: Server) -> Iterator[Problem]:
    for verb, kind in _ACTS:
        if not server.permits(verb, kind):
            what = f"your credentials may not {verb} {kind.plural} in the namespace {server.namespace}."
            yield Problem(WHERE, what, "Ask an administrator for a role that allows it.")


def _absent(server: Server, need: Need) -> Iterator[Problem]:
    noun, field = _NOUNS[need.kind]
    try:
        if server.read(need.kind, need.name) is not None:
            return
    except AnswerError as error:
        # What may not be looked at may well be there; its pods will tell.
        if error.code == 403:
            return
        raise
    what = f"the namespace {server.namespace} has no {noun} {need.name}."
    yield Problem(WHERE, what, f"Create it, or change {field} of the profile.")


def _of_pod(spec: Json) -> Iterator[Need]:
    if account := spec.get("serviceAccountName"):
        yield Need(SERVICE_ACCOUNTS, account)
    if priority := spec.get("priorityClassName"):
        yield Need(PRIORITIES, priority)
    if runtime_class := spec.get("runtimeClassName"):
        yield Need(RUNTIME_CLASSES, runtime_class)
    for secret in spec.get("imagePullSecrets", ()):
        yield Need(SECRETS, secret["name"])
    for volume in spec.get("volumes", ()):
        yield from _of_volume(volume)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        yield from _of_environment(container)


def _of_volume(volume: Json) -> Iterator[Need]:
    if "persistentVolumeClaim" in volume:
        yield Need(CLAIMS, volume["persistentVolumeClaim"]["claimName"])
    if "secret" in volume and not volume["secret"].get("optional"):
        yield Need(SECRETS, volume["secret"]["secretName"])
    if "configMap" in volume and not volume["configMap"].get("optional"):
        yield Need(CONFIG_MAPS, volume["configMap"]["name"])


def _of_environment(container: Json) -> Iterator[Need]:
    for source in container.get("envFrom", ()):
        if "secretRef" in source and not source["secretRef"].get("optional"):
            yield Need(SECRETS, source["secretRef"]["name"])
        if "configMapRef" in source and not source["configMapRef"].get("optional"):
            yield Need(CONFIG_MAPS, source["configMapRef"]["name"])
    for variable in container.get("env", ()):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            yield Need(SECRETS, reference["name"])
